"""The generative graph tree: every structure that B-RAI found, their scores, and the posterior over them.

The tree itself is plain data (`tree.py`); the mathematics of the posterior stands in `posterior.py`, the checks of
stored trees in `serialize.py`. `GGT` couples them and remembers what is costly.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils.stored import FORMAT
from brainet_pl.structure import posterior, serialize, tree
from brainet_pl.structure.posterior import Floats, LogProbs
from brainet_pl.structure.text import short, text_summary
from brainet_pl.structure.tree import Branch, Leaf, Node, NumberedTree, SubNetwork, Tree

__all__ = ["GGT", "Branch", "Leaf", "Node", "SubNetwork", "Tree"]


class Structure(NamedTuple):
    """One of the distinct Bayesian networks of a tree.

    Attributes:
        parents: for each variable its parents.
        score: the log marginal likelihood.
        probability: among all distinct networks of the tree.
        subnetworks: how many ways through the tree lead to it.
    """

    parents: tuple[tuple[int, ...], ...]
    score: float
    probability: float
    subnetworks: int


MOST_WRITTEN = 10**7  # sub-networks that are counted out


@dataclass(frozen=True, repr=False)
class GGT:
    """A scored tree of structures over `num_variables` variables, learned from `num_rows` rows.

    Sub-networks follow p(G) ∝ exp(score(G) / temperature). Temperature 1 is the paper's, and on real data it collapses
    onto one structure, because scores grow with the number of rows; see `auto_temperature`. Variables may have `names`,
    which drawings and summaries show; they are no part of what makes two trees equal.

    It has more methods than most classes here because it is the one object that users ask about structures; each method
    is a line or two in front of a function of `tree`, `posterior` or `serialize`.
    """

    root: Tree
    num_variables: int
    num_rows: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    names: tuple[str, ...] | None = field(default=None, compare=False)
    _tree: NumberedTree = field(init=False, repr=False, compare=False)
    _remembered: OrderedDict[float, LogProbs] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tree", tree.number_nodes(self.root))
        object.__setattr__(self, "_remembered", OrderedDict())
        if self.names is not None and len(self.names) != self.num_variables:
            raise ValueError(
                f"expected a name for each of {self.num_variables} variables, got {len(self.names)}: name all or none"
            )
        for node in self.nodes:
            if isinstance(node, Leaf) and not math.isfinite(node.score):
                raise ValueError(
                    f"expected a finite score of every leaf, got {node.score} for variables {node.variables}: no "
                    "posterior can be made of it; check the score"
                )

    def __repr__(self) -> str:
        """One line; `summary` has a few more, and a drawing the whole tree.

        >>> GGT(Leaf((0, 1), ((), (0,)), score=-1.0), 2, num_rows=9)
        GGT(2 variables, 9 rows, depth 0, 1 sub-network)
        """
        networks, depth = self.num_subnetworks, self.depth
        count = f"{networks:,}" if networks < MOST_WRITTEN else f"about 10^{len(str(networks)) - 1}"
        ending = "" if networks == 1 else "s"
        return (
            f"GGT({self.num_variables:,} variables, {self.num_rows:,} rows, depth {depth}, {count} sub-network{ending})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles travel in the flat form of `to_dict`, and are checked like a stored tree."""
        return GGT.from_dict, (self.to_dict(),)

    # -- size ---------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[Tree, ...]:
        """All nodes and leaves, depth first; the place of one here is its number."""
        return self._tree.nodes

    @cached_property
    def num_subnetworks(self) -> int:
        """How many ways there are to choose branches from the root down."""
        return tree.count_subnetworks(self.root)

    @cached_property
    def num_unique_structures(self) -> int:
        """How many different connectivity patterns (nested decompositions of the variables) those ways give."""
        return tree.count_patterns(self.root)

    @property
    def depth(self) -> int:
        """Levels of dense layers: 0 for a single leaf."""
        return self.heights[0]

    @property
    def num_leaves(self) -> int:
        """Leaves in the whole tree."""
        return sum(isinstance(node, Leaf) for node in self.nodes)

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """For each node of `nodes`: 0 for a leaf, else one more than the highest child."""
        return tree.heights(self._tree)

    # -- posterior ----------------------------------------------------------------------------------------------------

    def branch_probabilities(self, temperature: float | None = None) -> list[Floats]:
        """For each node of `nodes` the probabilities (s,) of its branches once it is reached; empty for a leaf."""
        return [np.exp(p) for p in self._log_probs(temperature)]

    def _log_probs(self, temperature: float | None) -> LogProbs:
        """The logarithms of `branch_probabilities`, computed once for each of the last temperatures."""
        temperature = posterior.check_temperature(self.auto_temperature if temperature is None else temperature)
        if temperature not in self._remembered:
            self._remembered[temperature] = posterior.branch_log_probs(self._tree, temperature)
            if len(self._remembered) > 16:
                self._remembered.popitem(last=False)
        return self._remembered[temperature]

    def sample(self, n: int, temperature: float | None = None, rng: np.random.Generator | int = 0) -> list[SubNetwork]:
        """`n` independent draws, exactly in proportion to exp(score / temperature); each costs one walk to its leaves.

        `temperature` None is `auto_temperature`.

        Example:
            Two variables, joined or apart; the second structure is better by log 3 and is drawn three times as often.

            >>> import math
            >>> joined = Branch((), Leaf((0, 1), ((), (0,)), 0.0))
            >>> apart = Branch((Leaf((0,), ((),), 0.0),), Leaf((1,), ((),), math.log(3)))
            >>> ggt = GGT(Node((0, 1), (joined, apart)), num_variables=2)
            >>> ggt.sample(2, temperature=1.0, rng=0)
            [SubNetwork(choices=(1,)), SubNetwork(choices=(1,))]
            >>> sum(drawn.choices == (1,) for drawn in ggt.sample(1000, temperature=1.0, rng=0))
            769
        """
        return posterior.draw_exact(self._tree, self._log_probs(temperature), n, np.random.default_rng(rng))

    def sample_uniform(self, n: int, rng: np.random.Generator | int = 0) -> list[SubNetwork]:
        """`n` draws with equal probability for every branch of a node met: the paper's choice while training."""
        draw = np.random.default_rng(rng).integers
        return [posterior.descend(self._tree, lambda i: int(draw(len(self._tree.branches[i])))) for _ in range(n)]

    def sample_bottom_up(
        self, n: int, temperature: float = 1.0, rng: np.random.Generator | int = 0
    ) -> list[SubNetwork]:
        """The paper's sampler: each node samples a result from each branch, then one of them by Equation 6.

        It visits the whole tree for each draw, and follows exp(score / temperature) only approximately: a branch is
        weighed by the one result drawn from it, not by all it holds.
        """
        temperature = posterior.check_temperature(temperature)
        return posterior.draw_bottom_up(self.root, temperature, n, np.random.default_rng(rng))

    def map(self) -> SubNetwork:
        """The sub-network with the highest score; the first of several."""
        log_probs = self._log_probs(0.0)
        return posterior.descend(self._tree, lambda i: int(np.argmax(log_probs[i])))

    def log_prob(self, subnetwork: SubNetwork, temperature: float | None = None) -> float:
        """log p(subnetwork) under `sample` at this temperature."""
        log_probs = self._log_probs(temperature)
        return float(sum(log_probs[i][t] for i, t in self.path(subnetwork)))

    def perplexity(self, temperature: float | None = None) -> float:
        """exp(entropy): the number of equally likely sub-networks that would be as uncertain. 1: collapsed.

        Infinite where floats can't hold the number, from about 10^308 on.

        Example:
            Three structures with equal scores are worth three; with one far ahead, one is left.

            >>> def alternatives(*scores):
            ...     branches = tuple(Branch((), Leaf((0,), ((),), score)) for score in scores)
            ...     return GGT(Node((0,), branches), num_variables=1)
            >>> round(alternatives(-2.0, -2.0, -2.0).perplexity(temperature=1.0), 6)
            3.0
            >>> round(alternatives(-2.0, -2.0, 100.0).perplexity(temperature=1.0), 6)
            1.0
        """
        entropy = self._entropy(temperature)
        return math.exp(entropy) if entropy < math.log(sys.float_info.max) else math.inf

    def _entropy(self, temperature: float | None) -> float:
        return posterior.entropy(self._tree, self._log_probs(temperature))

    @cached_property
    def auto_temperature(self) -> float:
        """1, the exact posterior, unless it collapses: then the smallest temperature that keeps 90 % of the entropy.

        Scores are sums over rows, so on tens of thousands of rows branches differ by thousands of nats, and at
        temperature 1 only the best structure is ever drawn. On validation data (MNIST, CIFAR-10 features) the
        likelihood of predictions rises with the share of the entropy that is kept, steeply up to about 90 %: a network
        of few draws wants its members to differ. There, the better structures are still preferred.
        """
        return posterior.warm_temperature(self._entropy, self.num_subnetworks)

    # -- sub-networks -------------------------------------------------------------------------------------------------

    def only(self, subnetwork: SubNetwork) -> GGT:
        """The tree of a single sub-network: one branch a node."""
        choices = dict(self.path(subnetwork))

        def prune(i: int) -> Tree:
            node = self.nodes[i]
            if isinstance(node, Leaf):
                return node
            *ancestors, descendant = (prune(c) for c in self._tree.branches[i][choices[i]])
            return Node(node.variables, (Branch(tuple(ancestors), descendant),))

        return GGT(prune(0), self.num_variables, self.num_rows, self.settings, self.names)

    def path(self, subnetwork: SubNetwork) -> list[tuple[int, int]]:
        """Gives (number in `nodes`, branch) for every node of a sub-network, from the root down."""
        return [(i, t) for i, t in tree.visit(self._tree, subnetwork) if t >= 0]

    def leaves(self, subnetwork: SubNetwork) -> list[Leaf]:
        """The leaves of a sub-network: together they hold every variable once."""
        visited = (self.nodes[i] for i, t in tree.visit(self._tree, subnetwork) if t < 0)
        return [node for node in visited if isinstance(node, Leaf)]

    def score(self, subnetwork: SubNetwork) -> float:
        """The sum of the scores of its leaves."""
        return math.fsum(leaf.score for leaf in self.leaves(subnetwork))

    def dag(self, subnetwork: SubNetwork) -> NDArray[np.bool_]:
        """Gives the Bayesian network that a sub-network stands for, (d, d): [i, j] means i → j."""
        dag = np.zeros((self.num_variables, self.num_variables), dtype=bool)
        for leaf in self.leaves(subnetwork):
            for x, parents in zip(leaf.variables, leaf.parents, strict=True):
                dag[list(parents), x] = True
        return dag

    def enumerate(self, limit: int = 100_000) -> Iterator[SubNetwork]:
        """Every sub-network once; refuses when there are more than `limit`."""
        if self.num_subnetworks > limit:
            raise ValueError(
                f"expected at most {limit:,} sub-networks to enumerate, got {short(self.num_subnetworks)}: "
                "use sample, or raise limit"
            )
        return (SubNetwork(choices) for choices in tree.enumerate_choices(self.root))

    def edge_probabilities(self, temperature: float | None = None) -> Floats:
        """Computes the exact probability, under `sample`, that i is a parent of j, (d, d).

        With its transpose added, that i and j are joined. `temperature` None is `auto_temperature`.

        Example:
            Joined in one of two structures, and that one is drawn once in four times.

            >>> import math
            >>> joined = Branch((), Leaf((0, 1), ((), (0,)), 0.0))
            >>> apart = Branch((Leaf((0,), ((),), 0.0),), Leaf((1,), ((),), math.log(3)))
            >>> ggt = GGT(Node((0, 1), (joined, apart)), num_variables=2)
            >>> ggt.edge_probabilities(temperature=1.0).round(2).tolist()
            [[0.0, 0.25], [0.0, 0.0]]
        """
        reached = posterior.reach(self._tree, self._log_probs(temperature))
        edges = np.zeros((self.num_variables, self.num_variables))
        for node, probability in zip(self.nodes, reached, strict=True):
            if isinstance(node, Leaf):
                for x, parents in zip(node.variables, node.parents, strict=True):
                    edges[list(parents), x] += probability
        return edges

    def structures(self, temperature: float | None = None, limit: int = 100_000) -> list[Structure]:
        """The distinct Bayesian networks of the tree, the likeliest first, each counted once.

        `sample` and `log_prob` are about sub-networks, ways through the tree: a network that several ways lead to is
        drawn by all of them. Here p(G) ∝ exp(score(G) / temperature) over different networks, however many ways lead
        there. Refuses when there are more than `limit` sub-networks; `temperature` None is `auto_temperature`.

        Example:
            Three sub-networks with equal scores, two of them the same network.

            >>> joined = Branch((), Leaf((0, 1), ((), (0,)), 0.0))
            >>> apart = Branch((), Leaf((0, 1), ((), ()), 0.0))
            >>> ggt = GGT(Node((0, 1), (joined, joined, apart)), num_variables=2)
            >>> [(found.parents, found.subnetworks, round(found.probability, 2)) for found in ggt.structures(1.0)]
            [(((), (0,)), 2, 0.5), (((), ()), 1, 0.5)]
        """
        temperature = posterior.check_temperature(self.auto_temperature if temperature is None else temperature)
        ways: dict[tuple[tuple[int, ...], ...], list[float]] = {}
        for subnetwork in self.enumerate(limit):
            parents: list[tuple[int, ...]] = [()] * self.num_variables
            leaves = self.leaves(subnetwork)
            for leaf in leaves:
                for x, of_x in zip(leaf.variables, leaf.parents, strict=True):
                    parents[x] = of_x
            ways.setdefault(tuple(parents), []).append(math.fsum(leaf.score for leaf in leaves))
        scores = np.array([scores_of_ways[0] for scores_of_ways in ways.values()])
        probabilities = posterior.softmax(scores, temperature)
        order = np.argsort(-probabilities, kind="stable")
        every = list(ways.items())
        return [Structure(every[i][0], scores[i].item(), probabilities[i].item(), len(every[i][1])) for i in order]

    # -- in and out ---------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-able primitives only, nodes in a flat list, so that it travels in any checkpoint."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "num_variables": self.num_variables,
            "num_rows": self.num_rows,
            "settings": dict(self.settings),
            "nodes": serialize.write_nodes(self._tree),
        }
        return content if self.names is None else content | {"names": list(self.names)}

    @property
    def most_ancestors(self) -> int:
        """The largest number of ancestor sets that a branch has."""
        return max((len(b.ancestors) for n in self.nodes if isinstance(n, Node) for b in n.branches), default=0)

    def join_ancestors(self, most: int) -> GGT:
        """The tree whose branches have at most `most` ancestor sets: leaves among them are joined, scores stay."""
        return replace(self, root=tree.join_ancestors(self.root, most))

    def named(self, names: Sequence[str] | None) -> GGT:
        """The same tree with a name for each variable."""
        return replace(self, names=None if names is None else tuple(map(str, names)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GGT:
        """The tree that `to_dict` wrote; refuses a dictionary that is not a whole and sound tree."""
        return cls(*serialize.read_content(data))

    def to_json(self) -> str:
        """One line of JSON; floats keep all their digits."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> GGT:
        """The tree that `to_json` wrote; refuses text that is not a whole and sound tree."""
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"expected a GGT in JSON, got text that is none ({error}): the file was cut short or is something "
                "else; learn the structure again"
            ) from error
        return cls.from_dict(data)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tree (not of the settings it was learned with): equal trees, equal fingerprints."""
        content = {k: v for k, v in self.to_dict().items() if k not in ("format", "settings", "names")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def summary(self, temperature: float | None = None, width: int = 80) -> str:
        """A few lines for a terminal: the sizes, and the top of the tree with branch probabilities."""
        return text_summary(self, temperature, width)
