"""What every head is: a module from features to outputs, and the settings that such a module is built from.

A head's shape depends on the data: on the number of features and, for a BRAINet, on the learned tree. So a head comes
in two parts in one file. `HeadSettings` is what a user writes down (`MCDropout(rate=0.3)`); it is checked at once,
needs no data, and travels in YAML and checkpoints. `build` makes a `Head` of it, an ordinary module, once the data is
known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl._utils.parts import Part
from brainet_pl.structure.ggt import GGT

Norm = Literal["batch"] | None
Budget = int | Literal["auto"]
# What "auto" gives a head. A checkpoint says "auto" too: with other numbers here, weights of files do not fit.
LEAST_PARAMS, PARAMS_PER_FEATURE, TIMES_NEEDED = 16_000, 250, 2
FREE_OUTPUTS = 16  # outputs that these numbers are for; each further one brings parameters of its own
MOST_PARAMS = 10**9  # of a head: 4 GB of weights; a slip of the keyboard should not fill the memory
MOST_PASSES = 10**6
MIN_VALIDATION = 100  # samples to choose something by; with fewer, what is best among them says little


class Outputs(NamedTuple):
    """Outputs (T, B, O) of T passes, and their weights (T,), or None where all count alike."""

    values: Tensor
    weights: Tensor | None = None


class HeadInputs(NamedTuple):
    """Features (N, d) of samples, targets (N,), and base logits (N, O) where the head adds to them.

    Attributes:
        represents: How many samples of the data set each of these stands for; 1 where they are all there are.
    """

    x: Tensor
    target: Tensor
    base_logits: Tensor | None = None
    represents: float = 1.0

    def rows(self, rows: slice | Tensor) -> HeadInputs:
        """These of the samples, as a slice or by their numbers."""
        base_logits = None if self.base_logits is None else self.base_logits[rows]
        return self._replace(x=self.x[rows], target=self.target[rows], base_logits=base_logits)

    def first(self, count: int) -> HeadInputs:
        """The first `count` of the samples, and one at the least."""
        return self.rows(slice(max(1, count)))


NLL = Callable[[Tensor, Tensor | None, Tensor], Tensor]  # outputs (T, N, O), weights, targets → (N,) of the average


class Head(nn.Module, ABC):
    """A module from features (B, d) to O outputs for each sample, whatever a task makes of them.

    Attributes:
        ggt: The tree it is wired by, or None.
        finalizes: Whether `finalize` does anything, and so needs data.
        not_averaged: Buffers of `finalize` that callbacks which average weights must take as they are.
    """

    ggt: GGT | None = None
    finalizes: ClassVar[bool] = False
    not_averaged: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_validation_data(self) -> bool:
        """Whether `finalize` has something to choose by validation data."""
        return False

    @property
    def averages_one(self) -> bool:
        """Whether all passes give the same, so that they never disagree."""
        return False

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Features (B, d) to outputs (B, O) that a loss takes, or (M, B, O) from M members that are trained apart."""

    @abstractmethod
    def passes(self, x: Tensor, count: int) -> Outputs:
        """Features (B, d) to the outputs (T, B, O) of one prediction; T is `count` for a head that draws."""

    @contextmanager
    def fixed_draws(self, count: int, seed: int) -> Iterator[None]:
        """Within it, `passes` gives the same outputs each time, as a graph needs it; a head that can't draws as ever.

        Args:
            count: passes of a prediction.
            seed: of what is drawn.
        """
        yield

    def penalty(self) -> Tensor | None:
        """A scalar to be added to the loss after division by the number of training samples, or None."""
        return None

    def finalize(self, seen: HeadInputs, held: HeadInputs | None, nll: NLL, passes: int = 15) -> dict[str, float]:
        """Choose what needs no training, before a validation of a fit; gives numbers to log as `val/head/<name>`.

        Args:
            seen: A sample of the training data.
            held: A sample of the validation data, or None where there is too little to choose by.
            nll: The negative log-likelihood of targets under the average of outputs.
            passes: The number of passes of a prediction.
        """
        return {}

    def facts(self) -> dict[str, Any]:
        """What a report should say about this head beside its settings: primitives by name."""
        return {}

    @property
    def num_params(self) -> int:
        """How many trainable parameters it has."""
        return sum(p.numel() for p in self.parameters())


class ResidualHead(Head):
    """A head that can add its outputs to base logits: those of the classifier that was removed.

    Attributes:
        adds_base_logits: Whether it does. `forward` and `passes` must be given base logits then, and none otherwise.
    """

    adds_base_logits: bool = False

    @abstractmethod
    def forward(self, x: Tensor, *, base_logits: Tensor | None = None) -> Tensor:
        """`Head.forward` on features (B, d), with base logits (B, O)."""

    @abstractmethod
    def passes(self, x: Tensor, count: int, *, base_logits: Tensor | None = None) -> Outputs:
        """`Head.passes` on features (B, d), with base logits (B, O)."""


