"""Table 2: the learned-confidence loss (DeVries & Taylor 2018), CIFAR-10 against TinyImageNet.

    python benchmarks/paper/table2.py --data DIR      # docs/results/table2.json, about 10 minutes

The paper trains VGG-13 from scratch; here the features are those of the public, frozen ResNet-20, so only the heads
learn. Baseline: an MLP judged by max-softmax. Confidence: the same MLP with one more output, judged by the confidence
that it learns. BRAINet: the same loss and size on the learned structure, with the mean confidence of 15 passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `common` is

import torch
from common.command import arguments, parse
from common.data import Data, cifar_features
from common.measures import quality
from common.store import Cell, Store
from common.tables import spread, table
from common.training import outputs_of, shuffled, train
from torch import nn

from brainet_pl.metrics.curves import separation
from brainet_pl.network import BRAINetHead, MLPHead
from brainet_pl.structure import learn_structure
from brainet_pl.tasks import Classification

BUDGET, THRESHOLD = 16_000, 0.12  # as chosen on validation data by table1.py
MEASURES = {"err": 2, "FPR95": 1, "DetErr": 1, "AUROC": 2, "AUPR_in": 2, "AUPR_out": 2}
PAPER = {  # VGG-13, trained from scratch
    "baseline": (5.28, 43.8, 12.0, 93.5, 94.6, 91.7),
    "confidence": (5.63, 19.5, 9.2, 97.0, 97.4, 96.5),
    "BRAINet + confidence": (5.65, 12.4, 7.6, 98.0, 98.2, 97.9),
}


def measure(data: Data, make: Callable[[int], nn.Module], score: str, seed: int, epochs: int, name: str) -> Cell:
    """Test error, and the separation of TinyImageNet by one score."""
    task = Classification(10, loss="confidence" if score == "confidence" else "cross_entropy")
    torch.manual_seed(seed)
    head = train(make(task.out_features), *data.train, epochs=epochs, loss=task.loss, seed=seed, name=f"{name} {seed}")
    known, unknown = (outputs_of(head, x, seed=seed) for x in (data.test[0], data.ood["tiny"]))
    found = separation(task.scores(known, None)[score], task.scores(unknown, None)[score])
    return quality(known[..., :10], data.test[1]) | {key: 100 * value for key, value in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Train and print."""
    args = parse(arguments(__doc__, epochs=6), argv)
    store = Store(args.out / "table2.json", {"budget": BUDGET, "threshold": THRESHOLD, "epochs": args.epochs})
    data = cifar_features(args.data, args.cache)
    tree = learn_structure(
        data.plain[0], bootstrap="paper", test="gaussian", threshold=THRESHOLD, s=2, max_order=1, progress=False
    )
    control = shuffled(tree)
    heads: dict[str, tuple[Callable[[int], nn.Module], str]] = {
        "baseline": (lambda out: MLPHead(64, out, BUDGET), "one_minus_max_p"),
        "confidence": (lambda out: MLPHead(64, out, BUDGET), "confidence"),
        "BRAINet + confidence": (lambda out: BRAINetHead(tree, out, num_params=BUDGET), "confidence"),
        "BRAINet + confidence, shuffled": (lambda out: BRAINetHead(control, out, num_params=BUDGET), "confidence"),
        "BRAINet, max-softmax": (lambda out: BRAINetHead(tree, out, num_params=BUDGET), "one_minus_max_p"),
    }
    cells: dict[str, list[Cell]] = {}
    for seed in range(args.seeds):
        for name, (make, score) in heads.items():

            def run(make=make, score=score, seed=seed, name=name) -> Cell:
                return measure(data, make, score, seed, args.epochs, name)

            cells.setdefault(name, []).append(store.cell(f"{name}/{seed}", run))
    rows = [[n, *(spread([c[m] for c in found], digits=d) for m, d in MEASURES.items())] for n, found in cells.items()]
    table(["head", *MEASURES], rows)
    print("\nThe paper's own numbers, VGG-13 trained from scratch:")
    table(["head", *MEASURES], [[name, *map(str, values)] for name, values in PAPER.items()])


if __name__ == "__main__":
    main()
