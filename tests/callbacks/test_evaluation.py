"""What a test leaves: numbers against the metrics that were logged, sets by the names of their loaders, any module."""

import csv
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

import brainet_pl
from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import Evaluation, StructureLearning
from brainet_pl.callbacks import evaluation as evaluation_module
from brainet_pl.datamodules import Digits
from brainet_pl.evaluation import charts
from brainet_pl.evaluation import record as record_module
from brainet_pl.evaluation.doubtful import thumbnail
from brainet_pl.evaluation.record import SampleBatch
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.catalogue import SEPARATION
from brainet_pl.metrics.curves import separation
from brainet_pl.metrics.measures import NegativeLogLikelihood
from brainet_pl.metrics.passes import trace_passes
from brainet_pl.network import Linear, Tree, TreeDropout, TreeEnsemble
from brainet_pl.structure import GGT
from brainet_pl.tasks import Classification

PREDICTIVE = ["one_minus_max_p", "max_logit", "energy", "entropy", "expected_entropy", "mutual_information"]
OF_THE_DENSITY = ["generative", "generative_weighted", "combined", "joint"]  # that a model has by default


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def stored(folder):
    return json.loads((folder / "record.json").read_text())


def values(record):
    """The metrics of a record by their keys."""
    return {metric["key"]: metric["value"] for metric in record["metrics"]}


def together(results):
    """The metrics of all test loaders in one dictionary."""
    return {name: value for part in results for name, value in part.items()}


def digits_set():
    data = Digits()
    data.setup("test")
    return data.test_set


def linear(**settings):
    """A model of 64 features that can be tested at once."""
    model = BRAINet(8, head=Linear(), **settings)
    model.predictor.build_head(model.head_settings, 64)
    return model


def on_the_tree(run, *args, **settings):
    """A model on the tree of the run, with random weights."""
    torch.manual_seed(0)
    model = BRAINet(*args, **settings)
    model.set_structure(GGT.from_json((run / "structure.json").read_text()))
    return model


# -- a run ------------------------------------------------------------------------------------------------------------


def test_numbers_of_the_record_are_those_of_the_metrics(run):
    record = stored(run)
    metrics, alts = values(record), {chart["name"]: chart["alt"] for chart in record["charts"]}
    logged = {}
    for row in read(run / "metrics.csv"):
        logged |= {name: float(value) for name, value in row.items() if value}
    assert set(metrics) == {name for name in logged if name.startswith("test/")}
    for name, value in metrics.items():
        assert value == pytest.approx(logged[name], rel=1e-6)
    assert {row["set"] for row in record["separation"]} == {"held_out"}
    assert [row["score"] for row in record["separation"]] == [*PREDICTIVE, *OF_THE_DENSITY]
    measures = {name: better for name, better in SEPARATION.items() if name != "AUROC_full"}  # nothing is shifted here
    for row in record["separation"]:
        assert row.keys() == {"set", "score", *measures}
        for measure, better in measures.items():
            part = "" if better is None else f"{row['score']}/"
            assert row[measure] == pytest.approx(logged[f"ood/held_out/{part}{measure}"], rel=1e-6)
    before, after = (100 * metrics[f"test/{part}cal/ECE"] for part in ("", "scaled/"))
    assert f"before calibration, expected calibration error {before:.2f}\u00a0%" in alts["test/reliability"]
    assert f"expected calibration error {after:.2f}\u00a0%" in alts["test/reliability"]
    assert f"to {metrics['test/cls/NLL']:.3f}" in alts["test/passes"]
    assert f"to {100 * (1 - metrics['test/cls/Acc']):.2f}\u00a0%" in alts["test/passes"]
    assert f"{100 * (1 - metrics['test/cls/Acc']):.2f}\u00a0% when all" in alts["test/risk_coverage"]
    looked = [part.pop("unknown") for part in record["sets"]]
    assert [count / n for count, n in zip(looked, (433, 354), strict=True)] == [
        pytest.approx(logged[f"verdict/{name}/Unknown"], rel=1e-6) for name in ("test", "held_out")
    ]
    assert record["sets"] == [
        {"name": "test", "samples": 433, "role": "known"},
        {"name": "held_out", "samples": 354, "role": "near"},
    ]
    assert (run / "structure.json").is_file()
    for row, other in zip(read(run / "tables" / "ood_table.csv"), record["separation"], strict=True):
        assert {name: str(value) for name, value in other.items()} == row
    scores = read(run / "scores.csv")
    labels = [row["set"] != "test" for row in scores]
    auroc = roc_auc_score(labels, [float(row["energy"]) for row in scores])
    assert f"energy {auroc:.3f}" in alts["ood/held_out/curves"]
    for figure in record["figures"]:
        assert (run / "figures" / figure["file"]).is_file()
    for name in [*alts, "test/confusion"]:
        assert (run / "figures" / f"{name.replace('/', '_')}.png").is_file()
    hits = sum(row[i] for i, row in enumerate(record["confusion"]["counts"]))
    assert hits / 433 == pytest.approx(metrics["test/cls/Acc"])
    assert (run / "report.html").is_file()
    assert (record["seed"], record["settings"]["passes"]) == (0, 15)


