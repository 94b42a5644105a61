"""Fit a score to the features of the training data, in one process or in several that share the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brainet_pl.distributed.collectives import exchange, rank, serve_rank_zero
from brainet_pl.scores.base import Score
from brainet_pl.scores.density import check_training
from brainet_pl.scores.robust import far_rows

if TYPE_CHECKING:
    from brainet_pl.features.extraction import ExtractedShare


def fit_score(score: Score, features: Tensor, labels: Tensor) -> Tensor:
    """Check the training data, fit the score to them and mark it as ready.

    Gives the numbers of the rows that lie so far out that the score was fitted without them.

    Args:
        score: any score whose context is set.
        features: (N, d), finite.
        labels: (N,) from 0 on; all 0 where there are no classes.
    """
    check_training(features, labels)
    far = far_rows(features, labels)
    score.fit(*without_rows(far, features, labels))
    score.set_ready(True)
    return far


def without_rows(numbers: Tensor, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Features (N, d) and labels (N,) without the rows of some numbers."""
    if not len(numbers):
        return features, labels
    kept = torch.ones(len(features), dtype=torch.bool, device=features.device)
    kept[numbers.to(features.device)] = False
    return features[kept], labels[kept]


def fit_score_on_shares(score: Score, share: ExtractedShare, labels: Tensor) -> None:
    """Fit a score in all processes, each with a share of the samples, which may be empty; a collective.

    A score that is made of sums adds them up over processes. Any other is fitted in the first process to the samples of
    all, and its state is sent to the others.

    Args:
        score: any score whose context is set.
        share: what this process has read of the training data.
        labels: (n,) of this share, from 0 on; all 0 where there are no classes.
    """
    if score.fits_shares:
        fit_score_on_rows(score, share.concat(score.taps)[0], labels)
        return
    labelled = share._replace(targets=list(labels.split([len(part) for part in share.targets])))  # type: ignore[no-untyped-call]
    every = labelled.gather()

    def fit_here(_: Any) -> dict[str, Tensor]:
        fit_score(score, every.output.view(score.taps), every.targets)
        return {name: value.cpu() for name, value in score.state_dict().items()}

    state = serve_rank_zero(fit_here, lambda request: None)
    if rank() > 0:
        score.load_state_dict(state)


def fit_score_on_rows(score: Score, features: Tensor, labels: Tensor) -> None:
    """Fit a score that adds up sums over processes to this one's features (n, d) and labels (n,); a collective.

    There may be no rows, whatever their width.
    """

    def check() -> int:
        if len(features):
            check_training(features, labels)
        return int(features.shape[1])

    width = max(exchange(check))
    fit: Any = score.fit
    if len(features):
        fit(*without_rows(far_rows(features, labels), features, labels), shared=True)
    else:
        fit(features.new_empty(0, width), labels, shared=True)
    score.set_ready(True)
