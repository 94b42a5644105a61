"""Fit a score to the features of the training data, in one process or in several that share the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from brainet_pl.distributed.collectives import exchange, rank, serve_rank_zero
from brainet_pl.scores.base import Score
from brainet_pl.scores.density import check_training

if TYPE_CHECKING:
    from brainet_pl.features.extraction import ExtractedShare


def fit_score(score: Score, features: Tensor, labels: Tensor) -> None:
    """Check the training data, fit the score to them and mark it as ready.

    Args:
        score: any score whose context is set.
        features: (N, d), finite.
        labels: (N,) from 0 on; all 0 where there are no classes.
    """
    check_training(features, labels)
    score.fit(features, labels)
    score.set_ready(True)


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
    fit(features if len(features) else features.new_empty(0, width), labels, shared=True)
    score.set_ready(True)
