"""`BatchPredictor`: an exported folder as a function of batches, as Ray, Spark and loops of one's own call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl.serving.folder import FEATURES, ExportedModel
from brainet_pl.serving.tables import encode_columns

Batch = Mapping[str, NDArray[Any]]
Columns = dict[str, NDArray[Any]]
Prepare = Callable[[slice], Columns]  # the rows of a batch → tensors by the names of inputs

ERROR = "error"
IMAGES = ("image", "bytes", "path")  # columns that are looked for where a model takes images; Ray calls them so
UNREADABLE = (ValueError, TypeError, OSError, OverflowError)  # what a bad row raises


class BatchPredictor:
    """Answers batches of columns with batches of columns, by the model in an exported folder; needs no torch.

    A batch is `{name: array of B values}`, and so is the answer, of flat types: `class`, `class_name`, `probabilities`
    (B, C), `known`, `known_p`, `set` ("0 3": the numbers of its classes), `mean`, `std` and so on, scores, and `error`,
    which is "" for a row that was answered. A row that can't be read has `known` false, class -1 and NaN.

    A row gets the same answer to the last bit whatever batch it is in. An object is pickled by its settings; the model
    is loaded when it is first asked, once in each process.

    Args:
        folder: what `brainet export` or `export_folder` wrote, at the same place on all machines.
        columns: where the input is. One name is the column that holds it: numbers (B, …), encoded image files as bytes,
            paths of image files, or decoded images (H, W, C) of uint8. Several names are numbers, one a column, in the
            order of the input. None finds them: columns by the names of the table that the model was fitted on, by the
            names of its inputs, or `image`, `bytes` or `path`.
        keep: columns of the batch that the answer has too, such as a key.
        scores: the scores that the answer has, by name; None is all.
        class_columns: give probabilities as one column a class, `probabilities_cat`, in place of one column of lists.
        on_error: "row" goes on after a row that can't be read, "raise" ends with its number and file.
        providers: what onnxruntime computes with, such as ("CUDA", "CPU"); the first one that can goes first.
        threads: of onnxruntime; None is its own choice, for a machine with one worker.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        columns: str | Sequence[str] | None = None,
        keep: Sequence[str] = (),
        scores: Sequence[str] | None = None,
        class_columns: bool = False,
        on_error: Literal["row", "raise"] = "row",
        providers: Sequence[str] = ("CPU",),
        threads: int | None = 1,
    ) -> None:
        self.folder = str(folder)
        self.columns = columns if columns is None or isinstance(columns, str) else tuple(columns)
        self.keep, self.scores = tuple(keep), None if scores is None else tuple(scores)
        self.class_columns = checks.flag("class_columns", class_columns)
        checks.one_of("on_error", on_error, ("row", "raise"))
        self.on_error = on_error
        self.providers, self.threads = tuple(providers), threads

    def __getstate__(self) -> dict[str, Any]:
        """Settings alone: a session of onnxruntime can't be sent to another process."""
        return {name: value for name, value in self.__dict__.items() if name != "model"}

    @cached_property
    def model(self) -> ExportedModel:
        """The model, once in each process."""
        model = ExportedModel(self.folder, self.threads, self.providers)
        known = [one["name"] for one in model.about["outputs"] if one["role"] == "score"]
        more = [name for name in self.scores or () if name not in known]
        if more:
            raise ValueError(f"expected scores of the model ({', '.join(known)}), got {', '.join(more)}: name others")
        if isinstance(self.columns, tuple) and len(model.inputs) > 1:
            raise ValueError(
                "expected columns=None for a model of several inputs, got columns: name them as its inputs"
            )
        return model

    def reads(self, available: Sequence[str]) -> list[str]:
        """Which columns of a table are read, but for those that are kept."""
        if self.columns is not None:
            return [self.columns] if isinstance(self.columns, str) else list(self.columns)
        if self.model.features is not None:
            return list(dict.fromkeys(feature.column for feature in self.model.features))
        names = [one["name"] for one in self.model.inputs]
        if self.model.images is not None:
            names = [name for name in (*names, *IMAGES) if name in available][:1] or names
        return names

    def answer_settings(self) -> dict[str, Any]:
        """The settings that answers depend on, as plain values."""
        return {name: getattr(self, name) for name in ("columns", "keep", "scores", "class_columns", "on_error")}

    def answer_types(self) -> dict[str, tuple[str, bool]]:
        """Name → numpy's type and whether it is a list, of the columns of an answer, but for those that are kept."""
        outputs = self.model.predict(self._filled({}, 1))
        columns = self._columns_of(outputs, [""])
        return {name: (values.dtype.name, values.ndim > 1) for name, values in columns.items()}

    def __call__(self, batch: Batch) -> Columns:
        """Columns of B rows → columns of B answers."""
        size = self._size(batch)
        tensors, errors = self._tensors(batch, size)
        outputs = self.model.predict(_with_company(tensors))
        answers = self._columns_of({name: values[:size] for name, values in outputs.items()}, errors)
        clashes = [name for name in self.keep if name in answers]
        if clashes:
            raise ValueError(f"expected kept columns of other names than the answer's, got {clashes[0]!r}: rename it")
        return {**{name: batch[name] for name in self.keep}, **answers}

    def _size(self, batch: Batch) -> int:
        missing = [name for name in self.keep if name not in batch]
        if missing:
            raise ValueError(f"expected the columns {', '.join(self.keep)} to keep, got no {missing[0]!r}: add it")
        sizes = {name: len(values) for name, values in batch.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"expected columns of one length, got {sizes or 'none'}: give a value of each a row")
        return next(iter(sizes.values()))

    # -- inputs -------------------------------------------------------------------------------------------------------

    def _tensors(self, batch: Batch, size: int) -> tuple[Columns, list[str]]:
        """Inputs as the graph takes them, and what is wrong with each row; zeros stand for a row that can't be read."""
        prepare, one_by_one = self._preparation(batch)
        if size and not one_by_one:
            try:
                return prepare(slice(0, size)), [""] * size
            except UNREADABLE:
                pass  # the rows are looked at singly, to find the bad ones
        rows, errors = self._one_by_one(prepare, batch, size)
        if len(rows) == size > 0:
            return {name: np.concatenate([rows[i][name] for i in range(size)]) for name in rows[0]}, errors
        return self._filled(rows, max(size, 1)), errors

    def _one_by_one(self, prepare: Prepare, batch: Batch, size: int) -> tuple[dict[int, Columns], list[str]]:
        """The rows that can be prepared, by their numbers, and what is wrong with each of the others."""
        rows: dict[int, Columns] = {}
        errors = [""] * size
        for i in range(size):
            try:
                rows[i] = prepare(slice(i, i + 1))
            except UNREADABLE as error:
                errors[i] = " ".join(str(error).split()) or type(error).__name__
                if self.on_error == "raise":
                    raise ValueError(f"{_place(batch, i, self.keep)}: {errors[i]}") from error
        return rows, errors

    def _filled(self, rows: Mapping[int, Columns], size: int) -> Columns:
        """Prepared rows at their places among zeros."""
        tensors: Columns = {}
        for one in self.model.inputs:
            name = one["name"]
            usual = tuple(1 if side is None else side for side in one["shape"][1:])
            shape = next((row[name].shape[1:] for row in rows.values()), usual)
            tensors[name] = np.zeros((size, *shape), dtype=one["dtype"])
            for i, row in rows.items():
                tensors[name][i] = row[name][0]
        return tensors

    def _preparation(self, batch: Batch) -> tuple[Prepare, bool]:
        """How rows of a batch become tensors, and whether they do so singly."""
        model, features, names = self.model, self.model.features, [one["name"] for one in self.model.inputs]
        if features is not None and self.columns is None:
            columns = self._named(batch, self.reads(()))
            (name,) = names
            return lambda rows: model.tensors({name: encode_columns(features, _sliced(columns, rows))}), False
        if isinstance(self.columns, tuple):
            chosen = self._named(batch, self.columns)
            return lambda rows: model.tensors(_stacked(_sliced(chosen, rows))), False
        if model.images is not None:
            (name,) = self.reads(list(batch))
            cells = self._named(batch, (name,))[name]
            if _holds_images(cells):
                return lambda rows: model.tensors(self._image(cells[rows.start])[None]), True
            return lambda rows: model.tensors(_dense(cells[rows])), False
        by_name = self._named(batch, self.reads(()))
        inputs = dict(zip(names, by_name.values(), strict=True))
        return lambda rows: model.tensors({name: _dense(cells[rows]) for name, cells in inputs.items()}), False

    def _named(self, batch: Batch, names: Sequence[str]) -> Columns:
        missing = [name for name in names if name not in batch]
        if missing:
            raise ValueError(
                f"expected the columns {', '.join(names)}, got {', '.join(batch)}: add {missing[0]!r}, or say by "
                "columns= where the input is"
            )
        return {name: np.asarray(batch[name]) for name in names}

    def _image(self, cell: Any) -> NDArray[np.float32]:
        """A cell with an image, as bytes, path or pixels, as the graph takes it."""
        steps = self.model.images
        assert steps is not None
        if isinstance(cell, np.ndarray):
            return steps.of_pixels(cell)
        if isinstance(cell, str):
            return steps(Path(cell).read_bytes())
        if not isinstance(cell, bytes | bytearray | memoryview):
            raise ValueError(f"expected an image as bytes, path or pixels, got {checks.shown(cell)}: correct it")
        return steps(bytes(cell))

    # -- answers ------------------------------------------------------------------------------------------------------

    def _columns_of(self, outputs: Columns, errors: Sequence[str]) -> Columns:
        """Outputs of the graph as flat columns; rows with an error are as those of NaN: they have no class."""
        texts = np.array(errors, dtype=object)
        bad = texts != ""
        roles = {one["name"]: one["role"] for one in self.model.about["outputs"]}
        found: Columns = {}
        for name, values in outputs.items():
            if roles[name] == FEATURES or (roles[name] == "score" and name not in (self.scores or roles)):
                continue
            if bad.any():
                values = values.copy()
                values[bad] = _without_answer(name, values)
            found |= self._flat(name, values)
        return {**found, ERROR: texts}

    def _flat(self, name: str, values: NDArray[Any]) -> Columns:
        names = self.model.class_names
        if name == "class" and names is not None:
            known = np.array([*names, ""], dtype=object)  # class -1 is the last one
            return {name: values, "class_name": known[values]}
        if values.ndim == 2 and values.dtype == bool:
            return {name: _set_texts(values)}
        if values.ndim == 2 and self.class_columns:
            labels = names or [str(c) for c in range(values.shape[1])]
            return {f"{name}_{label}": values[:, c] for c, label in enumerate(labels)}
        return {name: values}


