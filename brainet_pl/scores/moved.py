"""Which features no longer go with the others: the families of a learned density that fit new inputs worst."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl.scores.density import GaussianFamilies, TreeDensity


class Moved(NamedTuple):
    """A feature that is no longer where those that it depends on say.

    Attributes:
        feature: its number.
        parents: the features that it is predicted from, the most important first; nothing where there are none.
        excess: its mean squared error in units of what is usual: 1 on data like those of the fit.
    """

    feature: int
    parents: tuple[int, ...]
    excess: float

    def __str__(self) -> str:
        with_parents = f" with {', '.join(map(str, self.parents[:3]))}" if self.parents else ""
        return f"feature {self.feature}{with_parents} ({self.excess:.3g} times its usual squared error)"


@torch.no_grad()
def moved_features(density: TreeDensity, features: Tensor, classes: Tensor, most: int = 5) -> list[Moved]:
    """Features (B, d) of new inputs and their predicted classes (B,) → those that moved most, the first one most.

    Of every feature the family counts that explains it best, so that a parent which moved takes no child with it where
    another network of the tree has none of it. For Gaussian densities only; others give nothing.
    """
    families = density.families
    if not isinstance(families, GaussianFamilies) or not len(features):
        return []
    x = density.prepare(features)
    label = classes.clamp(0, density.num_classes - 1) if density.num_classes > 1 else torch.zeros_like(classes)
    columns = F.pad(x, (0, 1)).t()
    expected = torch.bmm(columns[families.parents].transpose(1, 2), families.slopes) + families.intercept
    error = (columns[families.variable].unsqueeze(2) - expected) ** 2 * (-families.log_variance).exp()
    index = label.view(1, -1, 1).expand(len(error), -1, 1) if error.shape[2] > 1 else None
    excess = (error[:, :, 0] if index is None else error.gather(2, index)[:, :, 0]).mean(dim=1)  # (F,)
    strength = families.slopes.abs().amax(dim=2)  # (F, P)
    best: dict[int, Moved] = {}
    for i, feature in enumerate(families.variable.tolist()):
        order = strength[i].argsort(descending=True).tolist()
        parents = tuple(int(families.parents[i, k]) for k in order if strength[i, k] > 0)
        found = Moved(feature, parents, float(excess[i]))
        if feature not in best or found.excess < best[feature].excess:
            best[feature] = found
    return sorted(best.values(), key=lambda one: -one.excess)[:most]
