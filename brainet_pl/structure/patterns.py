"""Counting the different connectivity patterns of a tree without listing them.

Two branches may decompose their variables alike and differ only further down, so that the same pattern can be reached
in several ways. The patterns of a branch are the product of its children's, those of a node the union of its
branches'; unions of products are counted by inclusion and exclusion, and equal subtrees are merged first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

Key = frozenset[int]
Decomposition = tuple[frozenset[Key], Key]
Children = tuple[int, ...]


class _Shapes:
    """Shapes with equal subtrees merged: a shape is a number, equal numbers are equal subtrees."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.variables: list[Key] = []
        self.branches: list[dict[Decomposition, set[Children]] | None] = []  # None for a leaf

    def add(self, shape: Any) -> int:
        """The number of a shape: a frozenset of variables, or a tuple of (ancestor shapes, descendant shape)."""
        if isinstance(shape, frozenset):
            return self._register(("leaf", shape), shape, None)
        grouped: dict[Decomposition, set[Children]] = {}
        for ancestors, descendant in shape:
            below = sorted((self.add(a) for a in ancestors), key=lambda number: min(self.variables[number]))
            last = self.add(descendant)
            decomposition = frozenset(self.variables[a] for a in below), self.variables[last]
            grouped.setdefault(decomposition, set()).add((*below, last))
        variables = frozenset().union(*(self.variables[c] for c in next(iter(next(iter(grouped.values()))))))
        key = frozenset((d, frozenset(children)) for d, children in grouped.items())
        return self._register(key, variables, grouped)

    def _register(self, key: Any, variables: Key, branches: dict[Decomposition, set[Children]] | None) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.variables)
            self.variables.append(variables)
            self.branches.append(branches)
        return self.numbers[key]


def count_patterns(shape: Any) -> int:
    """The number of different patterns below a shape (see `_Shapes.add`)."""
    shapes = _Shapes()
    root = shapes.add(shape)
    memory: dict[frozenset[int], int] = {}

    def shared(numbers: frozenset[int]) -> int:
        """How many patterns all of these shapes have."""
        if numbers not in memory:
            memory[numbers] = count(numbers)
        return memory[numbers]

    def count(numbers: frozenset[int]) -> int:
        groups = [g for g in (shapes.branches[i] for i in numbers) if g is not None]
        if len(groups) < len(numbers):  # a leaf has one pattern, and shares it with no other shape
            return int(len(numbers) == 1)
        total = 0
        for decomposition in set(groups[0]).intersection(*groups[1:]):
            options = [sorted(group[decomposition]) for group in groups]
            for chosen in product(*(_nonempty_subsets(option) for option in options)):
                sign = (-1) ** sum(len(subset) + 1 for subset in chosen)
                branches = set().union(*chosen)
                total += sign * math.prod(shared(frozenset(position)) for position in zip(*branches, strict=True))
        return total

    return shared(frozenset([root]))


def _nonempty_subsets(items: list[Children]) -> Iterator[tuple[Children, ...]]:
    for size in range(1, len(items) + 1):
        yield from combinations(items, size)
