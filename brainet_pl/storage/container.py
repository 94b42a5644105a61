"""The one container of what rebuilds a model: settings, tree, tensors and a digest; plain values, never code.

A checkpoint has it as one of its entries, a swapped layer as an entry of the state dict, a swapped model and an
estimator as a file of their own, a folder of a hub as JSON beside the tensors. The schemas here say what is in it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
from msgspec import Meta, Struct
from torch import nn

from brainet_pl._utils.atomic import atomic_write
from brainet_pl._utils.checks import shown
from brainet_pl._utils.digest import fingerprint
from brainet_pl._utils.stored import FORMAT, Stored, parse
from brainet_pl._utils.tensor_file import check_build, check_sizes, read_tensors
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones.batches import Sample
from brainet_pl.backbones.removal import HeadLayer
from brainet_pl.backbones.taps import Taps
from brainet_pl.structure import GGT

MOST_NUMBERS = 2**25  # of one input: 200 colour images of 224 by 224 pixels; an export makes four of them

Count = Annotated[int, Meta(ge=1, le=10**9)]
Size = Annotated[int, Meta(ge=0, le=MOST_NUMBERS)]
DType = Literal[
    "float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"
]  # fmt: skip


class StoredInput(Struct, forbid_unknown_fields=True):
    """The shape and type of one sample of an input."""

    shape: list[Size]
    dtype: DType


class StoredRemoval(Struct, forbid_unknown_fields=True):
    """The classification layer that was taken out of a backbone."""

    name: str
    leave: bool


class StoredBackbone(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a head reads, and where in the backbone.

    Attributes:
        network: The class of the backbone; None where the head reads the inputs themselves.
        removed: Its classification layer.
        layers: Paths of the layers that are read; None is the input of the removed one.
        pool: How the output of each layer is pooled.
        evidence: Why these layers were chosen.
        takes: The inputs of the backbone by name; None before it got any.
    """

    network: str | None
    removed: StoredRemoval | None
    layers: list[str] | None
    pool: list[str] | None
    evidence: str
    takes: dict[str, StoredInput] | None

    def __post_init__(self) -> None:
        if self.takes is not None and sum(math.prod(one.shape) for one in self.takes.values()) > MOST_NUMBERS:
            raise ValueError(f"Expected inputs of at most {MOST_NUMBERS:,} numbers in takes")

    @classmethod
    def of(cls, backbone: FeatureExtractor) -> StoredBackbone:
        """What restores the choices that a backbone has made."""
        removed, signature = backbone.removed, backbone.input_signature
        takes = None
        if signature is not None:
            takes = {name: StoredInput(list(one.shape), cast(DType, one.dtype)) for name, one in signature.items()}
        return cls(
            network=None if backbone.raw else type(backbone.model).__name__,
            removed=None if removed is None else StoredRemoval(*removed),
            **named_layers(backbone.taps),
            evidence=backbone.evidence,
            takes=takes,
        )

    @property
    def taps(self) -> Taps | None:
        """The layers that are read; None is the input of the removed one."""
        return None if self.layers is None else Taps.of(self.layers, self.pool)

    def restore_removal(self, backbone: FeatureExtractor) -> None:
        """Take the classification layer out of a backbone again."""
        if self.removed is not None:
            backbone.remove(HeadLayer(self.removed.name, self.removed.leave))

    def restore_inputs(self, backbone: FeatureExtractor) -> None:
        """Tell a backbone what inputs it takes, where that is known."""
        if self.takes is not None:
            backbone.input_signature = {key: Sample(tuple(one.shape), one.dtype) for key, one in self.takes.items()}


class StoredHead(Stored):
    """The structure of a head.

    Attributes:
        ggt: Its tree, in the form of `GGT.to_dict`.
        in_features: The number of its features; None before the head is there.
        base_logits: Whether it may add to the logits of the removed layer.
    """

    ggt: dict[str, Any] | None
    in_features: Count | None
    base_logits: bool

    def checked_tree(
        self, build: Callable[[GGT | None], nn.Module], settings: Mapping[str, Any], weights: Mapping[str, Any]
    ) -> GGT | None:
        """The tree, once it is clear that the head takes no more memory than its weights.

        Args:
            build: Builds the head of a tree.
            settings: All settings that the head grows with.
            weights: The tensors of the model, by name.
        """
        check_sizes([settings], weights)
        tree = None if self.ggt is None else GGT.from_dict(self.ggt)
        check_build(lambda: build(tree), weights)
        return tree


class StoredModel(StoredHead):
    """The entry of a checkpoint: what rebuilds a `BRAINet` together with its hyper-parameters."""

    backbone: StoredBackbone
    class_names: list[str] | None
    preset: dict[str, Any] | None
    digest: dict[str, str] | None = None


class StoredPredictor(StoredHead):
    """What rebuilds a head with all that is said of its predictions; a swapped layer is this alone.

    Attributes:
        num_classes: How many outputs the head has.
        task: Several labels at once; None is one of the classes.
    """

    head: dict[str, Any]
    in_features: Count
    num_classes: Count
    scores: list[dict[str, Any]]
    calibration: dict[str, Any] | None
    conformal: dict[str, Any] | None
    verdict: dict[str, Any]
    passes: Count
    task: dict[str, Any] | None

    @property
    def parts(self) -> dict[str, Any]:
        """The arguments of `Predictor.attach`."""
        return {
            "scores": self.scores,
            "calibration": self.calibration,
            "conformal": self.conformal,
            "verdict": self.verdict,
        }

    @property
    def sizes(self) -> dict[str, Any]:
        """The numbers that the head grows with."""
        return {"num_classes": self.num_classes, "in_features": self.in_features}


def named_layers(taps: Taps | None) -> dict[str, list[str] | None]:
    """Layers and pools as a user would write them, as plain values."""
    return {"layers": None, "pool": None} if taps is None else {"layers": [*taps.layers], "pool": [*taps.pools]}


# -- files ------------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Stored)


def write_file(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write plain values and `weights` with a digest, whole or not at all."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        torch.save({**content, "digest": fingerprint(dict(content))}, file)


def read_file(path: str | os.PathLike[str], schema: type[F], kind: str, what: str) -> F:
    """What `write_file` wrote, checked; no code of the file is run.

    Args:
        path: The file.
        schema: What is in it, `weights` and `digest` included.
        kind: What it rebuilds, as it stands in the file.
        what: The same in words, such as "an estimator".
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"expected {what} at {path}, found no such file: check the path")
    try:
        content = read_tensors(path)
    except Exception as error:  # of a damaged or foreign file, any error may come
        raise ValueError(
            f"expected {what} in {path}, got {type(error).__name__} when reading it: the file is damaged or no such "
            "file of brainet_pl; take another copy"
        ) from error
    check_kind(content, kind, f"{what} in {path}")
    if fingerprint({key: value for key, value in content.items() if key != "digest"}) != content.get("digest"):
        raise ValueError(f"expected {what} as it was saved in {path}, got another: take another copy")
    return parse(schema, content, f"{what} in {path}")


def check_kind(content: Any, kind: str, what: str) -> None:
    """Refuse what rebuilds something else, or was written in another format."""
    given = content if isinstance(content, Mapping) else {}
    if given.get("kind") != kind or given.get("format") != FORMAT:
        raise ValueError(
            f"expected {what}, a {kind} of format {FORMAT}, got {shown(given.get('kind'))} of format "
            f"{shown(given.get('format'))}: load it with its own class, or with the version that wrote it"
        )
