"""The generative graph tree: every structure that B-RAI found, their scores, and the posterior over them.

A node for a set of variables is a leaf, or has s branches; a branch has ancestor nodes and one descendant node. One
branch chosen at each node met from the root down is a sub-network: it uses every variable exactly once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from brainet_pl.structure.patterns import count_patterns

Floats = NDArray[np.float64]

FORMAT = 1  # of the JSON form


@dataclass(frozen=True)
class Leaf:
    """Lines 2–5: `variables`, the `parents` of each in the leaf's graph, and the score of those given these."""

    variables: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    score: float


@dataclass(frozen=True)
class Branch:
    """One pass of the loop of line 6: the trees of the ancestor sets and of the descendant set."""

    ancestors: tuple[Tree, ...]
    descendant: Tree

    @property
    def children(self) -> tuple[Tree, ...]:
        """Ancestors first, as lines 10–12 visit them."""
        return (*self.ancestors, self.descendant)


@dataclass(frozen=True)
class Node:
    """A set of variables with `branches`, the alternatives found from s bootstrap samples."""

    variables: tuple[int, ...]
    branches: tuple[Branch, ...]


Tree = Leaf | Node


@dataclass(frozen=True)
class SubNetwork:
    """The branch taken at each node met on the way down, ancestors before descendant."""

    choices: tuple[int, ...]


class Posterior(NamedTuple):
    """Branch probabilities at one temperature, by node number: `log_probs[i]` is (s,), empty for a leaf."""

    log_probs: list[Floats]


