"""Training of a head on features in memory, outside Lightning."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from tqdm.auto import tqdm

from brainet_pl._utils import checks
from brainet_pl.network.base import Head, HeadInputs, train_head

MANY = 5000  # rows above which patience is shorter in epochs, and so as long in steps
LEAST_PATIENCE = 3  # epochs
RATE_DECAY = 0.3  # factor on the learning rate, each time that training goes on from the best weights
Loss = Callable[[Tensor, Tensor], Tensor]  # outputs (B, O) or (M, B, O) and targets (B,) → a scalar


@dataclass(frozen=True)
class TrainingSettings:
    """How a head is trained on features in memory, with Adam.

    Attributes:
        max_epochs: Epochs at the most.
        patience: Epochs without a better validation after which training ends, or goes on more slowly.
        batch_size: Samples in a batch; None chooses by their number, see `choose_batch_size`.
        learning_rate: Learning rate of Adam at the start.
        weight_decay: Decoupled weight decay (AdamW), times the learning rate; 0 is none.
        input_dropout: Share of the features that is set to zero, drawn anew for each sample and step.
        rate_decays: How often, when patience ends, training goes on from the best weights with a lower learning rate.
        final_batch: Samples in a batch when patience ends for the first time, from the best weights on, where that is
            more: batch norm of small batches is noise, which noisy targets gain by and exact ones lose by.
    """

    max_epochs: int
    patience: int
    batch_size: int | None
    learning_rate: float
    weight_decay: float = 0.0
    input_dropout: float = 0.0
    rate_decays: int = 0
    final_batch: int = 0

    def __post_init__(self) -> None:
        checks.whole("max_epochs", self.max_epochs, 1)
        checks.whole("patience", self.patience, 1)
        checks.whole_or_none("batch_size", self.batch_size, 2, "None chooses by the number of samples")
        checks.above_zero("learning_rate", self.learning_rate)
        checks.at_least("weight_decay", self.weight_decay, 0, "0 is none")
        checks.share("input_dropout", self.input_dropout)
        checks.whole("rate_decays", self.rate_decays, 0)
        checks.whole("final_batch", self.final_batch, 0)


def choose_batch_size(samples: int) -> int:
    """A power of two near a sixteenth of the samples, from 16 to 256.

    >>> [choose_batch_size(n) for n in (30, 1000, 100_000)]
    [16, 64, 256]
    """
    return int(min(256, max(16, 2 ** round(math.log2(max(1, samples / 16))))))


def patience_for(patience: int, rows: int) -> int:
    """Epochs without a gain after which training of so many rows ends: fewer where each epoch has many steps.

    >>> patience_for(20, 1000), patience_for(20, 20_000), patience_for(20, 1_000_000)
    (20, 5, 3)
    """
    return max(min(patience, LEAST_PATIENCE), min(patience, round(patience * MANY / rows)))


def fit_head(
    head: Head,
    data: HeadInputs,
    settings: TrainingSettings,
    loss: Loss,
    validate: Callable[[], float] | None = None,
    *,
    progress: bool = False,
) -> int:
    """Train a head; at the end it has the weights of the epoch that validated best. Gives the number of epochs taken.

    More epochs than needed cost time and nothing else.

    Args:
        head: the head, on the device of the features.
        data: features (N, d), targets (N,) as the loss takes them, and base logits (N, O) where the head adds to them.
        settings: epochs, batches and learning rate.
        loss: of the head's outputs for a batch.
        validate: the loss of the head in evaluation on held-out samples; None trains to the end.
        progress: show a progress bar.
    """
    training = HeadTraining(head, data, settings, loss, validate, progress=progress)
    training.run()
    training.restore_best()
    return training.epochs


class HeadTraining:
    """A training that can pause, so that another one of the same head can be tried before it goes on.

    The arguments are those of `fit_head`.

    Attributes:
        epochs: epochs taken.
        best_loss: the least validation loss so far.
        best_losses: the same after each epoch.
    """

    def __init__(
        self,
        head: Head,
        data: HeadInputs,
        settings: TrainingSettings,
        loss: Loss,
        validate: Callable[[], float] | None = None,
        *,
        progress: bool = False,
    ) -> None:
        self.head, self.data, self.settings, self.loss, self.validate = head, data, settings, loss, validate
        self.epochs = 0
        self.best_losses: list[float] = []
        self._schedule = _Schedule(head, settings, len(data.x))
        self._paused: Tensor | None = None  # the state of random numbers
        self._progress = progress

    @property
    def best_loss(self) -> float:
        """The least validation loss so far; infinite without one."""
        return self._schedule.best_loss

    def restore_best(self) -> None:
        """Give the head the weights that validated best, if any did."""
        self._schedule.restore_best()

    def run(self, pause: bool = False, is_lost: Callable[[HeadTraining], bool] | None = None) -> None:
        """Train to the end.

        Args:
            pause: stop where patience ends for the first time, to go on when called again.
            is_lost: asked after each validation; where it says yes, training ends at once, not to go on.
        """
        if self._paused is not None:
            torch.set_rng_state(self._paused)
            self._paused = None
            if not self._schedule.slow_down():
                return
        left = range(self.settings.max_epochs - self.epochs)
        for _ in tqdm(left, desc="fitting", disable=None if self._progress else True, delay=1, leave=False):
            self.epochs += 1
            _train_epoch(self.head, self.data, self.loss, self._schedule, self.settings.input_dropout)
            if self.validate is None:
                continue
            self.head.eval()
            with torch.no_grad():
                validation_loss = self.validate()
            is_patient = self._schedule.is_patient(validation_loss)
            self.best_losses.append(self.best_loss)
            if is_lost is not None and is_lost(self):
                return
            if is_patient:
                continue
            if pause:
                self._paused = torch.get_rng_state()
                return
            if not self._schedule.slow_down():
                return


def _train_epoch(head: Head, data: HeadInputs, loss: Loss, schedule: _Schedule, input_dropout: float) -> None:
    """One pass over the samples, in batches of a new order."""
    samples = len(data.x)
    head.train()
    for rows in torch.randperm(samples).split(schedule.batch_size):  # type: ignore[no-untyped-call]
        if len(rows) < 2:
            continue  # batch norm has nothing to compare a single sample with
        batch = data.rows(rows)
        x = functional.dropout(batch.x, input_dropout) if input_dropout else batch.x
        schedule.optimizer.zero_grad()
        value = loss(train_head(head, x, batch.base_logits), batch.target)
        penalty = head.penalty()
        if penalty is not None:
            value = value + penalty / samples
        value.backward()  # type: ignore[no-untyped-call]
        schedule.optimizer.step()


class _Schedule:
    """The optimizer and batch size of each epoch, and the best weights so far.

    Attributes:
        optimizer: of all parameters of the head.
        batch_size: samples in a batch of the next epoch.
        best_loss: the least validation loss so far.
    """

    def __init__(self, head: Head, settings: TrainingSettings, samples: int) -> None:
        parameters, rate, decay = list(head.parameters()), settings.learning_rate, settings.weight_decay
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=rate, fused=True)
        if decay:
            self.optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=True)
        self.batch_size = choose_batch_size(samples) if settings.batch_size is None else settings.batch_size
        self._final_batch = min(settings.final_batch, samples)
        self._rate_decays = settings.rate_decays
        self._patience = settings.patience
        self._head = head
        self._best_weights = copy.deepcopy(head.state_dict())
        self.best_loss = math.inf
        self._epochs_without_gain = 0

    def is_patient(self, validation_loss: float) -> bool:
        """Take a validation in; gives whether training goes on as it is."""
        self._epochs_without_gain += 1
        if validation_loss < self.best_loss:
            self._best_weights, self.best_loss = copy.deepcopy(self._head.state_dict()), validation_loss
            self._epochs_without_gain = 0
        return self._epochs_without_gain < self._patience

    def slow_down(self) -> bool:
        """Go on from the best weights with a larger batch, or else a lower learning rate; gives whether that is due."""
        larger_batch = self._final_batch > self.batch_size
        if not (larger_batch or self._rate_decays) or not math.isfinite(self.best_loss):
            return False
        self.restore_best()
        self._epochs_without_gain = 0
        if larger_batch:
            self.batch_size = self._final_batch
            return True
        self._rate_decays -= 1
        for group in self.optimizer.param_groups:
            group["lr"] *= RATE_DECAY
        return True

    def restore_best(self) -> None:
        """Give the head the weights that validated best, if any did."""
        if math.isfinite(self.best_loss):
            self._head.load_state_dict(self._best_weights)
