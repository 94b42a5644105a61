"""The answer of a model, as one typed thing that records, files, reports, servers and estimators read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas

# What a prediction may say beside its scores: of a classification, of a regression, of conformal sets, of the verdict.
ANSWERS = (
    "probabilities", "class", "labels",
    "mean", "std", "epistemic_std", "aleatoric_std",
    "set", "lower", "upper",
    "known_p", "known", "answered",
)  # fmt: skip


class Prediction(Mapping[str, Tensor]):
    """What a model says of B inputs: tensors by name, whose first dimension is B.

    It is a mapping, so that `prediction["probabilities"]` is what `prediction.probabilities` is; attributes are None
    for what a model does not say.

    >>> answer = Prediction({"class": torch.tensor([1]), "probabilities": torch.tensor([[0.2, 0.8]])})
    >>> answer.classes, answer["probabilities"], answer.known
    (tensor([1]), tensor([[0.2000, 0.8000]]), None)

    Args:
        values: name → (B, …).
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = dict(values)

    @staticmethod
    def concat(parts: Sequence[Prediction]) -> Prediction:
        """The answers to several batches as those to one."""
        if len(parts) == 1:
            return parts[0]
        return Prediction({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in self._values.items())
        return f"Prediction({shapes})"

    @property
    def probabilities(self) -> Tensor | None:
        """Calibrated probabilities of the classes, (B, C)."""
        return self._values.get("probabilities")

    @property
    def classes(self) -> Tensor | None:
        """Number of the most probable class (B,), -1 where probabilities are NaN."""
        return self._values.get("class")

    @property
    def mean(self) -> Tensor | None:
        """Predicted number (B,), in the units of the target."""
        return self._values.get("mean")

    @property
    def std(self) -> Tensor | None:
        """Calibrated standard deviation of the predicted number (B,), in the units of the target."""
        return self._values.get("std")

    @property
    def known_p(self) -> Tensor | None:
        """Share of held-out samples that are at least as strange as each input, (B,): a conformal p-value."""
        return self._values.get("known_p")

    @property
    def known(self) -> Tensor | None:
        """Whether each input is like the training data, (B,) of booleans."""
        return self._values.get("known")

    @property
    def answered(self) -> Tensor | None:
        """Whether each answer keeps what `risk_control` promises, (B,) of booleans; the others are for a person."""
        return self._values.get("answered")

    @property
    def answer(self) -> Tensor | None:
        """Number of the class (B,), -1 where `answered` is false."""
        if "answered" not in self._values:
            return None
        return self._values["class"].masked_fill(~self._values["answered"], -1)

    @property
    def set(self) -> Tensor | None:
        """Conformal set of each input, (B, C) of booleans."""
        return self._values.get("set")

    @property
    def interval(self) -> Tensor | None:
        """Lower and upper end of the conformal interval of each number, (B, 2)."""
        if "lower" not in self._values:
            return None
        return torch.stack([self._values["lower"], self._values["upper"]], dim=1)

    @property
    def scores(self) -> dict[str, Tensor]:
        """Name → (B,) of every score, higher for an input that is less certain or more unlike the training data."""
        return {name: values for name, values in self._values.items() if name not in ANSWERS}

    def to_dict(self) -> dict[str, Tensor]:
        """Gives a dictionary of the same tensors."""
        return dict(self._values)

    def to_frame(self, class_names: Sequence[str] | None = None) -> pandas.DataFrame:
        """A table with a row for each input and a column for each number; needs pandas.

        Args:
            class_names: names of the classes, for the columns of probabilities and a column `class_name`.
        """
        import pandas

        columns: dict[str, Any] = {}
        for name, values in self._values.items():
            rows = values.detach().cpu()
            if rows.dim() == 1:
                columns[name] = rows.numpy()
                continue
            titles = class_names or range(rows.shape[1])
            for title, column in zip(titles, rows.unbind(dim=1), strict=True):
                columns[f"{name}_{title}"] = column.numpy()
        if class_names is not None and "class" in columns:
            columns["class_name"] = ["" if number < 0 else class_names[number] for number in columns["class"]]
        return pandas.DataFrame(columns)
