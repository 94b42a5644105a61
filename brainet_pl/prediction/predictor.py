"""The one road from an input to an answer, whoever walks it: Lightning, a swapped head, scikit-learn or an export."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from brainet_pl._utils import checks
from brainet_pl._utils.parts import make_part
from brainet_pl._utils.precision import full_precision
from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.threads import limit_threads
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.calibration import Calibrator, Conformal
from brainet_pl.calibration.density import make_density
from brainet_pl.calibration.perturb import MOST_ROWS, perturbed_copies
from brainet_pl.features.extraction import Extracted, run_backbone
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.network import Head, HeadSettings
from brainet_pl.network.base import MOST_PASSES, HeadInputs, Outputs, ResidualHead, need_tree, run_head, train_head
from brainet_pl.prediction.finite import nan_rows
from brainet_pl.scores import (
    FDBD,
    GEN,
    KNN,
    RMDS,
    Generative,
    KLMatching,
    Mahalanobis,
    NNGuide,
    Own,
    Score,
    ScoreContext,
    ScoreSet,
    Shaped,
    Stages,
    Verdict,
    ViM,
)
from brainet_pl.scores.base import LastLayer
from brainet_pl.scores.expectation import Expectation
from brainet_pl.scores.fitting import fit_score, fit_score_on_shares
from brainet_pl.scores.left_out import expect
from brainet_pl.structure import GGT
from brainet_pl.tasks import Task
from brainet_pl.tasks.passes import Passes


class Predictor(nn.Module):
    """A backbone, a head and all that is said of a prediction: scores, calibration, conformal sets, verdict.

    Training needs `loss`. Afterwards `fit_scores` fits scores to the training data, `observe` sees batches of held-out
    data and `finalize` learns from them; `predict` gives everything that a user gets of an input.

    Args:
        backbone: the feature extractor.
        task: what the outputs of the head mean.
        head: maps features to outputs; None where its shape is not known yet, see `build_head`.
        num_passes: how often a head that draws is run for a prediction.
        **parts: scores, calibration, conformal and verdict, as `attach` takes them.
    """

    def __init__(
        self, backbone: FeatureExtractor, task: Task, head: Head | None = None, num_passes: int = 15, **parts: Any
    ) -> None:
        super().__init__()
        self.task, self.backbone = task, backbone
        self.num_passes = checks.whole("passes", num_passes, 1, MOST_PASSES)
        self.in_features: int | None = None
        self.has_base_logits = False  # whether there were base logits to add to when the head was built
        self.scores = ScoreSet([], task.units)
        self.calibration: Calibrator | None = None
        self.conformal: Conformal | None = None
        self.verdict = Verdict()
        self.attach(**parts)
        self.head: Head | None = head
        self._held: list[tuple[Tensor, Tensor]] = []  # features and targets of an epoch of held-out data

    def attach(
        self,
        scores: Sequence[Score | str | Mapping[str, Any]] | str = (),
        calibration: Calibrator | str | Mapping[str, Any] | None = None,
        conformal: Conformal | str | Mapping[str, Any] | None = None,
        verdict: Verdict | Mapping[str, Any] | None = None,
    ) -> None:
        """Set what is said of a prediction beyond its average, in place of what was set before.

        Args:
            scores: further scores of inputs unlike the training data; "all" is every one that the model can have.
            calibration: maps averaged predictions to better calibrated ones.
            conformal: sets of classes or intervals of numbers that hold the truth at a chosen level.
            verdict: by which score and at which level an input is called known; None is 5 %.
        """
        wanted = scores if not isinstance(scores, str) else self._every_score() if scores == "all" else [scores]
        found = ScoreSet([make_part(Score, score, "scores") for score in wanted], self.task.units)
        for score in found:
            score.check("energy" in self.task.units, self.backbone.raw)
        calibrator = None if calibration is None else make_part(Calibrator, calibration, "calibration")
        if calibrator is not None:
            calibrator.check(self.task)
            calibrator.add_required_scores(found, None if self.backbone.raw else self.backbone.model)
        chosen = Verdict(**verdict) if isinstance(verdict, Mapping) else verdict or Verdict()
        if chosen.score is None:
            found.join_for_verdict()
        chosen.choose([], list(found.units))
        sets = None if conformal is None else make_part(Conformal, conformal, "conformal")
        if sets is not None:
            sets.check(self.task)
        self.scores, self.calibration, self.conformal, self.verdict = found, calibrator, sets, chosen
        self.tap_scores()

    def _every_score(self) -> list[Score]:
        """All scores that this model can have: a table of everything."""
        body, classes = self.backbone, "energy" in self.task.units
        whole = not body.raw and body.frozen and body.head_layer != ""  # the network's own layer is there, or found
        density = make_density(None if body.raw else body.model)
        found: list[Score] = [Generative(), *([density] if isinstance(density, Stages) else []), KNN(), Mahalanobis()]
        found += [RMDS(), GEN(), KLMatching()] if classes else []
        shaped = [Shaped("scale"), Shaped("ash", 0.9, name="ash")]
        return found + ([Own(), ViM(), FDBD(), NNGuide(), *shaped] if whole and classes else [])

    def tap_scores(self) -> None:
        """Let the backbone read the layers that scores want."""
        for score in self.scores:
            if score.taps is not None:
                self.backbone.add_view(score.taps)

    def build_head(
        self, settings: HeadSettings, in_features: int, ggt: GGT | None = None, has_base_logits: bool = False
    ) -> None:
        """Build the head for a number of features, wired by a learned tree where it needs one."""
        self.in_features, self.has_base_logits = in_features, has_base_logits
        device = next((p.device for p in self.parameters()), None)
        head = settings.resolve_skip(has_base_logits).build(in_features, self.task.out_features, ggt)
        self.head = head if device is None else head.to(device)

    @property
    def ggt(self) -> GGT | None:
        """The learned tree, once there is one; of the heads on a MAP structure, that structure."""
        return None if self.head is None else self.head.ggt

    def require_head(self, settings: HeadSettings | None = None) -> Head:
        """The head, or an error that says how to get one."""
        if self.head is None and settings is not None:
            need_tree(None, settings)
        if self.head is None:
            raise ValueError(
                "expected a model with a head, got one that was never fitted: fit it, or load a checkpoint"
            )
        return self.head

    # -- training -----------------------------------------------------------------------------------------------------

    def loss(self, x: Any, target: Tensor) -> Tensor:
        """Inputs (B, …) and targets (B,) → the mean loss of all sub-networks that a training step draws.

        Of `Bayes` and `VBLL`, without their penalty: add `head.penalty()` divided by the number of training samples.
        """
        return self.loss_and_outputs(x, self.task.check(target))[0]

    def loss_and_outputs(self, x: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and checked targets (B, …) → the task's loss and the head's outputs, (B, O) or (M, B, O)."""
        head, readings = self.require_head(), self.read(x)
        outputs = train_head(head, readings.features, self.base_outputs(readings))
        return self.task.expected_loss(outputs, target, head.output_variance(readings.features)), outputs

    def read(self, x: Any) -> BackboneOutput:
        """Inputs → features (B, d), and base logits (B, C) where the head adds to them; features pass as they are."""
        if isinstance(x, BackboneOutput):
            return x
        return run_backbone(self.backbone, x) if self._needs_base_logits else BackboneOutput(self.backbone(x))

    @property
    def _needs_base_logits(self) -> bool:
        """Whether a prediction takes the logits of the layer that was removed."""
        return self._adds_base_logits

    @property
    def _adds_base_logits(self) -> bool:
        return isinstance(self.head, ResidualHead) and self.head.adds_base_logits

    def base_outputs(self, readings: BackboneOutput) -> Tensor | None:
        """The outputs (B, O) of the layer that was removed, where the head adds to them."""
        if not self._adds_base_logits or readings.base_logits is None:
            return None
        return self.task.base_outputs(readings.base_logits)

    def head_inputs(self, sample: Extracted) -> HeadInputs:
        """Extracted samples as a head takes them, where the head is."""
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        base = self.base_outputs(sample.output.to(device))
        return HeadInputs(sample.features.to(device), self.task.check(sample.targets).to(device), base)

    # -- an answer ----------------------------------------------------------------------------------------------------

    def passes(self, x: Any, count: int | None = None) -> Passes:
        """Inputs → outputs of all passes and what follows from them. The backbone runs once; only the head T times."""
        readings = x if isinstance(x, BackboneOutput) else run_backbone(self.backbone, x)
        count = self.num_passes if count is None else count
        outputs, weights = self.head_outputs(readings, count)
        predicted, scores = self.task.predictive(outputs, weights), self.task.scores(outputs, weights)
        return Passes(outputs, weights, readings.features, predicted, scores, readings, nan_rows(x, predicted.shape[0]))

    def head_outputs(self, readings: BackboneOutput, count: int) -> Outputs:
        """What a backbone gave → outputs (T, B, O) of the head's passes, with their weights."""
        return run_head(self.require_head(), readings.features, count, self.base_outputs(readings))

    @property
    def calibrates(self) -> bool:
        """Whether there is a calibrator that changes predictions: one that has seen no validation data changes none."""
        if self.calibration is None or self.calibration.score_name is not None:
            return self.calibration is not None
        device = next((b.device for b in self.calibration.buffers()), torch.device("cpu"))
        width = getattr(self.task, "num_classes", self.task.out_features)
        probs = torch.linspace(0.0, 3.0, 3 * width, device=device).view(3, -1).softmax(dim=1)
        try:
            return not torch.allclose(self.calibration(probs, {}), probs, rtol=1e-5, atol=1e-7)
        except KeyError:  # it reads a score that it does not name
            return True

    def calibrated(self, passes: Passes, scores: Mapping[str, Tensor]) -> Tensor:
        """The averaged prediction as a user gets it: the same, or calibrated."""
        if self.calibration is None:
            return passes.predicted
        with full_precision(passes.predicted.device):
            return torch.as_tensor(self.calibration(passes.predicted, scores))

    @property
    def _preferred_score(self) -> str | None:
        return None if self.calibration is None else self.calibration.score_name

    def verdict_score(self, scores: Iterable[str]) -> str | None:
        """The name of the score that `judge` goes by, among these; None without held-out data to compare with."""
        return self.scores.verdict_score(scores, self.verdict, self._preferred_score)

    def judge(self, scores: Mapping[str, Tensor], nan: Tensor | None = None) -> dict[str, Tensor]:
        """Scores (B,) → the verdict, `known_p` and `known`; nothing without held-out data to compare with.

        Samples of which `nan` (B,) is true, see `Passes.nan_rows`, have 0 and are not known, whatever their score.
        """
        verdict = self.scores.judge(scores, self.verdict, self._preferred_score)
        if not verdict or nan is None:
            return verdict
        return {"known_p": verdict["known_p"].masked_fill(nan, 0.0), "known": verdict["known"] & ~nan}

    def predict(self, x: Any, passes: int | None = None) -> dict[str, Tensor]:
        """Inputs (B, …) → all that is said of each: the prediction, conformal sets, verdict and scores, by name.

        A classification has `probabilities` (B, C) and `class` (B,); with held-out data `known_p` (B,), the share of
        held-out samples that are at least as strange, and `known` (B,). A sample with NaN in its inputs is never known,
        and has the class -1 where its probabilities are NaN. Without gradients call it under `torch.no_grad()`.
        """
        return self.describe(self.passes(x, passes))

    def all_scores(self, passes: Passes) -> dict[str, Tensor]:
        """Every score (B,) of a prediction by name: the prediction's own and those of the features."""
        found: dict[str, Tensor] = self.scores(passes)
        return found

    def describe(self, passes: Passes) -> dict[str, Tensor]:
        """What `predict` gives, from passes that were run."""
        scores = self.all_scores(passes)
        final = self.calibrated(passes, scores)
        answer = self.task.predict(passes, final)
        if self.conformal is not None:
            answer |= self.conformal(final)
        answer |= self.judge(scores, passes.nan_rows(final))
        return answer | {name: values for name, values in scores.items() if name not in answer}  # `std` is calibrated

    @property
    def expected(self) -> Expectation | None:
        """By which score unknown inputs are told, and how many are expected to be noticed; None before `expect`."""
        return self.scores.expected.value

    @property
    def expected_noticed(self) -> float:
        """The share of unknown inputs that the verdict is expected to notice; NaN where that was not estimated."""
        return math.nan if self.expected is None else self.expected.share

    # -- what needs no training ---------------------------------------------------------------------------------------

    def fit_scores(self, features: TrainingFeatures, scores: Sequence[Score], progress: bool = True) -> None:
        """Fit scores to the training features; several processes share the samples and the work."""
        if not scores:
            return
        share = features.share(progress=progress) if features.processes > 1 else None
        found = features.all(progress=progress) if share is None else None
        labels, classes = self.task.classes(share.concat()[1] if share is not None else found.targets)  # type: ignore[union-attr]
        if any(score.taps is not None and not self.backbone.widths(score.taps) for score in scores):
            features.probe()  # features came from a store, and the backbone has not met an input yet
        bar = tqdm(scores, "fitting scores", disable=None if progress else True, delay=2, leave=False)
        for score in bar:
            bar.set_postfix_str(score.describe())
            score.set_context(self._score_context(score, classes))
            if share is not None:
                fit_score_on_shares(score, share, labels)
            elif found is not None:
                fit_score(score, found.output.view(score.taps), labels)

    def _score_context(self, score: Score, classes: int) -> ScoreContext:
        body, taps = self.backbone, score.taps
        layer = None if body.last_layer is None else LastLayer(*body.last_layer)
        return ScoreContext(
            classes, body.raw, self.ggt, body.widths(taps), body.is_scaled(taps), body.moments(taps), layer
        )

    def expect(self, seen: Extracted, held: Extracted) -> Expectation | None:
        """Estimate without unknown data how many unknown inputs the verdict will notice, and keep it in checkpoints.

        Each class in turn is left out of the scores, see `brainet_pl.scores.left_out`. Where the verdict names no
        score and one of those that it joins notices clearly more, it goes by that one from now on.

        Args:
            seen: features and targets of training samples; 5,000 are enough.
            held: the same of held-out samples.

        Returns:
            The estimate, whose text is a sentence; None where scores wait for training data.
        """
        default = self.scores.default_score(self.verdict, self._preferred_score)
        if default is None or self.scores.unfitted:
            return None
        seen, held = (Extracted(part.output, self.task.classes(part.targets)[0]) for part in (seen, held))
        with isolated_rng(0), limit_threads(1):  # many small steps: threads would wait for each other
            found = expect(self.scores, seen, held, default, self.verdict.level, choose=self.verdict.score is None)
        self.scores.expected.keep(found)
        return found

    def finalize_head(self, seen: Extracted, held: Extracted | None, size: int = 0) -> dict[str, float]:
        """Let the head choose what needs no training, from training samples and, where there are some, held-out ones.

        A `Tree` chooses the temperature of its posterior and the dropout of its predictions, and takes batch-norm
        statistics for its simultaneous pass; `Laplace` fits the Gaussian of its weights. Gives what was chosen,
        by name.

        Args:
            seen: all training samples, or a sample of them.
            held: held-out samples, or None.
            size: the number of training samples, where `seen` are fewer.
        """
        rows = None if held is None else self.head_inputs(held)
        inputs = self.head_inputs(seen)._replace(represents=max(1.0, size / max(1, len(seen.targets))))
        return self.require_head().finalize(inputs, rows, self._nll, self.num_passes)

    def _nll(self, outputs: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
        """The NLL of each target under the average of outputs; all zero where the task has no likelihood."""
        predicted = self.task.predictive(outputs, weights)
        found = self.task.nll(predicted, target)
        return predicted.new_zeros(len(target)) if found is None else found

    def observe(
        self, passes: Passes, scores: Mapping[str, Tensor], target: Tensor, numbers: Tensor | None = None
    ) -> None:
        """See a batch of held-out data.

        Args:
            passes: of the batch.
            scores: all scores (B,) of it.
            target: (B,) checked targets.
            numbers: (B,) the place of each sample in its set; None where batches come in order, in one process.
        """
        self.scores.observe(passes, scores)
        if self.calibration is not None:
            self.calibration.observe(passes.predicted, target, scores)
            self._keep_features(passes.features, target)
        if self.conformal is not None:
            self.conformal.observe(passes.predicted, target, scores, None if self.calibration is None else numbers)

    def _keep_features(self, features: Tensor, target: Tensor) -> None:
        """Keep the features of the first samples of an epoch, for a calibrator that learns from perturbed ones.

        Only the head is run again: where a score reads other layers, or the head adds to base logits, none are kept.
        """
        assert self.calibration is not None
        room = MOST_ROWS - sum(len(rows) for rows, _ in self._held)
        others = any(score.taps is not None or isinstance(score, Own) for score in self.scores)
        if self.calibration.learns_from_copies and room > 0 and not others and not self._needs_base_logits:
            self._held.append((features[:room].detach(), target[:room]))

    @torch.no_grad()
    def _observe_copies(self, calibration: Calibrator) -> None:
        """Show the calibrator what is predicted of perturbed copies of the features that were kept, and forget them."""
        held, self._held = self._held, []
        if not held:
            return
        dtype = next((p.dtype for p in self.require_head().parameters()), torch.float32)
        features, target = torch.cat([rows for rows, _ in held]).to(dtype), torch.cat([part for _, part in held])
        finite = features.isfinite().flatten(1).all(dim=1)
        features, target = features[finite], target[finite]
        if len(target) < 2:
            return
        for number, copy in enumerate(perturbed_copies(features, target)):
            with isolated_rng(0):  # the same sub-networks for all copies
                passes = self.passes(BackboneOutput(copy))
                calibration.observe_copy(number, passes.predicted, target, self.scores(passes))

    def finalize(self) -> dict[str, Tensor]:
        """Learn from what was observed, and forget it; gives numbers to log, `cal/…` and `conformal/…`."""
        self.scores.finalize()
        learned: dict[str, Tensor] = {}
        if self.calibration is not None:
            self._observe_copies(self.calibration)
            learned |= {f"cal/{name}": value for name, value in self.calibration.finalize().items()}
        if self.conformal is not None:  # after calibration: it is about what a user gets
            more = self.conformal.finalize(self.calibration)
            learned |= {f"conformal/{name}": value for name, value in more.items()}
        return learned
