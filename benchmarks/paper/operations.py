"""Operations of sampled networks against other methods of equal size (Appendix D; the paper: 5.5 times fewer).

    python benchmarks/paper/operations.py --data DIR      # docs/results/operations.json, a minute

Multiply-adds a sample of one forward pass, and the parameters that one training step updates, at 240k parameters: a
BRAINet computes only the sub-network that was drawn; an MLP or MC-dropout pass computes everything.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `common` is

from common.command import arguments, parse
from common.data import mnist_pixels
from common.store import Store
from common.tables import table

from brainet_pl.network import BRAINetHead, smallest_budget
from brainet_pl.network.mlp import hidden_width
from brainet_pl.structure import learn_structure

BUDGET = 240_000


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    args = parse(arguments(__doc__), argv)
    store = Store(args.out / "operations.json", {"budget": BUDGET, "draws": 200})
    (x, _), _ = mnist_pixels(args.data)
    d = x.shape[1]
    width = hidden_width(d, 10, 2, BUDGET)
    dense = d * width + width * width + width * 10
    rows = [["MLP, MC-dropout", f"{BUDGET:,}", f"{dense:,}", "1.0"]]
    for s in (2, 3):
        for order in (1, 2):
            for threshold in (0.02, 0.05, 0.1, 0.2):

                def count(s: int = s, order: int = order, threshold: float = threshold) -> dict[str, float]:
                    settings = {"s": s, "max_order": order, "threshold": threshold, "max_rows": 10_000}
                    ggt = learn_structure(
                        x, bootstrap="paper", test="gaussian", progress=False, max_seconds=60, **settings
                    )
                    try:
                        head = BRAINetHead(ggt, 10, num_params=BUDGET)
                    except ValueError:
                        return {"least": float(smallest_budget(ggt, 10))}
                    out = head.output.weight.numel()  # of every branch of the root; a drawn network needs one
                    drawn = [dict(ggt.path(network)) for network in ggt.sample_uniform(200)]
                    return {
                        "parameters": head.num_params,
                        "all": head.plan.multiply_adds() + out,
                        "drawn": statistics.fmean(head.plan.multiply_adds(choices) for choices in drawn)
                        + out / len(head.output.weight),
                        "sub-networks": float(min(ggt.num_subnetworks, 10**300)),
                    }

                found = store.cell(f"s={s} order={order} threshold={threshold}", count)
                name = f"BRAINet s = {s}, order {order}, threshold {threshold:g}"
                if "least" in found:
                    rows.append([name, f"needs {found['least']:,.0f}", "–", "–"])
                else:
                    ratio = dense / found["drawn"]
                    rows.append([name, f"{found['parameters']:,}", f"{found['drawn']:,.0f}", f"{ratio:.1f}"])
    table(["method", "parameters", "multiply-adds of a pass", "times fewer than the MLP"], rows)


if __name__ == "__main__":
    main()
