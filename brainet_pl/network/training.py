"""Training of a head on features in memory, outside Lightning."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm.auto import tqdm

from brainet_pl.network.base import Head

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
    progress: bool = False,
) -> int:
    """Train a head with Adam; at the end it has the weights of the epoch that validated best. Gives the epochs taken.

    Args:
        head: the head, on the device of the features.
        x: (N, d) features.
        target: (N,) targets, as the loss takes them.
        loss: of the head's outputs for a batch.
        validate: the loss of the head in evaluation on held-out samples; None trains to the end.
        max_epochs: epochs at the most.
        patience: epochs without a better validation after which training ends.
        batch_size: samples in a batch.
        learning_rate: of Adam.
        progress: show a progress bar.
    """
    optimizer = torch.optim.Adam(head.parameters(), lr=learning_rate)
    best, best_loss, waited, epochs = copy.deepcopy(head.state_dict()), math.inf, 0, 0
    for _ in tqdm(range(max_epochs), desc="fitting", disable=None if progress else True, delay=1, leave=False):
        epochs += 1
        head.train()
        for rows in torch.randperm(len(x)).split(batch_size):  # type: ignore[no-untyped-call]
            if len(rows) < 2:
                continue  # batch norm has nothing to compare a single sample with
            optimizer.zero_grad()
            loss(head(x[rows]), target[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if validate is None:
            continue
        head.eval()
        with torch.no_grad():
            found = validate()
        waited += 1
        if found < best_loss:
            best, best_loss, waited = copy.deepcopy(head.state_dict()), found, 0
        elif waited >= patience:
            break
    if math.isfinite(best_loss):
        head.load_state_dict(best)
    return epochs
