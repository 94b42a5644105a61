"""`risk_control`: a promise about the answers of a model, behind every door."""

from __future__ import annotations

from typing import Any

from brainet_pl.calibration.risk import DELTA, ERROR, Promise
from brainet_pl.decisions.doors import predictor_behind


def risk_control(
    model: Any, error: float = ERROR, delta: float = DELTA, *, per_class: bool = False, missed: int | None = None
) -> Promise:
    """Let a model answer only where at most a share `error` of its answers is wrong, with 1 - `delta` certainty.

    It goes by the calibration data of the fit, which no weight was trained on: nothing is trained, and no data is
    needed. Predictions then have `answered` (B,), `Prediction.answer` is -1 where the model abstains, and estimators
    have `predict_answered`. What is promised is saved and exported with the model. Where it can't be promised, the
    error says how many rows, or which error, would do.

    Args:
        model: a fitted `BRAINet`, model of `swap_head`, module with a swapped layer, or `BRAINetClassifier`.
        error: the largest share of wrong answers, above 0 and below 1.
        delta: the probability, over the draw of calibration data, with which it may be larger.
        per_class: keep it among the answers of each class; a class that can't keep it is never answered.
        missed: the number of a class of whose samples at most `error` may be answered as another class, in place of
            wrong answers: "of the ill at most 2 % are called healthy".

    Returns:
        What is promised; as a text it is one sentence, with the share of inputs that is answered.
    """
    return predictor_behind(model).risk.control(error, delta, per_class=per_class, missed=missed)
