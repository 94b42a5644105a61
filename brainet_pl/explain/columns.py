"""Which columns of a row are strange: the parts of a Gaussian density's score, and what would be usual instead.

The score is -log p(x | c) of the most likely class c. It is a sum over columns, each given its parents, averaged over
the networks of the tree with their weights in the light of the row. A column that was changed also makes those strange
that it is a parent of: columns are therefore ranked by their relief, what the score loses where this column alone is
brought to its most usual value with all others as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl.scores import Generative
from brainet_pl.scores.density import GaussianFamilies, TreeDensity

USUAL = 1.645  # standard deviations to either side: 90 % of a normal column
HALF = 0.5  # of a feature that is 0 or 1
NOT_READ = 0.0  # part and relief of a column that a density does not read


@dataclass(frozen=True)
class Units:
    """What a column is called, which numbers a density reads of it, and what they mean to a user.

    Attributes:
        name: of the column.
        places: the numbers of the features that are made of it. Of a number or date the first is its value, and a
            second one says whether it is missing; of a category there is one for each.
        centres: what a feature of 0 stands for, for each of `places`; nothing is 0 for all.
        scales: what it rises by where the feature rises by 1; nothing is 1 for all.
        values: the category of each of `places`; nothing for a number or date.
        is_date: whether the value is in days since 1970.
    """

    name: str
    places: tuple[int, ...]
    centres: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    values: tuple[str, ...] = ()
    is_date: bool = False

    def plain(self, features: Sequence[float]) -> list[float]:
        """The features (d,) of a row → what those of this column stand for."""
        centres = self.centres or [0.0] * len(self.places)
        scales = self.scales or [1.0] * len(self.places)
        parts = zip(self.places, centres, scales, strict=True)
        return [centre + scale * features[place] for place, centre, scale in parts]

    def show(self, value: float) -> str:
        """A number or date as a user writes it.

        >>> Units("price", (0,)).show(12_000.4), Units("when", (0,), is_date=True).show(19_000.0)
        ('12,000', '2022-01-08')
        """
        if self.is_date:
            return str(date(1970, 1, 1) + timedelta(days=round(value)))
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class ColumnParts(NamedTuple):
    """How strange each of G columns of B rows is.

    Attributes:
        units: what the columns are.
        parts: (B, G) of the score, in nats; they add up to it.
        relief: (B, G) what the score loses where a column alone is made usual, in nats.
        values: (B, d) the features.
        usual: (B, d) the most usual value of each feature with all other columns as they are.
        spread: (B, d) its standard deviation.
    """

    units: Sequence[Units]
    parts: Tensor
    relief: Tensor
    values: Tensor
    usual: Tensor
    spread: Tensor

    def rows(self, which: slice) -> ColumnParts:
        """Some of the rows."""
        return ColumnParts(self.units, *(part[which] for part in self[1:]))

    def because(self, row: int, most: int = 3) -> list[str]:
        """The strangest columns of a row, in words."""
        order = self.relief[row].argsort(descending=True).tolist()[:most]
        return [self._describe(row, number) for number in order if self.relief[row, number] > 0]

    def _describe(self, row: int, number: int) -> str:
        units = self.units[number]
        values, usual = units.plain(self.values[row].tolist()), units.plain(self.usual[row].tolist())
        if units.values:
            here, likely = (units.values[found.index(max(found))] for found in (values, usual))
            if here == likely:
                return f"{units.name} is {here}, which is rare with the other columns"
            return f"{units.name} is {here}; with the other columns {likely} would be usual"
        if len(values) > 1 and values[1] > HALF:
            return f"{units.name} is missing"
        reach = USUAL * float(self.spread[row, units.places[0]]) * (units.scales[0] if units.scales else 1.0)
        low, high = units.show(usual[0] - reach), units.show(usual[0] + reach)
        between = low if low == high else f"{low} to {high}"
        return f"{units.name} is {units.show(values[0])}; with the other columns {between} would be usual"


def plain_units(count: int, names: Sequence[str] | None = None) -> list[Units]:
    """Columns that are one feature each, in its own units."""
    titles = [f"column {i}" for i in range(count)] if names is None else list(names)
    return [Units(title, (place,)) for place, title in enumerate(titles)]


@torch.no_grad()
def explain_columns(scores: Sequence[Generative], features: Tensor, units: Sequence[Units]) -> ColumnParts | None:
    """Features (B, d) → how strange each column is under a density, or under the mean of several.

    None for a density of levels, or of rows brought to length 1: these have no usual value of a column.
    """
    found = [_of_density(score, features, units) for score in scores]
    several = [one[1:] for one in found if one is not None]
    if len(several) < max(1, len(found)):
        return None
    means = [torch.stack(tensors).mean(dim=0) for tensors in zip(*several, strict=True)]
    return ColumnParts(units, *means)


def _of_density(score: Generative, features: Tensor, units: Sequence[Units]) -> ColumnParts | None:
    density = score.density
    if density is None or density.normalize or not isinstance(density.families, GaussianFamilies):
        return None
    read = score.chosen.tolist() or list(range(density.ggt.num_variables))
    features = features if len(score.chosen) else features[:, : len(read)]  # others are read by networks alone
    x = density.prepare(score.read(features))
    which = density(x).argmax(dim=1)
    place = {column: i for i, column in enumerate(read)}
    blocks = [[place[column] for column in one.places if column in place] for one in units]
    parts, relief = (x.new_full((len(x), len(units)), NOT_READ) for _ in range(2))
    usual, spread = features.to(x).clone(), torch.zeros_like(features, dtype=x.dtype)
    for c in which.unique().tolist():
        rows = (which == c).nonzero()[:, 0]
        one = _of_class(density, x[rows], c, blocks)
        parts[rows], relief[rows] = one.parts, one.relief
        columns = torch.tensor(read, device=x.device)
        usual[rows[:, None], columns], spread[rows[:, None], columns] = one.usual, one.spread
    return ColumnParts(units, parts, relief, features.to(x), usual, spread)


class _ClassParts(NamedTuple):
    """What `_of_class` finds of the features that are read: parts and relief (B, G), usual and spread (B, d)."""

    parts: Tensor
    relief: Tensor
    usual: Tensor
    spread: Tensor


def _of_class(density: TreeDensity, x: Tensor, c: int, blocks: Sequence[Sequence[int]]) -> _ClassParts:
    """Rows (B, d), as families read them, under the density of class c."""
    families = density.families
    assert isinstance(families, GaussianFamilies)
    wiring, intercept, log_variance = _wiring(families, x.shape[1], c)
    error = x @ wiring.T - intercept
    surprise = 0.5 * (error.square() * (-log_variance).exp() + log_variance + torch.log(x.new_tensor(2 * torch.pi)))
    log_families = (-surprise).T[:, :, None]
    total = density.average(log_families)
    share = density.average.shares(log_families)[:, :, 0].T  # (B, F), in the light of the row
    each = x.new_zeros(len(x), x.shape[1]).index_add(1, families.variable, share * surprise)
    # -log Σ P·p = Σ share · surprise + what the choice of networks costs, which belongs to no column: all have a part.
    rest = (-total[:, 0] - each.sum(dim=1)) / x.shape[1]
    each = each + rest[:, None]
    weight = share * (-log_variance).exp()
    slope = (weight * error) @ wiring  # the gradient of the score, by hand
    curvature = weight @ wiring.square()
    parts, relief = [], []
    for block in blocks:
        parts.append(each[:, block].sum(dim=1))
        relief.append(relief_of(wiring[:, block], weight, slope[:, block]))
    usual = x - slope / curvature
    return _ClassParts(torch.stack(parts, dim=1), torch.stack(relief, dim=1), usual, curvature.rsqrt())


def relief_of(wiring: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
    """What the score (B,) loses where a block of k features alone is made most usual: ½ gᵀ H⁻¹ g, g (B, k)."""
    if not slope.shape[1]:
        return slope.new_zeros(len(slope))
    curvature = torch.einsum("bf,fi,fj->bij", weight, wiring, wiring)
    step = torch.linalg.solve(curvature + 1e-6 * torch.diag_embed(curvature.diagonal(dim1=1, dim2=2)), slope)
    relief: Tensor = 0.5 * (slope * step).sum(dim=1)
    return relief


def _wiring(families: GaussianFamilies, d: int, c: int) -> tuple[Tensor, Tensor, Tensor]:
    """Families as rows (F, d), 1 at the variable and minus slopes at the parents; intercepts and variances (F,)."""
    slopes = families.slopes[:, :, min(c, families.slopes.shape[2] - 1)]
    wiring = F.one_hot(families.variable, d + 1).to(slopes)  # the last column belongs to parents that are not there
    wiring.scatter_add_(1, families.parents, -slopes)
    which = min(c, families.intercept.shape[2] - 1)
    return wiring[:, :-1], families.intercept[:, 0, which], families.log_variance[:, 0, which]
