"""The structure learner beside its peers: accuracy, speed and scaling.

    python benchmarks/structure.py accuracy --data DIR   # distance to eight known networks and to random Gaussian DAGs
    python benchmarks/structure.py posterior --data DIR  # edge probabilities beside bootstrapped peers: a figure
    python benchmarks/structure.py speed --data DIR      # ALARM, against a plain loop and causal-learn
    python benchmarks/structure.py scale --data DIR      # ResNet-20 features, 512 features, MNIST pixels

Each prints a table and updates docs/results/structure.json. DIR holds `networks/*.bif`, `cifar10_train.npz`,
`resnet20_cifar10.pth` and `MNIST/raw`. Peers come with `pip install brainet_pl[benchmarks]`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from bif import read_bif
from common.data import relu_features
from common.store import stamp
from common.tables import table
from numpy.typing import NDArray
from peers import (
    causal_learn_boss,
    causal_learn_ges,
    causal_learn_grasp,
    causal_learn_pc,
    pyagrum_hill_climbing,
    pyagrum_miic,
)

from brainet_pl.graphs import PDAG, cpdag, rai
from brainet_pl.structure import find_test, learn_structure

OUT = Path(__file__).parents[1] / "docs" / "results"
NETWORKS = ["asia", "child", "insurance", "alarm", "win95pts", "hailfinder", "hepar2", "andes"]
SIZES = [500, 5000, 20000]
GAUSSIANS = [(50, 2), (50, 4), (50, 6), (100, 2), (100, 4), (100, 6)]  # variables, average degree
FIRST_SEED = 10  # samples before were looked at while settings were chosen
MEANS = ["shd", "f1", "seconds"]
STRONGEST = ["causal-learn BOSS", "causal-learn GRaSP"]  # the peers that `rai` is held against


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


def load(section: str) -> dict[str, Any]:
    """One section of the JSON file; nothing where there is none."""
    path = OUT / "structure.json"
    found: dict[str, Any] = json.loads(path.read_text()).get(section, {}) if path.exists() else {}
    return found


def save(section: str, content: Any) -> None:
    """Update one section of the JSON file."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "structure.json"
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything[section] = content
    everything.setdefault("measured", {})[section] = stamp()
    path.write_text(json.dumps(everything, indent=1))


# -- accuracy -------------------------------------------------------------------------------------------------------


