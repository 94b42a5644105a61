"""Everything that a test leaves: metrics of unknown sets, scores of samples, figures, tables and the record itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from brainet_pl import checks
from brainet_pl.batches import Precomputed
from brainet_pl.callbacks.logging import define_summaries, file_name, log_figure, log_table, run_folder
from brainet_pl.callbacks.rows import write_rows
from brainet_pl.callbacks.sets import test_sets
from brainet_pl.evaluation import summary
from brainet_pl.evaluation.curves import SEPARATION
from brainet_pl.evaluation.figures import readable
from brainet_pl.evaluation.record import Measured, SampleBatch, TestRecord, group_means
from brainet_pl.features import inputs_of
from brainet_pl.framework import Callback, pl, rank_zero_info, rank_zero_warn
from brainet_pl.module import BRAINet
from brainet_pl.ranks import Places, everyones, on_rank_zero

LEAST_SIDE = 64  # pixels of a thumbnail: small pictures are repeated to at least this size
MOST_UNCERTAIN = "test/most_uncertain"


class Sample(NamedTuple):
    """A doubtful test sample: its rank in doubt, number, table cells, and picture (H, W) or (H, W, 3) or None."""

    doubt: float
    number: int
    cells: dict[str, Any]
    picture: Any


class Evaluation(Callback):
    """Fills the record of a test, batch by batch, and tells everybody about it when the test is over.

    - metrics `ood/<set>/<score>/<measure>` of every unknown set, and the means `near_mean` and `far_mean` of sets of a
      kind;
    - `scores.csv`: every sample's scores;
    - figures `test/reliability`, `test/risk_coverage`, `test/passes`, `ood/<set>/histograms`, `ood/<set>/curves` and
      `structure/tree`, and tables `test/most_uncertain` and `ood/table`, to every logger and as files;
    - `record.json`, from which `brainet report` makes its page.

    The known test set is the first loader; all others are unknown sets, by the names of the dictionary that
    `test_dataloader` returns. What a task or a head does not have (calibration of a regression, passes of a single
    network) is left out. A set without a sample ends the test with an error: it can't be skipped unnoticed.

    Args:
        figures: draw figures and write tables; false leaves metrics, the score file and the record.
        score_file: write every sample's scores to this CSV file in the run's folder; "" writes none.
        most_uncertain: rows of the table of doubtful samples; 0 makes none.
        score: the score that ranks them and stands in the headline; null is the entropy, or the first there is.
        image_shape: of inputs that are flattened images: [channels, height, width] or [height, width].
    """

    def __init__(
        self,
        figures: bool = True,
        score_file: str = "scores.csv",
        most_uncertain: int = 16,
        score: str | None = None,
        image_shape: tuple[int, ...] | None = None,
    ) -> None:
        checks.whole("most_uncertain", most_uncertain, 0)
        if image_shape is not None and len(image_shape) not in (2, 3):
            raise ValueError(f"expected image_shape to be (C, H, W) or (H, W), got {tuple(image_shape)}")
        checks.file_name("score_file", score_file)
        self.figures, self.score_file, self.most_uncertain, self.score = figures, score_file, most_uncertain, score
        self.image_shape = None if image_shape is None else tuple(image_shape)
        self.record: TestRecord | None = None
        self._names: list[str] = []
        self._places = Places()
        self._doubtful: list[Sample] = []
        self._found: dict[str, Measured] = {}

    # -- collecting ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Say which value of a metric sums up a run."""
        best = {}
        for part in ("val_metrics", "test_metrics", "conformal_metrics"):
            for name, metric in (getattr(pl_module, part, None) or {}).items():
                if metric.higher_is_better is not None:
                    best[name] = "max" if metric.higher_is_better else "min"
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            define_summaries(trainer, best)

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a record; a wrong name is told before the work, not after it."""
        sets = test_sets(trainer)
        self._names, self._doubtful, self._found = list(sets), [], {}
        units = pl_module.scores.units if isinstance(pl_module, BRAINet) else {}
        self.record = TestRecord(sets, units)

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep a few numbers a sample."""
        if not isinstance(outputs, SampleBatch) or not outputs.scores or self.record is None:
            return
        if dataloader_idx == 0:
            summary.headline(list(outputs.scores), self.score)  # a wrong score is told at the first batch
        numbers = outputs.numbers
        if numbers is None:  # of a module that knows nothing of other processes
            n = len(next(iter(outputs.scores.values())))
            numbers = self._places.of_batch(trainer, n, batch_idx, dataloader_idx)
            if len(numbers) < n and outputs.trace is not None and outputs.trace.sums is not None:
                rank_zero_warn(
                    f"the curves over passes count {n - len(numbers)} samples of {self._names[dataloader_idx]} twice: "
                    "sums of a batch can't be taken apart; give SampleBatch the numbers of samples that count, as "
                    "brainet_pl.ranks.Places has them, and only these samples"
                )
            outputs = outputs.first(len(numbers))
        self.record.add(self._names[dataloader_idx], numbers, outputs)
        if dataloader_idx == 0 and self.figures and self.most_uncertain:
            inputs = inputs_of(batch, getattr(pl_module, "columns", None))
            self._keep_doubtful(outputs, numbers, _shown(inputs))

    def _keep_doubtful(self, batch: SampleBatch, numbers: Tensor, inputs: Any) -> None:
        """Merge a batch into the k most uncertain samples so far."""
        name = summary.headline(list(batch.scores), self.score)
        doubt = batch.scores[name].detach().float().cpu().nan_to_num(nan=math.inf)
        # Not `confidence`: a learned confidence is a score of that name, and higher for a less certain sample.
        answers = {"probability" if k == "confidence" else k: v for k, v in batch.answers.items()}
        cells = {k: v for k, v in answers.items() if k not in ("wrong", "calibrated", "covered")} | batch.scores
        for i in doubt.topk(min(self.most_uncertain, len(doubt))).indices.tolist():
            row = {name: values[i].item() for name, values in cells.items()}
            self._doubtful.append(Sample(float(doubt[i]), int(numbers[i]), row, inputs[i]))
        # Only now, for the few that stay: pictures are made once.
        self._doubtful = [
            s._replace(picture=thumbnail(s.picture, self.image_shape)) if isinstance(s.picture, Tensor) else s
            for s in _most_doubtful(self._doubtful, self.most_uncertain)
        ]

    # -- telling ------------------------------------------------------------------------------------------------------

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring the parts of all processes together, compare each set with the test set by every score, and log."""
        if self.record is None:
            return
        record = self.record.gather()
        doubtful = [sample for part in everyones(self._doubtful) for sample in part]
        self._doubtful = _most_doubtful(doubtful, self.most_uncertain)
        empty = [part.name for part in record.sets.values() if not len(part)]
        if len(empty) == len(record.sets):
            self.record = None
            rank_zero_warn(
                "nothing was recorded: expected test_step to return a brainet_pl.evaluation.record.SampleBatch, got "
                "something else; only a BRAINet, or a module whose test_step does so, can be evaluated"
            )
            return
        if empty:
            raise RuntimeError(
                f"expected samples of every set ({', '.join(record.sets)}), got none of {', '.join(empty)}: check its "
                "loader, or leave the set out of test_dataloader"
            )
        for part in record.sets.values():
            bad = sorted(set(part.scores) - set(part.rankable()))
            if bad:
                rank_zero_warn(f"not compared and not in the figures, because of NaN in {part.name}: {', '.join(bad)}")
        found = record.separations()
        self._found = found | group_means(found, list(record.unknown))
        for name, scores in self._found.items():
            for score, measures in scores.items():
                for measure, value in measures.items():
                    key = f"ood/{name}/{score}/{measure}"
                    pl_module.log(key, float(value), rank_zero_only=True, add_dataloader_idx=False)
        if trainer.is_global_zero:
            best = {m: "max" if better == "higher" else "min" for m, better in SEPARATION.items() if better}
            keys = [f"ood/{name}/{score}/" for name, scores in self._found.items() for score in scores]
            define_summaries(trainer, {key + m: which for key in keys for m, which in best.items()})

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write and draw; after `on_test_epoch_end`, so that the metrics of all callbacks are there."""
        record, self.record = self.record, None
        if record is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            on_rank_zero(trainer, lambda: self._tell(trainer, pl_module, record))

    def _tell(self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: TestRecord) -> None:
        folder = run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        if self.score_file:
            write_scores(folder / self.score_file, record)
        brainet = pl_module if isinstance(pl_module, BRAINet) else None
        ggt = None if brainet is None else brainet.ggt
        if ggt is not None:
            (folder / "structure.json").write_text(ggt.to_json())
        model = _facts(pl_module)
        rows = summary.separation_rows(self._found)
        score = summary.headline(list(record.known.scores), self.score)
        drawn, tables, files = {}, {}, {}
        if self.figures:
            label = None if brainet is None or brainet.calibration is None else brainet.calibration.label()
            drawn = summary.pictures(record, self._found, label, ggt, model.get("temperature"))
            tables = self._tables(score, rows)
        for name, picture in drawn.items():
            log_figure(trainer, name, picture.figure)
            files[name] = f"{file_name(name)}.png"
        for name, table in tables.items():
            files |= log_table(trainer, name, table.columns, table.rows) or {}
        parts = ("test_metrics", "scaled_metrics", "own_metrics", "conformal_metrics")
        metrics = [getattr(pl_module, name, None) for name in parts]
        content = summary.to_json(
            record,
            model=model,
            score=score,
            metrics=summary.metric_entries(metrics, trainer.callback_metrics),
            rows=rows,
            drawn=drawn,
            tables={name: table for name, table in tables.items() if name == MOST_UNCERTAIN},
            files=files,
        )
        (folder / "record.json").write_text(json.dumps(content, indent=1, allow_nan=False))
        rank_zero_info(f"figures and tables: {folder}; for a page of them: brainet report {folder}")

    def _tables(self, score: str, rows: list[dict[str, Any]]) -> dict[str, summary.TableData]:
        made = {}
        if self._doubtful:
            cells = list(self._doubtful[0].cells)
            pictures = any(sample.picture is not None for sample in self._doubtful)
            by, n = readable(score), len(self._doubtful)
            made[MOST_UNCERTAIN] = summary.TableData(
                f"The {n} test samples of the highest {by}, the most uncertain first",
                ["sample", *(["picture"] if pictures else []), *cells],
                [
                    [s.number, *([s.picture] if pictures else []), *(s.cells[name] for name in cells)]
                    for s in self._doubtful
                ],
            )
        if rows:
            made["ood/table"] = summary.separation_table(rows)
        return made


