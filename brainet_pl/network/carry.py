"""Weights of one head in another that is wired by a newer tree: layers that read and give the same keep their weights.

A layer is the same where it stands over the same variables, gives the same rows of as many neurons, and reads nodes
that are the same down to the inputs; a field, where it reads the same inputs. All others start afresh, as `build` left
them.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brainet_pl.network.base import Head
from brainet_pl.network.executor import Executor
from brainet_pl.network.plan import FIELDS, Layer, Plan

_READ_ROOT = ("output.weight", "out_weight")  # of a head: their last axis is the rows of the root
_NEURONS = ("scale", "bias", "running_mean", "running_var")  # of the executor: vectors over neurons


class Carried(NamedTuple):
    """What a new head took over."""

    whole: frozenset[str]  # the names of parameters that were taken over as they are
    share: float  # of all its trainable numbers, how many were taken over


class Pair(NamedTuple):
    """A layer of the old plan and the same one of the new, each with the number of its level."""

    old: Layer
    old_level: int
    new: Layer
    new_level: int


@torch.no_grad()
def carry(old: Head, new: Head) -> Carried:
    """Copy into `new`, a head of the same settings, what it has in common with `old`; it is changed in place."""
    before, after = old.state_dict(keep_vars=True), new.state_dict(keep_vars=True)  # as they are, no copies
    same = {name for name, values in after.items() if name in before and before[name].shape == values.shape}
    count = 0
    layers: tuple[Any, Any] = getattr(old, "layers", None), getattr(new, "layers", None)
    matched = _matching_of(*layers)
    if matched is not None:
        same -= {name for name in after if name.startswith("layers.") or name in _READ_ROOT}
        count = _carry_layers(matched, *layers) + _carry_output(matched, before, after)
    for name in same - {"layers.layout"}:
        after[name].copy_(before[name])
    whole = frozenset(name for name, _ in new.named_parameters() if name in same)
    count += sum(p.numel() for name, p in new.named_parameters() if name in whole)
    return Carried(whole, count / max(1, new.num_params))


def _matching_of(old: Any, new: Any) -> Matching | None:
    """What the plans of two executors have in common; None where they are wired alike, or are no two of one size."""
    if not isinstance(old, Executor) or not isinstance(new, Executor) or old.members != new.members:
        return None
    matched = matching(old.plan, new.plan)
    return None if _equal(matched, old.plan, new.plan) else matched


def _equal(matched: Matching, old: Plan, new: Plan) -> bool:
    """Whether two plans are wired alike to the last layer, so that every weight stands where it stood."""
    layers = [[(number, x) for number, level in enumerate(plan.levels) for x in level.layers] for plan in (old, new)]
    in_place = all(pair.old == pair.new and pair.old_level == pair.new_level for pair in matched.pairs)
    return (
        in_place and len(matched.pairs) == len(layers[0]) == len(layers[1]) and len(old.root_rows) == len(new.root_rows)
    )


def _carry_layers(matched: Matching, old: Executor, new: Executor) -> int:
    """Copy the layers that two executors share; how many trainable numbers these are."""
    count = 0
    for pair in matched.pairs:
        mine = slice(pair.new.first_weight, pair.new.first_weight + pair.new.fan_in * pair.new.width)
        yours = slice(pair.old.first_weight, pair.old.first_weight + pair.old.fan_in * pair.old.width)
        new.weight[:, mine] = old.weight[:, yours]
        count += new.weight[:, mine].numel()
        for member in range(new.members):
            here = _neurons(new.plan, pair.new_level, pair.new, member, new.members)
            there = _neurons(old.plan, pair.old_level, pair.old, member, old.members)
            for name in _NEURONS:
                target, source = getattr(new, name), getattr(old, name)
                if target is not None and len(target):
                    target[here] = source[there]
                    count += pair.new.width if isinstance(target, nn.Parameter) else 0
    return count


def _neurons(plan: Plan, level: int, layer: Layer, member: int, members: int) -> slice:
    """Where a layer's neurons lie in the vectors over neurons: by level, then by member."""
    at = plan.levels[level]
    first = members * at.first_neuron + member * at.num_neurons + layer.first_neuron
    return slice(first, first + layer.width)


def _carry_output(matched: Matching, before: dict[str, Tensor], after: dict[str, Tensor]) -> int:
    """Copy what the output layer has for rows of the root that come from the same layers; how many numbers."""
    rows = matched.root_rows
    count = 0
    for name in _READ_ROOT:
        if name in before and name in after and before[name].shape == after[name].shape and rows:
            after[name][..., rows] = before[name][..., rows].clone()
            count += after[name][..., rows].numel()
    return count


class Matching(NamedTuple):
    """What two plans have in common: equal layers, and those rows of the root that come from equal layers alone."""

    pairs: list[Pair]
    root_rows: list[int]


