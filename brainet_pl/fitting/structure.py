"""The one place where a fit learns the structure of features, whoever asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from brainet_pl.structure import GGT, learn_structure
from brainet_pl.structure.settings import StructureSettings


def learn_tree(
    features: Any,
    settings: StructureSettings | Mapping[str, Any],
    names: Sequence[str] | None = None,
    progress: bool = True,
) -> GGT:
    """The tree of structures of some features.

    Args:
        features: (N, d) features as a tensor, an array, or a stream of them that several processes share.
        settings: those of the structure, or some of them by name.
        names: (d,) names of the features.
        progress: show a progress bar.
    """
    table = features.numpy() if isinstance(features, Tensor) else features
    if isinstance(settings, StructureSettings):
        tree = learn_structure(table, settings, progress=progress)
    else:
        tree = learn_structure(table, **{"progress": progress, **settings})
    return tree if names is None else tree.named(names)
