"""The inputs of a test that look most unknown, with picture and reason: a table for reports and loggers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from brainet_pl._utils.rng import isolated_rng
from brainet_pl.evaluation.doubtful import thumbnail
from brainet_pl.evaluation.record import SampleBatch
from brainet_pl.evaluation.summary import LoggedTable
from brainet_pl.explain.road import explain_batch
from brainet_pl.prediction.network import device_of
from brainet_pl.prediction.predictor import Predictor

MOST_UNKNOWN = "test/most_unknown"  # what loggers and the record call the table
LEAST_SIDE = 64  # pixels of a picture: small ones are repeated


class Strange(NamedTuple):
    """An input: how strange it is, the name of its set, its number there, and itself."""

    strangeness: float
    set: str
    number: int
    inputs: Tensor


class StrangestSamples:
    """The strangest inputs of all batches that were shown, known and unknown sets together.

    Args:
        most: how many are kept.
        image_shape: of inputs that are flattened images.
    """

    def __init__(self, most: int, image_shape: tuple[int, ...] | None = None) -> None:
        self.most, self.image_shape = most, image_shape
        self.samples: list[Strange] = []

    def add(self, name: str, predictor: Predictor, batch: SampleBatch, numbers: Tensor, inputs: Any) -> None:
        """Merge a batch of one set into the strangest so far; inputs that are no tensor are passed over."""
        score = predictor.verdict_score(batch.scores)
        if score is None or not isinstance(inputs, Tensor):
            return
        strangeness = batch.scores[score].detach().float().cpu().nan_to_num(nan=math.inf)
        for i in strangeness.topk(min(self.most, len(strangeness))).indices.tolist():
            self.samples.append(Strange(float(strangeness[i]), name, int(numbers[i]), inputs[i].detach().cpu()))
        self.merge([self.samples])

    def merge(self, shares: Sequence[Sequence[Strange]]) -> None:
        """Take the place of what several processes have kept."""
        samples = [sample for share in shares for sample in share]
        self.samples = sorted(samples, key=lambda sample: (-sample.strangeness, sample.set, sample.number))[: self.most]

    def table(self, predictor: Predictor) -> LoggedTable | None:
        """The samples with pictures, before and with what is strange, and reasons; None where none was judged."""
        if not self.samples:
            return None
        rows = []
        for sample in self.samples:  # one by one, because sizes may differ; they are few
            with isolated_rng(0):
                found = explain_batch(predictor, sample.inputs[None].to(device_of(predictor)))
            pictures = found.overlay(sample.inputs[None], self.image_shape)
            plain, heat = thumbnail(sample.inputs, self.image_shape), None if pictures is None else pictures[0]
            heat = None if heat is None else _enlarged(heat)
            p = float(found.prediction["known_p"][0])
            rows.append([sample.number, sample.set, plain, heat, p, found.describe(self.image_shape)[0]])
        columns = ["sample", "set", "picture", "where", "known_p", "why"]
        shown = [place for place in range(len(columns)) if any(row[place] is not None for row in rows)]
        rows = [[row[place] for place in shown] for row in rows]
        caption = f"The {len(rows)} inputs that look most unknown, the strangest first; yellow to red is where"
        return LoggedTable(caption, [columns[place] for place in shown], rows)


def _enlarged(pixels: Any) -> Any:
    factor = max(1, -(-LEAST_SIDE // min(pixels.shape[:2])))
    return np.repeat(np.repeat(pixels, factor, axis=0), factor, axis=1)
