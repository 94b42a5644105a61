"""After a fit, one line that says whether the head was worth it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from brainet_pl._utils.framework import Callback, ModelCheckpoint, pl, rank_zero_info, rank_zero_warn
from brainet_pl._utils.lightning_private import train_loaders
from brainet_pl._utils.rng import isolated_rng
from brainet_pl.calibration.temperature import fit_temperature, scale
from brainet_pl.distributed.samples import on_rank_zero
from brainet_pl.features.extraction import Extracted, is_sharded
from brainet_pl.features.training import SAMPLE_ROWS
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import BRAINetHead, Head, Tree
from brainet_pl.network.base import MIN_VALIDATION, HeadInputs, run_head
from brainet_pl.prediction.finite import finite_samples
from brainet_pl.tasks import Classification, Regression, Task
from brainet_pl.tasks.linear import ROWS_PER_CLASS

HEAD = "predictor.head."  # of the keys of its weights in a checkpoint
OWN, LINEAR = "the network's own layer", "linear"
NOT_COMPARED = "the head was not compared with a linear layer"
LAST, BEST = "after the last epoch", "at the best checkpoint"
PRICE = 0.1  # of the time of a fit, which running the backbone over training samples once more may take
PLENTY = 10  # training samples for each feature, from which on a linear layer needs no penalty
LEAST_FALL = 0.02  # share of the validation NLL: less is noise


class BaselineComparison(Callback):
    """Compares a trained head on validation data with what was there before, and with the least that can be done.

    That is the network's own layer, where one was removed and is one for the task, and a linear layer on the same
    features, fitted to all training samples: by as many as ten seconds allow, or as running the backbone once more in
    a tenth of the fit's time gives, and then the line says how many. Where they are too few for the number of classes
    (5 a class), one line says so instead. Each prediction has its best temperature on the validation samples, so that
    heads are compared and not how sure they are. One line says the NLL of each, whether validation was still improving,
    and what a temperature would gain; a head that loses by more than a standard error is warned of, with what to try.
    Loggers get `versus/<name>/NLL`, and the standard error of each difference, `versus/<name>/Error`. The head is the
    one of the best checkpoint where a `ModelCheckpoint` has chosen one and the backbone is frozen, else the last. A
    `BRAINet` brings this callback itself; to hear nothing, give `BaselineComparison(False)`.

    Args:
        say: whether to compare at all.
    """

    def __init__(self, say: bool = True) -> None:
        self.say = say
        self._curve: list[float] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the curve of validation NLL anew."""
        self._curve = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the NLL of every validation of a fit."""
        if not trainer.sanity_checking and isinstance(pl_module, BRAINet):
            value = trainer.callback_metrics.get(_monitor(pl_module.task))
            self._curve += [] if value is None else [float(value)]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All checkpoints are written by now."""
        short = trainer.fast_dev_run or trainer.interrupted  # type: ignore[attr-defined]
        if self.say and not short and trainer.enable_validation and isinstance(pl_module, BRAINet):
            if is_sharded(pl_module):
                rank_zero_info(f"{NOT_COMPARED}: its weights are shared by several processes")
                return
            seen = training_rows(trainer, pl_module)  # in all processes: they may share the work
            on_rank_zero(trainer, lambda: self._compare(trainer, pl_module, seen))

    def _compare(self, trainer: pl.Trainer, module: BRAINet, seen: Extracted) -> None:
        held = module.validation_sample()
        if module.head is None or held is None or len(held.targets) < MIN_VALIDATION:
            count = 0 if held is None else len(held.targets)
            rank_zero_info(f"{NOT_COMPARED}: {count} validation samples are fewer than {MIN_VALIDATION}")
            return
        rows, name = module.predictor.head_inputs(held), _name(module)
        head, when = _best_head(trainer, module)
        predicted = _predictions(module, head, rows, seen, held)
        losses = _losses(module.task, predicted, rows.target)
        if len(losses) < 2:
            return
        _log(trainer, losses, name)
        verdict, count = judge(losses, name), len(seen.targets)
        line = (
            f"{verdict.line}{_sampled(count, _epoch_rows(trainer))}, each at its best temperature on "
            f"{len(rows.target):,} validation samples, {when}"
        )
        plain = module.task.nll(predicted[name], rows.target)
        gain = None if plain is None or module.calibration is not None else plain.double().cpu() - losses[name]
        plenty = count >= PLENTY * seen.features.shape[1]
        hints = advice(head, verdict.ahead, self._curve, when, gain, _monitor(module.task), plenty)
        if verdict.ahead is None:
            rank_zero_info("; ".join([line, *hints]))
        else:
            rank_zero_warn("; ".join([f"{line}: {verdict.ahead} is ahead", *hints]))


