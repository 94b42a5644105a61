"""Any CSV file with a target column: numeric and categorical columns, missing values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl._utils.framework import rank_zero_info, rank_zero_warn
from brainet_pl._utils.missing import is_missing
from brainet_pl.datamodules import columns as csv_columns
from brainet_pl.datamodules.base import Samples, SplitData, check_share
from brainet_pl.datamodules.columns import Encoder, TextColumns
from brainet_pl.datamodules.shifts import Shifts
from brainet_pl.features import identity
from brainet_pl.tables import Column, read_column
from brainet_pl.tables.cells import plain_number
from brainet_pl.tables.frame import about_unread, notes_of

AUTO = "auto"
FEW_CLASSES = 10  # whole numbers with at most as many values are taken as classes
ID_NAMES = frozenset(
    {"id", "index", "row", "row_id", "rowid", "uuid", "key", "unnamed: 0", "no", "nr"}
)  # in lower case
FAR = 1e6  # training standard deviations; a network that never saw such a value can only extrapolate


class FileRows(NamedTuple):
    """Some rows of a file: its columns as text, its path, and the place of each row, where the names are row 1."""

    columns: TextColumns
    file: str
    places: list[int]

    def take(self, chosen: Sequence[int]) -> FileRows:
        """The chosen rows, counted from 0."""
        columns = {name: [values[i] for i in chosen] for name, values in self.columns.items()}
        return FileRows(columns, self.file, [self.places[i] for i in chosen])


@identity.plain
class TableSamples(Samples):
    """Rows of a table, with what `predictions.csv` tells of each beside its prediction.

    Args:
        x: The encoded rows, (N, d).
        y: The targets, (N,).
        told: Columns by name, each with a text or a number for each of the N rows.
    """

    def __init__(self, x: Tensor, y: Tensor, told: Mapping[str, Sequence[object]]) -> None:
        super().__init__(x, y)
        self.told = dict(told)

    def identity(self) -> dict[str, Any]:
        """What determines the samples; where rows stood in their file does not."""
        return {"x": self.x, "y": self.y}


class Table(SplitData):
    """A CSV file with a line of names. Inputs are encoded by training rows alone; a number as target keeps its units.

    Missing numbers become the training mean and, where training rows miss some, get an indicator column beside them;
    a missing category is a category. Rows without a target are refused. ISO dates are days since 1970; thousands
    separators, decimal commas and signs such as "$" are read by column; of more than `max_categories` categories the
    rarest count as one. What was read in a way that could be another is told. `predictions.csv` has the place of each
    row in its file, `row`, where the line of names is row 1.

    Args:
        file: The CSV file with training rows and, without `test`, test rows.
        target: The name of the column to predict.
        task: What is predicted: "regression" a number, "classification" one class for each value of the target; "auto"
            takes text as classes, and whole numbers too if there are at most 10 values that are repeated.
        test: The CSV file with test rows; None holds out `test_fraction` of `file`, the same for every `seed`.
        test_fraction: The share of `file` that is the test set, between 0 and 1; unused with `test`.
        predict: The CSV file with rows to predict, which may have no target; None predicts the test rows.
        id: The name of the column that tells rows apart, such as a number of a patient. It is no input, and stands in
            `predictions.csv` as `id`; None has no such column.
        drop: The names of columns to leave out.
        categorical: The names of columns to be taken as categories, even if they hold numbers or dates.
        missing: What a gap means: "impute" fills it, "refuse" stops at the first column with one.
        max_categories: The largest number of categories of one column that are read one by one.
        delimiter: The character between values, such as "," or ";" or a tab.
        encoding: The encoding of all files; "utf-8" reads files with and without a byte-order mark.
        batch_size: The number of samples in a batch, at least 2 because batch norm can't train on one.
        num_workers: The number of processes that load batches; 0 loads them in the main process.
        val_fraction: The share of training rows that is held out for validation, between 0 and 1.
        seed: The seed of the validation split; the test rows do not depend on it.
        shifts: The shifts of the test set to evaluate too: corruptions × severities; None has none.

    Attributes:
        encoders: How each column that varies becomes numbers, once the files are read.
        classes: The classes in the order of their numbers, once the files are read; empty for a regression.
    """

    def __init__(
        self,
        file: str,
        target: str,
        task: Literal["auto", "regression", "classification"] = "auto",
        test: str | None = None,
        test_fraction: float = 0.1,
        predict: str | None = None,
        id: str | None = None,
        drop: Sequence[str] = (),
        categorical: Sequence[str] = (),
        missing: Literal["impute", "refuse"] = "impute",
        max_categories: int = 50,
        delimiter: str = ",",
        encoding: str = "utf-8",
        batch_size: int = 32,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
        shifts: Shifts | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed, shifts=shifts)
        check_share("test_fraction", test_fraction)
        checks.one_of("task", task, (AUTO, "regression", "classification"), "choose one of the list")
        checks.one_of("missing", missing, ("impute", "refuse"), "choose one of the list")
        check_format(delimiter, encoding)
        for setting, names in (("drop", drop), ("categorical", categorical)):
            if isinstance(names, str):  # else its letters would be the names
                raise ValueError(f"expected {setting} to be a list of columns, got {names!r}: write [{names!r}]")
            if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"expected {setting} to be a list of columns, got {checks.shown(names)}: write names")
        self.file, self.target, self.task = file, target, str(task)
        self.name = Path(file).stem  # as loggers call the data
        self.delimiter, self.encoding = delimiter, encoding
        self.test_file, self.predict_file, self.test_fraction = test, predict, test_fraction
        if id is not None and (not isinstance(id, str) or id == target):
            raise ValueError(f"expected id to be the name of a column other than the target, got {checks.shown(id)}")
        self.id = id
        self.drop, self.categorical = tuple(drop), tuple(categorical)
        self.missing = missing
        self.max_categories = checks.whole("max_categories", max_categories, 1, hint="raise it, or drop columns")
        self.encoders: list[Encoder] = []
        self.classes: list[str] = []
        self._warned_of_ids = False
        self._said_of_unseen: set[str] = set()

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
        everything = self._read(self.file)
        self._check_names(everything.columns)
        if self.task == AUTO:
            self.task = task_of(everything.columns[self.target])
        train, val, test = (everything.take(part) for part in self._parts(len(everything.places)))
        apart = {self.target, self.id, *self.drop}
        inputs = {name: values for name, values in train.columns.items() if name not in apart}
        self._warn_of_ids(inputs)
        self.encoders = csv_columns.fit_encoders(
            inputs, categorical=self.categorical, missing=self.missing, max_categories=self.max_categories
        )
        self._tell_notes()
        self.classes = sorted(set(everything.columns[self.target])) if self.task == "classification" else []
        self.class_names = tuple(self.classes)
        parts = {"val": val, "test": self._read(self.test_file) if self.test_file else test}
        if self.predict_file:
            parts["predict"] = self._read(self.predict_file)
        samples = {name: self._samples(rows, labelled=name != "predict") for name, rows in parts.items()}
        self.train_set = self.structure_set = self._samples(train)
        self.val_set, self.test_set = samples["val"], samples["test"]
        self.predict_set = samples.get("predict", self.test_set)
        warn_of_far_values(list(chain.from_iterable(self._far(samples[name].x, parts[name]) for name in parts)))
        if stage in ("test", "predict"):
            self._warn_of_unseen(parts.get(stage, parts["test"]))

    def _read(self, file: str) -> FileRows:
        columns = csv_columns.read_csv(file, self.delimiter, self.encoding)
        count = len(next(iter(columns.values())))
        return FileRows(columns, file, list(range(2, count + 2)))

    def _check_names(self, columns: TextColumns) -> None:
        unknown = {self.target, *self.drop, *self.categorical, *([self.id] if self.id else [])} - set(columns)
        if unknown:
            raise ValueError(
                f"expected columns of {self.file} ({', '.join(columns)}), got {', '.join(sorted(unknown))}: correct "
                "target, id, drop or categorical"
            )

    def _warn_of_ids(self, inputs: TextColumns) -> None:
        """A column that only numbers the rows teaches nothing, and predictions would hang on it."""
        ids = [n for n, values in inputs.items() if n.lower() in ID_NAMES and len(set(values)) == len(values) > 1]
        if ids and not self._warned_of_ids:
            self._warned_of_ids = True
            rank_zero_warn(
                f"expected inputs that say something of a row, got {', '.join(map(repr, ids))}, different in every "
                "row: name it in id to find rows again in predictions.csv, or in drop"
            )

    def _tell_notes(self) -> None:
        """Say once how columns were read that could have been read otherwise."""
        said = notes_of([encoder.column for encoder in self.encoders])
        if said is not None and said not in self._said_of_unseen:
            self._said_of_unseen.add(said)
            rank_zero_warn(said)

    def _warn_of_unseen(self, rows: FileRows) -> None:
        """Say once of a file which of its categories no training row had, and which text is in columns of numbers."""
        unread = [encoder.unread(rows.columns[encoder.name]) for encoder in self.encoders]
        said = about_unread([encoder.column for encoder in self.encoders], unread, f" of {rows.file}")
        if said is not None and said not in self._said_of_unseen:
            self._said_of_unseen.add(said)
            rank_zero_warn(said)

    def _parts(self, count: int) -> tuple[list[int], list[int], list[int]]:
        """Rows of `file` for training, validation and test; the last do not depend on the seed."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
        held = 0 if self.test_file else max(1, round(self.test_fraction * count))
        rest, test = sorted(order[held:]), sorted(order[:held])
        train, val = ([rest[i] for i in part] for part in self.split(len(rest)))
        return train, val, test

    def _samples(self, rows: FileRows, labelled: bool = True) -> Samples:
        """Encoded rows (N, d) and targets (N,)."""
        absent = {encoder.name for encoder in self.encoders} | ({self.target} if labelled else set())
        absent = (absent | ({self.id} if self.id else set())) - set(rows.columns)
        if absent:
            raise ValueError(
                f"expected the columns of {self.file} in every file, got none of {', '.join(sorted(absent))} in "
                f"{rows.file}: add them, or drop them"
            )
        if self.missing == "refuse":
            self._refuse_gaps(rows)
        x = torch.tensor(csv_columns.encode(self.encoders, rows.columns), dtype=torch.float32)
        lost = (~x.isfinite()).nonzero().tolist()
        if lost:
            i, j = lost[0]
            raise ValueError(
                f"expected numbers whose distance from the training mean fits into 32 bits, got {len(lost)} that do "
                f"not, the first in column {self.feature_names[j]!r}, row {rows.places[i]} of {rows.file}: fix the "
                "values, or drop the column or the rows"
            )
        told: dict[str, Sequence[object]] = {"row": rows.places}
        if self.id:
            told["id"] = rows.columns[self.id]
        return TableSamples(x, self._targets(rows.columns[self.target]) if labelled else torch.zeros(len(x)), told)

    def _refuse_gaps(self, rows: FileRows) -> None:
        for encoder in self.encoders:
            gaps = sum(map(is_missing, rows.columns[encoder.name]))
            if gaps:
                raise ValueError(
                    f"expected no missing values, got {gaps} in column {encoder.name!r} of {rows.file}: fill them, "
                    "or set missing='impute'"
                )

    def _targets(self, values: list[str]) -> Tensor:
        gaps = sum(map(is_missing, values))
        if gaps:
            raise ValueError(
                f"expected a target in every row, got {gaps} of {len(values)} rows without {self.target!r}: drop "
                "these rows; rows to predict belong in a file of their own (predict=...)"
            )
        if self.task == "regression":
            y = torch.tensor(target_numbers(self.target, values), dtype=torch.float32)
            if not y.isfinite().all():
                large = values[int((~y.isfinite()).int().argmax())]
                raise ValueError(
                    f"expected targets that fit into 32 bits in {self.target!r}, got {large}: drop these rows, or give "
                    "the target in larger units"
                )
            return y
        new = sorted(set(values) - set(self.classes))
        if new:
            raise ValueError(
                f"expected classes {', '.join(self.classes)} in {self.target!r}, got {', '.join(new)} too: drop rows "
                f"of classes that {self.file} does not have"
            )
        return torch.tensor([self.classes.index(value) for value in values])

    def _far(self, x: Tensor, rows: FileRows) -> list[str]:
        """The cells whose encoded value lies farther than `FAR` from the training mean, in words."""
        names = self.feature_names
        return [
            f"{rows.columns[names[j]][i]} in column {names[j]!r}, row {rows.places[i]} of {rows.file}"
            for i, j in (x.abs() > FAR).nonzero().tolist()
        ]


