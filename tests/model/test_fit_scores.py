"""Scores in a model: fitted by the callback that the model brings, with every head, and from a checkpoint alone."""

import json
import math

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl.backbones.loading import Backbone
from brainet_pl.callbacks import Evaluation, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.fitting.scores import fit_scores
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.curves import separation
from brainet_pl.network import MLP, Bayes, Ensemble, Laplace, Linear, MCDropout, Tree, TreeDropout, TreeEnsemble
from brainet_pl.scores import KNN, Combined, Generative, Mahalanobis, Score, ScoreSet
from brainet_pl.scores.fitting import fit_score
from brainet_pl.tasks.passes import Passes

HEADS = [
    Tree(num_params=4000),
    TreeEnsemble(members=2, num_params=4000),
    TreeDropout(num_params=4000),
    Linear(),
    MLP(num_params=4000),
    MCDropout(num_params=4000),
    Ensemble(members=2, num_params=4000),
    Bayes(num_params=6000),
    Laplace(),
]


def together(results):
    """The metrics of all test loaders in one dictionary."""
    return {name: value for part in results for name, value in part.items()}


def digits():
    data = Digits()
    data.setup("fit")
    return data


def inputs(samples):
    return torch.stack([x for x, _ in samples])


def training_data():
    """(N, 64) features and labels (N,) in the order of the structure loader."""
    data = digits()
    return inputs(data.structure_set), torch.tensor([y for _, y in data.structure_set])


def aurocs(x, labels):
    """Score → how well it tells held-out digits from the test set, with no model around it."""
    data, scores, found = digits(), ScoreSet([KNN(normalize=False), Mahalanobis(normalize=False)]), []
    for score in scores:
        fit_score(score, x, labels)
    for samples in (data.test_set, data.ood_sets["held_out"]):
        empty = torch.zeros(1, len(samples), 8)
        found.append(scores(Passes(empty, None, inputs(samples), empty[0])))
    return {name: separation(found[0][name], found[1][name])["AUROC"] for name in found[0]}


def states(scores):
    return {name: value for name, value in scores.state_dict().items() if value.is_floating_point()}


# -- distances --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_distances_come_with_every_head(run, tmp_path, quiet_trainer, head):
    model = BRAINet(8, head=head, scores=["KNN", Mahalanobis()], passes=2)
    expected = aurocs(*training_data())  # no head has a part in it
    learn = StructureLearning(file=str(run / "structure.json"), progress=False)
    fit = quiet_trainer(tmp_path, learn, Evaluation(figures=False), limit_train_batches=2, limit_val_batches=1)
    fit.fit(model, datamodule=Digits())
    logged = together(fit.test(model, datamodule=Digits(), verbose=False))
    for name, value in expected.items():
        assert value > 0.7
        assert logged[f"ood/held_out/{name}/AUROC"] == pytest.approx(value, abs=1e-3)
    assert set(expected) <= set(model.predict_step(torch.rand(3, 64), 0))


def test_scores_are_fitted_to_all_training_data_and_travel_in_the_checkpoint(tmp_path, quiet_trainer):
    model = BRAINet(8, head=Linear(), scores=[KNN(k=3), Mahalanobis(normalize=False)])
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    quiet_trainer(tmp_path, checkpoint).fit(model, datamodule=Digits())
    again = BRAINet.load_from_checkpoint(checkpoint.last_model_path, weights_only=True)
    assert [score.describe() for score in again.scores] == [
        "KNN(k=3)",
        "Mahalanobis(normalize=False)",
        "Combined()",  # of these and the energy, for the verdict
    ]
    assert not again.scores.unfitted
    alone = ScoreSet([KNN(k=3, normalize=False), Mahalanobis(normalize=False)])  # inputs are read as they are
    for score in alone:
        fit_score(score, *training_data())
    x = inputs(digits().test_set)
    passes = again.predictor.passes(x)
    found, expected, before = again.scores(passes), alone(passes), model.scores(passes)
    for name in ("knn", "mahalanobis", "mahalanobis_relative"):
        torch.testing.assert_close(found[name], expected[name])
        assert torch.equal(found[name], before[name])


