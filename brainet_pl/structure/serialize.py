"""A tree as JSON-able primitives, and back with every promise of the format checked.

A file may be cut short, edited by hand, or not be a tree at all; a wrong tree must be refused here, because the head
that is built from it would compute something else without an error.
"""

from __future__ import annotations

import json
import math
import numbers
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn

from brainet_pl._utils.checks import shown, whole
from brainet_pl._utils.stored import FORMAT
from brainet_pl.structure.tree import Branch, Leaf, Node, NumberedTree, Tree

MOST_LEVELS = 100  # of nodes below each other; B-RAI adds one for each order of its tests, and rarely reaches ten
_ADVICE = "it is not what to_json writes; learn the structure again"


class Content(NamedTuple):
    """What a stored tree holds, once it has been checked."""

    root: Tree
    num_variables: int
    num_rows: int
    settings: dict[str, Any]
    names: tuple[str, ...] | None = None


def write_nodes(tree: NumberedTree) -> list[dict[str, Any]]:
    """Nodes in a flat list; a branch is the list of its children's numbers, the descendant last."""
    entries: list[dict[str, Any]] = []
    for node, branches in zip(tree.nodes, tree.branches, strict=True):
        if isinstance(node, Leaf):
            entry = {"variables": node.variables, "parents": node.parents, "score": node.score}
            entries.append(entry | ({"neighbours": node.neighbours} if node.neighbours else {}))
        else:
            entries.append({"variables": node.variables, "branches": [list(branch) for branch in branches]})
    return entries


