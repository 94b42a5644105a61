"""Fit, checkpoints, resume, prediction and bad input, on the embedded digits."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from brainet_pl import Backbone
from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl._utils.stored import FORMAT
from brainet_pl.calibration import TemperatureScaling
from brainet_pl.callbacks import Evaluation, FeatureCache, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.features.training import batches_of
from brainet_pl.lightning.module import BRAINet
from brainet_pl.lightning.steps import train_size
from brainet_pl.network import MLP, Bayes, Ensemble, Laplace, Linear, MCDropout, Tree, TreeDropout, TreeEnsemble
from brainet_pl.scores import KNN, Generative
from brainet_pl.structure import GGT
from brainet_pl.tasks import Classification


def together(results):
    """The metrics of all test loaders in one dictionary."""
    return {name: value for part in results for name, value in part.items()}


def structure(**settings):
    return StructureLearning(**{"threshold": 0.1, "progress": False, **settings})


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, quiet_trainer):
    """One trained model, its checkpoint and its folder."""
    folder = tmp_path_factory.mktemp("fit")
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=Tree(num_params=8000), lr=0.01)
    checkpoint = ModelCheckpoint(folder / "checkpoints", save_last=True)
    fit = quiet_trainer(folder, structure(), checkpoint, epochs=6)
    fit.fit(model, datamodule=Digits())
    return model.eval(), Path(checkpoint.last_model_path), folder


def test_learns_and_reports_honest_metrics(fitted, quiet_trainer):
    model, _, folder = fitted
    results = together(quiet_trainer(folder).test(model, datamodule=Digits(), verbose=False))
    names = ["cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE", "cal/aECE", "cal/MCE", "cal/smECE", "sc/AURC"]
    names += ["sc/AUGRC", "sc/Risk@80Cov", "ens/Disagreement"]
    scaled = {f"test/scaled/{name}" for name in names if not name.startswith("ens")}
    assert set(results) == {f"test/{name}" for name in names} | scaled
    assert results["test/cls/Acc"] > 0.9
    data = Digits()
    data.setup("test")
    x, y = (torch.stack([torch.as_tensor(s[i]) for s in data.test_set]) for i in (0, 1))
    torch.manual_seed(0)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    assert results["test/cls/Acc"] == pytest.approx(accuracy, abs=0.02)


def test_a_checkpoint_is_all_it_takes(fitted):
    model, path, folder = fitted
    again = BRAINet.load_from_checkpoint(path, weights_only=True).eval()
    assert again.ggt == model.ggt
    x = torch.rand(5, 64)
    with torch.no_grad():
        torch.testing.assert_close(again.head.simultaneous(x), model.head.simultaneous(x))
    stored = torch.load(path, weights_only=True)
    json.dumps(stored["brainet"])  # primitives only
    assert GGT.from_json((folder / "checkpoints" / "structure.json").read_text()) == model.ggt


def test_resume_continues_without_learning_again(fitted, monkeypatch, quiet_trainer):
    _, path, folder = fitted
    model = BRAINet(8, head=Tree(num_params=8000), lr=0.01)
    learner = structure()
    monkeypatch.setattr("brainet_pl.fitting.structure.learn_structure", lambda *a, **k: pytest.fail("learned again"))
    resumed = quiet_trainer(folder, learner, epochs=7)
    resumed.fit(model, datamodule=Digits(), ckpt_path=str(path))
    assert resumed.current_epoch == 7
    bare = BRAINet(8, head=Tree(num_params=8000), lr=0.01)  # not even the callback is needed
    quiet_trainer(folder, epochs=7).fit(bare, datamodule=Digits(), ckpt_path=str(path))
    assert bare.ggt == model.ggt


def test_a_structure_file_can_be_given(fitted, tmp_path, quiet_trainer):
    model, _, folder = fitted
    other = BRAINet(8, head=Tree(num_params=8000))
    file = folder / "checkpoints" / "structure.json"
    quiet_trainer(tmp_path, structure(file=str(file)), fast_dev_run=True).fit(other, datamodule=Digits())
    assert other.ggt == model.ggt
    with pytest.raises(FileNotFoundError, match="expected a learned structure"):
        quiet_trainer(tmp_path, structure(file="nowhere.json"), fast_dev_run=True).fit(BRAINet(8), datamodule=Digits())


def test_predictions_come_with_their_uncertainty(fitted, quiet_trainer):
    model, _, folder = fitted
    batches = quiet_trainer(folder).predict(model, datamodule=Digits())
    first = batches[0]
    p = first["probabilities"].double().numpy()
    measures = {"one_minus_max_p", "max_logit", "energy", "entropy", "expected_entropy", "mutual_information"}
    density = {"generative", "generative_weighted", "combined", "joint"}  # that a model has by default
    assert set(first) == {"class", "probabilities", "known_p", "known"} | measures | density
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(first["class"], p.argmax(1))
    np.testing.assert_allclose(first["one_minus_max_p"], 1 - p.max(1), atol=1e-5)
    np.testing.assert_allclose(first["entropy"] - first["expected_entropy"], first["mutual_information"], atol=1e-5)


def test_unknown_digits_are_less_certain(fitted):
    model, _, _ = fitted
    data = Digits()
    data.setup("test")
    with torch.no_grad():
        known, unknown = (
            torch.cat([model.predict_step(b, 0)["entropy"] for b in loader]).mean()
            for loader in (data.predict_dataloader(), data.ood_dataloaders()["held_out"])
        )
    assert unknown > 2 * known


@pytest.mark.parametrize("inference", ["simultaneous", "enumerated"])
def test_other_ways_to_predict(fitted, inference):
    _, path, _ = fitted
    model = BRAINet.load_from_checkpoint(path, weights_only=True).eval()
    model.head.inference = inference
    with torch.no_grad():
        p = model(torch.rand(4, 64)).exp()
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)


HEADS = [
    Linear(),
    MLP(num_params=6000),
    MCDropout(num_params=6000),
    Ensemble(num_params=6000),
    Bayes(num_params=6000),
    Laplace(),
    TreeEnsemble(num_params=6000),
    TreeDropout(num_params=6000),
]


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_other_heads_fit_test_and_reload(head, tmp_path, quiet_trainer):
    model = BRAINet(8, head=head, lr=0.01)
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    fit = quiet_trainer(tmp_path, structure(), checkpoint, epochs=4)
    fit.fit(model, datamodule=Digits())
    results = together(fit.test(model, datamodule=Digits(), verbose=False))
    assert results["test/cls/Acc"] > 0.6
    again = BRAINet.load_from_checkpoint(checkpoint.last_model_path, weights_only=True)
    assert type(again.head) is type(model.head)
    assert again.head_settings == head
    assert again.ggt == model.ggt


def test_temperature_scaling_is_fitted_on_validation_data_and_travels_in_the_checkpoint(tmp_path, quiet_trainer):
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=Tree(num_params=8000), lr=0.01, calibration=TemperatureScaling())
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    fit = quiet_trainer(tmp_path, structure(), checkpoint, epochs=3)
    fit.fit(model, datamodule=Digits())
    again = BRAINet.load_from_checkpoint(checkpoint.last_model_path, weights_only=True)
    assert again.calibration.tau == model.calibration.tau != 1
    data = Digits()
    data.setup("test")
    quiet_trainer(tmp_path).validate(again, data.predict_dataloader(), verbose=False)
    assert again.calibration.tau == model.calibration.tau  # only the validation of a fit may set it
    results = together(fit.test(again, datamodule=Digits(), verbose=False))
    assert results["test/scaled/cls/Acc"] == results["test/cls/Acc"]
    assert results["test/scaled/cls/NLL"] != results["test/cls/NLL"]
    x = torch.rand(3, 64)
    with torch.no_grad():
        torch.manual_seed(0)
        scaled = again.eval()(x).exp()
        torch.manual_seed(0)
        plain = again.predictor.passes(x).predicted
    expected = plain.double() ** (1 / again.calibration.tau.item())
    torch.testing.assert_close(scaled.double(), expected / expected.sum(1, keepdim=True), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", [Tree(num_params=8000), Ensemble(num_params=8000)], ids=repr)
def test_a_learned_confidence_is_one_more_score(head, tmp_path, quiet_trainer):
    pl.seed_everything(0, verbose=False)
    model = BRAINet(task=Classification(8, loss="confidence"), head=head, lr=0.01)
    fit = quiet_trainer(tmp_path, structure(), Evaluation(figures=False), epochs=6)
    fit.fit(model, datamodule=Digits())
    assert model.task.price != 0.1
    results = together(fit.test(model, datamodule=Digits(), verbose=False))
    assert results["test/cls/Acc"] > 0.8
    assert results["ood/held_out/confidence/AUROC"] > 0.7


def test_a_fit_may_follow_a_validation(tmp_path, quiet_trainer):
    """Validation alone runs in inference mode, and the validation of a fit does not."""
    scores = [Generative(progress=False)]
    model = BRAINet(8, head=Tree(num_params=4000), scores=scores, calibration=TemperatureScaling())
    quiet_trainer(tmp_path, structure()).fit(model, datamodule=Digits())
    (before,) = quiet_trainer(tmp_path).validate(model, datamodule=Digits(), verbose=False)
    quiet_trainer(tmp_path, structure()).fit(model, datamodule=Digits())
    (after,) = quiet_trainer(tmp_path).validate(model, datamodule=Digits(), verbose=False)
    assert after["val/cls/NLL"] < before["val/cls/NLL"]  # it went on to learn
    assert not any(tensor.is_inference() for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor))


def test_the_sanity_check_fits_nothing(tmp_path, quiet_trainer):
    score = Generative(progress=False)
    model = BRAINet(8, head=Tree(num_params=4000), scores=[score], calibration=TemperatureScaling())
    quiet_trainer(tmp_path, structure(), check_val_every_n_epoch=2).fit(model, datamodule=Digits())
    assert model.calibration.tau == 1
    assert score.reference.isnan().all()


def test_a_checkpoint_without_a_score_leaves_it_unfitted(fitted, quiet_trainer):
    _, checkpoint, folder = fitted
    score = KNN()
    model = BRAINet(8, head=Tree(num_params=8000), scores=[score])
    quiet_trainer(folder, structure()).fit(model, datamodule=Digits())
    assert score.ready
    quiet_trainer(folder).test(model, datamodule=Digits(), ckpt_path=checkpoint, verbose=False)
    assert not score.ready


def test_a_checkpoint_brings_the_scores_that_it_has(tmp_path, quiet_trainer):
    model = BRAINet(8, head=Tree(num_params=8000), scores=[Generative(progress=False)])
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    quiet_trainer(tmp_path, structure(), checkpoint).fit(model, datamodule=Digits())
    other = BRAINet(8, head=Tree(num_params=8000))
    x = (torch.rand(4, 64), torch.zeros(4))
    quiet_trainer(tmp_path).test(other, datamodule=Digits(), ckpt_path=checkpoint.last_model_path, verbose=False)
    found, expected = (m.eval().predict_step(x, 0)["generative"] for m in (other, model))
    torch.testing.assert_close(found, expected)


class Body(nn.Module):
    """A small convolutional network with a classification layer to remove."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(48, 10)

    def forward(self, x):
        return self.fc(self.pool(self.body(x)).flatten(1))


