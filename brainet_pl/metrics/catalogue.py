"""The one catalogue of numbers: title, unit and direction of each, by its key. Nothing here needs torch.

The classes of `measures` take theirs from here. A record of a test holds them beside each value; pages of runs that
have no record, or one without them, find them here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

Better = Literal["higher", "lower"] | None
MeasureUnit = Literal["share", "nats", "", "target"]


class Facts(NamedTuple):
    """What is known of a number."""

    key: str  # Under which it is logged, behind the stage: `cls/NLL`
    title: str  # What a page calls it
    unit: MeasureUnit = ""  # "share" of 1, "nats", "target" for the units of the target, or ""
    higher_is_better: bool | None = False  # None where neither direction is better

    @property
    def better(self) -> Better:
        """Whether "higher" or "lower" values are better; None where neither is."""
        return direction(self.higher_is_better)


def direction(higher_is_better: bool | None) -> Better:
    """The direction in words."""
    return None if higher_is_better is None else "higher" if higher_is_better else "lower"


CATALOGUE: Mapping[str, Facts] = {
    facts.key: facts
    for facts in (
        Facts("cls/Acc", "Accuracy", "share", True),
        Facts("cls/NLL", "NLL", "nats"),
        Facts("cls/Brier", "Brier score"),
        Facts("cal/ECE", "Calibration error", "share"),
        Facts("cal/aECE", "Calibration error, adaptive bins", "share"),
        Facts("cal/MCE", "Calibration error, worst bin", "share"),
        Facts("cal/smECE", "Calibration error, smooth", "share"),
        Facts("sc/AURC", "Risk–coverage area, by confidence", "share"),
        Facts("sc/AUGRC", "Wrong answers, mean over coverages", "share"),
        Facts("sc/Risk@#Cov", "Errors among the # % most certain", "share"),  # "#" is a percentage
        Facts("ens/Disagreement", "Passes that answer differently", "share", None),
        Facts("ml/Acc", "Labels that are right", "share", True),
        Facts("ml/NLL", "NLL of a label", "nats"),
        Facts("ml/Brier", "Brier score of a label"),
        Facts("ml/ECE", "Calibration error of labels", "share"),
        Facts("ml/ECE_by_label", "Calibration error, mean over labels", "share"),
        Facts("ml/mAP", "Mean average precision", "share", True),
        Facts("ml/AUROC", "AUROC, mean over labels", "share", True),
        Facts("reg/RMSE", "RMSE", "target"),
        Facts("reg/MAE", "MAE", "target"),
        Facts("reg/NLL", "NLL", "nats"),
        Facts("cal/coverage#", "Targets inside the # % interval", "share", None),
        Facts("cal/sharpness", "Mean width of the 95 % interval", "target"),
        Facts("cal/QCE", "Calibration error of intervals", "share"),
        Facts("conformal/Coverage", "Sets that hold the label", "share", None),
        Facts("conformal/Size", "Mean size of the sets"),
        Facts("conformal/WorstClassCoverage", "Sets that hold the label, worst class", "share", True),
        Facts("conformal/Width", "Mean width of the intervals", "target"),
    )
}
SEPARATION: Mapping[str, Better] = {  # measure of how well a score tells two sets apart → what is good
    "AUROC": "higher",
    "AUPR_out": "higher",
    "AUPR_in": "higher",
    "FPR95": "lower",
    "DetErr": "lower",
    "AUROC_full": "higher",  # shifted known samples count as known
    "SCOD": "lower",  # wrong and unknown samples answered, mean over coverages
    "n_id": None,
    "n_ood": None,
}
SHIFTED: Mapping[str, str] = {  # measure of a shifted set → the key of the same measure
    "Acc": "cls/Acc",
    "NLL": "cls/NLL",
    "Brier": "cls/Brier",
    "ECE": "cal/ECE",
    "RMSE": "reg/RMSE",
}


def facts_of(key: str) -> Facts:
    """What is known of the number that is logged under a key, with or without stages before it.

    A key that nobody knows is its own title.

    >>> facts_of("test/scaled/cal/coverage95").title
    'Targets inside the 95 % interval'
    """
    short = "/".join(key.split("/")[-2:])
    percent = re.search(r"[\d.]+(?=(Cov)?$)", short)
    found = CATALOGUE.get(short)
    if found is None and percent is not None:
        pattern = CATALOGUE.get(short.replace(percent.group(), "#"))
        found = pattern and pattern._replace(title=pattern.title.replace("#", percent.group()))
    return found._replace(key=key) if found else Facts(key, key, "", None)
