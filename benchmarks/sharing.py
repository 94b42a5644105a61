"""Structures that share weights beside four whole ones, TabM and simpler heads; unknown inputs, and groups that fail.

    python benchmarks/sharing.py --data DIR     # docs/results/sharing.json, some 20 minutes of processor time
    python benchmarks/sharing.py --smoke        # shows in a few seconds that everything works

Cells: 2,000 training rows of pixels, of grids of a ResNet-20, of embeddings of sentences and of tables, and photographs
of clothes. Half of the cells choose between heads, the other half show what was chosen. All heads have as
many parameters as BRAINet takes by default, and train alike: Adam with weight decay, batches of 128, a rate that falls,
up to the epoch that validates best; 30 % of the features are dropped from embeddings and photographs. All get a
temperature by the validation rows. Finished cells are kept.

Unknown inputs are told apart by entropy and by mutual information. A group of features fails at test time: all of its
columns are their mean, as a layer, a sensor or a part of a picture would be that is not there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.command import arguments, parse
from common.data import BACKBONE, MEAN, STD, Labelled, mnist_pixels
from common.measures import quality_of
from common.store import Cell, Store
from common.tables import table
from common.tasks import Sample, digits, nll, uci
from common.training import shuffled
from rivals.shared import Shared
from rivals.tabm import TabM
from torch import Tensor

from brainet_pl import uncertainty
from brainet_pl.backbones.loading import make_backbone
from brainet_pl.backbones.taps import Taps, pooled
from brainet_pl.calibration.temperature import fit_temperature, scale
from brainet_pl.metrics import curves
from brainet_pl.network import MLP, Ensemble, Head, HeadSettings, Linear, MCDropout, Tree
from brainet_pl.network.base import HeadInputs
from brainet_pl.network.training import TrainingSettings, fit_head
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.tasks import Classification, Regression
from brainet_pl.tasks.linear import fit_softmax

ROWS, PASSES, DROPPED, INTENTS = 2000, 15, 0.3, 30
LAST = 1280  # features of the last layer of the EfficientNet
TRAINING: dict[str, Any] = {
    "patience": 8,
    "batch_size": 128,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "rate_decays": 1,
}
HEADS: dict[str, Callable[[int], HeadSettings]] = {  # budget → settings
    "linear": lambda budget: Linear(),
    "MLP": lambda budget: MLP(num_params=budget),
    "MC-dropout": lambda budget: MCDropout(num_params=budget),
    "ensemble": lambda budget: Ensemble(num_params=budget),
    "TabM": lambda budget: TabM(num_params=budget),
    "BRAINet": lambda budget: Tree(),
    "shuffled": lambda budget: Tree(),
    "shared": lambda budget: Shared(budget),
}


class Case(NamedTuple):
    """A draw of a cell: its rows, unknown inputs by name, groups of columns by name, and the dropout of inputs."""

    sample: Sample
    unknown: Mapping[str, Tensor] = {}
    groups: Mapping[str, Sequence[int]] = {}
    dropped: float = 0.0


# -- cells ------------------------------------------------------------------------------------------------------------


def deal(x: Tensor, y: Tensor, seed: int, rows: int = ROWS) -> tuple[Labelled, Labelled, Labelled]:
    """Training, validation and test rows: `rows`, or three fifths, then a quarter of the rest, then at most 4,000."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    first = min(rows, 3 * len(x) // 5)
    then = first + min(rows // 2, (len(x) - first) // 4)
    a, b, c = order[:first], order[first:then], order[then : then + 4000]
    return (x[a], y[a]), (x[b], y[b]), (x[c], y[c])


def case(parts: Sequence[Labelled], unknown: Mapping[str, Tensor] | None = None, **more: Any) -> Case:
    """Features on the scale of the training rows."""
    mean, std = parts[0][0].mean(dim=0), parts[0][0].std(dim=0).clamp_min(1e-6)
    train, val, test = (((x - mean) / std, y) for x, y in parts)
    sample = Sample(train, val, test, Classification(int(max(y.max() for _, y in parts)) + 1))
    return Case(sample, {name: (x - mean) / std for name, x in (unknown or {}).items()}, **more)


def quarters(side: int) -> dict[str, list[int]]:
    """The columns of the four quarters of a picture, as four sensors would give them."""
    half = (np.arange(side) >= side / 2).astype(int)
    number = (2 * half[:, None] + half[None]).ravel()
    return {f"quarter {q}": np.flatnonzero(number == q).tolist() for q in range(4)}


def known_digits(seed: int) -> Case:
    """Digits 0 to 7; 8 and 9 are unknown."""
    from sklearn.datasets import load_digits

    content = load_digits()
    unknown = torch.tensor(content.data[content.target > 7] / 16, dtype=torch.float32)
    return Case(digits(seed), {"8 and 9": unknown}, quarters(8))


def images(data: Path, name: str, other: str, seed: int) -> Case:
    """Pixels at 14×14 of one of two sets; the other is unknown."""
    x, y = mnist_pixels(data, name, pool=2)[0]
    sample = Sample(*deal(x, y, seed), Classification(10))
    return Case(sample, {other: mnist_pixels(data, other, pool=2)[1][0][:ROWS]}, quarters(14))


@cache
def maps(data: Path, name: str) -> dict[str, Tensor]:
    """Grids of stages 2 and 3 of the ResNet-20 and its last layer, of the first 6,000 images of a set."""
    kept = data / "cache" / f"sharing_{name}.pt"
    if not kept.is_file():
        net = make_backbone("cifar_resnet20", str(data / BACKBONE)).eval()  # type: ignore[union-attr]
        caught: dict[str, Tensor] = {}
        for stage in ("layer2", "layer3"):
            net.get_submodule(stage).register_forward_hook(lambda m, i, o, stage=stage: caught.update({stage: o}))
        with np.load(data / f"{name}.npz") as content:
            x, y = torch.tensor(content["x"][:6000]).permute(0, 3, 1, 2), torch.tensor(content["y"][:6000]).long()
        mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
        found: dict[str, list[Tensor]] = {"stage 2": [], "stage 3": [], "last": []}
        with torch.inference_mode():
            for part in x.split(200):
                net((part.float() / 255 - mean) / std)
                found["stage 2"].append(pooled(caught["layer2"], "4x4"))
                found["stage 3"].append(pooled(caught["layer3"], "4x4"))
                found["last"].append(caught["layer3"].mean(dim=(2, 3)))
        torch.save({key: torch.cat(parts) for key, parts in found.items()} | {"y": y}, kept)
    return dict(torch.load(kept))


def stages(data: Path, names: Sequence[str], seed: int) -> Case:
    """Stages of the network side by side, each a group; test images validate and test, those of SVHN are unknown."""

    def read(images: str) -> Labelled:
        return torch.cat([maps(data, images)[name] for name in names], dim=1), maps(data, images)["y"]

    (x, y), (u, v) = read("cifar10_train"), read("cifar10_test")
    a = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:ROWS]
    parts = [(x[a], y[a]), (u[:1500], v[:1500]), (u[1500:5500], v[1500:5500])]
    ends = np.cumsum([0, *(maps(data, "cifar10_test")[name].shape[1] for name in names)])
    groups = {name: range(ends[i], ends[i + 1]) for i, name in enumerate(names)} if len(names) > 1 else {}
    return case(parts, {"SVHN": read("svhn_test10k")[0][:ROWS]}, groups=groups)