def test_the_model_in_one_line(run):
    ggt = GGT.from_json((run / "structure.json").read_text())
    model = stored(run)["model"]
    assert (model["head"], model["task"], model["passes"]) == ("Tree", "Classification", 4)  # all of four
    assert model["head_parameters"] == pytest.approx(8000, rel=0.02)
    assert model["temperature"] > 0  # settled on validation data: tests/network/test_settle.py
    assert ggt.perplexity(model["temperature"]) == pytest.approx(model["perplexity"])


def test_the_most_uncertain_samples_are_those_of_the_score_file(run):
    rows = read(run / "tables" / "test_most_uncertain.csv")
    known = [row for row in read(run / "scores.csv") if row["set"] == "test"]
    expected = sorted(known, key=lambda row: -float(row["entropy"]))[:4]
    assert [row["sample"] for row in rows] == [row["sample"] for row in expected]
    samples, images = digits_set(), load_digits().data / 16.0
    for row, other in zip(rows, expected, strict=True):
        assert float(row["mutual_information"]) == pytest.approx(float(other["mutual_information"]), abs=1e-6)
        x, label = samples[int(row["sample"])]
        assert int(row["label"]) == label
        assert float(row["probability"]) == pytest.approx(1 - float(row["one_minus_max_p"]), abs=1e-6)
        assert np.isclose(images, x.numpy()).all(axis=1).any()
        picture = matplotlib.image.imread(run / "tables" / row["picture"])[::8, ::8, 0]
        np.testing.assert_allclose(picture, (x / x.max()).view(8, 8).numpy(), atol=1 / 255)
    (table,) = (table for table in stored(run)["tables"] if table["name"] == "test/most_uncertain")
    assert [row[0] for row in table["rows"]] == [int(row["sample"]) for row in rows]
    assert [row[1] for row in table["rows"]] == [{"picture": row["picture"]} for row in rows]


def test_held_out_digits_are_found(tmp_path, quiet_trainer):
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=Tree(num_params=8000), scores=[], lr=0.01)
    learn = StructureLearning(threshold=0.1, progress=False)
    fit = quiet_trainer(tmp_path, learn, Evaluation(figures=False), epochs=4)
    fit.fit(model, datamodule=Digits())
    logged = together(fit.test(model, datamodule=Digits(), verbose=False))
    assert logged["test/cls/Acc"] > 0.85
    assert logged["ood/held_out/entropy/AUROC"] > 0.85
    assert len([k for k in logged if k.startswith("ood/held_out/")]) == 6 * 6 + 2  # measures, counts
    rows = read(tmp_path / "scores.csv")
    known, unknown = (
        torch.tensor([float(r["entropy"]) for r in rows if r["set"] == name]) for name in ("test", "held_out")
    )
    again = separation(known, unknown)
    assert again["n_ood"] == logged["ood/held_out/n_ood"] == 354
    assert again["AUROC"] == pytest.approx(logged["ood/held_out/entropy/AUROC"], abs=1e-4)


def test_without_figures_metrics_scores_and_the_record_stay(tmp_path, quiet_trainer):
    logged = together(
        quiet_trainer(tmp_path, Evaluation(figures=False)).test(linear(), datamodule=Digits(), verbose=False)
    )
    assert "ood/held_out/entropy/AUROC" in logged
    record = stored(tmp_path)
    assert (record["figures"], record["tables"]) == ([], [])
    assert len(record["separation"]) == 6
    assert len(read(tmp_path / "scores.csv")) == 433 + 354
    assert not (tmp_path / "figures").exists()
    assert not (tmp_path / "tables").exists()


