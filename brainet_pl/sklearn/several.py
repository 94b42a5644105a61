"""The estimator of several labels at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import validate_data

from brainet_pl.sklearn.estimators import _BRAINetEstimator
from brainet_pl.tables.labels import label_matrix

if TYPE_CHECKING:
    from brainet_pl.sklearn.fitting import StoredEstimator

Floats = NDArray[np.float64]


class BRAINetMultiLabelClassifier(ClassifierMixin, _BRAINetEstimator):  # type: ignore[misc]
    """A BRAINet that says how probable each of several labels of a row is, and whether the row is strange.

    The arguments are those of `BRAINetClassifier`. `fit` takes labels as `label_matrix` does: a matrix (N, L) of 0, 1
    and NaN, which is not known; a data frame of these; or the names of the labels of each row.

    Attributes:
        classes_ (NDArray[Any]): (L,) the names of the labels, sorted; the numbers of the columns of a matrix.

    >>> from sklearn.datasets import make_multilabel_classification
    >>> X, Y = make_multilabel_classification(200, 8, n_classes=3, random_state=0)
    >>> model = BRAINetMultiLabelClassifier(random_state=0, max_epochs=10, members=1).fit(X, Y)
    >>> model.predict_proba(X[:2]).shape, model.predict(X[:2]).dtype
    ((2, 3), dtype('int64'))
    """

    _sets = "fnr"
    classes_: NDArray[Any]

    def predict_proba(self, X: Any) -> Floats:
        """Gives the calibrated probability (N, L) of each label of rows (N, d), in the order of `classes_`."""
        return np.asarray(self._final(X).numpy(), dtype=np.float64)

    def predict(self, X: Any) -> NDArray[np.int64]:
        """Gives 1 for each label (N, L) of rows (N, d) whose probability is at least a half, else 0."""
        return (self.predict_proba(X) >= 0.5).astype(np.int64)

    def predict_labels(self, X: Any) -> list[list[Any]]:
        """Gives the names of the labels of each row (N, d) that `predict` finds."""
        return [self.classes_[found].tolist() for found in self.predict(X).astype(bool)]

    def predict_set(self, X: Any, level: float = 0.9) -> NDArray[np.bool_]:
        """Gives sets (N, L) of labels that hold at least the share `level` of a row's labels, on average.

        Args:
            X: (N, d) rows.
            level: the mean share of the labels of a row like those of `fit` that are to be in its set.
        """
        from brainet_pl.calibration import Conformal

        sets = Conformal("fnr", level).fit(*self.network_.held_out())
        return np.asarray(sets(self._final(X))["set"].numpy(), dtype=bool)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        tags.target_tags.multi_output, tags.target_tags.single_output = True, False
        return tags

    def _class_names(self) -> list[str]:
        return [str(name) for name in self.classes_]

    def _with_target(self, rows: Any, y: Any) -> tuple[Any, Any]:
        matrix, names = label_matrix(y)
        x = validate_data(self, rows, dtype=np.float64, ensure_all_finite="allow-nan", ensure_min_samples=2)
        if len(x) != len(matrix):
            raise ValueError(f"expected as many labels as rows, got {len(matrix)} for {len(x)}: give both alike")
        self.classes_ = np.asarray(names, dtype=object)
        return x, matrix

    def _target_of(self, y: Any) -> Any:
        return label_matrix(y, [str(name) for name in self.classes_])[0]

    def _check_target(self, target: NDArray[Any]) -> NDArray[Any]:
        return self._known_target(target)

    def _known_target(self, target: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(target, dtype=np.float32)

    def _task(self) -> Any:
        from brainet_pl.tasks import MultiLabel

        return MultiLabel(len(self.classes_))

    def _head_settings(self) -> Any:
        from brainet_pl.network import Tree

        return Tree() if self.num_params is None else Tree(num_params=self.num_params)

    def _extra(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist()}

    def _restore(self, stored: StoredEstimator) -> None:
        self.classes_ = np.asarray(stored.classes, dtype=object)