def write_scores(path: Path, record: TestRecord) -> None:
    """One row a sample: its set, its number in the set, its scores; a cell is empty where a set lacks a score."""
    with path.open("w", newline="", encoding="utf-8") as file:
        write_rows(file, [["set", "sample", *record.known.scores]])
        for part in record.sets.values():
            for start in range(0, len(part), 10_000):  # Python's numbers take ten times the memory of the record's
                rows = slice(start, start + 10_000)
                numbers = part.numbers[rows].tolist()
                columns = [
                    part.scores[name][rows].tolist() if name in part.scores else [""] * len(numbers)
                    for name in record.known.scores
                ]
                write_rows(file, ([part.name, *row] for row in zip(numbers, *columns, strict=True)))


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


def _shown(inputs: Any) -> Any:
    """What of the inputs is shown for a sample: features, or the first tensor of several."""
    if isinstance(inputs, Precomputed):
        return inputs.features
    return next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs


def _most_doubtful(samples: list[Sample], k: int) -> list[Sample]:
    return sorted(samples, key=lambda sample: (-sample.doubt, sample.number))[:k]


def _facts(module: pl.LightningModule) -> dict[str, Any]:
    """What the report says about the model in one line."""
    facts: dict[str, Any] = {
        "head": type(module).__name__,
        "task": None,
        "head_parameters": None,
        "parameters": sum(p.numel() for p in module.parameters()),
        "temperature": None,
    }
    if isinstance(module, BRAINet) and module.head is not None:
        facts |= {"head": type(module.head_settings).__name__, "task": type(module.task).__name__}
        facts |= {"head_parameters": module.head.num_params} | module.head.facts()
    return facts
