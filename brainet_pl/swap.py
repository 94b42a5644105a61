"""Swap the head of a trained model, outside Lightning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from brainet_pl.backbones import Backbone, FeatureExtractor
from brainet_pl.features import extract_features
from brainet_pl.network import Head, HeadSettings, Tree
from brainet_pl.parts import make_part
from brainet_pl.structure import GGT, learn_structure


class SwappedModel(nn.Module):
    """A feature extractor with a head: logits (B, C) out, like the model it came from."""

    def __init__(self, backbone: FeatureExtractor, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor) -> Tensor:
        """(B, …) → (B, C)."""
        return torch.as_tensor(self.head(self.backbone(x)))

    @torch.no_grad()
    def predict(self, x: Tensor, passes: int = 15) -> Tensor:
        """(B, …) → probabilities (T, B, C) of T passes; the backbone runs once."""
        return self.head.passes(self.backbone(x), passes).values.softmax(dim=-1)


def swap_head(
    model: nn.Module,
    data: GGT | Tensor | Iterable[Any],
    num_classes: int,
    *,
    head_layer: str | None = None,
    freeze: bool = True,
    head: HeadSettings | str | None = None,
    **learn: Any,
) -> SwappedModel:
    """Replace the classification layer of a trained model by a BRAINet head, outside Lightning.

    Args:
        model: any classifier; it is copied, never changed.
        data: a learned tree, or inputs to learn one from: a tensor, or batches of inputs or of (inputs, …).
        num_classes: outputs of the new head.
        head_layer: the layer to remove; None finds it.
        freeze: keep the backbone as it is.
        head: settings of the new head; None is `Tree()`, a BRAINet of 16,000 parameters.
        **learn: settings of `learn_structure`.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    >>> swapped = swap_head(model, torch.randn(100, 6), 3, head=Tree(num_params=2000), test="gaussian", progress=False)
    >>> swapped.eval().predict(torch.randn(2, 6), passes=5).shape
    torch.Size([5, 2, 3])
    """
    settings = make_part(HeadSettings, Tree() if head is None else head, "head")
    backbone = Backbone(model, head_layer=head_layer, freeze=freeze).build()
    if isinstance(data, GGT):
        ggt, in_features = data, data.num_variables
    else:
        batches: Iterable[Any] = data.split(256) if isinstance(data, Tensor) else data  # type: ignore[no-untyped-call]
        features = extract_features(backbone, batches, max_rows=None if settings.needs_tree else 1)
        ggt = learn_structure(features, **learn) if settings.needs_tree else None  # type: ignore[assignment]
        in_features = features.shape[1]
    device = next((p.device for p in backbone.parameters()), torch.device("cpu"))
    return SwappedModel(backbone, settings.build(in_features, num_classes, ggt).to(device))
