"""Measures after a shift: sums against the metrics of a test, means, names, and all that a test leaves of them."""

import csv
import json

import pytest
import torch

from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import Evaluation
from brainet_pl.datamodules import Digits, Shifts
from brainet_pl.evaluation import report
from brainet_pl.evaluation.shift_charts import severity_chart
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.measures import classification_measures, collect, regression_measures
from brainet_pl.metrics.shift import (
    Shift,
    ShiftResult,
    ShiftSums,
    add_sums,
    class_sums,
    means,
    measures_of,
    number_sums,
    parse_shift,
    parts_of,
    shift_name,
    split_by_part,
)
from brainet_pl.network import Linear


def test_sums_of_batches_are_the_metrics_of_all():
    rng = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(200, 5, generator=rng)).softmax(1)
    labels = torch.randint(5, (200,), generator=rng)
    metrics = collect(classification_measures(5), "", "cls")
    metrics.update(probs, labels)
    sums = None
    for p, y in zip(probs.split(64), labels.split(64), strict=True):
        sums = add_sums(sums, ShiftSums(class_sums(p, y), None))
    sums = add_sums(add_sums(None, sums), None)
    expected = {name.split("/")[1]: float(value) for name, value in metrics.compute().items()}
    for name, value in measures_of(sums.predicted).items():
        assert value == pytest.approx(expected[name], rel=1e-5)
    predicted = torch.stack([torch.randn(50, generator=rng), torch.rand(50, generator=rng) + 0.1], dim=1)
    target = torch.randn(50, generator=rng)
    metrics = collect(regression_measures(), "", "reg")
    metrics.update(predicted, target)
    found = measures_of(number_sums(predicted, target))
    assert found.keys() == {"RMSE", "NLL"}
    for name, value in found.items():
        assert value == pytest.approx(float(metrics.compute()[f"reg/{name}"]), rel=1e-5)


def test_names():
    assert parse_shift(shift_name("motion_blur", 4)) == Shift("motion_blur", 4)
    assert parse_shift("held_out") is None
    for name in ("shift/fog", "shift/fog/x", "shift//3", "shift/fog/0", "shift/"):
        with pytest.raises(ValueError, match="expected loaders of shifts to be called shift/<corruption>/<severity>"):
            parse_shift(name)


def test_samples_of_a_loader_of_many_shifts():
    parts = {"shift/fog/1": 5, "shift/fog/2": 3}
    found = dict(split_by_part(torch.tensor([3, 4, 5, 7]), parts))
    assert {name: mask.tolist() for name, mask in found.items()} == {
        "shift/fog/1": [True, True, False, False],
        "shift/fog/2": [False, False, True, True],
    }
    assert [name for name, _ in split_by_part(torch.tensor([9**9]), parts_of("shift/fog/3", None))] == ["shift/fog/3"]
    assert not list(split_by_part(torch.empty(0, dtype=torch.long), parts))
    with pytest.raises(ValueError, match=r"data set with `parts`.*in the loader 'shift', got list"):
        parts_of("shift", [])


def test_means_leave_the_clean_set_out():
    shifts = [
        ShiftResult("clean", 0, 9, {"ECE": 0.0}, None),
        ShiftResult("fog", 1, 9, {"ECE": 0.2}, None),
        ShiftResult("fog", 2, 9, {"ECE": 0.6}, None),
    ]
    assert means(shifts) == {"predicted": {"ECE": pytest.approx(0.4)}}
    assert means(shifts, 2) == {"predicted": {"ECE": pytest.approx(0.6)}}


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def tested(tmp_path_factory, quiet_trainer):
    """A model that was tested with two shifts, and the folder."""
    folder = tmp_path_factory.mktemp("shifts")
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=Linear(), calibration="TemperatureScaling", lr=0.05)
    data = Digits(shifts=Shifts(["rotation"], severities=(1, 4), limit=150, image_shape=(8, 8)))
    trainer = quiet_trainer(folder, Evaluation(most_uncertain=0), epochs=3)
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, verbose=False)
    return model, data, folder, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_test_with_shifts(tested, quiet_trainer):
    """Each row against a test of the same samples on their own."""
    model, data, folder, found = tested
    record = json.loads((folder / "record.json").read_text())
    assert [(s["corruption"], s["severity"], s["samples"]) for s in record["shifts"]] == [
        ("clean", 0, 433),
        ("rotation", 1, 150),
        ("rotation", 4, 150),
    ]
    rows = read(folder / "tables" / "shift_table.csv")
    every = {"test": data.test_set, **data.shifts.sets(data.test_set)}
    keys = {"Acc": "cls/Acc", "NLL": "cls/NLL", "Brier": "cls/Brier", "ECE": "cal/ECE"}
    for shift, row, name in zip(record["shifts"], rows, ["test", "shift/rotation/1", "shift/rotation/4"], strict=True):
        trainer = quiet_trainer(folder / "alone")
        trainer.test(model, dataloaders={"test": data._loader(every[name])}, verbose=False)
        alone = trainer.callback_metrics
        for measure, key in keys.items():
            assert shift["predicted"][measure] == pytest.approx(float(alone[f"test/{key}"]), rel=1e-4, abs=1e-6)
            assert shift["final"][measure] == pytest.approx(float(alone[f"test/scaled/{key}"]), rel=1e-4, abs=1e-6)
            assert float(row[f"scaled_{measure}"]) == shift["final"][measure]
    one, four = record["shifts"][1:]
    assert found["shift/mean/ECE"] == pytest.approx((one["predicted"]["ECE"] + four["predicted"]["ECE"]) / 2)
    assert found["shift/scaled/mean/NLL"] == pytest.approx((one["final"]["NLL"] + four["final"]["NLL"]) / 2)
    assert four["predicted"]["Acc"] < record["shifts"][0]["predicted"]["Acc"]
    assert len([name for name in found if name.startswith("shift/")]) == 8


