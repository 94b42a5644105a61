"""After a fit, one line that says whether the head was worth it."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils.framework import Callback, ModelCheckpoint, pl, rank_zero_info, rank_zero_warn
from brainet_pl._utils.rng import isolated_rng
from brainet_pl.distributed.samples import on_rank_zero
from brainet_pl.features.extraction import Extracted
from brainet_pl.model.lightning import BRAINet
from brainet_pl.network import BRAINetHead, Head, Tree
from brainet_pl.network.base import LEAST, HeadInputs, run_head
from brainet_pl.tasks.linear import ROWS_PER_CLASS

HEAD = "predictor.head."  # of the keys of its weights in a checkpoint
OWN, LINEAR = "the network's own layer", "linear"
NOT_COMPARED = "the head was not compared with a linear layer"


class BaselineComparison(Callback):
    """Compares a trained head on validation data with what was there before, and with the least that can be done.

    That is the network's own layer, where one was removed and is one for the task, and a linear layer on the same
    features, fitted in a second or two to up to 2,048 training samples; where these are too few for the number of
    classes (5 a class), one line says so instead. One line says the NLL of each; a head that
    loses by more than a standard error is warned of, with what to try. Loggers get `versus/<name>/NLL`. The head is the
    one of the best checkpoint where a `ModelCheckpoint` has chosen one and the backbone is frozen, else the last. A
    `BRAINet` brings this callback itself; to hear nothing, give `BaselineComparison(False)`.

    Args:
        say: whether to compare at all.
    """

    def __init__(self, say: bool = True) -> None:
        self.say = say

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All checkpoints are written by now."""
        short = trainer.fast_dev_run or trainer.interrupted  # type: ignore[attr-defined]
        if self.say and not short and trainer.enable_validation and isinstance(pl_module, BRAINet):
            on_rank_zero(trainer, lambda: self._compare(trainer, pl_module))

    def _compare(self, trainer: pl.Trainer, module: BRAINet) -> None:
        held = module.validation_sample()
        if module.head is None or held is None or len(held.targets) < LEAST:
            count = 0 if held is None else len(held.targets)
            rank_zero_info(f"{NOT_COMPARED}: {count} validation samples are fewer than {LEAST}")
            return
        rows = module.predictor.head_inputs(held)
        head, when = _best_head(trainer, module)
        with torch.no_grad(), isolated_rng(0):
            losses = {_name(module): _head_nll(module, head, rows)}
            base_logits = (
                None if held.output.base_logits is None else module.task.base_predicted(held.output.base_logits)
            )
            if base_logits is not None:
                losses[OWN] = module.task.nll(base_logits.to(rows.target.device), rows.target)
        seen = module.training_sample()
        linear = module.task.linear(seen.features, seen.targets)
        if linear is None:
            rank_zero_info(f"{NOT_COMPARED}: {_why_no_linear(module, seen)}")
        else:
            losses[LINEAR] = module.task.nll(linear(held.features).to(rows.target.device), rows.target)
        known = {name: loss.double().cpu() for name, loss in losses.items() if loss is not None}
        if len(known) < 2 or len(known) < len(losses):
            return
        keys = {_name(module): "head", OWN: "own", LINEAR: "linear"}
        for logger in trainer.loggers:
            means = {f"versus/{keys[name]}/NLL": float(loss.mean()) for name, loss in known.items()}
            logger.log_metrics(means, step=trainer.global_step)
        verdict = judge(known, _name(module))
        line = f"{verdict.line}, on {len(rows.target):,} validation samples, {when}"
        if verdict.ahead is None:
            rank_zero_info(line)
        else:
            rank_zero_warn(f"{line}: {verdict.ahead} is ahead{advice(head, verdict.ahead, when)}")


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
    best = min(means, key=lambda other: means[other])
    gap = losses[name] - losses[best]
    lost = best != name and float(gap.mean()) > float(gap.std()) / len(gap) ** 0.5
    return Judged(line, best if lost else None)


def advice(head: Head, ahead: str, when: str) -> str:
    """What to try when a head loses."""
    tries = []
    if isinstance(head, BRAINetHead) and ahead == OWN and not head.adds_base_logits:
        tries.append("Tree(skip='base_logits')")
    if isinstance(head, BRAINetHead) and ahead == LINEAR and head.skip is None and not head.adds_base_logits:
        tries.append("Tree(skip='linear')")
    if "last" in when:
        tries += ["more epochs", "a ModelCheckpoint that monitors the validation NLL"]
    else:
        tries += ["dropout", "fewer parameters (num_params)", "another threshold of the structure"]
    return f"; try {', '.join(tries)}, or use that"


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


def _head_nll(module: BRAINet, head: Head, rows: HeadInputs) -> Tensor | None:
    """The NLL (N,) of the head's own prediction, before any calibration."""
    found = []
    for start in range(0, len(rows.x), 512):
        part = slice(start, start + 512)
        base_logits = None if rows.base_logits is None else rows.base_logits[part]
        outputs, weights = run_head(head, rows.x[part], module.passes, base_logits)
        found.append(module.task.nll(module.task.predictive(outputs, weights), rows.target[part]))
    whole = [loss for loss in found if loss is not None]
    return torch.cat(whole) if len(whole) == len(found) else None


def _best_head(trainer: pl.Trainer, module: BRAINet) -> tuple[Head, str]:
    """The head of the best checkpoint if that can be had without the backbone's weights of then, else the last."""
    assert module.head is not None
    head = copy.deepcopy(module.head).eval()
    chosen = trainer.checkpoint_callback
    if not isinstance(chosen, ModelCheckpoint) or chosen.monitor is None or not chosen.best_model_path:
        return head, "after the last epoch"
    if not module.backbone.frozen:
        return head, "after the last epoch"
    try:
        stored = torch.load(chosen.best_model_path, map_location=module.device, weights_only=True)["state_dict"]
        head.load_state_dict({k.removeprefix(HEAD): v for k, v in stored.items() if k.startswith(HEAD)})
    except (OSError, KeyError, RuntimeError, ValueError):  # gone, or of another tree
        return copy.deepcopy(module.head).eval(), "after the last epoch"
    return head, "at the best checkpoint"
