"""Two processes give what one gives, and none of them waits for one that failed."""

import csv
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import brainet_pl
from brainet_pl._utils.framework import pl
from brainet_pl.calibration import TemperatureScaling
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Tree
from brainet_pl.structure import learn_structure

SCRIPT = Path(__file__).with_name("two_processes.py")


def start(folder, *parts):
    """The script with two processes, in the background."""
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), *parts]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(script, *words):
    """What a script says that starts processes of its own."""
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def both(tmp_path_factory, quiet_trainer):
    """The folder with what one and what two processes found, and what the two said."""
    folder, script = tmp_path_factory.mktemp("ranks"), runpy.run_path(str(SCRIPT))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the script: sums of several threads differ in their last digits
    for task in ("classification", "regression"):
        pl.seed_everything(0, verbose=False)
        kind = (
            {"task": "Regression"} if task == "regression" else {"num_classes": 8, "calibration": TemperatureScaling()}
        )
        model = BRAINet(head=Tree(4000), lr=0.02, scores=[], **kind)
        data = script["Uneven"](task == "regression")
        data.setup("fit")
        features = data.train_set.tensors[0].numpy()
        model.set_structure(learn_structure(features, threshold=0.1, max_order=1, progress=False))
        trainer = quiet_trainer(folder, epochs=3)
        trainer.fit(model, datamodule=data)
        trainer.save_checkpoint(folder / f"{task}.ckpt")
    running = start(folder, "broken", "evaluate")
    script["evaluate"](folder, 1)
    torch.set_num_threads(threads)
    said, _ = running.communicate(timeout=240)
    assert running.returncode == 0, said[-3000:]
    return folder, said


@pytest.mark.parametrize("task", ["classification", "regression"])
class TestTwoProcessesEqualOne:
    def test_numbers(self, both, task):
        """Metrics of validation and test, of unknown sets, and all that calibrator and scores learned."""
        one, two = (json.loads((both[0] / task / n / "found.json").read_text()) for n in "12")
        assert one.keys() == two.keys()
        wanted = {
            "classification": ["val/cls/NLL", "test/scaled/cal/ECE", "calibration.tau", "conformal.limits"],
            "regression": ["val/reg/RMSE", "test/conformal/Width"],
        }
        for name in [*wanted[task], "ood/one/mahalanobis/AUROC", "scores.members.Generative.reference"]:
            assert name in one
        for name, value in one.items():
            assert two[name] == pytest.approx(value, rel=1e-6, abs=1e-6, nan_ok=True), name
        counts = [two[f"ood/{name}"] for name in ("held_out/n_id", "held_out/n_ood")]
        assert (*counts, two["ood/one/n_ood"]) == (133, 57, 1)

    def test_temperature_and_reference_were_learned(self, both, task):
        found = json.loads((both[0] / task / "2" / "found.json").read_text())
        assert found["conformal.samples"] == [51 if task == "classification" else 1]
        if task == "classification":
            assert 0.1 < found["calibration.tau"][0] < 19
            assert -1 < found["conformal.limits"][0] < 0
            assert all(abs(value) < 1e6 for value in found["scores.members.Generative.reference"])
        assert found["scores.members.Generative.fitted"] == [1.0]

    def test_scores_of_samples(self, both, task):
        one, two = (rows(both[0] / task / n / "scores.csv") for n in "12")
        places = [("test", i) for i in range(133)] + [("held_out", i) for i in range(57)] + [("one", 0)]
        assert [(row["set"], int(row["sample"])) for row in two] == places
        same_rows(one, two, ("set",))

    def test_predictions(self, both, task):
        folder = both[0] / task
        one, two = (rows(folder / n / "predictions.csv") for n in "12")
        assert [*two[0]][:2] == ["loader", "sample"]
        places = [("known", i) for i in range(133)] + [("one", i) for i in range(3)]
        assert [(row["loader"], int(row["sample"])) for row in two] == places
        same_rows(one, two, ("loader", "set", "known"))
        assert not [path for n in "12" for path in (folder / n).iterdir() if "part" in path.name]

    def test_record(self, both, task):
        one, two = (json.loads((both[0] / task / n / "record.json").read_text()) for n in "12")
        assert one["sets"] == two["sets"]
        one, two = (json.loads((both[0] / task / n / "passes.json").read_text()) for n in "12")
        assert one.keys() == two.keys()
        assert bool(one) == (task == "classification")
        for name, values in one.items():
            np.testing.assert_allclose(two[name], values, rtol=1e-6, atol=1e-6, err_msg=name)