def test_shifted_sets_are_no_unknown_sets(tested):
    _, _, folder, found = tested
    record = json.loads((folder / "record.json").read_text())
    assert [part["name"] for part in record["sets"]] == ["test", "held_out"]
    assert {row["set"] for row in read(folder / "scores.csv")} == {"test", "held_out"}
    assert not any("rotation" in name for name in found)


def test_figures_and_page(tested, capsys):
    _, _, folder, _ = tested
    record = json.loads((folder / "record.json").read_text())
    charts = {chart["name"]: chart for chart in record["charts"]}
    clean = record["shifts"][0]
    ece = 100 * clean["predicted"]["ECE"]
    assert f"clean, as predicted, calibration error {ece:.2f} %" in charts["shift/reliability"]["alt"]
    assert "severity of 1 corruption; mean ECE at severity 4" in charts["shift/severity"]["alt"]
    panels = {panel["key"]: panel for panel in charts["shift/severity"]["panels"]}
    assert list(panels) == list(clean["predicted"])
    for measure, panel in panels.items():
        for series, which in zip(panel["series"], ("predicted", "final"), strict=True):
            assert series["x"] == [0.0, 1.0, 4.0]
            values = [shift[which][measure] for shift in record["shifts"]]
            assert series["y"] == pytest.approx(values, rel=1e-4)
            assert series["low"] == series["high"] == series["y"]  # one corruption is the least and the worst
    curve, counts = charts["shift/reliability"]["panels"]
    assert [series["name"] for series in counts["series"]] == [
        f"{which}, {how}" for which in ("clean", "shifted") for how in ("as predicted", "after calibration")
    ]
    assert [sum(series["y"]) for series in counts["series"]] == [433, 433, 300, 300]
    assert curve["title"] == "Reliability, n = 300 and 433"
    for name in ("severity", "reliability"):
        assert (folder / "figures" / f"shift_{name}.png").is_file()
    report.main([str(folder)])
    page = (folder / "report.html").read_text()
    assert "After a shift of the inputs" in page
    assert charts["shift/severity"]["caption"] in page


def test_the_least_and_the_worst_corruption():
    shifts = [ShiftResult("clean", 0, 9, {"NLL": 1.0}, None)]
    shifts += [ShiftResult(name, 2, 9, {"NLL": value}, None) for name, value in (("a", 1.5), ("b", 4.0), ("c", 2.0))]
    (panel,) = severity_chart(shifts).panels
    (series,) = panel.series
    assert (series.x, series.y, series.low, series.high) == ([0.0, 2.0], [1.0, 2.5], [1.0, 1.5], [1.0, 4.0])


def test_loaders_of_any_datamodule(quiet_trainer, tmp_path):
    """Names are all that counts; a first set that is a shift, and a shift without a severity, are refused."""
    data = Digits()
    data.setup("test")
    known = data._loader(data.test_set)
    model = BRAINet(8, head=Linear())
    model.predictor.build_head(model.head_settings, 64)
    trainer = quiet_trainer(tmp_path, Evaluation(figures=False))
    trainer.test(model, dataloaders={"test": known, "shift/none/1": known}, verbose=False)
    assert float(trainer.callback_metrics["shift/mean/NLL"]) == pytest.approx(
        float(trainer.callback_metrics["test/cls/NLL"]), rel=1e-5
    )
    with pytest.raises(ValueError, match="as the first of the test loaders, got 'shift/none/1'"):
        trainer.test(model, dataloaders={"shift/none/1": known}, verbose=False)
    with pytest.raises(ValueError, match="expected loaders of shifts to be called"):
        trainer.test(model, dataloaders={"test": known, "shift/none": known}, verbose=False)


def test_numbers(quiet_trainer, tmp_path):
    class Numbers(Digits):
        def setup(self, stage):
            super().setup(stage)
            self.test_set.y = self.test_set.y.float()

    model = BRAINet(task="Regression", head=Linear())
    model.predictor.build_head(model.head_settings, 64)
    trainer = quiet_trainer(tmp_path, Evaluation())
    trainer.test(model, datamodule=Numbers(shifts=Shifts("noise", severities=(5,))), verbose=False)
    assert float(trainer.callback_metrics["shift/mean/RMSE"]) > 0
    assert (tmp_path / "figures" / "shift_severity.png").is_file()
    assert not (tmp_path / "figures" / "shift_reliability.png").exists()
