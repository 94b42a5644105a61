"""What is behind the estimators: a `Predictor` of rows of numbers, and how it is fitted to a table."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.tensor_file import check_build, check_sizes
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.model.predictor import Predictor
from brainet_pl.network import BRAINetHead, HeadSettings
from brainet_pl.network.training import fit_head
from brainet_pl.network.tree import Tree, smallest_budget
from brainet_pl.scores import Generative, ScoreContext
from brainet_pl.scores.density import density_threshold
from brainet_pl.scores.fitting import fit_score
from brainet_pl.scores.reference import p_values
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.tasks import Classification, Task

DRAW_SEED = 0  # of the sub-networks of a prediction: the same rows always give the same numbers
DENSITY_THRESHOLD = 0.02  # nats: a density wants more edges than a network of dense layers
BATCH = 4096  # rows predicted at a time
RARE = 0.9  # share of one value above which a column counts as one that hardly varies


class Standardize(nn.Module):
    """Rows (N, d) as they come → in deviations from the mean of the training rows."""

    mean: Tensor
    scale: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("scale", torch.ones(columns))

    def fit(self, rows: Tensor) -> Standardize:
        """Take mean and deviation of rows (N, d); a column that does not vary keeps a scale of 1.

        A column that hardly varies, with one value in more than `RARE` of the rows, is scaled by how far the others lie
        from that value: else a rare category would count as a deviation of ten, and any noise as an event.
        """
        scale = rows.std(dim=0, correction=0)
        usual = rows.mode(dim=0).values
        away = (rows - usual).square()
        others = (rows != usual).sum(dim=0)
        rare = others < (1 - RARE) * len(rows)
        scale = torch.where(rare, (away.sum(dim=0) / others.clamp_min(1)).sqrt(), scale)
        varies = scale > 1e-12 * (1 + rows.abs().amax(dim=0))
        self.mean.copy_(rows.mean(dim=0))
        self.scale.copy_(torch.where(varies, scale, torch.ones_like(scale)))
        return self

    def forward(self, rows: Tensor) -> Tensor:
        """Scales rows (N, d) to deviations from the mean."""
        return (rows - self.mean) / self.scale


class TablePredictor(Predictor):
    """A predictor of rows of numbers, with a density of them, and what it said of the rows held back.

    Args:
        task: a classification or a regression.
        head: built for the tree.
        shapes: (d, H, O): columns, rows held back, and columns of a prediction.
        passes: sub-networks that a prediction averages.
    """

    head: BRAINetHead
    held_predicted: Tensor
    held_target: Tensor

    def __init__(self, task: Task, head: BRAINetHead, shapes: tuple[int, int, int], passes: int) -> None:
        columns, held, outputs = shapes
        backbone = FeatureExtractor(Standardize(columns))
        density = Generative(threshold=None, normalize=False)
        calibration = "TemperatureScaling" if isinstance(task, Classification) else None
        super().__init__(backbone, task, head, passes, scores=[density], calibration=calibration)
        self.register_buffer("held_predicted", torch.zeros(held, outputs))
        kind = torch.long if isinstance(task, Classification) else torch.float64
        self.register_buffer("held_target", torch.zeros(held, dtype=kind))

    @torch.no_grad()
    def final(self, rows: Tensor) -> Tensor:
        """Rows (N, d) → calibrated probabilities (N, C), or means and variances (N, 2); always the same numbers."""
        self.eval()
        found = []
        for part in rows.split(BATCH):  # type: ignore[no-untyped-call]
            with isolated_rng(DRAW_SEED):
                found.append(self.calibrated(self.passes(part), {}))
        return torch.cat(found)

    @torch.no_grad()
    def known_p(self, rows: Tensor) -> Tensor:
        """The conformal p-value (N,) of rows (N, d): (1 + #{held back at least as strange}) / (H + 1)."""
        self._require_held("known_p")
        if len(self.held_target) + 1 < 1 / self.verdict.level:
            warnings.warn(
                f"no row can be called unknown at {self.verdict.level:.0%}: its p-value is no finer than "
                f"1/{len(self.held_target) + 1}, by the rows held back in fit; fit with more rows, or a larger "
                "validation_fraction",
                stacklevel=3,
            )
        self.eval()
        found = []
        for part in rows.split(BATCH):  # type: ignore[no-untyped-call]
            with isolated_rng(DRAW_SEED):
                scores = self.scores(self.passes(part))
            name = self.scores.verdict_score(scores, self.verdict)
            assert name is not None
            found.append(p_values(scores[name], self.scores.reference[name]))
        return torch.cat(found)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Predictions and targets of the rows held back."""
        self._require_held("predict_set and predict_interval")
        return self.held_predicted, self.held_target

    def _require_held(self, who: str) -> None:
        if not len(self.held_target):
            raise ValueError(
                f"expected rows held back in fit for {who}, got none: fit with at least 40 rows and a "
                "validation_fraction above 0"
            )

    @torch.no_grad()
    def hold(self, rows: Tensor, target: Tensor) -> None:
        """Calibrate on the rows held back (H, d), and remember what was said of them."""
        self.eval()
        for part, labels in zip(rows.split(BATCH), target.split(BATCH), strict=True):  # type: ignore[no-untyped-call]
            with isolated_rng(DRAW_SEED):
                passes = self.passes(part)
            self.observe(passes, self.scores(passes), labels)
        self.finalize()
        self.held_predicted.copy_(self.final(rows))
        self.held_target.copy_(target)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` builds the same modules from, for their tensors to be loaded into."""
        shapes = [self.head.ggt.num_variables, len(self.held_target), int(self.held_predicted.shape[1])]
        return {"ggt": self.head.ggt.to_dict(), "shapes": shapes, "passes": self.num_passes}

    @classmethod
    def from_dict(
        cls, task: Task, settings: HeadSettings, data: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> TablePredictor:
        """The predictor that `to_dict` describes, with its weights; one much larger than these is refused."""
        ggt = GGT.from_dict(data["ggt"])
        columns, held, outputs = data["shapes"]
        check_sizes([settings.settings(), {"out_features": task.out_features}], weights)
        check_build(lambda: build_head(settings, task, ggt), weights)
        if columns != ggt.num_variables or tuple(weights["held_predicted"].shape) != (held, outputs):
            raise ValueError("expected weights of the shapes in the file, got others: take another copy")
        made = cls(task, build_head(settings, task, ggt), (columns, held, outputs), data["passes"]).double()
        made.load_state_dict(weights)
        return made


def build_head(settings: HeadSettings, task: Task, ggt: GGT) -> BRAINetHead:
    """The head of a tree, with more parameters than asked for where the tree needs more."""
    if isinstance(settings, Tree) and settings.num_params != "auto":
        least = smallest_budget(ggt, task.out_features, min_width=settings.min_width or 1, norm=settings.norm)
        if settings.num_params < least:
            settings = copy.copy(settings)
            settings.num_params = least
    head = settings.build(ggt.num_variables, task.out_features, ggt)
    assert isinstance(head, BRAINetHead)
    return head


def fit_network(
    task: Task,
    rows: Tensor,
    target: Tensor,
    train: Tensor,
    held: Tensor,
    *,
    head: HeadSettings,
    learn: Mapping[str, Any],
    names: Sequence[str] | None,
    max_epochs: int,
    patience: int,
    batch_size: int | None,
    learning_rate: float,
    passes: int,
    verbose: bool,
) -> tuple[TablePredictor, int]:
    """Structure, weights and calibration from rows (N, d) and targets (N,); the predictor and the epochs it took.

    `train` and `held` are the numbers of the rows to learn from and of those to stop and calibrate by. Without the
    latter, training takes a quarter of `max_epochs`.
    """
    labels = target[train]
    if task.needs_targets:
        task.prepare(labels)
    scaling = Standardize(rows.shape[1]).fit(rows[train])
    features, held_features = scaling(rows[train]), scaling(rows[held])
    settings = {name: value for name, value in learn.items() if value is not None}
    ggt = learn_structure(features.numpy(), progress=verbose, **settings).named(list(names) if names else None)
    threshold = density_threshold(DENSITY_THRESHOLD, len(features))
    density = learn_structure(
        features.numpy(), test="gaussian", threshold=threshold, progress=verbose, seed=learn["seed"]
    )
    classes, count = task.classes(labels)
    outputs = count if isinstance(task, Classification) else 2
    network = TablePredictor(task, build_head(head, task, ggt), (rows.shape[1], len(held), outputs), passes)
    network.backbone.model.load_state_dict(scaling.state_dict())
    for score in (score for score in network.scores if score.needs_fit):
        score.set_context(ScoreContext(count, raw=True, ggt=density))
        fit_score(score, features, classes)

    def validate() -> float:
        return float(task.loss(network.head.passes(held_features, 8).values, target[held]))

    epochs = fit_head(
        network.head,
        features,
        labels,
        task.loss,
        validate if len(held) else None,
        max_epochs=max_epochs if len(held) else max(1, max_epochs // 4),
        patience=patience,
        batch_size=choose_batch_size(len(features)) if batch_size is None else batch_size,
        learning_rate=learning_rate,
        progress=verbose,
    )
    network.double()
    if len(held):
        network.hold(rows[held].double(), target[held])
    return network, epochs


def choose_batch_size(rows: int) -> int:
    """A power of two near a sixteenth of the rows, from 16 to 256.

    >>> [choose_batch_size(n) for n in (30, 1000, 100_000)]
    [16, 64, 256]
    """
    return int(min(256, max(16, 2 ** round(math.log2(max(1, rows / 16))))))
