"""The samples of a test that a model is least certain of, with their pictures: the table at the end of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from brainet_pl.evaluation.chart import readable
from brainet_pl.evaluation.record import SampleBatch
from brainet_pl.evaluation.summary import LoggedTable, ranking_score

LEAST_SIDE = 64  # pixels of a thumbnail: small pictures are repeated to at least this size
NO_CELLS = ("confidence", "wrong", "calibrated", "covered")  # answers that the table says in other words


class DoubtfulSample(NamedTuple):
    """A doubtful test sample: its rank in doubt, number, table cells, and picture (H, W) or (H, W, 3) or None."""

    doubt: float
    number: int
    cells: dict[str, Any]
    picture: Any


class DoubtfulSamples:
    """The most uncertain samples of all batches that were shown.

    Args:
        most: how many are kept.
        score: the score that ranks them; None ranks by the entropy, or the first score there is.
        image_shape: of inputs that are flattened images.
    """

    def __init__(self, most: int, score: str | None = None, image_shape: tuple[int, ...] | None = None) -> None:
        self.most, self.score, self.image_shape = most, score, image_shape
        self.samples: list[DoubtfulSample] = []

    def add(self, batch: SampleBatch, numbers: Tensor, inputs: Any) -> None:
        """Merge a batch into the most uncertain samples so far."""
        score = ranking_score(list(batch.scores), self.score)
        doubt = batch.scores[score].detach().float().cpu().nan_to_num(nan=math.inf)
        columns = _cells_of(batch)
        for i in doubt.topk(min(self.most, len(doubt))).indices.tolist():
            cells = {name: values[i].item() for name, values in columns.items()}
            self.samples.append(DoubtfulSample(float(doubt[i]), int(numbers[i]), cells, inputs[i]))
        self._keep_most()
        for i, sample in enumerate(self.samples):  # only now, for the few that stay: pictures are made once
            if isinstance(sample.picture, Tensor):
                self.samples[i] = sample._replace(picture=thumbnail(sample.picture, self.image_shape))

    def merge(self, shares: Sequence[Sequence[DoubtfulSample]]) -> None:
        """Take the place of what several processes have kept."""
        self.samples = [sample for share in shares for sample in share]
        self._keep_most()

    def _keep_most(self) -> None:
        self.samples = sorted(self.samples, key=lambda sample: (-sample.doubt, sample.number))[: self.most]

    def table(self, score: str, class_names: Sequence[str] | None) -> LoggedTable:
        """The samples with their pictures, where there are some, and classes by their names."""
        cells = list(self.samples[0].cells)
        with_pictures = any(sample.picture is not None for sample in self.samples)
        rows = []
        for sample in self.samples:
            row = [sample.number, sample.picture] if with_pictures else [sample.number]
            for name in cells:
                value = sample.cells[name]
                is_class = class_names is not None and name in ("predicted", "label") and value >= 0
                row.append(class_names[int(value)] if class_names is not None and is_class else value)
            rows.append(row)
        caption = f"The {len(rows)} test samples of the highest {readable(score)}, the most uncertain first"
        return LoggedTable(caption, ["sample", *(["picture"] if with_pictures else []), *cells], rows)


def _cells_of(batch: SampleBatch) -> Mapping[str, Tensor]:
    """The columns of the table: answers and scores."""
    answers = dict(batch.answers)
    if "confidence" in answers:
        # Not by that name: a learned confidence is a score, and higher for a less certain sample.
        answers["probability"] = answers.get("calibrated", answers["confidence"])  # as scores are: what a user gets
    return {name: values for name, values in answers.items() if name not in NO_CELLS} | batch.scores


def thumbnail(x: Tensor, shape: tuple[int, ...] | None = None) -> Any:
    """An input (C, H, W), or a vector with the shape of its image → uint8 (H, W) or (H, W, 3); else None.

    Inputs are normalised in ways unknown here, so each picture is stretched from its own least to its largest value.
    """
    x = x.detach().float().cpu()
    if shape is not None and x.dim() == 1:
        if x.numel() != math.prod(shape):
            raise ValueError(f"expected inputs of {math.prod(shape)} numbers for image_shape {shape}, got {x.numel()}")
        x = x.view(shape)
    x = x.unsqueeze(0) if x.dim() == 2 else x
    if x.dim() != 3 or len(x) not in (1, 3):
        return None
    x = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    low, high = x.min(), x.max()
    pixels = ((x - low) / (high - low).clamp_min(1e-12) * 255.0).round().to(torch.uint8).permute(1, 2, 0).numpy()
    factor = max(1, -(-LEAST_SIDE // min(pixels.shape[:2])))
    pixels = np.repeat(np.repeat(pixels, factor, axis=0), factor, axis=1)
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels
