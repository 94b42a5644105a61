"""A tree of structures in a few lines of text, for a terminal or a log."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brainet_pl.structure.ggt import GGT, Tree


def text_summary(ggt: GGT, temperature: float | None = None, width: int = 80, lines: int = 16) -> str:
    """The sizes in one line, then the top of the tree, one line a branch."""
    temperature = ggt.auto_temperature if temperature is None else temperature
    probabilities = ggt.branch_probabilities(temperature)
    number = {id(node): i for i, node in enumerate(ggt.nodes)}
    text = [
        f"GGT of {ggt.num_variables} variables from {ggt.num_rows:,} rows, fingerprint {ggt.fingerprint}",
        f"{short(ggt.num_subnetworks)} sub-networks, {short(ggt.num_unique_structures)} unique structures, "
        f"depth {ggt.depth}, {ggt.num_leaves} leaves",
        f"temperature {temperature:.4g}: perplexity {ggt.perplexity(temperature):.4g}",
    ]
    tree: list[str] = []

    def describe(node: Tree, indent: int) -> None:
        for t, branch in enumerate(getattr(node, "branches", ())):
            sizes = [len(a.variables) for a in branch.ancestors]
            ancestors = ", ".join(map(str, sizes)) if sizes else "none"
            p = probabilities[number[id(node)]][t]
            tree.append(
                f"{'  ' * indent}{p:6.1%}  ancestors {ancestors} | descendant {len(branch.descendant.variables)}"
            )
            for child in branch.children:
                if hasattr(child, "branches"):
                    tree.append(f"{'  ' * indent}        {len(child.variables)} variables:")
                    describe(child, indent + 1)

    describe(ggt.root, 0)
    text += tree[:lines]
    if len(tree) > lines:
        text.append(f"… {len(tree) - lines} more lines")
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in text)


def short(count: int) -> str:
    """A count in full, or its order of magnitude where the digits would not be read."""
    return f"{count:,}" if count < 10**7 else f"about 10^{math.floor(math.log10(count))}"
