import csv

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.metrics import roc_curve as sklearn_roc
from torch.utils.data import DataLoader

from brainet_pl.callbacks import GenerativeFit, OODEvaluation, StructureLearning
from brainet_pl.callbacks.ood import group_means
from brainet_pl.datamodules import Digits
from brainet_pl.module import BRAINet
from brainet_pl.ood import ood_metrics

numbers = st.sampled_from([0.0, 0.1, 0.1, 0.5, 1.0, -3.0, 1e30, float("inf"), float("-inf"), 1 / 3])


@settings(max_examples=200, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=30), st.lists(numbers, min_size=1, max_size=30))
def test_against_sklearn_with_ties_and_infinities(known, unknown):
    got = ood_metrics(torch.tensor(known), torch.tensor(unknown))
    # sklearn takes no infinities: ranks keep the order and the ties
    scores = np.unique(np.array(known + unknown, dtype=np.float32), return_inverse=True)[1].astype(float)
    labels = np.r_[np.zeros(len(known)), np.ones(len(unknown))]
    fpr, tpr, _ = sklearn_roc(labels, scores, drop_intermediate=False)
    assert got["AUROC"] == pytest.approx(roc_auc_score(labels, scores))
    assert got["AUPR_out"] == pytest.approx(average_precision_score(labels, scores))
    assert got["AUPR_in"] == pytest.approx(average_precision_score(1 - labels, -scores))
    assert got["FPR95"] == pytest.approx(fpr[tpr >= 0.95].min())
    assert got["DetErr"] == pytest.approx((0.5 * (fpr + 1 - tpr)).min())
    assert (got["n_id"], got["n_ood"]) == (len(known), len(unknown))


def test_bad_scores_are_named():
    with pytest.raises(ValueError, match="expected scores of unknown inputs, got none"):
        ood_metrics(torch.rand(3), torch.empty(0))
    with pytest.raises(ValueError, match="1 NaN of known inputs"):
        ood_metrics(torch.tensor([0.0, float("nan")]), torch.rand(3))


def trainer(folder, *callbacks):
    return pl.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder), callbacks=list(callbacks),
    )  # fmt: skip


def test_held_out_digits_are_found(tmp_path):
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, num_params=8000, lr=0.01)
    fit = trainer(tmp_path, StructureLearning(threshold=0.1, progress=False), OODEvaluation())
    fit.fit(model, datamodule=Digits())
    results = fit.test(model, datamodule=Digits(), verbose=False)
    logged = {k: v for part in results for k, v in part.items()}
    assert logged["test/cls/Acc"] > 0.85
    assert logged["ood/held_out/entropy/AUROC"] > 0.85
    assert len([k for k in logged if k.startswith("ood/held_out/")]) == 6 * 7
    rows = list(csv.DictReader((tmp_path / "scores.csv").open()))
    known = torch.tensor([float(r["entropy"]) for r in rows if r["set"] == "test"])
    unknown = torch.tensor([float(r["entropy"]) for r in rows if r["set"] == "held_out"])
    again = ood_metrics(known, unknown)
    assert again["n_ood"] == logged["ood/held_out/entropy/n_ood"] == 354
    assert again["AUROC"] == pytest.approx(logged["ood/held_out/entropy/AUROC"], abs=1e-4)


def test_a_set_that_was_not_evaluated_fails_loudly(tmp_path, monkeypatch):
    model = BRAINet(8, num_params=8000)
    fit = trainer(tmp_path, StructureLearning(threshold=0.1, progress=False), OODEvaluation())
    data = Digits()
    fit.fit(model, datamodule=data)
    monkeypatch.setattr(Digits, "test_dataloader", Digits.predict_dataloader)
    with pytest.raises(RuntimeError, match="got none of held_out"):
        fit.test(model, datamodule=data, verbose=False)


@pytest.mark.parametrize(("head", "kind"), [("brainet", "gaussian"), ("linear", "discrete")])
def test_generative_scores_come_with_every_head_and_from_the_checkpoint_alone(tmp_path, head, kind):
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=head, num_params=8000, lr=0.01)
    learn = [StructureLearning(threshold=0.1, progress=False), GenerativeFit(kind=kind, progress=False)]
    fit = trainer(tmp_path, *learn, OODEvaluation())
    fit.fit(model, datamodule=Digits())
    fit.save_checkpoint(tmp_path / "model.ckpt")
    again = BRAINet.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    results = trainer(tmp_path, OODEvaluation()).test(again, datamodule=Digits(), verbose=False)
    logged = {k: v for part in results for k, v in part.items()}
    assert logged["ood/held_out/generative/AUROC"] > 0.75
    assert logged["ood/held_out/generative_weighted/AUROC"] > 0.75
    assert logged["ood/held_out/combined/AUROC"] > 0.85
    assert {"generative", "combined"} <= set(again.predict_step(torch.rand(3, 64), 0))
    torch.testing.assert_close(again.generative.reference, model.generative.reference)


