"""Networks that know six of the ten classes of a data set: detectors are chosen by them, without the sets of a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from brainet_pl.backbones.cifar import CifarResNet
from common.data import MEAN, STD
from common.readings import Known, Readings

BATCH, RATE, DECAY, KNOWN = 64, 0.2, 5e-4, 6
EFFORT = {"cifar": (8000, 4), "fashion": (8000, 3), "mnist": (6000, 2)}  # images and epochs: they need not be good


def known_classes(seed: int) -> tuple[int, ...]:
    """The classes that the network of a seed knows."""
    return tuple(sorted(np.random.default_rng(seed).permutation(10)[:KNOWN].tolist()))


def trained(data: Path, cache: Path, name: str, seed: int) -> Known:
    """A ResNet-8 of six classes of "cifar", "mnist" or "fashion"; a run that was cut goes on with its last epoch."""
    folder = cache / f"six_of_{name}_{seed}"
    found = Known(folder.name, folder / "weights.pth", known_classes(seed), name)
    if found.weights.is_file():
        return found
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = Readings(data, cache, found).images("train")
    count, epochs = EFFORT[name]
    x, y = torch.from_numpy(images[:count]).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels[:count])
    torch.manual_seed(seed)
    model, steps = CifarResNet(8, num_classes=KNOWN), len(x) // BATCH
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, nesterov=True, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=epochs * steps, pct_start=0.25)
    part, first = folder / "part.pth", 0
    if part.is_file():
        state = torch.load(part)
        first = state["epoch"]
        for one, name in ((model, "model"), (optimizer, "optimizer"), (schedule, "schedule")):
            one.load_state_dict(state[name])
    for epoch in range(first, epochs):
        _epoch(model, optimizer, schedule, x, y, 1000 * seed + epoch)
        torch.save(
            {
                "epoch": epoch + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            },
            part,
        )
    torch.save(model.state_dict(), found.weights)
    return found


def _epoch(
    model: CifarResNet,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    x: Tensor,
    y: Tensor,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    order = torch.randperm(len(x), generator=draw)[: len(x) // BATCH * BATCH]
    losses, bar = [], tqdm(order.split(BATCH), desc=f"epoch of seed {seed}", leave=False, disable=None)
    model.train()
    for rows in bar:
        images = F.pad((x[rows] - mean) / std, (4, 4, 4, 4))
        top, left = torch.randint(9, (2,), generator=draw).tolist()
        images = images[:, :, top : top + 32, left : left + 32]
        flip = torch.rand(BATCH, generator=draw) < 0.5
        images = torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)
        loss = F.cross_entropy(model(images), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    print(f"seed {seed}: loss {np.mean(losses):.3f}", flush=True)
