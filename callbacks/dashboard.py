"""Everything worth looking at after a test: figures and tables to any logger, and the numbers of `brainet report`."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from brainet_pl import figures
from brainet_pl.callbacks.gather import ByLoader, everyones, joined
from brainet_pl.callbacks.logging import define_summaries, file_name, log_figure, log_table, run_folder
from brainet_pl.head import BRAINetHead
from brainet_pl.metrics import risk_coverage
from brainet_pl.module import BRAINet
from brainet_pl.ood import ood_metrics
from brainet_pl.passes import PassSums, chosen_steps, pass_metrics, pass_sums, running_mean, running_scores
from brainet_pl.structure.draw import draw_ggt
from brainet_pl.tasks import Classification, Regression

METRICS = ("AUROC", "AUPR_out", "AUPR_in", "FPR95", "DetErr", "n_id", "n_ood")
LEAST_SIDE = 64  # pixels of a thumbnail: small pictures are repeated to at least this size


class Sample(NamedTuple):
    """A doubtful test sample: its rank in doubt, number, table cells, and picture (H, W) or (H, W, 3) or None."""

    doubt: float
    number: int
    cells: dict[str, Any]
    picture: Any


class Collected(NamedTuple):
    """What a test left, of all processes: by loader for scores, of the test set for the rest."""

    scores: ByLoader
    running: ByLoader
    answers: dict[str, Tensor]
    sums: PassSums | None
    doubtful: list[Sample]


class Dashboard(Callback):
    """Collects while testing, batch by batch, and logs when the test is over.

    Figures `test/reliability`, `test/risk_coverage`, `test/passes`, `ood/<set>/histograms`, `ood/<set>/curves` and
    `structure/tree`; tables `test/most_uncertain` and `ood/table`; and `dashboard.json` in the run's folder, from which
    `brainet report` makes its page. No output (T, B, C) outlives its batch. What a task or a head does not have
    (calibration of a regression, passes of a single network) is left out.

    Args:
        most_uncertain: rows of the table of doubtful samples; 0 makes none.
        score: the score that ranks them and stands in the headline; None is the entropy, or the first there is.
        image_shape: of inputs that are flattened images: (C, H, W) or (H, W).
    """

    def __init__(
        self, most_uncertain: int = 16, score: str | None = None, image_shape: tuple[int, ...] | None = None
    ) -> None:
        if most_uncertain < 0:
            raise ValueError(f"expected most_uncertain of at least 0, got {most_uncertain}")
        if image_shape is not None and len(image_shape) not in (2, 3):
            raise ValueError(f"expected image_shape to be (C, H, W) or (H, W), got {tuple(image_shape)}")
        self.most_uncertain, self.score = most_uncertain, score
        self.image_shape = None if image_shape is None else tuple(image_shape)
        self._forget()

    def _forget(self) -> None:
        self._scores: dict[int, list[dict[str, Tensor]]] = {}
        self._running: dict[int, list[dict[str, Tensor]]] = {}
        self._answers: list[dict[str, Tensor]] = []
        self._sums: PassSums | None = None
        self._doubtful: list[Sample] = []
        self._steps: list[int] = []
        self._passes: int | None = None
        self._seen = 0
        self._collected: Collected | None = None

    # -- collecting ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Say which value of a metric sums up a run."""
        best = {}
        for part in (getattr(pl_module, "val_metrics", {}), getattr(pl_module, "test_metrics", {})):
            for name, metric in part.items():
                if metric.higher_is_better is not None:
                    best[name] = "max" if metric.higher_is_better else "min"
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            define_summaries(trainer, best)

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget an earlier test."""
        self._forget()

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Reduce a batch to a few numbers a sample."""
        if not isinstance(outputs, dict) or not outputs.get("scores") or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        scores = {name: values.detach().float().cpu() for name, values in outputs["scores"].items()}
        self._scores.setdefault(dataloader_idx, []).append(scores)
        task, target = getattr(pl_module, "task", None), outputs["target"]
        if outputs.get("outputs") is not None:
            self._passes = len(outputs["outputs"])
        cells: dict[str, list[Any]] = {}
        if isinstance(task, Classification):
            probs = task.probabilities(outputs["outputs"].detach())
            cells = self._classified(task, probs, outputs["weights"], target, dataloader_idx)
        elif target is not None and target.dim() == 1:
            cells = {"target": target.tolist()}
            if isinstance(task, Regression):
                mean = task.predictive(outputs["outputs"].detach(), outputs["weights"])[:, 0]
                cells = {"predicted": mean.tolist()} | cells
        if dataloader_idx == 0:
            self._keep_doubtful(trainer, scores, cells, batch[0] if isinstance(batch, list | tuple) else batch)

    def _classified(
        self, task: Classification, probs: Tensor, weights: Tensor | None, target: Tensor | None, loader: int
    ) -> dict[str, list[Any]]:
        """Keep what figures of a classification need of probabilities (T, B, C); gives the table's cells."""
        self._steps = chosen_steps(len(probs))
        if len(self._steps) > 1:
            found = {name: values.cpu() for name, values in running_scores(probs, weights, self._steps).items()}
            self._running.setdefault(loader, []).append(found)
        if target is None:
            return {}
        means = running_mean(probs, weights, self._steps)
        sums = pass_sums(means, target)
        self._sums = sums if self._sums is None else self._sums + sums
        confidence, label = means[-1].max(dim=-1)
        answers = {"confidence": confidence, "wrong": (label != target).float()}
        if task.temperature_scaling:
            answers["scaled"] = task.scaled(means[-1]).amax(dim=-1)
        self._answers.append({name: values.cpu() for name, values in answers.items()})
        return {"predicted": label.tolist(), "label": target.tolist(), "probability": confidence.tolist()}

    def _keep_doubtful(
        self, trainer: pl.Trainer, scores: dict[str, Tensor], cells: dict[str, list[Any]], inputs: Any
    ) -> None:
        """Merge a batch into the k most uncertain samples so far."""
        doubt = scores[self._ranking(scores)].nan_to_num(nan=math.inf)
        for i in doubt.topk(min(self.most_uncertain, len(doubt))).indices.tolist():
            row = {name: values[i] for name, values in cells.items()}
            row |= {name: float(values[i]) for name, values in scores.items()}
            number = (self._seen + i) * trainer.world_size + trainer.global_rank  # as DistributedSampler deals them
            self._doubtful.append(Sample(float(doubt[i]), number, row, inputs[i]))
        self._seen += len(doubt)
        kept = _most_doubtful(self._doubtful, self.most_uncertain)
        # only now, for the few that stay: pictures are made once
        self._doubtful = [
            s._replace(picture=thumbnail(s.picture, self.image_shape)) if isinstance(s.picture, Tensor) else s
            for s in kept
        ]

    def _ranking(self, scores: dict[str, Tensor]) -> str:
        if self.score is None:
            return "entropy" if "entropy" in scores else next(iter(scores))
        if self.score not in scores:
            raise ValueError(f"expected score to be one of {', '.join(scores)}, got {self.score!r}: change Dashboard's")
        return self.score

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring the parts of all processes together; W&B hears which value of each metric is best."""
        answers = joined({0: self._answers}).get(0, {})
        sums = [part for part in everyones(self._sums) if part is not None]
        doubtful = [sample for part in everyones(self._doubtful) for sample in part]
        self._collected = Collected(
            joined(self._scores),
            joined(self._running, dim=1),
            answers,
            reduce(add, sums) if sums else None,
            _most_doubtful(doubtful, self.most_uncertain),
        )
        names = getattr(trainer.datamodule, "ood_sets", {})  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            best = {"AUROC": "max", "AUPR_out": "max", "AUPR_in": "max", "FPR95": "min", "DetErr": "min"}
            scores = self._collected.scores.get(0, {})
            define_summaries(
                trainer, {f"ood/{s}/{q}/{m}": which for s in names for q in scores for m, which in best.items()}
            )

    # -- logging ------------------------------------------------------------------------------------------------------

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw and log; after `on_test_epoch_end`, so that the metrics of all callbacks are there."""
        found, self._collected = self._collected, None
        if not trainer.is_global_zero or found is None or not found.scores:
            return
        names = list(getattr(trainer.datamodule, "ood_sets", {}))  # type: ignore[attr-defined]
        sets = ["test", *names]
        scores = {i: _ordered(part, sets[i]) for i, part in found.scores.items() if i < len(sets)}
        drawn = self._test_figures(pl_module, found, scores, names)
        for i, name in enumerate(names, start=1):
            if i in scores and 0 in scores:
                drawn |= _ood_figures(scores[0], scores[i], name)
        drawn |= _structure_figure(pl_module)
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith(("test/", "ood/")) and value.numel() == 1
        }
        content = {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "model": _facts(pl_module) | {"passes": self._passes},
            "counts": {sets[i]: len(next(iter(part.values()))) for i, part in scores.items() if part},
            "headline_score": self._ranking(found.scores[0]) if found.scores.get(0) else None,
            "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
            "figures": [
                {"name": name, "file": f"{file_name(name)}.png", "alt": alt} for name, (_, alt) in drawn.items()
            ],
            "tables": self._tables(trainer, found, metrics, names),
        }
        for name, (figure, _) in drawn.items():
            log_figure(trainer, name, figure)
        folder = run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(pl_module, BRAINet) and pl_module.ggt is not None:
            (folder / "structure.json").write_text(pl_module.ggt.to_json())
        (folder / "dashboard.json").write_text(json.dumps(content, indent=1))
        rank_zero_info(f"figures and tables: {folder}; for a page of them: brainet report {folder}")

    def _test_figures(
        self, module: pl.LightningModule, found: Collected, scores: ByLoader, names: list[str]
    ) -> dict[str, tuple[Figure, str]]:
        """Figures of a classification's test set; of another task, none."""
        if not found.answers:
            return {}
        wrong, confidence = found.answers["wrong"], found.answers["confidence"]
        shown = {"as predicted": (confidence, 1.0 - wrong)}
        if "scaled" in found.answers:
            tau = float(module.task.tau)  # type: ignore[union-attr, arg-type]
            shown = {"before scaling": (confidence, 1.0 - wrong)}
            shown[f"after scaling, τ = {tau:.3g}"] = (found.answers["scaled"], 1.0 - wrong)
        ece = {label: figures.calibration_bins(*pair).ece for label, pair in shown.items()}
        rate, n = float(wrong.mean()), len(wrong)
        drawn = {
            "test/reliability": (
                figures.reliability(shown),
                f"Reliability diagram of {n:,} test samples: "
                + "; ".join(f"{label}, expected calibration error {100 * value:.2f} %" for label, value in ece.items()),
            )
        }
        if scores.get(0):
            areas = {name: float(risk_coverage(values, wrong).mean()) for name, values in scores[0].items()}
            best = min(areas, key=lambda name: areas[name])
            drawn["test/risk_coverage"] = (
                figures.risk_coverage_curves(scores[0], wrong),
                f"Error rate against coverage for {len(areas)} scores: {100 * rate:.2f} % when all are answered; the "
                f"smallest area, {100 * areas[best]:.2f} %, is that of {figures.readable(best)}",
            )
        if found.sums is not None and len(self._steps) > 1:
            curves = pass_metrics(found.sums)
            running = {i: _without_nan(part) for i, part in found.running.items()}
            aurocs = _running_aurocs(running, names)
            drawn["test/passes"] = (
                figures.pass_curves(self._steps, curves, aurocs, n),
                f"Metrics of the mean of the first t passes, t from 1 to {self._steps[-1]}: negative log-likelihood "
                f"from {curves['NLL'][0]:.3f} to {curves['NLL'][-1]:.3f}, "
                f"error from {100 * curves['error'][0]:.2f} % to {100 * curves['error'][-1]:.2f} %",
            )
        return drawn

    def _tables(
        self, trainer: pl.Trainer, found: Collected, metrics: dict[str, float], names: list[str]
    ) -> list[dict[str, str]]:
        """Log the tables; where each one is."""
        made = []
        if found.doubtful:
            cells = list(found.doubtful[0].cells)
            pictures = any(sample.picture is not None for sample in found.doubtful)
            columns = ["sample", *(["picture"] if pictures else []), *cells]
            rows = [
                [s.number, *([s.picture] if pictures else []), *(s.cells[name] for name in cells)]
                for s in found.doubtful
            ]
            by = figures.readable(self._ranking(found.scores[0]))
            log_table(trainer, "test/most_uncertain", columns, rows)
            caption = f"The {len(rows)} test samples of the highest {by}, the most uncertain first"
            made.append({"name": "test/most_uncertain", "file": "test_most_uncertain.csv", "caption": caption})
        rows = ood_rows(metrics)
        if rows:
            log_table(trainer, "ood/table", ["set", "score", *METRICS], rows)
            caption = "How well each score tells each set from the test set; unknown inputs are the positive class"
            made.append({"name": "ood/table", "file": "ood_table.csv", "caption": caption})
        elif names:
            rank_zero_warn("no ood/table: its metrics come from the callback OODEvaluation, add it to the Trainer")
        return made