def test_frozen_backbone_does_not_move_and_features_are_cached(tmp_path, quiet_trainer):
    model = BRAINet(8, backbone=Backbone(Body(), layers=None), head=Tree(num_params=6000), scores=[], lr=0.01)
    before = {k: v.clone() for k, v in model.backbone.state_dict().items()}
    calls = []
    model.backbone.register_forward_hook(lambda *a: calls.append(1))
    cache = FeatureCache(progress=False)
    data = Digits(images=True)
    fit = quiet_trainer(tmp_path, cache, structure(), epochs=6)
    fit.fit(model, datamodule=data)
    assert len(calls) <= 17  # each image once: 14 training and 3 validation batches, not 6 epochs of them
    for k, v in model.backbone.state_dict().items():
        torch.testing.assert_close(v, before[k.replace("base_layer.", "model.fc.")])
    results = together(quiet_trainer(tmp_path).test(model, datamodule=data, verbose=False))  # from images again
    assert results["test/cls/Acc"] > 0.2


def test_feature_cache_names_a_missing_validation_loader(tmp_path, monkeypatch, quiet_trainer):
    monkeypatch.setattr(Digits, "val_dataloader", lambda self: [])
    model = BRAINet(8, backbone=Body())
    with pytest.raises(RuntimeError, match="expected one validation DataLoader to cache features of, got list"):
        quiet_trainer(tmp_path, FeatureCache(progress=False)).fit(model, datamodule=Digits(images=True))


