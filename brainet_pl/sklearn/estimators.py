"""`BRAINetClassifier` and `BRAINetRegressor`: a BRAINet for tables, for people who know scikit-learn.

`fit` learns a tree of structures of the columns and trains the head that follows from it a few times, each time with
another fold of the rows held back; calibration, sets, intervals and p-values go by what each network says of its fold.
Nothing of Lightning is needed. Rows are (N, d), as everywhere in scikit-learn.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from brainet_pl._utils import checks
from brainet_pl._utils.threads import limit_threads
from brainet_pl._utils.warn import warn
from brainet_pl.sklearn.rows import RowEncoder, columns_now, dense, encode_inputs, read_inputs
from brainet_pl.sklearn.targets import refuse_gaps, tell_constant
from brainet_pl.tables import Column, is_frame

if TYPE_CHECKING:
    from torch import Tensor

    from brainet_pl.sklearn.fitting import StoredEstimator
    from brainet_pl.structure import GGT

Floats = NDArray[np.float64]
LEAST_ROWS = 40  # below it no row can be spared for calibration
MEMBERS = 5  # networks by default
MOST_CROSSED = 10_000  # rows up to which there are as many; one network of more has rows enough to hold back
MOST_LABEL_BYTES = 2**16  # of one class in a file


class Roles(NamedTuple):
    """Numbers of rows by what they do for the members of one fold, see `brainet_pl.sklearn.training.Fold`."""

    train: NDArray[Any]
    select: NDArray[Any]
    held: NDArray[Any]


# -- estimators -------------------------------------------------------------------------------------------------------


class _BRAINetEstimator(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: settings, `fit`, and what a fitted network says of rows."""

    _sets: Literal["lac", "scaled"]  # how sets or intervals are made

    def __init__(
        self,
        *,
        num_params: int | None = None,
        s: int | tuple[int, ...] = (4, 1),
        max_order: int = 1,
        threshold: float | str | None = None,
        members: int | None = None,
        passes: int = 15,
        max_epochs: int = 500,
        patience: int = 20,
        batch_size: int | None = None,
        learning_rate: float = 3e-3,
        validation_fraction: float = 0.15,
        max_seconds: float | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.num_params = num_params
        self.s = s
        self.max_order = max_order
        self.threshold = threshold
        self.members = members
        self.passes = passes
        self.max_epochs = max_epochs
        self.patience = patience
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.validation_fraction = validation_fraction
        self.max_seconds = max_seconds
        self.random_state = random_state
        self.verbose = verbose

    # -- fitting ------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Learn structure, weights and calibration from rows X (N, d) and targets y (N,). Returns itself.

        Args:
            X: (N, d) numbers, or a data frame, whose text becomes categories, numbers or dates. A number that is
                missing, NaN, is the mean of its column, and marked where rows of `fit` miss some.
            y: (N,) targets.
            sample_weight: (N,) how much each row counts while training. A row of weight 0 is left out; structure,
                calibration and p-values do not know of weights.
        """
        started = time.monotonic()
        self._check_settings()
        refuse_gaps(y)
        x, target = self._check_training(X, y)
        weights = self._weights(x, target, sample_weight)
        if weights is not None and not weights.all():
            kept = weights > 0
            x, target, weights = x[kept], target[kept], weights[kept]
        if weights is not None and (weights == weights[0]).all():
            weights = None  # only how much a row counts beside another matters
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.network_, self.n_iter_ = self._train(x, target, weights, self._folds(len(x), target, seed), seed, started)
        self.tree_: GGT = self.network_.head.ggt
        return self

    def _check_settings(self) -> None:
        checks.whole_or_none("members", self.members, 1, "None chooses by the number of rows")
        checks.whole("passes", self.passes, 1, 10**6)
        checks.whole("max_epochs", self.max_epochs, 1)
        checks.whole("patience", self.patience, 1)
        checks.whole_or_none("batch_size", self.batch_size, 2, "None chooses by the number of rows")
        checks.above_zero("learning_rate", self.learning_rate)
        checks.share("validation_fraction", self.validation_fraction)
        if self.max_seconds is not None:
            checks.above_zero("max_seconds", self.max_seconds)

    def _check_training(self, X: Any, y: Any) -> tuple[Floats, NDArray[Any]]:
        X = dense(X)
        columns = read_inputs(X)
        x, target = validate_data(
            self,
            X if columns is None else encode_inputs(columns, X),
            y,
            dtype=np.float64,
            ensure_all_finite="allow-nan",
            ensure_min_samples=2,
            y_numeric=self._numeric,
        )
        self.encoder_ = RowEncoder.learn(x, columns, self._name_columns(columns, is_frame(X)))
        return self.encoder_(x), self._check_target(column_or_1d(target, warn=True))

    def _name_columns(self, columns: list[Column] | None, are_named: bool) -> list[str] | None:
        """The names of what the network reads, where columns have names."""
        if columns is None:
            names = getattr(self, "feature_names_in_", None)
            return None if names is None else [str(name) for name in names]
        self.n_features_in_ = len(columns)
        if are_named:
            self.feature_names_in_ = np.asarray([column.name for column in columns], dtype=object)
        return [name for column in columns for name in column.names()]

    def _weights(self, x: Floats, target: NDArray[Any], sample_weight: Any) -> Floats | None:
        """How much each row (N,) counts; None where all count alike."""
        if sample_weight is None:
            return None
        weights = np.asarray(_check_sample_weight(sample_weight, x, ensure_non_negative=True))
        if (weights > 0).sum() < 2:
            raise ValueError(
                f"expected at least two rows of a sample_weight above 0, got {(weights > 0).sum()}: give more weights"
            )
        return weights

    def _folds(self, rows: int, target: NDArray[Any], seed: int) -> list[Roles]:
        """What the rows do for the members of each fold, by their numbers."""
        every = np.arange(rows)
        if rows < LEAST_ROWS:
            warn(
                f"probabilities are not calibrated, and nothing can be called unknown: expected at least {LEAST_ROWS} "
                f"rows to hold some back, got {rows}; give more rows"
            )
        if rows < LEAST_ROWS or not self.validation_fraction:
            return [Roles(every, every[:0], every[:0])]
        groups = self._groups(target)
        members = self.members or (MEMBERS if rows <= MOST_CROSSED else 1)
        if members == 1:
            size = max(self.validation_fraction, min(0.3, 20 / rows))  # by 20 rows a p-value can be as small as 0.05
            train, others = _split(every, groups, size, seed)
            return [Roles(train, *_split(others, groups, 0.5, seed))]
        fold = folds_of(np.zeros(rows, dtype=np.int64) if groups is None else groups, members, seed)
        held_back = [np.flatnonzero(fold == number) for number in range(members)]
        return [Roles(np.setdiff1d(every, held), held, held) for held in held_back]

    def _train(
        self,
        x: Floats,
        target: NDArray[Any],
        weights: Floats | None,
        folds: list[Roles],
        seed: int,
        started: float,
    ) -> tuple[Any, int]:
        import torch

        from brainet_pl._utils.rng import isolated_cpu_rng
        from brainet_pl.network.training import TrainingSettings
        from brainet_pl.sklearn.fitting import FINAL_BATCH, Clock, FitSettings, Table, fit_network
        from brainet_pl.sklearn.training import Fold
        from brainet_pl.tasks import Classification

        task = self._task()
        grows = self.batch_size is None and not isinstance(task, Classification)
        training = TrainingSettings(
            self.max_epochs,
            self.patience,
            self.batch_size,
            self.learning_rate,
            final_batch=FINAL_BATCH if grows else 0,
        )
        with isolated_cpu_rng(seed), warnings.catch_warnings(), limit_threads(1):
            # Few rows are ordinary here; a held-out row each for hundreds of columns is what people have.
            warnings.filterwarnings("ignore", message="expected more rows than columns")
            warnings.filterwarnings("ignore", message=r"expected [0-9,]+ parameters within 2 %")
            table = Table(
                torch.tensor(np.ascontiguousarray(x), dtype=torch.float32),
                torch.from_numpy(np.ascontiguousarray(target)),
                None if weights is None else torch.tensor(weights, dtype=torch.float32),
                [Fold(*map(torch.from_numpy, roles)) for roles in folds],
                self.encoder_.names,
            )
            learn = {"s": self.s, "max_order": self.max_order, "threshold": self.threshold, "seed": seed % 1000}
            clock = Clock() if self.max_seconds is None else Clock(started + self.max_seconds, self.max_seconds)
            settings = FitSettings(self._head_settings(), learn, training, self.passes, bool(self.verbose), clock)
            return fit_network(task, table, settings)

    # -- using --------------------------------------------------------------------------------------------------------

    def _rows(self, X: Any) -> Tensor:
        import torch

        check_is_fitted(self)
        # In 64 bits: in 32 a row's numbers would depend in their last digits on the rows beside it.
        X = dense(X)
        columns = columns_now(self.encoder_.columns, X, getattr(self, "feature_names_in_", None))
        if columns is not None:  # its columns have been found by their names
            x = check_array(encode_inputs(columns, X), dtype=np.float64, ensure_all_finite="allow-nan")
        else:
            x = validate_data(self, X, dtype=np.float64, reset=False, ensure_all_finite="allow-nan")
        return torch.tensor(np.ascontiguousarray(self.encoder_(x)))

    def _final(self, X: Any) -> Tensor:
        """(N, C) probabilities, or (N, 2) means and variances; the same rows always give the same numbers."""
        rows = self._rows(X)
        return self.network_.final_rows(rows)  # type: ignore[no-any-return]

    def known_p(self, X: Any) -> Floats:
        """How usual each row (N, d) is: the share of rows held back in `fit` that are at least as strange.

        It is a p-value: of rows like those of `fit`, a share of at most 5 % has a value of at most 0.05, whatever the
        data. Rows with small values are unlike the training data, and predictions for them should not be trusted.
        """
        rows = self._rows(X)
        return np.asarray(self.network_.known_p(rows).numpy(), dtype=np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = tags.input_tags.string = tags.input_tags.sparse = True
        return tags

    def describe_known_p(self) -> str:
        """What `known_p` should notice, in a sentence: each class was left out in turn, without unknown rows."""
        check_is_fitted(self)
        expected = self.network_.expected
        return (
            "nothing was held back in fit, so that no row can be called unknown" if expected is None else str(expected)
        )

    # -- keeping ------------------------------------------------------------------------------------------------------

    def export(self, folder: str | Path, held: Any = None, level: float = 0.9) -> Path:
        """Write the fitted estimator as a folder with an ONNX graph that needs no torch, encoders of columns included.

        See `brainet_pl.export.folder`: `brainet_pl.serving.ExportedModel` and `brainet serve` run it.

        Args:
            folder: is made, or replaced where it is the folder of an exported model.
            held: rows that were not in `fit`, for the drift alarm; None takes the rows held back, without the answers.
            level: the share of rows whose set or interval is to hold the truth.
        """
        import torch

        from brainet_pl.calibration import Conformal
        from brainet_pl.export.folder import export_folder

        check_is_fitted(self)
        network, before = self.network_, self.network_.conformal
        some = self.encoder_(self.encoder_.fill + self.encoder_.scale * np.arange(4.0)[:, None])
        try:
            if len(network.held_target):
                network.conformal = Conformal(self._sets, level).fit(*network.held_out())
            return export_folder(
                network,
                folder,
                torch.tensor(some),
                class_names=self._class_names(),
                features=self.encoder_.features(),
                held=None if held is None else self._rows(held),
            )
        finally:
            network.conformal = before

    def _class_names(self) -> list[str] | None:
        return None

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator to a file of tensors and plain values, which `load` reads without running code."""
        from brainet_pl._utils.stored import FORMAT
        from brainet_pl.storage.container import write_file

        check_is_fitted(self)
        content = {
            "kind": type(self).__name__,
            "format": FORMAT,
            "settings": {name: _plain(name, value) for name, value in self.get_params().items()},
            "encoder": self.encoder_.to_dict(),
            "inputs": int(self.n_features_in_),
            "named": None if not hasattr(self, "feature_names_in_") else [str(n) for n in self.feature_names_in_],
            "epochs": int(self.n_iter_),
            "network": self.network_.to_dict(),
            "weights": self.network_.state_dict(),
            **self._extra(),
        }
        write_file(path, content)

    @classmethod
    def load(cls, path: str | Path) -> Any:
        """Read what `save` wrote; a file that is damaged or holds more than tensors and plain values is refused."""
        from brainet_pl._utils.stored import readable_errors
        from brainet_pl.sklearn.fitting import StoredEstimator
        from brainet_pl.storage.container import read_file

        stored = read_file(path, StoredEstimator, cls.__name__, "an estimator")
        with readable_errors(f"an estimator in {path}"):
            return cls._from_stored(stored)

    @classmethod
    def _from_stored(cls, stored: StoredEstimator) -> Any:
        from brainet_pl.sklearn.fitting import TablePredictor

        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.settings.items()}
        made = cls(**settings)
        made.encoder_, made.n_features_in_ = RowEncoder.from_stored(stored.encoder), stored.inputs
        if stored.named is not None:
            made.feature_names_in_ = np.asarray(stored.named, dtype=object)
        made._restore(stored)
        made.network_ = TablePredictor.from_stored(made._task(), made._head_settings(), stored.network, stored.weights)
        made.tree_, made.n_iter_ = made.network_.head.ggt, stored.epochs
        return made

    # -- what a kind of target changes --------------------------------------------------------------------------------

    _numeric = False
    _sets = "lac"

    def _check_target(self, target: NDArray[Any]) -> NDArray[Any]:
        raise NotImplementedError

    def _groups(self, target: NDArray[Any]) -> NDArray[Any] | None:
        return None

    def _task(self) -> Any:
        raise NotImplementedError

    def _head_settings(self) -> Any:
        raise NotImplementedError

    def _extra(self) -> dict[str, Any]:
        return {}

    def _restore(self, stored: StoredEstimator) -> None:
        return None


