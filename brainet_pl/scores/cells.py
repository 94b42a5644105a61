"""How unusual each place of an image is, by the maps of the stages of a network.

Pooled features, which a verdict reads, do not say where. A cell of a stage's map has a density of its own: each channel
given those that the learned structure wires it to, fitted to cells of training images. Its surprise is minus the
logarithm of the share of cells at least as strange, in images that the density was not fitted to: stages add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl.scores.density import GaussianFamilies, TreeDensity, density_threshold
from brainet_pl.scores.reference import Surprise, fit_surprise, p_values
from brainet_pl.structure import GGT, learn_structure

MOST_SIDE = 64  # cells along the longer side of a map; larger maps are averaged
MOST_CHANNELS = 128  # of a stage that are read, a random choice of them, as many as `Stages` reads
MOST_PARENTS = 16  # of a channel, as in `Stages`
THRESHOLD = 0.001  # nats that make an edge, as in `Stages`: a density wants many
MOST_FITTED = 8000  # cells of a stage that its density is fitted to; covariances of 128 channels want no more
MOST_KEPT = 1000  # cells of held-out images that p-values go by
SMOOTHED = 3  # cells along the side of the square that a map is averaged over, which points better than single cells


def coarse(maps: Tensor) -> Tensor:
    """Maps (B, C, H, W) with at most `MOST_SIDE` cells along a side, each the mean of whole squares of pixels."""
    size = math.ceil(max(maps.shape[2:]) / MOST_SIDE)
    if size == 1:
        return maps.clone()  # a later operation in place must not reach it
    return F.adaptive_avg_pool2d(maps, (math.ceil(maps.shape[2] / size), math.ceil(maps.shape[3] / size)))


def rows_of(maps: Tensor) -> Tensor:
    """Maps (B, C, H, W) → their cells (B·H·W, C), row by row."""
    return maps.permute(0, 2, 3, 1).flatten(0, 2)


class CellDensity(DataSizedBuffers):
    """Minus the log-density of the cells of one stage: Σ over channels of ½e² + ½log 2πσ², e the standardised error.

    One structure without branches has one family for each channel, so that all errors are one product, cells · weight -
    bias, and the parts of the channels add up exactly.
    """

    channels: Tensor
    weight: Tensor
    bias: Tensor
    constant: Tensor
    knots: Tensor
    heights: Tensor
    slope: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("channels", torch.empty(0, dtype=torch.long))
        for name in ("weight", "bias", "constant", "knots", "heights", "slope"):
            self.register_buffer(name, torch.empty(0))

    @torch.no_grad()
    def fit(self, cells: Tensor, tree: GGT | None = None) -> CellDensity:
        """Learn from cells (N, C) of training images.

        Args:
            cells: (N, C) finite numbers.
            tree: a structure without branches to take in place of one that is learned from the cells read.
        """
        count = cells.shape[1]
        chosen = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:MOST_CHANNELS].sort().values
        x = cells[:, chosen.to(cells.device)].double().cpu()
        mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0)
        deviation = torch.where(deviation > 1e-6 * (1 + mean.abs()), deviation, torch.ones_like(deviation))
        x = (x - mean) / deviation
        if tree is None:
            threshold = density_threshold(THRESHOLD, len(x))
            tree = learn_structure(x, test="gaussian", threshold=threshold, bins=4, s=1, max_order=1, progress=False)
        density = TreeDensity(tree, 1, normalize=False, max_parents=MOST_PARENTS).double()
        families = density.fit(x, torch.zeros(len(x), dtype=torch.long)).families
        assert isinstance(families, GaussianFamilies)
        weight = torch.eye(len(chosen) + 1, dtype=torch.double)  # the last row belongs to parents that are not there
        for parents, slopes, child in zip(families.parents, families.slopes[:, :, 0], families.variable, strict=True):
            weight[parents, child] -= slopes
        weight = weight[:-1, :-1] * (-0.5 * families.log_variance[:, 0, 0]).exp()
        scaled = weight / deviation[:, None]
        intercept = families.intercept[:, 0, 0] * (-0.5 * families.log_variance[:, 0, 0]).exp()
        self.channels = chosen.to(self.channels.device)
        self.weight, self.bias = scaled.to(self.weight), (mean @ scaled + intercept).to(self.weight)
        self.constant = (0.5 * (families.log_variance[:, 0, 0] + math.log(2 * math.pi))).to(self.weight)
        return self

    def set_surprise(self, found: Tensor) -> None:
        """Take what `forward` gives for cells (n,) of held-out images, by which cells are surprising."""
        self.knots, self.heights, self.slope = (part.to(self.weight) for part in fit_surprise(found))

    def parts(self, cells: Tensor) -> Tensor:
        """Cells (N, C) → minus the log-density of each channel given its parents, (N, k)."""
        error = cells.index_select(1, self.channels).to(self.weight) @ self.weight - self.bias
        return 0.5 * error.square() + self.constant

    def forward(self, maps: Tensor) -> Tensor:
        """Maps (B, C, H, W) → minus the log-density of each cell, (B, H, W)."""
        error = rows_of(maps).index_select(1, self.channels).to(self.weight) @ self.weight - self.bias
        total = 0.5 * error.square().sum(dim=1) + self.constant.sum()
        return total.view(len(maps), *maps.shape[2:])

    def surprise(self, maps: Tensor) -> Tensor:
        """Maps (B, C, H, W) → the surprise of each cell, (B, H, W)."""
        values = self(maps)
        return Surprise(self.knots, self.heights, self.slope)(values.flatten()).view_as(values)


class PlaceMap(NamedTuple):
    """How strange each place of B images is.

    Attributes:
        surprise: (B, H, W) the sum of the surprises of all stages, smoothed; higher is stranger.
        p: (B, H, W) the share of places in held-out images that are at least as strange. Of many places of a known
            image some have a small one.
        anywhere_p: (B,) the share of held-out images of which some place is at least as strange as the strangest here.
        stages: (B, L) what each stage adds to the strangest place.
    """

    surprise: Tensor
    p: Tensor
    anywhere_p: Tensor
    stages: Tensor


class StageMaps(DataSizedBuffers):
    """The densities of the cells of all stages, and what held-out images say of their sum.

    Attributes:
        held: (n,) summed surprises of places of held-out images, rising.
        peaks: (m,) that of the strangest place of each held-out image, rising.
    """

    may_be_missing = True
    held: Tensor
    peaks: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        self.register_buffer("held", torch.empty(0))
        self.register_buffer("peaks", torch.empty(0))

    @property
    def ready(self) -> bool:
        """Whether it was fitted."""
        return len(self.peaks) > 0

    def forget(self) -> None:
        """Be as before any fit."""
        self.stages = nn.ModuleList()
        self.held, self.peaks = self.held[:0], self.peaks[:0]

    def _densities(self) -> list[CellDensity]:
        return list(self.stages)  # type: ignore[arg-type]

    @torch.no_grad()
    def fit(
        self,
        fitted: Sequence[Sequence[Tensor]],
        held: Sequence[Sequence[Tensor]],
        make: Callable[[Tensor], CellDensity] | None = None,
    ) -> StageMaps:
        """Learn from the maps of training images, batches of (B, C, H, W) for each stage.

        Args:
            fitted: stage → batches of maps that densities are fitted to.
            held: stage → batches of maps of other images, by which places are compared.
            make: cells (N, C) → the density fitted to them; None learns its wiring.
        """
        densities = []
        for batches, others in zip(fitted, held, strict=True):
            cells = torch.cat([rows_of(maps) for maps in batches])
            some = torch.randperm(len(cells), generator=torch.Generator().manual_seed(0))[:MOST_FITTED]
            cells = cells[some.to(cells.device)]
            density = CellDensity().to(cells.device).fit(cells) if make is None else make(cells)
            density.set_surprise(torch.cat([density(maps).flatten() for maps in others if len(maps)]))
            densities.append(density)
        self.stages = nn.ModuleList(densities)
        sums = [self._sum(maps)[0].flatten(1) for maps in zip(*held, strict=True) if len(maps[0])]
        every = torch.cat([part.flatten() for part in sums])
        some = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))[:MOST_KEPT]
        self.held = every[some.to(every.device)].sort().values
        self.peaks = torch.cat([part.amax(dim=1) for part in sums]).sort().values
        return self

    def _sum(self, maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Maps of each stage → the smoothed sum of their surprises (B, H, W), and those of each stage (B, L, H, W)."""
        found = [density.surprise(part)[:, None] for density, part in zip(self._densities(), maps, strict=True)]
        size = [max(part.shape[axis] for part in found) for axis in (2, 3)]
        wide = [
            part if list(part.shape[2:]) == size else F.interpolate(part, size=size, mode="bilinear") for part in found
        ]
        stages = F.avg_pool2d(torch.cat(wide, dim=1), SMOOTHED, 1, SMOOTHED // 2, count_include_pad=False)
        return stages.sum(dim=1), stages

    @torch.no_grad()
    def forward(self, maps: Sequence[Tensor]) -> PlaceMap:
        """Maps (B, C, H, W) of each stage → how strange each place is."""
        surprise, stages = self._sum(maps)
        p = p_values(surprise.flatten(), self.held).view_as(surprise)
        peak, place = surprise.flatten(1).max(dim=1)
        at_peak = stages.flatten(2).gather(2, place[:, None, None].expand(-1, stages.shape[1], 1))[:, :, 0]
        return PlaceMap(surprise, p, p_values(peak, self.peaks), at_peak)

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Make room for as many stages as a checkpoint has."""
        numbers = {key.split(".")[1] for key in stored if key.startswith("stages.")}
        self.stages = nn.ModuleList(CellDensity() for _ in numbers).to(self.held.device)
