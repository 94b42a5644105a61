"""Heads and densities of a tree whose networks are draws of the posterior, beside those of the tree as it is learned.

    python benchmarks/networks.py --data DIR     # docs/results/networks.json, a quarter of an hour
    python benchmarks/networks.py --smoke

`learn_structure` with its defaults, and `structure_posterior(…).tree(…)`, which has the same sets and neighbours, but
the posterior's networks. A head of each is trained as `defaults.py` does; NLL of validation rows, on the seeds that
look at nothing else. A density of each (`TreeDensity`, Gaussian, one for each class) is measured by the mean
log-likelihood of validation rows, in nats; "shuffled" is the density of the learned tree with its variables exchanged
at random.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch
from common.command import arguments, parse
from common.store import Cell, Store
from common.tables import table
from common.tasks import Sample
from common.training import shuffled
from defaults import TUNING, Entry, entries, fit, measure, paired, structure

from brainet_pl.graphs import structure_posterior
from brainet_pl.network import Tree
from brainet_pl.scores import TreeDensity
from brainet_pl.structure import GGT
from brainet_pl.tasks import Classification

TASKS = ["digits", "concrete", "energy", "kin8nm"]
DRAWS = 200


def log_likelihood(ggt: GGT, sample: Sample) -> float:
    """Nats of a validation row, given its class where there are classes."""
    (x, y), (held, labels) = sample.train, sample.val
    if not isinstance(sample.task, Classification):
        y, labels = (torch.zeros(len(rows), dtype=torch.long) for rows in (x, held))
    density = TreeDensity(ggt, int(y.max()) + 1, normalize=False).fit(x.float(), y)
    return float(density(held.float()).gather(1, labels[:, None]).mean())


def cell(sample: Sample, entry: Entry, seed: int, smoke: bool) -> Cell:
    """Everything about one draw of a task."""
    learned = structure(sample)
    start = time.process_time()
    drawn = structure_posterior(sample.train[0], test="fisher_z", draws=8 if smoke else DRAWS).tree(
        sample.train[0], progress=False
    )
    found = {"seconds of the posterior": round(time.process_time() - start, 1)}
    for name, ggt in (("learned", learned), ("drawn", drawn)):
        torch.manual_seed(seed)
        head = Tree().build(sample.in_features, sample.task.out_features, ggt)
        found[f"head, {name}"] = measure(fit(head, sample, entry, seed, name, smoke).head, sample, "val")["nll"]
        found[f"density, {name}"] = log_likelihood(ggt, sample)
    return found | {"density, shuffled": log_likelihood(shuffled(learned, seed), sample)}


def main(argv: Sequence[str] | None = None) -> None:
    """Learn, train, compare."""
    args = parse(arguments(__doc__), argv)
    warnings.filterwarnings("ignore", message=r"expected .* parameters within 2 %")
    warnings.filterwarnings("ignore", message=r"expected chains to agree")
    store = Store(args.out / "networks.json", {"draws": DRAWS})
    rows = []
    for name, entry in entries(args.data, args.cache, args.out).items():
        if args.smoke or name in TASKS:
            seeds = range(TUNING, TUNING + args.seeds)
            found = [
                store.cell(f"{name}/{seed}", lambda e=entry, s=seed: cell(e.load(s), e, s, args.smoke))
                for seed in seeds
            ]
            of = {key: [one[key] for one in found] for key in found[0]}
            differences = [str(paired(of[f"{kind}, drawn"], of[f"{kind}, learned"])) for kind in ("head", "density")]
            rows.append([name, *(sum(values) / len(values) for values in of.values()), *differences])
            print(rows[-1], flush=True)
    table(["task", *found[0], "head, drawn less learned", "density, drawn less learned"], rows)


if __name__ == "__main__":
    main()
