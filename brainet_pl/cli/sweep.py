"""`brainet sweep NAME`: try settings of a shipped sweep on this machine, without an account, and compare what came out.

A sweep is a file in the form that W&B has for it: `command`, `method`, `metric` and `parameters`. Here each trial is
one `brainet fit` after the other, in a process of its own; settings are judged by the metric, one of validation data,
and the best one is shown with the command that tests it. `--wandb` hands the same file to W&B instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from brainet_pl import configs
from brainet_pl._utils.checks import UsageError
from brainet_pl.evaluation import compare
from brainet_pl.evaluation.report.read import read_history

MOST_GRID = 1000  # trials of a grid: more are a mistake
PLAN = "sweep.json"


class Sweep(NamedTuple):
    """What a sweep tries, and by what it is judged.

    Attributes:
        command: The words before the settings; the first is `brainet`.
        method: "random" or "grid".
        metric: The metric by which settings are judged.
        higher: Whether higher values of the metric are better.
        cap: The largest number of trials.
        parameters: Setting → `values`, or `min`, `max` and a `distribution`.
    """

    command: list[str]
    method: str
    metric: str
    higher: bool
    cap: int
    parameters: dict[str, dict[str, Any]]


def shipped() -> dict[str, Path]:
    """The shipped sweeps by name: `sweep_<name>.yaml`, and `sweep.yaml` as "digits"."""
    folder = Path(str(configs.__path__[0]))
    found = {path.stem.removeprefix("sweep_"): path for path in sorted(folder.glob("sweep_*.yaml"))}
    return {"digits": folder / "sweep.yaml"} | found


def sweep_path(name: str) -> Path:
    """The file of a sweep: one of the shipped by name, or the user's own."""
    if Path(name).is_file():
        return Path(name)
    known = shipped()
    if name not in known:
        raise UsageError(f"expected a file or one of the shipped sweeps ({', '.join(known)}), got {name!r}")
    return known[name]


def read_sweep(path: Path) -> Sweep:
    """Read a sweep, or say what is wrong with it."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not {"command", "metric", "parameters"} <= set(content):
        raise ValueError(
            f"expected command, metric and parameters in {path}, got something else: see configs/sweep.yaml"
        )
    method = content.get("method", "random")
    if method not in ("random", "grid"):
        raise ValueError(f"expected the method random or grid for a sweep on this machine, got {method!r}: use --wandb")
    for name, settings in content["parameters"].items():
        if not ({"values"} <= set(settings) or {"min", "max"} <= set(settings)):
            raise ValueError(f"expected values, or min and max, of {name} in {path}, got {', '.join(settings)}")
        if method == "grid" and "values" not in settings:
            raise ValueError(f"expected values of {name} for a grid, got a range: list them, or search at random")
    metric = content["metric"]
    return Sweep(
        list(map(str, content["command"])), method, metric["name"], metric.get("goal") == "maximize",
        int(content.get("run_cap", 20)), content["parameters"],
    )  # fmt: skip


def trials(sweep: Sweep, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """The settings of each trial: all of a grid, or so many drawn at random, the same for the same seed."""
    names = list(sweep.parameters)
    most = sweep.cap if count is None else count
    if sweep.method == "grid":
        sizes = math.prod(len(settings["values"]) for settings in sweep.parameters.values())
        if sizes > MOST_GRID:
            raise ValueError(f"expected a grid of at most {MOST_GRID:,} trials, got {sizes:,}: search at random")
        grid = itertools.product(*(settings["values"] for settings in sweep.parameters.values()))
        return [dict(zip(names, values, strict=True)) for values in grid][:most]
    rng = random.Random(seed)
    return [{name: draw(sweep.parameters[name], rng) for name in names} for _ in range(most)]


def draw(settings: Mapping[str, Any], rng: random.Random) -> Any:
    """One value: of a list, or between two ends as the distribution says; whole ends give whole numbers."""
    if "values" in settings:
        return rng.choice(settings["values"])
    low, high, kind = settings["min"], settings["max"], settings.get("distribution", "")
    if "log" in kind:
        return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.6g}")
    if isinstance(low, int) and isinstance(high, int) and kind in ("", "int_uniform"):
        return rng.randint(low, high)
    return float(f"{rng.uniform(low, high):.6g}")


def words_of(sweep: Sweep, settings: Mapping[str, Any], extra: Sequence[str], folder: Path, number: int) -> list[str]:
    """The words of one fit: those of the sweep, its settings, the user's own, and a folder of its own."""
    given = [f"--{name}={value}" for name, value in settings.items()]
    words = [part for word in sweep.command[1:] for part in (given if word == "${args}" else [word])]
    words = [word for word in words if not word.startswith("--trainer.logger")]  # of a logger that is not used here
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder.parent), "name": folder.name}}
    logger["init_args"]["version"] = f"trial_{number}"  # type: ignore[index]
    return [*words, f"--trainer.logger={json.dumps(logger)}", *extra]