def test_a_moving_backbone_is_fitted_again_before_every_validation(tmp_path):
    model = BRAINet(8, backbone=torch.nn.Linear(64, 16), head_layer="", freeze_backbone=False, num_params=4000)
    calls = []
    callback = GenerativeFit(progress=False)
    fitted = callback._fit
    callback._fit = lambda *args: (calls.append(model.backbone.model.weight.detach().clone()), fitted(*args))
    fit = trainer(tmp_path, StructureLearning(progress=False), callback)
    fit.fit(model, datamodule=Digits())
    assert len(calls) == 5  # at the start and in four epochs
    torch.testing.assert_close(calls[-1], model.backbone.model.weight)
    assert not torch.equal(calls[0], calls[-1])


def test_a_moving_backbone_without_validation_is_fitted_after_every_epoch(tmp_path):
    model = BRAINet(8, backbone=torch.nn.Linear(64, 16), head_layer="", freeze_backbone=False, num_params=4000)
    seen = []
    callback = GenerativeFit(progress=False)
    fitted = callback._fit
    callback._fit = lambda *args: (seen.append(model.backbone.model.weight.detach().clone()), fitted(*args))
    fit = trainer(tmp_path, StructureLearning(progress=False), callback)
    fit.limit_val_batches = 0
    fit.fit(model, datamodule=Digits())
    torch.testing.assert_close(seen[-1], model.backbone.model.weight, atol=0, rtol=0)


def test_features_are_normalised_behind_a_backbone_only(tmp_path):
    """Of raw features the length tells a lot: four times a known input is an unknown one."""
    raw, behind = BRAINet(8, head="linear"), BRAINet(8, head="linear", backbone=torch.nn.Identity(), head_layer="")
    x = torch.stack([x for x, _ in digits().test_set])
    found = []
    for model in (raw, behind):
        trainer(tmp_path, GenerativeFit(progress=False)).fit(model, datamodule=Digits())
        known, unknown = (model.generative.scores(k * x)["generative"] for k in (1, 4))
        found.append(ood_metrics(known, unknown)["AUROC"])
    assert (raw.generative.normalize, behind.generative.normalize) == (False, True)
    assert found[0] > 0.99
    assert found[1] == pytest.approx(0.5, abs=0.01)


def digits():
    data = Digits()
    data.setup("test")
    return data


def test_a_tree_is_needed_for_the_generative_score(tmp_path):
    with pytest.raises(RuntimeError, match=r"expected a learned tree .* got head 'linear'"):
        trainer(tmp_path, GenerativeFit(threshold=None, progress=False)).fit(
            BRAINet(8, head="linear"), datamodule=Digits()
        )


def test_near_and_far_sets_are_averaged_apart():
    found = {name: {"entropy": {"AUROC": i / 10, "n_ood": 5.0}} for i, name in enumerate(("a", "b", "c", "d"))}
    means = group_means(found, ("b", "c"))
    assert means["near_mean"]["entropy"] == pytest.approx({"AUROC": 0.15, "n_ood": 10.0})
    assert means["far_mean"]["entropy"] == pytest.approx({"AUROC": 0.15, "n_ood": 10.0})
    assert group_means(found, ()) == {}
    assert set(group_means(found, ("a",))) == {"far_mean"}


def test_a_near_set_that_does_not_exist_stops_the_test_before_its_work(tmp_path, monkeypatch):
    model = BRAINet(8, head="linear")
    model.build_head(64)
    data = Digits()
    data.near = ("elsewhere",)
    monkeypatch.setattr(BRAINet, "test_step", lambda *_: pytest.fail("the test ran"))
    with pytest.raises(ValueError, match=r"expected near to name .*\(held_out\), got elsewhere"):
        trainer(tmp_path, OODEvaluation()).test(model, datamodule=data, verbose=False)


def test_scores_are_written_without_unknown_sets_too(tmp_path):
    model = BRAINet(8, head="linear")
    model.build_head(64)
    data = digits()
    logged = trainer(tmp_path, OODEvaluation()).test(model, dataloaders=DataLoader(data.test_set, 64), verbose=False)
    assert not [name for name in logged[0] if name.startswith("ood/")]
    rows = list(csv.DictReader((tmp_path / "scores.csv").open()))
    assert len(rows) == len(data.test_set)
    assert {row["set"] for row in rows} == {"test"}