def matching(old: Plan, new: Plan) -> Matching:
    """The layers of two plans that are the same, found from the inputs up; no layer is paired twice."""
    theirs, ours = _by_node(old), _by_node(new)
    taken: set[int] = set()
    pairs = _same_fields(theirs.pop(FIELDS, []), ours.pop(FIELDS, []), old, new)
    partner = _same_leaves(pairs, old, new)  # new node → old node, where all layers are the same
    rows: list[int] = []
    for node in chain.from_iterable(level.nodes for level in new.levels):
        alike = [other for other in theirs if other not in taken and _same_size(node, other, old, new)]
        shared = {other: _same_layers(theirs[other], ours[node], old, new, partner) for other in alike}
        chosen = max(shared, key=lambda other: _count_weights(shared[other]), default=-1)
        if not shared.get(chosen):
            continue
        taken.add(chosen)
        pairs += shared[chosen]
        if len(shared[chosen]) == len(ours[node]) == len(theirs[chosen]):
            partner[node] = chosen
        if node == 0 and chosen == 0:
            rows = _whole_rows(shared[chosen], ours[0], new)
    return Matching(pairs, rows)


def _same_size(node: int, other: int, old: Plan, new: Plan) -> bool:
    """Whether a node of the new plan is over the same variables as one of the old, and gives as many rows."""
    if old.ggt.nodes[other].variables != new.ggt.nodes[node].variables:
        return False
    return len(old.node_rows[other]) == len(new.node_rows[node])


def _count_weights(pairs: list[Pair]) -> int:
    return sum(pair.new.fan_in * pair.new.width for pair in pairs)


def _same_fields(
    old_layers: list[tuple[int, Layer]], new_layers: list[tuple[int, Layer]], old: Plan, new: Plan
) -> list[Pair]:
    """The fields of as many neurons that read the same inputs in the same order."""
    known = {(old.inputs_of(layer), layer.width, layer.branch): (level, layer) for level, layer in old_layers}
    pairs = []
    for level, layer in new_layers:
        other = known.get((new.inputs_of(layer), layer.width, layer.branch))
        if other is not None:
            pairs.append(Pair(other[1], other[0], layer, level))
    return pairs


def _same_leaves(fields: list[Pair], old: Plan, new: Plan) -> dict[int, int]:
    """New leaf → an old one over the same variables, which gives the same: inputs as they are, or equal fields."""
    plain = not (old.has_fields or new.has_fields)
    kept = {(pair.new.branch, new.inputs_of(pair.new)[0]) for pair in fields}
    known = {_leaf_key(old, i): i for i in old.leaf_sets}
    partner = {}
    for i, own_set in new.leaf_sets.items():
        key = _leaf_key(new, i)
        if key in known and (plain or kept.issuperset((own_set, v) for v in new.ggt.nodes[i].variables)):
            partner[i] = known[key]
    return partner


def _leaf_key(plan: Plan, leaf: int) -> tuple[int, tuple[int, ...]]:
    """The set of fields that a leaf gives, and of which variables: leaves of several structures may give the same."""
    return plan.leaf_sets[leaf], plan.ggt.nodes[leaf].variables


def _by_node(plan: Plan) -> dict[int, list[tuple[int, Layer]]]:
    """Node number → its layers, each with the number of its level."""
    layers: dict[int, list[tuple[int, Layer]]] = {}
    for number, level in enumerate(plan.levels):
        for layer in level.layers:
            layers.setdefault(layer.node, []).append((number, layer))
    return layers


def _offset(plan: Plan, level: int, layer: Layer) -> int:
    """The first row of its node's output that a layer gives."""
    row = int((plan.levels[level].branch_neurons[layer.branch] == layer.first_neuron).argmax())
    return plan.levels[level].first_row + row - int(plan.node_rows[layer.node][0])


def _same_layers(
    old_layers: list[tuple[int, Layer]],
    new_layers: list[tuple[int, Layer]],
    old: Plan,
    new: Plan,
    partner: dict[int, int],
) -> list[Pair]:
    """The layers of two nodes over the same variables that read the same and give the same rows."""
    left = list(old_layers)
    pairs = []
    for level, layer in new_layers:
        for other_level, other in left:
            like = layer.width == other.width and layer.fan_in == other.fan_in
            like = like and len(layer.sources) == len(other.sources)
            like = like and _offset(new, level, layer) == _offset(old, other_level, other)
            if like and all(
                _same_node(a, b, old, new, partner) for a, b in zip(layer.sources, other.sources, strict=True)
            ):
                pairs.append(Pair(other, other_level, layer, level))
                left.remove((other_level, other))
                break
    return pairs


def _same_node(node: int, other: int, old: Plan, new: Plan, partner: dict[int, int]) -> bool:
    """Whether a source of the new plan gives what one of the old gives: an equal leaf, or all layers the same."""
    known = partner.get(node)
    if known is None or node not in new.leaf_sets or other not in old.leaf_sets:
        return known == other
    return _leaf_key(old, known) == _leaf_key(old, other)


def _whole_rows(pairs: list[Pair], layers: list[tuple[int, Layer]], new: Plan) -> list[int]:
    """The rows of the root that come from layers that were found again in the same branch, whichever is taken."""
    known = {id(pair.new) for pair in pairs if pair.new.branch == pair.old.branch}  # each has its own output layer
    fresh: set[int] = set()
    for level, layer in layers:
        if id(layer) not in known:
            first = _offset(new, level, layer)
            fresh |= set(range(first, first + layer.width))
    return [row for row in range(len(new.root_rows)) if row not in fresh]