def test_scores_are_written_without_unknown_sets_too(tmp_path, quiet_trainer):
    trainer = quiet_trainer(tmp_path, Evaluation(score_file="all.csv"))
    logged = trainer.test(linear(), dataloaders=DataLoader(digits_set(), 64), verbose=False)
    assert not [name for name in logged[0] if name.startswith("ood/")]
    rows = read(tmp_path / "all.csv")
    assert [row["sample"] for row in rows] == [str(i) for i in range(433)]
    assert {row["set"] for row in rows} == {"test"}


def test_no_score_file_is_written_where_none_is_wanted(tmp_path, quiet_trainer):
    trainer = quiet_trainer(tmp_path, Evaluation(figures=False, score_file=""))
    trainer.test(linear(), dataloaders=DataLoader(digits_set(), 64), verbose=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.json", "report.html"]


# -- each number once -------------------------------------------------------------------------------------------------


class ThreeSets(Digits):
    """The test set and two unknown ones."""

    def setup(self, stage):
        super().setup(stage)
        x = torch.rand(90, 64, generator=torch.Generator().manual_seed(0))
        self.ood_sets = {**self.ood_sets, "noise": TensorDataset(x, torch.zeros(90))}


def test_every_set_is_compared_once_by_every_score(run, tmp_path, quiet_trainer, monkeypatch):
    pairs, traced = [], []

    def counted(seen):
        def measured(known, unknown):
            seen.append((known.clone(), unknown.clone()))
            return separation(known, unknown)

        return measured

    monkeypatch.setattr(record_module, "separation", counted(pairs))
    monkeypatch.setattr(charts, "separation", counted(traced))
    model = on_the_tree(run, 8, head=Tree(num_params=4000), passes=3)
    model.head.output.reset_parameters()  # it starts at zero, and all scores alike
    quiet_trainer(tmp_path, Evaluation(most_uncertain=2)).test(model, datamodule=ThreeSets(), verbose=False)
    assert len(pairs) == 2 * 6
    assert not any(
        torch.equal(a, c) and torch.equal(b, d)
        for i, (a, b) in enumerate(pairs)
        for c, d in pairs[:i]
        if a.shape == c.shape and b.shape == d.shape
    )
    assert len(traced) == 2 * 2 * 3  # of the pass curves: sets, scores, numbers of passes
    figures = {chart["name"] for chart in stored(tmp_path)["charts"]}
    assert {"ood/noise/curves", "ood/held_out/histograms", "test/passes"} <= figures


def test_the_calibration_error_is_one_number_everywhere(run, tmp_path, quiet_trainer, monkeypatch):
    drawn = {}
    monkeypatch.setattr(evaluation_module.logs, "log_chart", lambda trainer, chart: drawn.update({chart.name: chart}))
    model = on_the_tree(run, 8, head=Tree(num_params=4000, inference="enumerated", temperature=0.0)).eval()
    x = torch.stack([x for x, _ in digits_set()])
    with torch.no_grad():
        model.head.layers.weight *= 5  # confidences of all sizes
        model.head.output.reset_parameters()  # it starts at zero
        model.head.output.weight *= 30
        guess = model(x).argmax(dim=1)
    chance = torch.rand(len(x), generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, torch.where(chance < 0.6, guess, (guess + 1) % 8)), batch_size=64)
    logged = together(quiet_trainer(tmp_path, Evaluation()).test(model, dataloaders=data, verbose=False))
    expected = logged["test/cal/ECE"]
    confidence = 1 - np.mean([float(row["one_minus_max_p"]) for row in read(tmp_path / "scores.csv")])
    assert expected > abs(confidence - logged["test/cls/Acc"]) + 0.02  # too sure here and too shy there: bins matter
    (panel,) = (panel for panel in drawn["test/passes"].panels if panel.key == "ECE")
    assert panel.series[0].y[-1] == pytest.approx(expected, rel=1e-4)
    notes = [series.note for series in drawn["test/reliability"].panels[0].series]
    assert f"ECE {100 * expected:.2f}\u00a0%" in notes
    assert values(stored(tmp_path))["test/cal/ECE"] == pytest.approx(expected, abs=1e-9)


# -- sets by the names of their loaders -------------------------------------------------------------------------------


def loader(n=40, seed=0, batch=16):
    x = torch.rand(n, 64, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, torch.arange(n) % 8), batch_size=batch)