def result_of(folder: Path, sweep: Sweep) -> float | None:
    """The best value of the metric in the history of a fit; None if there is none."""
    _, values = read_history(folder).get(sweep.metric, ([], []))
    finite = [value for value in values if math.isfinite(value)]
    return (max(finite) if sweep.higher else min(finite)) if finite else None


def run(path: Path, out: Path, count: int | None = None, seed: int = 0, extra: Sequence[str] = ()) -> Path | None:
    """Fit every trial that has not been fitted yet, compare them all, and say which is best; its folder."""
    sweep = read_sweep(path)
    planned = trials(sweep, count, seed)
    out.mkdir(parents=True, exist_ok=True)
    (out / PLAN).write_text(json.dumps({"sweep": str(path), "seed": seed, "trials": planned}, indent=1))
    for number, settings in enumerate(planned):
        folder, mark = out / f"trial_{number}", out / f"trial_{number}" / "done.json"
        if mark.is_file() and json.loads(mark.read_text()) == settings:
            continue
        shown = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in settings.items())
        print(f"trial {number + 1} of {len(planned)}: {shown}", flush=True)
        out.joinpath("logs").mkdir(exist_ok=True)
        log = out / "logs" / f"trial_{number}.txt"
        command = [sys.executable, "-m", "brainet_pl.cli", *words_of(sweep, settings, extra, out, number)]
        with log.open("w") as file:
            failed = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        if failed:
            print(f"  failed, see {log}: {log.read_text().strip().splitlines()[-1:]}", flush=True)
            continue
        mark.write_text(json.dumps(settings))
        value = result_of(folder, sweep)
        print(f"  {sweep.metric} {'not logged' if value is None else f'{value:.4g}'}", flush=True)
    return _conclude(sweep, out, len(planned))


def _conclude(sweep: Sweep, out: Path, count: int) -> Path | None:
    results = {out / f"trial_{i}": result_of(out / f"trial_{i}", sweep) for i in range(count)}
    found = {folder: value for folder, value in results.items() if value is not None}
    if not found:
        raise RuntimeError(f"expected at least one trial to end with {sweep.metric}, got none: see {out / 'logs'}")
    best = (max if sweep.higher else min)(found, key=lambda folder: found[folder])
    compare.write_comparison([str(folder) for folder in found], out / "comparison.html")
    print(f"best {sweep.metric} {found[best]:.4g}: {best}")
    print(f"comparison: {out / 'comparison.html'}")
    files = sorted((best / "checkpoints").glob("epoch*.ckpt")) or [best / "checkpoints" / "last.ckpt"]
    print(f"now test it: brainet test --ckpt_path {files[-1]}")
    return best


def main(args: Sequence[str]) -> None:
    """`brainet sweep NAME [--runs N] [--seed S] [--out DIR] [--wandb] [further words of brainet fit]`."""
    parser = argparse.ArgumentParser(
        "brainet sweep", description="Try settings on this machine and compare them; further words go to `brainet fit`."
    )
    parser.add_argument("name", help=f"a shipped sweep ({', '.join(shipped())}) or a file in the form of W&B's sweeps")
    parser.add_argument("--runs", type=int, help="trials; run_cap of the file if not given")
    parser.add_argument("--seed", type=int, default=0, help="seed of the settings that are drawn")
    parser.add_argument("--out", help="folder of the trials; runs/sweep_NAME if not given")
    parser.add_argument("--wandb", action="store_true", help="hand the file to W&B, which needs an account")
    words, extra = parser.parse_known_args(args)
    path = sweep_path(words.name)
    if words.wandb:
        subprocess.run([sys.executable, "-m", "wandb", "sweep", "--project", "brainet", str(path)], check=True)
        return
    run(path, Path(words.out or f"runs/sweep_{Path(words.name).stem}"), words.runs, words.seed, extra)