def test_shifts(both):
    """31 samples of each shift, one shift behind the other: batches of two processes hold parts of both."""
    one, two = (json.loads((both[0] / "classification" / n / "shift" / "record.json").read_text()) for n in "12")
    assert [(s["severity"], s["samples"]) for s in two["shifts"]] == [(0, 133), (2, 31), (5, 31)]
    for a, b in zip(one["shifts"], two["shifts"], strict=True):
        assert a["predicted"] == pytest.approx(b["predicted"], rel=1e-6)
        assert a["final"] == pytest.approx(b["final"], rel=1e-6)


def same_rows(one, two, texts):
    """Equal numbers in equal columns."""
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if name in texts:
                assert value == b[name]
            else:
                assert float(b[name]) == pytest.approx(float(value), rel=1e-6, abs=1e-6), name


def test_an_error_of_the_first_process_ends_all_with_its_cause(both):
    folder = both[0] / "Broken"
    (first, _), (second, seconds) = (json.loads((folder / f"heard{i}.json").read_text()) for i in (0, 1))
    error, total = json.loads((folder / "end.json").read_text())
    assert first == "no space is left for the structure"
    assert second == f"the first process failed while this one waited for it: OSError: {first}"
    assert first in error
    assert max(seconds, total) < 20


SWEEP = [
    (2, 3, (1, 7, 13)),
    *(pytest.param(2, batch, range(1, 14), marks=pytest.mark.slow) for batch in (1, 2, 3, 16)),
    *(pytest.param(3, batch, range(1, 14), marks=pytest.mark.slow) for batch in (1, 2, 4)),
]


@pytest.mark.parametrize(("processes", "batch", "sizes"), SWEEP)
def test_a_set_of_any_size(tmp_path, processes, batch, sizes):
    """Of 1, 7 and 13 samples in batches of 3, the last batch of the second of two processes holds but a copy."""
    said = run(Path(__file__).with_name("sizes.py"), tmp_path, processes, batch, *sizes)
    assert ("the last batch of each epoch is one sample" in said) == (batch > 1)
    one, *others = (json.loads((tmp_path / f"{n + 1}" / "found.json").read_text()) for n in range(processes))
    assert one.keys() == {f"{size} {kind}" for size in sizes for kind in ("classes", "numbers")}
    for two in others:
        same_visits(one, two)


def same_visits(one, two):
    """Equal numbers of equal sets; few values make many ties."""
    assert one.keys() == two.keys()
    for name, visit in one.items():
        other = two[name]
        assert visit["metrics"].keys() == other["metrics"].keys()
        for key, value in visit["metrics"].items():
            if not key.startswith("train/"):  # a step trains on copies too
                assert other["metrics"][key] == pytest.approx(value, rel=1e-6, abs=1e-6, nan_ok=True), (name, key)
        same_rows(*(list(csv.DictReader(part["rows"])) for part in (visit, other)), ("known", "set"))


@pytest.mark.slow
def test_a_process_may_work_longer_than_the_group_waits_and_hears_of_one_that_dies(tmp_path):
    running = start(tmp_path, "slow", "alone")
    said, _ = running.communicate(timeout=240)
    assert running.returncode == 0, said[-3000:]
    assert json.loads((tmp_path / "Slow" / "end.json").read_text())[0] == "none"
    assert [json.loads((tmp_path / "Slow" / f"heard{i}.json").read_text())[0] for i in (0, 1)] == ["fine", "fine"]
    error, seconds = json.loads((tmp_path / "Alone" / "end.json").read_text())
    assert "process 1 terminated with exit code 3" in error
    assert seconds < 20


@pytest.mark.slow
def test_a_head_swapped_into_a_foreign_module(tmp_path):
    """One tree, weights and calibration in all processes; a test of one checkpoint gives what one process gives."""
    runpy.run_path(str(SCRIPT))["swapped"](tmp_path, 1)
    running = start(tmp_path, "swap")
    said, _ = running.communicate(timeout=240)
    assert running.returncode == 0, said[-3000:]
    one, two = (json.loads((tmp_path / "swap" / n / "found.json").read_text()) for n in "12")
    assert {key: one[key] for key in one if key != "val_loss"} == pytest.approx(
        {key: two[key] for key in one if key != "val_loss"}, rel=1e-6, abs=1e-9
    )
    assert one["ood/noise/knn/AUROC"] > 0.9
