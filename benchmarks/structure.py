"""The structure learner beside its peers: accuracy, speed and scaling.

    python benchmarks/structure.py accuracy --data DIR   # distance to five known networks, 15 cells
    python benchmarks/structure.py speed --data DIR      # ALARM, against a plain loop and causal-learn
    python benchmarks/structure.py scale --data DIR      # ResNet-20 features, 512 features, MNIST pixels
    python benchmarks/structure.py growth                # time and memory against d, N, s, max_order, ranks: a figure

Each prints a table and updates docs/results/structure.json. DIR holds `networks/*.bif`, `cifar10_train.npz`,
`resnet20_cifar10.pth` and `MNIST/raw`. Peers come with `pip install brainet_pl[benchmarks]`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bif import read_bif
from common.data import relu_features
from common.tables import table
from growth import measure
from numpy.typing import NDArray

from brainet_pl.structure import PDAG, cpdag, find_test, learn_structure, rai

OUT = Path(__file__).parents[1] / "docs" / "results"
NETWORKS = ["asia", "child", "insurance", "alarm", "win95pts"]
SIZES = [500, 5000, 20000]


def timed(call: Callable[[], Any], repeats: int = 1) -> tuple[Any, float]:
    """The first result and the median seconds of a call.

    Not by `torch.utils.benchmark`: beside this package an empty call of its timer took 1e-4 s, so that it timed calls
    of up to a second in blocks of ten (21 calls for one number).
    """
    results, seconds = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        results.append(call())
        seconds.append(time.perf_counter() - start)
    return results[0], statistics.median(seconds)


def save(section: str, content: Any) -> None:
    """Update one section of the JSON file."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "structure.json"
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything[section] = content
    path.write_text(json.dumps(everything, indent=1))


# -- accuracy -------------------------------------------------------------------------------------------------------


def causal_learn_pc(x: NDArray[np.int64], alpha: float = 0.05) -> PDAG:
    """PC with the G² test and the library's defaults."""
    from causallearn.search.ConstraintBased.PC import pc

    marks = pc(x, alpha=alpha, indep_test="gsq", show_progress=False).G.graph
    # i → j is marks[i, j] = -1, marks[j, i] = 1; i — j is -1, -1; a conflict is 1, 1
    return PDAG((marks == -1) | ((marks == 1) & (marks.T == 1)))


def pyagrum_miic(x: NDArray[np.int64]) -> PDAG:
    """MIIC, pyAgrum's constraint-based learner, as an equivalence class."""
    import pandas as pd
    import pyagrum as gum

    learner = gum.BNLearner(pd.DataFrame(x.astype(str), columns=[str(j) for j in range(x.shape[1])]))
    learner.useMIIC()
    graph = learner.learnPDAG()
    A = np.zeros((x.shape[1],) * 2, dtype=bool)
    name = [int(learner.nameFromId(i)) for i in range(x.shape[1])]
    for i, j in graph.arcs():
        A[name[i], name[j]] = True
    for i, j in graph.edges():
        A[name[i], name[j]] = A[name[j], name[i]] = True
    return PDAG(A)