def test_scores_from_names_and_from_yaml(tmp_path, quiet_trainer):
    model = BRAINet(8, head="Linear", scores=["KNN", "Mahalanobis"])
    assert [type(score) for score in model.scores] == [KNN, Mahalanobis, Combined]
    text = "[{class_path: KNN, init_args: {k: 7}}, {class_path: brainet_pl.scores.Mahalanobis}]"
    model = BRAINet(8, head="Linear", scores=yaml.safe_load(text))
    assert [score.describe() for score in model.scores] == ["KNN(k=7)", "Mahalanobis()", "Combined()"]
    json.dumps(model.hparams["scores"])
    with pytest.raises(
        ValueError, match=r"expected scores to be one of Combined, FDBD, GEN, Generative, .*Mahalanobis.* got 'knn'"
    ):
        BRAINet(8, scores=["knn"])
    with pytest.raises(
        ValueError, match=r"settings of KNN \(k, max_rows, seed, normalize, layers, pool, name\), got neighbours"
    ):
        BRAINet(8, scores=[{"class_path": "KNN", "init_args": {"neighbours": 7}}])


def test_two_scores_of_one_name_are_refused():
    with pytest.raises(ValueError, match="expected scores of different names, got knn twice: leave one KNN out"):
        BRAINet(8, scores=[KNN(k=1), KNN(k=50)])


class Entropy(Score):
    """Has the name of a score of the prediction."""

    units = {"entropy": ""}  # noqa: RUF012

    def forward(self, passes):
        return {}


def test_a_score_may_not_have_a_name_of_the_prediction():
    with pytest.raises(ValueError, match="got entropy twice: leave one Entropy out"):
        BRAINet(8, scores=[Entropy()])
    assert len(BRAINet(task="Regression", scores=[Entropy()]).scores) == 1


class Norm(Score):
    """A score that needs no fit."""

    units = {"norm": ""}  # noqa: RUF012
    needs_fit = False

    def forward(self, passes):
        return {"norm": passes.features.norm(dim=1)}


def test_a_score_that_needs_no_fit_reads_no_training_data(tmp_path, quiet_trainer):
    model = BRAINet(8, head=Linear(), scores=[Norm()])
    fit = quiet_trainer(tmp_path, fast_dev_run=True)
    fit.fit(model, datamodule=Digits())
    assert model.training_features._all is None
    x = torch.rand(3, 64)
    torch.testing.assert_close(model.predict_step(x, 0)["norm"], x.norm(dim=1))


def test_a_regression_has_one_class(tmp_path, quiet_trainer):
    model = BRAINet(task="Regression", head=Linear(), scores=["KNN", "Mahalanobis"])
    fit = quiet_trainer(tmp_path, Evaluation(figures=False))
    fit.fit(model, datamodule=Digits())
    x, _ = training_data()
    distance = model.scores.members["Mahalanobis"]
    assert distance.means.shape == (1, 64)
    torch.testing.assert_close(distance.means[0], x.mean(dim=0))
    logged = together(fit.test(model, datamodule=Digits(), verbose=False))
    for name, value in aurocs(x, torch.zeros(len(x), dtype=torch.long)).items():
        assert logged[f"ood/held_out/{name}/AUROC"] == pytest.approx(value, abs=1e-3)
    assert logged["ood/held_out/n_ood"] == 354


def test_a_class_that_is_never_seen_is_no_class(tmp_path, quiet_trainer):
    model = BRAINet(20, head=Linear(), scores=["Mahalanobis"])
    loader = DataLoader(TensorDataset(torch.rand(160, 64), torch.arange(160) % 8), batch_size=32)
    quiet_trainer(tmp_path, fast_dev_run=True).fit(model, loader, loader)
    assert model.scores.members["Mahalanobis"].means.shape == (8, 64)


def test_scores_are_fitted_without_features_that_are_not_finite_which_stop_the_fit_at_their_batch(
    tmp_path, quiet_trainer
):
    x = torch.rand(40, 6)
    x[5, 2] = torch.nan
    loader = DataLoader(TensorDataset(x, torch.arange(40) % 2), batch_size=8)
    model = BRAINet(2, head=Linear(), scores=["KNN"])
    with (
        pytest.warns(UserWarning, match="without 1 of 40 training samples, row 5"),
        pytest.raises(ValueError, match="expected a finite loss, got nan in epoch 0, batch 0"),
    ):
        quiet_trainer(tmp_path).fit(model, loader)
    assert not model.scores.unfitted


def test_a_model_in_16_bits_keeps_its_scores_in_32(tmp_path, quiet_trainer):
    scores = [KNN(k=3), Mahalanobis(), Generative(progress=False)]
    model = BRAINet(8, head=Linear(), scores=scores)
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    fit = quiet_trainer(tmp_path, checkpoint, precision="bf16-true")
    fit.fit(model, datamodule=Digits())
    assert model.head.layers.weight.dtype == torch.bfloat16
    assert {value.dtype for value in states(model.scores).values()} <= {torch.float32, torch.float64}
    again = BRAINet.load_from_checkpoint(checkpoint.last_model_path, weights_only=True)
    for name, value in states(model.scores).items():
        assert torch.equal(states(again.scores)[name], value), name