def test_a_dictionary_names_the_sets(tmp_path, quiet_trainer):
    loaders = {"test": loader(40), "b": loader(30, 1), "a": loader(20, 2)}
    logged = together(
        quiet_trainer(tmp_path, Evaluation(figures=False)).test(linear(), dataloaders=loaders, verbose=False)
    )
    assert [(s["name"], s["samples"], s["role"]) for s in stored(tmp_path)["sets"]] == [
        ("test", 40, "known"), ("b", 30, "far"), ("a", 20, "far")
    ]  # fmt: skip
    assert (logged["ood/b/n_ood"], logged["ood/a/n_ood"]) == (30, 20)
    assert [(row["set"], row["sample"]) for row in read(tmp_path / "scores.csv")] == [
        (name, str(i)) for name, n in (("test", 40), ("b", 30), ("a", 20)) for i in range(n)
    ]


def test_the_first_is_known_whatever_it_is_called(tmp_path, quiet_trainer):
    loaders = {"cats": loader(40), "dogs": loader(30, 1)}
    quiet_trainer(tmp_path, Evaluation(figures=False)).test(linear(), dataloaders=loaders, verbose=False)
    assert [(s["name"], s["role"]) for s in stored(tmp_path)["sets"]] == [("cats", "known"), ("dogs", "far")]


@pytest.mark.parametrize("kind", [list, tuple])
def test_loaders_without_names_are_all_evaluated_and_one_is_told(tmp_path, quiet_trainer, caplog, kind):
    loaders = kind([loader(40), loader(30, 1), loader(20, 2)])
    with caplog.at_level(logging.INFO):
        quiet_trainer(tmp_path, Evaluation(figures=False)).test(linear(), dataloaders=loaders, verbose=False)
    assert "loaders without names are called test, loader_1, loader_2" in caplog.text
    found = {s["name"]: s["samples"] for s in stored(tmp_path)["sets"]}
    assert found == {"test": 40, "loader_1": 30, "loader_2": 20}
    assert {row["set"] for row in stored(tmp_path)["separation"]} == {"loader_1", "loader_2"}


def test_one_loader_needs_no_word(tmp_path, quiet_trainer, caplog):
    with caplog.at_level(logging.INFO):
        quiet_trainer(tmp_path, Evaluation(figures=False)).test(linear(), dataloaders=loader(), verbose=False)
    assert "without names" not in caplog.text


def test_the_test_set_must_come_first(tmp_path, quiet_trainer, monkeypatch):
    monkeypatch.setattr(BRAINet, "test_step", lambda *_: pytest.fail("the test ran"))
    with pytest.raises(ValueError, match=r"expected the known test set 'test' as the first .* got far, test: put"):
        quiet_trainer(tmp_path, Evaluation()).test(
            linear(), dataloaders={"far": loader(), "test": loader()}, verbose=False
        )


def test_a_near_set_that_does_not_exist_stops_the_test_before_its_work(tmp_path, quiet_trainer, monkeypatch):
    data = Digits()
    data.near = ("elsewhere",)
    monkeypatch.setattr(BRAINet, "test_step", lambda *_: pytest.fail("the test ran"))
    with pytest.raises(ValueError, match=r"expected near to name .*\(held_out\), got elsewhere"):
        quiet_trainer(tmp_path, Evaluation()).test(linear(), datamodule=data, verbose=False)


@pytest.mark.parametrize("empty", ["test", "b"])
def test_a_set_without_a_sample_fails_loudly(tmp_path, quiet_trainer, empty):
    loaders = {"test": loader(), "a": loader(seed=1), "b": loader(seed=2)}
    loaders[empty] = DataLoader(TensorDataset(torch.empty(0, 64), torch.empty(0)))
    with pytest.raises(RuntimeError, match=rf"samples of every set \(test, a, b\), got none of {empty}: check its"):
        quiet_trainer(tmp_path, Evaluation()).test(linear(), dataloaders=loaders, verbose=False)
    assert not (tmp_path / "record.json").exists()


def test_near_sets_get_a_mean_of_their_own(tmp_path, quiet_trainer):
    data = ThreeSets()
    data.near = ("held_out", "noise")
    trainer = quiet_trainer(tmp_path, Evaluation(figures=False))
    logged = together(trainer.test(linear(), datamodule=data, verbose=False))
    for measure, better in SEPARATION.items():
        if measure == "AUROC_full":  # nothing is shifted here
            continue
        part = "" if better is None else "energy/"  # counts are logged once a set
        both = [logged[f"ood/{name}/{part}{measure}"] for name in data.near]
        expected = sum(both) if measure == "n_ood" else sum(both) / 2
        assert logged[f"ood/near_mean/{part}{measure}"] == pytest.approx(expected, rel=1e-6)
    assert not [name for name in logged if "far_mean" in name]
    assert [row["set"] for row in stored(tmp_path)["separation"]][-1] == "near_mean"


