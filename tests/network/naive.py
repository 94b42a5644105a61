"""A tree of `nn.Linear`s written straight from lines 13–15 of Algorithm 1, and trees to compare it with the head on."""

import copy

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from brainet_pl.network.plan import FIELDS
from brainet_pl.structure import Branch, Leaf, Node, learn_structure

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}


class Centred(nn.Module):
    """Features of mean 0 and, all together, variance 1; one feature at a time."""

    def __init__(self, skip):
        super().__init__()
        self.mean, self.var = skip.running_mean.clone(), skip.running_var.clone()
        self.momentum, self.eps = skip.momentum, skip.eps

    def forward(self, x):
        mean, var = self.mean.clone(), self.var.clone()
        if self.training:
            for j in range(x.shape[1]):
                mean[j], var[j] = x[:, j].mean(), x[:, j].var(correction=0)
            self.mean = (1 - self.momentum) * self.mean + self.momentum * mean
            self.var = (1 - self.momentum) * self.var + self.momentum * var
        return (x - mean) / (var.sum() / len(var) + self.eps) ** 0.5


class NaiveHead(nn.Module):
    """One module for each layer; every pass walks the tree."""

    def __init__(self, head):
        super().__init__()
        self.ggt, self.plan = head.ggt, head.plan
        self.layers = nn.ModuleDict()
        with torch.no_grad():
            for level in head.plan.levels:
                for layer in level.layers:
                    linear = nn.Linear(layer.fan_in, layer.width, bias=False)
                    weights = head.layers.weight[0, layer.first_weight :][: layer.fan_in * layer.width]
                    linear.weight.copy_(weights.view(layer.width, layer.fan_in))
                    first = level.first_neuron + layer.first_neuron
                    own, name = (
                        slice(first, first + layer.width),
                        f"{layer.node}_{layer.branch}_{layer.sources[0]}",
                    )
                    if head.layers.norm is None:
                        linear.bias = nn.Parameter(head.layers.bias[own].clone())
                        self.layers[name] = nn.Sequential(linear, ACTIVATIONS[head.layers.activation]())
                        continue
                    norm = nn.BatchNorm1d(layer.width, eps=head.layers.eps, momentum=head.layers.momentum)
                    norm.weight.copy_(head.layers.scale[own])
                    norm.bias.copy_(head.layers.bias[own])
                    norm.running_mean.copy_(head.layers.running_mean[own])
                    norm.running_var.copy_(head.layers.running_var[own])
                    self.layers[name] = nn.Sequential(linear, norm, ACTIVATIONS[head.layers.activation]())
        self.output = copy.deepcopy(head.output)
        self.skip = None if head.skip is None else self.dense(head)
        self.number = {id(node): i for i, node in enumerate(self.ggt.nodes)}
        self.structure = {id(self.ggt.root): 0}  # node → the branch of the root that it is below
        for t, branch in enumerate(getattr(self.ggt.root, "branches", ())):
            below = list(branch.children)
            for node in below:
                self.structure[id(node)] = t
                below += [child for branch in getattr(node, "branches", ()) for child in branch.children]

    @staticmethod
    def dense(head):
        """The layer past the tree, of plain modules."""
        linear = nn.Linear(head.in_features, head.out_features, bias=False)
        linear.weight = nn.Parameter(head.skip.weight.detach().clone())
        if head.skip.norm is None:
            return linear
        return nn.Sequential(Centred(head.skip), linear)

    def emit(self, t, rows):
        """Outputs of rows (…, R) that branch t of the root gave."""
        return rows @ self.output.weight[t].t() + self.output.bias

    def branch(self, node, t, given, combine):
        i = self.number[id(node)]
        branch = node.branches[t]
        below = self.node(branch.descendant, given, combine)
        if not branch.ancestors:
            return self.layers[f"{i}_{t}_{self.number[id(branch.descendant)]}"](below)
        parts = []
        for ancestor in branch.ancestors:
            read = torch.cat([self.node(ancestor, given, combine), below], dim=1)
            parts.append(self.layers[f"{i}_{t}_{self.number[id(ancestor)]}"](read))
        return torch.cat(parts, dim=1)

    def lowest(self, x):
        """What each variable gives to leaves: itself, or in each set a small layer that reads it and its neighbours."""
        if not self.plan.has_fields:
            return [list(x.split(1, dim=1))]
        sets = {}
        for field in self.plan.levels[0].layers:
            read = [source - len(self.ggt.nodes) for source in field.sources]
            given = self.layers[f"{FIELDS}_{field.branch}_{field.sources[0]}"](x[:, read])
            sets.setdefault(field.branch, []).append(given)
        return list(sets.values())

    def leaf(self, leaf, given):
        """What the variables of a leaf give in the set of its branch of the root, or as they are."""
        own = given[self.structure[id(leaf)] if self.plan.has_fields else 0]
        return torch.cat([own[v] for v in leaf.variables], dim=1)

    def node(self, node, given, combine):
        if isinstance(node, Leaf):
            return self.leaf(node, given)
        return combine(self.number[id(node)], node, lambda t: self.branch(node, t, given, combine))

    def run(self, x, combine):
        root, given = self.ggt.root, self.lowest(x)
        if isinstance(root, Leaf):
            outputs = self.emit(0, self.node(root, given, combine))
        else:
            outputs = combine(0, root, lambda t: self.emit(t, self.branch(root, t, given, combine)))
        return outputs if self.skip is None else outputs + self.skip(x)

    def subnetwork(self, x, subnetwork):
        taken = dict(self.ggt.path(subnetwork))
        return self.run(x, lambda i, node, branch: branch(taken[i]))

    def simultaneous(self, x, temperature):
        p = self.ggt.branch_probabilities(temperature)
        return self.run(x, lambda i, node, branch: sum(p[i][t] * branch(t) for t in range(len(node.branches))))


