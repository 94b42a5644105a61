"""Predictions to a file."""

from __future__ import annotations

import csv
import heapq
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from brainet_pl._utils import atomic, checks
from brainet_pl._utils.csv import neutral, write_rows
from brainet_pl._utils.framework import Callback, pl, rank_zero_info, rank_zero_warn
from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.warn import warn
from brainet_pl.callbacks.logging import log_files, run_folder
from brainet_pl.distributed.samples import Places, all_gather, on_rank_zero
from brainet_pl.explain.road import explain_batch
from brainet_pl.features.extraction import inputs_of
from brainet_pl.lightning.module import BRAINet

REASONS = 3  # columns of reasons for a verdict
MOST_MEGABYTES = 200.0  # of a file that is handed to loggers
ABANDONED = 24 * 3600.0  # seconds after which a part that nobody writes to is one of a prediction that was killed


class PredictionFile(Callback):
    """Writes what `predict_step` returns, one row a sample, to a CSV file in the run's folder.

    Columns are `loader` (its name in a dictionary of loaders, else its number), `sample` (the number of the sample in
    its loader), the columns of the loader's data set, and what the model gives. A data set gives the name of each
    sample as an attribute `files`, and further columns by name as `told`: a `Table` gives `row`, and `id` where it has
    one. A model with `class_names` also names the class, and columns of one number for each class bear their names.
    Where a model judges inputs (`known`), the number of those that look unknown is reported at the end. Rows are
    written batch by batch to a hidden part file of each process and run. When the prediction is over, the parts become
    one file in the order of the samples, whatever the number of processes, once as many rows are found as were
    predicted. Loggers that keep files get it too, up to 200 MB.

    Args:
        file: its name, without folders; "" writes none.
        explain: add columns `because_1` to `because_3`, why each input looks known or unknown, in words; a `BRAINet`
            then reads every input a second time.
    """

    def __init__(self, file: str = "predictions.csv", explain: bool = False) -> None:
        checks.file_name("file", file)
        self.file, self.explain = file, checks.flag("explain", explain)
        self._places = Places()
        self._names: list[Any] = []
        self._path, self._run = Path(), ""
        self._part: IO[str] | None = None
        self._columns: list[str] = []
        self._warned = False
        self._seen = self._nan = self._judged = self._unknown = 0

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Agree on the folder and on a name of this run, which no other prediction writes to at the same time."""
        loaders = trainer.predict_dataloaders
        count = len(loaders) if isinstance(loaders, list | tuple) else 1
        self._names = list(loaders) if isinstance(loaders, Mapping) else list(range(count))
        folder, self._run = trainer.strategy.broadcast((str(run_folder(trainer)), uuid.uuid4().hex))
        self._path = Path(folder) / self.file
        if trainer.is_global_zero:
            atomic.remove_leftovers(folder, seconds=ABANDONED)
        self._columns, self._warned = [], False
        self._seen = self._nan = self._judged = self._unknown = 0

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the rows of a batch; a tensor (B, C) becomes C columns, sets (B, C) of true and false one: "0 3"."""
        if not self.file:
            return
        if not isinstance(outputs, Mapping) or not outputs:
            if not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"not written to {self.file}: expected predict_step to return a dictionary of columns, got "
                    f"{type(outputs).__name__}"
                )
            return
        columns = as_columns(outputs, getattr(pl_module, "class_names", None))
        if self.explain and isinstance(pl_module, BRAINet):
            columns |= reasons(pl_module, inputs_of(batch, pl_module.columns))
        size = len(next(iter(columns.values())))
        numbers = self._places.of_batch(trainer, size, batch_idx, dataloader_idx).tolist()
        self._seen, self._nan = self._seen + len(numbers), self._nan + count_nan(outputs, len(numbers))
        if "known" in columns:
            verdicts = columns["known"][: len(numbers)]
            self._judged, self._unknown = self._judged + len(verdicts), self._unknown + verdicts.count(False)
        given = self._given_columns(trainer, dataloader_idx)
        columns = {**{name: [str(values[n]) for n in numbers] for name, values in given.items()}, **columns}
        file = self._open_part(trainer, list(columns))
        rows = zip(*(values[: len(numbers)] for values in columns.values()), strict=True)
        write_rows(file, ([self._names[dataloader_idx], n, *row] for n, row in zip(numbers, rows, strict=True)))

    def _given_columns(self, trainer: pl.Trainer, dataloader_idx: int) -> dict[str, Sequence[Any]]:
        """Columns that the data set of a loader gives for its samples: names of files, numbers of rows."""
        loaders: Any = trainer.predict_dataloaders
        if isinstance(loaders, Mapping):
            loaders = list(loaders.values())
        loader = loaders[dataloader_idx] if isinstance(loaders, list | tuple) else loaders
        data = getattr(loader, "dataset", None)
        files, told = getattr(data, "files", None), getattr(data, "told", None)
        found = {"file": files} if isinstance(files, Sequence) and not isinstance(files, str) else {}
        return found | (dict(told) if isinstance(told, Mapping) else {})

    def _open_part(self, trainer: pl.Trainer, columns: list[str]) -> IO[str]:
        if self._part is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._part = self._part_path(trainer.global_rank).open("x", newline="", encoding="utf-8")
            self._columns = columns
            write_rows(self._part, [["loader", "sample", *columns]])
        if columns != self._columns:
            raise ValueError(
                f"expected the same columns for all loaders, got {', '.join(self._columns)} and then "
                f"{', '.join(columns)}: predict one loader at a time"
            )
        return self._part

    def _part_path(self, rank: int) -> Path:
        return self._path.with_name(f".{self._path.name}.{rank}.{self._run}.tmp")

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make one file of the parts."""
        self._close()
        counted = all_gather((self._columns, self._seen, self._nan, self._judged, self._unknown))
        columns, *counts = zip(*counted, strict=True)  # and so all have waited until all parts are written
        seen, nan, judged, unknown = map(sum, counts)
        written = [self._part_path(rank) for rank, names in enumerate(columns) if names]
        if written:
            on_rank_zero(trainer, lambda: self._merge(written, seen))
            rank_zero_info(f"predictions: {self._path}")
        if written and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            facts = {"inputs": judged, "unknown": unknown} if judged else {}
            on_rank_zero(trainer, lambda: self._hand_over(trainer, facts))
        if nan:
            rank_zero_warn(
                f"{nan:,} of {seen:,} inputs have NaN in their inputs or predictions: they have no class (-1) and are "
                "never known; correct these inputs, and where it is all of them, the weights of the checkpoint"
            )
        if judged:
            rank_zero_info(f"{unknown:,} of {judged:,} inputs look unknown (column known of the predictions)")

    def _hand_over(self, trainer: pl.Trainer, facts: dict[str, Any]) -> None:
        """Give the file to loggers, with the checkpoint that it was made by."""
        size = self._path.stat().st_size / 1e6
        if size > MOST_MEGABYTES:
            rank_zero_info(f"not handed to loggers: {self._path} has {size:,.0f} MB, more than {MOST_MEGABYTES:g}")
            return
        made_by = None if trainer.ckpt_path is None else Path(trainer.ckpt_path).name
        log_files(trainer, "predictions", [self._path], {"checkpoint": made_by} | facts)

    def _merge(self, parts: list[Path], expected: int) -> None:
        """Each part is in the order of loaders and samples, so that one row of each is enough to find the next one."""
        missing = [str(path) for path in parts if not path.is_file()]
        if missing:
            raise FileNotFoundError(
                f"expected the predictions of all processes in {self._path.parent}, found no {', '.join(missing)}: let "
                "the run's folder be one that all machines share; the parts are left where they are"
            )
        order = {neutral(str(name)): i for i, name in enumerate(self._names)}

        def place(row: Any) -> tuple[int, int]:
            return order[row[0]], int(row[1])

        with atomic.atomic_write(self._path) as whole:  # only a whole file has the name of one
            try:
                count = _join(parts, whole, place)
            except (LookupError, ValueError, csv.Error):  # not what was written
                count = 0
            if count != expected:
                raise RuntimeError(
                    f"expected {expected:,} predictions in {', '.join(map(str, parts))}, found {count:,}: something "
                    f"else has changed these files; {self._path} is as it was before, predict again"
                )
        for path in parts:
            path.unlink()

    def _close(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave no file open, and say where the rows are that were predicted so far."""
        part = None if self._part is None else self._part.name
        self._close()
        if part is not None:
            warn(f"the prediction did not come to its end, and {self._path} is as it was; rows so far are in {part}")