# -- other modules ----------------------------------------------------------------------------------------------------


class Silent(pl.LightningModule):
    """A module that tells nothing."""

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        return {"scores": {"doubt": batch[0][:, 0]}}


def test_a_module_that_tells_nothing_is_refused_with_the_recipe(tmp_path, quiet_trainer):
    with pytest.raises(ValueError, match=r"Silent to have a forward, .*Evaluation\(logits=lambda module, inputs: …\)"):
        quiet_trainer(tmp_path, Evaluation()).test(Silent(), dataloaders=loader(), verbose=False)
    assert not list(tmp_path.iterdir())


class Foreign(pl.LightningModule):
    """A classifier that is no BRAINet; the pixels are its logits."""

    def __init__(self):
        super().__init__()
        self.test_metrics = torch.nn.ModuleDict()

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        probs = (3 * x[:, :24]).view(-1, 3, 8).transpose(0, 1).softmax(dim=-1)
        mean = probs.mean(dim=0)
        confidence, label = mean.max(dim=1)
        scores = {"doubt": 1 - confidence, "distance": x.sum(dim=1) + 90 * dataloader_idx}
        if dataloader_idx:
            return SampleBatch(scores, trace=trace_passes(probs, None, None), passes=3)
        answers = {"predicted": label, "label": y, "confidence": confidence, "wrong": (label != y).float()}
        return SampleBatch(scores, answers, trace_passes(probs, None, y), 3)


def test_any_module_that_tells_of_its_samples_gets_the_whole_evaluation(tmp_path, quiet_trainer):
    loaders = {"test": loader(50), "far": loader(30, 1)}
    trainer = quiet_trainer(tmp_path, Evaluation(most_uncertain=3))
    logged = together(trainer.test(Foreign(), dataloaders=loaders, verbose=False))
    record = stored(tmp_path)
    assert [chart["name"] for chart in record["charts"]] == [
        "test/reliability", "test/risk_coverage", "test/passes", "ood/far/histograms", "ood/far/curves"
    ]  # fmt: skip
    assert logged["ood/far/distance/AUROC"] == 1
    assert "distance 1.000" in record["charts"][-1]["alt"]
    assert (record["model"]["head"], record["model"]["passes"]) == ("Foreign", 3)
    assert record["headline_score"] == "doubt"
    table, _ = record["tables"]
    assert table["columns"] == ["sample", "predicted", "label", "probability", "doubt", "distance"]
    rows = read(tmp_path / "scores.csv")
    expected = sorted((row for row in rows if row["set"] == "test"), key=lambda row: -float(row["doubt"]))
    assert [row[0] for row in table["rows"]] == [int(row["sample"]) for row in expected[:3]]


class Plain(pl.LightningModule):
    """Scores and nothing else; the unknown set lacks one of them, and has one of its own."""

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        x = batch[0]
        scores = {"first": x[:, 0], "second": x[:, 1], "third": x[:, 2]}
        del scores["second" if dataloader_idx else "third"]
        return SampleBatch({**scores, "last": x[:, 3]})


def test_scores_that_only_some_sets_have_stay_in_their_columns(tmp_path, quiet_trainer):
    loaders = {"test": loader(20), "far": loader(20, 1)}
    quiet_trainer(tmp_path, Evaluation(most_uncertain=0)).test(Plain(), dataloaders=loaders, verbose=False)
    assert [row["score"] for row in stored(tmp_path)["separation"]] == ["first", "last"]
    for row in read(tmp_path / "scores.csv"):
        x = loaders[row["set"]].dataset[int(row["sample"])][0]
        assert float(row["first"]) == pytest.approx(float(x[0]))
        assert float(row["last"]) == pytest.approx(float(x[3]))
        assert row["second"] == ("" if row["set"] == "far" else str(float(x[1])))
    assert stored(tmp_path)["tables"] == []


