"""The parameters and statistics of the dense layers of a plan, as flat vectors and as the blocks that are multiplied.

All weights of all layers lie in one flat vector for each member, layer after layer, so that the optimizer sees few
tensors and the keys of a state dict depend on nothing but the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.network.base import Norm, check_norm
from brainet_pl.network.plan import Plan
from brainet_pl.network.tensors import LevelTensors, index_buffer

T = TypeVar("T")
Product = tuple[Tensor, Tensor]  # weights (N, O, I) and biases (N, O, 1) of a bucket, with the norm folded in
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "elu": F.elu,
}


class LayerWeights(nn.Module):
    """The dense layers of a plan, of `members` networks of equal wiring; `Executor` runs them.

    The parameters are not initialised here: whoever builds an executor calls `reset_parameters`.

    Args:
        plan: What is computed. One with several members has one branch a node and one bucket a level.
        members: M, the number of networks of equal wiring and separate weights.
        activation: One of relu, gelu, silu, tanh, elu.
        norm: "batch", or None for a bias instead.
        momentum: Momentum of the running statistics of the norm.
        eps: Number that the norm adds to variances.
        gain: Size of the initial weights; 1 is as large as those of `nn.Linear`.
    """

    running_mean: Tensor
    running_var: Tensor
    mixed_mean: Tensor
    mixed_var: Tensor
    layout: Tensor
    _position: Tensor
    _root_rows: Tensor

    def __init__(
        self,
        plan: Plan,
        *,
        members: int = 1,
        activation: str = "relu",
        norm: Norm = "batch",
        momentum: float = 0.1,
        eps: float = 1e-5,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.gain = gain
        members = checks.whole("members", members, 1, 1000)
        checks.one_of("activation", activation, ACTIVATIONS)
        self.plan, self.members, self.norm = plan, members, check_norm(norm)
        self.activation, self.momentum = activation, checks.share("momentum", momentum)
        self.eps = checks.number("eps", eps, 0, "it is added to variances")
        neurons = members * plan.num_neurons
        self.weight = nn.Parameter(torch.empty(members, plan.num_weights))
        self.scale = nn.Parameter(torch.empty(neurons)) if norm else None
        self.bias = nn.Parameter(torch.empty(neurons))
        self.register_buffer("running_mean", torch.zeros(neurons if norm else 0))
        self.register_buffer("running_var", torch.ones(neurons if norm else 0))
        several = any(level.branch_neurons.shape[0] > 1 for level in plan.levels[:-1])  # nothing reads the root's mean
        self.register_buffer("mixed_mean", torch.zeros(neurons if norm and several else 0))
        self.register_buffer("mixed_var", torch.ones(neurons if norm and several else 0))
        self.mixed = False  # whether `run_evaluate` uses the statistics of averaged inputs
        self.register_buffer("layout", torch.tensor(list(bytes.fromhex(plan.layout)), dtype=torch.uint8))
        self.ordered = [LevelTensors(h, level, plan, members) for h, level in enumerate(plan.levels)]
        self.levels = nn.ModuleList(self.ordered)
        self._place_weights()
        index_buffer(self, "_root_rows", plan.root_rows)
        self._cache_key: tuple[int, ...] = ()
        self._cache: dict[tuple[str, int], Any] = {}

    def _place_weights(self) -> None:
        """Where each weight of the flat vector stands among all blocks of all levels."""
        position = np.empty(self.plan.num_weights, dtype=np.int64)
        offset = 0
        for level in self.plan.levels:
            for bucket in level.buckets:
                position[bucket.weights[:, 1]] = offset + bucket.weights[:, 0]
                offset += math.prod(bucket.shape)
        self._in_place, self._assembled = np.array_equal(position, np.arange(offset)), offset
        index_buffer(self, "_position", position)

    def reset_parameters(self) -> None:
        """Each layer as `nn.Linear` would be, times the gain: uniform within gain/√fan_in; norm to the identity."""
        with torch.no_grad():
            for level in self.plan.levels:
                for layer in level.layers:
                    bound = self.gain / math.sqrt(layer.fan_in)
                    self.weight[:, layer.first_weight :][:, : layer.fan_in * layer.width].uniform_(-bound, bound)
            if self.scale is not None:
                self.scale.fill_(1.0)
            self.bias.zero_()
            self.running_mean.zero_()
            self.running_var.fill_(1.0)
        self.use_mixed(False)

    def use_mixed(self, mixed: bool) -> None:
        """Let `run_evaluate` use the statistics of averaged branches, or those of training."""
        self.mixed, self._cache_key = mixed and len(self.mixed_mean) > 0, ()

    def set_mixture(self, probabilities: Sequence[NDArray[np.float64]]) -> None:
        """Take the branch probabilities (s,) of every node of the tree, by node number, for `run_evaluate`."""
        for level in self.ordered:
            branches = (probabilities[node] for node in level.level.nodes)
            level.set_mixture([p if len(p) else np.ones(1) for p in branches], self.weight.device)  # a leaf has one way
        self._cache_key = ()

    def train(self, mode: bool = True) -> LayerWeights:
        """Also forgets folded weights: a write through `.data` leaves no other trace."""
        self._cache_key = ()
        super().train(mode)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:  # type: ignore[no-untyped-def]
        """Refuse weights that lie in another order, or belong to another tree."""
        theirs = state_dict.get(f"{prefix}layout")
        if theirs is not None and not torch.equal(theirs.cpu(), self.layout.cpu()):
            ggt = self.plan.ggt
            raise ValueError(
                f"expected weights in the layout {self.plan.layout} of the tree {ggt.fingerprint} over "
                f"{ggt.num_variables} features, got the layout {bytes(theirs.tolist()).hex()}: build the head from the "
                "tree and with the settings it was trained with; weights of another version must be trained again"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _assemble(self) -> list[list[Tensor]]:
        """The flat weights as (N, O, I) blocks, zero where a layer does not look, for each level and bucket."""
        flat = self.weight
        if not self._in_place:
            flat = flat.new_zeros(self.members, self._assembled).index_copy(1, self._position, flat)  # type: ignore[assignment]
        blocks: list[list[Tensor]] = []
        start = 0
        for level in self.ordered:
            blocks.append([])
            for bucket in level.ordered:
                size = math.prod(bucket.shape)
                _, out, fan_in = bucket.shape
                blocks[-1].append(flat.narrow(1, start, size).view(-1, out, fan_in))  # (M, G, O, I), M or G being 1
                start += size
        return blocks

    def _folded(self, averaged: bool = False, shared: bool = False) -> list[list[Product]]:
        """Blocks and biases of each level with the norm and, if `shared`, branch probabilities folded in.

        With `averaged`, the norm is that of averaged inputs, where there is one.
        """

        def make() -> list[list[Product]]:
            return [
                [
                    self._fold(level, block, bucket.neurons, averaged and self.mixed, shared)
                    for bucket, block in zip(level.ordered, blocks, strict=True)
                ]
                for level, blocks in zip(self.ordered, self._assemble(), strict=True)
            ]

        return self._remember((f"folded {averaged} {shared}", 0), make)

    def _folded_branches(self, tensors: LevelTensors) -> list[Product]:
        """Blocks and biases of the branch buckets of a level, with the norm folded in."""

        def make() -> list[Product]:
            device, weight, folded = self.weight.device, self.weight[0], []
            for bucket in tensors.level.branch_buckets:
                position, source = (torch.as_tensor(v, device=device) for v in bucket.weights.T)
                flat = weight.new_zeros(math.prod(bucket.shape)).index_copy(0, position, weight[source])
                first = tensors.level.first_neuron
                neurons = np.where(bucket.neurons >= 0, bucket.neurons + first, -1)
                folded.append(self._fold(tensors, flat.view(bucket.shape), torch.as_tensor(neurons, device=device)))
            return folded

        return self._remember(("branches", tensors.number), make)

    def _fold(
        self, level: LevelTensors, weight: Tensor, neurons: Tensor, averaged: bool = False, shared: bool = False
    ) -> Product:
        """Weights (N, O, I) and biases (N, O, 1) of `neurons` (N, O); evaluation norm is y ↦ scale·y + shift."""
        at = neurons.clamp_min(level.neurons.start)
        shift = self.bias[at]
        if self.scale is not None:
            mean, var = (self.mixed_mean, self.mixed_var) if averaged else (self.running_mean, self.running_var)
            scale = self.scale[at] * torch.rsqrt(var[at] + self.eps)
            shift = shift - mean[at] * scale
            weight = weight * scale.unsqueeze(-1)
        shift = torch.where(neurons >= 0, shift, torch.zeros_like(shift)).unsqueeze(-1)
        if shared and level.num_branches > 1:
            share = level.share.to(weight.dtype)[at - level.neurons.start].unsqueeze(-1)
            return weight * share, shift * share
        return weight, shift

    def _remember(self, key: tuple[str, int], make: Callable[[], T]) -> T:
        """Keep folded blocks until a parameter changes; never while gradients or a compiler look on."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return make()
        tensors = [self.weight, self.bias, self.running_mean, self.running_var, self.mixed_mean, self.mixed_var]
        tensors += [self.scale] if self.scale is not None else []
        if any(t.is_inference() for t in tensors):  # they keep no version
            return make()
        now = tuple(v for t in tensors for v in (t.data_ptr(), t._version))
        if now != self._cache_key:
            self._cache_key, self._cache = now, {}
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]  # type: ignore[no-any-return]