def task_of(values: Sequence[str]) -> str:
    """What a column of texts is the target of: "classification" or "regression".

    >>> task_of(["yes", "no"]), task_of(["0.5", "2"]), task_of(["0", "1", "1", "0"]), task_of(["1", "2", "3"])
    ('classification', 'regression', 'classification', 'regression')
    """
    column = read_target("target", values)
    if column.kind != "number":
        return "classification" if column.kind == "category" else "regression"  # which says that dates are no numbers
    known = column.encode([value for value in values if not is_missing(value)]).numbers.ravel().tolist()
    whole = all(float(value).is_integer() for value in known)
    few = len(set(known)) <= min(FEW_CLASSES, len(known) // 2)
    return "classification" if whole and few else "regression"


def read_target(name: str, values: Sequence[str]) -> Column:
    """How a column of targets is read: classes may be as many as there are rows."""
    return read_column(name, values, most=len(values))


def target_numbers(name: str, values: Sequence[str]) -> list[float]:
    """Targets of a regression as finite numbers, in the notation that fits all of them."""
    column = read_target(name, values)
    found = column.encode(values).numbers.ravel().tolist() if column.kind == "number" else []
    bad = [text for text, number in zip(values, found, strict=False) if not math.isfinite(number)]
    if bad or not found:
        shown = bad[0] if bad else next((text for text in values if plain_number(text) is None), values[0])
        raise ValueError(
            f"expected finite numbers in column {name!r}, got {shown!r}: fix the value, or set task='classification'"
        )
    return found


def read_task(settings: Mapping[str, Any]) -> tuple[str, int]:
    """What the settings of a `Table` say is predicted, and how many classes there are, 0 for a regression."""
    given = {name: settings[name] for name in ("delimiter", "encoding") if settings.get(name) is not None}
    columns = csv_columns.read_csv(settings["file"], **given)
    target, task = settings["target"], settings.get("task") or AUTO
    if target not in columns:
        raise ValueError(
            f"expected the target to be a column of {settings['file']} ({', '.join(columns)}), got {target!r}: correct "
            "--data.target"
        )
    kind = task_of(columns[target]) if task == AUTO else str(task)
    classes = len(set(columns[target])) if kind == "classification" else 0
    rank_zero_info(
        f"{kind} of {target!r}, {f'{classes} classes' if classes else 'a number'}"
        + ("; set data.task if it is meant otherwise" if task == AUTO else "")
    )
    return kind, classes


def check_format(delimiter: str, encoding: str) -> None:
    """Refuse a delimiter or an encoding that no file can have."""
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '\r\n"':
        raise ValueError(f"expected delimiter to be one character, got {delimiter!r}: write ',', ';' or a tab")
    try:
        "a".encode(encoding).decode(encoding)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected encoding to be one that Python knows, got {encoding!r}: write 'utf-8' or 'latin-1'"
        ) from error


def warn_of_far_values(cells: Sequence[str]) -> None:
    """One warning for all cells: a single one of them may decide an average over all rows."""
    if cells:
        more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
        rank_zero_warn(
            f"expected values within {FAR:,.0f} training standard deviations of the training mean, got "
            f"{'; '.join(cells[:3])}{more}: fix the values or drop the rows, for predictions there mean nothing"
        )