class BRAINetClassifier(ClassifierMixin, _BRAINetEstimator):  # type: ignore[misc]
    """A BRAINet that says which class a row of numbers belongs to, how sure it is, and whether the row is strange.

    Args:
        num_params: parameters of the network; None chooses by the number of columns.
        s: samples, and so branches, at every node of the tree of structures, or a list of those of the root, of the
            nodes below it, and so on.
        max_order: largest condition set of the independence tests; the tree is at most one level deeper.
        threshold: below it two columns count as independent, in nats; None is the default of `learn_structure`.
        members: networks that are trained, each with another fold of the rows held back, and averaged. None is 5 for up
            to 10,000 rows, else 1.
        passes: sub-networks that are drawn for a prediction. The same ones are drawn each time.
        max_epochs: passes over the training rows at the most.
        patience: epochs without a better likelihood of the rows held back, after which training ends.
        batch_size: rows of a step; None chooses by the number of rows.
        learning_rate: of Adam.
        class_weight: how much rows of a class count while training: class → weight, "balanced" for as much a class, or
            None for as much a row.
        validation_fraction: share of the rows that a single member holds back to stop at the right time, to calibrate
            probabilities, and for `predict_set` and `known_p`; of several members each holds a fold back. With 0, or
            fewer than 40 rows, all are trained on by one network, without calibration.
        max_seconds: of a fit; what is not done by then is cut short, with a warning. None is no limit.
        random_state: a number makes `fit` repeatable; with `max_seconds` it depends on how fast the machine is.
        verbose: show a progress bar at once; else a terminal has one after five seconds.

    Attributes:
        classes_ (NDArray[Any]): (C,) the classes, sorted.
        tree_ (GGT): the learned tree of structures; `tree_.summary()` describes it, with the names of columns.
        n_features_in_ (int): the number of columns.
        feature_names_in_ (NDArray[Any]): the names of the columns, where `fit` was given a data frame.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = BRAINetClassifier(random_state=0, max_epochs=20).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    classes_: NDArray[Any]

    def __init__(
        self,
        *,
        num_params: int | None = None,
        s: int | tuple[int, ...] = (4, 1),
        max_order: int = 1,
        threshold: float | str | None = None,
        members: int | None = None,
        passes: int = 15,
        max_epochs: int = 500,
        patience: int = 20,
        batch_size: int | None = None,
        learning_rate: float = 3e-3,
        class_weight: Mapping[Any, float] | str | None = None,
        validation_fraction: float = 0.15,
        max_seconds: float | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            num_params=num_params,
            s=s,
            max_order=max_order,
            threshold=threshold,
            members=members,
            passes=passes,
            max_epochs=max_epochs,
            patience=patience,
            batch_size=batch_size,
            learning_rate=learning_rate,
            validation_fraction=validation_fraction,
            max_seconds=max_seconds,
            random_state=random_state,
            verbose=verbose,
        )
        self.class_weight = class_weight

    def predict_proba(self, X: Any) -> Floats:
        """Gives calibrated probabilities (N, C) of rows (N, d), in the order of `classes_`."""
        return np.asarray(self._final(X).numpy(), dtype=np.float64)

    def predict(self, X: Any) -> NDArray[Any]:
        """Gives the most probable class of each row (N, d), as an array (N,) of values of `classes_`."""
        probs = self.predict_proba(X)
        return np.asarray(self.classes_[probs.argmax(axis=1)])

    def predict_set(
        self, X: Any, level: float = 0.9, method: str = "lac", *, per_class: bool = False
    ) -> NDArray[np.bool_]:
        """Gives sets (N, C) of classes that hold the true one for at least `level` of rows like those of `fit`.

        Args:
            X: (N, d) rows.
            level: the share of rows whose set is to hold the true class.
            method: "lac" (the smallest sets), "aps" or "raps" (sets that adapt to how hard a row is).
            per_class: keep the level for the rows of each class, not only for all rows together. A class needs enough
                rows of its own in `fit`, 9 for a level of 0.9 and 19 for 0.95, or it is in every set.
        """
        from brainet_pl.calibration import Conformal

        final = self._final(X)
        sets = Conformal(method, level, per_class=per_class).fit(*self.network_.held_out())  # type: ignore[arg-type]
        return np.asarray(sets(final)["set"].numpy(), dtype=bool)

    def _class_names(self) -> list[str]:
        return [str(name) for name in self.classes_]

    def _check_target(self, target: NDArray[Any]) -> NDArray[Any]:
        check_classification_targets(target)
        self.classes_, labels = np.unique(target, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"expected at least two classes in y, got one class, {self.classes_[0]!r}: give rows of another class"
            )
        return np.asarray(labels, dtype=np.int64)

    def _groups(self, target: NDArray[Any]) -> NDArray[Any]:
        return target

    def _weights(self, x: Floats, target: NDArray[Any], sample_weight: Any) -> Floats | None:
        given = super()._weights(x, target, sample_weight)
        if self.class_weight is None:
            return given
        classes = np.asarray(compute_sample_weight(self.class_weight, self.classes_[target]), dtype=np.float64)
        return classes if given is None else classes * given

    def _task(self) -> Any:
        from brainet_pl.tasks import Classification

        return Classification(len(self.classes_))

    def _head_settings(self) -> Any:
        from brainet_pl.network import Tree

        return Tree() if self.num_params is None else Tree(num_params=self.num_params)

    def _extra(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "classes_dtype": str(self.classes_.dtype)}

    def _restore(self, stored: StoredEstimator) -> None:
        dtype = np.dtype(stored.classes_dtype)
        if dtype.itemsize > MOST_LABEL_BYTES:
            raise ValueError(
                f"expected labels of at most {MOST_LABEL_BYTES:,} bytes in the file, got {dtype}: take another copy"
            )
        self.classes_ = np.asarray(stored.classes, dtype=dtype)


class BRAINetRegressor(RegressorMixin, _BRAINetEstimator):  # type: ignore[misc]
    """A BRAINet that predicts a number for each row, with its uncertainty.

    The arguments are those of `BRAINetClassifier`.

    Args:
        num_params: parameters of the network; None chooses by the number of columns.
        s: samples, and so branches, at every node of the tree of structures, or a list of those of the root, of the
            nodes below it, and so on.
        max_order: largest condition set of the independence tests; the tree is at most one level deeper.
        threshold: below it two columns count as independent, in nats; None is the default of `learn_structure`.
        members: networks that are trained, each with another fold of the rows held back, and averaged. None is 5 for up
            to 10,000 rows, else 1.
        passes: sub-networks that are drawn for a prediction. The same ones are drawn each time.
        max_epochs: passes over the training rows at the most.
        patience: epochs without a better likelihood of the rows held back, after which training ends.
        batch_size: rows of a step; None chooses by the number of rows.
        learning_rate: of Adam.
        validation_fraction: share of the rows that a single member holds back to stop at the right time, and for
            `predict_interval` and `known_p`; of several members each holds a fold back. With 0, or fewer than 40 rows,
            all are trained on by one network.
        max_seconds: of a fit; what is not done by then is cut short, with a warning. None is no limit.
        random_state: a number makes `fit` repeatable; with `max_seconds` it depends on how fast the machine is.
        verbose: show a progress bar at once; else a terminal has one after five seconds.

    >>> from sklearn.datasets import make_friedman1
    >>> X, y = make_friedman1(300, random_state=0)
    >>> model = BRAINetRegressor(random_state=0, max_epochs=20).fit(X, y)
    >>> model.predict_interval(X[:2], level=0.9).shape
    (2, 2)
    """

    _numeric = True
    _sets = "scaled"

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Gives means (N,), and with `return_std` also standard deviations (N,), in the units of y."""
        final = self._final(X).numpy()
        return (final[:, 0], np.sqrt(final[:, 1])) if return_std else final[:, 0]

    def predict_interval(self, X: Any, level: float = 0.9, method: str = "scaled") -> Floats:
        """Gives the ends (N, 2) of intervals that hold y for at least `level` of rows like those of `fit`.

        Args:
            X: (N, d) rows.
            level: the share of rows whose interval is to hold y.
            method: "scaled" by the predicted deviation, or "quantile", wider or narrower by the same for all.
        """
        from brainet_pl.calibration import Conformal

        final = self._final(X)
        ends = Conformal(method, level).fit(*self.network_.held_out())(final)  # type: ignore[arg-type]
        return np.stack([ends["lower"].numpy(), ends["upper"].numpy()], axis=1)

    def _check_target(self, target: NDArray[Any]) -> NDArray[Any]:
        tell_constant(target)
        return np.asarray(target, dtype=np.float32)

    def _task(self) -> Any:
        from brainet_pl.tasks import Regression

        return Regression(beta=0.5)

    def _head_settings(self) -> Any:
        from brainet_pl.network import Tree

        return Tree() if self.num_params is None else Tree(num_params=self.num_params)