def test_fine_tuning_moves_the_backbone_at_its_own_rate(tmp_path, quiet_trainer):
    backbone = Backbone(Body(), freeze=False, lr=1e-4)
    model = BRAINet(8, backbone=backbone, head=Tree(num_params=6000), lr=1e-2)
    before = model.backbone.model.body[0].weight.clone()
    fit = quiet_trainer(tmp_path, structure(), epochs=1)
    fit.fit(model, datamodule=Digits(images=True))
    assert [group["lr"] for group in fit.optimizers[0].param_groups] == [1e-2, 1e-4]
    assert not torch.equal(model.backbone.model.body[0].weight, before)
    assert model.backbone.model.body[1].running_mean.abs().sum() > 0
    with pytest.raises(RuntimeError, match="expected a frozen backbone"):
        quiet_trainer(tmp_path, FeatureCache()).fit(
            BRAINet(8, Backbone(Body(), freeze=False)), datamodule=Digits(images=True)
        )


def test_optimizer_and_scheduler_are_the_users(tmp_path, quiet_trainer):
    model = BRAINet(
        task=Classification(8, label_smoothing=0.1),
        head=Tree(num_params=6000),
        lr=0.1,
        optimizer=lambda groups: torch.optim.SGD(groups, momentum=0.9),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    fit = quiet_trainer(tmp_path, structure(), epochs=2)
    fit.fit(model, datamodule=Digits())
    assert isinstance(fit.optimizers[0], torch.optim.SGD)
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025)


