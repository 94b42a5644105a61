"""What a fitted estimator tells of itself: which columns count, how they were read, what it will notice."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from brainet_pl.sklearn.display import columns_html
from brainet_pl.sklearn.importance import FitRows, parts_of, permutation_importances
from brainet_pl.sklearn.rows import RowEncoder

if TYPE_CHECKING:
    from brainet_pl.explain import Explanation, Units

Floats = NDArray[np.float64]


class Describing:
    """Importances, names and descriptions of an estimator, whose fitted attributes these read."""

    network_: Any
    encoder_: RowEncoder
    n_features_in_: int
    _fit_rows: FitRows | None
    _importances: Floats | None

    @property
    def feature_importances_(self) -> Floats:
        """What each column is worth (d,), in nats of negative log-likelihood a row, on rows held back in `fit`.

        The values of one column are exchanged between rows that the answering networks did not learn from (permutation
        importance). It is computed when first asked for, and kept; a column that is as good as noise has about 0.
        """
        check_is_fitted(self)
        if self._importances is None:
            if self._fit_rows is None or not all(len(fold.held) for fold in self._fit_rows.folds):
                raise AttributeError(
                    "expected rows held back in fit for feature_importances_, got none: fit with at least 40 rows, and "
                    "ask before the estimator is saved"
                )
            parts = parts_of(self.encoder_, self.n_features_in_)
            self._importances = permutation_importances(self.network_, self._fit_rows, parts)
        return self._importances

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: no rows of the fit."""
        state: dict[str, Any] = dict(super().__getstate__())  # type: ignore[call-overload]
        return state | {"_fit_rows": None} if "_fit_rows" in state else state

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """The names of what the networks read: columns, their categories, and which values are missing."""
        check_is_fitted(self)
        names = self.encoder_.names
        return np.asarray([f"x{i}" for i in range(len(self.encoder_.features()))] if names is None else names, object)

    def _get_fitted_attr_html(self, doc_link: str = "") -> Any:
        """What a page shows of fitted attributes, without computing importances for it, which takes a while."""
        shown = copy.copy(self)
        shown._fit_rows = None
        return super(Describing, shown)._get_fitted_attr_html(doc_link)  # type: ignore[misc]

    def _html_repr(self) -> str:
        shown = str(super()._html_repr())  # type: ignore[misc]
        if not hasattr(self, "encoder_"):
            return shown
        names = getattr(self, "feature_names_in_", None)
        return shown + columns_html(self.encoder_, None if names is None else [str(name) for name in names])

    def explain(self, X: Any) -> Explanation:
        """Why each row (N, d) looks known or unknown: its strangest columns, in their units, and rows that are like it.

        Args:
            X: rows as for `predict`.
        """
        check_is_fitted(self)
        found: Explanation = self.network_.explain(self.encoded_rows(X), self._units())  # type: ignore[attr-defined]
        return found

    def _units(self) -> list[Units]:
        """What the network reads, as columns of the user."""
        from brainet_pl.explain import Units

        screen, _, scales = self.network_.backbone.model
        features, kept = self.encoder_.features(), screen.kept.tolist()
        places: dict[str, list[int]] = {}
        for place, number in enumerate(kept):
            places.setdefault(features[number].column, []).append(place)
        found = []
        for name, own in places.items():
            parts = [features[kept[place]] for place in own]
            means, deviations = scales.mean[own].tolist(), scales.scale[own].tolist()
            centres = [part.center + part.scale * mean for part, mean in zip(parts, means, strict=True)]
            steps = [part.scale * deviation for part, deviation in zip(parts, deviations, strict=True)]
            is_category = parts[0].kind in ("category", "other")
            values = tuple(part.value or "another value" for part in parts) if is_category else ()
            is_date = parts[0].kind == "date"
            found.append(Units(name, tuple(own), tuple(centres), tuple(steps), values, is_date))
        directions = range(len(kept), screen.columns)
        return found + [Units(f"direction {number - len(kept) + 1}", (number,)) for number in directions]

    def describe_known_p(self) -> str:
        """What `known_p` should notice, in a sentence: each class was left out in turn, without unknown rows."""
        check_is_fitted(self)
        expected = self.network_.expected
        return (
            "nothing was held back in fit, so that no row can be called unknown" if expected is None else str(expected)
        )
