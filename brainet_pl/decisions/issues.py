"""`find_label_issues`: labels that look wrong, by what the labels of all other samples say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainet_pl.decisions.out_of_fold import out_of_fold
from brainet_pl.decisions.page import write_pages
from brainet_pl.decisions.quality import label_quality, looks_wrong

Floats = NDArray[np.float64]


class LabelIssues(NamedTuple):
    """How well the label of each of N samples fits what the others say.

    Attributes:
        label: (N,) the class that was given.
        suggested: (N,) the most probable class.
        quality: (N,) the out-of-fold probability of the label, from 0, wrong, to 1.
        margin: (N,) the same less that of the most probable other class, from 0 to 1.
        wrong: (N,) whether the label looks wrong: another class is as probable as samples of that class have it.
        order: (N,) numbers of the samples, the worst label first.
    """

    label: NDArray[np.int64]
    suggested: NDArray[np.int64]
    quality: Floats
    margin: Floats
    wrong: NDArray[np.bool_]
    order: NDArray[np.int64]

    def __str__(self) -> str:
        """One sentence for a user."""
        few = f"{int(self.wrong.sum()):,} of {len(self.label):,} labels look wrong"
        first = self.order[0]
        return (
            f"{few}; the worst is sample {first}: class {self.label[first]} has a probability of "
            f"{self.quality[first]:.2g}, class {self.suggested[first]} is suggested"
        )

    def rows(self, class_names: Sequence[str] | None = None, top: int | None = None) -> list[dict[str, Any]]:
        """A row for each of the `top` worst labels, by the names of columns; None is all."""

        def name(number: int) -> Any:
            return int(number) if class_names is None else class_names[number]

        found = []
        for i in self.order[:top]:
            row = {"sample": int(i), "label": name(self.label[i]), "suggested": name(self.suggested[i])}
            numbers = {"quality": round(float(self.quality[i]), 4), "margin": round(float(self.margin[i]), 4)}
            found.append(row | numbers | {"wrong": bool(self.wrong[i])})
        return found

    def save(
        self, folder: str | Path, pictures: Any = None, class_names: Sequence[str] | None = None, top: int = 100
    ) -> Path:
        """Write `labels.csv` of all samples, and the `top` worst as `labels.html` and `labels.png`; gives the page.

        Args:
            folder: is made where there is none.
            pictures: (N, C, H, W), or a function number → (C, H, W) of a sample, where samples are images.
            class_names: names of the classes.
            top: labels on the page.
        """
        return write_pages(Path(folder), "labels", str(self), self.rows(class_names), pictures, top)


def find_label_issues(model: Any, data: Any = None, *, progress: bool = True) -> LabelIssues:
    """Judge the label of each sample by heads that learned from the other samples.

    Args:
        model: fitted, behind any door. Its head is left as it is; new ones are trained on features of its backbone, so
            that labels are judged fairly where the backbone was not trained on them.
        data: inputs and labels: a pair of tensors, a dataset, or a loader that does not shuffle. None for an estimator,
            whose folds have judged the rows of its `fit`.
        progress: show progress bars.
    """
    probabilities, labels = out_of_fold(model, data, progress)
    return issues_of(probabilities, labels)


def issues_of(probabilities: Floats, labels: NDArray[np.int64]) -> LabelIssues:
    """Out-of-fold probabilities (N, C), of any model, and labels (N,) → what looks wrong.

    >>> found = issues_of(np.array([[0.9, 0.1], [0.8, 0.2], [0.2, 0.8], [0.9, 0.1]]), np.array([0, 0, 1, 1]))
    >>> found.order.tolist(), found.wrong.tolist()
    ([3, 1, 2, 0], [False, False, False, True])
    """
    if len(np.unique(labels)) < 2:
        raise ValueError(
            f"expected labels of two classes at the least, got {len(labels)} of one: no other class can be suggested"
        )
    quality = label_quality(probabilities, labels)
    margin = label_quality(probabilities, labels, "margin")
    order = np.lexsort((margin, quality))
    return LabelIssues(labels, probabilities.argmax(axis=1), quality, margin, looks_wrong(probabilities, labels), order)
