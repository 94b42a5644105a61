"""The generative score beside its anchors: frozen ResNet-20, CIFAR-10 against SVHN and TinyImageNet.

    python benchmarks/paper/generative.py --data DIR      # docs/results/generative.json, about 3 minutes

No head is trained: max-softmax, max-logit and energy come from the network's own last layer. The density is fitted to
training features; the 2,000 validation images (of the test set, never used again) give the reference of `combined` and
the likelihoods by which the prior's weight can be chosen. No unknown image is seen before the table is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `common` is

import torch
from common.command import arguments, parse
from common.data import Data, cifar_features, last_layer
from common.store import Cell, Store
from common.tables import table
from common.training import shuffled
from torch import Tensor, nn

from brainet_pl.metrics.curves import separation
from brainet_pl.scores import KNN, Generative, Mahalanobis, ScoreContext
from brainet_pl.scores.fitting import fit_score
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.structure.ggt import Leaf
from brainet_pl.tasks import Classification
from brainet_pl.tasks.passes import Passes

THRESHOLD = 0.02  # the default of the score
WEIGHTS = (10.0, 200.0, 1024.0, 5000.0, 20000.0)  # of the prior; 1024 is the default, 16 for each of 64 variables
TASK = Classification(10)


def measures(known: Tensor, unknown: dict[str, Tensor]) -> Cell:
    """AUROC, AUPR and FPR95 in %, by set."""
    found = {}
    for name, values in unknown.items():
        measured = separation(known, values)
        found |= {f"{name}/{key}": 100 * measured[key] for key in ("AUROC", "AUPR_out", "FPR95")}
    return found


@torch.no_grad()
def look(x: Tensor, layer: nn.Linear) -> Passes:
    """Features (N, 64) → what a model with the network's own last layer as its head would give the scores."""
    outputs = layer(x).unsqueeze(0)
    return Passes(outputs, None, x, TASK.predictive(outputs, None), TASK.scores(outputs, None))


def anchors(data: Data, layer: nn.Linear) -> dict[str, Cell]:
    """Scores that need no structure: those of the prediction, and distances to training features."""
    plain, unit, nearest = (s.fit(*data.plain) for s in (Mahalanobis(False), Mahalanobis(True), KNN(k=50)))
    scores: dict[str, Callable[[Passes], Tensor]] = {
        "max-softmax": lambda p: p.scores["one_minus_max_p"],
        "max-logit": lambda p: p.scores["max_logit"],
        "energy": lambda p: p.scores["energy"],
        "Mahalanobis": lambda p: plain(p)["mahalanobis"],
        "Mahalanobis, length 1": lambda p: unit(p)["mahalanobis"],
        "k-NN (k = 50), length 1": lambda p: nearest(p)["knn"],
    }
    known, unknown = look(data.test[0], layer), {k: look(v, layer) for k, v in data.ood.items()}
    return {name: measures(f(known), {k: f(v) for k, v in unknown.items()}) for name, f in scores.items()}


def generative(ggt: GGT, data: Data, layer: nn.Linear, **settings: Any) -> dict[str, Cell]:
    """The three generative scores on a tree, and the mean log-likelihood of validation features given their class."""
    score = Generative(threshold=None, **settings)
    score.set_context(ScoreContext(num_classes=10, ggt=ggt))
    fit_score(score, *data.plain)
    val = look(data.val[0], layer)
    score.finalize(val.scores | score(val))
    known, unknown = score(look(data.test[0], layer)), {k: score(look(v, layer)) for k, v in data.ood.items()}
    density = score.density(data.val[0]).gather(1, data.val[1][:, None])
    likelihood = {"val log-likelihood": density.mean().item()}
    return {n: measures(known[n], {k: v[n] for k, v in unknown.items()}) | likelihood for n in score.units}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    args = parse(arguments(__doc__), argv)
    store = Store(args.out / "generative.json", {"threshold": THRESHOLD, "weights": WEIGHTS})
    data = cifar_features(args.data, args.cache, copies=1)
    layer = last_layer(args.data)
    cells: dict[str, Cell] = store.cell("anchors", lambda: anchors(data, layer))
    learned = learn_structure(data.plain[0], bootstrap="paper", test="gaussian", threshold=THRESHOLD, progress=False)
    empty = GGT(Leaf(tuple(range(64)), ((),) * 64, 0.0), 64, len(data.plain[0]))
    for name, tree in (("no edges", empty), ("shuffled wiring", shuffled(learned)), ("learned wiring", learned)):
        found = store.cell(name, lambda tree=tree: generative(tree, data, layer))
        cells |= {f"{score}, {name}": cell for score, cell in found.items()}

    def discrete() -> dict[str, Cell]:
        tree = learn_structure(
            data.plain[0], bootstrap="paper", test="cmi", threshold=THRESHOLD, bins=4, progress=False
        )
        return generative(tree, data, layer, kind="discrete")

    found = store.cell("discrete", discrete)
    cells |= {f"{score}, discrete": cell for score, cell in found.items()}
    keys = [f"{name}/{key}" for name in ("svhn", "tiny") for key in ("AUROC", "AUPR_out", "FPR95")]
    rows = [[name, *(f"{cell[k]:.1f}" for k in keys)] for name, cell in cells.items()]
    table(["score", *keys], rows)
    rows = []
    for weight in WEIGHTS:
        found = store.cell(f"prior {weight:g}", lambda w=weight: generative(learned, data, layer, prior=w))
        cell = found["generative"]
        rows.append([f"{weight:g}", f"{cell['val log-likelihood']:.1f}", *(f"{cell[k]:.1f}" for k in keys[::3])])
    table(["weight of the prior", "val log-likelihood", "SVHN AUROC", "Tiny AUROC"], rows)


if __name__ == "__main__":
    main()
