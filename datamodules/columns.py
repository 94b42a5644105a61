"""Columns of a CSV file: read as text, then turned into numbers by what training rows hold."""

from __future__ import annotations

import codecs
import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils.missing import is_missing
from brainet_pl.tables import MOST_CATEGORIES, Column, read_column
from brainet_pl.tables.cells import texts_of
from brainet_pl.tables.column import MISSING

Floats = NDArray[np.float64]
TextColumns = dict[str, list[str]]

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}


# -- reading ----------------------------------------------------------------------------------------------------------


def read_csv(path: str | Path, delimiter: str = ",", encoding: str = "utf-8") -> TextColumns:
    """Read name → values as text, without blanks around them; the first line names the columns.

    A byte-order mark of UTF-8 is skipped.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"expected a CSV file at {path}, found none: check the path")
    text = decode(Path(path).read_bytes(), encoding, str(path))
    try:
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if line]
    except csv.Error as error:
        raise ValueError(f"expected lines of values in {path}, got what is no CSV ({error}): check quotes") from error
    if len(lines) < 2:
        raise ValueError(
            f"expected a line of names and then rows in {path}, got {len(lines)} lines: add the names or the rows"
        )
    check_delimiter(lines, delimiter, str(path))
    names = list(map(str.strip, lines[0]))
    if len(set(names)) < len(names):
        raise ValueError(f"expected columns of different names in {path}, got {', '.join(names)}: rename the doubles")
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(names):
            raise ValueError(
                f"expected {len(names)} values in row {number} of {path}, got {len(line)}: check the delimiter "
                f"({delimiter!r}) and the quotes"
            )
    return {name: [line[j].strip() for line in lines[1:]] for j, name in enumerate(names)}


def decode(data: bytes, encoding: str, path: str) -> str:
    """Text of a file's bytes, or an error that names the encoding to try."""
    skips_mark = codecs.lookup(encoding).name == "utf-8"
    try:
        return data.decode("utf-8-sig" if skips_mark else encoding)
    except UnicodeDecodeError as error:
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise ValueError(
            f"expected {path} to be encoded as {encoding}, got the byte 0x{data[error.start]:02x} at position "
            f"{error.start}: set encoding='{'utf-16' if wide else 'latin-1'}', or save the file as UTF-8"
        ) from error


def check_delimiter(lines: Sequence[Sequence[str]], delimiter: str, path: str) -> None:
    """Refuse lines that were split into a single column while another delimiter stands in its name and values."""
    if len(lines[0]) != 1:
        return
    (header,) = lines[0]
    likely = max(DELIMITERS, key=header.count)
    if likely in header and any(likely in value for value in lines[1]):
        raise ValueError(
            f"expected columns separated by {delimiter!r} in {path}, got the single column {header!r}: set "
            f"delimiter={likely!r} ({DELIMITERS[likely]})"
        )


# -- encoding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoder:
    """How one column becomes numbers, learned from training rows.

    Attributes:
        column: how its cells are read.
        center: the mean of the training rows, of a number or date.
        scale: their deviation.
        marked: whether a column beside it says where a value is missing.
    """

    column: Column
    center: float = 0.0
    scale: float = 1.0
    marked: bool = False

    @property
    def name(self) -> str:
        """The name of the column."""
        return self.column.name

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the d columns of numbers that it becomes."""
        return (*self.column.names(), *([f"{self.name} missing"] if self.marked else []))

    def encode(self, values: Sequence[str]) -> Floats:
        """Turns N texts of the column into numbers (N, d)."""
        numbers = self.column.encode(values).numbers
        if self.column.kind == "category":
            return numbers
        gaps = np.isnan(numbers)
        scaled = np.where(gaps, 0.0, (_finite(self.name, numbers, values) - self.center) / self.scale)
        return np.concatenate([scaled, gaps.astype(np.float64)], axis=1) if self.marked else scaled

    def unread(self, values: Sequence[str]) -> list[str]:
        """Those of these texts that are categories which no training row had, or no numbers."""
        return self.column.encode(values).unread


def _finite(name: str, numbers: Floats, values: Sequence[str]) -> Floats:
    infinite = np.isinf(numbers).ravel()
    if infinite.any():
        raise ValueError(
            f"expected finite numbers in column {name!r}, got {values[int(infinite.argmax())]!r}: fix the value, or "
            "name the column in categorical"
        )
    return numbers


def learn_encoder(column: Column, values: Sequence[str]) -> Encoder:
    """Standardise a number or date by the training rows; a missing one is their mean, and marked where some miss it."""
    if column.kind == "category":
        return Encoder(column)
    numbers = _finite(column.name, column.encode(values).numbers, values).ravel()
    known = numbers[~np.isnan(numbers)]
    with np.errstate(over="ignore", invalid="ignore"):
        center, scale = float(known.mean()), float(known.std())
    if not math.isfinite(scale):  # the whole column would become 0
        largest = max((text for text in values if not is_missing(text)), key=lambda text: abs(float(text)))
        raise ValueError(
            f"expected numbers whose squares fit into 64 bits in column {column.name!r}, got {largest}: fix the value, "
            "or drop the column"
        )
    varies = known.max() > known.min()
    return Encoder(column, center, scale if varies else 1.0, len(known) < len(numbers))


def fit_encoders(
    columns: TextColumns,
    *,
    categorical: Sequence[str] = (),
    missing: Literal["impute", "refuse"] = "impute",
    max_categories: int = MOST_CATEGORIES,
) -> list[Encoder]:
    """How to turn each column into numbers, learned from training rows alone; a constant column is left out.

    Args:
        columns: The training rows, name → texts.
        categorical: The columns that are categories whatever they hold. Others are read by
            `brainet_pl.tables.read_column`.
        missing: "impute", or "refuse" to stop at the first column with a gap.
        max_categories: The largest number of categories of one column that are read one by one.
    """
    encoders = []
    for name, values in columns.items():
        gaps = sum(map(is_missing, values))
        if gaps and missing == "refuse":
            raise ValueError(
                f"expected no missing values, got {gaps} of {len(values)} in column {name!r}: fill them, drop the "
                "column, or set missing='impute'"
            )
        if len({text or MISSING for text in texts_of(values)}) == 1:  # however a missing value is written
            continue
        column = read_column(
            name,
            values,
            categorical=name in categorical,
            most=max_categories,
            advice="name it in id if it tells rows apart, drop it, or raise max_categories",
        )
        encoders.append(learn_encoder(column, values))
    if not encoders:
        raise ValueError("expected columns that vary to learn from, got none: check `target`, `drop` and the file")
    return encoders


def encode(encoders: Sequence[Encoder], columns: TextColumns) -> Floats:
    """All encoded columns side by side, (N, d)."""
    return np.concatenate([encoder.encode(columns[encoder.name]) for encoder in encoders], axis=1)
