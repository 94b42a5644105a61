"""Calibration under corruption at the same price for all: what is made of a network's own logits.

    python benchmarks/tempered.py --data DIR     # docs/results/tempered.json
    python benchmarks/tempered.py --smoke

A frozen ResNet-20 on CIFAR-10. Everything is fitted to 2,000 validation images; 8,000 test images tell the price, the
NLL above temperature scaling's, and every sixteenth of them in fifteen corruptions and three severities the calibration
error. Each method has one dial by which it spends more or less; at a price of 1 % on test images they are compared.

Density-aware calibration is built as its authors build it: the k-th neighbour's distance in each layer, of channel
means brought to length 1 and not centred, in the stem, the ends of stages and the logits; T = Σ w_l·s_l + w_0 with w_l
at least 0 and w_0 of any sign, by the least squared error. Its dial multiplies w_l, at the same mean T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from common.command import arguments, parse
from common.readings import LAYERS, channels, stage_columns, stage_widths
from common.store import Cell, Store
from common.tables import markdown
from common.tasks import Sample
from honest import Edgeless, Full, predicted, shift, trained, wired
from scipy import optimize
from torch import Tensor
from torch.nn import functional as F
from unknown import Bed, public_bed

from brainet_pl.calibration import DensityScaling, TemperatureScaling
from brainet_pl.network import Ensemble, MCDropout
from brainet_pl.scores import KNN, Generative, Score, ScoreContext, Stages
from brainet_pl.scores.fitting import fit_score
from brainet_pl.tasks import Classification
from brainet_pl.tasks.passes import Passes

COSTS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
POWERS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)  # of the density in Density-Softmax
DIALS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
BUDGET = 0.01  # of the NLL of clean test images
SHOWN = 0.01  # the cost at which `DensityScaling` is shown as it is fitted
OURS = "`DensityScaling`, stages"  # what others are compared with, image by image
NEIGHBOURS = (50, 1)  # of the paper, and what the authors' code takes
Final = Callable[[str], Tensor]  # name of a set → probabilities (N, C)


class Point(NamedTuple):
    """One setting of a dial: the price on clean test images, ECE there, ECE and NLL of corrupted images.

    `error` is the standard error of `ece`. `samples` are the ECE of samples of the images drawn with replacement, the
    same ones for every method and dial; results of before they were kept have none.
    """

    dial: float
    price: float
    clean: float
    ece: float
    error: float
    nll: float
    samples: Sequence[float] = ()


# -- density-aware calibration ----------------------------------------------------------------------------------------


def dac_layers(bed: Bed, name: str) -> list[Tensor]:
    """Channel means (N, C) of the stem and the ends of stages, and the logits, each sample brought to length 1."""
    found, start, parts = bed.read(name), 0, []
    for layer in LAYERS:
        count = channels(layer)
        if layer == "bn1" or layer.endswith(".2"):
            parts.append(found.blocks[:, start : start + count])
        start += 2 * count
    return [F.normalize(part, dim=1) for part in (*parts, found.logits)]


def dac_weights(scores: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Distances (N, L), logits (N, C) and labels (N,) → w (L + 1,), the constant last, by the least squared error."""
    s, x, truth = scores.double(), logits.double(), F.one_hot(y, logits.shape[1]).double()

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        found = torch.tensor(w, requires_grad=True)
        t = (s @ found[:-1] + found[-1]).clamp_min(1e-20)
        value = ((x / t[:, None]).softmax(dim=1) - truth).square().mean()
        value.backward()
        return float(value), found.grad.numpy()  # type: ignore[union-attr]

    bounds = [(0.0, 1e4)] * s.shape[1] + [(-100.0, 100.0)]
    best = optimize.minimize(loss, np.ones(s.shape[1] + 1), jac=True, method="L-BFGS-B", bounds=bounds, tol=1e-12)
    return torch.from_numpy(best.x)


def dac(bed: Bed, k: int, layers: slice) -> Callable[[float], Final]:
    """Density-aware calibration by the k-th neighbour in some layers → final probabilities for a dial."""
    labels = bed.read("train").y
    banks = [KNN(k, normalize=False).fit(x, labels) for x in dac_layers(bed, "train")[layers]]
    kept: dict[str, Tensor] = {}

    def distances(name: str) -> Tensor:
        if name not in kept:
            pairs = zip(banks, dac_layers(bed, name)[layers], strict=True)
            kept[name] = torch.stack([bank.distances(x) for bank, x in pairs], dim=1)
        return kept[name]

    val = bed.read("val")
    w = dac_weights(distances("val"), val.logits, val.y)
    usual = (distances("val").double() @ w[:-1]).mean()
    print(f"density-aware calibration, k = {k}: w = {[round(v, 3) for v in w.tolist()]}")

    def at(dial: float) -> Final:
        def final(name: str) -> Tensor:
            t = dial * (distances(name).double() @ w[:-1]) + w[-1] - (dial - 1) * usual
            return (bed.read(name).logits.double() / t.clamp_min(1e-3)[:, None]).softmax(dim=1).float()

        return final

    return at


