"""Virtual-logit matching (Wang et al. 2022): what features have outside the space that training data fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl.scores.last_layer import LastLayerScore


class ViM(LastLayerScore):
    """Length of the residual as one more logit, less the energy of the others: `vim` = α·|z⊥| - log Σ_c exp l_c.

    z⊥ is what z - o has outside the `dim` principal directions of the training data, o = -W⁺b the point where all
    logits are as near to 0 as can be; α makes the residual of training data as large as their largest logit.

    Args:
        dim: Principal directions; null is as the authors choose: 1,000 of 1,500 features or more, 512 of 768 or more,
            else half of them.
        name: Suffix of its score, `_<name>`, where a model has more than one ViM; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"vim": ""}
    origin: Tensor
    residual: Tensor
    alpha: Tensor

    def __init__(self, dim: int | None = None, name: str | None = None) -> None:
        super().__init__(name)
        self.dim = checks.whole_or_none("dim", dim, 1, "None chooses by the number of features")
        for buffer in ("origin", "residual", "alpha"):
            self.register_buffer(buffer, torch.empty(0))

    def learn(self, z: Tensor, labels: Tensor) -> None:
        """Find the principal directions of z (N, d), and α."""
        d = z.shape[1]
        dim = self.dim or (1000 if d >= 1500 else 512 if d >= 768 else max(1, d // 2))
        if dim >= d:
            raise ValueError(f"expected dim of ViM below the {d} features of the layer, got {dim}: give less, or null")
        weight, bias = self.weight.double(), self.bias.double()
        origin = -torch.linalg.pinv(weight) @ bias
        gap = z.double() - origin
        directions = torch.linalg.eigh(gap.t() @ gap / len(gap)).eigenvectors[:, : d - dim]
        length = (gap @ directions).norm(dim=1).mean()
        alpha = self.logits(z).amax(dim=1).double().mean() / length.clamp_min(1e-12)
        self.origin, self.residual, self.alpha = (v.to(self.weight) for v in (origin, directions, alpha))

    def score(self, z: Tensor) -> dict[str, Tensor]:
        """Gives `vim` (B,), one number a sample."""
        length = ((z - self.origin) @ self.residual).norm(dim=1)
        return {"vim": self.alpha * length - self.logits(z).logsumexp(dim=1)}
