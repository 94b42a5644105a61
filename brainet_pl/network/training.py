"""Training of a head on features in memory, outside Lightning."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from tqdm.auto import tqdm

from brainet_pl.network.base import Head, train_head

SLOWER = 0.3  # of the learning rate, each time that training goes on from the best weights
Loss = Callable[[Tensor, Tensor], Tensor]  # outputs (B, O) or (M, B, O) and targets (B,) → a scalar


def fit_head(
    head: Head,
    x: Tensor,
    target: Tensor,
    loss: Loss,
    validate: Callable[[], float] | None = None,
    *,
    max_epochs: int,
    patience: int,
    batch_size: int,
    learning_rate: float,
    base_logits: Tensor | None = None,
    weight_decay: float = 0.0,
    input_dropout: float = 0.0,
    rate_decays: int = 0,
    final_batch: int = 0,
    progress: bool = False,
) -> int:
    """Train a head with Adam; at the end it has the weights of the epoch that validated best. Gives the epochs taken.

    More epochs than needed cost time and nothing else.

    Args:
        head: the head, on the device of the features.
        x: (N, d) features.
        target: (N,) targets, as the loss takes them.
        loss: of the head's outputs for a batch.
        validate: the loss of the head in evaluation on held-out samples; None trains to the end.
        max_epochs: epochs at the most.
        patience: epochs without a better validation after which training ends, or the learning rate falls.
        batch_size: samples in a batch.
        learning_rate: learning rate of Adam.
        base_logits: (N, O) logits that a head with `adds_base_logits` adds to; None for any other head.
        weight_decay: decoupled weight decay (AdamW), times the learning rate.
        input_dropout: share of the features that is set to zero, drawn anew for each sample and step.
        rate_decays: how often, when patience ends, training goes on from the best weights with a lower learning rate.
        final_batch: samples in a batch when patience ends for the first time, from the best weights on, where that is
            more: batch norm of small batches is noise, which noisy targets gain by and exact ones lose by.
        progress: show a progress bar.
    """
    parameters = list(head.parameters())
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, fused=True)
        if weight_decay
        else torch.optim.Adam(parameters, lr=learning_rate, fused=True)
    )
    best, best_loss, waited, epochs = copy.deepcopy(head.state_dict()), math.inf, 0, 0
    for _ in tqdm(range(max_epochs), desc="fitting", disable=None if progress else True, delay=1, leave=False):
        epochs += 1
        head.train()
        for rows in torch.randperm(len(x)).split(batch_size):  # type: ignore[no-untyped-call]
            if len(rows) < 2:
                continue  # batch norm has nothing to compare a single sample with
            optimizer.zero_grad()
            given = functional.dropout(x[rows], input_dropout) if input_dropout else x[rows]
            found = loss(train_head(head, given, None if base_logits is None else base_logits[rows]), target[rows])
            penalty = head.penalty()
            (found if penalty is None else found + penalty / len(x)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if validate is None:
            continue
        head.eval()
        with torch.no_grad():
            value = validate()
        waited += 1
        if value < best_loss:
            best, best_loss, waited = copy.deepcopy(head.state_dict()), value, 0
        elif waited >= patience:
            grows = min(final_batch, len(x)) > batch_size
            if not (grows or rate_decays) or not math.isfinite(best_loss):
                break
            waited = 0
            head.load_state_dict(best)
            if grows:
                batch_size = final_batch
                continue
            rate_decays -= 1
            for group in optimizer.param_groups:
                group["lr"] *= SLOWER
    if math.isfinite(best_loss):
        head.load_state_dict(best)
    return epochs
