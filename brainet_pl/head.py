"""`BRAINetHead`: a tree of structures as one module that runs its plan level by level.

    training       one branch at each node, drawn for each batch (the paper) or for each sample
    simultaneous   one pass; each node averages its branches with their probabilities
    stochastic     T sub-networks drawn from the posterior; equal draws are computed once
    enumerated     every sub-network, with its exact posterior weight

All weights of all layers lie in one flat vector, layer after layer, so that the optimizer sees few tensors and the keys
of the state dict depend on nothing but the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl.plan import Level, build_plan, count_parameters, solve_width
from brainet_pl.structure.ggt import GGT, Branch, Node, SubNetwork, Tree

T = TypeVar("T")
Sampling = Literal["batch", "sample"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "elu": F.elu,
}


class Draws(NamedTuple):
    """Logits (T, B, C) and the sub-network behind each of the T."""

    logits: Tensor
    subnetworks: list[SubNetwork]


class Enumerated(NamedTuple):
    """Logits (M, B, C) of all M sub-networks, and their posterior probabilities (M,)."""

    logits: Tensor
    weights: Tensor


class _Reads(NamedTuple):
    """Where a level reads: for each bucket a slice (part, first row, rows) or None, and the parts that are gathered.

    Part 0 is the input, part h the output of level h - 1; `zeros` tells whether a row of zeros is needed for padding.
    """

    slices: list[tuple[int, int, int] | None]
    parts: list[int]
    zeros: bool


class BRAINetHead(nn.Module):
    """A head for `ggt.num_variables` features and `out_features` outputs.

    Args:
        ggt: the learned tree.
        out_features: classes, or numbers to regress.
        num_params: budget; the widths of all layers are scaled to meet it within 2 %.
        width: or the width factor itself: a node over X emits round(width·|X|) neurons. 1 if neither is given.
        min_width: neurons that every layer has at the least.
        activation: one of relu, gelu, silu, tanh, elu.
        norm: "batch", or None for a bias instead.
        dropout: of the outputs of nodes; with it, `stochastic` also draws dropout masks (BRAINet + MC-dropout).
        temperature: of the posterior over sub-networks in the simultaneous, stochastic and enumerated modes; "auto" is
            `GGT.auto_temperature`. It can be changed at any time; training does not depend on it.
        sampling: while training, draw one sub-network for each batch (the paper) or for each sample.
    """

    running_mean: Tensor
    running_var: Tensor
    fingerprint: Tensor
    _position: Tensor

    def __init__(
        self,
        ggt: GGT,
        out_features: int,
        *,
        num_params: int | None = None,
        width: float | None = None,
        min_width: int = 1,
        activation: str = "relu",
        norm: Literal["batch"] | None = "batch",
        dropout: float = 0.0,
        temperature: float | Literal["auto"] = "auto",
        sampling: Sampling = "sample",
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"expected activation to be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if norm not in ("batch", None):
            raise ValueError(f"expected norm to be 'batch' or None, got {norm!r}")
        if sampling not in ("batch", "sample"):
            raise ValueError(f"expected sampling to be 'batch' or 'sample', got {sampling!r}")
        if num_params is not None and width is not None:
            raise ValueError("expected num_params or width, got both: leave one out")
        if not 0 <= dropout < 1:
            raise ValueError(f"expected a dropout of at least 0 and below 1, got {dropout}")
        self.ggt, self.in_features, self.out_features = ggt, ggt.num_variables, out_features
        self.activation, self.norm, self.dropout, self.sampling = activation, norm, dropout, sampling
        self.momentum, self.eps = momentum, eps
        per_neuron = 2 if norm else 1
        if num_params is not None:
            width = solve_width(ggt, num_params, out_features, min_width, per_neuron)
        self.plan = build_plan(ggt, 1.0 if width is None else width, min_width)

        self.weight = nn.Parameter(torch.empty(self.plan.num_weights))
        self.scale = nn.Parameter(torch.empty(self.plan.num_neurons)) if norm else None
        self.bias = nn.Parameter(torch.empty(self.plan.num_neurons))
        self.output = nn.Linear(len(self.plan.root_rows), out_features)
        self.register_buffer("running_mean", torch.zeros(self.plan.num_neurons if norm else 0))
        self.register_buffer("running_var", torch.ones(self.plan.num_neurons if norm else 0))
        self.register_buffer("fingerprint", torch.tensor(list(bytes.fromhex(ggt.fingerprint)), dtype=torch.uint8))
        self._reads: list[_Reads] = []
        self._register_plan()
        self._cache_key: tuple[int, ...] = ()
        self._cache: dict[tuple[str, float], Any] = {}
        self.reset_parameters()
        self.temperature = temperature

    # -- parameters ---------------------------------------------------------------------------------------------------

    def reset_parameters(self) -> None:
        """Each layer as `nn.Linear` would be: uniform within 1/√fan_in; norm to the identity."""
        with torch.no_grad():
            for level in self.plan.levels:
                for layer in level.layers:
                    bound = 1.0 / math.sqrt(layer.fan_in)
                    self.weight[layer.first_weight :][: layer.fan_in * layer.width].uniform_(-bound, bound)
            if self.scale is not None:
                self.scale.fill_(1.0)
            self.bias.zero_()
            self.running_mean.zero_()
            self.running_var.fill_(1.0)
            self.output.reset_parameters()

    @property
    def num_params(self) -> int:
        """Trainable parameters, all sub-networks together."""
        return sum(p.numel() for p in self.parameters())

    @property
    def temperature(self) -> float:
        """γ of the posterior over sub-networks."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | Literal["auto"]) -> None:
        if value != "auto" and not float(value) >= 0:
            raise ValueError(f"expected a temperature of at least 0 or 'auto', got {value}")
        self._temperature = self.ggt.auto_temperature if value == "auto" else float(value)
        probabilities = self.ggt.branch_probabilities(self._temperature)
        for h, level in enumerate(self.plan.levels):
            mix = np.zeros(level.branch_neurons.shape)
            start = 0
            for node, width in zip(level.nodes, level.node_widths, strict=True):
                p = probabilities[node]
                mix[: len(p), start : start + width] = p[:, None]
                start += width
            share = np.empty(level.num_neurons)
            share[level.branch_neurons[level.branch_neurons >= 0]] = mix[level.branch_neurons >= 0]
            for name, values in ((f"_mix_{h}", mix[:, :, None]), (f"_share_{h}", share)):
                tensor = torch.as_tensor(values, dtype=torch.float32, device=self.weight.device)
                self.register_buffer(name, tensor, persistent=False)

    @property
    def perplexity(self) -> float:
        """Effective number of sub-networks at the current temperature; 1 means that the posterior has collapsed."""
        return self.ggt.perplexity(self.temperature)

    def extra_repr(self) -> str:
        """For `print(head)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_params={self.num_params:,}, "
            f"sub-networks={self.ggt.num_subnetworks:,}, depth={self.ggt.depth}, temperature={self.temperature:.4g}"
        )

    def _register_plan(self) -> None:
        """Index tensors of the plan, as buffers that move with the module and stay out of the state dict."""
        position = np.empty(self.plan.num_weights, dtype=np.int64)
        offset = 0
        for h, level in enumerate(self.plan.levels):
            arrange = np.full(level.num_neurons, -1, dtype=np.int64)
            outputs = 0
            for k, bucket in enumerate(level.buckets):
                position[bucket.weights[:, 1]] = offset + bucket.weights[:, 0]
                offset += math.prod(bucket.shape)
                flat = bucket.neurons.ravel()
                arrange[flat[flat >= 0]] = outputs + np.flatnonzero(flat >= 0)
                outputs += len(flat)
                self._index(f"_neurons_{h}_{k}", bucket.neurons)
            in_place = np.array_equal(arrange, np.arange(outputs))
            self._index(f"_arrange_{h}", np.empty(0, dtype=np.int64) if in_place else arrange)
            uneven = (level.branch_neurons < 0).any()
            self._index(f"_branches_{h}", level.branch_neurons.ravel() if uneven else np.empty(0, dtype=np.int64))
            self._index(f"_owner_{h}", np.repeat(np.arange(len(level.nodes)), level.node_widths))
            sizes = [len(_branches(self.ggt.nodes[i])) for i in level.nodes]
            self._index(f"_sizes_{h}", np.asarray(sizes)[:, None])
            self._reads.append(self._plan_reads(h, level))
        self._assembled = offset
        self._index("_position", position)
        self._index("_root_rows", self.plan.root_rows)

    def _plan_reads(self, h: int, level: Level) -> _Reads:
        """How level h finds its rows: slices where they lie together, else one gather from the parts it needs."""
        starts = np.array([0, *(below.first_row for below in self.plan.levels[:h]), level.first_row])
        slices: list[tuple[int, int, int] | None] = []
        gathered: list[int] = []
        for bucket in level.buckets:
            rows = bucket.rows[0]
            part = int(np.searchsorted(starts, rows[0], side="right")) - 1
            together = len(bucket.rows) == 1 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
            if together and rows[-1] < starts[part + 1 : part + 2].sum():
                slices.append((part, int(rows[0] - starts[part]), len(rows)))
            else:
                slices.append(None)
                found = np.searchsorted(starts, bucket.rows.ravel(), side="right") - 1
                gathered += np.unique(found).tolist()
        zeros = h + 1 in gathered  # padding points just behind the last part
        parts = sorted(set(gathered) - {h + 1})
        place = np.cumsum([0, *(starts[part + 1] - starts[part] for part in parts)])
        for k, bucket in enumerate(level.buckets):
            if slices[k] is None:
                found = np.searchsorted(starts, bucket.rows, side="right") - 1
                local = bucket.rows.copy()
                for at, part in zip([*place[:-1], place[-1]], [*parts, h + 1], strict=True):
                    local[found == part] += at - starts[part]
                self._index(f"_rows_{h}_{k}", local.ravel())
        return _Reads(slices, parts, zeros)

    def _index(self, name: str, values: NDArray[np.int64]) -> None:
        self.register_buffer(name, torch.as_tensor(values), persistent=False)

    def train(self, mode: bool = True) -> BRAINetHead:
        """Also forgets folded weights: a write through `.data` leaves no other trace."""
        self._cache_key = ()
        super().train(mode)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:  # type: ignore[no-untyped-def]
        """Refuse weights of another tree with a message that says which."""
        theirs = state_dict.get(f"{prefix}fingerprint")
        if theirs is not None and not torch.equal(theirs.cpu(), self.fingerprint.cpu()):
            weight = state_dict.get(f"{prefix}weight")
            size = "" if weight is None else f" with {weight.numel():,} weights"
            raise ValueError(
                f"expected weights for the tree {self.ggt.fingerprint} over {self.in_features} features, got those of "
                f"the tree {bytes(theirs.tolist()).hex()}{size}: build the head from the tree it was trained with"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- one pass through all branches --------------------------------------------------------------------------------

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(B, d) → (B, C): a random sub-network while training, else the simultaneous pass."""
        return self._train_pass(x, generator) if self.training else self.simultaneous(x)

    def simultaneous(self, x: Tensor) -> Tensor:
        """(B, d) → (B, C): every node passes on the mean of its branches, weighted by their probabilities."""
        parts = [self._check(x)]
        for h, products in enumerate(self._folded(mixed=self._mix_early)):
            branches = self._by_branch(h, self._activate(self._multiply(h, parts, products)))
            if not self._mix_early:
                branches = branches * self._buffers[f"_mix_{h}"].to(branches.dtype)  # type: ignore[union-attr]
            parts.append(branches.sum(dim=0))
        return self._emit(parts)

    def _train_pass(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Every node draws a branch uniformly; layers off the path from the root get a gradient of exactly zero.

        All layers are computed, so batch-norm statistics are kept for each of them at every step.
        """
        parts = [self._check(x)]
        if self.norm and x.shape[0] < 2:
            raise ValueError(
                "expected at least 2 samples in a training batch for batch norm, got 1: use drop_last=True in the "
                "training loader, or norm=None"
            )
        self._cache_key = ()  # batch norm moves its statistics without a trace in their version counters
        assembled = self._assemble()
        for h, level in enumerate(self.plan.levels):
            branches = self._by_branch(h, self._normalise(level, self._multiply(h, parts, assembled[h])))
            out = self._activate(self._choose(h, branches, generator))
            parts.append(F.dropout(out, self.dropout, training=True) if self.dropout else out)
        return self._emit(parts)

    @property
    def _mix_early(self) -> bool:
        """p·relu(y) = relu(p·y): the probabilities of branches can go into the weights."""
        return self.activation == "relu"

    def _check(self, x: Tensor) -> Tensor:
        """(B, d) → (d, B)."""
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(
                f"expected features of shape (batch, {self.in_features}), got {tuple(x.shape)}: this head's tree "
                f"{self.ggt.fingerprint} was learned from {self.in_features} features; learn a structure for these, or "
                "give the head what it was learned from"
            )
        return x.t()

    def _assemble(self) -> list[list[tuple[Tensor, Tensor | None]]]:
        """The flat weights as (G, O, I) blocks, zero where a layer does not look, for each level and bucket."""
        flat = self.weight.new_zeros(self._assembled).index_copy(0, self._position, self.weight)
        blocks: list[list[tuple[Tensor, Tensor | None]]] = []
        start = 0
        for level in self.plan.levels:
            blocks.append([])
            for bucket in level.buckets:
                size = math.prod(bucket.shape)
                blocks[-1].append((flat.narrow(0, start, size).view(bucket.shape), None))
                start += size
        return blocks

    def _folded(self, mixed: bool = False) -> list[list[tuple[Tensor, Tensor]]]:
        """Blocks and biases of each level with the norm and, if `mixed`, branch probabilities folded in."""

        def make() -> list[list[tuple[Tensor, Tensor]]]:
            folded = []
            for h, blocks in enumerate(self._assemble()):
                neurons = [self._buffers[f"_neurons_{h}_{k}"] for k in range(len(blocks))]
                folded.append([self._fold(h, w, n, mixed) for (w, _), n in zip(blocks, neurons, strict=True)])  # type: ignore[arg-type]
            return folded

        return self._remember(("mixed" if mixed else "folded", self.temperature if mixed else 0.0), make)

    def _folded_branches(self, h: int) -> list[tuple[Tensor, Tensor]]:
        """The same for the branch buckets of level h."""

        def make() -> list[tuple[Tensor, Tensor]]:
            folded = []
            for bucket in self.plan.levels[h].branch_buckets:
                position, source = (torch.as_tensor(v, device=self.weight.device) for v in bucket.weights.T)
                flat = self.weight.new_zeros(math.prod(bucket.shape)).index_copy(0, position, self.weight[source])
                neurons = torch.as_tensor(bucket.neurons, device=self.weight.device)
                folded.append(self._fold(h, flat.view(bucket.shape), neurons))
            return folded

        return self._remember(("branches", h), make)

    def _fold(self, h: int, weight: Tensor, neurons: Tensor, mixed: bool = False) -> tuple[Tensor, Tensor]:
        """Weights (G, O, I) and biases (G, O, 1) of `neurons` (G, O); evaluation norm is y ↦ scale·y + shift."""
        start = self.plan.levels[h].first_neuron
        at = (start + neurons).clamp_min(start)
        shift = self.bias[at]
        if self.scale is not None:
            scale = self.scale[at] * torch.rsqrt(self.running_var[at] + self.eps)
            shift = shift - self.running_mean[at] * scale
            weight = weight * scale.unsqueeze(-1)
        shift = torch.where(neurons >= 0, shift, torch.zeros_like(shift)).unsqueeze(-1)
        if mixed:
            share = self._buffers[f"_share_{h}"].to(weight.dtype)[neurons.clamp_min(0)].unsqueeze(-1)  # type: ignore[union-attr]
            return weight * share, shift * share
        return weight, shift

    def _remember(self, key: tuple[str, float], make: Callable[[], T]) -> T:
        """Keep folded blocks until a parameter changes; never while gradients or a compiler look on."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return make()
        tensors = [self.weight, self.bias, self.running_mean, self.running_var]
        tensors += [self.scale] if self.scale is not None else []
        if any(t.is_inference() for t in tensors):  # they keep no version
            return make()
        now = tuple(v for t in tensors for v in (t.data_ptr(), t._version))
        if now != self._cache_key:
            self._cache_key, self._cache = now, {}
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]  # type: ignore[no-any-return]

    def _multiply(self, h: int, parts: list[Tensor], products: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
        """The state in parts of (rows, B) → (neurons of level h, B) before norm and activation."""
        reads = self._reads[h]
        gathered = [parts[i] for i in reads.parts]
        if reads.zeros:
            gathered.append(parts[0].new_zeros(1, parts[0].shape[1]))
        state = torch.cat(gathered) if len(gathered) > 1 else (gathered[0] if gathered else parts[0])
        outputs = []
        for k, (weight, bias) in enumerate(products):
            found = reads.slices[k]
            if found is not None:
                rows = parts[found[0]]
                rows = rows if len(rows) == found[2] else rows.narrow(0, found[1], found[2])
                y = torch.mm(weight[0], rows) if bias is None else torch.addmm(bias[0].to(rows.dtype), weight[0], rows)
            else:
                groups, _, fan_in = weight.shape
                rows = state.index_select(0, self._buffers[f"_rows_{h}_{k}"]).view(groups, fan_in, -1)  # type: ignore[arg-type]
                y = torch.bmm(weight, rows) if bias is None else torch.baddbmm(bias.to(rows.dtype), weight, rows)
                y = y.flatten(0, 1)
            outputs.append(y)
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        arrange = self._buffers[f"_arrange_{h}"]
        assert arrange is not None
        return together.index_select(0, arrange) if len(arrange) else together

    def _normalise(self, level: Level, y: Tensor) -> Tensor:
        """Batch norm over the last dimension with the statistics of this batch, or the bias alone."""
        own = slice(level.first_neuron, level.first_neuron + level.num_neurons)
        if self.scale is None:
            return y + self.bias[own].unsqueeze(-1)
        mean, var = self.running_mean[own], self.running_var[own]
        normed = F.batch_norm(y.unsqueeze(0), mean, var, self.scale[own], self.bias[own], True, self.momentum, self.eps)
        return normed.squeeze(0)

    def _activate(self, y: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](y)

    def _by_branch(self, h: int, neurons: Tensor) -> Tensor:
        """(neurons, B) → (s, W, B); zeros where a node has fewer than s branches."""
        s, width = self.plan.levels[h].branch_neurons.shape
        branches = self._buffers[f"_branches_{h}"]
        assert branches is not None
        if len(branches):
            padded = torch.cat([neurons, neurons.new_zeros(1, neurons.shape[1])])
            neurons = padded.index_select(0, branches.remainder(len(padded)))
        return neurons.view(s, width, -1)

    def _choose(self, h: int, branches: Tensor, generator: torch.Generator | None) -> Tensor:
        """(s, W, B) → (W, B): one branch a node, for the whole batch or for each sample."""
        s, width, batch = branches.shape
        if s == 1:
            return branches[0]
        sizes, owner = self._buffers[f"_sizes_{h}"], self._buffers[f"_owner_{h}"]
        assert sizes is not None
        assert owner is not None
        samples = batch if self.sampling == "sample" else 1
        each = torch.rand(len(sizes), samples, device=branches.device, generator=generator)
        choice = (each * sizes).long()  # (nodes, samples)
        if samples == 1:
            rows = choice[owner, 0] * width + torch.arange(width, device=branches.device)
            return branches.flatten(0, 1).index_select(0, rows)
        out = branches[0]
        for t in range(1, s):
            out = torch.where((choice == t).index_select(0, owner), branches[t], out)
        return out

    def _emit(self, parts: list[Tensor]) -> Tensor:
        """The root's output, the last part → (B, C)."""
        root = parts[-1] if self.plan.levels else parts[0].index_select(0, self._buffers["_root_rows"])  # type: ignore[arg-type]
        return torch.as_tensor(self.output(root.t()))

    # -- many sub-networks ---------------------------------------------------------------------------------------------

    def stochastic(
        self,
        x: Tensor,
        passes: int = 15,
        *,
        temperature: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Draws:
        """(B, d) → (T, B, C): sub-networks drawn exactly from their posterior.

        `temperature` None is the head's own. The same generator state gives the same draws.
        """
        if passes < 1:
            raise ValueError(f"expected at least 1 pass, got {passes}")
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device if generator else None))
        drawn = self.ggt.sample(passes, self.temperature if temperature is None else temperature, seed)
        if self.dropout:
            return Draws(self._run(x, drawn, generator), drawn)
        order = {subnetwork: i for i, subnetwork in enumerate(dict.fromkeys(drawn))}
        logits = self._run(x, list(order), generator)
        if len(order) == len(drawn):
            return Draws(logits, drawn)
        return Draws(logits[[order[subnetwork] for subnetwork in drawn]], drawn)

    def enumerate(self, x: Tensor, limit: int = 1024, *, temperature: float | None = None) -> Enumerated:
        """(B, d) → every sub-network's logits and its exact posterior probability; refuses more than `limit`."""
        if self.ggt.num_subnetworks > limit:
            raise ValueError(
                f"expected at most {limit:,} sub-networks to enumerate, got {self.ggt.num_subnetworks:,}: use "
                "stochastic, simultaneous, or a larger limit"
            )
        temperature = self.temperature if temperature is None else temperature
        everything = list(self.ggt.enumerate(limit))
        weights = [math.exp(self.ggt.log_prob(subnetwork, temperature)) for subnetwork in everything]
        chunks = [self._run(x, everything[i : i + 64], None, False) for i in range(0, len(everything), 64)]
        return Enumerated(torch.cat(chunks), torch.tensor(weights, device=x.device))

    def _run(
        self, x: Tensor, subnetworks: list[SubNetwork], generator: torch.Generator | None, dropout: bool = True
    ) -> Tensor:
        """Sub-networks one by one, sharing what they share: (B, d) → (U, B, C), norm as in evaluation.

        The lowest level reads inputs alone, so its neurons are the same in all passes and are computed once. Above it,
        each pass computes only the branches it takes. Dropout stands where it stands while training: on the outputs of
        nodes, one mask a pass for all that read them, and never on inputs.
        """
        p = self.dropout if dropout else 0.0
        first_row = np.full((len(subnetworks), len(self.ggt.nodes) + 1), -1, dtype=np.int64)  # of each node's output
        first_row[:, [i for i, rows in enumerate(self.plan.node_rows) if i not in self.plan.level_of]] = 0
        choice = np.full((len(subnetworks), len(self.ggt.nodes)), -1, dtype=np.int64)
        for u, subnetwork in enumerate(subnetworks):
            for node, branch in self.ggt.path(subnetwork):
                choice[u, node] = branch
        inputs = self._check(x)
        state = torch.cat([inputs.new_zeros(1, len(x)), inputs])  # zeros first: rows are only added behind
        first_row += 1  # padding reads node -1, row 0
        if self.plan.levels:
            level = self.plan.levels[0]
            neurons = self._activate(self._multiply(0, [inputs], self._folded()[0]))
            starts = np.concatenate([[0], np.cumsum(level.node_widths)])
            for node, column in zip(level.nodes, starts, strict=False):
                taken = choice[:, node]
                first_row[:, node] = len(state) + level.branch_neurons[np.maximum(taken, 0), column]
                if p:  # a mask, and so a copy, for each pass
                    first_row[:, node] += len(neurons) * np.arange(len(subnetworks))
            if p:
                neurons = self._drop(neurons.expand(len(subnetworks), -1, -1), p, generator).flatten(0, 1)
            state = torch.cat([state, neurons])
        for h, level in enumerate(self.plan.levels[1:], start=1):
            for bucket, (weight, bias) in zip(level.branch_buckets, self._folded_branches(h), strict=True):
                draw, g = np.nonzero(choice[:, bucket.nodes] == bucket.branches)
                if not len(draw):
                    continue
                rows = first_row[draw[:, None], bucket.sources[g]] + bucket.offsets[g]
                read = state.index_select(0, torch.as_tensor(rows.ravel(), device=x.device))
                read = read.view(len(draw), rows.shape[1], -1)
                at = torch.as_tensor(g, device=x.device)
                y = self._activate(torch.baddbmm(bias[at].to(read.dtype), weight[at], read))
                first_row[draw, bucket.nodes[g]] = len(state) + np.arange(len(draw)) * y.shape[1]
                state = torch.cat([state, self._drop(y, p, generator).flatten(0, 1)])
        if self.plan.levels:
            top = first_row[:, :1] + np.arange(len(self.plan.root_rows))
        else:
            top = np.tile(1 + self.plan.root_rows, (len(subnetworks), 1))
        root = state.index_select(0, torch.as_tensor(top.ravel(), device=x.device)).view(*top.shape, -1)
        return torch.as_tensor(self.output(root.transpose(1, 2)))

    def _drop(self, x: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
        if not p:
            return x
        keep = torch.rand(x.shape, device=x.device, generator=generator) >= p
        return x * keep / (1.0 - p)


def _branches(node: Tree) -> tuple[Branch, ...]:
    assert isinstance(node, Node)
    return node.branches


def smallest_budget(ggt: GGT, out_features: int, *, min_width: int = 1, norm: Literal["batch"] | None = "batch") -> int:
    """The fewest parameters that a head for this tree can have."""
    return count_parameters(ggt, 0.0, out_features, min_width, 2 if norm else 1)
