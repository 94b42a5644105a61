"""Fits scores of inputs unlike the training data to training features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from tqdm.auto import tqdm

from brainet_pl._utils.framework import rank_zero_warn
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.explain.places import learn_places
from brainet_pl.features.extraction import Extracted
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.prediction.finite import finite_rows, finite_samples
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import Score, ScoreContext, Stages
from brainet_pl.scores.base import LastLayer
from brainet_pl.scores.fitting import fit_score, fit_score_on_shares
from brainet_pl.scores.robust import name_rows, warn_of_far_rows


def fit_scores(
    predictor: Predictor, features: TrainingFeatures, scores: Sequence[Score] | None = None, progress: bool = True
) -> list[Score]:
    """Fit scores to the training features; several processes share the samples and the work. Gives what was fitted.

    Args:
        predictor: the model that the scores belong to.
        features: of its training data.
        scores: those to fit; None is all of the model. Such as learn nothing from features are passed over.
        progress: show progress bars.
    """
    wanted = [score for score in (predictor.scores if scores is None else scores) if score.needs_fit]
    if not wanted:
        return []
    task = predictor.task
    fit_one: Callable[[Score], Tensor | None]
    if features.processes > 1:
        share = features.share(progress=progress)
        labels, num_classes = task.classes(share.concat()[1])
        fit_one = partial(fit_score_on_shares, share=share, labels=labels)
    else:
        every = features.all(progress=progress)
        samples = _finite(every)
        labels, num_classes = task.classes(samples.targets)

        def fit_one(score: Score) -> Tensor:
            return fit_score(score, samples.output.view(score.taps), labels)

    if any(score.taps is not None and not predictor.backbone.widths(score.taps) for score in wanted):
        features.probe()  # features came from a store, and the backbone has not met an input yet
    left_out: set[int] = set()
    bar = tqdm(wanted, "fitting scores", disable=None if progress else True, delay=2, leave=False)
    for score in bar:
        bar.set_postfix_str(score.describe())
        score.set_context(score_context(predictor, score, num_classes))
        far = fit_one(score)
        left_out |= set() if far is None else set(far.tolist())
    if any(isinstance(score, Stages) for score in wanted):
        learn_places(predictor, features, len(labels))
    if features.processes == 1:
        _keep_known(predictor, wanted, every.output, features.numbers)
    if left_out:
        numbers = torch.tensor(sorted(left_out))
        warn_of_far_rows(numbers if features.numbers is None else features.numbers[numbers], len(labels))
    return wanted


def _finite(samples: Extracted) -> Extracted:
    """The samples whose features are finite; a warning names the others."""
    left_out = (~finite_rows(samples.output)).nonzero()[:, 0]
    if len(left_out):
        rank_zero_warn(
            f"scores are fitted without {len(left_out):,} of {len(samples.targets):,} training samples, "
            f"{name_rows(left_out)}: their features have NaN or infinity; correct or drop them"
        )
    return finite_samples(samples)


def _keep_known(predictor: Predictor, wanted: Sequence[Score], output: BackboneOutput, numbers: Tensor | None) -> None:
    """Keep a few training samples by the features of the first density, to name what a new sample resembles."""
    finite = finite_rows(output)
    numbers = (torch.arange(len(finite)) if numbers is None else numbers)[finite]
    for score in wanted:
        if isinstance(score, Stages) or score.densities:
            predictor.scores.known.fit(output.view(score.taps)[finite], numbers)
            return


def score_context(predictor: Predictor, score: Score, num_classes: int) -> ScoreContext:
    """What a score may know of the model around it."""
    backbone, taps = predictor.backbone, score.taps
    layer = None if backbone.last_layer is None else LastLayer(*backbone.last_layer)
    return ScoreContext(
        num_classes,
        backbone.raw,
        predictor.ggt,
        backbone.widths(taps),
        backbone.is_scaled(taps),
        backbone.moments(taps),
        layer,
    )
