"""Settings that are tried: drawn within their ranges, fitted once each, compared."""

import json
import random

import pytest
import yaml

from brainet_pl.cli import main, sweep


@pytest.fixture(autouse=True)
def _away(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")


def write(content):
    with open("mine.yaml", "w") as file:
        yaml.safe_dump(content, file)
    return sweep.sweep_path("mine.yaml")


GRID = {
    "method": "grid",
    "metric": {"name": "val/cls/NLL", "goal": "minimize"},
    "command": ["brainet", "fit", "--config", "digits", "${args}"],
    "parameters": {"model.lr": {"values": [0.001, 0.01]}, "model.passes": {"values": [2]}},
}


def test_every_shipped_sweep_can_be_drawn():
    for path in sweep.shipped().values():
        found = sweep.read_sweep(path)
        many = sweep.trials(found, 50)
        assert many == sweep.trials(found, 50)
        assert many != sweep.trials(found, 50, seed=1)
        for name, settings in found.parameters.items():
            values = [trial[name] for trial in many]
            assert len(set(values)) > 1
            if "values" in settings:
                assert set(values) <= set(settings["values"])
            else:
                assert all(settings["min"] <= value <= settings["max"] for value in values)


def test_a_logarithmic_range_is_drawn_evenly_on_its_scale():
    settings = {"distribution": "log_uniform_values", "min": 0.01, "max": 100.0}
    rng = random.Random(0)
    small = [sweep.draw(settings, rng) < 1 for _ in range(2000)]
    assert 0.46 < sum(small) / 2000 < 0.54
    assert all(isinstance(sweep.draw({"min": 1, "max": 3}, rng), int) for _ in range(5))


def test_a_grid_is_everything_once():
    found = sweep.read_sweep(write(GRID))
    assert sweep.trials(found) == [{"model.lr": 0.001, "model.passes": 2}, {"model.lr": 0.01, "model.passes": 2}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "bayes"}, "expected the method random or grid for a sweep on this machine, got 'bayes'"),
        ({"parameters": {"a": {"value": 1}}}, "expected values, or min and max, of a"),
        ({"parameters": {"a": {"min": 0, "max": 1}}}, "expected values of a for a grid, got a range"),
        ({"parameters": {"a": {"values": list(range(2000))}}}, "expected a grid of at most 1,000 trials, got 2,000"),
    ],
)
def test_a_wrong_sweep_is_told_at_once(change, message):
    with pytest.raises(ValueError, match=message):
        sweep.trials(sweep.read_sweep(write(GRID | change)))


def test_an_unknown_sweep_lists_the_known_ones():
    with pytest.raises(FileNotFoundError, match=r"expected a file or one of the shipped sweeps \(digits"):
        sweep.sweep_path("nothing")


@pytest.mark.slow
def test_a_sweep_fits_compares_and_goes_on(tmp_path, capsys):
    write(GRID)
    words = ["sweep", "mine.yaml", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    main(words)
    shown = capsys.readouterr().out
    out = tmp_path / "runs" / "sweep_mine"
    assert json.loads((out / "trial_1" / "done.json").read_text()) == {"model.lr": 0.01, "model.passes": 2}
    assert "now test it: brainet test --ckpt_path runs/sweep_mine/trial_" in shown
    assert (out / "comparison.csv").is_file()
    before = (out / "trial_0" / "metrics.csv").stat().st_mtime_ns
    main(words)  # nothing is fitted again
    assert (out / "trial_0" / "metrics.csv").stat().st_mtime_ns == before
    assert "trial 1 of 2" not in capsys.readouterr().out