def ood_rows(metrics: dict[str, float]) -> list[list[Any]]:
    """Logged `ood/<set>/<score>/<metric>` → a row for each set and score, in the order of logging."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for key, value in metrics.items():
        parts = key.removeprefix("ood/").rsplit("/", 2)  # from the right: a set may have a slash in its name
        if key.startswith("ood/") and len(parts) == 3 and parts[2] in METRICS:
            cells.setdefault((parts[0], parts[1]), {})[parts[2]] = value
    return [
        [*key, *(int(v) if m.startswith("n_") and v is not None else v for m in METRICS for v in [found.get(m)])]
        for key, found in cells.items()
    ]


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


def _most_doubtful(samples: list[Sample], k: int) -> list[Sample]:
    return sorted(samples, key=lambda sample: (-sample.doubt, sample.number))[:k]


def _ordered(scores: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The scores that can be ordered; one with NaN is left out of the figures, and said so."""
    kept = _without_nan(scores)
    bad = [score for score in scores if score not in kept]
    if bad:
        rank_zero_warn(f"not in the figures, because of NaN in {name}: {', '.join(bad)}")
    return kept


def _without_nan(scores: dict[str, Tensor]) -> dict[str, Tensor]:
    return {score: values for score, values in scores.items() if not values.isnan().any()}


