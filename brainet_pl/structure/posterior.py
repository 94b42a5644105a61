"""The posterior over the sub-networks of a tree: p(G) ∝ exp(score(G) / temperature), exactly, and samplers of it.

Every quantity is a sum over the leaves of a sub-network, so one pass from the leaves to the root gives it for all
sub-networks together. Trees come with numbers (`NumberedTree`): children have larger numbers than their node.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from brainet_pl._utils import checks
from brainet_pl.structure.tree import Leaf, NumberedTree, SubNetwork, Tree

Floats = NDArray[np.float64]
LogProbs = list[Floats]  # by node number: log-probabilities (s,) of its branches once it is reached; empty for a leaf


def check_temperature(temperature: float) -> float:
    """Refuse what is not a temperature: a negative number or NaN."""
    return checks.at_least("a temperature", temperature, 0, "0 is MAP, infinity is uniform")


def branch_log_probs(tree: NumberedTree, temperature: float) -> LogProbs:
    """Exact: f(leaf) = score/γ, f(branch) = Σ f(children), f(node) = logsumexp f(branch), P = softmax.

    In the limit γ → ∞ every f(leaf) is 0 and sub-networks become equally likely; as γ → 0 the largest sum wins.
    """
    value = np.zeros(len(tree.nodes))
    log_probs: LogProbs = [np.empty(0)] * len(tree.nodes)
    for i in range(len(tree.nodes) - 1, -1, -1):
        node = tree.nodes[i]
        if isinstance(node, Leaf):
            value[i] = node.score if temperature == 0 else node.score / temperature
            continue
        f = np.array([sum(value[c] for c in children) for children in tree.branches[i]])
        if temperature == 0:
            value[i] = f.max()
            log_probs[i] = np.where(np.arange(len(f)) == np.argmax(f), 0.0, -np.inf)
        else:
            value[i] = logsumexp(f)
            log_probs[i] = f - value[i]
    return log_probs


def softmax(scores: Floats, temperature: float) -> Floats:
    """exp(score / temperature), normalised; temperature 0 shares everything among the best."""
    if temperature == 0:
        best = scores == scores.max()
        return np.asarray(best / best.sum())
    return np.asarray(np.exp(scores / temperature - logsumexp(scores / temperature)))


def entropy(tree: NumberedTree, log_probs: LogProbs) -> float:
    """The entropy, in nats, of the sub-networks that these branch probabilities draw."""
    total = np.zeros(len(tree.nodes))
    for i in range(len(tree.nodes) - 1, -1, -1):
        if tree.branches[i]:
            p = np.exp(log_probs[i])
            own = -np.sum(p * np.where(p > 0, log_probs[i], 0.0))
            below = [sum(total[c] for c in children) for children in tree.branches[i]]
            total[i] = own + p @ below
    return float(total[0])


def reach(tree: NumberedTree, log_probs: LogProbs) -> Floats:
    """Computes the probability that a draw by these branch probabilities meets each node, (nodes,)."""
    reached = np.zeros(len(tree.nodes))
    reached[0] = 1.0
    for i, branches in enumerate(tree.branches):  # children have larger numbers than their node
        for t, children in enumerate(branches):
            reached[children] = reached[i] * math.exp(log_probs[i][t])
    return reached


def warm_temperature(entropy_at: Callable[[float], float], num_subnetworks: int) -> float:
    """1, the exact posterior, unless it collapses: then the smallest temperature that keeps 90 % of the entropy.

    `entropy_at` gives the entropy at a temperature. Entropies lie between that of the best structures alone (several
    sub-networks can be the same structure) and that of all sub-networks alike.
    """
    most = math.log(num_subnetworks)
    # 1e-3 nats is cold enough to leave only ties, and warm enough for large scores to keep their digits.
    least = min(entropy_at(1e-3), most)
    target = least + 0.9 * (most - least) - 1e-4
    low = 1.0
    if entropy_at(low) >= target:
        return low
    high = 10.0
    while entropy_at(high) < target and high < 1e300:
        high *= 10.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        if not low < middle < high:  # the product has left the range of floats
            break
        low, high = (middle, high) if entropy_at(middle) < target else (low, middle)
    return high


def descend(tree: NumberedTree, choose: Callable[[int], int]) -> SubNetwork:
    """The sub-network that takes branch `choose(i)` at each node i it meets."""
    choices: list[int] = []
    stack = [0]
    while stack:
        i = stack.pop()
        if tree.branches[i]:
            t = choose(i)
            choices.append(t)
            stack.extend(reversed(tree.branches[i][t]))
    return SubNetwork(tuple(choices))


def draw_exact(tree: NumberedTree, log_probs: LogProbs, n: int, rng: np.random.Generator) -> list[SubNetwork]:
    """`n` independent draws by these branch probabilities; each costs one walk to its leaves."""
    cumulative: dict[int, Floats] = {}

    def choose(i: int) -> int:
        if i not in cumulative:
            cumulative[i] = np.cumsum(np.exp(log_probs[i]))
        edges = cumulative[i]
        return min(int(np.searchsorted(edges, rng.random() * edges[-1], side="right")), len(edges) - 1)

    return [descend(tree, choose) for _ in range(n)]


def draw_bottom_up(root: Tree, temperature: float, n: int, rng: np.random.Generator) -> list[SubNetwork]:
    """`n` draws of the paper's sampler: each node samples a result from each branch, then one of them by Equation 6."""

    def draw(node: Tree) -> tuple[tuple[int, ...], float]:
        if isinstance(node, Leaf):
            return (), node.score
        results = []
        for t, branch in enumerate(node.branches):
            parts = [draw(child) for child in branch.children]
            choices = (t, *(c for chosen, _ in parts for c in chosen))
            results.append((choices, sum(score for _, score in parts)))
        scores = np.array([score for _, score in results])
        if temperature == 0:
            return results[int(np.argmax(scores))]
        weights = np.exp((scores - scores.max()) / temperature)
        return results[int(rng.choice(len(results), p=weights / weights.sum()))]

    return [SubNetwork(draw(root)[0]) for _ in range(n)]
