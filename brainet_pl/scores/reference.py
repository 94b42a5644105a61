"""What validation data tell about scores: how many known samples are at least as strange as this one.

Two answers. The conformal p-value counts: (1 + #{validation samples at least as strange}) / (n + 1), which is at most α
for a share of at most α of known inputs, whatever the score. The surprise is minus its logarithm made smooth, and goes
on beyond the last validation sample: it tells the strange from the very strange, where all counts are 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.framework import rank_zero_warn
from brainet_pl._utils.search import places

MOST_KEPT = 10_000  # validation samples whose scores travel in a checkpoint; more say hardly more about a p-value
FEW = 200  # validation samples below which p-values are so coarse that a user should hear of it
TAIL = 0.1  # share of validation samples, the strangest ones, that an exponential tail is fitted to
CENSORED = 0.2  # share of that tail, the strangest samples, whose distance does not count
LEVELS = 18  # knots of the surprise between the least strange sample and the tail
_PREFIX = "of_"  # so that no score is called like something that a module has


def p_values(scores: Tensor, reference: Tensor) -> Tensor:
    """Scores (B,) and sorted scores (n,) of validation data → conformal p-values (B,).

    The one definition of `known_p`. NaN has 0: below every level, and so never known.

    >>> p_values(torch.tensor([0.5, 9.0, float("nan")]), torch.tensor([1.0, 2.0, 3.0]))
    tensor([1.0000, 0.2500, 0.0000])
    """
    scores = scores.to(reference.dtype)
    n = len(reference)
    below = places(reference, scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf))
    return ((1 + n - below).to(reference.dtype) / (n + 1)).masked_fill(scores.isnan(), 0.0)


@dataclass(frozen=True)
class Verdict:
    """How a model tells whether it knows an input.

    Attributes:
        score: the score that it goes by; null is `joint` (`Combined`), which joins the energy of the prediction and
            every score of the features, else the score of the calibrator, else the energy or what the task has.
        level: the share of known inputs that may be called unknown.
    """

    score: str | None = None
    level: float = 0.05

    def __post_init__(self) -> None:
        if not isinstance(self.score, str | None):
            raise ValueError(f"expected score of the verdict to be a name, got {checks.shown(self.score)}: give a name")
        if not 0 < checks.share("level of the verdict", self.level) < 1:
            raise ValueError(f"expected level of the verdict between 0 and 1, got {self.level}: 0.05 is usual")

    def choose(self, wanted: Sequence[str], known: Sequence[str]) -> str:
        """The score it goes by, of those that a model has; without a choice, the first of `wanted` that is there."""
        if self.score is not None:
            if self.score not in known:
                raise ValueError(
                    f"expected score of the verdict to be one of {', '.join(known)}, got {self.score!r}: choose one, "
                    "or add the part that gives it to scores"
                )
            return self.score
        return next(name for name in [*wanted, *known] if name in known)


class Surprise(NamedTuple):
    """A rising, piecewise linear function of a score: about -log of the share of samples at least as strange.

    Attributes:
        knots: (K,) scores, rising.
        heights: (K,) the surprise there.
        slope: () of the surprise beyond the last knot.
    """

    knots: Tensor
    heights: Tensor
    slope: Tensor

    def __call__(self, scores: Tensor) -> Tensor:
        """(B,) → (B,) in nats, from 0 on; NaN is as surprising as can be."""
        x = scores.to(self.knots.dtype)[:, None]
        widths = self.knots.diff()
        rises = self.heights.diff() / widths
        body = ((x - self.knots[:-1]).clamp_min(0.0).minimum(widths) * rises).sum(dim=1)
        tail = (x[:, 0] - self.knots[-1]).clamp_min(0.0) * self.slope
        return (self.heights[0] + body + tail).nan_to_num(nan=1e9, posinf=1e9)


def fit_surprise(reference: Tensor) -> Surprise:
    """Scores (n,) of validation data → their surprise: empirical in the body, exponential in the last tenth.

    Few samples have few knots, and at the least the median and the largest one count.
    """
    values = reference[reference.isfinite()].double().sort().values
    n = len(values)
    if n < 2:
        raise ValueError(
            f"expected at least two finite scores of validation data, got {n}: give more, or correct the score"
        )
    shares = torch.linspace(1.0, TAIL, LEVELS + 1, dtype=torch.double, device=values.device)
    knots = torch.quantile(values, 1.0 - shares)
    body, whole = (values[place] - values[0] for place in (math.ceil((1 - CENSORED * TAIL) * n) - 1, -1))
    least = 1e-6 * torch.where(body > 0, body, whole).clamp_min(1e-30)  # ties would make a step of no width
    knots = knots[0] + torch.cat([knots.new_zeros(1), knots.diff().clamp_min(least)]).cumsum(dim=0)
    scale = _tail_scale(values[values > knots[-1]] - knots[-1]).clamp_min(least)
    return Surprise(knots.float(), -shares.log().float(), (1.0 / scale).float())


def _tail_scale(excess: Tensor) -> Tensor:
    """Rising excesses (m,) over the last knot → the scale () of their exponential, the largest fifth cut off.

    The likelihood of excesses of which the largest are known to be no less than the largest one kept: a few samples
    that are errors would otherwise stretch the tail, and nothing would be strange any more.
    """
    m = len(excess)
    kept = math.ceil((1 - CENSORED) * m)
    return (excess[:kept].sum() + (m - kept) * excess[max(0, kept - 1) : kept].sum()) / max(1, kept)


class Reference(DataSizedBuffers):
    """Sorted scores of validation data, by name; buffers, so that they travel in every checkpoint."""

    _device: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_device", torch.empty(0), persistent=False)  # follows `module.to(device)`
        self._warned = False

    def __contains__(self, score: object) -> bool:
        return f"{_PREFIX}{score}" in self._buffers

    def __getitem__(self, score: str) -> Tensor:
        return self.get_buffer(f"{_PREFIX}{score}")

    @property
    def names(self) -> list[str]:
        """The scores that there is a reference for."""
        return [name.removeprefix(_PREFIX) for name in self._buffers if name.startswith(_PREFIX)]

    def _replace(self, columns: Mapping[str, Tensor]) -> None:
        for name in self.names:
            del self._buffers[_PREFIX + name]
        for name, values in columns.items():
            self.register_buffer(_PREFIX + name, values)

    def keep(self, columns: Mapping[str, Tensor]) -> None:
        """Take scores (N,) of validation data as the reference from now on; NaN counts as the strangest."""
        kept = {}
        for name, values in columns.items():
            if len(values) > MOST_KEPT:  # any sample of the samples is as good a reference
                rows = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))[:MOST_KEPT]
                values = values[rows.to(values.device)]
            ordered = values.nan_to_num(nan=torch.inf, posinf=torch.inf).sort().values
            kept[name] = ordered.clone(memory_format=torch.contiguous_format)
        self._replace(kept)

    def warn_of_few(self, score: str) -> None:
        """Say once that p-values of a score are coarse."""
        n = len(self[score])
        if n < FEW and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"p-values of inputs, `known_p`, are no finer than {1 / (n + 1):.2g}: expected at least {FEW} "
                f"validation samples in the fit, got {n}; give more of them"
            )

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Make room for whatever scores a checkpoint has; those that are there keep their order.

        Weights that processes share are loaded by name, in any order, and averages of models go through buffers in
        pairs.
        """
        known = {key: values for key, values in stored.items() if key.startswith(_PREFIX)}
        if {key.removeprefix(_PREFIX) for key in known} == set(self.names):
            return
        device = self._device.device
        self._replace({key.removeprefix(_PREFIX): torch.empty_like(v, device=device) for key, v in known.items()})
