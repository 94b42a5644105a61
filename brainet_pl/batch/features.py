"""Features of a backbone to shards, features from shards, and sums over shards that are added.

Only `FeatureWriter` needs torch, for the backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brainet_pl.batch.predictor import ERROR, UNREADABLE
from brainet_pl.batch.shards import read_manifest
from brainet_pl.batch.sources import Columns, objects

FEATURES = "features"
Floats = NDArray[np.float64]


class FeatureWriter:
    """Images → features of a backbone: the work of `write_shards`, and what `brainet extract` runs.

    Args:
        backbone: a module, inputs (B, C, H, W) → features (B, d), in evaluation mode.
        prepare: the bytes of an image file → (C, H, W), such as `ImageSteps`.
        width: d, which a batch without a readable image has too.
    """

    def __init__(
        self, backbone: Callable[[Any], Any], prepare: Callable[[bytes], NDArray[np.float32]], width: int
    ) -> None:
        self.backbone, self.prepare, self.width = backbone, prepare, width

    def __call__(self, batch: Columns) -> Columns:
        """`file`, `features` (B, d), and `error`; the features of an image that can't be read are NaN."""
        import torch

        errors, images = [], []
        for cell in batch["bytes"] if "bytes" in batch else batch["path"]:
            try:
                images.append(self.prepare(cell if isinstance(cell, bytes) else Path(cell).read_bytes()))
                errors.append("")
            except UNREADABLE as error:
                errors.append(" ".join(str(error).split()) or type(error).__name__)
        texts = objects(errors)
        found = np.full((len(texts), self.width), np.nan, dtype=np.float32)
        if images:
            with torch.inference_mode():
                found[texts == ""] = self.backbone(torch.from_numpy(np.stack(images))).numpy()
        return {"file": batch["file"], FEATURES: found, ERROR: texts}


class FeatureShards:
    """The features in a finished folder of shards, batch by batch, as `FeatureStream` reads them again and again.

    `learn_structure(FeatureStream(FeatureShards("features")))` learns a tree from what many machines wrote. Rows with
    an error are left out. A folder that is not finished is refused.

    Args:
        folder: what `brainet extract`, or `write_shards` with a column `features`, wrote.
        share: (k, n) reads every n-th file, beginning with the k-th: for `FeatureStream(…, shared=True)`.
        batch: rows of a batch.
    """

    def __init__(self, folder: str | Path, share: tuple[int, int] = (0, 1), batch: int = 8192) -> None:
        self.files = [Path(folder) / one["file"] for one in read_manifest(folder, verify=False)["parts"]]
        self.share, self.batch = share, batch

    def __call__(self) -> Iterator[NDArray[np.float32]]:
        """All batches (n, d), in the order of the files."""
        import pyarrow.parquet as pq

        for file in self.files[self.share[0] :: self.share[1]]:
            names = pq.read_schema(file).names
            for record in pq.ParquetFile(file).iter_batches(
                self.batch, columns=[name for name in (FEATURES, ERROR) if name in names]
            ):
                rows = record[FEATURES].flatten().to_numpy(zero_copy_only=False).reshape(record.num_rows, -1)
                yield rows[np.array(record[ERROR].to_pylist()) == ""] if ERROR in names else rows


@dataclass(frozen=True)
class Moments:
    """Count, mean and scatter of rows; those of shards are added by `+`, in any order, up to rounding.

    Attributes:
        count: the number of rows.
        mean: (d,)
        scatter: (d, d) Σ (x − mean)(x − mean)ᵀ.

    >>> x = np.arange(12.0).reshape(6, 2) ** 2
    >>> both = Moments.of(x[:2]) + Moments.of(x[2:])
    >>> bool(np.allclose(both.covariance, np.cov(x.T)))
    True
    """

    count: int
    mean: Floats
    scatter: Floats

    @classmethod
    def of(cls, rows: ArrayLike) -> Moments:
        """Adds up what rows (n, d) say, of which there is one at least."""
        x = np.asarray(rows, dtype=np.float64)
        mean = x.mean(axis=0)
        return cls(len(x), mean, (x - mean).T @ (x - mean))

    def __add__(self, other: Moments) -> Moments:
        count, step = self.count + other.count, other.mean - self.mean
        between = np.outer(step, step) * (self.count * other.count / count)
        return Moments(count, self.mean + step * (other.count / count), self.scatter + other.scatter + between)

    @property
    def covariance(self) -> Floats:
        """The covariance (d, d) of all rows so far, as `np.cov` computes it."""
        return self.scatter / (self.count - 1)


@dataclass(frozen=True)
class Values:
    """How often each value occurs; those of shards are added by `+`, exactly: for thresholds and for drift.

    A value of float32 is 4 bytes and its count 8, of distinct ones alone.

    Attributes:
        values: (m,) distinct values, rising; NaN, which has no place among them, is left out.
        counts: (m,)
    """

    values: NDArray[Any]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, values: ArrayLike) -> Values:
        """Counts how often each of values (n,) is there."""
        given = np.asarray(values)
        return cls(*np.unique(given[~np.isnan(given)], return_counts=True))

    def __add__(self, other: Values) -> Values:
        both, place = np.unique(np.concatenate([self.values, other.values]), return_inverse=True)
        counts = np.zeros(len(both), dtype=np.int64)
        np.add.at(counts, place, np.concatenate([self.counts, other.counts]))
        return Values(both, counts)

    def threshold(self, level: float) -> float:
        """The ⌈(1 − level)(n + 1)⌉-th smallest value: a new one exceeds it with a probability of at most `level`."""
        total = int(self.counts.sum())
        rank = int(np.ceil((1.0 - level) * (total + 1)))
        return float(self.values[np.searchsorted(self.counts.cumsum(), rank)]) if rank <= total else np.inf

    def distance(self, other: Values) -> float:
        """The largest difference of two shares of values up to any point: the statistic of Kolmogorov and Smirnov."""
        points = np.concatenate([self.values, other.values])
        return float(np.abs(self._shares_to(points) - other._shares_to(points)).max())

    def _shares_to(self, points: NDArray[Any]) -> Floats:
        ends = np.concatenate([[0], self.counts.cumsum()]) / self.counts.sum()
        found: Floats = ends[np.searchsorted(self.values, points, side="right")]
        return found
