"""What a trained head can still choose on data that it was not trained on: the temperature of its posterior.

No weight moves. The outputs of a set of sub-networks are computed once, and every temperature is a weighting of them:
of all sub-networks where there are few, else of draws at several temperatures, weighted as draws of their mixture.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp
from torch import Tensor

from brainet_pl.structure.ggt import GGT, SubNetwork

FACTORS = (1 / 64, 1 / 16, 1 / 4, 1.0, 4.0)  # of `GGT.auto_temperature`: the temperatures that are tried
NETWORKS = 64  # sub-networks whose outputs they are tried on, at the most


class Choice(NamedTuple):
    """The value that was chosen, and the mean NLL of each that was tried."""

    value: float
    nll: dict[float, float]


class Networks(NamedTuple):
    """Sub-networks, and the weights (U,) that make an average over them one over the posterior at each temperature."""

    subnetworks: list[SubNetwork]
    weights: dict[float, NDArray[np.float64]]


def networks_for(ggt: GGT, temperatures: Sequence[float], most: int = NETWORKS, seed: int = 0) -> Networks:
    """All sub-networks with their probabilities, or about `most` draws that stand for the posterior of each.

    Draws come from all temperatures alike. A sub-network G among them has the weight p_γ(G) / mean_γ' p_γ'(G), so that
    none can have more than `len(temperatures)` times its share: cold and warm posteriors are both met.
    """
    if ggt.num_subnetworks <= most:
        subnetworks = list(ggt.enumerate(most))
        logs = _log_probs(ggt, subnetworks, temperatures)
        return Networks(subnetworks, dict(zip(temperatures, np.exp(logs), strict=True)))
    counts: Counter[SubNetwork] = Counter()
    for i, temperature in enumerate(temperatures):
        counts.update(ggt.sample(most // len(temperatures), temperature, seed + i))
    logs = _log_probs(ggt, list(counts), temperatures)
    raw = np.array(list(counts.values())) * np.exp(logs - logsumexp(logs, axis=0))
    weights = raw / raw.sum(axis=1, keepdims=True)
    return Networks(list(counts), dict(zip(temperatures, weights, strict=True)))


def _log_probs(ggt: GGT, subnetworks: list[SubNetwork], temperatures: Sequence[float]) -> NDArray[np.float64]:
    """The log-probability of each sub-network at each temperature, (T, U)."""
    return np.array([[ggt.log_prob(g, temperature) for g in subnetworks] for temperature in temperatures])


def best_value(losses: dict[float, Tensor], usual: float) -> Choice:
    """The value with the least mean loss, of losses (N,) by value; but the usual one if it is within noise of that.

    Noise is one standard error of the difference, sample by sample. One sample more is counted that speaks for the
    usual value as much as any sample speaks against it: few samples without an error, which all gain a little from
    surer predictions, do not outweigh it. NaN keeps the usual value.

    >>> usual = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    >>> gain = torch.tensor([0.1, 0.2, 0.1, 0.1, 0.2, 0.1])
    >>> [best_value({1.0: usual, 2.0: other}, usual=1.0).value for other in (usual - gain, usual + gain)]
    [2.0, 1.0]
    >>> best_value({1.0: usual[:3], 2.0: (usual - gain)[:3]}, usual=1.0).value  # three samples are too few
    1.0
    """
    means = {value: float(loss.double().mean()) for value, loss in losses.items()}
    best = min(means, key=lambda value: means[value])
    gain = (losses[usual] - losses[best]).double()
    gain = torch.cat([gain, -gain.abs().amax(dim=0, keepdim=True)]) if len(gain) else gain
    noise = float(gain.std()) / len(gain) ** 0.5 if len(gain) else math.inf
    return Choice(best if float(gain.mean()) > noise else usual, means)


def choose_temperature(
    ggt: GGT, outputs: Callable[[list[SubNetwork]], Tensor], nll: Callable[[Tensor, Tensor], Tensor]
) -> Choice:
    """The temperature of the posterior whose average predicts best; `GGT.auto_temperature` where that is as good.

    Args:
        ggt: the tree.
        outputs: sub-networks → their outputs (U, N, O).
        nll: outputs and weights (U,) → the negative log-likelihood of each sample (N,) under the average.
    """
    usual = ggt.auto_temperature
    temperatures = [usual * factor for factor in FACTORS]
    subnetworks, weights = networks_for(ggt, temperatures)
    values = outputs(subnetworks)
    losses = {t: nll(values, torch.as_tensor(w, dtype=values.dtype, device=values.device)) for t, w in weights.items()}
    return best_value(losses, usual)
