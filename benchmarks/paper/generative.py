"""The generative score beside its anchors: frozen ResNet-20, CIFAR-10 against SVHN and TinyImageNet.

    python benchmarks/paper/generative.py --data DIR      # docs/results/generative.json, about 3 minutes

No head is trained: max-softmax, max-logit and energy come from the network's own last layer. The density is fitted to
training features; the 2,000 validation images (of the test set, never used again) give the reference of `combined` and
the likelihoods by which the prior's weight can be chosen. No unknown image is seen before the table is made.
"""

from __future__ import annotations

import torch
from common import Cell, Data, Store, arguments, cifar_features, shuffled, table
from torch import Tensor
from torch.nn import functional as F

from brainet_pl.generative import GenerativeScore
from brainet_pl.ood import ood_metrics
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.structure.ggt import Leaf

THRESHOLD = 0.02  # the default of GenerativeFit
WEIGHTS = (10.0, 200.0, 1024.0, 5000.0, 20000.0)  # of the prior; 1024 is the default, 16 for each of 64 variables


def measures(known: Tensor, unknown: dict[str, Tensor]) -> Cell:
    """AUROC, AUPR and FPR95 in %, by set."""
    found = {}
    for name, values in unknown.items():
        measured = ood_metrics(known, values)
        found |= {f"{name}/{key}": 100 * measured[key] for key in ("AUROC", "AUPR_out", "FPR95")}
    return found


def anchors(data: Data, linear: tuple[Tensor, Tensor]) -> dict[str, Cell]:
    """Scores that need no structure."""
    train, y = data.plain
    unit, labels = F.normalize(train, dim=1), F.one_hot(y).float()

    def nearest(x: Tensor) -> Tensor:
        """Distance to the 50th nearest training sample, features of length 1 (Sun et al. 2022)."""
        parts = (F.normalize(part, dim=1) @ unit.t() for part in x.split(500))
        return torch.cat([2 - 2 * p.topk(50, dim=1).values[:, -1] for p in parts])

    def mahalanobis(features: Tensor, normalize: bool) -> Tensor:
        """Distance to the nearest class mean under one covariance (Lee et al. 2018)."""
        base, x = (F.normalize(v, dim=1) if normalize else v for v in (train, features))
        means = (labels.t() @ base) / labels.sum(0)[:, None]
        residual = base - means[y]
        precision = torch.linalg.pinv(residual.t() @ residual / len(base))
        gap = x[:, None] - means
        return torch.einsum("bci,ij,bcj->bc", gap, precision, gap).amin(dim=1)

    def logits(x: Tensor) -> Tensor:
        return x @ linear[0].t() + linear[1]

    scores = {
        "max-softmax": lambda x: 1 - logits(x).softmax(1).amax(1),
        "max-logit": lambda x: -logits(x).amax(1),
        "energy": lambda x: -logits(x).logsumexp(1),
        "Mahalanobis": lambda x: mahalanobis(x, False),
        "Mahalanobis, length 1": lambda x: mahalanobis(x, True),
        "k-NN (k = 50), length 1": nearest,
    }
    return {name: measures(f(data.test[0]), {k: f(v) for k, v in data.ood.items()}) for name, f in scores.items()}


def generative(ggt: GGT, data: Data, linear: tuple[Tensor, Tensor], **settings: object) -> dict[str, Cell]:
    """The three generative scores, and the mean log-likelihood of validation features given their class."""
    score = GenerativeScore(ggt, 10, **settings).fit(*data.plain, progress=False)

    def all_scores(x: Tensor) -> dict[str, Tensor]:
        logits = x @ linear[0].t() + linear[1]
        return {"energy": -logits.logsumexp(1)} | score.scores(x, logits.softmax(1), -logits.logsumexp(1))

    score.watch(all_scores(data.val[0]))
    score.settle()
    known, unknown = all_scores(data.test[0]), {k: all_scores(v) for k, v in data.ood.items()}
    density = score(data.val[0]).gather(1, data.val[1][:, None])
    likelihood = {"val log-likelihood": density.mean().item()}
    names = ("generative", "generative_weighted", "combined")
    return {n: measures(known[n], {k: v[n] for k, v in unknown.items()}) | likelihood for n in names}


def main() -> None:
    """Print the tables."""
    args = arguments(__doc__).parse_args()
    store = Store(args.out / "generative.json", {"threshold": THRESHOLD, "weights": WEIGHTS})
    data = cifar_features(args.data, args.cache, copies=1)
    weights = torch.load(args.data / "resnet20_cifar10.pth", map_location="cpu", weights_only=True)
    weights = {k.removeprefix("module."): v for k, v in weights.get("state_dict", weights).items()}
    linear = (weights["linear.weight"], weights["linear.bias"])
    cells: dict[str, Cell] = store.cell("anchors", lambda: anchors(data, linear))
    learned = learn_structure(data.plain[0], test="gaussian", threshold=THRESHOLD, progress=False)
    empty = GGT(Leaf(tuple(range(64)), ((),) * 64, 0.0), 64, len(data.plain[0]))
    for name, tree in (("no edges", empty), ("shuffled wiring", shuffled(learned)), ("learned wiring", learned)):
        found = store.cell(name, lambda tree=tree: generative(tree, data, linear))
        cells |= {f"{score}, {name}": cell for score, cell in found.items()}

    def discrete() -> dict[str, Cell]:
        tree = learn_structure(data.plain[0], test="cmi", threshold=THRESHOLD, bins=4, progress=False)
        return generative(tree, data, linear, kind="discrete")

    found = store.cell("discrete", discrete)
    cells |= {f"{score}, discrete": cell for score, cell in found.items()}
    keys = [f"{name}/{key}" for name in ("svhn", "tiny") for key in ("AUROC", "AUPR_out", "FPR95")]
    rows = [[name, *(f"{cell[k]:.1f}" for k in keys)] for name, cell in cells.items()]
    table(["score", *keys], rows)
    rows = []
    for weight in WEIGHTS:
        found = store.cell(f"prior {weight:g}", lambda w=weight: generative(learned, data, linear, prior=w))
        cell = found["generative"]
        rows.append([f"{weight:g}", f"{cell['val log-likelihood']:.1f}", *(f"{cell[k]:.1f}" for k in keys[::3])])
    table(["weight of the prior", "val log-likelihood", "SVHN AUROC", "Tiny AUROC"], rows)


if __name__ == "__main__":
    main()
