"""Everything that a test leaves: metrics of unknown sets, scores of samples, figures, tables and the record itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl._utils.framework import Callback, pl, rank_zero_info, rank_zero_warn
from brainet_pl._utils.inside import write_inside
from brainet_pl.backbones import batches
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.callbacks import logging as logs
from brainet_pl.callbacks.any_module import ModuleTest, computed, predictor_of, swapped_layer
from brainet_pl.distributed.samples import Places, all_gather, on_rank_zero
from brainet_pl.evaluation import charts, shift_charts, summary
from brainet_pl.evaluation.chart import Chart, Matrix
from brainet_pl.evaluation.doubtful import DoubtfulSamples
from brainet_pl.evaluation.record import Measured, SampleBatch, TestRecord, group_means
from brainet_pl.evaluation.report.read import read_history, read_record
from brainet_pl.evaluation.sets import EvaluatesAllSets, test_sets
from brainet_pl.evaluation.terminal import lines_of_test
from brainet_pl.explain.strangest import MOST_UNKNOWN, StrangestSamples
from brainet_pl.features.extraction import inputs_of, is_sharded
from brainet_pl.lightning.module import BRAINet
from brainet_pl.lightning.steps import refuse_empty
from brainet_pl.metrics.sets import check_set_names
from brainet_pl.metrics.shift import LOADER, is_shift
from brainet_pl.prediction import costs
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.structure import GGT
from brainet_pl.structure.draw import draw_ggt
from brainet_pl.swap.in_place import Forward
from brainet_pl.tasks import Classification

SUMMED_UP = ("test_metrics", "scaled_metrics", "conformal_metrics")  # attributes of a BRAINet
RECORDED = (
    "test_metrics",
    "pass_metrics",
    "scaled_metrics",
    "base_metrics",
    "conformal_metrics",
)  # those in the record
MOST_UNCERTAIN, CLASSES, CONFUSION = "test/most_uncertain", "test/classes", "test/confusion"


class Evaluation(Callback, EvaluatesAllSets):
    """Fills the record of a test, batch by batch, and writes and logs it when the test is over.

    - metrics `ood/<set>/<score>/<measure>` of every unknown set, and the means `near_mean` and `far_mean` of sets of a
      kind;
    - `scores.csv`: every sample's scores;
    - charts `test/reliability`, `test/risk_coverage`, `test/passes` and `test/confusion` of a classification,
      `test/predicted`, `test/coverage`, `test/spread`, `test/residuals` and `test/refusal` of a regression,
      `ood/<set>/histograms` and `ood/<set>/curves`, and the picture `structure/tree`, to every logger and as files;
    - tables `test/most_uncertain`, `test/classes`, `ood/table` and, to W&B, `test/scores`;
    - what a prediction costs, `cost/<part>/flops`, `/ms` and `/parameters` of backbone, head and one pass;
    - `record.json`, which `brainet report` and `brainet compare` read, and `report.html`, the page of the run.

    W&B gets charts that overlay runs in place of pictures, the numbers of unknown sets as a table, and those of the
    headline score in its summary.

    A module that is no `BRAINet` and returns no `SampleBatch` from `test_step` is evaluated by its logits: those of a
    head that `SwapHead` has put in, with all its passes and scores, or those that its `forward`, its `predict_step` or
    the function `logits` gives. Its metrics are `test/cls/…` and `test/cal/…`, beside those of its own.

    The known test set is the first loader; all others are unknown sets, by the names of the dictionary that
    `test_dataloader` returns, save for loaders called `shift` or `shift/<corruption>/<severity>`: the known set after
    shifts. Of these there are means `shift/mean/<measure>` (after calibration `shift/scaled/mean/…`), a table
    `shift/table` and charts `shift/severity` and `shift/reliability`. What a task or a head does not have (calibration
    of a regression, passes of a single network) is left out. A set without a sample ends the test with an error: it
    can't be skipped unnoticed.

    Args:
        figures: draw figures and write tables; false leaves metrics, the score file and the record.
        score_file: write every sample's scores to this CSV file in the run's folder; "" writes none.
        most_uncertain: rows of the table of doubtful samples; 0 makes none.
        score: the score that ranks them and stands for the model on unknown sets; null ranks by the entropy, or the
            first score there is, and judges unknown sets by the score behind the verdict.
        image_shape: of inputs that are flattened images: [channels, height, width] or [height, width].
        report: write `report.html` into the run's folder.
        most_scores: samples in the table `test/scores` for W&B, spread evenly over all sets; 0 makes none.
        unknown: name → inputs unlike the training data: a loader, a dataset or a tensor. They are run by this callback,
            so that `test_step` need not know of them.
        logits: a function that gives the logits (B, C) of inputs, `logits(module, inputs)`, where the module's
            `forward` does not.
        columns: the names of inputs and target, where batches have names; null is the module's own, or a guess.
    """

    def __init__(
        self,
        figures: bool = True,
        score_file: str = "scores.csv",
        most_uncertain: int = 16,
        score: str | None = None,
        image_shape: tuple[int, ...] | None = None,
        report: bool = True,
        most_scores: int = 2000,
        unknown: Mapping[str, Any] | None = None,
        logits: Forward | None = None,
        columns: Columns | None = None,
    ) -> None:
        checks.whole("most_uncertain", most_uncertain, 0)
        self.report, self.most_scores = report, checks.whole("most_scores", most_scores, 0)
        if image_shape is not None and len(image_shape) not in (2, 3):
            raise ValueError(f"expected image_shape to be (C, H, W) or (H, W), got {tuple(image_shape)}")
        checks.file_name("score_file", score_file)
        self.figures, self.score_file, self.most_uncertain, self.score = figures, score_file, most_uncertain, score
        self.image_shape = None if image_shape is None else tuple(image_shape)
        self.unknown, self.logits, self.columns = dict(unknown or {}), logits, columns
        check_set_names(self.unknown)
        self.record: TestRecord | None = None
        self._test: ModuleTest | None = None
        self._names: list[str] = []
        self._places = Places()
        self._doubtful = DoubtfulSamples(most_uncertain, score, self.image_shape)
        self._strangest = StrangestSamples(most_uncertain, self.image_shape)
        self._separations: dict[str, Measured] = {}
        self._costs: costs.Costs | None = None

    # -- collecting ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Say which value of a metric sums up a run; those of a test are no curves."""
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        which_counts = {None: "last", True: "max", False: "min"}  # by whether higher is better
        for attribute in ("val_metrics", *SUMMED_UP):
            collection = getattr(pl_module, attribute, None) or {}
            best = {name: which_counts[metric.higher_is_better] for name, metric in collection.items()}
            logs.define_summaries(trainer, best, hidden=attribute != "val_metrics")

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a record; a wrong name of a set is an error before the work, not after it."""
        sets = test_sets(trainer)
        self._names, self._costs, self._separations = list(sets), None, {}
        self._doubtful = DoubtfulSamples(self.most_uncertain, self.score, self.image_shape)
        self._strangest = StrangestSamples(self.most_uncertain, self.image_shape)
        check_set_names([*self.unknown, *(name for name in self._names if name in self.unknown)])
        predictor = predictor_of(pl_module)
        units = Classification.units if predictor is None else predictor.scores.units
        self.record = TestRecord(sets | dict.fromkeys(self.unknown, "far"), units)
        columns = getattr(pl_module, "columns", None) if self.columns is None else self.columns
        self._test = ModuleTest(pl_module, self.logits, columns)

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps a few numbers of each sample of the batch, among them every score."""
        if self.record is None or self._test is None:
            return
        name, known = self._names[dataloader_idx], dataloader_idx == 0
        if not isinstance(outputs, SampleBatch):
            outputs = self._from_logits(trainer, batch, batch_idx, dataloader_idx)
        if name not in self.record.sets:  # a shifted set
            numbers = torch.empty(0, dtype=torch.long) if outputs.numbers is None else outputs.numbers
            self.record.add(name, numbers, outputs)
            return
        if not outputs.scores:
            return
        if known:
            summary.ranking_score(list(outputs.scores), self.score)  # a wrong score is an error at the first batch
        if known and batch_idx == 0:
            self._measure_costs(trainer, pl_module, batch)
        numbers = outputs.numbers
        if numbers is None:  # of a module that knows nothing of other processes
            outputs, numbers = self._numbered(trainer, outputs, batch_idx, dataloader_idx)
        self.record.add(name, numbers, outputs)
        if known and self.figures and self.most_uncertain:
            self._doubtful.add(outputs, numbers, _shown(self._test.inputs(batch)))
        if isinstance(pl_module, BRAINet) and self.figures and self.most_uncertain and not is_sharded(pl_module):
            self._strangest.add(name, pl_module.predictor, outputs, numbers, self._test.inputs(batch))

    def _measure_costs(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> None:
        """Measure what a prediction costs."""
        if trainer.is_global_zero and isinstance(module, BRAINet):
            self._costs = _measured(module, batch)

    def _numbered(
        self, trainer: pl.Trainer, outputs: SampleBatch, batch_idx: int, dataloader_idx: int
    ) -> tuple[SampleBatch, Tensor]:
        """The samples of a batch that count, and their numbers: several processes may be dealt copies."""
        count = len(next(iter(outputs.scores.values())))
        numbers = self._places.of_batch(trainer, count, batch_idx, dataloader_idx)
        copies = count - len(numbers)
        if copies and outputs.trace is not None and outputs.trace.sums is not None:
            rank_zero_warn(
                f"the curves over passes count {copies} samples of {self._names[dataloader_idx]} twice: sums of a "
                "batch can't be taken apart; give SampleBatch the numbers of samples that count, as "
                "brainet_pl.distributed.samples.Places has them, and only these samples"
            )
        return outputs.first(len(numbers)), numbers

    def _from_logits(self, trainer: pl.Trainer, batch: Any, batch_idx: int, dataloader_idx: int) -> SampleBatch:
        """What the record keeps of a batch of a module that gives logits."""
        assert self._test is not None
        if is_shift(self._names[dataloader_idx]):
            raise ValueError(
                f"expected a BRAINet for the shifted set {self._names[dataloader_idx]!r}, got a module that gives "
                "logits: leave the set out"
            )
        size = batches.size(self._test.inputs(batch))
        numbers = self._places.of_batch(trainer, size, batch_idx, dataloader_idx)
        with trainer.precision_plugin.test_step_context():
            seen = self._test.tested(batch, numbers, known=dataloader_idx == 0)
        return self._test.sample(seen)

    # -- gathering and measuring --------------------------------------------------------------------------------------

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring the parts of all processes together, compare each set with the test set by every score, and log."""
        if self.record is None or self._test is None:
            return
        self._run_unknown(trainer, self.record, self._test)
        for key, metric in computed(self._test.metrics).items():
            pl_module.log(key, metric, add_dataloader_idx=False, rank_zero_only=True)
        record = self.record.gather()
        self._doubtful.merge(all_gather(self._doubtful.samples))
        self._strangest.merge(all_gather(self._strangest.samples))
        _check_complete(record, self._names)
        separations = record.separations()
        self._separations = separations | group_means(separations, list(record.unknown))
        for key, value in summary.logged_numbers(record, self._separations).items():
            pl_module.log(key, value, rank_zero_only=True, add_dataloader_idx=False)
        if trainer.is_global_zero:
            best = summary.best_of_separations(self._separations, summary.headline_score(record, self.score))
            logs.define_summaries(trainer, best, hidden=True)

    def _run_unknown(self, trainer: pl.Trainer, record: TestRecord, test: ModuleTest) -> None:
        """Run the unknown sets that this callback was given."""
        for name, data in self.unknown.items():
            with trainer.precision_plugin.test_step_context():
                for seen in test.unknown(data, trainer):
                    record.add(name, seen.numbers, test.sample(seen))
        test.keep(False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Of a test without a batch Lightning calls no other hook."""
        if stage == "test":
            refuse_empty("test", trainer.test_dataloaders)

    # -- writing ------------------------------------------------------------------------------------------------------

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write and draw; after `on_test_epoch_end`, so that the metrics of all callbacks are there."""
        record, self.record = self.record, None
        if record is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            on_rank_zero(trainer, lambda: self._write(trainer, pl_module, record))

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: TestRecord) -> None:
        """Write scores, structure, figures, tables, the record and the page; rank zero only."""
        folder, predictor = logs.run_folder(trainer), predictor_of(pl_module)
        ggt = None if predictor is None else predictor.ggt
        self._write_files(folder, record, ggt)
        model = _facts(pl_module) | self._log_costs(trainer)
        names = _class_names(pl_module, record)
        score = summary.headline_score(record, self.score)
        ranking = summary.ranking_score(list(record.known.scores), self.score)
        made = _charts_of(record, self._separations, predictor, ranking, score)
        matrix, rows = charts.confusion(record.known, names), summary.separation_rows(self._separations)
        files: dict[str, str] = {}
        tables: dict[str, summary.LoggedTable] = {}
        if self.figures:
            files = self._log_figures(trainer, made, matrix, ggt, model["temperature"])
            tables = self._tables(record, ranking, rows, names)
            strangest = None if predictor is None else self._strangest.table(predictor)
            tables |= {} if strangest is None else {MOST_UNKNOWN: strangest}
        for name, table in tables.items():
            files |= logs.log_table(trainer, name, table.columns, table.rows) or {}
        logs.log_config(trainer, {"samples": {part.name: len(part) for part in record.sets.values()}})
        if self.figures and self.most_scores:
            logs.log_scores(trainer, lambda: summary.score_table(record, self.most_scores))
        own_metrics = {} if self._test is None else self._test.metrics
        collections = [*(getattr(pl_module, name, None) for name in RECORDED), *own_metrics.values()]
        entries = summary.metric_entries(collections, trainer.callback_metrics)
        content = summary.to_json(
            record,
            model=model,
            score=score,
            ranking=ranking,
            metrics=entries,
            rows=rows,
            charts=made,
            matrix=matrix,
            ggt=ggt,
            tables={name: tables[name] for name in (MOST_UNKNOWN, MOST_UNCERTAIN, CLASSES) if name in tables},
            files=files,
            settings=json.loads(json.dumps(dict(pl_module.hparams), default=str)),
        )
        with write_inside(folder, "record.json") as temporary:
            temporary.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
        values = {entry["key"]: entry["value"] for entry in entries}
        self._finish(trainer, folder, {"structure": None if ggt is None else ggt.fingerprint} | values)

    def _write_files(self, folder: Path, record: TestRecord, ggt: GGT | None) -> None:
        """The score of every sample, and the structure."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.score_file:
            with write_inside(folder, self.score_file) as temporary:
                summary.write_scores(temporary, record)
        if ggt is not None:
            with write_inside(folder, "structure.json") as temporary:
                temporary.write_text(ggt.to_json(), encoding="utf-8")

    def _log_figures(
        self,
        trainer: pl.Trainer,
        made: Sequence[Chart],
        matrix: Matrix | None,
        ggt: GGT | None,
        temperature: float | None,
    ) -> dict[str, str]:
        """Draw charts, confusion and tree, for loggers and as files; gives the file of the tree."""
        for chart in made:
            logs.log_chart(trainer, chart)
        if matrix is not None:
            logs.log_matrix(trainer, CONFUSION, matrix)
        if ggt is None:
            return {}
        logs.log_figure(trainer, summary.TREE, draw_ggt(ggt, 1.0 if temperature is None else temperature))
        return {summary.TREE: f"{logs.file_name(summary.TREE)}.png"}

    def _log_costs(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Log what a prediction costs; returned as the record holds it, nothing where it was not measured."""
        if self._costs is None:
            return {}
        logs.log_numbers(trainer, self._costs.numbers())
        return {"cost": self._costs.line(), "costs": self._costs.to_dict()}

    def _finish(self, trainer: pl.Trainer, folder: Path, values: dict[str, Any]) -> None:
        """The page of the run, all files of the test as one artifact, and what was found in about ten lines."""
        page, names = None, ["record.json", self.score_file]
        if self.report:
            from brainet_pl.evaluation.report import write_report

            page = str(write_report(folder))
            names.append("report.html")
        files = [folder / name for name in names if name and (folder / name).is_file()]
        made_by = None if trainer.ckpt_path is None else Path(trainer.ckpt_path).name
        logs.log_files(trainer, "evaluation", files, {"checkpoint": made_by} | values)
        record = read_record(folder)
        if record is not None:
            cost = None if self._costs is None else self._costs.line()
            lines = lines_of_test(record, read_history(folder), folder=str(folder), page=page, cost=cost)
            rank_zero_info("\n".join(lines))

    def _tables(
        self, record: TestRecord, score: str, rows: list[dict[str, Any]], names: Sequence[str] | None
    ) -> dict[str, summary.LoggedTable]:
        made = {}
        if self._doubtful.samples:
            made[MOST_UNCERTAIN] = self._doubtful.table(score, names)
        classes = charts.class_numbers(record.known, names)
        if classes:
            made[CLASSES] = summary.class_table(classes)
        if rows:
            made["ood/table"] = summary.separation_table(rows)
        if record.shifts():
            made["shift/table"] = shift_charts.shift_table(record.shifts())
        return made


def _charts_of(
    record: TestRecord, separations: Mapping[str, Measured], predictor: Predictor | None, ranking: str, score: str
) -> list[Chart]:
    """All charts of a test; what calibration did, and what was promised, the predictor knows."""
    label, promised = None, []
    if predictor is not None:
        promised = predictor.risk.points()
        label = None if predictor.calibration is None else predictor.calibration.label()
    made = charts.charts_of(record, separations, label, ranking, score, promised)
    return made + shift_charts.shift_charts(record)


def _check_complete(record: TestRecord, loaders: Sequence[str]) -> None:
    """Refuse a set without samples, which can't be skipped unnoticed; warn of scores with NaN."""
    empty = [part.name for part in record.sets.values() if not len(part)]
    if empty:
        raise RuntimeError(
            f"expected samples of every set ({', '.join(record.sets)}), got none of {', '.join(empty)}: check its "
            "loader, or leave the set out of test_dataloader"
        )
    _check_shifts(record, loaders)
    for part in record.sets.values():
        bad = sorted(set(part.scores) - set(part.rankable()))
        if bad:
            rank_zero_warn(f"not compared and not in the figures, because of NaN in {part.name}: {', '.join(bad)}")


def _check_shifts(record: TestRecord, loaders: Sequence[str]) -> None:
    """Refuse a shifted set of which nothing was measured."""
    shifted = {name for name in record.shift_sums if is_shift(name)}
    lost = [name for name in loaders if is_shift(name) and name not in shifted and not (name == LOADER and shifted)]
    if lost:
        raise RuntimeError(
            f"expected samples of every shifted set, got none of {', '.join(lost)}: check its loader; a model that "
            "is no BRAINet gives SampleBatch(shifts=…)"
        )


def _shown(inputs: Any) -> Any:
    """What of the inputs is shown for a sample: features, or the first tensor of several."""
    if isinstance(inputs, BackboneOutput):
        return inputs.features
    return next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs


def _measured(module: BRAINet, batch: Any) -> costs.Costs | None:
    """What the batch costs, without a trace in the random numbers of the passes that follow."""
    if is_sharded(module):  # its forward pass would wait for the other processes
        return None
    devices = [module.device] if module.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        return costs.measure(module.predictor, inputs_of(batch, module.columns))


def _class_names(module: pl.LightningModule, record: TestRecord) -> list[str] | None:
    """The names of the classes, where the model knows them and they cover all that was predicted."""
    names = getattr(module, "class_names", None)
    answers = record.known.answers
    if not names or not {"label", "predicted"} <= set(answers):
        return None
    largest = max(int(answers["label"].max()), int(answers["predicted"].max()))
    return list(map(str, names)) if largest < len(names) else None


def _facts(module: pl.LightningModule) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "head": type(module).__name__,
        "task": None,
        "head_parameters": None,
        "parameters": sum(p.numel() for p in module.parameters()),
        "temperature": None,
        "calibration": None,
        "calibrated": True,
        "expected": None,
        "expected_share": None,
        "promise": None,
    }
    predictor = predictor_of(module)
    if predictor is None:
        return facts
    if predictor.calibration is not None:
        facts |= {"calibration": type(predictor.calibration).__name__, "calibrated": predictor.calibrates}
    if predictor.expected is not None:
        share = None if math.isnan(predictor.expected_noticed) else predictor.expected_noticed
        facts |= {"expected": str(predictor.expected), "expected_share": share}
    facts["promise"] = predictor.risk.sentence()
    layer = swapped_layer(module)
    settings = module.head_settings if isinstance(module, BRAINet) else layer and layer.settings
    if predictor.head is not None:
        facts |= {"head": type(settings).__name__, "task": type(predictor.task).__name__}
        facts |= {"head_parameters": predictor.head.num_params} | predictor.head.facts()
    return facts