def accuracy(data: Path, seeds: int) -> None:
    """Mean structural Hamming distance to the true equivalence class over seeds, for 5 networks × 3 sizes."""
    warnings.filterwarnings("ignore")
    methods: dict[str, Callable[[NDArray[np.int64]], PDAG]] = {
        "rai": lambda x: rai(x, test="g2"),
        "rai, recursion only": lambda x: rai(x, test="g2", second_pass=False, max_order=2),
        "causal-learn PC": causal_learn_pc,
        "pyAgrum MIIC": pyagrum_miic,
    }
    rows, result = [], []
    for name in NETWORKS:
        network = read_bif(data / "networks" / f"{name}.bif")
        truth = cpdag(network.dag)
        for n in SIZES:
            cell: dict[str, Any] = {"network": name, "rows": n}
            for label, method in methods.items():
                runs = []
                for seed in range(seeds):
                    x = network.sample(n, seed)
                    graph, seconds = timed(lambda method=method, x=x: method(x))
                    skeleton = int(np.triu(graph.skeleton != truth.skeleton).sum())
                    runs.append((graph.shd(truth), skeleton, seconds))
                shd, skeleton, seconds = np.mean(runs, axis=0).tolist()
                cell[label] = {"shd": shd, "skeleton": skeleton, "seconds": seconds}
            result.append(cell)
            rows.append([name, n, *(f"{cell[m]['shd']:.1f} ({cell[m]['seconds']:.2f} s)" for m in methods)])
            print(rows[-1], flush=True)
    mean = {m: {k: float(np.mean([c[m][k] for c in result])) for k in ("shd", "skeleton", "seconds")} for m in methods}
    rows.append(["mean", "", *(f"{mean[m]['shd']:.2f} ({mean[m]['seconds']:.2f} s)" for m in methods)])
    table(["network", "rows", *methods], rows)
    save("accuracy", {"seeds": seeds, "mean": mean, "cells": result})


# -- speed ----------------------------------------------------------------------------------------------------------


class LoopTest:
    """Conditional mutual information as one would first write it: a dictionary, filled row by row."""

    def __init__(self, x: NDArray[np.int64], threshold: float) -> None:
        self.rows, self.threshold = x.tolist(), threshold

    def block(self, condition: tuple[int, ...], left: Any, right: Any) -> NDArray[np.float64]:
        """(L, R) margins, one pair at a time."""
        return np.array([[self._margin(x, y, condition) if x != y else 0.0 for y in right] for x in left])

    def pairs(self, x: Any, y: Any, conditions: Any) -> NDArray[np.float64]:
        """(T,) margins, one pair at a time."""
        return np.array([self._margin(a, b, tuple(z)) for a, b, z in zip(x, y, conditions.tolist(), strict=True)])

    def _margin(self, x: int, y: int, condition: tuple[int, ...]) -> float:
        joint: dict[Any, int] = {}
        left: dict[Any, int] = {}
        right: dict[Any, int] = {}
        given: dict[Any, int] = {}
        for row in self.rows:
            z = tuple(row[v] for v in condition)
            for counts, key in ((joint, (row[x], row[y], z)), (left, (row[x], z)), (right, (row[y], z)), (given, z)):
                counts[key] = counts.get(key, 0) + 1
        information = sum(
            n * float(np.log(n * given[z] / (left[a, z] * right[b, z]))) for (a, b, z), n in joint.items()
        )
        return information / len(self.rows) - self.threshold


def speed(data: Path, repeats: int) -> None:
    """ALARM with 5,000 rows: the whole tree, and plain RAI against the loop and against PC."""
    x = read_bif(data / "networks" / "alarm.bif").sample(5000, 0)
    rows, result = [], {}
    for test, s in (("cmi", 2), ("cmi", 3), ("g2", 2), ("g2", 3)):
        learn = partial(learn_structure, x, s=s, test=test, max_order=None, progress=False)
        ggt, seconds = timed(learn, repeats)
        rows.append([f"tree, {test}, s = {s}", seconds, ggt.settings["tests"], ggt.num_subnetworks])
        result[f"tree {test} s={s}"] = {"seconds": seconds, "tests": ggt.settings["tests"]}
    table(["ALARM, 5,000 rows", "seconds", "CI tests", "sub-networks"], rows)

    threshold = find_test("cmi").default_threshold
    settings: dict[str, Any] = {"max_order": 2, "second_pass": False}
    ours, fast = timed(lambda: rai(x, test="cmi", threshold=threshold, **settings), repeats)
    loop, slow = timed(lambda: rai(x.shape[1], test=LoopTest(x, threshold), **settings))
    assert ours == loop, "the loop must find the same graph"
    _, ours_g2 = timed(lambda: rai(x, test="g2"), repeats)
    _, pc = timed(lambda: causal_learn_pc(x))
    rows = [
        ["plain RAI, cmi: loop over rows", slow, f"{slow / fast:.0f} × ours ({fast:.3f} s)"],
        ["causal-learn PC, G²", pc, f"{pc / ours_g2:.1f} × our `rai` with G² ({ours_g2:.3f} s)"],
    ]
    table(["peer", "seconds", "ratio"], rows)
    result |= {"loop": {"seconds": slow, "ratio": slow / fast}, "pc": {"seconds": pc, "ratio": pc / ours_g2}}
    save("speed", result)


