"""Cross-validated ridge regression in closed form, and which tables to join for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0)  # times the number of features
FOLDS = 5


def standardised(table: Tensor) -> Tensor:
    """Brings columns of a table (n, d) to mean 0 and deviation 1; columns that do not vary become 0."""
    centred = table - table.mean(dim=0)
    deviation = centred.square().mean(dim=0).sqrt()
    still = deviation <= 1e-6 * table.abs().mean(dim=0).clamp_min(1e-6)
    return centred.masked_fill(still, 0.0) / deviation.masked_fill(still, 1.0)


def deal_folds(order: Tensor, count: int = FOLDS, seed: int = 0) -> list[Tensor]:
    """The rows of each fold, dealt out in the order of the targets (n,), so that classes are spread evenly."""
    mixed = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))
    mixed = mixed[order[mixed].argsort(stable=True)]
    return [mixed[i::count].sort().values for i in range(min(count, len(order)))]


class Table(NamedTuple):
    """The standardised features (n, d) of n samples; of more features than samples, their products alone.

    Attributes:
        width: number of features d.
        features: (n, d), or None where there are more than n.
        products: (n, n) scalar products of the samples, or None where the features are there.
    """

    width: int
    features: Tensor | None
    products: Tensor | None

    @staticmethod
    def of(features: Tensor) -> Table:
        """Takes a table (n, d) that is not standardised yet."""
        x = standardised(features)
        wide = x.shape[1] > len(x)
        return Table(x.shape[1], None if wide else x, x @ x.T if wide else None)

    def join(self, other: Table) -> Table:
        """The features of both, side by side."""
        width = self.width + other.width
        if self.features is not None and other.features is not None and width <= len(self.features):
            return Table(width, torch.cat([self.features, other.features], dim=1), None)
        return Table(width, None, self.all_products() + other.all_products())

    def all_products(self) -> Tensor:
        """The scalar products of the samples, (n, n)."""
        if self.products is not None:
            return self.products
        assert self.features is not None
        return self.features @ self.features.T


def held_out_residuals(table: Table, targets: Tensor, folds: Sequence[Tensor], penalty: float) -> Tensor:
    """Targets (n, c) less what ridge regressions predict, each fitted to the rows outside one fold.

    With G = (X Xᵀ + λ)⁻¹, the residuals of a fold F that the fit has not seen are (G_FF)⁻¹ (G Y)_F. Where there are
    fewer features than samples, λ G = 1 - X (Xᵀ X + λ)⁻¹ Xᵀ costs less.
    """
    found = torch.empty_like(targets)
    if table.features is not None:
        x = table.features
        factor = torch.linalg.cholesky(x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype))
        half = torch.linalg.solve_triangular(factor, x.T, upper=False)
        seen = targets - half.T @ (half @ targets)
        for fold in folds:
            part = half[:, fold]
            found[fold] = torch.linalg.solve(torch.eye(len(fold), dtype=x.dtype) - part.T @ part, seen[fold])
        return found
    products = table.all_products()
    factor = torch.linalg.cholesky(products + penalty * torch.eye(len(products), dtype=products.dtype))
    inverse = torch.cholesky_inverse(factor)
    seen = inverse @ targets
    for fold in folds:
        found[fold] = torch.linalg.solve(inverse[fold][:, fold], seen[fold])
    return found


class Probe(NamedTuple):
    """What a cross-validated ridge regression on some features achieves.

    Attributes:
        errors: squared error of each sample, (n,).
        residuals: (n, c).
        penalty: index of the best of `PENALTIES`.
    """

    errors: Tensor
    residuals: Tensor
    penalty: int

    @property
    def error(self) -> float:
        """The mean squared error."""
        return float(self.errors.mean())


def probe(table: Table, targets: Tensor, folds: Sequence[Tensor], which: Iterable[int] | None = None) -> Probe:
    """The ridge regression of the best penalty; `which` limits the choice to some of `PENALTIES`, by index."""
    best: Probe | None = None
    for i in range(len(PENALTIES)) if which is None else which:
        residuals = held_out_residuals(table, targets, folds, PENALTIES[i] * table.width)
        new = Probe(residuals.square().sum(dim=1), residuals, i)
        best = new if best is None or new.error < best.error else best
    assert best is not None
    return best


def is_better(new: Probe, old: Probe) -> bool:
    """Whether the error is lower by more than the standard error of the paired difference."""
    gain = old.errors - new.errors
    return bool(gain.mean() > gain.std() / len(gain) ** 0.5)


class Step(NamedTuple):
    """A table that was chosen, by its number, and what it achieves together with those before it."""

    chosen: int
    probe: Probe


def select(
    tables: Sequence[Table],
    targets: Tensor,
    folds: Sequence[Tensor],
    max_width: int,
    allowed: Callable[[Sequence[int], int], bool] = lambda chosen, new: True,
    tick: Callable[[], object] = lambda: None,
) -> list[Step]:
    """Choose tables one by one, while each lowers the cross-validated error by more than its standard error.

    Each time it is the narrowest of those within a standard error of the best; of equally wide ones the better.

    Args:
        tables: the features to choose from; at most `max_width` are chosen together.
        targets: (n, c), centred.
        folds: the rows of each fold.
        max_width: largest number of features of all chosen tables together.
        allowed: whether a table may join those that were chosen, all by their numbers.
        tick: called after every regression, for a progress bar.
    """
    steps: list[Step] = []
    joined: Table | None = None
    while True:
        now = steps[-1].probe if steps else None
        # The best penalty moves little from one step to the next.
        which = None if now is None else sorted({max(now.penalty - 1, 0), now.penalty})
        tried: dict[int, Probe] = {}
        for i in _that_fit(tables, joined, max_width, [step.chosen for step in steps], allowed):
            tried[i] = probe(_join(joined, tables[i]), targets, folds, which)
            tick()
        new = _narrowest_of_the_best(tried, tables)
        if new is None or (now is not None and not is_better(tried[new], now)):
            return steps
        steps.append(Step(new, tried[new]))
        joined = _join(joined, tables[new])


def _that_fit(
    tables: Sequence[Table],
    joined: Table | None,
    max_width: int,
    chosen: list[int],
    allowed: Callable[[Sequence[int], int], bool],
) -> Iterator[int]:
    """The numbers of the tables that may join those chosen, whose features are `joined`."""
    room = max_width - (0 if joined is None else joined.width)
    for i, table in enumerate(tables):
        if table.width <= room and i not in chosen and allowed(chosen, i):
            yield i


def _join(joined: Table | None, table: Table) -> Table:
    return table if joined is None else joined.join(table)


def _narrowest_of_the_best(tried: Mapping[int, Probe], tables: Sequence[Table]) -> int | None:
    """The narrowest table within a standard error of the best, of equally wide ones the better; None without any."""
    if not tried:
        return None
    best = min(tried.values(), key=lambda one: one.error)
    near = [i for i, one in tried.items() if one is best or not is_better(best, one)]
    return min(near, key=lambda i: (tables[i].width, tried[i].error))
