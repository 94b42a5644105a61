"""`BRAINetClassifier` and `BRAINetRegressor`: a BRAINet for tables, for people who know scikit-learn.

`fit` learns a tree of structures of the columns and trains the head that follows from it a few times, each time with
another fold of the rows held back; calibration, sets, intervals and p-values go by what each network says of its fold.
Nothing of Lightning is needed. Rows are (N, d), as everywhere in scikit-learn.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
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
from brainet_pl.sklearn.answers import intervals, quantiles
from brainet_pl.sklearn.describing import Describing
from brainet_pl.sklearn.folds import Roles, group_numbers, roles_beside, roles_of
from brainet_pl.sklearn.importance import FitRows
from brainet_pl.sklearn.keeping import Keeping
from brainet_pl.sklearn.rows import RowEncoder, columns_now, counted_rows, dense, encode_inputs, read_inputs
from brainet_pl.sklearn.targets import refuse_gaps, tell_constant
from brainet_pl.tables import Column, is_frame

if TYPE_CHECKING:
    from torch import Tensor

    from brainet_pl.sklearn.fitting import StoredEstimator

Floats = NDArray[np.float64]
LEAST_EVALUATED = 20  # rows of an eval_set
MOST_LABEL_BYTES = 2**16  # of one class in a file


# -- estimators -------------------------------------------------------------------------------------------------------


class _BRAINetEstimator(Describing, Keeping, BaseEstimator):  # type: ignore[misc]
    """What both estimators share: settings, `fit`, and what a fitted network says of rows."""

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
        n_jobs: int | None = None,
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
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    # -- fitting ------------------------------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        groups: Any = None,
        eval_set: tuple[Any, Any] | None = None,
    ) -> Any:
        """Learn structure, weights and calibration from rows X (N, d) and targets y (N,). Returns itself.

        Args:
            X: (N, d) numbers, or a data frame, whose text becomes categories, numbers or dates. A number that is
                missing, NaN, is the mean of its column, and marked where rows of `fit` miss some.
            y: (N,) targets.
            sample_weight: (N,) how much each row counts while training. A row of weight 0 is left out; structure,
                calibration and p-values do not know of weights.
            groups: (N,) what hangs together, such as the patient of each row: a network is stopped and calibrated by
                other groups than those it learned from.
            eval_set: rows and targets (X, y) that choose the epoch and calibrate, half each, in place of rows of X: all
                of X is trained on, by one network of each kind.
        """
        started = time.monotonic()
        self._check_settings()
        X, y, sample_weight, groups = counted_rows(X, y, sample_weight, groups)
        x, target = self._check_training(X, y)
        weights = self._weights(x, target, sample_weight)
        group = group_numbers(groups, len(x))
        if weights is not None and not weights.all():  # a class of weight 0
            kept = weights > 0
            x, target, weights = x[kept], target[kept], weights[kept]
            group = None if group is None else group[kept]
        if weights is not None and (weights == weights[0]).all():
            weights = None  # only how much a row counts beside another matters
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        if eval_set is None:
            classes = self._groups(target)
            folds = roles_of(len(x), classes, group, self.members, self.validation_fraction, seed)
        else:
            rows, wanted = self._check_eval_set(eval_set)
            folds = roles_beside(len(x), len(rows), seed)
            x, target = np.concatenate([x, rows]), np.concatenate([target, wanted])
            weights = None if weights is None else np.concatenate([weights, np.ones(len(rows))])
        self.network_, trained = self._train(x, target, weights, folds, seed, started)
        self.n_iter_, self.loss_curve_ = trained.epochs, trained.losses
        self.tree_ = self.network_.head.ggt
        self._fit_rows = FitRows(x, target, folds)
        self._importances = None
        return self

    def _check_settings(self) -> None:
        checks.whole_or_none("members", self.members, 1, "None chooses by the number of rows")
        checks.whole("passes", self.passes, 1, 10**6)
        checks.whole("max_epochs", self.max_epochs, 1)
        checks.whole("patience", self.patience, 1)
        checks.whole_or_none("batch_size", self.batch_size, 2, "None chooses by the number of rows")
        checks.above_zero("learning_rate", self.learning_rate)
        checks.share("validation_fraction", self.validation_fraction)
        if self.n_jobs is not None and (not isinstance(self.n_jobs, int) or self.n_jobs == 0):
            raise ValueError(
                f"expected n_jobs to be a number of threads, -1 for all or None for one, got {self.n_jobs}"
            )
        if self.max_seconds is not None:
            checks.above_zero("max_seconds", self.max_seconds)

    def _check_eval_set(self, eval_set: Any) -> tuple[Floats, NDArray[Any]]:
        if not isinstance(eval_set, tuple | list) or len(eval_set) != 2:
            raise ValueError(f"expected eval_set to be rows and targets (X, y), got {checks.shown(eval_set)}")
        rows, y = self.encoded_rows(eval_set[0]).numpy(), self._target_of(eval_set[1])
        if len(rows) != len(y) or len(rows) < LEAST_EVALUATED:
            raise ValueError(
                f"expected an eval_set of at least {LEAST_EVALUATED} rows and as many targets, got {len(rows)} and "
                f"{len(y)}: give more, or leave it out"
            )
        return rows, self._known_target(y)

    def _check_training(self, X: Any, y: Any) -> tuple[Floats, NDArray[Any]]:
        X = dense(X)
        columns = read_inputs(X)
        x, target = self._with_target(X if columns is None else encode_inputs(columns, X), y)
        self.encoder_ = RowEncoder.learn(x, columns, self._name_columns(columns, is_frame(X)))
        return self.encoder_(x), self._check_target(target)

    def _with_target(self, rows: Any, y: Any) -> tuple[Any, Any]:
        """Rows and targets of `fit`, checked beside each other."""
        refuse_gaps(y)
        x, target = validate_data(
            self,
            rows,
            y,
            dtype=np.float64,
            ensure_all_finite="allow-nan",
            ensure_min_samples=2,
            y_numeric=self._numeric,
        )
        return x, column_or_1d(target, warn=True)

    def _target_of(self, y: Any) -> Any:
        """Targets of other rows than those of `fit`."""
        found = column_or_1d(y)
        refuse_gaps(found)
        return found

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
        return np.asarray(_check_sample_weight(sample_weight, x, ensure_non_negative=True))

    def _train(
        self,
        x: Floats,
        target: NDArray[Any],
        weights: Floats | None,
        folds: list[Roles],
        seed: int,
        started: float,
    ) -> tuple[Any, Any]:
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
        with isolated_cpu_rng(seed), warnings.catch_warnings(), limit_threads(*self._threads()):
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

    def _threads(self) -> tuple[int, bool]:
        """How many threads a fit takes, and whether that stands beside OMP_NUM_THREADS."""
        if self.n_jobs is None:
            return 1, False
        return (self.n_jobs if self.n_jobs > 0 else max(1, (os.cpu_count() or 1) + 1 + self.n_jobs)), True

    # -- using --------------------------------------------------------------------------------------------------------

    def encoded_rows(self, X: Any) -> Tensor:
        """Rows as a user has them → the numbers (N, d) that the network reads, with gaps filled."""
        import torch

        check_is_fitted(self, "encoder_")
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
        rows = self.encoded_rows(X)
        return self.network_.final_rows(rows)  # type: ignore[no-any-return]

    def known_p(self, X: Any) -> Floats:
        """How usual each row (N, d) is: the share of rows held back in `fit` that are at least as strange.

        It is a p-value: of rows like those of `fit`, a share of at most 5 % has a value of at most 0.05, whatever the
        data. Rows with small values are unlike the training data, and predictions for them should not be trusted.
        """
        rows = self.encoded_rows(X)
        return np.asarray(self.network_.known_p(rows).numpy(), dtype=np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = tags.input_tags.string = tags.input_tags.sparse = True
        return tags

    # -- what a kind of target changes --------------------------------------------------------------------------------

    _numeric = False
    _sets = "lac"

    def _check_target(self, target: NDArray[Any]) -> NDArray[Any]:
        raise NotImplementedError

    def _known_target(self, target: NDArray[Any]) -> NDArray[Any]:
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
        n_jobs: threads of a fit; -1 is all there are, None is one, which is as fast for most tables.
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
        n_jobs: int | None = None,
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
            n_jobs=n_jobs,
            random_state=random_state,
            verbose=verbose,
        )
        self.class_weight = class_weight

    def predict_proba(self, X: Any) -> Floats:
        """Gives calibrated probabilities (N, C) of rows (N, d), in the order of `classes_`."""
        return np.asarray(self._final(X).numpy(), dtype=np.float64)

    def predict_log_proba(self, X: Any) -> Floats:
        """Gives the logarithms (N, C) of `predict_proba`; of a probability of 0 that of the smallest number."""
        return np.asarray(np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny)))

    def predict(self, X: Any) -> NDArray[Any]:
        """Gives the most probable class of each row (N, d), as an array (N,) of values of `classes_`."""
        probs = self.predict_proba(X)
        return np.asarray(self.classes_[probs.argmax(axis=1)])

    def predict_answered(self, X: Any) -> NDArray[np.bool_]:
        """Gives for which rows (N, d) the class of `predict` keeps what `risk_control` has promised, (N,)."""
        rows = self.encoded_rows(X)
        return np.asarray(self.network_.answered(rows).numpy(), dtype=bool)

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

    def _known_target(self, target: NDArray[Any]) -> NDArray[Any]:
        new = sorted(set(target.tolist()) - set(self.classes_.tolist()), key=str)
        if new:
            raise ValueError(f"expected classes of y in eval_set, got {new[0]!r} too: leave these rows out")
        return np.asarray(np.searchsorted(self.classes_, target), dtype=np.int64)

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
        n_jobs: threads of a fit; -1 is all there are, None is one, which is as fast for most tables.
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

    def predict_interval(self, X: Any, level: float | Sequence[float] = 0.9, method: str = "scaled") -> Floats:
        """Gives the ends (N, 2) of intervals that hold y for at least `level` of rows like those of `fit`.

        Args:
            X: (N, d) rows.
            level: the share of rows whose interval is to hold y; for a list of L levels the ends are (N, L, 2).
            method: "scaled" by the predicted deviation, or "quantile", wider or narrower by the same for all.
        """
        return intervals(self._final(X), self.network_.held_out(), level, method)

    def predict_quantiles(self, X: Any, levels: Sequence[float] = (0.05, 0.25, 0.5, 0.75, 0.95)) -> Floats:
        """Gives quantiles (N, L): of rows like those of `fit` a share of each level lies below.

        They go by how far the rows held back in `fit` lie from their predictions, in predicted deviations, and so need
        no shape of the distribution.
        """
        held, target = self.network_.held_out()
        return quantiles(self._final(X).numpy(), held.numpy(), target.numpy(), levels)

    def _check_target(self, target: NDArray[Any]) -> NDArray[Any]:
        tell_constant(target)
        return self._known_target(target)

    def _known_target(self, target: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(target, dtype=np.float32)

    def _task(self) -> Any:
        from brainet_pl.tasks import Regression

        return Regression(beta=0.5)

    def _head_settings(self) -> Any:
        from brainet_pl.network import Tree

        return Tree() if self.num_params is None else Tree(num_params=self.num_params)
