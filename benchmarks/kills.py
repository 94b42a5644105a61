"""`kill -9` at chosen and at random moments of a short fit and test, and what comes out when the command is repeated.

A process that has imported everything forks one child for each command, so that a kill meets the work and not imports.
Every command is `brainet fit … --ckpt_path last` or `brainet test …`; a killed one is simply given again.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.store import stamp

ROOT = Path(__file__).parents[1]
LOGGER = '[{"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "digits"}}]'
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
TWO = ["--trainer.devices=2", "--trainer.strategy=ddp_fork"]  # processes, either of which is killed
FIT = ["fit", "--config", "digits", f"--trainer.logger={LOGGER}", "--data.batch_size=64"]


class Moment(NamedTuple):
    """Just before or after a call of a function, or with half of what it writes written."""

    target: str  # module:name
    call: int = 1
    when: str = "before"


WRITING = Moment("torch:save", 4, "half")  # two checkpoints an epoch: the last one of the second epoch
VALIDATING = Moment("brainet_pl.lightning.module:BRAINet.validation_step", 4)
FITTING = [
    Moment("brainet_pl.features.extraction:extract_features", 1, "after"),
    Moment("brainet_pl.callbacks.structure:learn_structure"),
    Moment("brainet_pl.callbacks.structure:learn_structure", 1, "after"),
    Moment("os:replace"),  # the learned tree is written, but has not its name yet
    Moment("brainet_pl.lightning.module:BRAINet.training_step", 3),
    Moment("torch:save", 1, "half"),
    Moment("brainet_pl.callbacks:LastCheckpoint.on_train_epoch_end", 2),  # the best one is there, the last one not
    WRITING,
    VALIDATING,
    Moment("brainet_pl.lightning.module:BRAINet.optimizer_step", 20, "after"),
    Moment("brainet_pl.storage.runs:Rows.save", 2, "after"),
    Moment("brainet_pl.storage.runs:Rows.rewind"),
]
TESTING = [
    Moment("brainet_pl.lightning.module:BRAINet.test_step", 2),
    Moment("brainet_pl.evaluation.summary:write_scores", 1, "after"),
]


class Server:
    """Runs commands of `brainet` in a folder, one at a time, each in a process that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        env = {name: value for name, value in os.environ.items() if "WANDB" not in name}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(
        self,
        words: Sequence[str],
        run: str,
        die: Moment | None = None,
        seconds: float | None = None,
        rank: int | None = None,
    ) -> tuple[bool, float]:
        """Whether the command came to its end, and after how many seconds.

        Args:
            words: the command's.
            run: the folder to run it in, below the server's.
            die: the moment at which the process kills itself.
            seconds: after so many it is killed.
            rank: the process of a fit with several that is killed; None is the one that started them.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([list(words), run, die]), file=self._process.stdin, flush=True)
        pid, start = int(self._process.stdout.readline()), time.monotonic()
        if seconds is not None:
            time.sleep(seconds)
            victims = [pid] if rank is None else _children(pid)[rank : rank + 1]
            for victim in victims:
                os.kill(victim, signal.SIGKILL)  # it is not reaped before the next line: this is nobody else's number
        print(file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        if status not in (0, -signal.SIGKILL) and rank is None:
            log = (self.folder / run / "log.txt").read_text()
            raise RuntimeError(f"expected an end or a kill, got status {status} of brainet {' '.join(words)}:\n{log}")
        return status == 0, time.monotonic() - start


def _children(pid: int) -> list[int]:
    """The processes that a process has started, in their order (Linux)."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def serve() -> None:
    """The server's side: forks a child for every line, and waits for it."""
    import brainet_pl.cli.lightning_cli  # noqa: F401  once for all children

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words, run, die = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(words, Path(run), die)
        print(pid, file=answers, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


def _child(words: list[str], run: Path, die: list[Any] | None) -> None:
    run.mkdir(parents=True, exist_ok=True)
    os.chdir(run)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        if die is not None:
            _arm(Moment(*die))
        from brainet_pl.cli import main

        main(words)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _arm(moment: Moment) -> None:
    """Replace the function by one that kills the process."""
    module, _, path = moment.target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), 0

    @functools.wraps(function)
    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == moment.call and moment.when == "half":
            args[1].write(b"half a file")
            args[1].flush()
        if calls == moment.call and moment.when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if calls == moment.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


# -- what is compared -------------------------------------------------------------------------------------------------


def last_run(folder: Path) -> Path:
    """The run that came to an end: killed before its first checkpoint, a fit begins anew in another folder."""
    return max((folder / "runs" / "digits").glob("version_*/checkpoints/last.ckpt")).parents[1]


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two folders that were fitted and tested in: weights, optimizer, best, metrics, files."""
    import torch

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return isinstance(b, torch.Tensor) and torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(same, a, b))
        return bool(a == b)

    found, runs = [], [last_run(folder) for folder in (one, other)]
    contents = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in runs]
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "brainet_random"):
        if not same(*(content[part] for content in contents)):
            found.append(part)
    if not same(*(_best(content) for content in contents)):
        found.append("best")
    names = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in runs]
    if names[0] != names[1]:
        found.append(f"files {names}")
    if _rows(runs[0]) != _rows(runs[1]):
        found.append("metrics.csv")
    tested = [folder / "runs" / "record.json" for folder in (one, other)]
    if any(record.exists() for record in tested):
        if not same(*(json.loads(record.read_text()) | {"created": None} for record in tested)):
            found.append("record.json")
        if not same(*(record.with_name("scores.csv").read_text() for record in tested)):
            found.append("scores.csv")
    return found


def _best(content: dict[str, Any]) -> Any:
    (state,) = [state for key, state in content["callbacks"].items() if key.startswith("ModelCheckpoint")]
    return Path(state["best_model_path"]).name, state["best_model_score"]


def _rows(run: Path) -> list[dict[str, str]]:
    """Rows of metrics.csv as logged, without the seconds that learning took."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [{name: value for name, value in row.items() if name != "structure/seconds"} for row in rows]