def read_content(data: Any) -> Content:
    """The tree of a dictionary in the form of `GGT.to_dict`."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(f"expected a GGT in JSON format {FORMAT}, got {got}: learn the structure again")
    for key in ("num_variables", "num_rows", "settings", "nodes"):
        if key not in data:
            _refuse(f"the key {key!r}", f"only {', '.join(map(str, data))}", "the tree")
    d = whole("num_variables of the tree", data["num_variables"], 1, hint=_ADVICE)
    n = whole("num_rows of the tree", data["num_rows"], 1, hint=_ADVICE)
    settings = data["settings"]
    if not isinstance(settings, Mapping):
        _refuse("settings to be a dictionary", shown(settings), "the tree")
    try:  # else it could be read, but never written again
        json.dumps(dict(settings), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        _refuse("settings that JSON can hold", f"{shown(settings)} ({error})", "the tree")
    return Content(_read_nodes(data["nodes"], d), d, n, dict(settings), _read_names(data.get("names"), d))


def _read_names(names: Any, d: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if not _is_list(names) or len(names) != d or not all(isinstance(name, str) for name in names):
        _refuse(f"names of its {d} variables", shown(names), "the tree")
    return tuple(names)


def _read_nodes(entries: Any, d: int) -> Tree:
    """Build from the last entry to the first, so that children come before their node."""
    if not _is_list(entries) or not entries:
        _refuse("a list of at least one node", shown(entries), "the tree")
    built: list[Tree | None] = [None] * len(entries)
    levels = [0] * len(entries)
    for i in range(len(built) - 1, -1, -1):
        built[i] = _read_node(entries[i], i, built, d)
        if "branches" in entries[i]:
            levels[i] = 1 + max(levels[child] for child in chain.from_iterable(entries[i]["branches"]))
    root = built[0]
    assert root is not None
    if len(root.variables) != d:  # each is there once and below d
        _refuse(f"all variables from 0 to {d - 1}", f"{len(root.variables)} of them", "node 0 of the tree")
    if levels[0] > MOST_LEVELS:
        _refuse(f"at most {MOST_LEVELS} levels", f"{levels[0]}", "the tree")
    for i, node in enumerate(built[1:], start=1):
        if node is not None:
            _refuse("every node but the first to be a child", "no node that it belongs to", f"node {i} of the tree")
    return root


def _read_node(entry: Any, i: int, built: list[Tree | None], d: int) -> Tree:
    """The node or leaf of entry `i`, whose children are `built`."""
    where = f"node {i} of the tree"
    if not isinstance(entry, Mapping):
        _refuse("a dictionary", shown(entry), where)
    variables = _read_variables(_get(entry, "variables", where), d, where)
    if not variables:
        _refuse("at least one variable", "none", where)
    if "branches" not in entry:
        return _read_leaf(entry, variables, d, where)
    branches = entry["branches"]
    if not _is_list(branches) or not branches:
        _refuse("at least one branch", shown(branches), where)
    return Node(variables, tuple(_read_branch(branch, i, built, variables) for branch in branches))


def _read_branch(entry: Any, i: int, built: list[Tree | None], variables: tuple[int, ...]) -> Branch:
    """A branch of node `i`; children are taken out of `built`, so that none is used twice."""
    where = f"node {i} of the tree"
    if not _is_list(entry) or not entry:
        _refuse("a branch to be a list of at least one child", shown(entry), where)
    children: list[Tree] = []
    for number in entry:
        if not _is_whole(number) or not i < number < len(built):
            _refuse(f"children with numbers from {i + 1} to {len(built) - 1}", shown(number), where)
        child, built[number] = built[number], None
        if child is None:
            _refuse("every child to belong to one branch", f"child {number} twice", where)
        children.append(child)
    together = list(chain.from_iterable(child.variables for child in children))
    if sorted(together) != sorted(variables):
        expected = f"the children of a branch to share out its variables {shown(list(variables))}"
        _refuse(expected, shown(together), where)
    return Branch(tuple(children[:-1]), children[-1])


def _read_leaf(entry: Mapping[str, Any], variables: tuple[int, ...], d: int, where: str) -> Leaf:
    parents = _get(entry, "parents", where)
    if not _is_list(parents) or len(parents) != len(variables):
        _refuse(f"a list of parents for each of its {len(variables)} variables", shown(parents), where)
    families = tuple(_read_variables(found, d, where) for found in parents)
    for x, family in zip(variables, families, strict=True):
        if x in family:
            _refuse("no variable to be its own parent", f"variable {x} among the parents of {x}", where)
    score = _get(entry, "score", where)
    if not isinstance(score, numbers.Real) or isinstance(score, bool) or not math.isfinite(score):
        _refuse("a finite score", shown(score), where)
    return Leaf(variables, families, float(score), _read_neighbours(entry.get("neighbours", ()), variables, d, where))


def _read_neighbours(entries: Any, variables: tuple[int, ...], d: int, where: str) -> tuple[tuple[int, ...], ...]:
    if not _is_list(entries) or len(entries) not in (0, len(variables)):
        _refuse(f"neighbours for each of its {len(variables)} variables, or none", shown(entries), where)
    neighbours = tuple(_read_variables(near, d, where) for near in entries)
    for x, near in zip(variables, neighbours, strict=False):
        if x in near:
            _refuse("no variable to be its own neighbour", f"variable {x} among the neighbours of {x}", where)
    return neighbours


def _read_variables(values: Any, d: int, where: str) -> tuple[int, ...]:
    if not _is_list(values) or not all(_is_whole(v) and 0 <= v < d for v in values):
        _refuse(f"variables with numbers from 0 to {d - 1}", shown(values), where)
    repeated = [v for v, times in Counter(values).items() if times > 1]
    if repeated:
        _refuse("every variable once", f"variable {repeated[0]} twice", where)
    return tuple(int(v) for v in values)


def _get(entry: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in entry:
        _refuse(f"the key {key!r}", f"only {', '.join(map(str, entry)) or 'an empty dictionary'}", where)
    return entry[key]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _refuse(expected: str, got: str, where: str) -> NoReturn:
    raise ValueError(f"expected {expected} in {where}, got {got}: {_ADVICE}")