# -- other heads and tasks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inference", "passes"), [("simultaneous", False), ("enumerated", True)])
def test_other_kinds_of_inference(run, tmp_path, quiet_trainer, inference, passes):
    model = on_the_tree(run, 8, head=Tree(num_params=4000, inference=inference))
    trainer = quiet_trainer(tmp_path, Evaluation(most_uncertain=0), limit_test_batches=2)
    trainer.test(model, dataloaders=[DataLoader(digits_set(), batch_size=64)], verbose=False)
    names = [chart["name"] for chart in stored(tmp_path)["charts"]]
    assert ("test/passes" in names) == passes
    assert names[0] == "test/reliability"
    assert [table["name"] for table in stored(tmp_path)["tables"]] == ["test/classes"]
    assert stored(tmp_path)["sets"] == [{"name": "test", "samples": 128, "role": "known", "unknown": None}]


def test_a_regression_shows_what_it_predicted_and_the_passes_it_made(run, tmp_path, quiet_trainer):
    head = TreeEnsemble(members=3, num_params=4000)  # the model's `passes` says 15
    model = on_the_tree(run, task="Regression", head=head)
    data = DataLoader(digits_set(), batch_size=64)
    quiet_trainer(tmp_path, Evaluation(most_uncertain=2)).test(model, dataloaders=data, verbose=False)
    record = stored(tmp_path)
    assert record["model"]["passes"] == 3
    assert [figure["name"] for figure in record["figures"]] == ["structure/tree"]
    names = ["test/predicted", "test/coverage", "test/spread", "test/residuals", "test/refusal"]
    assert [chart["name"] for chart in record["charts"]] == names
    assert {metric["unit"] for metric in record["metrics"]} == {"target", "nats", "share"}
    rows = read(tmp_path / "tables" / "test_most_uncertain.csv")
    assert len(rows) == 2
    with torch.no_grad():
        for row in rows:
            x, y = digits_set()[int(row["sample"])]
            assert float(row["target"]) == y
            assert float(row["predicted"]) == pytest.approx(float(model.eval()(x[None])[0, 0]), abs=1e-4)


class Broken(Digits):
    """One test sample is NaN."""

    def setup(self, stage):
        super().setup(stage)
        x, y = zip(*self.test_set, strict=True)
        x = torch.stack(x)
        x[3, 0] = torch.nan
        self.test_set = TensorDataset(x, torch.tensor(y))


def test_a_sample_that_is_nan_costs_no_record(run, tmp_path, quiet_trainer):
    model = on_the_tree(run, 8, head=Tree(num_params=4000), passes=3)
    with pytest.warns(UserWarning, match="because of NaN in test: .*entropy"):
        quiet_trainer(tmp_path, Evaluation(most_uncertain=2, score="entropy")).test(
            model, datamodule=Broken(), verbose=False
        )
    record = stored(tmp_path)
    assert record["headline_score"] == "entropy"
    assert "test/passes" in [chart["name"] for chart in record["charts"]]
    assert record["separation"] == []
    assert record["tables"][0]["rows"][0][0] == 3  # what can't be ranked is the most doubtful
    assert values(record)["test/cls/NLL"] is None


@pytest.mark.parametrize("head", [TreeEnsemble(num_params=4000), TreeDropout(num_params=4000)])
def test_the_map_structure_is_drawn(run, tmp_path, quiet_trainer, head):
    model = on_the_tree(run, 8, head=head, passes=2)
    trainer = quiet_trainer(tmp_path, Evaluation(most_uncertain=0), limit_test_batches=1)
    trainer.test(model, dataloaders=DataLoader(digits_set(), batch_size=64), verbose=False)
    assert "structure/tree" in [figure["name"] for figure in stored(tmp_path)["figures"]]


def test_a_learned_confidence_does_not_hide_the_probability(tmp_path, quiet_trainer):
    torch.manual_seed(0)
    model = BRAINet(head=Linear(), task=Classification(8, loss="confidence"))
    model.predictor.build_head(model.head_settings, 64)
    data = DataLoader(digits_set(), batch_size=64)
    quiet_trainer(tmp_path, Evaluation(most_uncertain=5)).test(model, dataloaders=data, verbose=False)
    rows = read(tmp_path / "tables" / "test_most_uncertain.csv")
    scores = {row["sample"]: row for row in read(tmp_path / "scores.csv")}
    for row in rows:
        assert float(row["probability"]) == pytest.approx(1 - float(row["one_minus_max_p"]), abs=1e-6)
        assert float(row["confidence"]) == pytest.approx(float(scores[row["sample"]]["confidence"]), abs=1e-6)
        assert abs(float(row["confidence"]) - float(row["probability"])) > 1e-3


