"""How time and memory of structure learning grow: `python benchmarks/structure.py growth` runs this.

The trees of tables in memory are timed in this process. Every cell of a stream has a process of its own, so that its
peak of memory is its own too; batches are drawn anew in every pass, and the time that this takes is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from common.store import Store
from numpy.typing import NDArray
from torch.multiprocessing import start_processes

from brainet_pl.structure import FeatureStream, PreparedData, learn_structure
from brainet_pl.structure.learn import sample_paths
from brainet_pl.structure.statistics import half_weights

BASE = {"d": 64, "N": 10_000, "s": 2, "max_order": 1}
SWEEPS = {
    "d": [16, 32, 64, 128, 256],
    "N": [1000, 3000, 10_000, 30_000],
    "s": [1, 2, 3, 4],
    "max_order": [0, 1, 2, 3],
}
STREAM_N = [(n, 512) for n in (10_000, 30_000, 100_000, 300_000, 1_000_000)]
STREAM_D = [(20_000, d) for d in (64, 256, 1024, 4096)]
RANKS = [(100_000, 512, processes) for processes in (1, 2)]
WHOLE_TREE = 512  # features up to which the tree is learned too, not only the matrices that it needs
BATCH = 4000
LABELS = {"d": "variables d", "N": "rows N", "s": "samples s", "max_order": "largest order"}


class Batches:
    """Batches `first`, `first + every`, … of (n, d) zero-inflated features with 16 common causes; counts its time."""

    def __init__(self, n: int, d: int, first: int = 0, every: int = 1) -> None:
        self.n, self.d, self.first, self.every = n, d, first, every
        self.mix = 0.35 * np.random.default_rng(1).standard_normal((16, d), dtype=np.float32)
        self.seconds, self.passes = 0.0, 0

    def __call__(self) -> Iterator[NDArray[np.float32]]:
        """A pass over the data."""
        self.passes += 1
        for i in range(self.first * BATCH, self.n, self.every * BATCH):
            start = time.perf_counter()
            rng, rows = np.random.default_rng(i), min(BATCH, self.n - i)
            causes = rng.standard_normal((rows, 16), dtype=np.float32)
            batch = np.maximum(causes @ self.mix + rng.standard_normal((rows, self.d), dtype=np.float32), 0)
            self.seconds += time.perf_counter() - start
            yield batch


def forget_peak() -> float:
    """The memory of this process now, in MiB, which is its peak from now on; imports had a higher one."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> float:
    """The most memory that this process has had since `forget_peak`, in MiB; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def stream_cell(n: int, d: int) -> dict[str, float]:
    """Seconds of the seven matrices of a tree of two levels, and of the tree; MiB beyond those at the start."""
    before, batches, start = forget_peak(), Batches(n, d), time.perf_counter()
    data = PreparedData.prepare(FeatureStream(batches), 3)
    data.announce(half_weights(data.n, 0, path) for path in sample_paths((2,), 2))
    data.correlation()
    found = {"matrices": time.perf_counter() - start - batches.seconds, "passes": float(batches.passes)}
    if d <= WHOLE_TREE:
        learn_structure(data, test="gaussian", progress=False)
        found["tree"] = time.perf_counter() - start - batches.seconds
    return found | {"MiB": peak() - before}


def rank_cell(n: int, d: int, processes: int) -> dict[str, float]:
    """Seconds of the slowest of so many processes that share the rows, without those that batches take."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (n, d, processes, folder), nprocs=processes, start_method="spawn")
        return {"seconds": max(float(path.read_text()) for path in Path(folder).glob("*.txt"))}


def _rank(rank: int, n: int, d: int, processes: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes, timeout=timedelta(minutes=30)
    )
    batches = Batches(n, d, rank, processes)
    dist.barrier()
    start = time.perf_counter()
    learn_structure(FeatureStream(batches, shared=True), test="gaussian", max_order=1, progress=False)
    (Path(folder) / f"{rank}.txt").write_text(str(time.perf_counter() - start - batches.seconds))
    dist.destroy_process_group()


CELLS: dict[str, Callable[..., dict[str, float]]] = {"stream": stream_cell, "ranks": rank_cell}


def alone(kind: str, *arguments: int) -> dict[str, float]:
    """A cell in a process of its own, on one thread."""
    folders = [str(Path(__file__).parent), *sys.path]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, __file__, kind, *map(str, arguments)]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    cell: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(kind, *arguments, {k: round(v, 2) for k, v in cell.items()}, flush=True)
    return cell


