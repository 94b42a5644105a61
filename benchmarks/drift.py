"""The drift alarm beside the detectors of alibi-detect, on streams of images whose source changes.

Every stream draws held-out samples and inputs from one pool of images that the model has not seen; after some inputs
the source changes. `DriftMonitor` sees what the model says (the score behind the verdict, the energy, the
probabilities); the peers see features or probabilities in a window that moves with the stream. Kolmogorov–Smirnov
(largest over columns), the maximum mean discrepancy with a Gaussian kernel of median width and the least-squares
density difference with twice as many kernels as a window has inputs are alibi-detect's statistics, for all windows at
once; Cramér–von Mises is the form with a fixed reference. Thresholds of the peers, and of the line "monitor, equal
rate", are such that 5 % of clean streams raise an alarm; that of "monitor" is the guaranteed one. Windows are chosen by
the mean delay on other streams. A delay is the number of changed inputs until the alarm, all of them where there is
none.

    python benchmarks/drift.py --data DIR
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common.command import arguments, parse
from common.data import BACKBONE, MEAN, STD
from common.store import Store
from common.tables import table
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl._utils.framework import pl
from brainet_pl.backbones.loading import Backbone
from brainet_pl.calibration import TemperatureScaling
from brainet_pl.callbacks import StructureLearning
from brainet_pl.lightning.module import BRAINet
from brainet_pl.monitoring import DriftMonitor
from brainet_pl.monitoring.signals import half_for_the_first, signals_of
from brainet_pl.network import Tree
from brainet_pl.scores import Generative

Floats = NDArray[np.float64]
ALPHA = 0.05
WINDOWS = (15, 25, 50, 100)
INPUTS = ("features", "probabilities")
CLEAN = 1000  # streams without a change, for the guarantee
BATCH = 64  # inputs at a time, where time is taken
REPEATS = 41  # of which the median is taken
STRIDE = 2  # a peer looks at its window after every other input


class Pool(NamedTuple):
    """What there is to draw from: `clean` and changed sources, each with all that detectors see of a sample."""

    sources: dict[str, dict[str, Floats]]  # source → "features" (N, d), "probabilities" (N, C), scores (N,)
    labels: NDArray[np.int64]  # of the clean ones
    held: int  # samples of the reference
    before: int  # inputs before the change
    after: int  # inputs after it
    infer: Callable[[], object]  # the model's answers for `BATCH` samples


class Change(NamedTuple):
    """After the change, a share of inputs comes from another source: at once, or growing to it evenly."""

    source: str
    share: float = 1.0
    gradual: bool = False


CHANGES = {
    "new classes": Change("new"),
    "new classes, 20 %": Change("new", 0.2),
    "new classes, gradually": Change("new", gradual=True),
    "noise": Change("noise"),
    "noise, gradually": Change("noise", gradual=True),
    "blur": Change("blur"),
    "dark": Change("dark"),
    "class prior": Change("prior"),
    "class prior, gradually": Change("prior", gradual=True),
}


# -- pools ------------------------------------------------------------------------------------------------------------


def fitted(train: tuple[Tensor, Tensor], val: tuple[Tensor, Tensor], epochs: int, lr: float = 0.003) -> BRAINet:
    """A model of features (N, d), with the scores and the calibration of the shipped configurations."""
    pl.seed_everything(0, verbose=False)
    classes = int(train[1].max()) + 1
    scores, head = [Generative(progress=False)], Tree(num_params=16000)
    model = BRAINet(classes, head=head, scores=scores, calibration=TemperatureScaling(), lr=lr)
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        learn = StructureLearning(progress=False)
        trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder, callbacks=[learn], **quiet)
        loaders = [DataLoader(TensorDataset(*part), 128, shuffle=i == 0) for i, part in enumerate((train, val))]
        trainer.fit(model, *loaders)
    return model.eval()


def said(model: BRAINet, x: Tensor) -> dict[str, Floats]:
    """Features and what the model says of them."""
    pl.seed_everything(0, verbose=False)
    with torch.no_grad():
        found = model.predict_step(x, 0)
    wanted = ("probabilities", "joint", "energy", "class")
    return {"features": x.double().numpy()} | {name: found[name].double().numpy() for name in wanted}


def spoiled(x: Floats, noise: float, blur: float, light: float) -> dict[str, Floats]:
    """Images (N, H, W, C) between 0 and 1 with noise, out of focus, and darker."""
    rng = np.random.default_rng(0)
    found = {
        "noise": x + rng.normal(scale=noise, size=x.shape),
        "blur": ndimage.gaussian_filter(x, (0, blur, blur, 0)),
        "dark": light * x,
    }
    return {name: images.clip(0, 1) for name, images in found.items()}


def digits_pool(epochs: int) -> Pool:
    """Eights and nines are new; 500 digits train, 200 choose, 739 are the pool; pixels are the features."""
    images, y = load_digits(return_X_y=True)
    images, new = images.reshape(-1, 8, 8, 1) / 16.0, y >= 8
    order = np.random.default_rng(0).permutation(np.flatnonzero(~new))
    train, val, pool = order[:500], order[500:700], order[700:]

    def flat(x: Floats) -> Tensor:
        return torch.tensor(x.reshape(len(x), -1), dtype=torch.float32)

    model = fitted(*((flat(images[part]), torch.from_numpy(y[part])) for part in (train, val)), epochs)  # type: ignore[arg-type]
    sources = {"clean": images[pool], "new": images[new], **spoiled(images[pool], 0.2, 0.5, 0.7)}
    found = {name: said(model, flat(x)) for name, x in sources.items()}
    first = flat(images[pool[:BATCH]])
    return Pool(found, y[pool], 200, 150, 250, lambda: said(model, first))


def cifar_pool(data: Path, epochs: int, most: int = 6000) -> Pool:
    """SVHN is new; features of the public ResNet-20: 10,000 training images, and test images, which are new to it."""
    body = Backbone("cifar_resnet20", str(data / BACKBONE), layers=None).build().eval()

    def features(x: Floats) -> Tensor:
        mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
        parts = torch.from_numpy(x).float().permute(0, 3, 1, 2).split(500)
        with torch.no_grad():
            return torch.cat([body((part - mean) / std) for part in parts])

    def read(name: str, count: int) -> tuple[Floats, NDArray[np.int64]]:
        with np.load(data / f"{name}.npz") as arrays:
            return arrays["x"][:count] / 255.0, arrays["y"][:count].astype(np.int64)

    (x, y), (u, v), (new, _) = read("cifar10_train", 10_000), read("cifar10_test", most), read("svhn_test10k", 2000)
    held = most // 3
    model = fitted((features(x), torch.from_numpy(y)), (features(u[:held]), torch.from_numpy(v[:held])), epochs)
    u, v = u[held:], v[held:]
    sources = {"clean": u, "new": new, **spoiled(u, 0.04, 0.6, 0.5)}
    found = {name: said(model, features(images)) for name, images in sources.items()}
    return Pool(found, v, 1000, 300, 400, lambda: said(model, features(u[:BATCH])))


# -- streams ----------------------------------------------------------------------------------------------------------


class Stream(NamedTuple):
    """Held-out samples and inputs, by source and place in it."""

    held: NDArray[np.int64]  # of the clean ones
    inputs: list[tuple[str, int]]

    def values(self, pool: Pool, name: str) -> tuple[Floats, Floats]:
        """What a detector sees: of held-out samples and of inputs, in their order."""
        of = {source: given[name] for source, given in pool.sources.items()}
        return of["clean"][self.held], np.array([of[source][i] for source, i in self.inputs])


def draw(pool: Pool, change: Change | None, seed: int) -> Stream:
    """Samples of the pool in a random order; nothing comes twice, but for the new."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(pool.labels))
    held, rest = order[: pool.held], list(order[pool.held :])
    inputs: list[tuple[str, int]] = [("clean", rest.pop()) for _ in range(pool.before)]
    favoured = pool.labels < (pool.labels.max() + 1) // 2
    few = [i for i in rest if favoured[i]]
    for t in range(pool.after):
        share = 0.0 if change is None else change.share * ((t + 1) / pool.after if change.gradual else 1.0)
        if change is None or rng.random() >= share:
            inputs.append(("clean", rest.pop()))
        elif change.source == "prior":
            inputs.append(("clean", int(rng.choice(few))))  # half of the classes
        elif change.source == "new":
            inputs.append(("new", int(rng.integers(len(pool.sources["new"]["joint"])))))
        else:
            inputs.append((change.source, rest.pop()))
    return Stream(held, inputs)


