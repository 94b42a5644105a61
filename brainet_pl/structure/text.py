"""A tree of structures in a few lines of text, for a terminal or a log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brainet_pl.structure.ggt import GGT, Tree
    from brainet_pl.structure.posterior import Floats


def text_summary(ggt: GGT, temperature: float | None = None, width: int = 80, lines: int = 16) -> str:
    """The sizes in one line, then the top of the tree, one line a branch."""
    temperature = ggt.auto_temperature if temperature is None else temperature
    probabilities = ggt.branch_probabilities(temperature)
    number = {id(node): i for i, node in enumerate(ggt.nodes)}
    text = [
        f"structure of {ggt.num_variables} features from {ggt.num_rows:,} rows ({ggt.fingerprint})",
        f"{short(ggt.num_subnetworks)} sub-networks, {short(ggt.num_unique_structures)} of them different, in "
        f"{ggt.depth} levels",
        f"about {ggt.perplexity(temperature):.3g} of them count in a prediction (1: a single network)",
        *threshold_line(ggt),
    ]
    if ggt.names is not None:
        text.append(f"variables: {listed(range(ggt.num_variables), ggt)}")
    tree = _branch_lines(ggt, ggt.root, probabilities, number)
    text += tree[:lines]
    if len(tree) > lines:
        text.append(f"… {len(tree) - lines} more lines")
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in text)


def _branch_lines(
    ggt: GGT, node: Tree, probabilities: list[Floats], number: dict[int, int], indent: int = 0
) -> list[str]:
    """One line for each branch of a node and of those below it."""
    lines = []
    for t, branch in enumerate(getattr(node, "branches", ())):
        above = ", ".join(_set(ancestor, ggt) for ancestor in branch.ancestors)
        split = f"groups of {above} above {_set(branch.descendant, ggt)}" if above else "not split"
        lines.append(f"{'  ' * indent}{probabilities[number[id(node)]][t]:6.1%}  {split}")
        for child in branch.children:
            if hasattr(child, "branches"):
                lines.append(f"{'  ' * indent}        {len(child.variables)} variables:")
                lines += _branch_lines(ggt, child, probabilities, number, indent + 1)
    return lines


def threshold_line(ggt: GGT) -> list[str]:
    """One line on the threshold that the tree was learned with, and how it came about; none where it is not known."""
    threshold, modularity = ggt.settings.get("threshold"), ggt.settings.get("modularity")
    if not isinstance(threshold, int | float):
        return []
    line = f"{ggt.settings.get('test', 'test')} at threshold {threshold:.4g}"
    if ggt.settings.get("threshold_by") != "auto" or not isinstance(modularity, int | float):
        return [line]
    tried = ggt.settings.get("thresholds_tried")
    if not modularity:
        return [f"{line}: the test's own, because none of {tried} others gives sets that depend on themselves"]
    return [f"{line}: the best of {tried}, modularity {modularity:.2f}"]


def _set(node: Tree, ggt: GGT) -> str:
    """The size of a set of variables; the names of a small one, where there are names."""
    count = str(len(node.variables))
    return count if ggt.names is None or len(node.variables) > 3 else f"{count} ({listed(node.variables, ggt)})"


def listed(variables: Sequence[int], ggt: GGT) -> str:
    """The names of some variables, those in the middle of a long list left out."""
    assert ggt.names is not None
    names = [ggt.names[v] for v in variables]
    return ", ".join(names if len(names) <= 4 else [*names[:2], "…", names[-1]])


def short(count: int) -> str:
    """A count in full, or its order of magnitude where the digits would not be read."""
    return f"{count:,}" if count < 10**7 else f"about 10^{math.floor(math.log10(count))}"
