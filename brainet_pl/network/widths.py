"""How wide each layer is: a rule with one factor, the factor that meets a budget of parameters, a budget by default.

A tree of many small sets has many layers, and a budget alone can leave them two or three neurons each: no more than a
bottleneck. So layers have a few neurons at the least, `WIDE`, where the budget allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from brainet_pl._utils.warn import warn
from brainet_pl.network.base import TIMES_NEEDED, resolve_budget
from brainet_pl.structure.ggt import GGT, Leaf, Node, Tree

Widths = Callable[[Tree], int]
WIDE = 2  # neurons of a layer at the least, where the budget allows it
READS = 16  # neighbours that a field reads beside its own variable, where the settings leave it open
NEURONS = 64  # of a set of fields at the least: a table of few columns has several a column


class Fields(NamedTuple):
    """The lowest layer: small ones, each of which reads a variable and its neighbours."""

    reads: tuple[tuple[tuple[int, ...], ...], ...]  # for each branch of the root and variable, itself and neighbours
    width: int  # neurons for each of these

    def count(self, per_neuron: int) -> int:
        """Parameters of all fields."""
        return sum(self.width * (len(reads) + per_neuron) for own in self.reads for reads in own)


def fields_of(ggt: GGT, reads: int | None) -> Fields | None:
    """Fields of so many neighbours at the most, where the tree knows neighbours at all.

    Each branch of the root has fields of its own: with one set for all, structures differ too little.
    """
    leaves = {i: node for i, node in enumerate(ggt.nodes) if isinstance(node, Leaf)}
    if not reads or not all(leaf.neighbours for leaf in leaves.values()):
        return None
    of_branch = root_branch_of(ggt)
    found: list[dict[int, tuple[int, ...]]] = [{} for _ in range(root_branches(ggt))]
    for i, leaf in leaves.items():
        for x, near in zip(leaf.variables, leaf.neighbours, strict=True):
            found[of_branch[i]].setdefault(x, (x, *near[:reads]))
    each = tuple(tuple(own[x] for x in range(ggt.num_variables)) for own in found)
    return Fields(each, max(1, -(-NEURONS // ggt.num_variables)))


def root_branch_of(ggt: GGT) -> dict[int, int]:
    """Number of each node but the root → the branch of the root that it is below; a root that is a leaf is in 0."""
    if isinstance(ggt.root, Leaf):
        return {0: 0}
    number = {id(node): i for i, node in enumerate(ggt.nodes)}
    found: dict[int, int] = {}
    below = [(child, t) for t, branch in enumerate(ggt.root.branches) for child in branch.children]
    while below:
        node, t = below.pop()
        found[number[id(node)]] = t
        if isinstance(node, Node):
            below += [(child, t) for branch in node.branches for child in branch.children]
    return found


def width_rule(factor: float, min_width: int, fields: Fields | None = None) -> Widths:
    """How many rows a node gives to the layers above it.

    w(X) = round(factor·|X|), and at least `min_width` neurons for each of the most layers that a branch has. A leaf
    gives the neurons of its fields, or its features as they are.
    """

    def width(node: Tree) -> int:
        if isinstance(node, Leaf):
            return len(node.variables) * (fields.width if fields else 1)
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


def root_branches(ggt: GGT) -> int:
    """Branches of the root, each of which has an output layer of its own; 1 where the whole tree is a leaf."""
    return 1 if isinstance(ggt.root, Leaf) else len(ggt.root.branches)


def count_parameters(
    ggt: GGT, factor: float, out_features: int, min_width: int, per_neuron: int, fields: Fields | None = None
) -> int:
    """Weights, `per_neuron` parameters a neuron, and the output layer, without building the plan."""
    width = width_rule(factor, min_width, fields)
    total = 0 if fields is None else fields.count(per_neuron)
    for node in ggt.nodes:
        if isinstance(node, Leaf):
            continue
        neurons = width(node)
        for branch in node.branches:
            total += neurons * (width(branch.descendant) + per_neuron)
            if branch.ancestors:
                shares = split_width(neurons, [len(a.variables) for a in branch.ancestors], min_width)
                total += sum(width(a) * out for a, out in zip(branch.ancestors, shares, strict=True))
    return total + (root_branches(ggt) * width(ggt.root) + 1) * out_features


def solve_width(
    ggt: GGT, num_params: int, out_features: int, min_width: int, per_neuron: int, fields: Fields | None = None
) -> float:
    """The width factor whose number of parameters comes closest to the budget; warns if not within 2 %."""

    def count(factor: float) -> int:
        return count_parameters(ggt, factor, out_features, min_width, per_neuron, fields)

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
    # Widths change at halves of 1 / |X|. Once at most one of these lies between, further steps change nothing.
    apart = 0.25 / ggt.num_variables**2
    while high - low > apart:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if count(middle) < num_params else (low, middle)
    best = min((low, high), key=lambda factor: abs(count(factor) - num_params))
    if abs(count(best) - num_params) > 0.02 * num_params:
        warn(
            f"expected {num_params:,} parameters within 2 %, got {count(best):,}: widths are whole numbers, and one "
            "neuron more in every node of this tree is a larger step than that"
        )
    return best


class Size(NamedTuple):
    """The tree, the width factor, the least neurons of a layer, a layer from inputs to outputs or not, the fields."""

    ggt: GGT
    factor: float
    min_width: int
    skip: bool
    fields: Fields | None


def choose_size(
    ggt: GGT,
    num_params: int | None,
    out_features: int,
    *,
    min_width: int | None = None,
    per_neuron: int = 2,
    skip: bool | None = False,
    fields: Fields | None = None,
    wanted: bool = True,
) -> Size:
    """The widths for a budget of parameters, and what of the rest the budget allows.

    Where the budget is too small for a layer for each ancestor set, or where by default these would take more than half
    of it, small sets are joined (`GGT.join_ancestors`).

    Args:
        ggt: the tree.
        num_params: the budget; None is that of `resolve_budget`, given what the tree needs for one neuron a layer, or
            `min_width` if that is given.
        out_features: of the output layer.
        min_width: neurons of a layer at the least; None is `WIDE`, or the most that the budget allows.
        per_neuron: parameters that a neuron has beside its weights.
        skip: whether to have a dense layer from inputs to outputs; None has it if it takes no more than half of the
            budget and leaves enough for the tree.
        fields: of the leaves, or None.
        wanted: whether the fields are only wanted: then they are left out where they would take more than half of the
            budget, or leave too little for the tree.
    """
    direct, narrow = ggt.num_variables * out_features, min_width or 1
    always = direct if skip else 0

    def least(tree: GGT, width: int) -> int:
        return count_parameters(tree, 0.0, out_features, width, per_neuron, fields)

    def needs(tree: GGT) -> int:
        return least(tree, narrow) + always

    if num_params is None:
        usual = resolve_budget("auto", ggt.num_variables, out_features=out_features)
        ggt = _join_to_fit(ggt, lambda smaller: TIMES_NEEDED * needs(smaller) <= usual)
        num_params = resolve_budget("auto", ggt.num_variables, needs(ggt), out_features=out_features)
    else:
        ggt = _join_to_fit(ggt, lambda smaller: needs(smaller) <= num_params)
    if fields is not None and wanted and max(2 * fields.count(per_neuron), needs(ggt)) > num_params:
        fields = None
    if skip is None:
        skip = max(2 * direct, least(ggt, narrow) + direct) <= num_params
    rest = num_params - (direct if skip else 0)
    if min_width is None:
        min_width = WIDE if least(ggt, WIDE) <= rest else 1
    factor = solve_width(ggt, rest, out_features, min_width, per_neuron, fields)
    return Size(ggt, factor, min_width, skip, fields)


def _join_to_fit(ggt: GGT, fits: Callable[[GGT], bool]) -> GGT:
    """The tree with as many ancestor sets a branch as fit, halved until they do; as it is where no number does.

    A layer for each of hundreds of small sets reads all of the descendant: they take most of a budget, and fewer,
    wider layers predict better.
    """
    most, smaller = ggt.most_ancestors, ggt
    while not fits(smaller):
        most //= 2
        if not most:
            return ggt
        smaller = ggt.join_ancestors(most)
    return smaller