def _losses(task: Task, predicted: Mapping[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    """The loss (N,) of each prediction; none at all where one of them has none."""
    losses = {}
    for name, values in predicted.items():
        loss = _nll(task, values, target)
        if loss is None:
            return {}
        losses[name] = loss
    return losses


def _sampled(count: int, total: int | None) -> str:
    """Where a part of the training samples was looked at, how many."""
    return "" if total is None or count >= total else f" ({count:,} of {total:,} training samples)"


def _predictions(module: BRAINet, head: Head, rows: HeadInputs, seen: Extracted, held: Extracted) -> dict[str, Tensor]:
    """Validation samples as the head, the network's own layer and a linear layer predict them, where there are such."""
    predicted = {}
    with torch.no_grad(), isolated_rng(0):
        predicted[_name(module)] = _head_prediction(module, head, rows)
        base_logits = held.output.base_logits
        base = None if base_logits is None else module.task.base_predicted(base_logits)
        if base is not None:
            predicted[OWN] = base
    with tqdm(total=1, desc="comparing with a linear layer", disable=None, delay=0, leave=False) as bar:
        linear = module.task.linear(seen.features, seen.targets)
        bar.update()
    if linear is None:
        rank_zero_info(f"{NOT_COMPARED}: {_why_no_linear(module, seen)}")
    else:
        predicted[LINEAR] = linear(held.features)
    return predicted


class Judged(NamedTuple):
    """The NLL of all in one line, and who is ahead of the head by more than noise, or None."""

    line: str
    ahead: str | None


def judge(losses: dict[str, Tensor], name: str) -> Judged:
    """Compare the losses (N,) of the head `name` with those of others, sample by sample.

    >>> losses = {"BRAINet": torch.tensor([0.02, 0.04, 0.03]), "linear": torch.tensor([0.1, 0.2, 0.1])}
    >>> judge(losses, "BRAINet")
    Judged(line='BRAINet 0.03 NLL, linear 0.133', ahead=None)
    """
    means = {other: float(loss.mean()) for other, loss in losses.items()}
    line = ", ".join(f"{other} {mean:.3g}{' NLL' if other == name else ''}" for other, mean in means.items())
    ahead = [other for other in losses if other != name and _clear(losses[name] - losses[other])]
    best = min(ahead, key=lambda other: means[other], default=None)
    if best is not None and OWN in ahead and not _clear(losses[OWN] - losses[best]):
        best = OWN  # it needs no fit
    return Judged(line, best)


def still_improving(curve: Sequence[float]) -> bool:
    """Whether the NLL of the last validations fell each time, to its lowest, and by more than noise.

    >>> still_improving([1.63, 0.98, 0.49]), still_improving([0.3, 0.2, 0.1999]), still_improving([0.3, 0.2, 0.25])
    (True, False, False)
    """
    last = curve[-3:]
    falls = all(after < before for before, after in pairwise(last))
    return len(last) > 1 and falls and last[-2] - last[-1] > max(LEAST_FALL * abs(last[-2]), 1e-3)


def advice(
    head: Head, ahead: str | None, curve: Sequence[float], when: str, gain: Tensor | None, monitor: str, plenty: bool
) -> list[str]:
    """What to try, in the order of what is worth most; nothing where the head wins and nothing is left to gain.

    Args:
        head: that was compared.
        ahead: who is ahead of it, or None.
        curve: NLL of all validations of the fit.
        when: whether it is the head of the last epoch or of the best checkpoint.
        gain: (N,) what a temperature takes from the NLL of each validation sample; None where there is a calibrator.
        monitor: the key of that NLL.
        plenty: whether there are enough training samples for a linear layer without a penalty.
    """
    if still_improving(curve):
        fell = f"validation NLL was still falling at the last validation, from {curve[-2]:.3g} to {curve[-1]:.3g}"
        return [f"{fell}: train longer (--trainer.max_epochs)"]
    tries = [*_hint_on_epochs(curve, when, monitor), *_hint_on_temperature(gain, monitor)]
    if ahead is None:
        return tries
    if len(curve) < 2:
        tries.append("one validation says little: train longer (--trainer.max_epochs)")
    if ahead == OWN:
        if isinstance(head, BRAINetHead) and not head.adds_base_logits:
            tries.append("add to that layer, --model.head.skip base_logits")
        last = "keep that layer"
    elif plenty:
        last = "use --model.head Linear"
    else:
        last = "use a linear layer with a penalty, as of scikit-learn: there are few samples for so many features"
    return [*tries, f"or {last}" if tries else last]


def _hint_on_epochs(curve: Sequence[float], when: str, monitor: str) -> list[str]:
    """To keep the best epoch, where the last one is clearly worse."""
    if when != LAST or not curve:
        return []
    lowest = min(range(len(curve)), key=lambda i: curve[i])
    if curve[-1] - curve[lowest] <= max(LEAST_FALL * abs(curve[lowest]), 1e-3):
        return []
    rose = f"validation NLL was {curve[lowest]:.3g} at validation {lowest + 1} of {len(curve)} and is {curve[-1]:.3g}"
    return [f"{rose}: keep the best epoch, ModelCheckpoint(monitor='{monitor}')"]


def _hint_on_temperature(gain: Tensor | None, monitor: str) -> list[str]:
    """To calibrate, where a temperature gains more than noise."""
    if gain is None or monitor != "val/cls/NLL":
        return []
    mean = float(gain.mean())
    if not mean > 2 * _error(gain) > 0:
        return []
    return [f"a temperature takes {mean:.3g} from the NLL: --model.calibration TemperatureScaling"]


def training_rows(trainer: pl.Trainer, module: BRAINet) -> Extracted:
    """Features of all training samples, or of a random choice of as many as a comparison has time for.

    Where the backbone has to run for them, they are as many as a fit runs it on in a tenth of its time.
    """
    features, total = module.training_features, _epoch_rows(trainer)
    width = module.predictor.in_features  # the features themselves would make the backbone run again
    most = SAMPLE_ROWS if width is None else module.task.linear_rows(width)
    if total is not None and not (module.backbone.raw or features.store is not None):
        most = min(most, int(PRICE * max(1, trainer.current_epoch) * total))
    if total is None or most <= SAMPLE_ROWS or total <= SAMPLE_ROWS:
        return module.training_sample()
    found = finite_samples(features.all(min(most, total), progress=False))
    features.release()
    return found


def _epoch_rows(trainer: pl.Trainer) -> int | None:
    """How many training samples an epoch of a fit has; None where its data does not say."""
    loaders: list[Any] | None = train_loaders(trainer)
    size = getattr(loaders[0], "batch_size", None) if loaders else None
    if size is None or trainer.num_training_batches == float("inf"):
        return None
    rows = int(trainer.num_training_batches * size * trainer.world_size)
    data: Any = getattr(loaders[0], "dataset", None) if loaders else None
    return min(rows, len(data)) if hasattr(data, "__len__") else rows


def _monitor(task: Task) -> str:
    return f"val/{task.group}/NLL"


def _error(gap: Tensor) -> float:
    """The standard error of the mean of differences (N,)."""
    return float(gap.std()) / math.sqrt(len(gap))


def _clear(gap: Tensor) -> bool:
    """Whether the mean of differences (N,) is above zero by more than a standard error."""
    return float(gap.mean()) > _error(gap)


def _nll(task: Task, predicted: Tensor, target: Tensor) -> Tensor | None:
    """The NLL (N,) of predictions at their best temperature; of a regression, with variances at their best scale."""
    predicted = predicted.to(target.device)
    if isinstance(task, Classification) and bool(predicted.isfinite().all()):
        predicted = scale(predicted, fit_temperature(predicted, target))
    elif isinstance(task, Regression):
        mean, variance = predicted.double().unbind(dim=1)
        factor = ((target - mean) ** 2 / variance).mean().clamp_min(1e-12)
        predicted = torch.stack([mean, variance * factor], dim=1)
    loss = task.nll(predicted, target)
    return None if loss is None else loss.double().cpu()


def _log(trainer: pl.Trainer, losses: dict[str, Tensor], name: str) -> None:
    """Give loggers the mean of each, and the standard errors of the differences from the head."""
    keys = {name: "head", OWN: "own", LINEAR: "linear"}
    values = {f"versus/{keys[other]}/NLL": float(loss.mean()) for other, loss in losses.items()}
    values |= {
        f"versus/{keys[other]}/Error": _error(losses[name] - loss) for other, loss in losses.items() if other != name
    }
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.global_step)


def _name(module: BRAINet) -> str:
    return "BRAINet" if isinstance(module.head_settings, Tree) else type(module.head_settings).__name__


def _why_no_linear(module: BRAINet, seen: Extracted) -> str:
    classes = module.task.classes(seen.targets)[1]
    if classes == 1:
        return f"{type(module.task).__name__} has none for {len(seen.targets):,} training samples"
    return (
        f"that takes {ROWS_PER_CLASS} samples of each of {classes:,} classes, more than {len(seen.targets):,} training "
        "samples or a few seconds allow; to compare, fit a model with head=Linear()"
    )


def _head_prediction(module: BRAINet, head: Head, rows: HeadInputs) -> Tensor:
    """What the head predicts, before any calibration."""
    found = []
    for start in range(0, len(rows.x), 512):
        part = slice(start, start + 512)
        base_logits = None if rows.base_logits is None else rows.base_logits[part]
        outputs, weights = run_head(head, rows.x[part], module.passes, base_logits)
        found.append(module.task.predictive(outputs, weights))
    return torch.cat(found)


def _best_head(trainer: pl.Trainer, module: BRAINet) -> tuple[Head, str]:
    """The head of the best checkpoint if that can be had without the backbone's weights of then, else the last."""
    assert module.head is not None
    head = copy.deepcopy(module.head).eval()
    chosen = trainer.checkpoint_callback
    if not isinstance(chosen, ModelCheckpoint) or chosen.monitor is None or not chosen.best_model_path:
        return head, LAST
    if not module.backbone.frozen:
        return head, LAST
    try:
        stored = torch.load(chosen.best_model_path, map_location=module.device, weights_only=True)["state_dict"]
        head.load_state_dict({k.removeprefix(HEAD): v for k, v in stored.items() if k.startswith(HEAD)})
    except (OSError, KeyError, RuntimeError, ValueError):  # gone, or of another tree
        return copy.deepcopy(module.head).eval(), LAST
    return head, BEST
