"""Columns of a CSV file: read as text, then turned into numbers by scikit-learn's transformers."""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils.missing import is_missing

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
    names = [name.strip() for name in lines[0]]
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


# -- what a text is ---------------------------------------------------------------------------------------------------


class Notation(NamedTuple):
    """A way to write values that looks like text and is meant as numbers."""

    name: str
    pattern: re.Pattern[str]
    advice: str


NOTATIONS = (
    Notation(
        "dates",
        re.compile(
            r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/])\d{1,2}\3(\d{4}|\d{2})|\d{1,2}\.\d{1,2}\.\d{4})"
            r"([T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*(Z|[+-]\d{2}:?\d{2}|[AaPp][Mm])?)?"
        ),
        "turn them into numbers, such as the days since a date",
    ),
    Notation(
        "numbers with thousands separators or decimal commas",
        re.compile(r"[+-]?(\d{1,3}([,' \u00a0\u202f]\d{3})+(\.\d+)?|(\d+|\d{1,3}(\.\d{3})+),\d+|\d{1,3}(\.\d{3}){2,})"),
        "write thousands without a separator and decimals with a point",
    ),
)


def is_text(value: str) -> bool:
    """Whether it is neither a number (infinite ones included) nor missing."""
    try:
        float(value)
    except ValueError:
        return not is_missing(value)
    return False


def category(value: str) -> str:
    """The category of a text; all ways to write a missing value are one."""
    return "missing" if is_missing(value) else value


def recognise(texts: Sequence[str]) -> Notation | None:
    """The notation in which all of these texts, one at the least, are written; None if there is none."""
    return next((n for n in NOTATIONS if texts and all(map(n.pattern.fullmatch, texts))), None)


def numbers(name: str, values: Sequence[str], otherwise: str = "name the column in categorical") -> Floats:
    """Parse finite numbers (N,), with NaN where missing; `otherwise` ends the advice of the error for other values."""
    x = np.array([math.nan if is_missing(v) else math.inf if is_text(v) else float(v) for v in values])
    if np.isinf(x).any():
        bad = values[int(np.argmax(np.isinf(x)))]
        notation = recognise([bad])
        what, advice = (f"{bad!r} ({notation.name})", notation.advice) if notation else (repr(bad), "fix the value")
        raise ValueError(f"expected finite numbers in column {name!r}, got {what}: {advice}, or {otherwise}")
    return x


# -- encoding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoder:
    """How one column becomes numbers, learned from training rows."""

    name: str  # The name of the column
    features: tuple[str, ...]  # The names of the d columns of numbers that it becomes
    cells: Callable[[Sequence[str]], NDArray[Any]]  # Turns the N texts into what `transformer` takes, (N, 1)
    transformer: Any  # A fitted transformer of scikit-learn, (N, 1) → (N, d)

    def encode(self, values: Sequence[str]) -> Floats:
        """Turns N texts of the column into numbers (N, d)."""
        return np.asarray(self.transformer.transform(self.cells(values)), dtype=np.float64)

    def unseen(self, values: Sequence[str]) -> list[str]:
        """Those of these texts that are categories which no training row had."""
        if not hasattr(self.transformer, "categories_"):
            return []
        known = set(self.transformer.categories_[0])
        return [text for text in map(category, values) if text not in known]


def numeric_encoder(name: str, values: Sequence[str]) -> Encoder:
    """Standardise by the training rows; a missing value is their mean, and marked where training rows miss some."""
    from sklearn.impute import SimpleImputer  # a second, which commands without a table can spare
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def cells(texts: Sequence[str]) -> Floats:
        return numbers(name, texts)[:, None]

    # The scaler leaves gaps alone and comes first: after it the mean is 0, and the indicator stays 0 or 1.
    imputer = SimpleImputer(strategy="constant", fill_value=0.0, add_indicator=True)
    with np.errstate(over="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        transformer = make_pipeline(StandardScaler(), imputer).fit(cells(values))
    if not np.isfinite(transformer[0].var_).all():  # the whole column would become 0
        largest = max((v for v in values if not is_missing(v)), key=lambda v: abs(float(v)))
        raise ValueError(
            f"expected numbers whose squares fit into 64 bits in column {name!r}, got {largest}: fix the value, or "
            "drop the column"
        )
    marked = len(transformer.get_feature_names_out()) > 1
    return Encoder(name, (name, f"{name} missing") if marked else (name,), cells, transformer)


def categorical_encoder(name: str, values: Sequence[str]) -> Encoder:
    """One column of zeros and ones for each category of the training rows; a category never seen is all zeros."""
    from sklearn.preprocessing import OneHotEncoder

    def cells(texts: Sequence[str]) -> NDArray[Any]:
        return np.array([category(text) for text in texts], dtype=object)[:, None]

    transformer = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(cells(values))
    return Encoder(name, tuple(f"{name}={known}" for known in transformer.categories_[0]), cells, transformer)


def fit_encoders(
    columns: TextColumns,
    *,
    categorical: Sequence[str] = (),
    missing: Literal["impute", "refuse"] = "impute",
    max_categories: int = 50,
) -> list[Encoder]:
    """How to turn each column into numbers, learned from training rows alone; a constant column is left out.

    One transformer a column, not a `ColumnTransformer`: it keeps the order and the names of the columns, and takes any
    text as a name.

    Args:
        columns: The training rows, name → texts.
        categorical: The columns that are categories whatever they hold. Of the others, those are that hold anything
            but numbers and missing values; dates, and numbers in a notation that is not read, are refused.
        missing: "impute", or "refuse" to stop at the first column with a gap.
        max_categories: The largest number of categories of one column.
    """
    encoders = []
    for name, values in columns.items():
        gaps = sum(map(is_missing, values))
        if gaps and missing == "refuse":
            raise ValueError(
                f"expected no missing values, got {gaps} of {len(values)} in column {name!r}: fill them, drop the "
                "column, or set missing='impute'"
            )
        categories = {category(value) for value in values}
        if len(categories) == 1:  # however a missing value is written
            continue
        texts = [value for value in values if is_text(value)]
        if name not in categorical and not texts:
            encoders.append(numeric_encoder(name, values))
            continue
        notation = None if name in categorical else recognise(texts)
        if notation:
            raise ValueError(
                f"expected numbers or categories in column {name!r}, got {notation.name} such as {texts[0]!r}: "
                f"{notation.advice}, drop the column, or name it in categorical"
            )
        if len(categories) > max_categories:
            raise ValueError(
                f"expected at most {max_categories} categories, got {len(categories)} in column {name!r}: name it in "
                "id if it tells rows apart, drop it, or raise max_categories"
            )
        encoders.append(categorical_encoder(name, values))
    if not encoders:
        raise ValueError("expected columns that vary to learn from, got none: check `target`, `drop` and the file")
    return encoders


def encode(encoders: Sequence[Encoder], columns: TextColumns) -> Floats:
    """All encoded columns side by side, (N, d)."""
    return np.concatenate([encoder.encode(columns[encoder.name]) for encoder in encoders], axis=1)