def clothing(data: Path, layers: Sequence[str], seed: int) -> Case:
    """Photographs of clothes by layers of an EfficientNet, each a group."""
    import swap

    task = swap.clothing(data, 5)
    taps = Taps(tuple(layers), tuple("mean" if name == "last" else "2x2" for name in layers))
    kept = data / "cache" / f"sharing_clothing_{len(layers)}.pt"
    x = swap.read_features(task, taps, "", kept).x
    groups = {"last": range(LAST), "block 10": range(LAST, x.shape[1])} if len(layers) > 1 else {}
    rows = [torch.as_tensor(part) for part in task.folds[seed]]
    return case([(x[part], task.labels[part]) for part in rows], groups=groups, dropped=DROPPED)


def intents(data: Path, seed: int) -> Case:
    """Embeddings of sentences of 30 intents, drawn by the seed; those of 30 others are unknown."""
    parts = torch.load(data / "cache" / "intents.pt")
    order = torch.randperm(150, generator=torch.Generator().manual_seed(seed))
    place = torch.full((150,), -1)
    place[order[:INTENTS]] = torch.arange(INTENTS)
    known = [(x[place[y] >= 0], place[y][place[y] >= 0]) for x, y in parts]
    x, y = parts[2]
    return case(known, {"other intents": x[torch.isin(y, order[INTENTS : 2 * INTENTS])]}, dropped=DROPPED)


