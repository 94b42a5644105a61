"""Before every validation of a fit, let the head choose what needs no training; every checkpoint carries it."""

from __future__ import annotations

from torch import Tensor

from brainet_pl._utils.framework import Callback, TrainerFn, pl, rank_zero_warn
from brainet_pl.model.lightning import BRAINet
from brainet_pl.network.base import LEAST, NLL
from brainet_pl.tasks import Task


class HeadSettling(Callback):
    """Settles the head of a `BRAINet` before every validation of a fit, or after every epoch where there is none.

    For a `Tree`: the temperature of its posterior and the dropout of its predictions, on up to 2,048 validation
    samples; and the batch-norm statistics of its simultaneous mode, from as many training samples. No weight moves, and
    the validation that follows is of the head as it was settled. With fewer than 100 validation samples the temperature
    is `GGT.auto_temperature`. A model brings this callback itself.
    """

    def __init__(self) -> None:
        self._found: dict[str, float] = {}
        self._warned = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing is known of this fit yet."""
        self._found, self._warned = {}, False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Settle on the weights of now. The sanity check sees a network that has not trained."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._settle(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs what was settled as `val/head/<name>`, beside the metrics of the validation."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            pl_module.log_dict({f"val/head/{name}": value for name, value in self._found.items()})

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Settle where nothing is validated; checkpoints are written after this hook of all other callbacks."""
        if not trainer.enable_validation:
            self._settle(trainer, pl_module)

    def _settle(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not isinstance(module, BRAINet) or module.head is None or not module.head.finalizes:
            return
        held = module.validation_sample() if trainer.enable_validation else None
        if (held is None or len(held.targets) < LEAST) and not self._warned:
            self._warned = True
            if module.head.needs_validation_data and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                rank_zero_warn(
                    f"expected at least {LEAST} validation samples to choose the temperature of the posterior by, got "
                    f"{0 if held is None else len(held.targets)}: it is the tempered default; give more validation "
                    "data, or set Tree(temperature=…)"
                )
        rows = None if held is None or len(held.targets) < LEAST else module.rows_of(held)
        seen = module.rows_of(module.training_sample())
        self._found = module.head.finalize(seen, rows, nll_of(module.task), module.passes)


def nll_of(task: Task) -> NLL:
    """The NLL of each target under the average of outputs, for a head; all zero where the task has no likelihood."""

    def nll(outputs: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
        predicted = task.predictive(outputs, weights)
        found = task.nll(predicted, target)
        return predicted.new_zeros(len(target)) if found is None else found

    return nll
