"""Figures, tables and reductions of a test, against slow twins and the metrics that were logged."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.logger import DummyLogger
from scipy.stats import binomtest
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

import brainet_pl
from brainet_pl import figures, uncertainty
from brainet_pl.callbacks import Dashboard, log_figure, log_table
from brainet_pl.callbacks.dashboard import ood_rows, thumbnail
from brainet_pl.callbacks.logging import log_artifact
from brainet_pl.datamodules import Digits
from brainet_pl.metrics import CalibrationError, NegativeLogLikelihood
from brainet_pl.module import BRAINet
from brainet_pl.passes import chosen_steps, pass_metrics, pass_sums, running_mean, running_scores


def probabilities(passes, n, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(passes, n, classes, generator=generator)).softmax(dim=-1)


# -- reductions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_of_the_first_passes_against_a_loop(weighted):
    probs, target = probabilities(5, 60, 4), torch.randint(4, (60,), generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1]) if weighted else None
    steps = chosen_steps(5)
    means, scores = running_mean(probs, weights, steps), running_scores(probs, weights, steps)
    halves = [pass_sums(means[:, part], target[part]) for part in (slice(0, 25), slice(25, 60))]
    found = pass_metrics(halves[0] + halves[1])  # batches add up
    for i, t in enumerate(steps):
        part = None if weights is None else weights[:t] / weights[:t].sum()
        mean = uncertainty.predictive(probs[:t], part)
        torch.testing.assert_close(means[i], mean)
        torch.testing.assert_close(scores["entropy"][i], uncertainty.predictive_entropy(probs[:t], part))
        expected = uncertainty.mutual_information(probs[:t], part)
        torch.testing.assert_close(scores["mutual_information"][i], expected, atol=1e-5, rtol=1e-4)
        nll, ece = NegativeLogLikelihood(), CalibrationError(4, n_bins=15, norm="l1")
        nll.update(mean, target)
        ece.update(mean, target)
        assert found["NLL"][i] == pytest.approx(float(nll.compute()), rel=1e-5)
        assert found["error"][i] == pytest.approx(float((mean.argmax(1) != target).float().mean()))
        assert found["ECE"][i] == pytest.approx(float(ece.compute()), abs=1e-5)


def test_steps():
    assert chosen_steps(1) == [1]
    assert chosen_steps(16) == list(range(1, 17))
    many = chosen_steps(1000)
    assert (many[0], many[-1]) == (1, 1000)
    assert len(many) <= 16


def test_calibration_bins_against_a_loop():
    rng = np.random.default_rng(0)
    confidence = torch.tensor(np.r_[rng.random(200), 0.0, 1.0, 1 / 15], dtype=torch.float32)
    correct = torch.tensor(rng.integers(0, 2, 203), dtype=torch.float32)
    bins = figures.calibration_bins(confidence, correct)
    total = 0.0
    for b in range(15):
        inside = [i for i, p in enumerate(confidence.tolist()) if min(14, int(np.float32(p) * 15)) == b]
        assert bins.counts[b] == len(inside)
        if inside:
            gap = np.mean([confidence[i] for i in inside]) - np.mean([correct[i] for i in inside])
            assert bins.confidence[b] - bins.accuracy[b] == pytest.approx(gap, abs=1e-6)
            total += abs(gap) * len(inside) / 203
    assert bins.ece == pytest.approx(total, abs=1e-6)


def test_wilson_against_scipy():
    for hits, n in ((0, 5), (3, 7), (90, 100), (4, 4)):
        low, high = figures.wilson(np.array([hits / n]), np.array([float(n)]))
        exact = binomtest(hits, n).proportion_ci(method="wilson")
        assert (low[0], high[0]) == (pytest.approx(exact.low, abs=1e-4), pytest.approx(exact.high, abs=1e-4))


def test_a_thinned_curve_stays_where_it_was():
    rng = np.random.default_rng(0)
    y = np.sort(rng.random(50_000)) ** 8  # steep at one end
    x = np.linspace(0, 1, 50_000)
    xs, ys = figures.thin(x, y, 400)
    assert len(xs) <= 400
    assert (xs[0], ys[0], xs[-1], ys[-1]) == (x[0], y[0], x[-1], y[-1])
    assert np.abs(np.interp(x, xs, ys) - y).max() < 0.01
    flat = figures.thin(np.zeros(1000), np.zeros(1000))
    assert flat[0].tolist() == [0.0, 0.0]


def test_curves_can_be_told_apart_without_colour():
    styles = [figures.line(i) for i in range(20)]
    assert len({(str(style.linestyle), style.marker) for style in styles}) == 20
    assert len({str(style.linestyle) for style in styles[:6]}) == 6


# -- figures -------------------------------------------------------------------------------------------------------

ODD = {
    "ordinary": (torch.rand(40), torch.rand(30) + 0.3),
    "constant": (torch.ones(40), torch.ones(30)),
    "infinite": (torch.rand(40), torch.full((30,), torch.inf)),
    "huge": (1e30 * torch.rand(40), -1e30 * torch.rand(30)),
}


def text_of(figure):
    parts = [figure.get_suptitle()]
    for ax in figure.axes:
        parts += [ax.get_title(), ax.get_title("left"), ax.get_xlabel(), ax.get_ylabel()]
        parts += ax.get_legend_handles_labels()[1]
    parts += [text.get_text() for legend in figure.legends for text in (legend.get_title(), *legend.get_texts())]
    return " ".join(parts)


def test_figures_take_odd_data_and_name_their_axes(tmp_path):
    known = {name: pair[0] for name, pair in ODD.items()}
    unknown = {name: pair[1] for name, pair in ODD.items()}
    wrong = (torch.rand(40, generator=torch.Generator().manual_seed(0)) < 0.2).float()
    confidence = torch.rand(40)
    metrics = {"NLL": [0.5, 0.4], "error": [0.1, 0.1], "ECE": [0.0, 0.0]}
    drawn = {
        "histograms": (figures.score_histograms(known, unknown, "held_out"), ["n = 40", "n = 30", "share of set"]),
        "curves": (figures.ood_curves(known, unknown, "held_out"), ["n = 40", "n = 30", "TPR", "recall", "AUROC"]),
        "risk": (figures.risk_coverage_curves(known, wrong), ["n = 40", "coverage", "risk"]),
        "perfect": (figures.risk_coverage_curves(known, torch.zeros(40)), ["0 errors"]),
        "single": (figures.risk_coverage_curves({"entropy": torch.rand(1)}, torch.ones(1)), ["1 errors"]),
        "reliability": (
            figures.reliability({"before": (confidence, 1 - wrong), "after": (confidence**2, 1 - wrong)}),
            ["n = 40", "confidence", "accuracy", "samples", "before, ECE", "after, ECE"],
        ),
        "sure": (figures.reliability({"all": (torch.ones(3), torch.ones(3))}), ["n = 3"]),
        "passes": (figures.pass_curves([1, 2], metrics, {"entropy": {"a_b": [0.5, 0.6]}}, 40), ["n = 40", "passes"]),
        "alone": (figures.pass_curves([1, 2], metrics, {}, 40), ["nats"]),
        "training": (figures.training_curves({"train/loss": ([0, 5], [1.0, 0.5])}), ["optimiser steps"]),
    }
    for name, (figure, words) in drawn.items():
        assert isinstance(figure, Figure)
        figure.savefig(tmp_path / f"{name}.png", dpi=40)
        for word in words:
            assert word in text_of(figure), name
        assert figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


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


# -- the callback --------------------------------------------------------------------------------------------------


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_of_the_dashboard_are_those_of_the_metrics(run):
    stored = json.loads((run / "dashboard.json").read_text())
    metrics, alts = stored["metrics"], {figure["name"]: figure["alt"] for figure in stored["figures"]}
    before, after = (100 * metrics[f"test/{part}cal/ECE"] for part in ("", "scaled/"))
    assert f"before scaling, expected calibration error {before:.2f} %" in alts["test/reliability"]
    assert f"expected calibration error {after:.2f} %" in alts["test/reliability"]
    assert f"to {metrics['test/cls/NLL']:.3f}" in alts["test/passes"]
    assert f"to {100 * (1 - metrics['test/cls/Acc']):.2f} %" in alts["test/passes"]
    assert f"{100 * (1 - metrics['test/cls/Acc']):.2f} % when all" in alts["test/risk_coverage"]
    assert stored["counts"] == {"test": 433, "held_out": 354}
    assert (run / "structure.json").is_file()
    for row in read(run / "tables" / "ood_table.csv"):
        for name in ("AUROC", "AUPR_in", "AUPR_out", "FPR95", "DetErr", "n_id", "n_ood"):
            assert float(row[name]) == metrics[f"ood/{row['set']}/{row['score']}/{name}"]
    scores = read(run / "scores.csv")
    labels = [row["set"] != "test" for row in scores]
    auroc = roc_auc_score(labels, [float(row["energy"]) for row in scores])
    assert f"energy {auroc:.3f}" in alts["ood/held_out/curves"]


def test_the_most_uncertain_samples_are_those_of_the_score_file(run):
    rows = read(run / "tables" / "test_most_uncertain.csv")
    known = [row for row in read(run / "scores.csv") if row["set"] == "test"]
    expected = sorted(known, key=lambda row: -float(row["entropy"]))[:4]
    assert [row["sample"] for row in rows] == [row["sample"] for row in expected]
    data = Digits()
    data.setup("test")
    images = load_digits().data / 16.0
    for row, other in zip(rows, expected, strict=True):
        assert float(row["mutual_information"]) == pytest.approx(float(other["mutual_information"]), abs=1e-6)
        x, label = data.test_set[int(row["sample"])]
        assert int(row["label"]) == label
        assert float(row["probability"]) == pytest.approx(1 - float(row["max_softmax"]), abs=1e-6)
        assert np.isclose(images, x.numpy()).all(axis=1).any()
        picture = matplotlib.image.imread(run / "tables" / row["picture"])[::8, ::8, 0]
        np.testing.assert_allclose(picture, (x / x.max()).view(8, 8).numpy(), atol=1 / 255)


class Plain(pl.LightningModule):
    """A model of another task: scores and a number, no classes; `scores` holds names that nobody foresaw."""

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        x = batch[0]
        scores = {"variance": x.std(dim=1), "generative": x.abs().sum(dim=1) + 9 * dataloader_idx}
        target = batch[1] if dataloader_idx == 0 else None
        return {"scores": scores, "outputs": x.T[None, :, :], "weights": None, "target": target}


class PlainData(pl.LightningDataModule):
    ood_sets = {"far": None, "near": None}  # noqa: RUF012

    def test_dataloader(self):
        x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
        return [DataLoader(TensorDataset(x, x.sum(dim=1)), batch_size=16) for _ in range(3)]


def quiet(folder, *callbacks, logger=False, **settings):
    return pl.Trainer(
        accelerator="cpu", logger=logger, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder), callbacks=list(callbacks), **settings,
    )  # fmt: skip


def test_another_task_keeps_its_scores_and_loses_no_test(tmp_path):
    trainer = quiet(tmp_path, Dashboard(most_uncertain=3))
    with pytest.warns(UserWarning, match="callback OODEvaluation, add it"):
        trainer.test(Plain(), datamodule=PlainData(), verbose=False)
    stored = json.loads((tmp_path / "dashboard.json").read_text())
    expected = [f"ood/{name}/{kind}" for name in ("far", "near") for kind in ("histograms", "curves")]
    assert [figure["name"] for figure in stored["figures"]] == expected
    assert "generative 1.000" in stored["figures"][1]["alt"]
    rows = read(tmp_path / "tables" / "test_most_uncertain.csv")
    assert list(rows[0]) == ["sample", "target", "variance", "generative"]
    assert len(rows) == 3


@pytest.mark.parametrize(("inference", "passes"), [("simultaneous", False), ("enumerated", True)])
def test_other_kinds_of_inference(run, tmp_path, inference, passes):
    from brainet_pl.structure import GGT

    model = BRAINet(8, num_params=4000, inference=inference)
    model.set_structure(GGT.from_json((run / "structure.json").read_text()))
    trainer = quiet(tmp_path, Dashboard(most_uncertain=0), limit_test_batches=2)
    trainer.test(model, dataloaders=[DataLoader(digits_set(), batch_size=64)], verbose=False)
    stored = json.loads((tmp_path / "dashboard.json").read_text())
    names = [figure["name"] for figure in stored["figures"]]
    assert ("test/passes" in names) == passes
    assert names[0] == "test/reliability"
    assert not stored["tables"]


def test_a_regression_shows_what_it_predicted_and_the_passes_it_made(run, tmp_path):
    from brainet_pl.structure import GGT

    model = BRAINet(task="regression", head="brainet_ensemble", num_params=4000, members=3)  # `passes` says 15
    model.set_structure(GGT.from_json((run / "structure.json").read_text()))
    data = DataLoader(digits_set(), batch_size=64)
    quiet(tmp_path, Dashboard(most_uncertain=2)).test(model, dataloaders=data, verbose=False)
    assert json.loads((tmp_path / "dashboard.json").read_text())["model"]["passes"] == 3
    rows = read(tmp_path / "tables" / "test_most_uncertain.csv")
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


def test_a_sample_that_is_nan_costs_no_dashboard(run, tmp_path):
    from brainet_pl.structure import GGT

    model = BRAINet(8, num_params=4000, passes=3)
    model.set_structure(GGT.from_json((run / "structure.json").read_text()))
    with pytest.warns(UserWarning, match="because of NaN in test: .*entropy"):
        quiet(tmp_path, Dashboard(2, score="entropy")).test(model, datamodule=Broken(), verbose=False)
    stored = json.loads((tmp_path / "dashboard.json").read_text())
    assert stored["headline_score"] == "entropy"
    assert "test/passes" in [figure["name"] for figure in stored["figures"]]


@pytest.mark.parametrize("head", ["brainet_ensemble", "brainet_dropout"])
def test_the_map_structure_is_drawn(run, tmp_path, head):
    from brainet_pl.structure import GGT

    model = BRAINet(8, head=head, num_params=4000, passes=2)
    model.set_structure(GGT.from_json((run / "structure.json").read_text()))
    trainer = quiet(tmp_path, Dashboard(most_uncertain=0), limit_test_batches=1)
    trainer.test(model, dataloaders=DataLoader(digits_set(), batch_size=64), verbose=False)
    stored = json.loads((tmp_path / "dashboard.json").read_text())
    assert "structure/tree" in [figure["name"] for figure in stored["figures"]]


def digits_set():
    data = Digits()
    data.setup("test")
    return data.test_set


def test_rows_of_the_table_are_sets_and_scores():
    metrics = {"ood/a/b/entropy/AUROC": 0.5, "ood/a/b/entropy/n_id": 3.0, "ood/c/energy/AUROC": 0.75, "test/x": 1.0}
    empty = [None] * 4
    assert ood_rows(metrics | {"ood/c/energy/other": 2.0}) == [
        ["a/b", "entropy", 0.5, *empty, 3, None],
        ["c", "energy", 0.75, *empty, None, None],
    ]


def test_settings_are_checked():
    with pytest.raises(ValueError, match="most_uncertain of at least 0"):
        Dashboard(-1)
    with pytest.raises(ValueError, match="image_shape to be"):
        Dashboard(image_shape=(64,))
    with pytest.raises(ValueError, match="expected score to be one of entropy, got 'doubt'"):
        Dashboard(score="doubt")._ranking({"entropy": torch.zeros(1)})


# -- loggers -------------------------------------------------------------------------------------------------------


def small_figure():
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1])
    return figure


PICTURE = np.arange(16, dtype=np.uint8).reshape(4, 4)
TABLE = (["name", "value", "picture"], [["a|b", 0.5, PICTURE], ["c", None, PICTURE + 1]])


def check_files(folder):
    assert (folder / "figures" / "test_one.png").is_file()
    rows = read(folder / "tables" / "test_two.csv")
    assert [(row["name"], row["value"]) for row in rows] == [("a|b", "0.5"), ("c", "")]
    saved = matplotlib.image.imread(folder / "tables" / rows[0]["picture"])
    np.testing.assert_allclose(saved[..., 0] * 255, PICTURE, atol=0.5)


def test_files_without_a_logger_and_beside_the_csv(tmp_path):
    for folder, logger in ((tmp_path / "a", False), (tmp_path / "b", CSVLogger(str(tmp_path / "b"), name="x"))):
        trainer = quiet(folder, logger=logger)
        log_figure(trainer, "test/one", small_figure())
        log_table(trainer, "test/two", *TABLE)
        log_table(trainer, "test/two", *TABLE)  # again, over the first
        log_artifact(trainer, "structure", folder / "x.json", {})
        check_files(folder / "x" / "version_0" if logger else folder)


def test_a_logger_without_figures_says_where_the_files_are(tmp_path):
    trainer = quiet(tmp_path, logger=DummyLogger())
    with pytest.warns(UserWarning, match="DummyLogger takes no figures here: test/one is in .*test_one.png"):
        log_figure(trainer, "test/one", small_figure())
    with pytest.warns(UserWarning, match="DummyLogger takes no tables here: test/two is in .*test_two.csv"):
        log_table(trainer, "test/two", *TABLE)
    check_files(tmp_path)


def test_tensorboard_gets_both(tmp_path):
    pytest.importorskip("tensorboard", reason="no TensorBoard here: pip install tensorboard to test it")
    from pytorch_lightning.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(str(tmp_path), name="x")
    trainer = quiet(tmp_path, logger=logger)
    log_figure(trainer, "test/one", small_figure())
    log_table(trainer, "test/two", *TABLE)
    check_files(Path(logger.log_dir))
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    tags = events.Tags()
    assert {"test/one", "test/two/picture"} <= set(tags["images"])
    (text,) = events.Tensors("test/two/text_summary")
    assert b"| a\\|b | 0.5 |" in text.tensor_proto.string_val[0]


def test_a_row_of_another_length_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"expected 2 cells in every row of t \(a, b\), got 1 in row 1"):
        log_table(quiet(tmp_path), "t", ["a", "b"], [[1, 2], [3]])


# -- two processes -------------------------------------------------------------------------------------------------

DDP = """
import sys
import pytorch_lightning as pl
from brainet_pl.callbacks import Dashboard, OODEvaluation
from brainet_pl.datamodules import Digits
from brainet_pl.module import BRAINet
from brainet_pl.structure import GGT