def columns(data: Path, name: str, seed: int) -> Case:
    """A table: words as columns of 0 and 1, the last column is the class; wines are below, at or above a 6."""
    import pandas

    frame = pandas.read_csv(data / "tables" / f"{name}.csv", header=None)
    y = frame.pop(frame.columns[-1])
    codes = y.clip(5, 7) if name.startswith("wine") else y
    x = torch.tensor(pandas.get_dummies(frame).to_numpy(np.float32))
    return case(deal(x, torch.tensor(np.unique(codes, return_inverse=True)[1]), seed))


def regression(data: Path, name: str, seed: int) -> Case:
    """A published split of a regression set."""
    return Case(uci(data / "uci", name)(seed))


def cells(data: Path) -> dict[str, tuple[Callable[[int], Case], int, bool]]:
    """Cell → its draws, their number, and whether it is one of those that choose."""
    return {
        "digits": (known_digits, 3, True),
        "phoneme": (partial(columns, data, "phoneme"), 3, True),
        "concrete": (partial(regression, data, "concrete"), 3, True),
        "Fashion-MNIST": (partial(images, data, "FashionMNIST", "MNIST"), 3, True),
        "stage 2": (partial(stages, data, ["stage 2"]), 3, True),
        "clothing, last": (partial(clothing, data, ["last"]), 2, True),
        "german": (partial(columns, data, "german"), 3, False),
        "white wine": (partial(columns, data, "winequality-white"), 3, False),
        "energy": (partial(regression, data, "energy"), 3, False),
        "MNIST": (partial(images, data, "MNIST", "FashionMNIST"), 3, False),
        "intents": (partial(intents, data), 3, False),
        "stages 2, 3, last": (partial(stages, data, ["stage 2", "stage 3", "last"]), 2, False),
        "clothing, chosen": (partial(clothing, data, ["last", "_blocks.10"]), 2, False),
    }


# -- one head on one draw ---------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Outputs (T, N, O) and their weights, as a head gives them."""

    values: Tensor
    weights: Tensor | None


