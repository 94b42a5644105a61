"""YAML of others: a few lines of references to references would otherwise stand for more values than memory holds."""

from __future__ import annotations

from typing import Any

import yaml

MOST_CHARACTERS = 2**20
MOST_VALUES = 100_000  # once every reference is written out; the largest shipped configuration has about 200


class TooManyValues(ValueError):
    """A text stands for more values than any configuration has."""


def load_yaml(text: str) -> Any:
    """The plain values of a YAML text, or a `ValueError` if it is none or stands for too many values."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"expected at most {MOST_CHARACTERS:,} characters of YAML, got {len(text):,}: take another file"
        )
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _count(node, {}) > MOST_VALUES:
            raise TooManyValues(
                f"expected at most {MOST_VALUES:,} values, got references (*name) that stand for more: write them out"
            )
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"expected YAML, got something else ({error}): check the file") from error


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of values that a node stands for; one that holds itself stands for too many."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # until its own count is there
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]