# -- the experiment ---------------------------------------------------------------------------------------------------


class Kills:
    """Fits and tests in one folder, killed again and again, beside an uninterrupted run in another.

    Args:
        server: runs the commands.
        epochs: of a fit.
        tests: whether a test follows the fit.
        more: words of the fit.
    """

    def __init__(self, server: Server, epochs: int = 6, tests: bool = True, more: Sequence[str] = ()) -> None:
        self.server, self.tests = server, tests
        self.fit = [*FIT, f"--trainer.max_epochs={epochs}", "--ckpt_path", "last", *QUIET, *more]
        self.stages: Counter[str] = Counter()
        self.wrong: list[str] = []
        _, self.fitting = server.run(self.fit, "whole")
        self.testing = server.run(self.test("whole"), "whole")[1] if tests else 0.0

    def test(self, run: str) -> list[str]:
        """The command that tests the last state."""
        checkpoint = last_run(self.server.folder / run) / "checkpoints" / "last.ckpt"
        path = checkpoint.relative_to(self.server.folder / run)
        return ["test", "--ckpt_path", str(path), "--trainer.logger=false", *QUIET]

    def chosen(self, run: str, fitting: Sequence[Moment], testing: Sequence[Moment] = ()) -> None:
        """Die at each of these moments in turn, then go on to the end."""
        for moment in fitting:
            self._count(run, "fit", self.server.run(self.fit, run, moment)[0])
        self.server.run(self.fit, run)
        for moment in testing:
            self._count(run, "test", self.server.run(self.test(run), run, moment)[0])
        self._finish(run)

    def at_random(self, run: str, rng: random.Random, fits: int, tests: int) -> None:
        """Die at random moments: at most so many times in the fit and in the test."""
        done = False
        for _ in range(fits):
            done = done or self._count(run, "fit", self.server.run(self.fit, run, None, rng.random() * self.fitting)[0])
        if not done:
            self.server.run(self.fit, run)
        for _ in range(tests):
            words = self.test(run)
            if self._count(run, "test", self.server.run(words, run, None, rng.random() * self.testing)[0]):
                break
        self._finish(run)

    def of_ranks(self, run: str, rng: random.Random, fits: int) -> None:
        """Kill one and the other process of a fit with two, then go on to the end."""
        for number in range(fits):
            seconds = rng.random() * self.fitting
            if self._count(run, "fit", self.server.run(self.fit, run, None, seconds, number % 2)[0]):
                break
        else:
            self.server.run(self.fit, run)
        self._finish(run)

    def _finish(self, run: str) -> None:
        if self.tests:
            self.server.run(self.test(run), run)
        folder = self.server.folder
        self.wrong += [f"{run}: {what}" for what in differences(folder / "whole", folder / run)]
        self.wrong += [f"{run}: left {path.name}" for path in last_run(folder / run).rglob(".*.tmp")]

    def _count(self, run: str, command: str, done: bool) -> bool:
        if not done:
            folder = self.server.folder / run / "runs"
            runs = sorted((folder / "digits").glob("version_*"), key=lambda path: int(path.name[8:]))
            begun = runs and (runs[-1] / "checkpoints" / "last.ckpt").exists()
            if command == "test":
                stage = "test"
            elif any(folder.rglob(".*.tmp")):
                stage = "writing a file"
            elif not any((folder / "structures").glob("*.json")):
                stage = "start, features and structure"
            else:
                stage = "later epochs" if begun else "first epoch"
            self.stages[stage] += 1
        return done

    @property
    def count(self) -> int:
        """Kills so far."""
        return sum(self.stages.values())


def kills(folder: Path, least: int = 40, seed: int = 0) -> dict[str, Any]:
    """At least so many kills: all chosen moments once, the others at random; and what differed in the end."""
    rng = random.Random(seed)
    with Server(folder) as server:
        experiment = Kills(server)
        experiment.chosen("chosen", FITTING, TESTING)
        chosen, rounds = experiment.count, 0
        while experiment.count < least:
            rounds += 1
            experiment.at_random(f"random_{rounds}", rng, fits=4, tests=2)
        return {
            "kills": experiment.count,
            "chosen": chosen,
            "random": experiment.count - chosen,
            "runs": 1 + rounds,
            "stages": dict(sorted(experiment.stages.items())),
            "differences": experiment.wrong,
            "seconds of a fit": round(experiment.fitting, 1),
        }


def kills_of_ranks(folder: Path, rounds: int = 3, seed: int = 0) -> dict[str, Any]:
    """Kills of one and the other process of fits with two; and what differed in the end."""
    rng = random.Random(seed)
    with Server(folder) as server:
        experiment = Kills(server, epochs=3, tests=False, more=TWO)
        for number in range(rounds):
            experiment.of_ranks(f"run_{number}", rng, fits=4)
        stages = dict(sorted(experiment.stages.items()))
        return {"kills": experiment.count, "runs": rounds, "stages": stages, "differences": experiment.wrong}


def main(argv: Sequence[str], out: Path) -> None:
    """`reliability.py kills [--least N] [--seed S]`: prints what came out and updates a section of a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--least", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = kills(Path(folder), args.least, args.seed)
        found["of one process of two"] = kills_of_ranks(Path(folder) / "ranks", seed=args.seed)
    content = json.loads(out.read_text()) if out.exists() else {}
    content["kills"] = found
    content.setdefault("measured", {})["kills"] = stamp()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    serve()
