"""The one road from an input to an answer, whoever walks it: Lightning, a swapped head, scikit-learn or an export."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from brainet_pl._utils.parts import make_part
from brainet_pl._utils.precision import full_precision
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.calibration import Calibrator, Conformal, RiskControl
from brainet_pl.network import Head
from brainet_pl.prediction.defaults import AUTO_CALIBRATION, default_calibrator, default_scores
from brainet_pl.prediction.every_score import every_score
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.network import BackboneAndHead
from brainet_pl.prediction.prediction import Prediction
from brainet_pl.scores import Score, ScoreSet, Verdict
from brainet_pl.scores.expectation import Expectation
from brainet_pl.tasks import Task
from brainet_pl.tasks.passes import Passes

OF_DISAGREEMENT = ("expected_entropy", "mutual_information")  # scores that say nothing where all passes agree


class Predictor(BackboneAndHead):
    """A backbone, a head and all that is said of an input: probabilities, scores, conformal sets, verdict, risk.

    `loss` trains it, `brainet_pl.fitting` fits scores and learns from held-out data; `predict` answers.

    Args:
        backbone: the feature extractor.
        task: what the outputs of the head mean.
        head: maps features to outputs; None where its shape is not known yet, see `build_head`.
        num_passes: how often a head that draws is run for a prediction.
        risk: the share of answers that may be wrong, once there is calibration data; None promises nothing.
        **parts: scores, calibration, conformal and verdict, as `attach` takes them.
    """

    def __init__(
        self,
        backbone: FeatureExtractor,
        task: Task,
        head: Head | None = None,
        num_passes: int = 15,
        risk: float | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(backbone, task, num_passes)
        self.scores = ScoreSet([], task.units)
        self.calibration: Calibrator | None = None
        self.conformal: Conformal | None = None
        self.verdict = Verdict()
        self.risk = RiskControl(risk)
        self.attach(**parts)
        self.head: Head | None = head

    def attach(
        self,
        scores: Sequence[Score | str | Mapping[str, Any]] | str | None = (),
        calibration: Calibrator | str | Mapping[str, Any] | None = None,
        conformal: Conformal | str | Mapping[str, Any] | None = None,
        verdict: Verdict | Mapping[str, Any] | None = None,
    ) -> None:
        """Set what is said of a prediction beyond its average, in place of what was set before.

        Args:
            scores: further scores of inputs unlike the training data; "all" is every one that the model can have, None
                a density of the features.
            calibration: maps averaged predictions to better calibrated ones; "auto" is for classes a temperature, and
                confidence that fades by the density, where there is one.
            conformal: sets of classes or intervals of numbers that hold the truth at a chosen level.
            verdict: by which score and at which level an input is called known; None is 5 %.
        """
        if scores is None:
            scores = default_scores(self.backbone)
        elif scores == "all":
            scores = every_score(self.backbone, "energy" in self.task.units)
        elif isinstance(scores, str):
            scores = [scores]
        score_set = ScoreSet([make_part(Score, score, "scores") for score in scores], self.task.units)
        for score in score_set:
            score.check("energy" in self.task.units, self.backbone.raw)
        calibrator = self._make_calibrator(calibration, score_set)
        chosen = Verdict(**verdict) if isinstance(verdict, Mapping) else verdict or Verdict()
        if chosen.score is None:
            score_set.join_for_verdict()
        chosen.choose([], list(score_set.units))
        sets = None if conformal is None else make_part(Conformal, conformal, "conformal")
        if sets is not None:
            sets.check(self.task)
        self.scores, self.calibration, self.conformal, self.verdict = score_set, calibrator, sets, chosen
        self.tap_scores()

    def _make_calibrator(self, calibration: Any, scores: ScoreSet) -> Calibrator | None:
        if isinstance(calibration, str) and calibration == AUTO_CALIBRATION:
            calibration = default_calibrator(self.task, scores)
        if calibration is None:
            return None
        calibrator = make_part(Calibrator, calibration, "calibration")
        calibrator.check(self.task)
        calibrator.add_required_scores(scores, None if self.backbone.raw else self.backbone.model)
        return calibrator

    def tap_scores(self) -> None:
        """Let the backbone read the layers that scores want."""
        for score in self.scores:
            if score.taps is not None:
                self.backbone.add_view(score.taps)

    # -- an answer ----------------------------------------------------------------------------------------------------

    def forward(self, x: Any = None, **named: Tensor) -> Tensor:
        """Inputs → the logarithm of calibrated probabilities (B, C): `softmax` of it is what `predict` says.

        Of a regression: mean and variance (B, 2). Inputs are a tensor, a dictionary of tensors, or tensors by the names
        that the backbone takes. The answer is given in evaluation mode, whatever mode the model is in.
        """
        with evaluation_mode(self):
            return self.task.as_outputs(self.final(self.passes(named if x is None else x)))

    def final(self, passes: Passes) -> Tensor:
        """What a user gets of some passes: calibrated probabilities (B, C), or mean and variance (B, 2)."""
        return self.calibrated(passes, {} if self.calibration is None else self.scores.of_passes(passes))

    def calibrated(self, passes: Passes, scores: Mapping[str, Tensor]) -> Tensor:
        """The averaged prediction of some passes, calibrated where there is a calibrator."""
        return self._finish(passes.predicted, {**scores, **passes.scores})

    def _finish(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        if self.calibration is None:
            return predicted
        with full_precision(predicted.device):
            return torch.as_tensor(self.calibration(predicted, scores))

    def finish(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Averaged predictions (B, …) and scores before calibration → final predictions, and the scores of these."""
        final = self._finish(predicted, scores)
        return final, self.task.scores_of_answer(final, scores)

    @property
    def calibrates(self) -> bool:
        """Whether there is a calibrator that changes predictions: many change none before validation data."""
        return self.calibration is not None and self.calibration.changes_predictions

    @property
    def expected(self) -> Expectation | None:
        """By which score unknown inputs are told, and how many should be noticed; None where nothing was estimated."""
        return self.scores.expected.value

    @property
    def expected_noticed(self) -> float:
        """The share of unknown inputs that the verdict is expected to notice; NaN where that was not estimated."""
        return math.nan if self.expected is None else self.expected.share

    def verdict_score(self, scores: Iterable[str]) -> str | None:
        """The name of the score that `judge` goes by, among these; None without held-out data to compare with."""
        return self.scores.verdict_score(scores, self.verdict, preferred_score(self))

    def judge(self, scores: Mapping[str, Tensor], nan: Tensor | None = None) -> dict[str, Tensor]:
        """Scores (B,) → the verdict, `known_p` and `known`; nothing without held-out data to compare with.

        Samples of which `nan` (B,) is true, see `Passes.nan_rows`, have 0 and are not known, whatever their score.
        """
        verdict = self.scores.judge(scores, self.verdict, preferred_score(self))
        if not verdict or nan is None:
            return verdict
        return {"known_p": verdict["known_p"].masked_fill(nan, 0.0), "known": verdict["known"] & ~nan}

    def predict(self, x: Any, passes: int | None = None) -> Prediction:
        """Inputs (B, …) → all that is said of each: the prediction, conformal sets, verdict and scores, by name.

        A classification has `probabilities` (B, C) and `class` (B,); with held-out data `known_p` (B,), the share of
        held-out samples that are at least as strange, and `known` (B,). A sample with NaN in its inputs is never known,
        and has the class -1 where its probabilities are NaN. The answer is given in evaluation mode, whatever mode the
        model is in. Without gradients call it under `torch.no_grad()`. Where all passes agree, the scores of their
        disagreement are left out.
        """
        with evaluation_mode(self):
            return self.describe(self.passes(x, passes))

    def all_scores(self, passes: Passes) -> dict[str, Tensor]:
        """Every score (B,) of a prediction by name: of its logits, of the features, of the calibrated answer."""
        scores = self.scores.of_passes(passes)
        final, of_answer = self.finish(passes.predicted, scores)
        return self.scores.of_answer(replace(passes, predicted=final), scores | of_answer)

    def describe(self, passes: Passes) -> Prediction:
        """What `predict` gives, from passes that were run."""
        scores = self.all_scores(passes)
        final = self.calibrated(passes, scores)
        answer = self.task.predict(passes, final)
        if self.conformal is not None:
            answer |= self.conformal(final)
        verdict = self.judge(scores, passes.nan_rows(final))
        answer |= verdict | self.risk(final, verdict.get("known"))
        silent = OF_DISAGREEMENT if self.averages_one else ()
        for name, values in (scores | self.task.scores_of_answer(final, scores)).items():
            if name not in silent:
                answer.setdefault(name, values)  # `std` of the answer is the calibrated one
        return Prediction(answer)


def preferred_score(predictor: Predictor) -> str | None:
    """The score that the calibrator reads, which the verdict goes by where it names none."""
    return None if predictor.calibration is None else predictor.calibration.score_name