def test_the_structure_cache_sees_the_order_of_columns(tmp_path, quiet_trainer):
    """A tree is numbered by the columns of its data: shuffled columns must not find the old one."""
    x, y = torch.rand(200, 10).cumsum(1), torch.randint(3, (200,))
    order = torch.randperm(10)
    models = []
    for data in (x, x[:, order]):
        model = BRAINet(3, head=Tree(num_params=3000))
        loader = DataLoader(TensorDataset(data, y), batch_size=32)
        quiet_trainer(tmp_path, structure(threshold=0.2), fast_dev_run=True).fit(model, loader)
        models.append(model)
    first, second = (m.ggt.dag(m.ggt.map()) for m in models)
    assert len(list((tmp_path / "structures").glob("*.json"))) == 2
    np.testing.assert_array_equal(first[np.ix_(order, order)], second)


def test_max_rows_is_a_random_sample_and_subset_samplers_are_kept():
    x = torch.arange(1000.0)[:, None].repeat(1, 3) + torch.rand(1000, 3)
    loader = DataLoader(TensorDataset(x, torch.zeros(1000)), batch_size=50, sampler=SubsetRandomSampler(range(500)))
    rows = torch.cat([batch[0] for batch in batches_of(loader, 100)])[:, 0]
    assert len(rows) == 100
    assert rows.max() < 501
    assert 180 < rows.mean() < 320


def test_plain_loaders_work_without_a_datamodule(tmp_path, quiet_trainer):
    x, y = torch.rand(200, 10), torch.randint(3, (200,))
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = BRAINet(3, head=Tree(num_params=3000))
    quiet_trainer(tmp_path, structure(threshold=0.01)).fit(
        model, loader, DataLoader(TensorDataset(x, y), batch_size=32)
    )
    assert model.ggt.num_rows == 200