# -- the others -------------------------------------------------------------------------------------------------------


class Columns:
    """A score of the package, fitted to a view of the training images, by the name of a set."""

    def __init__(self, bed: Bed, score: Score, stages: bool) -> None:
        self.bed, self.score, self.stages = bed, score, stages
        self._at, self._kept = stage_columns(), dict[str, Tensor]()
        train = bed.read("train")
        x = train.blocks[:, self._at]
        self._centre, self._scale = x.mean(dim=0), x.std(dim=0).clamp_min(1e-6)
        score.set_context(ScoreContext(10, widths=stage_widths() if stages else (), scaled=stages))
        fit_score(score, self._view("train"), train.y)

    def _view(self, name: str) -> Tensor:
        found = self.bed.read(name)
        return (found.blocks[:, self._at] - self._centre) / self._scale if self.stages else found.features

    @torch.no_grad()
    def __call__(self, name: str) -> Tensor:
        """The score (N,) of a set."""
        if name not in self._kept:
            probs, view = self.bed.read(name).logits.softmax(dim=1), self._view(name)
            found = self.score(Passes(probs.log()[None], None, view, probs))
            self._kept[name] = next(iter(found.values()))
        return self._kept[name]


def faded(bed: Bed, columns: Columns) -> Callable[[float], Final]:
    """`DensityScaling` by a score, for a cost."""

    def at(cost: float) -> Final:
        part, val = DensityScaling(cost, "score"), bed.read("val")
        part.observe(val.logits.softmax(dim=1), val.y, {"score": columns("val")})
        part.finalize()
        return lambda name: part(bed.read(name).logits.softmax(dim=1), {"score": columns(name)})

    return at


def density_softmax(bed: Bed, columns: Columns, width: int) -> Callable[[float], Final]:
    """Density-Softmax (Bui and Liu 2024): softmax(p(z)·logits), p the density in units of the largest of training data.

    The density is that of a Gaussian for each class and its logarithm is taken for each feature, so that it does not
    vanish; a temperature is fitted beside it. The dial is its exponent.
    """
    most = -columns("train").min()

    def at(dial: float) -> Final:
        def scaled(name: str) -> Tensor:
            factor = ((-columns(name) - most).clamp_max(0) * dial / width).exp()
            return (bed.read(name).logits * factor[:, None]).softmax(dim=1)

        part, val = TemperatureScaling(), bed.read("val")
        part.observe(scaled("val"), val.y, {})
        part.finalize()
        return lambda name: part(scaled(name), {})

    return at


def tempered_heads(bed: Bed, epochs: int) -> dict[str, Final]:
    """Heads on the last layer's features, with a temperature."""
    train, val, task, found = bed.read("train"), bed.read("val"), Classification(10), {}
    held = (val.features, val.y)
    sample = Sample((train.features, train.y), held, held, task)
    for title, settings in (("ensemble of 5 heads", Ensemble(members=5)), ("MC-dropout head", MCDropout())):
        head, part = trained(settings, sample, epochs), TemperatureScaling()
        part.observe(predicted(head, val.features, task), val.y, {})
        part.finalize()
        found[title] = lambda name, head=head, part=part: part(predicted(head, bed.read(name).features, task), {})
    return found


# -- measures ---------------------------------------------------------------------------------------------------------


def points(bed: Bed, make: Callable[[float], Final], dials: Sequence[float]) -> list[Point]:
    """The frontier of a method."""
    base = temperature(bed)
    clean = float(shift([base("test")], bed.read("test").y).nll[0, 0])
    found = []
    for dial in dials:
        final = make(dial)
        one = shift([final("test")], bed.read("test").y)
        many = shift((final(name) for name in bed.shifted), bed.read(bed.shifted[0]).y)
        ece = many.ece.mean(dim=0)
        price = float(one.nll[0, 0]) / clean - 1
        told = (float(ece[0]), float(ece[1:].std()), float(many.nll[:, 0].mean()))
        found.append(Point(dial, price, float(one.ece[0, 0]), *told, ece[1:].tolist()))
    return found


def temperature(bed: Bed) -> Final:
    """Temperature scaling."""
    part, val = TemperatureScaling(), bed.read("val")
    part.observe(val.logits.softmax(dim=1), val.y, {})
    part.finalize()
    return lambda name: part(bed.read(name).logits.softmax(dim=1), {})


def at_budget(found: Sequence[Point], budget: float = BUDGET) -> Point:
    """The point of a frontier at a price on test images, between two settings; the nearest one where none is beyond.

    >>> found = at_budget([Point(1, 0.0, 0, 0.2, 0, 1, [0.2, 0.4]), Point(2, 0.02, 0, 0.1, 0, 1, [0.1, 0.1])])
    >>> found.ece, found.samples
    (0.15000000000000002, [0.15000000000000002, 0.25])
    """
    order = sorted(found, key=lambda point: point.price)
    below, above = [p for p in order if p.price <= budget], [p for p in order if p.price > budget]
    if not below or not above:
        return below[-1] if below else above[0]
    a, b = below[-1], above[0]
    share = (budget - a.price) / (b.price - a.price)
    samples = [x + share * (y - x) for x, y in zip(a.samples, b.samples, strict=True)]
    return Point(*(x + share * (y - x) for x, y in zip(a[:-1], b[:-1], strict=True)), samples)