# -- detectors --------------------------------------------------------------------------------------------------------

Detector = Callable[[Pool, Stream], Floats]  # → (T,) how much each input so far speaks for a change


def watched(pool: Pool, stream: Stream) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """What `brainet serve` watches, of held-out samples and of inputs: score, doubt, answer and features."""
    found = []
    for i in (0, 1):
        said = signals_of({name: stream.values(pool, name)[i] for name in ("joint", "energy", "class")})
        found.append(said | {"features": stream.values(pool, "features")[i]})
    return found[0], found[1]


def monitor(pool: Pool, stream: Stream) -> Floats:
    """The logarithm of the evidence of `DriftMonitor` with the signals that `brainet serve` watches."""
    held, inputs = watched(pool, stream)
    return np.log(DriftMonitor(held, alpha=ALPHA, weights=half_for_the_first(held)).update(inputs).path)


def ecdf_statistic(held: Floats, inputs: Floats, window: int, squared: bool) -> Floats:
    """(n, d) and (T, d) → the largest distance (T,) of distribution functions over columns, with the last `window`.

    The greatest difference (Kolmogorov–Smirnov), or with `squared` the sum of squares (Cramér–von Mises). Before there
    is a whole window, and between strides, it is that of before.
    """
    n, (count, d) = len(held), inputs.shape
    ordered = np.sort(held, axis=0)
    below = np.stack([np.searchsorted(ordered[:, k], inputs[:, k], side="left") for k in range(d)], axis=1) / n
    upto = np.stack([np.searchsorted(ordered[:, k], inputs[:, k], side="right") for k in range(d)], axis=1) / n
    ends = np.arange(window, count + 1, STRIDE)
    views = [np.sort(sliding_window_view(part, window, axis=0)[ends - window], axis=2) for part in (below, upto)]
    steps = np.arange(1, window + 1) / window
    if squared:
        found = ((0.5 * (views[0] + views[1]) - (steps - 0.5 / window)) ** 2).sum(axis=2)
    else:
        found = np.maximum(steps - views[1], views[0] - (steps - 1 / window)).max(axis=2)
    return held_between(found.max(axis=1), ends, count)