def _join(parts: Sequence[Path], target: Path, place: Callable[[list[str]], tuple[int, int]]) -> int:
    """Make one CSV file of ordered ones with the same columns; gives the number of its rows."""
    with ExitStack() as stack, target.open("w", newline="", encoding="utf-8") as file:
        readers = [csv.reader(stack.enter_context(path.open(newline="", encoding="utf-8"))) for path in parts]
        headers = [next(reader, []) for reader in readers]
        writer = csv.writer(file)
        writer.writerow(headers[0])
        count = 0
        for row in heapq.merge(*readers, key=place):
            writer.writerow(row)
            count += 1
    return count


def as_columns(outputs: Mapping[str, Any], class_names: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """What a model gives for B samples as columns of B values; a tensor (B, C) becomes C columns.

    A set of classes, a boolean (B, C), becomes one column with the numbers of its classes.
    With names of classes, `class` is followed by `class_name`, and the columns of one number a class bear their names.

    >>> as_columns({"class": torch.tensor([1]), "probabilities": torch.tensor([[0.25, 0.75]])}, ["cat", "dog"])
    {'class': [1], 'class_name': ['dog'], 'probabilities_cat': [0.25], 'probabilities_dog': [0.75]}
    """
    columns: dict[str, list[Any]] = {}
    for name, values in outputs.items():
        if isinstance(values, Tensor) and values.dim() == 2 and values.dtype == torch.bool:
            columns[name] = [_listed(row) for row in values.cpu()]
        elif isinstance(values, Tensor) and values.dim() == 2:
            columns |= _one_a_class(name, values, class_names)
        else:
            columns[name] = values.tolist() if isinstance(values, Tensor) else list(values)
            if name == "class" and class_names:
                columns["class_name"] = _names_of(columns[name], class_names)
    return columns


def reasons(module: BRAINet, inputs: Any) -> dict[str, list[Any]]:
    """Inputs → columns `because_1` to `because_3`, the strongest reason first; where there is none, what is missing."""
    with isolated_rng(0):
        found = explain_batch(module.predictor, inputs)
    said = [found.because(row, REASONS) or list(found.missing) for row in range(len(found))]
    columns = {}
    for place in range(REASONS):
        columns[f"because_{place + 1}"] = [texts[place] if place < len(texts) else "" for texts in said]
    return columns


def _names_of(classes: Sequence[int], class_names: Sequence[str]) -> list[str]:
    """The names of classes; of -1, which stands for none, an empty text."""
    return [class_names[c] if c >= 0 else "" for c in classes]


def _listed(row: Tensor) -> str:
    """The numbers of the classes in a set (C,): "0 3"."""
    return " ".join(map(str, row.nonzero().squeeze(1).tolist()))


def _one_a_class(name: str, values: Tensor, class_names: Sequence[str] | None) -> dict[str, list[Any]]:
    """Values (B, C) as C columns, by the names of the classes or by their numbers."""
    count = values.shape[1]
    named: Sequence[Any] = class_names if class_names and len(class_names) == count else range(count)
    return {f"{name}_{c}": column.tolist() for c, column in zip(named, values.unbind(dim=1), strict=True)}


def count_nan(outputs: Mapping[str, Any], rows: int) -> int:
    """How many of the first samples have NaN in what a model gives, or a `known_p` of 0, which only NaN has.

    >>> count_nan({"class": torch.tensor([-1, 1]), "probabilities": torch.tensor([[torch.nan] * 2, [0.3, 0.7]])}, 2)
    1
    """
    values = {name: v[:rows] for name, v in outputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    found = [v.isnan() if v.dim() == 1 else v.isnan().flatten(1).any(dim=1) for v in values.values() if v.dim()]
    found += [values["known_p"] == 0] if "known_p" in values else []
    return int(torch.stack(found).any(dim=0).sum()) if found and rows else 0
