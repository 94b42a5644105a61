"""Any CSV file with a target column: numeric and categorical columns, missing values."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brainet_pl.datamodules.base import Images, SplitData

Floats = NDArray[np.float64]
Columns = dict[str, list[str]]
MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})  # in lower case


def read_csv(path: str | Path, delimiter: str = ",") -> Columns:
    """Name → values as text, without blanks around them; the first line names the columns."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"expected a CSV file at {path}, found none: check the path")
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        lines = [line for line in csv.reader(file, delimiter=delimiter) if line]
    if len(lines) < 2:
        raise ValueError(f"expected a line of names and then rows in {path}, got {len(lines)} lines")
    names = [name.strip() for name in lines[0]]
    if len(set(names)) < len(names):
        raise ValueError(f"expected columns of different names in {path}, got {', '.join(names)}")
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(names):
            raise ValueError(
                f"expected {len(names)} values in row {number} of {path}, got {len(line)}: check the delimiter "
                f"({delimiter!r}) and the quotes"
            )
    return {name: [line[j].strip() for line in lines[1:]] for j, name in enumerate(names)}


def is_missing(value: str) -> bool:
    """Whether a text stands for no value."""
    return value.lower() in MISSING


def is_text(value: str) -> bool:
    """Whether it is neither a number (infinite ones included) nor missing."""
    try:
        float(value)
    except ValueError:
        return not is_missing(value)
    return False


@dataclass(frozen=True)
class Numeric:
    """Standardised by the training rows; a missing value is their mean, and marked where training rows miss some.

    Attributes:
        mean, std: of the training rows that have a value. marked: whether an indicator follows the value.
    """

    name: str
    mean: float
    std: float
    marked: bool

    @property
    def features(self) -> list[str]:
        """Names of the columns it gives."""
        return [self.name, f"{self.name} missing"] if self.marked else [self.name]

    def encode(self, values: Sequence[str]) -> Floats:
        """(N, 1) or, marked, (N, 2)."""
        x = _numbers(self.name, values)
        missing = np.isnan(x)
        scaled = np.where(missing, 0.0, (x - self.mean) / self.std)
        return np.stack([scaled, missing], axis=1) if self.marked else scaled[:, None]


@dataclass(frozen=True)
class Categorical:
    """One column of zeros and ones for each category of the training rows; a category never seen is all zeros."""

    name: str
    categories: tuple[str, ...]

    @property
    def features(self) -> list[str]:
        """Names of the columns it gives."""
        return [f"{self.name}={category}" for category in self.categories]

    def encode(self, values: Sequence[str]) -> Floats:
        """(N, number of categories)."""
        return np.array([[float(_category(v) == c) for c in self.categories] for v in values])


Encoder = Numeric | Categorical


def fit_encoders(
    columns: Columns,
    *,
    categorical: Sequence[str] = (),
    missing: Literal["impute", "refuse"] = "impute",
    max_categories: int = 50,
) -> list[Encoder]:
    """How to turn each column into numbers, learned from training rows alone; a constant column is left out.

    A column is categorical if it is named so, or holds anything but numbers and missing values.
    """
    encoders: list[Encoder] = []
    for name, values in columns.items():
        gaps = sum(map(is_missing, values))
        if gaps and missing == "refuse":
            raise ValueError(
                f"expected no missing values, got {gaps} of {len(values)} in column {name!r}: fill them, drop the "
                "column, or set missing='impute'"
            )
        if len({_category(v) for v in values}) == 1:  # however a missing value is written
            continue
        if name in categorical or any(map(is_text, values)):
            found = sorted({_category(v) for v in values})
            if len(found) > max_categories:
                raise ValueError(
                    f"expected at most {max_categories} categories, got {len(found)} in column {name!r}: drop it if it "
                    "is a name or a date, or raise max_categories"
                )
            encoders.append(Categorical(name, tuple(found)))
        else:
            x = _numbers(name, values)
            std = float(np.nanstd(x))
            encoders.append(Numeric(name, float(np.nanmean(x)), std if std > 0 else 1.0, gaps > 0))
    if not encoders:
        raise ValueError("expected columns that vary to learn from, got none: check `target`, `drop` and the file")
    return encoders


def _numbers(name: str, values: Sequence[str]) -> Floats:
    """(N,) numbers, NaN where missing."""
    x = np.array([math.nan if is_missing(v) else math.inf if is_text(v) else float(v) for v in values])
    if np.isinf(x).any():
        row = int(np.argmax(np.isinf(x)))
        raise ValueError(
            f"expected finite numbers in column {name!r}, got {values[row]!r}: mend the value, or name the column as "
            "categorical"
        )
    return x


def _category(value: str) -> str:
    return "missing" if is_missing(value) else value


