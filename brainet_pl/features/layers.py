"""`layers="auto"`: which layers a head should read, by probes of a model's blocks on a sample of the training data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones import batches as batching
from brainet_pl.backbones.batches import Columns, split
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.taps import LAST, LayerSearch, Tap, Taps, candidates
from brainet_pl.features.extraction import Extracted, extract, inference, is_sharded
from brainet_pl.features.ridge import Probe, Table, deal_folds, is_better, probe, select

FEWEST_ROWS, MOST_ROWS = 500, 1000  # of the sample: a sixth of the training data between these
LEAST_ROWS = 100  # with fewer samples nothing is chosen
WIDEST = 8192  # features of the last layer beyond which a random sketch of this many stands for them


class LayerChoice(NamedTuple):
    """The layers that a head should read.

    Attributes:
        taps: the layers and how they are pooled; None is what the classification layer was given.
        summary: what was found, in one line.
    """

    taps: Taps | None
    summary: str


def sample_rows(total: int | None) -> int:
    """The number of training samples that layers are chosen by: a sixth of all, but 500 to 1,000.

    >>> sample_rows(3000), sample_rows(50_000), sample_rows(None)
    (500, 1000, 1000)
    """
    return MOST_ROWS if total is None else min(max(total // 6, FEWEST_ROWS), MOST_ROWS)


def choose_layers(
    backbone: FeatureExtractor,
    batches: Iterable[Any],
    *,
    rows: int = MOST_ROWS,
    columns: Columns | None = None,
    device: torch.device | str | None = None,
    check: Callable[[Tensor], Tensor] | None = None,
    progress: bool = True,
) -> LayerChoice:
    """Choose the layers of a backbone that the targets of a sample follow from best, by cross-validated ridge.

    One pass reads all blocks in several pools. Taps are added one by one while they lower the squared error of held-out
    folds by more than a standard error, up to `max_features` of the backbone's search. What is not better than the last
    layer alone by that much gives way to it.

    Args:
        backbone: the feature extractor; it is not changed, except that its classification layer is found.
        batches: samples with targets: classes as whole numbers, else numbers.
        rows: how many samples are read.
        columns: the names of the parts of a batch.
        device: where the backbone runs; None is where it is.
        check: turns targets of a batch into classes (whole numbers) or numbers, or raises an error.
        progress: show progress bars.
    """
    search = backbone.search or LayerSearch()
    stream = iter(batches)
    first = next(stream, None)
    inputs, target = (None, None) if first is None else split(first, columns)
    if target is None or isinstance(inputs, BackboneOutput) or is_sharded(backbone):
        return _last("no labels to choose others by" if target is None else "features come from elsewhere")
    if not batching.size(inputs):
        return _last("the first batch is empty")
    with inference(backbone, device) as there:
        few = batching.move(batching.rows(inputs, slice(0, 2)), there)
        backbone.trace(few)
        taps = candidates(backbone.model, backbone.layer_uses(few), search)
    if not taps:
        return _last(f"{type(backbone.model).__name__} has no block of at most {search.max_features:,} features")
    settings: dict[str, Any] = {"device": device, "max_rows": rows, "progress": progress, "columns": columns}
    found = extract(_Reader(backbone, taps), chain([first], stream), **settings)
    return _choose(found, taps, search, check, progress)


class _Reader(nn.Module):
    """Gives the features of the last layer of a backbone, and of all candidates, for a batch of inputs."""

    def __init__(self, backbone: FeatureExtractor, taps: Sequence[Tap]) -> None:
        super().__init__()
        self.backbone, self.taps = backbone, taps

    def forward(self, x: Any) -> BackboneOutput:
        last, found = self.backbone.read(x, self.taps)
        return BackboneOutput(
            _sketch(last), {_as_taps([tap]): part for tap, part in zip(self.taps, found, strict=True)}
        )


def _choose(
    found: Extracted,
    taps: Sequence[Tap],
    search: LayerSearch,
    check: Callable[[Tensor], Tensor] | None,
    progress: bool,
) -> LayerChoice:
    """Probe the features of the last layer and of each tap, and join those that tell most of the targets."""
    y = found.targets if check is None else check(found.targets)
    tables = [found.output.features, *(found.output.view(_as_taps([tap])) for tap in taps)]
    finite = torch.stack([table.isfinite().all(dim=1) for table in tables]).all(dim=0)
    reason = _unfit(y, finite)
    if reason is not None:
        return _last(reason)
    y = y.flatten()[finite]
    targets, folds = _as_numbers(y), deal_folds(y)
    probed = [Table.of(table[finite]) for table in tables]
    allowed = _Allowed(taps, found.output.features.shape[1] <= search.max_features)
    with tqdm(desc="choosing layers", unit=" probes", disable=not progress or None, delay=5, leave=False) as bar:
        alone = probe(probed[0], targets, folds)
        steps = select(probed, targets, folds, search.max_features, allowed, bar.update)
    score = _Score(y, targets)
    if not steps:
        return _last(f"{score.of(alone)}, no better with others: none")
    if not is_better(steps[-1].probe, alone):
        return _last(f"{score.of(alone)}, no better with others: {score.of(steps[-1].probe)}")
    chosen = [(None, *taps)[step.chosen] for step in steps]
    said = [f"{_shown(tap)}: {score.of(step.probe)}" for tap, step in zip(chosen, steps, strict=True)]
    summary = f"layers: {', + '.join(said)} (last alone {score.of(alone)})"
    return LayerChoice(_as_taps(chosen), summary)


def _unfit(y: Tensor, finite: Tensor) -> str | None:
    """Why nothing can be chosen by these targets, of samples whose features are `finite` or not; None where it can."""
    if y.dim() > 1 and y.shape[1:] != (1,):
        return f"expected one target for each sample, got the shape {tuple(y.shape[1:])}"
    kept = y.flatten()[finite]
    if len(kept) < LEAST_ROWS:
        return f"{len(kept)} samples are too few to choose by, {LEAST_ROWS} are needed"
    return None if _as_numbers(kept).any() else "all samples have the same target"


class _Allowed:
    """Which table may join those chosen: 0 is the last layer, i tap i - 1."""

    def __init__(self, taps: Sequence[Tap], last_fits: bool) -> None:
        self.taps = taps
        self.last = last_fits and all(tap.layer != LAST for tap in taps)

    def __call__(self, chosen: Sequence[int], new: int) -> bool:
        """Not the mean of a layer of which another pool is chosen: that has its mean in it."""
        if new == 0:
            return self.last
        tap = self.taps[new - 1]
        return tap.pool != "mean" or all(self.taps[i - 1].layer != tap.layer for i in chosen if i)


class _Score(NamedTuple):
    """Says how good a probe is: the share of right classes, or of explained variance."""

    y: Tensor
    targets: Tensor

    def of(self, found: Probe) -> str:
        if not self.y.is_floating_point():
            right = (self.targets - found.residuals).argmax(dim=1) == self.targets.argmax(dim=1)
            return f"{100 * float(right.double().mean()):.1f} %"
        return f"R² {1 - found.error / float(self.targets.square().mean()):.3f}"


def _as_numbers(y: Tensor) -> Tensor:
    """Classes (n,) as one column for each that occurs, numbers standardised; all centred, in 32 bits."""
    if y.is_floating_point():
        centred = (y.double() - y.double().mean())[:, None]
        return (centred / centred.square().mean().sqrt().clamp_min(1e-300)).float()
    classes = torch.unique(y, return_inverse=True)[1]
    columns = nn.functional.one_hot(classes).float()
    return columns - columns.mean(dim=0)


def _as_taps(taps: Sequence[Tap | None]) -> Taps:
    """Some taps, None for the last layer, as a user would name them."""
    layers = tuple(LAST if tap is None else tap.layer for tap in taps)
    return Taps(layers, tuple("mean" if tap is None else tap.pool for tap in taps))


def _shown(tap: Tap | None) -> str:
    if tap is None:
        return "last"
    return f"{tap.layer} as {tap.pool.replace('x', '×') if tap.pool[0].isdigit() else tap.pool}"


def _last(reason: str) -> LayerChoice:
    return LayerChoice(None, f"layers: the last ({reason})")


def _sketch(features: Tensor) -> Tensor:
    """Features (B, d), or for very many of them `WIDEST` sums of some with random signs, the same in every batch."""
    width = features.shape[1]
    if width <= WIDEST:
        return features
    generator = torch.Generator().manual_seed(0)
    place = torch.randint(WIDEST, (width,), generator=generator).to(features.device)
    sign = (2 * torch.randint(2, (width,), generator=generator) - 1).to(features)
    return features.new_zeros(len(features), WIDEST).index_add_(1, place, features * sign)