def _split(
    rows: NDArray[Any], groups: NDArray[Any] | None, size: float, seed: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows in two parts by chance, the second a share of `size`, each group evenly where there is enough of it."""
    counts = None if groups is None else np.unique(groups[rows], return_counts=True)[1]
    # Every group needs two rows, and either side a row of every group, to be split evenly.
    even = counts is not None and counts.min() >= 2 and min(size, 1 - size) * len(rows) >= len(counts)
    first, second = train_test_split(
        rows, test_size=size, random_state=seed, stratify=groups[rows] if even and groups is not None else None
    )
    return first, second


def folds_of(groups: NDArray[np.int64], folds: int, seed: int) -> NDArray[np.int64]:
    """The fold (N,) that holds each row back, drawn by chance and even within each group (N,).

    The only row of a group is in none, -1: what no network has seen can't be calibrated.

    >>> folds_of(np.array([0, 0, 0, 0, 1, 1, 2]), 2, seed=0).tolist()
    [0, 1, 0, 1, 0, 1, -1]
    """
    order = np.random.default_rng(seed).permutation(len(groups))
    order = order[np.argsort(groups[order], kind="stable")]
    found = np.empty(len(groups), dtype=np.int64)
    found[order] = np.arange(len(groups)) % folds
    found[np.bincount(groups)[groups] < 2] = -1
    return found


def _plain(name: str, value: Any) -> Any:
    """A setting as a file can hold it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, one) for one in value]  # a tuple again when it is read
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_plain(name, key): _plain(name, one) for key, one in value.items()}
    if name == "random_state":
        return None  # a generator can't be written down, and a fitted estimator does not need it
    raise ValueError(f"expected {name} to be a number, a text or None to be saved, got {type(value).__name__}")