def measure(out: Path, timed: Callable[..., Any], relu_features: Callable[..., Any], smoke: bool = False) -> None:
    """All cells, of which finished ones are kept in `structure_growth.json`, and `structure_growth.png`."""
    stream_n, stream_d, ranks = STREAM_N, STREAM_D, RANKS
    if smoke:
        stream_n, stream_d, ranks = [(300, 6), (600, 6)], [(300, 6), (300, 8)], [(300, 6, 1)]
    store = Store(out / "structure_growth.json", {"base": BASE, "batch": BATCH, "threads": 1})

    def tree_cell(test: str, case: dict[str, int]) -> float:
        x = relu_features(case["N"], case["d"])
        settings = {"s": case["s"], "max_order": case["max_order"], "test": test, "threshold": 0.05}
        seconds: float = timed(partial(learn_structure, x, progress=False, **settings), 1 if smoke else 3)[1]
        print(test, case, round(seconds, 3), flush=True)
        return seconds

    trees: dict[str, dict[str, list[float]]] = {}
    for name, values in SWEEPS.items():
        for test in ("gaussian", "cmi"):
            cases = [{**BASE, name: value} for value in values]
            keys = [f"tree, {test}, " + ", ".join(f"{k} {v}" for k, v in case.items()) for case in cases]
            found = [store.cell(k, partial(tree_cell, test, case)) for k, case in zip(keys, cases, strict=True)]
            trees.setdefault(name, {})[test] = found
    streams = {
        (n, d): store.cell(f"stream, {n} × {d}", partial(CELLS["stream"] if smoke else partial(alone, "stream"), n, d))
        for n, d in [*stream_d, *stream_n]
    }
    shared = [store.cell(f"ranks, {n} × {d}, {k}", partial(alone, "ranks", n, d, k)) for n, d, k in ranks]
    draw(out / "structure_growth.png", trees, streams, stream_n, stream_d, shared, ranks)


def draw(
    path: Path,
    trees: dict[str, dict[str, list[float]]],
    streams: dict[tuple[int, int], dict[str, float]],
    stream_n: list[tuple[int, int]],
    stream_d: list[tuple[int, int]],
    shared: list[dict[str, float]],
    ranks: list[tuple[int, int, int]],
) -> None:
    """Two rows of panels: tables in memory above, streams below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    above, below = figure.subfigures(2, 1)
    axes = above.subplots(1, 4, sharey=True)
    for ax, (name, tests) in zip(axes, trees.items(), strict=True):
        for (test, seconds), style in zip(tests.items(), ("o-", "s--"), strict=True):
            ax.plot(SWEEPS[name], seconds, style, label=test)
        ax.set(yscale="log", xlabel=LABELS[name], xscale="log" if name in ("d", "N") else "linear")
        ax.set_xticks(SWEEPS[name], [f"{v:,}" for v in SWEEPS[name]])
    axes[0].set_ylabel("seconds (median of 3)")
    axes[0].legend(title="test")
    fixed = ", ".join(f"{k} = {v:,}" for k, v in BASE.items())
    above.suptitle(f"A tree from a table in memory; where not on the axis: {fixed}", fontsize=10)

    axes = [*axes, *below.subplots(1, 4)]
    for ax, cells, k, fixed in (
        (axes[4], stream_n, 0, f"d = {stream_n[0][1]:,}"),
        (axes[5], stream_d, 1, f"N = {stream_d[0][0]:,}"),
    ):
        values = [cell[k] for cell in cells]
        ax.plot(values, [streams[cell]["matrices"] for cell in cells], "o-", label="its 7 matrices")
        whole = [(value, streams[c]["tree"]) for value, c in zip(values, cells, strict=True) if "tree" in streams[c]]
        ax.plot(*zip(*whole, strict=True), "^:", label="the tree")
        ax.set(xscale="log", yscale="log", xlabel=f"{LABELS['Nd'[k]]} ({fixed})", ylabel="seconds, one thread")
        ax.set_xticks(values, [f"{v:,}" for v in values], fontsize=8)
        ax.legend()
    ax = axes[6]
    for cells, style, label in (
        (stream_n, "o-", f"d = {stream_n[0][1]:,}"),
        (stream_d, "s--", f"N = {stream_d[0][0]:,}"),
    ):
        size = [4 * n * d / 2**20 for n, d in cells]
        ax.plot(size, [streams[cell]["MiB"] for cell in cells], style, label=label)
    ends = [4 * n * d / 2**20 for n, d in (*stream_n, *stream_d)]
    ax.plot([min(ends), max(ends)], [min(ends), max(ends)], color="grey", lw=0.8, label="the features")
    ax.set(xscale="log", yscale="log", xlabel="MiB of the features", ylabel="MiB held at the most")
    ax.legend()
    ax = axes[7]
    seconds = [cell["seconds"] for cell in shared]
    bars = ax.bar([str(k) for _, _, k in ranks], seconds, width=0.5)
    ax.bar_label(bars, [f"{s:.0f} s, {s / seconds[0]:.0%}" for s in seconds])
    ax.set(xlabel=f"processes ({ranks[0][0]:,} × {ranks[0][1]:,})", ylabel="seconds, one thread each")
    ax.margins(y=0.15)
    below.suptitle(
        "A tree from a stream, s = 2, max_order 1, Gaussian test, without the time of the batches", fontsize=10
    )
    for ax in axes:
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    kind, *numbers = sys.argv[1:]
    print(json.dumps(CELLS[kind](*map(int, numbers))))