class Table(SplitData):
    """A CSV file with a line of names. Inputs are encoded by training rows alone; a number as target keeps its units.

    Missing numbers become the training mean and, where training rows miss some, get an indicator column beside them;
    a missing category is a category. Rows without a target are refused.

    Args:
        file: training rows and, without `test`, test rows.
        target: the column to predict. task: "regression", or "classification" with one class for each value.
        test: a file with test rows; None holds out `test_fraction` of `file`, the same for every `seed`.
        predict: a file with rows to predict, which may have no target; None predicts the test rows.
        drop: columns to leave out. categorical: numeric columns to be taken as categories.
        missing: "impute", or "refuse" to stop at the first column with a gap.
        max_categories: of one column.
        delimiter: between values.
    """

    def __init__(
        self,
        file: str,
        target: str,
        task: Literal["regression", "classification"] = "regression",
        test: str | None = None,
        test_fraction: float = 0.1,
        predict: str | None = None,
        drop: Sequence[str] = (),
        categorical: Sequence[str] = (),
        missing: Literal["impute", "refuse"] = "impute",
        max_categories: int = 50,
        delimiter: str = ",",
        batch_size: int = 32,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed)
        if not 0 < test_fraction < 1:
            raise ValueError(f"expected a test_fraction between 0 and 1, got {test_fraction}")
        for name, value, known in (
            ("task", task, ("regression", "classification")),
            ("missing", missing, ("impute", "refuse")),
        ):
            if value not in known:
                raise ValueError(f"expected {name} to be one of {', '.join(known)}, got {value!r}")
        self.file, self.target, self.task, self.delimiter = file, target, task, delimiter
        self.test_file, self.predict_file, self.test_fraction = test, predict, test_fraction
        self.drop, self.categorical = tuple(drop), tuple(categorical)
        self.missing, self.max_categories = missing, max_categories
        self.encoders: list[Encoder] = []
        self.classes: list[str] = []

    @property
    def num_classes(self) -> int:
        """Classes of all rows of `file`, once they are read."""
        return len(self.classes)

    @property
    def feature_names(self) -> list[str]:
        """Of the encoded columns, once they are read."""
        return [name for encoder in self.encoders for name in encoder.features]

    def setup(self, stage: str) -> None:
        """Read the files, learn the encoding from the training rows, encode everything."""
        columns = read_csv(self.file, self.delimiter)
        unknown = {self.target, *self.drop, *self.categorical} - set(columns)
        if unknown:
            raise ValueError(
                f"expected columns of {self.file} ({', '.join(columns)}), got {', '.join(sorted(unknown))}"
            )
        count = len(columns[self.target])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
        held = 0 if self.test_file else max(1, round(self.test_fraction * count))
        rest, test = sorted(order[held:]), sorted(order[:held])
        train, val = ([rest[i] for i in part] for part in self.split(len(rest)))
        inputs = {k: v for k, v in columns.items() if k != self.target and k not in self.drop}
        self.encoders = fit_encoders(
            _take(inputs, train),
            categorical=self.categorical,
            missing=self.missing,
            max_categories=self.max_categories,
        )
        self.classes = sorted(set(columns[self.target])) if self.task == "classification" else []
        self.train_set = self.structure_set = self._samples(_take(columns, train))
        self.val_set = self._samples(_take(columns, val))
        self.test_set = self._samples(
            read_csv(self.test_file, self.delimiter) if self.test_file else _take(columns, test)
        )
        self.predict_set = self.test_set
        if self.predict_file:
            self.predict_set = self._samples(read_csv(self.predict_file, self.delimiter), labelled=False)

    def predict_dataloader(self) -> torch.utils.data.DataLoader[object]:
        """Rows of `predict`, or test rows."""
        return self._loader(self.predict_set)

    def _samples(self, columns: Columns, labelled: bool = True) -> Images:
        """Encoded rows (N, d) and targets (N,)."""
        absent = {encoder.name for encoder in self.encoders} | ({self.target} if labelled else set())
        absent -= set(columns)
        if absent:
            raise ValueError(
                f"expected the columns of {self.file} in every file, got none of {', '.join(sorted(absent))}"
            )
        if self.missing == "refuse":
            for encoder in self.encoders:
                gaps = sum(map(is_missing, columns[encoder.name]))
                if gaps:
                    raise ValueError(
                        f"expected no missing values, got {gaps} in column {encoder.name!r}: fill them, or set "
                        "missing='impute'"
                    )
        x = np.concatenate([encoder.encode(columns[encoder.name]) for encoder in self.encoders], axis=1)
        y = self._targets(columns[self.target]) if labelled else torch.zeros(len(x))
        return Images(torch.tensor(x, dtype=torch.float32), y)

    def _targets(self, values: list[str]) -> Tensor:
        gaps = [i for i, value in enumerate(values) if is_missing(value)]
        if gaps:
            raise ValueError(
                f"expected a target in every row, got {len(gaps)} of {len(values)} rows without {self.target!r}: drop "
                "these rows; rows to predict belong in a file of their own (predict=...)"
            )
        if self.task == "regression":
            return torch.tensor(_numbers(self.target, values), dtype=torch.float32)
        new = sorted(set(values) - set(self.classes))
        if new:
            raise ValueError(f"expected classes {', '.join(self.classes)} in {self.target!r}, got {', '.join(new)} too")
        return torch.tensor([self.classes.index(value) for value in values])


def _take(columns: Columns, rows: Sequence[int]) -> Columns:
    return {name: [values[i] for i in rows] for name, values in columns.items()}