if __name__ == "__main__":
    model = BRAINet(8, num_params=4000, inference="enumerated")  # no draws: the same on one and on two processes
    pl.seed_everything(0, verbose=False)
    model.set_structure(GGT.from_json(open(sys.argv[2]).read()))
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    devices = int(sys.argv[3])
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp_spawn" if devices > 1 else "auto",
        default_root_dir=sys.argv[1], callbacks=[OODEvaluation(), Dashboard(5)], **quiet,
    )
    data = Digits(held_out=(7, 8))
    trainer.test(model, datamodule=data, verbose=False)
"""


@pytest.mark.slow
def test_two_processes_make_one_dashboard(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DDP)
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1])}
    for devices in ("1", "2"):
        command = [sys.executable, str(script), str(tmp_path / devices), str(run / "structure.json"), devices]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / n / "dashboard.json").read_text()) for n in ("1", "2"))
    for name, count in one["counts"].items():
        assert two["counts"][name] == count + count % 2  # DistributedSampler repeats a sample to even the parts
    assert [f["name"] for f in one["figures"]] == [f["name"] for f in two["figures"]]
    rows = [read(tmp_path / n / "tables" / "test_most_uncertain.csv") for n in ("1", "2")]
    numbers = [[int(row["sample"]) % one["counts"]["test"] for row in part] for part in rows]
    assert set(numbers[1]) <= set(numbers[0]) | {0}
    assert [row["label"] for row in rows[0]][:2] == [row["label"] for row in rows[1]][:2]