def test_a_checkpoint_without_a_score_leaves_it_unfitted(tmp_path, quiet_trainer):
    plain, checkpoint = BRAINet(8, head=Linear(), scores=[]), ModelCheckpoint(tmp_path, save_last=True)
    quiet_trainer(tmp_path, checkpoint).fit(plain, datamodule=Digits())
    scores = ["KNN", "Mahalanobis", Generative(progress=False)]
    model = BRAINet(8, head=Linear(), scores=scores)
    quiet_trainer(tmp_path).fit(model, datamodule=Digits())
    assert not model.scores.unfitted
    quiet_trainer(tmp_path).test(model, datamodule=Digits(), ckpt_path=checkpoint.last_model_path, verbose=False)
    assert len(model.scores.unfitted) == 3
    assert not {"knn", "mahalanobis", "generative"} & set(model.predict_step(torch.rand(3, 64), 0))
    resumed = quiet_trainer(tmp_path, epochs=2)
    resumed.fit(model, datamodule=Digits(), ckpt_path=checkpoint.last_model_path)
    assert not model.scores.unfitted  # a fit goes on from there, and fits them


def test_a_checkpoint_brings_scores_that_the_model_was_not_given(tmp_path, quiet_trainer):
    model, checkpoint = BRAINet(8, head=Linear(), scores=[KNN(k=4)]), ModelCheckpoint(tmp_path, save_last=True)
    quiet_trainer(tmp_path, checkpoint).fit(model, datamodule=Digits())
    bare = BRAINet(8, head=Linear())
    test = quiet_trainer(tmp_path, Evaluation(figures=False))
    logged = together(test.test(bare, datamodule=Digits(), ckpt_path=checkpoint.last_model_path, verbose=False))
    assert logged["ood/held_out/knn/AUROC"] > 0.9
    assert bare.scores.members["KNN"].k == 4


def test_a_resumed_fit_fits_no_score_again(tmp_path, quiet_trainer, monkeypatch):
    model, checkpoint = BRAINet(8, head=Linear(), scores=["KNN"]), ModelCheckpoint(tmp_path, save_last=True)
    quiet_trainer(tmp_path, checkpoint).fit(model, datamodule=Digits())
    again = BRAINet(8, head=Linear(), scores=["KNN"])
    monkeypatch.setattr(KNN, "fit", lambda *_: pytest.fail("fitted again"))
    quiet_trainer(tmp_path, epochs=2).fit(again, datamodule=Digits(), ckpt_path=checkpoint.last_model_path)
    assert torch.equal(again.scores.members["KNN"].bank, model.scores.members["KNN"].bank)


def test_features_of_a_fit_that_failed_are_not_those_of_the_next(tmp_path, quiet_trainer, monkeypatch):
    """The features are kept while a fit is set up; another fit may have other data."""
    model = BRAINet(8, head=Linear(), scores=["KNN"])
    with monkeypatch.context() as patch:
        patch.setattr(KNN, "fit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quiet_trainer(tmp_path).fit(model, datamodule=Digits())
    x = torch.rand(40, 64)
    quiet_trainer(tmp_path).fit(model, DataLoader(TensorDataset(x, torch.arange(40) % 8), batch_size=8))
    torch.testing.assert_close(model.scores.members["KNN"].bank, x)


# -- densities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head", "kind"), [(Tree(num_params=8000), "gaussian"), (Linear(), "discrete")])
def test_generative_scores_come_with_every_head_and_from_the_checkpoint_alone(tmp_path, quiet_trainer, head, kind):
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=head, scores=[Generative(kind=kind, progress=False)], lr=0.01)
    fit = quiet_trainer(tmp_path, StructureLearning(threshold=0.1, progress=False), epochs=4)
    fit.fit(model, datamodule=Digits())
    fit.save_checkpoint(tmp_path / "model.ckpt")
    again = BRAINet.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    test = quiet_trainer(tmp_path, Evaluation(figures=False))
    logged = together(test.test(again, datamodule=Digits(), verbose=False))
    assert logged["ood/held_out/generative/AUROC"] > 0.75
    assert logged["ood/held_out/generative_weighted/AUROC"] > 0.75
    assert logged["ood/held_out/combined/AUROC"] > 0.85
    assert {"generative", "combined"} <= set(again.predict_step(torch.rand(3, 64), 0))
    ours, theirs = (m.scores.members["Generative"].reference for m in (model, again))
    assert ours.isfinite().all()
    assert torch.equal(ours, theirs)


def moving(scores):
    """A model whose backbone trains."""
    return BRAINet(
        8, backbone=Backbone(torch.nn.Linear(64, 16), head_layer="", freeze=False), head=Linear(), scores=scores
    )