# -- scale ----------------------------------------------------------------------------------------------------------


def resnet_features(data: Path) -> tuple[NDArray[np.float32], float]:
    """(50000, 64) features of CIFAR-10 and the seconds that ResNet-20 took for them."""
    import torch

    from brainet_pl.backbones import CifarResNet

    model = CifarResNet(20)
    model.load_state_dict(torch.load(data / "resnet20_cifar10.pth", weights_only=True))
    model.linear = torch.nn.Identity()  # type: ignore[assignment]
    model.eval()
    images = np.load(data / "cifar10_train.npz")["x"]
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]

    def extract() -> NDArray[np.float32]:
        batches = []
        with torch.inference_mode():
            for i in range(0, len(images), 500):
                batch = torch.from_numpy(images[i : i + 500]).permute(0, 3, 1, 2).float() / 255
                batches.append(model((batch - mean) / std).numpy())
        return np.concatenate(batches)

    return timed(extract)


def mnist_pixels(data: Path) -> NDArray[np.uint8]:
    """(60000, 784)."""
    path = data / "MNIST" / "raw" / "train-images-idx3-ubyte"
    raw = path.read_bytes() if path.exists() else gzip.decompress(path.with_suffix(".gz").read_bytes())
    return np.frombuffer(raw, dtype=np.uint8, offset=16).reshape(-1, 784)


def scale(data: Path) -> None:
    """Large tables, s = 2, max_order 1."""
    features, extraction = resnet_features(data)
    sets = {
        "ResNet-20 features, 64 × 50,000": features,
        "synthetic, 512 × 50,000": relu_features(50_000, 512),
        "MNIST pixels, 784 × 60,000": mnist_pixels(data),
    }
    rows, result = [], {"resnet20_extraction_seconds": extraction}
    for name, x in sets.items():
        for settings in ({"test": "gaussian"}, {"test": "cmi", "bins": 2}, {"test": "cmi", "bins": 3}):
            ggt, seconds = timed(lambda x=x, settings=settings: learn_structure(x, progress=False, **settings))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            ratio = seconds / extraction if "ResNet" in name else float("nan")
            label = f"{settings['test']}" + (f", {settings['bins']} levels" if "bins" in settings else "")
            rows.append([name, label, seconds, ratio, ggt.settings["tests"], ggt.num_subnetworks, peak])
            result[f"{name}, {label}"] = {"seconds": seconds, "tests": ggt.settings["tests"], "peak_gib": peak}
            print(rows[-1], flush=True)
            save("scale", result)  # row by row: an interrupted run keeps what it has
    header = ["data", "test", "seconds", "of ResNet-20's extraction", "CI tests", "sub-networks", "peak GiB so far"]
    table(header, rows)


def growth(smoke: bool = False) -> None:
    """Time and memory against d, N, s, max_order and processes; a run that was cut goes on where it was."""
    measure(OUT, timed, relu_features, smoke)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["accuracy", "speed", "scale", "growth"])
    parser.add_argument("--data", type=Path, help="folder with the real data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.part != "growth" and args.data is None:
        parser.error(f"{args.part} needs --data DIR")
    if args.part == "accuracy":
        accuracy(args.data, args.seeds)
    elif args.part == "speed":
        speed(args.data, args.repeats)
    elif args.part == "scale":
        scale(args.data)
    else:
        growth()


if __name__ == "__main__":
    main()