class Twice(NegativeLogLikelihood):
    """A metric of one's own."""

    key, title, unit = "cls/twice", "Twice the NLL", "nats"

    def values(self, preds, target):
        return 2 * super().values(preds, target)


def test_a_metric_of_ones_own_is_in_the_record(tmp_path, quiet_trainer):
    trainer = quiet_trainer(tmp_path, Evaluation(figures=False))
    trainer.test(linear(metrics=[Twice()]), dataloaders=loader(), verbose=False)
    record = stored(tmp_path)
    (base_logits,) = (metric for metric in record["metrics"] if metric["key"] == "test/cls/twice")
    assert base_logits["value"] == pytest.approx(2 * values(record)["test/cls/NLL"], rel=1e-6)
    assert (base_logits["title"], base_logits["unit"], base_logits["better"]) == ("Twice the NLL", "nats", "lower")


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_checked():
    with pytest.raises(ValueError, match="most_uncertain of at least 0"):
        Evaluation(most_uncertain=-1)
    with pytest.raises(ValueError, match="image_shape to be"):
        Evaluation(image_shape=(64,))
    with pytest.raises(ValueError, match=r"expected score_file to be the name of a file without folders, got 'a"):
        Evaluation(score_file="a/b.csv")


def test_the_score_that_ranks_may_be_chosen(tmp_path, quiet_trainer):
    trainer = quiet_trainer(tmp_path, Evaluation(most_uncertain=3, score="energy"))
    trainer.test(linear(), dataloaders=loader(), verbose=False)
    rows = sorted(read(tmp_path / "scores.csv"), key=lambda row: -float(row["energy"]))
    table, _ = stored(tmp_path)["tables"]
    assert [row[0] for row in table["rows"]] == [int(row["sample"]) for row in rows[:3]]
    assert "highest energy" in table["caption"]


@pytest.mark.parametrize("figures", [True, False])
def test_a_score_that_does_not_exist_stops_the_test_at_its_first_batch(tmp_path, quiet_trainer, figures):
    model, steps = linear(), []
    model.register_forward_hook(lambda *_: steps.append(1))
    step = model.test_step
    model.test_step = lambda *args: (steps.append(1), step(*args))[1]
    with pytest.raises(ValueError, match=r"expected score to be one of one_minus_max_p, .*, got 'doubt': change"):
        quiet_trainer(tmp_path, Evaluation(figures, score="doubt")).test(model, dataloaders=loader(), verbose=False)
    assert len(steps) == 1


def test_nothing_is_written_in_a_dry_run(tmp_path, quiet_trainer):
    quiet_trainer(tmp_path, Evaluation(), fast_dev_run=True).test(linear(), datamodule=Digits(), verbose=False)
    assert not list(tmp_path.iterdir())


def test_thumbnails():
    vector = torch.arange(64.0)
    small = thumbnail(vector, (8, 8))
    assert (small.shape, small.dtype, small[0, 0], small[-1, -1]) == ((64, 64), np.uint8, 0, 255)
    np.testing.assert_array_equal(small[::8, ::8], np.round(vector.view(8, 8).numpy() / 63 * 255))
    assert thumbnail(vector) is None
    assert thumbnail(torch.randn(3, 100, 90)).shape == (100, 90, 3)
    assert thumbnail(torch.randn(5, 8, 8)) is None
    assert thumbnail(torch.full((1, 4, 4), torch.nan)).max() == 0
    with pytest.raises(ValueError, match="expected inputs of 49 numbers"):
        thumbnail(vector, (7, 7))


# -- two processes ----------------------------------------------------------------------------------------------------

DDP = """
import sys
import warnings
from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import Evaluation
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Tree
from brainet_pl.structure import GGT

if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=Tree(4000, inference="enumerated"))  # no draws: the same on one and on two processes
    model.set_structure(GGT.from_json(open(sys.argv[2]).read()))
    model.head.output.reset_parameters()  # it starts at zero, and all samples alike
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    devices = int(sys.argv[3])
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp_spawn" if devices > 1 else "auto",
        default_root_dir=sys.argv[1], callbacks=[Evaluation(most_uncertain=5)], **quiet,
    )
    trainer.test(model, datamodule=Digits(held_out=(7, 8)), verbose=False)
"""


