"""Swap the head of a trained model, outside Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from brainet_pl._utils import checks
from brainet_pl._utils.parts import make_part
from brainet_pl.backbones import Backbone, FeatureExtractor
from brainet_pl.backbones.batches import rows, size
from brainet_pl.calibration import Calibrator
from brainet_pl.features.extraction import Extracted, bounded, extract, extract_output, run_backbone
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.model.predictor import Predictor
from brainet_pl.network import BRAINetHead, Head, HeadSettings, Tree
from brainet_pl.network.base import LEAST, train_head
from brainet_pl.scores import Score, Verdict
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.tasks import Classification

BATCH = 256  # inputs at a time while features are extracted


class SwappedModel(Predictor):
    """A feature extractor with a new head: logits (B, C) out, like the model it came from.

    Train it like any module, or by its own `loss`, which has every branch of the tree learn from every sample. After
    `calibrate`, `predict` also says how sure the model may be and which inputs it knows.

    Args:
        backbone: the feature extractor.
        head: the new head.
        num_classes: number of classes.
    """

    task: Classification
    head: Head

    def __init__(self, backbone: FeatureExtractor, head: Head, num_classes: int) -> None:
        super().__init__(backbone, Classification(num_classes), head)

    def forward(self, x: Any = None, **named: Tensor) -> Tensor:
        """Inputs, as the model takes them: a tensor (B, …), a dictionary, or tensors by name → logits (B, C).

        While training, of one sub-network drawn for each sample; of an ensemble (M, B, C), one row for each member.
        """
        readings = self.read(named if x is None else x)
        base_logits = self.base_outputs(readings)
        if self.training and isinstance(self.head, BRAINetHead):
            return torch.as_tensor(self.head(readings.features, base_logits=base_logits, draws=1))
        return train_head(self.head, readings.features, base_logits)

    @torch.no_grad()
    def predict(self, x: Any, passes: int | None = None) -> dict[str, Tensor]:
        """Inputs (B, …) → all that is said of each, by name.

        `probabilities` (B, C), `class` (B,) and every score (B,); after `calibrate` also `known_p` (B,), the share of
        held-out samples that are at least as strange, and `known` (B,).
        """
        return super().predict(x, passes)

    @torch.no_grad()
    def probabilities(self, x: Any, passes: int = 15) -> Tensor:
        """Inputs (B, …) → probabilities (T, B, C) of T passes, before calibration; the backbone runs once.

        Where a head gives all of its few sub-networks with their weights instead of draws, each is among the T as often
        as its weight says: their mean is the head's prediction.
        """
        found = self.passes(x, passes)
        values, weights = found.outputs.softmax(dim=-1), found.weights
        if weights is None:
            return values
        share = (torch.arange(passes, device=weights.device) + 0.5) / passes
        upto = weights.cumsum(0)
        return values[torch.searchsorted(upto / upto[-1], share.to(upto.dtype)).clamp_max(len(values) - 1)]

    def calibrate_head(self, x: Any, held: tuple[Any, Tensor] | None = None) -> dict[str, float]:
        """Choose what needs no training, once the head is trained: nothing else of the model changes.

        A `Tree` gets statistics for its simultaneous pass, which `forward` is, from inputs (N, …) of the training data;
        and with `held`, inputs and labels (N,) that it was not trained on, 100 at the least, the temperature of its
        posterior. Gives what was chosen, by name.
        """
        if held is not None and len(held[1]) < LEAST:
            raise ValueError(
                f"expected at least {LEAST} held-out samples to choose by, got {len(held[1])}: give more, or none"
            )
        with torch.no_grad():
            readings = self.read(x)
            seen = Extracted(readings, torch.zeros(len(readings), dtype=torch.long))
            return self.finalize_head(seen, None if held is None else Extracted(self.read(held[0]), held[1]))

    @torch.no_grad()
    def calibrate(
        self,
        train: Any,
        held: Any,
        *,
        calibration: Calibrator | str | Mapping[str, Any] = "DensityScaling",
        scores: Sequence[Score | str | Mapping[str, Any]] = (),
        verdict: Verdict | None = None,
        passes: int = 15,
        progress: bool = True,
    ) -> dict[str, float]:
        """Learn how sure the trained model may be, and which inputs it knows: what `predict` tells. Nothing is trained.

        Args:
            train: inputs and labels that the model was trained on, which scores such as a density are fitted to: a pair
                of tensors, a dataset, or a loader.
            held: inputs and labels that it was not trained on, 200 or more.
            calibration: maps probabilities to better calibrated ones.
            scores: further scores of how unlike the training data an input is.
            verdict: by which score and at which level an input is called known; None is the calibrator's, at 5 %.
            passes: sub-networks that a prediction averages.
            progress: show progress bars.

        Returns:
            What was learned, by name.
        """
        self.num_passes = checks.whole("passes", passes, 1)
        self.attach(scores, calibration, None, verdict)
        features = TrainingFeatures(_pairs(train, "train"), self.backbone)
        self.fit_scores(features, [score for score in self.scores if score.needs_fit], progress)
        features.prepare_backbone()
        inside = extract(self.backbone, _pairs(held, "held"), progress=progress)
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        self.to(device)
        for i in range(0, len(inside.targets), BATCH):
            few = slice(i, i + BATCH)
            looked = self.passes(inside.output[few].to(device))
            self.observe(looked, self.scores(looked), self.task.check(inside.targets[few].to(device)))
        return {name.removeprefix("cal/"): float(value) for name, value in self.finalize().items()}

    @torch.no_grad()
    def base_logits(self, x: Any) -> Tensor | None:
        """Inputs (B, …) → logits (B, C') of the layer that was removed, or None where none was."""
        return run_backbone(self.backbone, x).base_logits


def swap_head(
    model: nn.Module,
    data: GGT | Tensor | Iterable[Any],
    num_classes: int,
    *,
    head_layer: str | None = None,
    freeze: bool = True,
    layers: str | list[str] | None = None,
    pool: str | list[str] | None = None,
    head: HeadSettings | str | None = None,
    **learn: Any,
) -> SwappedModel:
    """Replace the classification layer of a trained model by a BRAINet head, outside Lightning.

    Args:
        model: any classifier; it is copied, never changed.
        data: a learned tree, or inputs to learn one from: a tensor or NumPy array, a dictionary of tensors, a dataset,
            or batches of inputs or of (inputs, …), such as a DataLoader. All of it is read; of a stream of unknown
            length `max_rows` rows, or 50,000.
        num_classes: outputs of the new head.
        head_layer: the layer to remove; None finds it.
        freeze: keep the backbone as it is.
        layers: the layers whose outputs are the features, as in `Backbone`: paths, patterns, or "auto" for the ends of
            the model's stages; None is what the classification layer was given.
        pool: how maps and tokens become features, as in `Backbone`.
        head: settings of the new head; None is `Tree()`, a BRAINet sized by the number of features. Where the removed
            layer had `num_classes` outputs, `Tree(skip="base_logits_or_linear")` adds to its logits.
        **learn: settings of `learn_structure`.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    >>> swapped = swap_head(model, torch.randn(100, 6), 3, head=Tree(num_params=2000), test="gaussian", progress=False)
    >>> swapped.eval().predict(torch.randn(2, 6))["probabilities"].shape
    torch.Size([2, 3])
    """
    settings = make_part(HeadSettings, Tree() if head is None else head, "head")
    num_classes = checks.whole("num_classes", num_classes, 1, 10**7)
    backbone = Backbone(model, head_layer=head_layer, freeze=freeze, layers=layers, pool=pool).build()
    if isinstance(data, GGT):
        ggt, in_features, base_logits = data, data.num_variables, None
    else:
        batches = _batches(data, learn.get("max_rows"))
        few = not settings.needs_tree and layers is None
        readings = extract_output(backbone, batches, max_rows=1 if few else None)
        features = (backbone.set_scale([readings])[0] if backbone.needs_scale else readings).features
        ggt = learn_structure(features, **learn) if settings.needs_tree else None  # type: ignore[assignment]
        if ggt is not None:
            ggt = ggt.named(backbone.names)
        in_features, base_logits = features.shape[1], readings.base_logits
    settings = settings.resolve_skip(base_logits is not None and base_logits.shape[1] == num_classes)
    device = next((p.device for p in backbone.parameters()), torch.device("cpu"))
    return SwappedModel(backbone, settings.build(in_features, num_classes, ggt).to(device), num_classes)


def _pairs(data: Any, name: str) -> Iterable[Any]:
    """Inputs and labels as a user gives them, in batches."""
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=BATCH)
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
        if len(x) != len(y):
            raise ValueError(f"expected as many labels as inputs in {name}, got {len(y)} for {len(x)}: give both alike")
        return DataLoader(TensorDataset(x, y), batch_size=BATCH)
    if isinstance(data, Iterable) and not isinstance(data, str | Mapping | Tensor | np.ndarray):
        return data
    raise ValueError(
        f"expected {name} to be inputs and labels, a pair of tensors, a dataset or a loader of both, got "
        f"{checks.shown(data)}: scores and calibration learn from samples whose class is known"
    )


def _batches(data: Any, max_rows: int | None) -> Iterable[Any]:
    """What a user gives as data, in batches; of a stream of unknown length at most `max_rows` rows."""
    if isinstance(data, np.ndarray):
        if data.dtype.kind not in "fiub":
            raise ValueError(f"expected an array of numbers, got {data.dtype}: encode what is text first")
        data = torch.from_numpy(np.ascontiguousarray(data))
    if isinstance(data, Tensor):
        if not data.dim():
            raise ValueError("expected inputs of shape (samples, …), got a single number: give one row a sample")
        return data.split(BATCH)  # type: ignore[no-untyped-call, no-any-return]
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=BATCH)
    if isinstance(data, Mapping) and data and all(isinstance(v, Tensor) for v in data.values()):
        return [rows(data, slice(i, i + BATCH)) for i in range(0, size(data), BATCH)]
    if not isinstance(data, Iterable) or isinstance(data, str | Mapping):
        raise ValueError(
            f"expected data to be a tensor, an array, a dataset, a loader or a learned tree, got "
            f"{checks.shown(data)}: give the inputs that the model was trained on"
        )
    return bounded(data, max_rows)
