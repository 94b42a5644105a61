"""When a sentence of the report is green, amber or red: one table of rules, and one pure function for each.

Numbers stand here alone: the functions read them, and the table of the page and of docs/howto/report.md prints them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

Tone = Literal["good", "fair", "poor", "plain"]
ORDER: tuple[Tone, ...] = ("plain", "good", "fair", "poor")  # grey, green, amber, red

FEW = 50  # samples of a set below which nothing is said without doubt
FEW_BEHIND_LEVEL = 100  # validation samples behind the limit of the verdict, likewise
ECE = (0.02, 0.05)  # green up to the first, amber up to the second
QCE = (0.025, 0.06)
SHIFTED_ECE = (0.05, 0.15)
AUROC = (0.95, 0.85)
CHANCE = 1.5  # times the error that a perfectly calibrated model has by chance
WORSE_ECE = (0.005, 0.02)  # what calibration may add to the ECE: amber above the first, red above the second
WORSE_NLL = (0.02, 0.1)  # and to the NLL, in nats
SURE = 2.0  # standard errors that make a difference clear
HALF = 0.5


class Rule(NamedTuple):
    """What is judged, and what makes it green, amber or red."""

    what: str
    green: str
    amber: str
    red: str


def _points(value: float) -> str:
    return f"{100 * value:g}\u00a0points"


def _share(value: float) -> str:
    return f"{100 * value:g}\u00a0%"


RULES: Mapping[str, Rule] = {
    "calibration": Rule(
        "Calibration error (ECE) of the prediction that a user gets",
        f"at most {_share(ECE[0])}",
        f"at most {_share(ECE[1])}, or at most {CHANCE:g} times what chance alone gives with so many samples",
        "more",
    ),
    "intervals": Rule(
        "Error of the intervals of a regression (QCE): promised less actual share of targets inside, on average",
        f"at most {_share(QCE[0])}",
        f"at most {_share(QCE[1])}, or at most {CHANCE:g} times what chance alone gives with so many samples",
        "more",
    ),
    "calibrator": Rule(
        "What calibration on validation data changes, on test data and after shifts of them",
        f"adds at most {_points(WORSE_ECE[0])} of ECE and {WORSE_NLL[0]:g} nats of NLL, or lowers them",
        "adds more, or there was no validation data to learn from",
        f"adds more than {_points(WORSE_ECE[1])} of ECE or {WORSE_NLL[1]:g} nats of NLL",
    ),
    "shift": Rule(
        "Calibration error (ECE) after shifts of the inputs, mean over all shifts",
        f"at most {_share(SHIFTED_ECE[0])}",
        f"at most {_share(SHIFTED_ECE[1])}",
        "more",
    ),
    "known": Rule(
        "Known inputs that are called unknown",
        f"no more than the level, or within {SURE:g} standard errors of it",
        f"more than that; or fewer than {FEW_BEHIND_LEVEL} validation samples behind the limit",
        f"more than twice the level, by more than {SURE:g} standard errors",
    ),
    "unknown": Rule(
        "Unknown inputs that are called unknown, for each set",
        "at least half of them, and clearly more often than known ones",
        f"fewer than half, but more often than known ones by more than {SURE:g} standard errors",
        "not clearly more often than known ones",
    ),
    "expected": Rule(
        "What the verdict should notice of unknown inputs, by leaving classes out of the training data in turn",
        "at least half",
        "fewer, or not known",
        "–",
    ),
    "ranking": Rule(
        "Unknown inputs of a model without a verdict: how often one scores higher than a known one (AUROC)",
        f"at least {_share(AUROC[0])} of the pairs",
        f"at least {_share(AUROC[1])}",
        "less",
    ),
    "baseline": Rule(
        "Validation NLL of the head less that of a linear layer, or of the layer that it replaces",
        "at most one standard error",
        f"at most {SURE:g} standard errors",
        "more",
    ),
    "few": Rule(f"Anything said of fewer than {FEW} samples", "–", "always: too few to be sure", "–"),
}


def worst(*tones: Tone) -> Tone:
    """The worst of several."""
    return max(tones, key=ORDER.index)


def doubted(tone: Tone, samples: int) -> Tone:
    """Amber in place of green and red where there are too few samples to be sure."""
    return "fair" if samples < FEW and tone != "plain" else tone


def up_to(value: float, limits: tuple[float, float], chance: float = 0.0) -> Tone:
    """Green up to the first limit, amber up to the second or to what chance gives, red above.

    >>> up_to(0.01, ECE), up_to(0.03, ECE), up_to(0.08, ECE), up_to(0.08, ECE, chance=0.07)
    ('good', 'fair', 'poor', 'fair')
    """
    return "good" if value <= limits[0] else "fair" if value <= max(limits[1], CHANCE * chance) else "poor"


def calibrator(ece: float | None, nll: float | None) -> Tone:
    """What calibration adds to ECE and NLL (None where there is no such number); below 0 it helps.

    >>> calibrator(-0.1, 0.001), calibrator(0.01, None), calibrator(0.01, 0.5)
    ('good', 'fair', 'poor')
    """
    added = [(ece, WORSE_ECE), (nll, WORSE_NLL)]
    return worst("good", *(up_to(value, limits) for value, limits in added if value is not None))


class Share(NamedTuple):
    """So many of so many samples."""

    hits: int
    samples: int

    @property
    def value(self) -> float:
        """As a number from 0 to 1."""
        return self.hits / self.samples


def level_error(level: float, samples: int, behind: int | None) -> float:
    """Standard error of the share of known inputs that are called unknown, where `level` of them should be.

    It comes from the tested samples and from the validation samples behind the limit (None where nobody knows).
    """
    return math.sqrt(level * (1 - level) * (1 / samples + (1 / behind if behind else 0.0)))


def known(share: Share, level: float, behind: int | None) -> Tone:
    """Whether known inputs are called unknown more often than promised.

    >>> known(Share(25, 433), 0.05, 152), known(Share(35, 433), 0.05, 1000), known(Share(200, 433), 0.05, 1000)
    ('good', 'fair', 'poor')
    """
    if share.value > 2 * level + SURE * level_error(2 * level, share.samples, behind):
        return "poor"
    if share.value > level + SURE * level_error(level, share.samples, behind):
        return "fair"
    return "fair" if behind is not None and behind < FEW_BEHIND_LEVEL else "good"


def clearly_more(share: Share, other: Share) -> bool:
    """Whether a share exceeds another by more than `SURE` standard errors of their difference."""
    both = (share.hits + other.hits + 1) / (share.samples + other.samples + 2)
    error = math.sqrt(both * (1 - both) * (1 / share.samples + 1 / other.samples))
    return share.value - other.value > SURE * error


def unknown(share: Share, known_share: Share) -> Tone:
    """Whether unknown inputs are noticed: called unknown, and more often than known ones are.

    >>> flagged = Share(22, 433)
    >>> unknown(Share(255, 354), flagged), unknown(Share(90, 354), flagged), unknown(Share(15, 354), flagged)
    ('good', 'fair', 'poor')
    """
    if not clearly_more(share, known_share):
        return "poor"
    return "good" if share.value >= HALF else "fair"


def expected(share: float | None) -> Tone:
    """The share of a class left out that is noticed; None where nobody knows."""
    return "good" if share is not None and share >= HALF else "fair"


def ranking(auroc: float) -> Tone:
    """How well a score ranks unknown above known inputs, where nothing is called unknown."""
    return up_to(1 - auroc, (1 - AUROC[0], 1 - AUROC[1]))


def baseline(gap: float, error: float | None) -> Tone:
    """The NLL of the head less that of a simpler layer, and the standard error of that (None: not known).

    >>> baseline(-0.1, 0.01), baseline(0.015, 0.01), baseline(0.1, 0.01), baseline(0.1, None)
    ('good', 'fair', 'poor', 'fair')
    """
    if error is None:
        return "good" if gap <= 0 else "fair"
    return up_to(gap, (max(error, 0.0), SURE * error))