@pytest.mark.slow
def test_two_processes_make_one_record(run, tmp_path):
    """DistributedSampler repeats a sample of an odd set to even the parts; it counts once."""
    script = tmp_path / "script.py"
    script.write_text(DDP)
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1])}
    for devices in ("1", "2"):
        command = [sys.executable, str(script), str(tmp_path / devices), str(run / "structure.json"), devices]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (stored(tmp_path / n) for n in ("1", "2"))
    assert any(part["samples"] % 2 for part in one["sets"])
    assert one["sets"] == two["sets"]
    assert [f["name"] for f in one["charts"]] == [f["name"] for f in two["charts"]]
    first, second = (read(tmp_path / n / "scores.csv") for n in ("1", "2"))
    assert [(r["set"], r["sample"]) for r in first] == [(r["set"], r["sample"]) for r in second]
    for a, b in zip(first, second, strict=True):
        assert float(a["entropy"]) == pytest.approx(float(b["entropy"]), abs=1e-4)
    for a, b in zip(one["separation"], two["separation"], strict=True):
        assert a["AUROC"] == pytest.approx(b["AUROC"], abs=1e-3)
    rows = [read(tmp_path / n / "tables" / "test_most_uncertain.csv") for n in ("1", "2")]
    assert [row["sample"] for row in rows[0]] == [row["sample"] for row in rows[1]]


@pytest.mark.parametrize("name", ["TemperatureScaling", "VectorScaling", "DirichletScaling", "IsotonicScaling"])
def test_a_calibrator_without_validation_data_is_said_and_not_logged(tmp_path, quiet_trainer, name):
    model = BRAINet(8, head=Linear(), calibration=name, lr=0.01)
    trainer = quiet_trainer(tmp_path, Evaluation(figures=False), limit_val_batches=0)
    with pytest.warns(
        UserWarning, match=f"{name} has no validation data to learn from, so predictions are not cal"
    ) as w:
        trainer.fit(model, datamodule=Digits())
    assert sum("has no validation data to learn from" in str(warning.message) for warning in w) == 1
    with pytest.warns(UserWarning, match=f"{name} changes nothing, because it has learned nothing"):
        logged = together(trainer.test(model, datamodule=Digits(), verbose=False))
    assert not [key for key in logged if key.startswith("test/scaled/")]
    record = stored(tmp_path)
    assert (record["model"]["calibration"], record["model"]["calibrated"]) == (name, False)
    assert "before calibration" not in json.dumps(record["charts"])
    assert f"Not calibrated: {name} has learned nothing" in (tmp_path / "report.html").read_text()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f"{name} ")
        trainer = quiet_trainer(tmp_path, Evaluation(figures=False))
        trainer.fit(model, datamodule=Digits())
        logged = together(trainer.test(model, datamodule=Digits(), verbose=False))
    assert logged["test/scaled/cls/NLL"] != logged["test/cls/NLL"]
    assert stored(tmp_path)["model"]["calibrated"]


def test_unknown_sets_are_judged_by_the_score_behind_the_verdict(tmp_path, quiet_trainer):
    model = BRAINet(8, head=Linear(), scores=["KNN"], lr=0.01)
    trainer = quiet_trainer(tmp_path, Evaluation(most_uncertain=2))
    trainer.fit(model, datamodule=Digits())
    trainer.test(model, datamodule=Digits(), verbose=False)
    record = stored(tmp_path)
    assert (record["verdict_score"], record["headline_score"], record["ranking_score"]) == ("joint", "joint", "entropy")
    assert record["verdict_samples"] == 152
    auroc = next(row["AUROC"] for row in record["separation"] if row["score"] == "joint")
    page = (tmp_path / "report.html").read_text()
    told = f"<b>{100 * auroc:.2f} %</b><small>AUROC by joint, the score behind the verdict"
    assert told in page.replace("\u00a0", " ")
    assert record["tables"][1]["caption"].startswith("The 2 test samples of the highest entropy")
    histograms = next(chart for chart in record["charts"] if chart["name"] == "ood/held_out/histograms")
    assert histograms["panels"][0]["key"] == "joint"
    again = quiet_trainer(tmp_path, Evaluation(most_uncertain=2, score="knn"))
    again.test(model, datamodule=Digits(), verbose=False)
    record = stored(tmp_path)
    assert (record["verdict_score"], record["headline_score"], record["ranking_score"]) == ("joint", "knn", "knn")