@st.composite
def trees(draw, variables, depth):
    """Trees over the variables, whose leaves know neighbours among them."""
    everything = tuple(variables)
    return draw(_trees(everything, depth, everything))


def _leaf(draw, variables, everything):
    others = [[v for v in everything if v != x] for x in variables]
    near = tuple(tuple(draw(st.permutations(found))[:3]) for found in others)
    return Leaf(variables, tuple(() for _ in variables), draw(st.floats(-3, 0)), near)


@st.composite
def _trees(draw, variables, depth, everything):
    if depth == 0 or (len(variables) < 6 and draw(st.integers(0, 2)) == 0):
        return _leaf(draw, tuple(variables), everything)
    branches = []
    for _ in range(draw(st.integers(1, 3))):
        k = draw(st.integers(0, len(variables) - 1))
        cut = draw(st.integers(0, k)) if k else 0
        parts = [part for part in (variables[:cut], variables[cut:k]) if part]
        ancestors = tuple(draw(_trees(p, depth - 1, everything)) for p in parts)
        branches.append(Branch(ancestors, draw(_trees(variables[k:], depth - 1, everything))))
    return Node(tuple(variables), tuple(branches))


def randomise(head):
    """Parameters and statistics that no layer shares with another."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if head.layers.scale is not None:
            head.layers.scale.copy_(torch.rand(head.layers.scale.shape, generator=g) + 0.5)
            head.layers.running_mean.copy_(torch.randn(head.layers.running_mean.shape, generator=g))
            head.layers.running_var.copy_(torch.rand(head.layers.running_var.shape, generator=g) + 0.5)
        head.layers.bias.copy_(torch.randn(head.layers.bias.shape, generator=g))
        head.output.weight.copy_(
            torch.randn(head.output.weight.shape, generator=g) / head.output.weight.shape[2] ** 0.5
        )
        if head.skip is not None:
            head.skip.weight.copy_(torch.randn(head.skip.weight.shape, generator=g))
            if head.skip.norm:
                head.skip.running_mean.copy_(torch.randn(head.in_features, generator=g))
                head.skip.running_var.copy_(torch.rand(head.in_features, generator=g) + 0.5)
    return head


def fixed_ggt(s=2, seed=0, d=12, max_order=2, threshold=0.02):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(300, 4)) @ (rng.normal(size=(4, d)) * (rng.random((4, d)) < 0.6)) + 0.6 * rng.normal(
        size=(300, d)
    )
    settings = {"s": s, "max_order": max_order, "threshold": threshold, "seed": seed}
    # The paper's samples disagree more, which makes trees of many shapes.
    return learn_structure(x, test="gaussian", bootstrap="paper", progress=False, **settings)


def flat_of(head):
    """The head's own gradients of weights, scales and biases, of the output and of what goes past the tree."""
    found = [head.layers.weight.grad[0], head.layers.scale.grad, head.layers.bias.grad, head.output.weight.grad]
    return found if head.skip is None else [*found, head.skip.weight.grad]


def alone(head, x, subnetwork):
    """The outputs (B, C) of one sub-network."""
    return head.run_subnetworks(x, [subnetwork], None)[0]


def flat_gradient(naive, head):
    """The naive tree's gradients in the head's flat order."""
    weight, scale, bias = (
        torch.zeros_like(head.layers.weight[0]),
        torch.zeros_like(head.layers.scale),
        torch.zeros_like(head.layers.bias),
    )
    for level in head.plan.levels:
        for layer in level.layers:
            linear, norm, _ = naive.layers[f"{layer.node}_{layer.branch}_{layer.sources[0]}"]
            if linear.weight.grad is None:
                continue
            weight[layer.first_weight :][: layer.fan_in * layer.width] = linear.weight.grad.flatten()
            first = level.first_neuron + layer.first_neuron
            scale[first : first + layer.width] = norm.weight.grad
            bias[first : first + layer.width] = norm.bias.grad
    found = [weight, scale, bias, naive.output.weight.grad]
    return found if naive.skip is None else [*found, naive.skip[-1].weight.grad]