def held_between(found: Floats, ends: NDArray[np.int64], count: int) -> Floats:
    """Values after some inputs → after every input (T,)."""
    path = np.full(count, -np.inf)
    for end, value in zip(ends, found, strict=True):
        path[end - 1 : end - 1 + STRIDE] = value
    return path


def squared_distances(x: Floats, y: Floats) -> Floats:
    """(n, d) and (m, d) → (n, m)."""
    return np.maximum((x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1) - 2 * x @ y.T, 0.0)


def mmd_statistic(held: Floats, inputs: Floats, window: int) -> Floats:
    """(n, d) and (T, d) → the unbiased squared maximum mean discrepancy (T,) of held-out samples and a window."""
    among = squared_distances(held, held)
    width = 0.5 * np.median(among[np.triu_indices(len(held), 1)])  # 2σ², σ² half of the median
    across = np.exp(-squared_distances(held, inputs) / (2 * width)).mean(axis=0)
    own = np.exp(-squared_distances(inputs, inputs) / (2 * width))
    kernel = np.exp(-among / (2 * width))
    inside = (kernel.sum() - len(held)) / (len(held) * (len(held) - 1))
    ends = np.arange(window, len(inputs) + 1, STRIDE)
    corner = np.pad(own.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
    starts = ends - window
    block = corner[ends, ends] - corner[starts, ends] - corner[ends, starts] + corner[starts, starts]
    total = np.concatenate([[0.0], across.cumsum()])
    found = inside + (block - window) / (window * (window - 1)) - 2 * (total[ends] - total[starts]) / window
    return held_between(found, ends, len(inputs))


def lsdd_statistic(held: Floats, inputs: Floats, window: int) -> Floats:
    """(n, d) and (T, d) → the squared difference (T,) of densities, fitted by least squares to Gaussian kernels.

    Kernels are at some held-out samples; the others are compared with a window. λ is the largest of a few for which
    both estimates of the difference are within a fifth of each other.
    """
    count = min(2 * window, len(held) // 2)
    centers, rest = held[:count], held[count:]
    width = 0.5 * np.median(squared_distances(held, held)[np.triu_indices(len(held), 1)])
    overlap = np.exp(-squared_distances(centers, centers) / (4 * width))
    own, past = (np.exp(-squared_distances(part, centers) / (2 * width)) for part in (inputs, rest))
    rng = np.random.default_rng(0)
    some = past.mean(axis=0) - past[rng.integers(len(rest), size=(100, window))].mean(axis=1)  # of clean windows
    for power in range(8):
        inverse = np.linalg.inv(overlap + 10.0**-power * np.eye(count))
        form = 2 * inverse - inverse @ overlap @ inverse
        ratio = np.einsum("ij,jk,ik->", some, form, some) / np.einsum("ij,jk,ik->", some, inverse, some)
        if abs(1 - ratio) <= 0.2:
            break
    total = np.concatenate([np.zeros((1, count)), own.cumsum(axis=0)])
    ends = np.arange(window, len(inputs) + 1, STRIDE)
    apart = past.mean(axis=0) - (total[ends] - total[ends - window]) / window
    return held_between(((apart @ form) * apart).sum(axis=1), ends, len(inputs))


def peers() -> dict[str, dict[int, Detector]]:
    """Name → window → detector."""

    def of(statistic: Callable[..., Floats], inputs: str, window: int, **more: bool) -> Detector:
        return lambda pool, stream: statistic(*stream.values(pool, inputs), window, **more)

    found: dict[str, dict[int, Detector]] = {}
    for inputs in INPUTS:
        found[f"KS, {inputs}"] = {w: of(ecdf_statistic, inputs, w, squared=False) for w in WINDOWS}
        found[f"CVM, {inputs}"] = {w: of(ecdf_statistic, inputs, w, squared=True) for w in WINDOWS}
        found[f"MMD, {inputs}"] = {w: of(mmd_statistic, inputs, w) for w in WINDOWS}
        found[f"LSDD, {inputs}"] = {w: of(lsdd_statistic, inputs, w) for w in WINDOWS}
    return found


# -- measuring --------------------------------------------------------------------------------------------------------


def paths(pool: Pool, detector: Detector, change: Change | None, seeds: range) -> Floats:
    """(S, T) the largest value of a detector so far, for every stream."""
    return np.maximum.accumulate([detector(pool, draw(pool, change, seed)) for seed in seeds], axis=1)


def threshold_of(clean: Floats) -> float:
    """What 5 % of clean streams (S, T) exceed."""
    return float(np.quantile(clean[:, -1], 1 - ALPHA, method="higher"))


def delay_of(found: Floats, threshold: float, before: int) -> float:
    """The mean number of changed inputs until the alarm, of streams without an alarm before the change."""
    kept = found[found[:, before - 1] <= threshold]
    over = kept > threshold
    first = np.where(over.any(axis=1), over.argmax(axis=1) + 1, found.shape[1])
    return float((first - before).mean()) if len(kept) else math.nan


def measure(pool: Pool, name: str, windows: dict[int, Detector], streams: int) -> dict[str, dict[str, float]]:
    """Line → change → mean delay, of one detector; and "false alarms", of streams that no threshold was found on."""
    choose, judge = range(10_000, 10_000 + streams), range(streams)
    marks = {w: threshold_of(paths(pool, one, None, choose)) for w, one in windows.items()}
    few = range(20_000, 20_000 + max(5, streams // 8))
    mean = {
        w: np.mean([delay_of(paths(pool, one, change, few), marks[w], pool.before) for change in CHANGES.values()])
        for w, one in windows.items()
        if len(windows) > 1
    }
    best = min(mean, key=lambda w: mean[w]) if mean else next(iter(windows))
    chosen = {name: marks[best]}
    if name == "monitor":
        chosen = {"monitor": -math.log(ALPHA), "monitor, equal rate": marks[best]}
    fresh = paths(pool, windows[best], None, judge)
    found = {
        line: {"window": float(best), "false alarms": float((fresh[:, -1] > mark).mean())}
        for line, mark in chosen.items()
    }
    for label, change in CHANGES.items():
        values = paths(pool, windows[best], change, judge)
        for line, mark in chosen.items():
            found[line][label] = delay_of(values, mark, pool.before)
    return found


def cost(pool: Pool) -> dict[str, float]:
    """Median seconds of processor time, of one input: inference and the monitor, by turns, on one thread."""
    held, inputs = watched(pool, draw(pool, None, 0))
    watch = DriftMonitor(held, weights=half_for_the_first(held))
    part = {name: values[:BATCH] for name, values in inputs.items()}
    times: dict[str, list[float]] = {"inference": [], "monitor": []}
    for _ in range(REPEATS):
        for name, call in (("inference", pool.infer), ("monitor", lambda: watch.update(part))):
            start = time.process_time()
            call()
            times[name].append((time.process_time() - start) / BATCH)
    found = {name: float(np.median(seconds)) for name, seconds in times.items()}
    return found | {"share": found["monitor"] / found["inference"]}


def clean(pool: Pool, streams: int) -> dict[str, float]:
    """The share of streams without a change in which the guaranteed threshold raises an alarm, and its error."""
    mark = -math.log(ALPHA)
    share = float(np.mean([monitor(pool, draw(pool, None, 30_000 + i)).max() >= mark for i in range(streams)]))
    return {"streams": float(streams), "false alarms": share, "error": math.sqrt(share * (1 - share) / streams)}


def main(argv: list[str] | None = None) -> None:
    """Measure all detectors on all streams."""
    parser = arguments(__doc__, epochs=20)
    parser.add_argument("--streams", type=int, default=200, help="streams of every kind, and as many to choose by")
    args = parse(parser, argv)
    streams = 10 if args.smoke else args.streams
    store = Store(args.out / "drift.json", {"streams": streams, "epochs": args.epochs, "windows": WINDOWS})
    pools = {"digits": lambda: digits_pool(args.epochs)}
    if args.data is not None:
        pools["CIFAR-10"] = lambda: cifar_pool(args.data, args.epochs)
    wins, all_cells = 0, 0
    for name, make in pools.items():
        made: list[Pool] = []

        def pool(make: Callable[[], Pool] = make, made: list[Pool] = made) -> Pool:
            if not made:
                made.append(make())
            return made[0]

        found: dict[str, dict[str, float]] = {}
        for detector, windows in ({"monitor": {0: monitor}} | peers()).items():
            cell = f"{name}, {detector}"
            found |= store.cell(cell, lambda pool=pool, d=detector, w=windows: measure(pool(), d, w, streams))
        count = 20 if args.smoke else CLEAN
        wrong = store.cell(f"{name}, clean", lambda pool=pool, n=count: clean(pool(), n))
        print(f"\n{name}: false alarms in {wrong['false alarms']:.1%} ± {wrong['error']:.1%} of {count} clean streams")
        costs = store.cell(f"{name}, cost", lambda pool=pool: cost(pool()))
        print(
            f"{name}: inference {1e6 * costs['inference']:.0f} µs an input, monitor {1e6 * costs['monitor']:.1f} µs, "
            f"{costs['share']:.2%}"
        )
        columns = ("window", "false alarms", *CHANGES)
        table([name, *columns], [[line, *(cells[key] for key in columns)] for line, cells in found.items()])
        rivals = [line for line in found if not line.startswith("monitor")]
        for change in CHANGES:
            best = min(found[line][change] for line in rivals)
            wins += (won := found["monitor, equal rate"][change] <= best)
            all_cells += 1
            name_of = min(rivals, key=lambda line: found[line][change])
            print(f"{change}: {found['monitor, equal rate'][change]:.1f} against {best:.1f} ({name_of}){' *' * won}")
    print(f"\nat or below the best peer of each stream: {wins} of {all_cells}")


if __name__ == "__main__":
    main()
