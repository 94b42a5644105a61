"""`BRAINetClassifier` and `BRAINetRegressor`: a BRAINet for tables, for people who know scikit-learn.

`fit` holds some rows back, learns a tree of structures of the columns, trains the head that follows from it, and
calibrates it on the rows held back. Nothing of Lightning is needed. Rows are (N, d), as everywhere in scikit-learn.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data

from brainet_pl._utils import checks
from brainet_pl._utils.threads import limit_threads

if TYPE_CHECKING:
    from torch import Tensor

    from brainet_pl.structure import GGT

Floats = NDArray[np.float64]
FORMAT = 3  # of the files that `save` writes
LEAST_ROWS = 40  # below it no row can be spared for calibration
MOST_CATEGORIES = 50  # of one column
MOST_LABEL_BYTES = 2**16  # of one class in a file


# -- columns ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """How one column of a data frame becomes numbers.

    Attributes:
        name: its name.
        categories: one column of zeros and ones for each, for a column of text; None for a column of numbers.
    """

    name: str
    categories: list[str] | None = None

    def names(self) -> list[str]:
        """The names of what it becomes."""
        return [self.name] if self.categories is None else [f"{self.name}={known}" for known in self.categories]

    def encode(self, values: Any) -> NDArray[Any]:
        """Turns values (N,) into numbers (N, k); a category that was not there in `fit` is all zeros."""
        array = np.asarray(values)
        if self.categories is None:
            return array[:, None]
        texts = array.astype(str)
        return np.stack([texts == known for known in self.categories], axis=1).astype(np.float64)


def is_frame(x: Any) -> bool:
    """Whether it is a table with named columns, of pandas or polars."""
    return hasattr(x, "columns") and hasattr(x, "dtypes")


def read_columns(frame: Any) -> list[Column] | None:
    """How each column of a data frame becomes numbers; None where all are numbers already, or it is no data frame."""
    if not is_frame(frame):
        return None
    found = []
    for name in frame.columns:
        values = np.asarray(frame[name])
        if values.dtype.kind in "fiub":
            found.append(Column(str(name)))
            continue
        if values.dtype.kind in "mM":
            raise ValueError(
                f"expected numbers or categories in column {name!r}, got dates: turn them into numbers, such as the "
                "days since a date, or drop the column"
            )
        known = sorted(set(values.astype(str).tolist()))
        if len(known) > MOST_CATEGORIES:
            raise ValueError(
                f"expected at most {MOST_CATEGORIES} categories, got {len(known)} in column {name!r}: drop it if it is "
                "a name or a number of a row, or group its values"
            )
        found.append(Column(str(name), known))
    return None if all(column.categories is None for column in found) else found


# -- estimators -------------------------------------------------------------------------------------------------------


class _BRAINetEstimator(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: settings, `fit`, and what a fitted network says of rows."""

    def __init__(
        self,
        *,
        num_params: int | None = None,
        s: int | tuple[int, ...] = (4, 1),
        max_order: int = 1,
        threshold: float | str | None = None,
        passes: int = 15,
        max_epochs: int = 200,
        patience: int = 20,
        batch_size: int | None = None,
        learning_rate: float = 3e-3,
        validation_fraction: float = 0.15,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.num_params = num_params
        self.s = s
        self.max_order = max_order
        self.threshold = threshold
        self.passes = passes
        self.max_epochs = max_epochs
        self.patience = patience
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.verbose = verbose

    # -- fitting ------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any) -> Any:
        """Learn structure, weights and calibration from rows X (N, d) and targets y (N,). Returns itself."""
        self._check_settings()
        x, target = self._check_training(X, y)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        train, held = self._hold_back(len(x), target, seed)
        self.network_, self.n_iter_ = self._train(x, target, train, held, seed)
        self.tree_: GGT = self.network_.head.ggt
        return self

    def _check_settings(self) -> None:
        checks.whole("passes", self.passes, 1, 10**6)
        checks.whole("max_epochs", self.max_epochs, 1)
        checks.whole("patience", self.patience, 1)
        checks.whole_or_none("batch_size", self.batch_size, 2, "None chooses by the number of rows")
        checks.above_zero("learning_rate", self.learning_rate)
        checks.share("validation_fraction", self.validation_fraction)

    def _check_training(self, X: Any, y: Any) -> tuple[Floats, NDArray[Any]]:
        self.columns_ = read_columns(X)
        x, target = validate_data(
            self, self._encoded(X), y, dtype=np.float64, ensure_min_samples=2, y_numeric=self._numeric
        )
        self._name_columns(X)
        return x, self._check_target(column_or_1d(target, warn=True))

    def _name_columns(self, X: Any) -> None:
        """The names of what the network reads, where columns have names."""
        if self.columns_ is not None:
            self.feature_names_: list[str] | None = [name for column in self.columns_ for name in column.names()]
            self.feature_names_in_ = np.asarray([column.name for column in self.columns_], dtype=object)
            self.n_features_in_ = len(self.columns_)
        else:
            names = getattr(self, "feature_names_in_", None)
            self.feature_names_ = None if names is None else [str(name) for name in names]

    def _encoded(self, X: Any) -> Any:
        """Rows as numbers: those of a data frame with text by the columns of `fit`, all others as they are."""
        if self.columns_ is None:
            return X
        if not is_frame(X):
            raise ValueError(
                f"expected a data frame with the columns {', '.join(c.name for c in self.columns_)}, as in fit, got "
                f"{type(X).__name__}: give a data frame"
            )
        missing = [column.name for column in self.columns_ if column.name not in [str(name) for name in X.columns]]
        if missing:
            raise ValueError(f"expected the columns of fit, got none called {', '.join(missing)}: add them")
        return np.concatenate([column.encode(X[column.name]) for column in self.columns_], axis=1)

    def _hold_back(self, rows: int, target: NDArray[Any], seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The numbers of the rows to train on, and of those to calibrate on."""
        every = np.arange(rows)
        if rows < LEAST_ROWS or not self.validation_fraction:
            return every, every[:0]
        groups = self._groups(target)
        size = max(self.validation_fraction, min(0.3, 20 / rows))  # by 20 rows a p-value can be as small as 0.05
        # Every class needs two rows, and either side a row of every class, to be split evenly.
        fits = groups is not None and np.bincount(groups).min() >= 2 and size * rows >= groups.max() + 1
        train, held = train_test_split(every, test_size=size, random_state=seed, stratify=groups if fits else None)
        return train, held

    def _train(
        self, x: Floats, target: NDArray[Any], train: NDArray[Any], held: NDArray[Any], seed: int
    ) -> tuple[Any, int]:
        import torch

        from brainet_pl.sklearn.fitting import fit_network

        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), limit_threads(1):
            # Few rows are ordinary here; a held-out row each for hundreds of columns is what people have.
            warnings.filterwarnings("ignore", message="expected more rows than columns")
            warnings.filterwarnings("ignore", message=r"expected [0-9,]+ parameters within 2 %")
            torch.manual_seed(seed)
            return fit_network(
                self._task(),
                torch.tensor(np.ascontiguousarray(x), dtype=torch.float32),
                torch.from_numpy(np.ascontiguousarray(target)),
                torch.from_numpy(train),
                torch.from_numpy(held),
                head=self._head_settings(),
                learn={"s": self.s, "max_order": self.max_order, "threshold": self.threshold, "seed": seed % 1000},
                names=self.feature_names_,
                max_epochs=self.max_epochs,
                patience=self.patience,
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
                passes=self.passes,
                verbose=bool(self.verbose),
            )

    # -- using --------------------------------------------------------------------------------------------------------

    def _rows(self, X: Any) -> Tensor:
        import torch

        check_is_fitted(self)
        # In 64 bits: in 32 a row's numbers would depend in their last digits on the rows beside it.
        if self.columns_ is not None:  # its columns have been found by their names
            x = check_array(self._encoded(X), dtype=np.float64)
        else:
            x = validate_data(self, X, dtype=np.float64, reset=False)
        return torch.tensor(np.ascontiguousarray(x))

    def _final(self, X: Any) -> Tensor:
        """(N, C) probabilities, or (N, 2) means and variances; the same rows always give the same numbers."""
        rows = self._rows(X)
        return self.network_.final(rows)  # type: ignore[no-any-return]

    def known_p(self, X: Any) -> Floats:
        """How usual each row (N, d) is: the share of rows held back in `fit` that are at least as strange.

        It is a p-value: of rows like those of `fit`, a share of at most 5 % has a value of at most 0.05, whatever the
        data. Rows with small values are unlike the training data, and predictions for them should not be trusted.
        """
        rows = self._rows(X)
        return np.asarray(self.network_.known_p(rows).numpy(), dtype=np.float64)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator to a file of tensors and plain values, which `load` reads without running code."""
        import torch

        from brainet_pl._utils.atomic import atomic_write
        from brainet_pl._utils.digest import fingerprint

        check_is_fitted(self)
        content = {
            "format": FORMAT,
            "estimator": type(self).__name__,
            "settings": {name: _plain(name, value) for name, value in self.get_params().items()},
            "columns": None if self.columns_ is None else [asdict(column) for column in self.columns_],
            "names": self.feature_names_,
            "inputs": int(self.n_features_in_),
            "named": None if not hasattr(self, "feature_names_in_") else [str(n) for n in self.feature_names_in_],
            "epochs": int(self.n_iter_),
            "network": self.network_.to_dict(),
            "weights": self.network_.state_dict(),
            **self._extra(),
        }
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            torch.save(content | {"digest": fingerprint(content)}, file)

    @classmethod
    def load(cls, path: str | Path) -> Any:
        """Read what `save` wrote; a file that is damaged or holds more than tensors and plain values is refused."""
        from brainet_pl._utils.digest import fingerprint
        from brainet_pl._utils.tensor_file import read_tensors

        if not Path(path).is_file():
            raise FileNotFoundError(f"expected an estimator at {path}, found no such file: check the path")
        try:
            stored = read_tensors(path)
        except Exception as error:  # of a damaged or foreign file, any error may come
            raise ValueError(
                f"expected a file that {cls.__name__}.save wrote, got {type(error).__name__} when reading {path}: take "
                "another copy"
            ) from error
        if not isinstance(stored, Mapping) or stored.get("estimator") != cls.__name__ or stored.get("format") != FORMAT:
            what = stored.get("estimator", "something else") if isinstance(stored, Mapping) else "something else"
            raise ValueError(
                f"expected a {cls.__name__} of format {FORMAT} in {path}, got {what}: load it with its own class and "
                "version"
            )
        if fingerprint({key: value for key, value in stored.items() if key != "digest"}) != stored.get("digest"):
            raise ValueError(f"expected the estimator as it was saved in {path}, got another: take another copy")
        try:
            return cls._from_stored(stored)
        except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ValueError(
                f"expected everything that {cls.__name__}.save writes in {path}, got a file without some of it "
                f"({error!r}): take another copy"
            ) from error

    @classmethod
    def _from_stored(cls, stored: Mapping[str, Any]) -> Any:
        from brainet_pl.sklearn.fitting import TablePredictor

        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored["settings"].items()}
        made = cls(**settings)
        made.columns_ = None if stored["columns"] is None else [Column(**column) for column in stored["columns"]]
        made.feature_names_, made.n_features_in_ = stored["names"], stored["inputs"]
        if stored["named"] is not None:
            made.feature_names_in_ = np.asarray(stored["named"], dtype=object)
        made._restore(stored)
        made.network_ = TablePredictor.from_dict(
            made._task(), made._head_settings(), stored["network"], stored["weights"]
        )
        made.tree_, made.n_iter_ = made.network_.head.ggt, stored["epochs"]
        return made

    # -- what a kind of target changes --------------------------------------------------------------------------------

    _numeric = False

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

    def _restore(self, stored: Mapping[str, Any]) -> None:
        return None


class BRAINetClassifier(ClassifierMixin, _BRAINetEstimator):  # type: ignore[misc]
    """A BRAINet that says which class a row of numbers belongs to, how sure it is, and whether the row is strange.

    Args:
        num_params: parameters of the network; None chooses by the number of columns.
        s: samples, and so branches, at every node of the tree of structures, or a list of those of the root, of the
            nodes below it, and so on.
        max_order: largest condition set of the independence tests; the tree is at most one level deeper.
        threshold: below it two columns count as independent, in nats; None is the default of `learn_structure`.
        passes: sub-networks that are drawn for a prediction. The same ones are drawn each time.
        max_epochs: passes over the training rows at the most.
        patience: epochs without a better likelihood of the rows held back, after which training ends.
        batch_size: rows of a step; None chooses by the number of rows.
        learning_rate: of Adam.
        validation_fraction: share of the rows that is held back to stop at the right time, to calibrate probabilities,
            and for `predict_set` and `known_p`. Fewer than 40 rows are all trained on, without calibration.
        random_state: a number makes `fit` repeatable.
        verbose: show a progress bar.

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

    def predict_proba(self, X: Any) -> Floats:
        """Gives calibrated probabilities (N, C) of rows (N, d), in the order of `classes_`."""
        return np.asarray(self._final(X).numpy(), dtype=np.float64)

    def predict(self, X: Any) -> NDArray[Any]:
        """Gives the most probable class of each row (N, d), as an array (N,) of values of `classes_`."""
        probs = self.predict_proba(X)
        return np.asarray(self.classes_[probs.argmax(axis=1)])

    def predict_set(self, X: Any, level: float = 0.9, method: str = "lac") -> NDArray[np.bool_]:
        """Gives sets (N, C) of classes that hold the true one for at least `level` of rows like those of `fit`.

        Args:
            X: (N, d) rows.
            level: the share of rows whose set is to hold the true class.
            method: "lac" (the smallest sets), "aps" or "raps" (sets that adapt to how hard a row is).
        """
        from brainet_pl.calibration import Conformal

        final = self._final(X)
        held = self.network_.held_out()
        return np.asarray(Conformal(method, level).fit(*held)(final)["set"].numpy(), dtype=bool)  # type: ignore[arg-type]

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

    def _task(self) -> Any:
        from brainet_pl.tasks import Classification

        return Classification(len(self.classes_))

    def _head_settings(self) -> Any:
        from brainet_pl.network import Tree

        return Tree() if self.num_params is None else Tree(num_params=self.num_params)

    def _extra(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "classes_dtype": str(self.classes_.dtype)}

    def _restore(self, stored: Mapping[str, Any]) -> None:
        dtype = np.dtype(stored["classes_dtype"])
        if dtype.itemsize > MOST_LABEL_BYTES:
            raise ValueError(
                f"expected labels of at most {MOST_LABEL_BYTES:,} bytes in the file, got {dtype}: take another copy"
            )
        self.classes_ = np.asarray(stored["classes"], dtype=dtype)


class BRAINetRegressor(RegressorMixin, _BRAINetEstimator):  # type: ignore[misc]
    """A BRAINet that predicts a number for each row, with its uncertainty.

    The arguments are those of `BRAINetClassifier`.

    Args:
        num_params: parameters of the network; None chooses by the number of columns.
        s: samples, and so branches, at every node of the tree of structures, or a list of those of the root, of the
            nodes below it, and so on.
        max_order: largest condition set of the independence tests; the tree is at most one level deeper.
        threshold: below it two columns count as independent, in nats; None is the default of `learn_structure`.
        passes: sub-networks that are drawn for a prediction. The same ones are drawn each time.
        max_epochs: passes over the training rows at the most.
        patience: epochs without a better likelihood of the rows held back, after which training ends.
        batch_size: rows of a step; None chooses by the number of rows.
        learning_rate: of Adam.
        validation_fraction: share of the rows that is held back to stop at the right time, and for `predict_interval`
            and `known_p`. Fewer than 40 rows are all trained on.
        random_state: a number makes `fit` repeatable.
        verbose: show a progress bar.

    >>> from sklearn.datasets import make_friedman1
    >>> X, y = make_friedman1(300, random_state=0)
    >>> model = BRAINetRegressor(random_state=0, max_epochs=20).fit(X, y)
    >>> model.predict_interval(X[:2], level=0.9).shape
    (2, 2)
    """

    _numeric = True

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
        return np.asarray(target, dtype=np.float32)

    def _task(self) -> Any:
        from brainet_pl.tasks import Regression

        return Regression()

    def _head_settings(self) -> Any:
        from brainet_pl.network import Tree

        return Tree() if self.num_params is None else Tree(num_params=self.num_params)


def _plain(name: str, value: Any) -> Any:
    """A setting as a file can hold it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, one) for one in value]  # a tuple again when it is read
    if isinstance(value, np.generic):
        return value.item()
    if name == "random_state":
        return None  # a generator can't be written down, and a fitted estimator does not need it
    raise ValueError(f"expected {name} to be a number, a text or None to be saved, got {type(value).__name__}")
