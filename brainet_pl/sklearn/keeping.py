"""How a fitted estimator is kept: a file without code, or a folder that needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from brainet_pl.sklearn.importance import FitRows
from brainet_pl.sklearn.rows import RowEncoder

if TYPE_CHECKING:
    from torch import Tensor

    from brainet_pl.sklearn.fitting import StoredEstimator
    from brainet_pl.structure import GGT

Floats = NDArray[np.float64]


class Keeping:
    """`save`, `load` and `export` of an estimator, whose fitted attributes these read and set."""

    _sets: Literal["lac", "scaled", "fnr"]  # how sets or intervals are made
    network_: Any
    encoder_: RowEncoder
    n_features_in_: int
    n_iter_: int
    loss_curve_: list[float]
    tree_: GGT
    feature_names_in_: NDArray[Any]
    _fit_rows: FitRows | None
    _importances: Floats | None

    if TYPE_CHECKING:

        def get_params(self) -> dict[str, Any]: ...  # noqa: D102
        def encoded_rows(self, X: Any) -> Tensor: ...  # noqa: D102
        def _task(self) -> Any: ...
        def _head_settings(self) -> Any: ...
        def _extra(self) -> dict[str, Any]: ...
        def _restore(self, stored: StoredEstimator) -> None: ...

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
                held=None if held is None else self.encoded_rows(held),
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
            "losses": self.loss_curve_,
            "importances": None if self._importances is None else self._importances.tolist(),
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
        made.tree_, made.n_iter_, made.loss_curve_ = made.network_.head.ggt, stored.epochs, stored.losses
        made._fit_rows = None
        made._importances = None if stored.importances is None else np.array(stored.importances)
        return made


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
