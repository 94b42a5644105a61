"""The one place where a fit learns the structure of features, whoever asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from brainet_pl.structure import GGT, learn_structure


def learn_tree(
    features: Any, settings: Mapping[str, Any], names: Sequence[str] | None = None, progress: bool = True
) -> GGT:
    """The tree of structures of some features.

    Args:
        features: (N, d) features as a tensor, an array, or a stream of them that several processes share.
        settings: settings of `learn_structure`, by name.
        names: (d,) names of the features.
        progress: show a progress bar.
    """
    table = features.numpy() if isinstance(features, Tensor) else features
    tree = learn_structure(table, **{"progress": progress, **settings})
    return tree if names is None else tree.named(names)