def fit(head: Head, found: Case, epochs: int, seed: int) -> Callable[[Tensor], Answer]:
    """Train a head; gives what it answers to features."""
    sample = found.sample

    def answer(x: Tensor) -> Answer:
        torch.manual_seed(0)
        with torch.no_grad():
            parts = [head.passes(part, PASSES) for part in x.split(1000)]  # type: ignore[no-untyped-call]
        return Answer(torch.cat([part.values for part in parts], dim=1), parts[0].weights)

    torch.manual_seed(seed)
    settings = TrainingSettings(max_epochs=epochs, input_dropout=found.dropped, **TRAINING)
    fit_head(
        head,
        HeadInputs(*sample.train),
        settings,
        sample.task.loss,
        lambda: nll(sample.task, *answer(sample.val[0]), sample.val[1]),
    )
    head.eval()
    if head.finalizes:

        def each(outputs: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
            return sample.task.nll(sample.task.predictive(outputs, weights), target)  # type: ignore[return-value]

        head.finalize(HeadInputs(*sample.train), HeadInputs(*sample.val), each, PASSES)
    return answer


def logistic(found: Case) -> Callable[[Tensor], Answer]:
    """A logistic regression whose penalty is chosen; gives the logarithm of its probabilities."""
    layer = fit_softmax(*found.sample.train, found.sample.task.out_features)
    assert layer is not None
    return lambda x: Answer(layer(x).clamp_min(1e-12).log().unsqueeze(0), None)


def measure(answer: Callable[[Tensor], Answer], found: Case) -> Cell:
    """NLL of the test rows, of rows whose groups of columns fail, and how far unknown inputs are from known ones."""
    sample, (x, y) = found.sample, found.sample.test
    if isinstance(sample.task, Regression):
        return {"nll": nll(sample.task, *answer(x), y)}

    def probs(rows: Tensor) -> Tensor:
        values, weights = answer(rows)
        return uncertainty.predictive(values.softmax(-1), weights)

    tau = fit_temperature(probs(sample.val[0]), sample.val[1])
    known = probs(x)
    cell = {f"{k}": v for k, v in quality_of(scale(known, tau), y).items()}
    for name, group in found.groups.items():
        broken = x.clone()
        broken[:, list(group)] = sample.train[0].mean(dim=0)[list(group)]
        less = probs(broken)
        cell[f"without {name}/nll"] = quality_of(scale(less, tau), y)["nll"]
    for name, rows in found.unknown.items():
        a, b = answer(x), answer(rows)
        for score in (uncertainty.predictive_entropy, uncertainty.mutual_information):
            inside, outside = (score(v.softmax(-1), w) for v, w in (a, b))
            cell[f"{name}/{score.__name__}"] = 100 * curves.separation(inside, outside)["AUROC"]
    return cell


def run(head: str, found: Case, ggt: Callable[[], GGT], seed: int, epochs: int) -> Cell:
    """Train and measure one head; its time is that of training, without the structure."""
    d, out = found.sample.in_features, found.sample.task.out_features
    if head == "logistic regression":
        return measure(logistic(found), found)
    tree = shuffled(ggt(), seed) if head == "shuffled" else ggt()
    torch.manual_seed(seed)
    budget = Tree().build(d, out, tree).num_params
    torch.manual_seed(seed)
    built = HEADS[head](budget).build(d, out, tree)
    began = time.process_time()
    answer = fit(built, found, epochs, seed)
    seconds = time.process_time() - began
    return measure(answer, found) | {"seconds": seconds, "parameters": float(built.num_params)}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cells, and print the tables."""
    parser = arguments(__doc__, seeds=3, epochs=60)
    parser.add_argument("--only", nargs="+", help="these cells alone")
    parser.add_argument("--heads", nargs="+", help="these heads alone")
    args = parse(parser, argv)
    warnings.filterwarnings("ignore", message=r"expected .* parameters within 2 %")
    store = Store(args.out / "sharing.json", {"training": TRAINING, "rows": ROWS, "dropped": DROPPED})
    entries = {"digits": (known_digits, 1, True)} if args.smoke else cells(args.data)
    for name, (draw, seeds, _) in entries.items():
        if args.only and name not in args.only:
            continue
        for seed in range(min(seeds, args.seeds)):
            found = cache(partial(draw, seed))
            tree = cache(lambda found=found: learn_structure(found().sample.train[0], progress=False))
            classifies = name not in ("concrete", "energy")
            for head in [*HEADS, *(["logistic regression"] if classifies else [])]:
                if args.heads and head not in args.heads:
                    continue
                key = f"{name}/{head}/{seed}"
                cell = store.cell(key, lambda h=head, s=seed, f=found, t=tree: run(h, f(), t, s, args.epochs))
                print(key, {k: round(v, 4) for k, v in cell.items()}, flush=True)
    show(store, entries)


def show(store: Store, entries: Mapping[str, Any]) -> None:
    """NLL less BRAINet's by cell and head, ± the standard error of paired differences."""
    done = store.content["cells"]
    heads = ["logistic regression", *HEADS]
    rows = []
    for name, (_, seeds, chooses) in entries.items():
        ours = {s: done[f"{name}/BRAINet/{s}"]["nll"] for s in range(seeds) if f"{name}/BRAINet/{s}" in done}
        row: list[Any] = [name, "chooses" if chooses else "shows"]
        for head in heads:
            less = [done[key]["nll"] - v for s, v in ours.items() if (key := f"{name}/{head}/{s}") in done]
            error = np.std(less, ddof=1) / len(less) ** 0.5 if len(less) > 1 else np.nan
            own = np.mean(list(ours.values())) if ours else np.nan
            row.append("" if not less else f"{own:.4f}" if head == "BRAINet" else f"{np.mean(less):+.4f} ± {error:.4f}")
        rows.append(row)
    table(["cell", "role", *heads], rows)


if __name__ == "__main__":
    main()
