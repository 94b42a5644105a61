"""How wide each layer is: a rule with one factor, and the factor that meets a budget of parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np

from brainet_pl.structure.ggt import GGT, Node, Tree

Widths = Callable[[Node], int]


def width_rule(factor: float, min_width: int) -> Widths:
    """w(X) = round(factor·|X|), and at least `min_width` neurons for each of the most layers that a branch has."""

    def width(node: Node) -> int:
        layers = max(max(1, len(branch.ancestors)) for branch in node.branches)
        return max(min_width * layers, round(factor * len(node.variables)))

    return width


def split_width(total: int, sizes: Sequence[int], least: int) -> list[int]:
    """Share `total` neurons among layers in proportion to the sizes of their ancestor sets, `least` at the least.

    >>> split_width(10, [3, 1], 1)
    [7, 3]
    """
    spare = total - least * len(sizes)
    share = np.asarray(sizes) / sum(sizes) * spare
    whole = np.floor(share).astype(int)
    order = np.argsort(whole - share, kind="stable")  # largest remainders first
    whole[order[: spare - whole.sum()]] += 1
    return [int(least + v) for v in whole]


def emitted(node: Tree, width: Widths) -> int:
    """Rows that a node gives to the layers above it: a leaf gives its features as they are."""
    return width(node) if isinstance(node, Node) else len(node.variables)


def count_parameters(ggt: GGT, factor: float, out_features: int, min_width: int, per_neuron: int) -> int:
    """Weights, `per_neuron` parameters a neuron, and the output layer, without building the plan."""
    width = width_rule(factor, min_width)
    total = 0
    for node in ggt.nodes:
        if isinstance(node, Node):
            own = width(node)
            for branch in node.branches:
                below = emitted(branch.descendant, width)
                total += own * (below + per_neuron)
                if branch.ancestors:
                    shares = split_width(own, [len(a.variables) for a in branch.ancestors], min_width)
                    total += sum(emitted(a, width) * out for a, out in zip(branch.ancestors, shares, strict=True))
    return total + (emitted(ggt.root, width) + 1) * out_features


def solve_width(ggt: GGT, num_params: int, out_features: int, min_width: int, per_neuron: int) -> float:
    """The width factor whose number of parameters comes closest to the budget; warns if not within 2 %."""

    def count(factor: float) -> int:
        return count_parameters(ggt, factor, out_features, min_width, per_neuron)

    smallest = count(0.0)
    if smallest > 1.02 * num_params:
        raise ValueError(
            f"expected a budget of at least {smallest:,} parameters for this tree (one neuron for each layer), got "
            f"{num_params:,}: raise num_params, or learn a smaller tree (fewer s, lower max_order, other threshold)"
        )
    low, high = 0.0, 1.0
    while count(high) < num_params:
        low, high = high, 2 * high
        if high > 1e6:
            break  # a single leaf: no width to choose
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if count(middle) < num_params else (low, middle)
    best = min((low, high), key=lambda factor: abs(count(factor) - num_params))
    if abs(count(best) - num_params) > 0.02 * num_params:
        warnings.warn(
            f"expected {num_params:,} parameters within 2 %, got {count(best):,}: widths are whole numbers, and one "
            "neuron more in every node of this tree is a larger step than that",
            stacklevel=3,
        )
    return best
