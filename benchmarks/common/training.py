"""How the experiments of the paper train and run heads, and the control they are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from rivals.vbll import training_loss
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from brainet_pl.network import BRAINetHead, Head
from brainet_pl.structure import GGT
from brainet_pl.structure.ggt import Branch, Leaf, Node, Tree
from common.tasks import Sample, nll


def shuffled(ggt: GGT, seed: int = 0) -> GGT:
    """The control: the same tree with its variables exchanged at random, so that the wiring is no longer the data's.

    Scores stay with their leaves, so the posterior over branches is the same.
    """
    new = np.random.default_rng(seed).permutation(ggt.num_variables)

    def rename(node: Tree) -> Tree:
        names = [int(new[v]) for v in node.variables]
        if isinstance(node, Leaf):
            parents = [tuple(int(new[p]) for p in pa) for pa in node.parents]
            order = np.argsort(names)
            near = [tuple(int(new[v]) for v in found) for found in node.neighbours]
            return Leaf(
                tuple(names[i] for i in order),
                tuple(tuple(sorted(parents[i])) for i in order),
                node.score,
                tuple(near[i] for i in order if near),
            )
        branches = (Branch(tuple(rename(a) for a in b.ancestors), rename(b.descendant)) for b in node.branches)
        return Node(tuple(sorted(names)), tuple(branches))

    return GGT(rename(ggt.root), ggt.num_variables, ggt.num_rows, ggt.settings)


def loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of outputs (B, C), or of every member of (M, B, C)."""
    return F.cross_entropy(outputs.flatten(0, -2), y.repeat(len(outputs) if outputs.dim() == 3 else 1))


def train(
    head: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    loss: Callable[[Tensor, Tensor], Tensor] = loss,
    lr: float = 1e-3,
    batch: int = 256,
    seed: int = 0,
    decay: bool = False,
    penalty: Callable[[], Tensor] | None = None,
    name: str = "",
) -> nn.Module:
    """Adam with a fixed rate (the paper), or decaying to 0 along a cosine; batches drawn by `seed`."""
    batch = min(batch, len(x))
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    steps = epochs * (len(x) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if decay else None
    draw = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(epochs), desc=name or type(head).__name__, leave=False):
        head.train()
        order = torch.randperm(len(x), generator=draw)
        for rows in order[: len(x) // batch * batch].view(-1, batch):
            optimizer.zero_grad()
            value = loss(head(x[rows]), y[rows])
            if penalty is not None:
                value = value + penalty()
            value.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
    return head.eval()


@torch.no_grad()
def outputs_of(head: nn.Module, x: Tensor, passes: int = 15, mode: str = "stochastic", seed: int = 0) -> Tensor:
    """(N, d) → (T, N, O) of a BRAINet head in one of its modes, or of any head for comparison."""
    torch.manual_seed(seed)
    found = []
    for part in x.split(2000):
        if not isinstance(head, BRAINetHead):
            found.append(head.passes(part, passes).values)
        elif mode == "simultaneous":
            found.append(head.simultaneous(part).unsqueeze(0))
        else:  # the same sub-networks for all parts
            found.append(head.stochastic(part, passes, generator=torch.Generator().manual_seed(seed)).logits)
    return torch.cat(found, dim=1)


class Fitted(NamedTuple):
    """A head with the weights of its best epoch, the validation NLL that it had there, and the epoch (from 1)."""

    head: Head
    nll: float
    epoch: int


def fit_best(
    head: Head,
    sample: Sample,
    *,
    epochs: int,
    patience: int,
    lr: float = 1e-3,
    batch: int = 128,
    seed: int = 0,
    passes: int = 15,
    name: str = "",
) -> Fitted:
    """Adam at a fixed rate; the epoch with the least validation NLL counts, as `ModelCheckpoint` would choose it.

    Training ends early when that NLL has not fallen for `patience` epochs. The head is measured as it predicts.
    """
    x, y = sample.train
    batch = min(batch, len(x))
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    draw = torch.Generator().manual_seed(seed)
    best = Fitted(head, math.inf, 0)
    state: dict[str, Tensor] = {}
    for epoch in tqdm(range(1, epochs + 1), desc=name or type(head).__name__, leave=False):
        head.train()
        order = torch.randperm(len(x), generator=draw)
        for rows in order[: len(x) // batch * batch].view(-1, batch):
            optimizer.zero_grad()
            value = training_loss(sample.task, head, x[rows], y[rows])
            penalty = head.penalty()
            if penalty is not None:
                value = value + penalty / len(x)
            value.backward()
            optimizer.step()
        found = validation_nll(head, sample, passes)
        if found < best.nll:
            best = Fitted(head, found, epoch)
            state = {k: v.clone() for k, v in head.state_dict().items()}
        elif epoch - best.epoch >= patience:
            break
    head.load_state_dict(state)
    head.eval()
    return best


@torch.no_grad()
def validation_nll(head: Head, sample: Sample, passes: int) -> float:
    """NLL of the averaged prediction of the validation rows, by the same random numbers every time."""
    head.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nll(sample.task, *head.passes(sample.val[0], passes), sample.val[1])