def test_a_moving_backbone_is_fitted_again_before_every_validation(tmp_path, quiet_trainer, monkeypatch):
    model, seen = moving([Generative(progress=False)]), []
    weight = model.backbone.model.weight

    def watched(*args, **settings):
        seen.append(weight.detach().clone())
        return fit_scores(*args, **settings)

    monkeypatch.setattr("brainet_pl.lightning.fitted.fit_scores", watched)
    monkeypatch.setattr("brainet_pl.lightning.validation.fit_scores", watched)
    quiet_trainer(tmp_path, epochs=4).fit(model, datamodule=Digits())
    assert len(seen) == 5  # at the start and in four epochs
    torch.testing.assert_close(seen[-1], model.backbone.model.weight)
    assert not torch.equal(seen[0], seen[-1])


@pytest.mark.parametrize("validated", [True, False])
def test_a_checkpoint_has_scores_of_its_own_backbone(tmp_path, quiet_trainer, validated):
    model, checkpoint = moving(["KNN"]), ModelCheckpoint(tmp_path, save_last=True)
    settings = {} if validated else {"limit_val_batches": 0}
    quiet_trainer(tmp_path, checkpoint, epochs=2, **settings).fit(model, datamodule=Digits())
    stored = torch.load(checkpoint.last_model_path, weights_only=True)["state_dict"]
    stored = {name.removeprefix("predictor."): value for name, value in stored.items()}
    x, _ = training_data()
    features = torch.nn.functional.linear(x, stored["backbone.model.weight"], stored["backbone.model.bias"])
    torch.testing.assert_close(stored["scores.members.KNN.bank"], torch.nn.functional.normalize(features, dim=1))


def test_features_are_normalised_behind_a_backbone_only(tmp_path, quiet_trainer):
    """Of raw features the length tells a lot: four times a known input is an unknown one."""
    x, found = inputs(digits().test_set), []
    for backbone in (None, Backbone(torch.nn.Identity(), head_layer="")):
        model = BRAINet(8, backbone=backbone, head=Linear(), scores=[Generative(progress=False)])
        quiet_trainer(tmp_path).fit(model, datamodule=Digits())
        density = model.scores.members["Generative"].density
        assert density.normalize == (backbone is not None)
        known, unknown = (density.scores(k * x)["generative"] for k in (1, 4))
        found.append(separation(known, unknown)["AUROC"])
    assert found[0] > 0.99
    assert found[1] == pytest.approx(0.5, abs=0.01)


def test_a_tree_is_needed_for_the_generative_score(tmp_path, quiet_trainer):
    model = BRAINet(8, head=Linear(), scores=[Generative(threshold=None, progress=False)])
    with pytest.raises(RuntimeError, match=r"expected a learned tree .* got a head without one: give Generative"):
        quiet_trainer(tmp_path).fit(model, datamodule=Digits())


def test_the_tree_of_the_head_serves_the_density_too(run, tmp_path, quiet_trainer):
    model = BRAINet(8, head=Tree(num_params=4000), scores=[Generative(threshold=None)])
    learn = StructureLearning(file=str(run / "structure.json"), progress=False)
    quiet_trainer(tmp_path, learn, fast_dev_run=True).fit(model, datamodule=Digits())
    assert model.scores.members["Generative"].density.ggt == model.ggt


def test_only_the_validation_of_a_fit_sets_the_reference(tmp_path, quiet_trainer):
    model = BRAINet(8, head=Linear(), scores=[Generative(progress=False)])
    quiet_trainer(tmp_path, check_val_every_n_epoch=2).fit(model, datamodule=Digits())  # nothing but a sanity check
    score = model.scores.members["Generative"]
    assert score.reference.isnan().all()
    assert "combined" not in model.predict_step(torch.rand(3, 64), 0)
    quiet_trainer(tmp_path).validate(model, datamodule=Digits(), verbose=False)
    assert score.reference.isnan().all()
    quiet_trainer(tmp_path).fit(model, datamodule=Digits())
    passes = model.predictor.passes(inputs(digits().val_set))
    both = torch.stack([score(passes)["generative"], passes.scores["energy"]], dim=1)
    cut = math.ceil(0.02 * len(both))  # the strangest and the least strange count as those next to them
    columns = []
    for column in both.detach().T:
        ordered = sorted(column.tolist())
        columns.append(column.clamp(ordered[cut], ordered[-1 - cut]))
    both = torch.stack(columns, dim=1)
    expected = torch.stack([both.mean(dim=0), both.std(dim=0, correction=0)])
    torch.testing.assert_close(score.reference, expected, rtol=1e-3, atol=1e-3)
