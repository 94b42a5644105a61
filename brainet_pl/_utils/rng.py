"""The global random generators of Python, NumPy and torch: their states, and work that leaves no trace in them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

States = dict[str, Any]


@contextlib.contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Draw from generators that begin at `seed`, whatever came before; afterwards all are as they were."""
    states = collect()
    try:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        yield
    finally:
        put_back(states)


@contextlib.contextmanager
def isolated_cpu_rng(seed: int) -> Iterator[None]:
    """Draw from torch's generator of the CPU that begins at `seed`; a GPU is neither woken nor seeded.

    `torch.manual_seed` seeds all devices, and `torch.random.fork_rng(devices=[])` puts none of them back.
    """
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(state)


def collect() -> States:
    """The states of all global random generators, as tensors and primitives."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()  # noqa: NPY002  the global one is what many draw from
    _, keys, position, has_gauss, cached = numpy
    states: States = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def put_back(states: States) -> None:
    """Set all global random generators to collected states."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
