"""Heads of equal wiring and separate weights as one batched network, for the time of a training.

On few rows a step of a small head is overhead: the same step for five heads at once takes hardly longer than for one.
Every tensor has the members first. `HeadStack.write` gives the weights back to the heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl.network.base import Outputs
from brainet_pl.network.plan import Bucket, Level, Plan, choose_buckets
from brainet_pl.network.tree_head import BRAINetHead
from brainet_pl.network.weights import ACTIVATIONS, BucketTensors, LevelTensors, index_buffer, repeat_columns
from brainet_pl.structure.ggt import SubNetwork

DENSE = 8  # times as many rows as a field reads, up to which one product of all fields is faster than sparse ones


class HeadStack(nn.Module):
    """M heads as one network: features (M, B, d), each head's own, → outputs (V, M, B, O) of V sub-networks.

    Args:
        heads: heads of one tree and equal settings, without dropout and base logits.
    """

    def __init__(self, heads: Sequence[BRAINetHead]) -> None:
        super().__init__()
        first = heads[0]
        if len({head.plan.layout for head in heads}) > 1:
            raise ValueError("expected heads of one tree and equal settings, got several: build all from one tree")
        if first.dropout or first.adds_base_logits:
            raise ValueError("expected heads without dropout and base logits: train this one by itself")
        self.heads, self.count, self.plan = list(heads), len(heads), first.plan
        layers = [head.layers for head in heads]
        self.weight = nn.Parameter(_stacked(layers, "weight").detach().flatten(0, 1))
        self.scale = None if first.layers.scale is None else _stacked(layers, "scale")
        self.bias = _stacked(layers, "bias")
        outputs = [head.output for head in heads]
        self.out_weight, self.out_bias = _stacked(outputs, "weight"), _stacked(outputs, "bias")
        self.skip_weight = None
        if first.skip is not None:
            skips = [head.skip for head in heads]
            self.skip_weight = _stacked(skips, "weight")
            self.register_buffer("skip_mean", _stacked(skips, "running_mean").detach())
            self.register_buffer("skip_var", _stacked(skips, "running_var").detach())
        self.levels = [_Level(h, level, self.plan) for h, level in enumerate(self.plan.levels)]
        self.statistics = nn.ModuleList(_Statistics(layers, level) for level in self.levels)

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("expected heads to be kept, got the network that trains them: keep what `write` gave them")

    # -- weights ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write(self) -> None:
        """Give every head its weights and statistics."""
        for number, head in enumerate(self.heads):
            layers = head.layers
            layers.weight.copy_(self.weight[number : number + 1])
            layers.bias.copy_(self.bias[number])
            if self.scale is not None and layers.scale is not None:
                layers.scale.copy_(self.scale[number])
            for level, statistics in zip(self.levels, self.statistics, strict=True):
                assert isinstance(statistics, _Statistics)
                if len(layers.running_mean):
                    layers.running_mean[level.neurons] = statistics.mean[number]
                    layers.running_var[level.neurons] = statistics.var[number]
            head.output.weight.copy_(self.out_weight[number])
            head.output.bias.copy_(self.out_bias[number])
            if head.skip is not None and self.skip_weight is not None:
                head.skip.weight.copy_(self.skip_weight[number])
                head.skip.running_mean.copy_(self.get_buffer("skip_mean")[number])
                head.skip.running_var.copy_(self.get_buffer("skip_var")[number])
            head.eval()

    def tensors(self) -> list[Tensor]:
        """All that training changes, each with the members first."""
        return [value.detach() for value in self.state_dict().values()]

    # -- passes -------------------------------------------------------------------------------------------------------

    def draw(self, samples: int) -> list[Tensor]:
        """The branches of a training step for so many samples of each member, as `Executor.draw` makes them."""
        head = self.heads[0]
        return head.layers.draw(head.draws, samples if head.sampling == "sample" else 1)

    def forward(self, x: Tensor, choices: Sequence[Tensor]) -> Tensor:
        """Features (M, B, d) → outputs (V, M, B, O) of the V draws a sample that `choices` name; norm by the mode."""
        parts, columns = [x.transpose(1, 2)], 1
        branches, last = parts[0].unsqueeze(1), len(self.levels) - 1
        for number, (level, choice) in enumerate(zip(self.levels, choices, strict=True)):
            emitted = choice.shape[1]
            y = level.multiply(self.weight, parts, columns * x.shape[1])
            branches = level.tensors.by_branch(self._normalise(number, y))
            if number == last and emitted == columns * level.tensors.num_branches:  # all branches of all columns
                return self._emit(self._activate(branches), None, x)
            parts.append(self._activate(level.tensors.choose(branches, choice, columns)))
            columns = emitted
        if not self.levels:
            root = parts[0].index_select(1, torch.as_tensor(self.plan.root_rows))
            return self._emit(root.unsqueeze(1), None, x)
        return self._emit(parts[-1].unsqueeze(1), choices[-1][0], x)

    @torch.no_grad()
    def passes(self, x: Tensor, count: int) -> Outputs:
        """Features (M, B, d) → outputs (T, M·B, O) of all sub-networks, or of `count` draws where there are more.

        The draws are the same each time.
        """
        ggt, temperature = self.heads[0].ggt, self.heads[0].temperature
        inner = [level.tensors.num_branches for level in self.levels]
        if ggt.num_subnetworks > count:
            drawn = ggt.sample(count, temperature, 0)
            return Outputs(self._chosen(x, drawn))
        everything = list(ggt.enumerate(count))
        weights = torch.tensor([math.exp(ggt.log_prob(one, temperature)) for one in everything])
        if all(branches == 1 for branches in inner[:-1]):  # one for each branch of the root, in their order
            return Outputs(self(x, self.heads[0].layers.draw(len(everything), 1)).flatten(1, 2), weights)
        return Outputs(self._chosen(x, everything), weights)

    def _chosen(self, x: Tensor, subnetworks: Sequence[SubNetwork]) -> Tensor:
        """Outputs (T, M·B, O) of sub-networks, one after the other."""
        choices = self.heads[0].layers.choices(subnetworks)
        outputs = []
        for number in range(len(subnetworks)):
            outputs.append(self.forward(x, [level[:, number : number + 1] for level in choices]).flatten(1, 2))
        return torch.cat(outputs)

    def _activate(self, y: Tensor) -> Tensor:
        return ACTIVATIONS[self.heads[0].layers.activation](y)

    def _normalise(self, number: int, y: Tensor) -> Tensor:
        """(M, neurons, B): batch norm with the statistics of this batch, or in evaluation those kept, or the bias."""
        at, layers, kept = self.levels[number].neurons, self.heads[0].layers, self.statistics[number]
        assert isinstance(kept, _Statistics)
        if self.scale is None:
            return y + self.bias[:, at].unsqueeze(-1)
        flat = y.reshape(1, -1, y.shape[2])
        mean, var = kept.mean.view(-1), kept.var.view(-1)
        scale, bias = self.scale[:, at].reshape(-1), self.bias[:, at].reshape(-1)
        flat = F.batch_norm(flat, mean, var, scale, bias, self.training, layers.momentum, layers.eps)
        return flat.view_as(y)

    def _emit(self, root: Tensor, choice: Tensor | None, x: Tensor) -> Tensor:
        """Rows of the root (M, s, R, C·B) of every branch, or (M, 1, R, V·B) of those that `choice` (V, samples) names.

        Gives outputs (V, M, B, O).
        """
        members, batch = x.shape[:2]
        weight = self.out_weight  # (M, s, O, R)
        branches = weight.shape[1]
        rows = root.expand(-1, branches, -1, -1).reshape(members * branches, *root.shape[2:])
        outputs = torch.bmm(weight.flatten(0, 1), rows).view(members, branches, weight.shape[2], -1, batch)
        if choice is None:
            outputs = outputs.permute(1, 3, 0, 4, 2).flatten(0, 1)  # (V, M, B, O)
        else:
            versions = outputs.shape[3]
            place = choice.expand(versions, batch).view(1, 1, 1, versions, batch)
            place = place.expand(members, 1, outputs.shape[2], versions, batch)
            outputs = outputs.gather(1, place).squeeze(1).permute(2, 0, 3, 1)
        return outputs + self._past_the_tree(x)

    def _past_the_tree(self, x: Tensor) -> Tensor:
        """Biases, and the linear layer that goes past the tree, (M, B, O)."""
        bias = self.out_bias.unsqueeze(1)
        skip = self.heads[0].skip
        if skip is None or self.skip_weight is None:
            return bias
        if skip.norm is None:
            return torch.baddbmm(bias, x, self.skip_weight.transpose(1, 2))
        kept_mean, kept_var = self.get_buffer("skip_mean"), self.get_buffer("skip_var")
        if self.training:
            var, mean = torch.var_mean(x, dim=1, correction=0)
            with torch.no_grad():
                kept_mean.lerp_(mean, skip.momentum)
                kept_var.lerp_(var, skip.momentum)
        else:
            mean, var = kept_mean, kept_var
        weight = self.skip_weight * torch.rsqrt(var.mean(dim=1) + skip.eps).view(-1, 1, 1)
        bias = bias - torch.bmm(weight, mean.unsqueeze(2)).transpose(1, 2)
        return torch.baddbmm(bias, x, weight.transpose(1, 2))


class _Statistics(nn.Module):
    """Running statistics (M, neurons) of one level of every member."""

    mean: Tensor
    var: Tensor

    def __init__(self, layers: Sequence[nn.Module], level: _Level) -> None:
        super().__init__()
        kept = [(one.get_buffer("running_mean"), one.get_buffer("running_var")) for one in layers]
        has = bool(len(kept[0][0]))
        self.register_buffer("mean", torch.stack([mean[level.neurons] if has else mean for mean, _ in kept]))
        self.register_buffer("var", torch.stack([var[level.neurons] if has else var for _, var in kept]))


class _Level:
    """One level of all members: where it reads, and the product."""

    def __init__(self, number: int, level: Level, plan: Plan) -> None:
        chosen = replace(level, buckets=_buckets(level, plan))
        self.tensors = LevelTensors(number, chosen, plan, 1)
        self.neurons = self.tensors.neurons
        self.places = [_Places(bucket) for bucket in chosen.buckets]

    def multiply(self, flat: Tensor, parts: list[Tensor], batch: int) -> Tensor:
        """Flat weights (M, W) and parts (M, rows, C·B) → (M, neurons of the level, `batch`) before the norm."""
        members, level = len(flat), self.tensors
        gathered = [repeat_columns(parts[i], batch) for i in level.gathered]
        if level.zeros:
            gathered.append(parts[0].new_zeros(members, 1, batch))
        together = torch.cat(gathered, dim=1) if len(gathered) > 1 else gathered[0] if gathered else None
        outputs = []
        for bucket, place in zip(level.ordered, self.places, strict=True):
            weight = place.weights(flat)
            if bucket.slice is not None:
                part, first, count = bucket.slice
                rows = repeat_columns(parts[part].narrow(1, first, count), batch)
                groups, width, reads = bucket.shape
                rows = rows.reshape(members * groups, reads, batch)  # of blocks side by side
                y = torch.bmm(weight.reshape(members * groups, width, reads), rows)
                outputs.append(y.view(members, -1, batch))
                continue
            assert together is not None
            outputs.append(_product(weight, together, bucket))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return y if level.in_order else y.index_select(1, level.arrange)


class _Places(nn.Module):
    """Where the weights of a bucket stand in the flat vector."""

    position: Tensor
    source: Tensor

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self.shape = bucket.shape
        order = bucket.weights[:, 0].argsort()
        index_buffer(self, "position", bucket.weights[order, 0])
        index_buffer(self, "source", bucket.weights[order, 1])
        self.size = math.prod(bucket.shape)
        source = bucket.weights[order, 1]
        whole = len(source) == self.size and (source == source[0] + range(self.size)).all()
        self.first = int(source[0]) if whole else None

    def weights(self, flat: Tensor) -> Tensor:
        """Flat weights (M, W) → (M, G, O, I), zero where a layer does not look."""
        if self.first is not None:
            values = flat.narrow(1, self.first, self.size)
        else:
            values = flat.index_select(1, self.source)
            if len(self.position) < self.size:
                values = flat.new_zeros(len(flat), self.size).index_copy(1, self.position, values)
        return values.reshape(len(flat), *self.shape)


def _buckets(level: Level, plan: Plan) -> tuple[Bucket, ...]:
    """Those of the plan, or one product for all fields where they read a good part of what there is."""
    groups, width, reads = level.buckets[0].shape
    if len(level.buckets) > 1 or width > 1 or groups == 1 or plan.ggt.num_variables > DENSE * reads:
        return level.buckets
    rows = [*plan.node_rows, *(np.array([v]) for v in range(plan.ggt.num_variables))]
    return choose_buckets(level.layers, rows, level.first_row, masked=True)


def _product(weight: Tensor, rows: Tensor, bucket: BucketTensors) -> Tensor:
    """(M, G, O, I) weights and rows (M, R, B), of which every block reads its own → (M, G·O, B)."""
    members, groups, width, reads = weight.shape
    batch = rows.shape[2]
    if width == 1 < groups:  # the sum of a bag of rows, each with its weight, is the product of a sparse matrix
        starts = rows.shape[1] * torch.arange(members).view(-1, 1, 1)
        places = (bucket.rows.view(1, groups, reads) + starts).view(-1, reads)
        flat = rows.reshape(-1, batch)
        found = F.embedding_bag(places, flat, per_sample_weights=weight.reshape(-1, reads), mode="sum")
        return found.view(members, groups, batch)
    read = rows.index_select(1, bucket.rows).view(members * groups, reads, batch)
    return torch.bmm(weight.reshape(members * groups, width, reads), read).view(members, -1, batch)


def _stacked(parts: Sequence[nn.Module | None], name: str) -> nn.Parameter:
    """The tensor of this name of every member, the members first."""
    return nn.Parameter(torch.stack([getattr(part, name).detach() for part in parts]))