def columns_of_frame(frame: Any) -> Columns:
    """A table of pandas as columns of numpy."""
    return {str(name): np.asarray(frame[name]) for name in frame.columns}


def frame_of_columns(columns: Batch) -> Any:
    """Columns as a table of pandas; of an array (B, n), a cell is a row (n,)."""
    import pandas as pd

    return pd.DataFrame({name: list(values) if values.ndim > 1 else values for name, values in columns.items()})


def _set_texts(sets: NDArray[np.bool_]) -> NDArray[Any]:
    """Sets (B, C) as texts (B,), "0 3"; each set that occurs is written once.

    >>> _set_texts(np.array([[True, False, True], [False, False, False]])).tolist()
    ['0 2', '']
    """
    packed = np.packbits(sets, axis=1)
    _, first, place = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    texts = np.array([" ".join(map(str, np.flatnonzero(sets[i]))) for i in first], dtype=object)
    return texts[place.reshape(-1)]


def _with_company(tensors: Columns) -> Columns:
    """A lone row twice: onnxruntime multiplies a single row in another order, and rounds otherwise."""
    return {name: np.repeat(tensor, 2, axis=0) if len(tensor) == 1 else tensor for name, tensor in tensors.items()}


def _without_answer(name: str, values: NDArray[Any]) -> Any:
    """What the graph says of NaN: no class is excluded, none is predicted, and nothing is known."""
    if values.dtype == bool:
        return values.ndim == 2  # a set of all classes; a verdict of none
    if values.dtype.kind == "f":
        return 0.0 if name == "known_p" else np.nan
    return -1