def test_one_sample_that_is_left_over_does_not_end_a_fit(tmp_path, quiet_trainer):
    """33 samples in batches of 8: the fifth batch has one, in every epoch."""
    x = torch.rand(33, 6, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0.5).long()), batch_size=8)
    model = BRAINet(2, head=Tree(num_params=2000))
    changed, before = [], []

    class Follow(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            before[:] = [p.detach().clone() for p in pl_module.parameters()]

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            changed.append(not all(map(torch.equal, before, pl_module.parameters())))

    trainer = quiet_trainer(tmp_path, structure(threshold=0.0), Follow(), epochs=2)
    with pytest.warns(UserWarning, match="the last batch of each epoch is one sample, .* left out: use drop_last=True"):
        trainer.fit(model, loader)
    assert changed == [True] * 4 + [False] + [True] * 4 + [False]


def test_one_sample_that_is_left_over_is_learned_from_where_nothing_normalises_by_the_batch(tmp_path, quiet_trainer):
    """A transformer's layer norm, which its blocks call `norm`, has no statistics of batches."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.dense = nn.LayerNorm(6), nn.Linear(6, 6)

        def forward(self, x):
            return x + self.dense(self.norm(x))

    x = torch.rand(17, 6, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0.5).long()), batch_size=8)
    model = BRAINet(2, Backbone(Block(), freeze=False, head_layer=""), head=Tree(num_params=2000, norm=None))
    losses = []

    class Follow(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(outputs)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the last batch of each epoch is one sample")
        quiet_trainer(tmp_path, structure(threshold=0.0), Follow()).fit(model, loader)
    assert len(losses) == 3
    assert None not in losses


def test_bad_input_says_what_to_do(tmp_path, quiet_trainer):
    with pytest.raises(RuntimeError, match=r"add the callback brainet_pl.callbacks.StructureLearning\(\)"):
        quiet_trainer(tmp_path).fit(BRAINet(8), datamodule=Digits())
    with pytest.raises(ValueError, match="expected 5 different names of classes, as num_classes says, got 8"):
        quiet_trainer(tmp_path).fit(BRAINet(5, head=Linear()), datamodule=Digits())
    data = Digits()
    data.setup("fit")
    with pytest.raises(ValueError, match="expected labels from 0 to 4, got 0 to 7"):
        quiet_trainer(tmp_path).fit(BRAINet(5, head=Linear()), data.train_dataloader())
    empty = DataLoader(TensorDataset(torch.empty(0, 4), torch.empty(0)), batch_size=2)
    with pytest.raises(ValueError, match="expected training data to extract features from, got no sample"):
        quiet_trainer(tmp_path, structure()).fit(BRAINet(2), empty)
    single = DataLoader(TensorDataset(torch.rand(20, 6), torch.zeros(20)), batch_size=1)
    with pytest.raises(ValueError, match="at least 2 samples in a training batch"):
        quiet_trainer(tmp_path, structure(threshold=0.0)).fit(BRAINet(2, head=Tree(num_params=2000)), single)
    with pytest.raises(ValueError, match="passes of at least 1"):
        BRAINet(2, passes=0)
    with pytest.raises(
        ValueError, match=r"expected head to be one of Bayes, Ensemble, Laplace, Linear, MCDropout.*got 'tree'"
    ):
        BRAINet(8, head="tree")
    with pytest.raises(ValueError, match="expected num_classes for classification"):
        BRAINet()
    with pytest.raises(ValueError, match="got num_classes=3 and Classification"):
        BRAINet(3, task=Classification(4))
    with pytest.raises(ValueError, match=r"expected the task Classification for TemperatureScaling, got Regression"):
        BRAINet(task="Regression", calibration="TemperatureScaling")
    with pytest.raises(ValueError, match=r"expected settings of Linear .it has none., got members, min_width"):
        BRAINet(3, head={"class_path": "Linear", "init_args": {"members": 9, "min_width": 99}})


def test_a_foreign_checkpoint_is_refused(tmp_path, fitted):
    _, path, _ = fitted
    stored = torch.load(path, weights_only=True)
    del stored["brainet"]
    torch.save(stored, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match="expected a checkpoint of BRAINet"):
        BRAINet.load_from_checkpoint(tmp_path / "foreign.ckpt", weights_only=True)


def test_a_checkpoint_of_another_version_is_refused(tmp_path, fitted, quiet_trainer):
    _, path, _ = fitted
    stored = torch.load(path, weights_only=True)
    stored["brainet"]["format"] = 1
    torch.save(stored, tmp_path / "old.ckpt")
    refused = rf"expected a checkpoint, a BRAINet of format {FORMAT}, got 'BRAINet' of format 1: load it"
    with pytest.raises(ValueError, match=refused):
        BRAINet.load_from_checkpoint(tmp_path / "old.ckpt", weights_only=True)
    with pytest.raises(ValueError, match=refused):
        quiet_trainer(tmp_path).test(BRAINet(8), datamodule=Digits(), ckpt_path=tmp_path / "old.ckpt", verbose=False)


def test_a_module_as_backbone_must_be_given_again(tmp_path, quiet_trainer):
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    model = BRAINet(8, backbone=Body(), head=Linear())
    quiet_trainer(tmp_path, checkpoint).fit(model, datamodule=Digits(images=True))
    path = checkpoint.last_model_path
    with pytest.raises(ValueError, match=r"expected a backbone of the class Body, got none.*backbone=module"):
        BRAINet.load_from_checkpoint(path, weights_only=True)
    again = BRAINet.load_from_checkpoint(path, weights_only=True, backbone=Body())
    x = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(again.eval()(x), model.eval()(x))


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
@pytest.mark.parametrize("derived", [False, True])
def test_strategies_that_wrap_models_are_refused_with_the_way_to_fsdp2(tmp_path, package, name, derived, quiet_trainer):
    fit = quiet_trainer(tmp_path)
    model = BRAINet(8)
    kind = type(name, (), {"__module__": f"{package}.strategies"})
    name = f"Ray{name}" if derived else name
    strategy = type(name, (kind,), {})() if derived else kind()
    object.__setattr__(fit, "_accelerator_connector", type("C", (), {"strategy": strategy})())
    with pytest.raises(RuntimeError, match=rf"got {name}: .*strategy=ModelParallelStrategy\(data_parallel_size=N"):
        structure().setup(fit, model, "fit")


def test_bayes_trains_with_its_divergence(tmp_path, monkeypatch, quiet_trainer):
    """The loss of a step is the task's plus KL over the number of training samples."""
    model = BRAINet(8, head=Bayes(num_params=4000))
    seen = {}
    step = BRAINet.training_step

    def watched(self, batch, i):
        torch.manual_seed(i)
        loss = step(self, batch, i)
        torch.manual_seed(i)
        x, y = batch
        plain = self.task.loss(self.head(self.predictor.read(x).features), y)
        seen[i] = (loss - plain).item(), self.head.penalty().item() / train_size(self.trainer)
        return loss

    monkeypatch.setattr(BRAINet, "training_step", watched)
    quiet_trainer(tmp_path, limit_train_batches=2).fit(model, datamodule=Digits())
    for extra, divergence in seen.values():
        assert divergence > 0.1
        assert extra == pytest.approx(divergence, rel=1e-3)


def test_a_backbone_learns_ten_times_slower_unless_told():
    model = BRAINet(8, backbone=Backbone(Body(), freeze=False), head=Linear(), lr=0.02)
    model.predictor.build_head(model.head_settings, 48)
    rates = [group["lr"] for group in model.configure_optimizers().param_groups]
    assert rates == pytest.approx([0.02, 0.002])


DDP = """
import json, sys
from brainet_pl._utils.framework import pl
import torch
from brainet_pl.callbacks import StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.features.training import batches_of
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Tree


class Report(pl.Callback):
    def on_train_end(self, trainer, module):
        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        facts = {"fingerprint": module.ggt.fingerprint, "finite": bool(flat.isfinite().all())}
        facts |= {"sum": flat.double().sum().item(), "max": flat.abs().max().item()}
        with open(f"{sys.argv[1]}/rank{trainer.global_rank}.json", "w") as file:
            json.dump(facts, file)


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    callbacks = [StructureLearning(threshold=0.1, progress=False), Report()]
    ddp = dict(accelerator="cpu", devices=2, strategy="ddp_spawn")
    trainer = pl.Trainer(max_epochs=2, default_root_dir=sys.argv[1], callbacks=callbacks, **ddp, **quiet)
    trainer.fit(BRAINet(8, head=Tree(num_params=6000, sampling=sys.argv[2])), datamodule=Digits())
"""


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["sample", "batch"])
def test_two_processes_agree(tmp_path, sampling):
    script = tmp_path / "script.py"
    script.write_text(DDP)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), sampling], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    a, b = (json.loads((tmp_path / f"rank{i}.json").read_text()) for i in (0, 1))
    assert a == b
    assert a["finite"]


def test_a_density_comes_by_default_where_features_do_not_move():
    def named(**settings):
        return list(BRAINet(3, **settings).scores.members)

    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    assert named() == ["Generative", "Combined"]
    assert named(backbone=Backbone(net)) == named(backbone=Backbone(net), calibration="DensityScaling")
    assert named(backbone=Backbone(net)) == ["Stages", "Combined"]
    assert named(backbone=Backbone(net, freeze=False)) == named(scores=[]) == []  # it would be fitted every epoch