def _running_aurocs(running: ByLoader, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """Scores (S, N) of the first t passes by loader → score → set → AUROC for each t."""
    sets = {name: running[i] for i, name in enumerate(names, start=1) if i in running}
    if not sets:
        return {}
    return {
        score: {
            name: [ood_metrics(a, b)["AUROC"] for a, b in zip(inside, part[score], strict=True)]
            for name, part in sets.items()
        }
        for score, inside in running.get(0, {}).items()
        if all(score in part for part in sets.values())
    }


def _ood_figures(known: dict[str, Tensor], unknown: dict[str, Tensor], name: str) -> dict[str, tuple[Figure, str]]:
    """Histograms and curves of one set, of the scores that both sides have."""
    known = {score: values for score, values in known.items() if score in unknown}
    if not known:
        return {}
    areas = {score: ood_metrics(values, unknown[score])["AUROC"] for score, values in known.items()}
    listed = ", ".join(f"{figures.readable(score)} {area:.3f}" for score, area in areas.items())
    return {
        f"ood/{name}/histograms": (
            figures.score_histograms(known, unknown, name),
            f"Histograms of {len(known)} scores on the test set and on {figures.readable(name)}",
        ),
        f"ood/{name}/curves": (
            figures.ood_curves(known, unknown, name),
            f"ROC and precision-recall curves on {figures.readable(name)}; AUROC: {listed}",
        ),
    }


def _structure_figure(module: pl.LightningModule) -> dict[str, tuple[Figure, str]]:
    """The tree at the temperature that the head draws with; of the heads on a MAP structure, that structure."""
    ggt = module.ggt if isinstance(module, BRAINet) else None
    if ggt is None:
        return {}
    temperature = module.head.temperature if isinstance(module.head, BRAINetHead) else 1.0
    alt = f"Tree of {ggt.num_variables} variables, depth {ggt.depth}; colour is the probability of being used"
    return {"structure/tree": (draw_ggt(ggt, temperature), alt)}


def _facts(module: pl.LightningModule) -> dict[str, Any]:
    """What the report says about the model in one line."""
    head = getattr(module, "head", None)
    facts: dict[str, Any] = {
        "head": getattr(module, "head_name", type(module).__name__),
        "task": type(getattr(module, "task", module)).__name__.lower(),
        "inference": getattr(module, "inference", None),
        "head_parameters": None if head is None else sum(p.numel() for p in head.parameters()),
        "parameters": sum(p.numel() for p in module.parameters()),
    }
    if isinstance(head, BRAINetHead):
        facts["temperature"] = head.temperature
    return facts
