"""How wide each layer is: a rule with one factor, the factor that meets a budget of parameters, a budget by default.

A tree of many small sets has many layers, and a budget alone can leave them two or three neurons each: no more than a
bottleneck. So layers have a few neurons at the least, `WIDE`, where the budget allows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from brainet_pl.network.base import resolve_budget
from brainet_pl.structure.ggt import GGT, Node, Tree

Widths = Callable[[Node], int]
WIDE = 2  # neurons of a layer at the least, where the budget allows it


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


def root_branches(ggt: GGT) -> int:
    """Branches of the root, each of which has an output layer of its own; 1 where the whole tree is a leaf."""
    return len(ggt.root.branches) if isinstance(ggt.root, Node) else 1


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
    return total + (root_branches(ggt) * emitted(ggt.root, width) + 1) * out_features


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


class Size(NamedTuple):
    """The width factor, the least neurons of a layer, and whether there is a dense layer from inputs to outputs."""

    factor: float
    min_width: int
    skip: bool


def choose_size(
    ggt: GGT,
    num_params: int | None,
    out_features: int,
    *,
    min_width: int | None = None,
    per_neuron: int = 2,
    skip: bool | None = False,
) -> Size:
    """The widths for a budget of parameters, and what of the rest the budget allows.

    Args:
        ggt: the tree.
        num_params: the budget; None is that of `resolve_budget`, given what the tree needs for one neuron a layer, or
            `min_width` if that is given.
        out_features: of the output layer.
        min_width: neurons of a layer at the least; None is `WIDE`, or the most that the budget allows.
        per_neuron: parameters that a neuron has beside its weights.
        skip: whether to have a dense layer from inputs to outputs; None has it if it takes no more than half of the
            budget and leaves enough for the tree.
    """

    def least(width: int) -> int:
        return count_parameters(ggt, 0.0, out_features, width, per_neuron)

    direct = ggt.num_variables * out_features
    if num_params is None:
        num_params = resolve_budget("auto", ggt.num_variables, least(min_width or 1) + (direct if skip else 0))
    if skip is None:
        skip = 2 * direct <= num_params and least(min_width or 1) + direct <= num_params
    rest = num_params - (direct if skip else 0)
    if min_width is None:
        min_width = next((width for width in range(WIDE, 1, -1) if least(width) <= rest), 1)
    return Size(solve_width(ggt, rest, out_features, min_width, per_neuron), min_width, skip)