def _holds_images(cells: NDArray[Any]) -> bool:
    """Whether cells are files or pixels, which are prepared, and no numbers that are already."""
    if cells.dtype.kind in "SUu" or not len(cells):
        return cells.dtype.kind in "SU" or cells.dtype == np.uint8
    first = next((cell for cell in cells if cell is not None), b"") if cells.dtype == object else cells[0]
    return isinstance(first, str | bytes | bytearray | memoryview) or getattr(first, "dtype", None) == np.uint8


def _sliced(columns: Batch, rows: slice) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


def _dense(cells: NDArray[Any]) -> NDArray[Any]:
    """Cells of lists or arrays, of one shape, as one array (B, …)."""
    if cells.dtype != object:
        return cells
    rows = [np.asarray(cell) for cell in cells]
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise ValueError(f"expected values of one shape in a column, got {sorted(shapes)}: correct them")
    return np.stack(rows)


def _stacked(columns: Columns) -> NDArray[Any]:
    """Columns (B,) of numbers as one array (B, d)."""
    return np.stack(list(columns.values()), axis=1)


def _place(batch: Batch, row: int, keep: Sequence[str]) -> str:
    """Where a row is: its number in the batch, its file or key."""
    names = [name for name in (*keep, "path", "file") if name in batch]
    texts = [name for name, cells in batch.items() if isinstance(cells[row], str) and name not in names]
    shown = [f"{name} {batch[name][row]}" for name in dict.fromkeys((*names, *texts[:1]))]
    return ", ".join([f"row {row} of the batch", *shown])