def linear_gaussian(d: int, degree: float, n: int, seed: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """A random DAG (d, d) of that average degree, and (n, d) rows: weights of size 0.25 to 1, noise of variance 1.

    The rows are standardised, so that variances do not give the order away.
    """
    rng = np.random.default_rng([seed, d, int(10 * degree)])
    dag = np.triu(rng.random((d, d)) < degree / (d - 1), 1)
    weights = dag * rng.uniform(0.25, 1.0, (d, d)) * rng.choice([-1.0, 1.0], (d, d))
    x = np.linalg.solve(np.eye(d) - weights.T, rng.normal(size=(d, n))).T
    order = rng.permutation(d)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    return dag[np.ix_(order, order)], x[:, order]


DISCRETE: dict[str, Callable[[NDArray[Any]], PDAG]] = {
    "rai": lambda x: rai(x, test="g2"),
    "rai, recursion only": lambda x: rai(x, test="g2", second_pass=False, max_order=2),
    "pyAgrum hill climbing": pyagrum_hill_climbing,
    "pyAgrum MIIC": pyagrum_miic,
    "causal-learn PC": causal_learn_pc,
    "causal-learn BOSS": partial(causal_learn_boss, score="local_score_BDeu"),
    "causal-learn GRaSP": partial(causal_learn_grasp, score="local_score_BDeu"),
    "causal-learn GES": partial(causal_learn_ges, score="local_score_BDeu"),
}
GAUSSIAN: dict[str, Callable[[NDArray[Any]], PDAG]] = {
    "rai": lambda x: rai(x, test="fisher_z"),
    "causal-learn PC": lambda x: causal_learn_pc(x, test="fisherz"),
    "causal-learn BOSS": partial(causal_learn_boss, score="local_score_BIC_from_cov"),
    "causal-learn GRaSP": partial(causal_learn_grasp, score="local_score_BIC_from_cov"),
    "causal-learn GES": partial(causal_learn_ges, score="local_score_BIC_from_cov"),
}


def limited(call: Callable[[], dict[str, Any]], seconds: int) -> dict[str, Any] | None:
    """What `call` returns in a process of its own, or None where it needs more processor time than `seconds`."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        send.send(call())

    process = context.Process(target=work)
    process.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        process.join()
        if process.exitcode is not None and process.exitcode < 0:  # the system ended it
            return None
        raise RuntimeError("expected a graph from the method, got an error: see its traceback above") from None
    finally:
        process.join()


def accuracy(data: Path, seeds: int, limit: int, again: list[str], only: list[str], match: str = "") -> None:
    """Structural Hamming distance to the true equivalence class, cell by cell.

    Eight networks and six kinds of linear-Gaussian random DAGs, by rows, seed and method. Every finished cell is
    kept in the JSON file at once, so that an interrupted run goes on where it was; `again` names methods to repeat,
    `only` those to run, and `match` is a part of the names of problems. A method that runs out of time is not tried on
    more rows of the same problem, which is kept too.
    """
    warnings.filterwarnings("ignore")
    stored = load("accuracy")
    cells: dict[str, dict[str, Any]] = {
        key: cell
        for key, cell in stored.get("cells", {}).items()
        if key.split(" | ")[-1] not in again and int(key.split(" | ")[2]) >= FIRST_SEED
    }
    network = cache(lambda name: read_bif(data / "networks" / f"{name}.bif"))  # large files take a minute to read
    problems: dict[str, tuple[Callable[[int, int], Any], dict[str, Any], list[int]]] = {}
    for name in NETWORKS:
        problems[name] = (lambda n, seed, b=name: (network(b).dag, network(b).sample(n, seed)), DISCRETE, SIZES)
    for d, degree in GAUSSIANS:
        draw = partial(linear_gaussian, d, degree)
        problems[f"Gaussian, d = {d}, degree {degree}"] = (draw, GAUSSIAN, SIZES[:2])

    def run(make: Callable[[int, int], Any], method: Callable[[Any], PDAG], n: int, seed: int) -> dict[str, Any]:
        dag, x = make(n, seed)
        truth = cpdag(dag)
        start = time.process_time()
        graph = method(x)
        seconds = time.process_time() - start
        wrong = graph.skeleton != truth.skeleton
        extra, missing = int(np.triu(wrong & graph.skeleton).sum()), int(np.triu(wrong & truth.skeleton).sum())
        right = int(np.triu(truth.skeleton).sum()) - missing
        f1 = round(2 * right / max(1, 2 * right + extra + missing), 4)
        return {"shd": graph.shd(truth), "extra": extra, "missing": missing, "f1": f1, "seconds": round(seconds, 4)}

    chosen = only or list(DISCRETE)
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for problem, (make, methods, sizes) in problems.items():
            for n in sizes if match in problem else []:
                for method in (m for m in chosen if m in methods):
                    key = f"{problem} | {n} | {seed} | {method}"
                    if key in cells:
                        continue
                    before = cells.get(f"{problem} | {sizes[max(0, sizes.index(n) - 1)]} | {seed} | {method}", {})
                    if "shd" not in before and before:
                        cells[key] = {"not finished in": before["not finished in"], "with fewer rows": True}
                    else:
                        make(2, seed)  # a file that is read here is not read again in every process
                        found = limited(partial(run, make, methods[method], n, seed), limit)
                        cells[key] = {"not finished in": limit} if found is None else found
                    print(key, cells[key], flush=True)
                    save("accuracy", {"seconds": "of processor time", "cells": cells})
    report(cells)
    bars(cells)


def bars(cells: dict[str, dict[str, Any]]) -> None:
    """Print `rai` beside each of the strongest peers: over the samples that both finish, and beside the better one."""
    keys = [key.removesuffix(" | rai") for key in cells if key.endswith(" | rai")]

    def of(method: str, key: str) -> dict[str, Any]:
        return cells.get(f"{key} | {method}", {})

    for peer in STRONGEST:
        both = [(of("rai", key), of(peer, key)) for key in keys if "shd" in of(peer, key) and "shd" in of("rai", key)]
        means = {k: [f"{np.mean([c[k] for c in side]):.2f}" for side in zip(*both, strict=True)] for k in MEANS}
        unfinished = sum("not finished in" in of(peer, key) for key in keys)
        print(f"rai / {peer}, {len(both)} samples (the peer ran out of time in {unfinished} more):", end=" ")
        print(", ".join(f"{k} {' / '.join(values)}" for k, values in means.items()))
    cases: dict[str, list[tuple[float, float]]] = {}
    for key in keys:
        peers = [of(peer, key)["shd"] for peer in STRONGEST if "shd" in of(peer, key)]
        if len(peers) == len(STRONGEST) and "shd" in of("rai", key):
            cases.setdefault(key.rsplit(" | ", 1)[0], []).append((of("rai", key)["shd"], min(peers)))
    within = sum(np.mean([r for r, _ in case]) <= 1.1 * np.mean([p for _, p in case]) for case in cases.values())
    print(f"rai is at most 10 % above the better of them in {within} of {len(cases)} cells that all three finish")


def report(cells: dict[str, dict[str, Any]]) -> None:
    """Print the mean over seeds of every problem, size and method: distance (F1, seconds).

    A method that ran out of time for some seed has "> limit" in its place; one that was not run, nothing. The last rows
    are means over the cells that all of `rai` and the strongest peers finish.
    """
    runs: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for key, cell in cells.items():
        problem, n, _, method = key.split(" | ")
        runs.setdefault((problem, n), {}).setdefault(method, []).append(cell)
    methods = [m for m in DISCRETE if any(m in found for found in runs.values())]

    def finished(found: list[dict[str, Any]]) -> bool:
        return bool(found) and all("shd" in cell for cell in found)

    def shown(found: list[dict[str, Any]]) -> str:
        if not found:
            return ""
        if not finished(found):
            return f"> {max(cell.get('not finished in', 0) for cell in found)} s"
        shd, f1, seconds = (np.mean([cell[k] for cell in found]) for k in MEANS)
        return f"{shd:.1f} ({f1:.2f}, {seconds:.1f} s)"

    places = list(NETWORKS) + [f"Gaussian, d = {d}, degree {degree}" for d, degree in GAUSSIANS]
    ordered = sorted(runs.items(), key=lambda item: (places.index(item[0][0]), int(item[0][1])))
    rows = [[problem, f"{int(n):,}", *(shown(found.get(m, [])) for m in methods)] for (problem, n), found in ordered]
    common = [found for _, found in ordered if all(finished(found.get(m, [])) for m in ("rai", *STRONGEST))]
    line = [shown([c for f in common for c in f[m]]) if m in ("rai", *STRONGEST) else "" for m in methods]
    rows.append([f"mean of the {len(common)} that rai, BOSS and GRaSP finish", "", *line])
    table(["problem", "rows", *methods], rows)


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
            for found, key in ((joint, (row[x], row[y], z)), (left, (row[x], z)), (right, (row[y], z)), (given, z)):
                found[key] = found.get(key, 0) + 1
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

    from brainet_pl.backbones.cifar import CifarResNet

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
    """Large tables with the defaults of `learn_structure`, without a budget; in seconds of processor time."""
    start = time.process_time()
    features, _ = resnet_features(data)
    extraction = time.process_time() - start
    gaussian, discrete = {"test": "gaussian"}, [{"test": "cmi", "bins": 2}, {"test": "cmi", "bins": 3}]
    sets: dict[str, tuple[Any, list[dict[str, Any]]]] = {
        "ResNet-20 features, 64 × 50,000": (features, [gaussian, *discrete]),
        "synthetic, 512 × 50,000": (relu_features(50_000, 512), [gaussian, *discrete]),
        "MNIST pixels, 784 × 60,000": (mnist_pixels(data), [gaussian, *discrete]),
        "synthetic, 4,096 × 2,000": (relu_features(2000, 4096), [gaussian]),
    }
    rows, result = [], {"resnet20_extraction_seconds": extraction}
    for name, (x, all_settings) in sets.items():
        for settings in all_settings:
            start = time.process_time()
            ggt = learn_structure(x, progress=False, **settings)
            seconds = time.process_time() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            ratio = seconds / extraction if "ResNet" in name else float("nan")
            label = f"{settings['test']}" + (f", {settings['bins']} levels" if "bins" in settings else "")
            rows.append([name, label, seconds, ratio, ggt.settings["tests"], ggt.num_subnetworks, peak])
            result[f"{name}, {label}"] = {"seconds": seconds, "tests": ggt.settings["tests"], "peak_gib": peak}
            print(rows[-1], flush=True)
            save("scale", result)  # row by row: an interrupted run keeps what it has
    header = ["data", "test", "seconds", "of ResNet-20's extraction", "CI tests", "sub-networks", "peak GiB so far"]
    table(header, rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["accuracy", "posterior", "speed", "scale"])
    parser.add_argument("--data", type=Path, help="folder with the real data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=int, default=300, help="seconds of processor time for one graph")
    parser.add_argument("--again", nargs="*", default=[], choices=list(DISCRETE), help="methods to repeat")
    parser.add_argument("--only", nargs="*", default=[], choices=list(DISCRETE), help="methods to run")
    parser.add_argument("--match", default="", help="part of the names of the problems to run")
    args = parser.parse_args()
    if args.data is None:
        parser.error(f"{args.part} needs --data DIR")
    if args.part == "accuracy":
        accuracy(args.data, args.seeds, args.limit, args.again, args.only, args.match)
    elif args.part == "posterior":
        from posterior import posterior

        posterior(args.data, args.seeds, OUT, args.match)
    elif args.part == "speed":
        speed(args.data, args.repeats)
    else:
        scale(args.data)


if __name__ == "__main__":
    main()
