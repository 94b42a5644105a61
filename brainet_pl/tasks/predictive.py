"""Scores of a prediction itself: what one set of passes tells without looking at features."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from brainet_pl import uncertainty

PREDICTIVE_UNITS: Mapping[str, str] = {
    "max_softmax": "",
    "max_logit": "",
    "energy": "",
    "entropy": "nats",
    "expected_entropy": "nats",
    "mutual_information": "nats",
}


def predictive_scores(probs: Tensor, logits: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Probabilities and logits (T, B, C) of one set of passes → every predictive score, each (B,)."""
    return {
        "max_softmax": uncertainty.max_softmax(probs, weights),
        "max_logit": uncertainty.max_logit(logits, weights),
        "energy": uncertainty.energy(logits, weights),
        "entropy": uncertainty.predictive_entropy(probs, weights),
        "expected_entropy": uncertainty.expected_entropy(probs, weights),
        "mutual_information": uncertainty.mutual_information(probs, weights),
    }