def paired(one: Point, other: Point) -> tuple[float, float]:
    """How much higher the ECE of one method is than that of another, and the standard error of the difference.

    >>> one, other = Point(1, 0, 0, 0.3, 0.1, 1, [0.3, 0.5]), Point(1, 0, 0, 0.2, 0.1, 1, [0.2, 0.4])
    >>> paired(one, other)[1] < 1e-9  # they rise together
    True
    """
    return one.ece - other.ece, float(np.std(np.subtract(one.samples, other.samples), ddof=1))


def rows(bed: Bed, epochs: int) -> dict[str, Callable[[], tuple[Callable[[float], Final], Sequence[float]]]]:
    """Method → its final probabilities for a dial, and the dials to try."""

    def of(score: Callable[[], Score], stages: bool) -> Callable[[], tuple[Callable[[float], Final], Sequence[float]]]:
        return lambda: (faded(bed, Columns(bed, score(), stages)), COSTS)

    quiet = {"progress": False}
    found = {
        "temperature scaling": lambda: ((lambda _: temperature(bed)), (1.0,)),
        "`DensityScaling`, stages": of(lambda: Stages(**quiet), True),  # type: ignore[arg-type]
        "`DensityScaling`, full covariance of the stages": of(lambda: wired(Full)(**quiet), True),  # type: ignore[arg-type]
        "`DensityScaling`, no edges, stages": of(lambda: wired(Edgeless)(**quiet), True),  # type: ignore[arg-type]
        "`DensityScaling`, last layer": of(lambda: Generative(**quiet), False),  # type: ignore[arg-type]
        "k-NN tempering, last layer": of(KNN, False),
        "k-NN tempering, all stages": of(lambda: KNN(layers="auto", pool="mean_std"), True),
        "Density-Softmax": lambda: (density_softmax(bed, Columns(bed, Full(**quiet), False), 64), POWERS),  # type: ignore[arg-type]
    }
    for k in NEIGHBOURS:
        found[f"density-aware calibration, k = {k}"] = lambda k=k: (dac(bed, k, slice(None)), DIALS)
    heads: dict[str, Final] = {}

    def head(title: str) -> tuple[Callable[[float], Final], Sequence[float]]:
        heads.update({} if heads else tempered_heads(bed, epochs))
        return (lambda _: heads[title]), (1.0,)

    for title in ("ensemble of 5 heads", "MC-dropout head"):
        found[title] = lambda title=title: head(title)
    return found  # type: ignore[return-value]


def table(cells: Mapping[str, list[Cell]]) -> str:
    """Every method as it is fitted, and at a price of 1 % on test images; the best first."""
    found = {name: [Point(**cell) for cell in cell_list] for name, cell_list in cells.items()}
    base = found["temperature scaling"][0].ece
    header = [
        "predictions",
        "price as fitted",
        "corrupted ECE",
        "at 1 % on test images",
        "of temperature's",
        *(["less ours, paired"] if (ours := at_budget(found[OURS])).samples else []),
        "clean ECE",
    ]
    lines = []
    for name in sorted(found, key=lambda name: (at_budget(found[name]).ece, name)):
        shown = 1.0 if name == "Density-Softmax" else SHOWN
        fitted = next((point for point in found[name] if point.dial == shown), found[name][0])
        best, dialled = at_budget(found[name]), len(found[name]) > 1
        last = [f"{best.ece:.3f} ± {best.error:.3f}", f"{best.ece / base:.2f}"] if dialled else ["–", "–"]
        if ours.samples:
            difference, error = paired(best, ours)
            last.append("–" if name == OURS else f"{difference:+.4f} ± {error:.4f}")
        cost = f"{100 * fitted.price + 1e-9:+.1f} %"
        lines.append([name, cost, f"{fitted.ece:.3f} ± {fitted.error:.3f}", *last, f"{best.clean:.3f}"])
    return markdown(header, lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    args = parse(arguments(__doc__), argv)
    store = Store(args.out / "tempered.json", {"costs": COSTS, "dials": DIALS, "paired": True})
    bed = public_bed(args.data, args.cache)
    cells = {}
    for name, make in rows(bed, args.epochs).items():

        def run(make: Callable[[], tuple[Callable[[float], Final], Sequence[float]]] = make) -> list[Cell]:
            method, dials = make()
            return [point._asdict() for point in points(bed, method, dials)]

        cells[name] = store.cell(name, run)
        print(name, "done", flush=True)
    print(table(cells))


if __name__ == "__main__":
    main()