def train_head(head: Head, x: Tensor, base_logits: Tensor | None) -> Tensor:
    """`forward` of any head on features (B, d), with base logits (B, O) where it adds to them."""
    return torch.as_tensor(
        head(x, base_logits=base_logits) if isinstance(head, ResidualHead) and head.adds_base_logits else head(x)
    )


def run_head(head: Head, x: Tensor, count: int, base_logits: Tensor | None) -> Outputs:
    """`passes` of any head on features (B, d), with base logits (B, O) where it adds to them."""
    if isinstance(head, ResidualHead) and head.adds_base_logits:
        return head.passes(x, count, base_logits=base_logits)
    return head.passes(x, count)


class HeadSettings(Part, ABC):
    """What a user chooses about a head. A subclass needs `build` and nothing else.

    Attributes:
        needs_tree: Whether `build` needs a learned tree.
    """

    needs_tree: ClassVar[bool] = False

    @property
    def asks_base_logits(self) -> bool:
        """Whether `resolve_skip` has something to decide."""
        return False

    @abstractmethod
    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> Head:
        """The head for `in_features` features and `out_features` outputs, wired by `ggt` where it needs a tree."""

    def resolve_skip(self, base_logits: bool) -> HeadSettings:
        """These settings, once it is known whether there are base logits that the head could add to."""
        return self

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.settings() == self.settings()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return self.describe()


def check_sizes(in_features: int, out_features: int) -> tuple[int, int]:
    """The sizes of a head as plain numbers, each at least 1."""
    return checks.whole("in_features", in_features, 1, 10**8), checks.whole("out_features", out_features, 1, 10**8)


def check_hidden(hidden: int) -> int:
    """A number of hidden layers, at least 1."""
    return checks.whole("hidden", hidden, 1, 100, hint="without a hidden layer, use the head Linear")


def check_norm(norm: Norm) -> Norm:
    """A norm as it is, or an error."""
    checks.one_of("norm", norm, ("batch", None))
    return norm


def above_zero_or_auto(name: str, value: float | Literal["auto"]) -> float | Literal["auto"]:
    """A positive and finite number as a `float`, "auto" as it is, or an error."""
    if isinstance(value, str):
        checks.one_of(name, value, ("auto",), "or a number above 0")
        return "auto"
    return checks.above_zero(name, value)


def check_budget(num_params: Budget) -> Budget:
    """A budget of parameters as it is, "auto" included, or an error that says what is wrong with it."""
    if isinstance(num_params, str) and num_params == "auto":
        return "auto"
    if isinstance(num_params, str):
        raise ValueError(
            f"expected num_params to be one of auto or a whole number, got {num_params!r}: 'auto' goes by the numbers "
            "of features and outputs"
        )
    return checks.whole(
        "num_params", num_params, 1, MOST_PARAMS, hint="or 'auto', by the numbers of features and outputs"
    )


def resolve_budget(num_params: Budget, in_features: int, needed: int = 0, *, out_features: int) -> int:
    """The number of parameters that a budget means: "auto" is 16,000, or 250 a feature where that is more.

    Every output beyond 16 adds twice what it has in a linear layer: a head of 1,000 classes has room for a linear layer
    and as much again. A head that could not be built with so few, because one neuron in each of its layers `needed`
    more than half of them, gets twice what it needs.

    >>> resolve_budget("auto", 64, out_features=10), resolve_budget("auto", 64, out_features=1000)
    (16000, 143920)
    >>> resolve_budget("auto", 512, out_features=10), resolve_budget("auto", 512, needed=100_000, out_features=10)
    (128000, 200000)
    """
    if num_params != "auto":
        return int(num_params)
    plain = max(LEAST_PARAMS, PARAMS_PER_FEATURE * in_features)
    further = 2 * max(0, out_features - FREE_OUTPUTS) * (in_features + 1)
    return min(MOST_PARAMS, max(plain + further, TIMES_NEEDED * needed))


def as_features(x: Tensor, d: int, weights: Tensor) -> Tensor:
    """Features (B, d) in the type of a head's `weights`, or an error that says what came instead."""
    if x.dim() != 2 or x.shape[1] != d or x.is_complex():
        raise ValueError(
            f"expected features of shape (batch, {d}) in real numbers, got {tuple(x.shape)} of {x.dtype}: give this "
            f"head the {d} features that it was built for, or build one for these"
        )
    return x.to(weights.dtype)


def need_tree(ggt: GGT | None, settings: HeadSettings) -> GGT:
    """The tree, or an error that says how to get one."""
    if ggt is None:
        raise RuntimeError(
            f"expected a learned structure for the head {settings!r}, got none: add the callback "
            "brainet_pl.callbacks.StructureLearning() to the Trainer, call model.set_structure(ggt), or give a "
            "checkpoint (ckpt_path=...)"
        )
    return ggt