@dataclass(frozen=True)
class GGT:
    """A scored tree of structures over `num_variables` variables, learned from `num_rows` rows.

    Sub-networks follow p(G) ∝ exp(score(G) / temperature). Temperature 1 is the paper's, and on real data it collapses
    onto one structure, because scores grow with the number of rows; see `auto_temperature`.
    """

    root: Tree
    num_variables: int
    num_rows: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    nodes: tuple[Tree, ...] = field(init=False, repr=False, compare=False)
    _number: dict[int, int] = field(init=False, repr=False, compare=False)
    _cache: OrderedDict[float, Posterior] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        nodes = tuple(_walk(self.root))
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "_number", {id(node): i for i, node in enumerate(nodes)})
        object.__setattr__(self, "_cache", OrderedDict())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are built anew: nodes are numbered by identity."""
        return GGT.from_dict, (self.to_dict(),)

    # -- size ---------------------------------------------------------------------------------------------------------

    @cached_property
    def num_subnetworks(self) -> int:
        """How many ways there are to choose branches from the root down."""
        return _count_subnetworks(self.root)

    @cached_property
    def num_unique_structures(self) -> int:
        """How many different connectivity patterns (nested decompositions of the variables) those ways give."""
        return count_patterns(_shape(self.root))

    @cached_property
    def depth(self) -> int:
        """Levels of dense layers: 0 for a single leaf."""
        return _depth(self.root)

    @property
    def num_leaves(self) -> int:
        """Leaves in the whole tree."""
        return sum(isinstance(node, Leaf) for node in self.nodes)

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """For each node of `nodes`: 0 for a leaf, else one more than the highest child."""
        heights = [0] * len(self.nodes)
        for i in range(len(self.nodes) - 1, -1, -1):  # children have larger numbers than their node
            node = self.nodes[i]
            if isinstance(node, Node):
                heights[i] = 1 + max(heights[self._number[id(c)]] for b in node.branches for c in b.children)
        return tuple(heights)

    # -- posterior ----------------------------------------------------------------------------------------------------

    def branch_probabilities(self, temperature: float) -> list[Floats]:
        """For each node of `nodes` the probabilities (s,) of its branches once it is reached; empty for a leaf."""
        return [np.exp(p) for p in self._posterior(temperature).log_probs]

    def _posterior(self, temperature: float) -> Posterior:
        """Exact: f(leaf) = score/γ, f(branch) = Σ f(children), f(node) = logsumexp f(branch), P = softmax.

        In the limit γ → ∞ every f(leaf) is 0 and sub-networks become equally likely; as γ → 0 the largest sum wins.
        """
        if not temperature >= 0:
            raise ValueError(f"expected a temperature of at least 0, got {temperature}: 0 is MAP, infinity is uniform")
        if temperature not in self._cache:
            self._cache[temperature] = self._compute_posterior(temperature)
            if len(self._cache) > 16:
                self._cache.popitem(last=False)
        return self._cache[temperature]

    def _compute_posterior(self, temperature: float) -> Posterior:
        value = np.zeros(len(self.nodes))
        log_probs: list[Floats] = [np.empty(0)] * len(self.nodes)
        for i in range(len(self.nodes) - 1, -1, -1):  # children have larger numbers than their node
            node = self.nodes[i]
            if isinstance(node, Leaf):
                value[i] = node.score if temperature == 0 else node.score / temperature
                continue
            f = np.array([sum(value[self._number[id(c)]] for c in b.children) for b in node.branches])
            if temperature == 0:
                value[i] = f.max()
                log_probs[i] = np.where(np.arange(len(f)) == np.argmax(f), 0.0, -np.inf)
            else:
                value[i] = logsumexp(f)
                log_probs[i] = f - value[i]
        return Posterior(log_probs)

    def sample(self, n: int, temperature: float | None = None, rng: np.random.Generator | int = 0) -> list[SubNetwork]:
        """`n` independent draws, exactly in proportion to exp(score / temperature); each costs one walk to its leaves.

        `temperature` None is `auto_temperature`.
        """
        temperature = self.auto_temperature if temperature is None else temperature
        rng = np.random.default_rng(rng)
        log_probs = self._posterior(temperature).log_probs
        cumulative: dict[int, Floats] = {}

        def choose(i: int) -> int:
            if i not in cumulative:
                cumulative[i] = np.cumsum(np.exp(log_probs[i]))
            edges = cumulative[i]
            return min(int(np.searchsorted(edges, rng.random() * edges[-1], side="right")), len(edges) - 1)

        return [self._descend(choose) for _ in range(n)]

    def sample_uniform(self, n: int, rng: np.random.Generator | int = 0) -> list[SubNetwork]:
        """`n` draws with equal probability for every branch of a node met: the paper's choice while training."""
        rng = np.random.default_rng(rng)

        def choose(i: int) -> int:
            node = self.nodes[i]
            assert isinstance(node, Node)
            return int(rng.integers(len(node.branches)))

        return [self._descend(choose) for _ in range(n)]

    def sample_bottom_up(
        self, n: int, temperature: float = 1.0, rng: np.random.Generator | int = 0
    ) -> list[SubNetwork]:
        """The paper's sampler: each node samples a result from each branch, then one of them by Equation 6.

        It visits the whole tree for each draw, and follows exp(score / temperature) only approximately: a branch is
        weighed by the one result drawn from it, not by all it holds.
        """
        rng = np.random.default_rng(rng)

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

        if not temperature >= 0:
            raise ValueError(f"expected a temperature of at least 0, got {temperature}: 0 is MAP, infinity is uniform")
        return [SubNetwork(draw(self.root)[0]) for _ in range(n)]

    def map(self) -> SubNetwork:
        """The sub-network with the highest score; the first of several."""
        log_probs = self._posterior(0.0).log_probs
        return self._descend(lambda i: int(np.argmax(log_probs[i])))

    def only(self, subnetwork: SubNetwork) -> GGT:
        """The tree of a single sub-network: one branch a node."""
        choices = dict(self.path(subnetwork))

        def prune(node: Tree) -> Tree:
            if isinstance(node, Leaf):
                return node
            branch = node.branches[choices[self._number[id(node)]]]
            kept = Branch(tuple(prune(a) for a in branch.ancestors), prune(branch.descendant))
            return Node(node.variables, (kept,))

        return GGT(prune(self.root), self.num_variables, self.num_rows, self.settings)

    def log_prob(self, subnetwork: SubNetwork, temperature: float | None = None) -> float:
        """log p(subnetwork) under `sample` at this temperature."""
        temperature = self.auto_temperature if temperature is None else temperature
        log_probs = self._posterior(temperature).log_probs
        return float(sum(log_probs[i][t] for i, t in self.path(subnetwork)))

    def perplexity(self, temperature: float | None = None) -> float:
        """exp(entropy): the number of equally likely sub-networks that would be as uncertain. 1: collapsed."""
        return math.exp(self._entropy(self.auto_temperature if temperature is None else temperature))

    def _entropy(self, temperature: float) -> float:
        log_probs = self._posterior(temperature).log_probs
        entropy = np.zeros(len(self.nodes))
        for i in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[i]
            if isinstance(node, Node):
                p = np.exp(log_probs[i])
                own = -np.sum(p * np.where(p > 0, log_probs[i], 0.0))
                below = [sum(entropy[self._number[id(c)]] for c in branch.children) for branch in node.branches]
                entropy[i] = own + p @ below
        return float(entropy[0])

    @cached_property
    def auto_temperature(self) -> float:
        """1, the exact posterior, unless it collapses: then the smallest temperature that keeps 90 % of the entropy.

        Scores are sums over rows, so on tens of thousands of rows branches differ by thousands of nats, and at
        temperature 1 only the best structure is ever drawn. Entropies lie between that of the best structures alone
        (several sub-networks can be the same structure) and that of all sub-networks alike. On validation data (MNIST,
        CIFAR-10 features) the likelihood of predictions rises with the share that is kept, steeply up to about 90 %: a
        network of few draws wants its members to differ. There, the better structures are still preferred.
        """
        most = math.log(self.num_subnetworks)
        # 1e-3 nats is cold enough to leave only ties, and warm enough for large scores to keep their digits.
        least = min(self._entropy(1e-3), most)
        target = least + 0.9 * (most - least) - 1e-4
        low = 1.0
        if self._entropy(low) >= target:
            return low
        high = 10.0
        while self._entropy(high) < target and high < 1e300:
            high *= 10.0
        while high / low > 1.01:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._entropy(middle) < target else (low, middle)
        return high

    # -- sub-networks -------------------------------------------------------------------------------------------------

    def _descend(self, choose: Any) -> SubNetwork:
        choices: list[int] = []
        stack = [self.root]
        while stack:
            node = stack.pop()
            if isinstance(node, Node):
                t = choose(self._number[id(node)])
                choices.append(t)
                stack.extend(reversed(node.branches[t].children))
        return SubNetwork(tuple(choices))

    def path(self, subnetwork: SubNetwork) -> list[tuple[int, int]]:
        """(number in `nodes`, branch) for every node of a sub-network, from the root down."""
        return [(i, t) for i, t in self._visit(subnetwork) if t >= 0]

    def leaves(self, subnetwork: SubNetwork) -> list[Leaf]:
        """The leaves of a sub-network: together they hold every variable once."""
        found = (self.nodes[i] for i, t in self._visit(subnetwork) if t < 0)
        return [node for node in found if isinstance(node, Leaf)]

    def _visit(self, subnetwork: SubNetwork) -> Iterator[tuple[int, int]]:
        """Node numbers with the branch taken, -1 at a leaf."""
        choices = iter(subnetwork.choices)
        stack = [self.root]
        while stack:
            node = stack.pop()
            if isinstance(node, Leaf):
                yield self._number[id(node)], -1
                continue
            t = next(choices, None)
            if t is None or not 0 <= t < len(node.branches):
                raise ValueError(f"{subnetwork} does not belong to this tree: draw it with sample, map or enumerate")
            yield self._number[id(node)], t
            stack.extend(reversed(node.branches[t].children))
        if next(choices, None) is not None:
            raise ValueError(f"{subnetwork} does not belong to this tree: draw it with sample, map or enumerate")

    def score(self, subnetwork: SubNetwork) -> float:
        """The sum of the scores of its leaves."""
        return math.fsum(leaf.score for leaf in self.leaves(subnetwork))

    def dag(self, subnetwork: SubNetwork) -> NDArray[np.bool_]:
        """(d, d) the Bayesian network that a sub-network stands for: [i, j] means i → j."""
        dag = np.zeros((self.num_variables, self.num_variables), dtype=bool)
        for leaf in self.leaves(subnetwork):
            for x, parents in zip(leaf.variables, leaf.parents, strict=True):
                dag[list(parents), x] = True
        return dag

    def enumerate(self, limit: int = 100_000) -> Iterator[SubNetwork]:
        """Every sub-network once; refuses when there are more than `limit`."""
        if self.num_subnetworks > limit:
            raise ValueError(
                f"expected at most {limit:,} sub-networks to enumerate, got {_readable(self.num_subnetworks)}: "
                "use sample, or raise limit"
            )
        return (SubNetwork(choices) for choices in _enumerate(self.root))

    # -- in and out ---------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-able primitives only, nodes in a flat list, so that it travels in any checkpoint."""
        nodes = []
        for node in self.nodes:
            if isinstance(node, Leaf):
                nodes.append({"variables": node.variables, "parents": node.parents, "score": node.score})
            else:
                branches = [[self._number[id(c)] for c in branch.children] for branch in node.branches]
                nodes.append({"variables": node.variables, "branches": branches})
        return {
            "format": FORMAT,
            "num_variables": self.num_variables,
            "num_rows": self.num_rows,
            "settings": dict(self.settings),
            "nodes": nodes,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GGT:
        """The tree that `to_dict` wrote."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"expected a GGT in JSON format {FORMAT}, got {found}: learn the structure again")
        built: list[Tree] = [Leaf((), (), 0.0)] * len(data["nodes"])
        for i in range(len(built) - 1, -1, -1):
            entry = data["nodes"][i]
            variables = tuple(entry["variables"])
            if "branches" in entry:
                branches = [[built[c] for c in children] for children in entry["branches"]]
                built[i] = Node(variables, tuple(Branch(tuple(c[:-1]), c[-1]) for c in branches))
            else:
                built[i] = Leaf(variables, tuple(tuple(p) for p in entry["parents"]), float(entry["score"]))
        return cls(built[0], int(data["num_variables"]), int(data["num_rows"]), dict(data["settings"]))

    def to_json(self) -> str:
        """One line of JSON; floats keep all their digits."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> GGT:
        """The tree that `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tree (not of the settings it was learned with): equal trees, equal fingerprints."""
        content = {k: v for k, v in self.to_dict().items() if k != "settings"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def summary(self, temperature: float | None = None, width: int = 80) -> str:
        """A few lines for a terminal: the sizes, and the top of the tree with branch probabilities."""
        from brainet_pl.structure.draw import text_summary

        return text_summary(self, temperature, width)


def _walk(root: Tree) -> Iterator[Tree]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, Node):
            stack.extend(c for branch in reversed(node.branches) for c in reversed(branch.children))


def _count_subnetworks(node: Tree) -> int:
    if isinstance(node, Leaf):
        return 1
    return sum(math.prod(_count_subnetworks(child) for child in branch.children) for branch in node.branches)


def _depth(node: Tree) -> int:
    if isinstance(node, Leaf):
        return 0
    return 1 + max(_depth(child) for branch in node.branches for child in branch.children)


def _shape(node: Tree) -> Any:
    """What `count_patterns` looks at: nested sets of variables, without scores and parents."""
    if isinstance(node, Leaf):
        return frozenset(node.variables)
    return tuple((tuple(_shape(a) for a in b.ancestors), _shape(b.descendant)) for b in node.branches)


def _enumerate(node: Tree) -> Iterator[tuple[int, ...]]:
    if isinstance(node, Leaf):
        yield ()
        return
    for t, branch in enumerate(node.branches):
        for rest in _product(branch.children):
            yield (t, *rest)


def _product(children: tuple[Tree, ...]) -> Iterator[tuple[int, ...]]:
    if not children:
        yield ()
        return
    for first in _enumerate(children[0]):
        for rest in _product(children[1:]):
            yield first + rest


def _readable(count: int) -> str:
    return f"{count:,}" if count < 10**15 else f"about 10^{len(str(count)) - 1}"
