"""Trees made by hand, shared by the tests of the tree, its posterior and its JSON."""

import pytest
from hypothesis import strategies as st

from brainet_pl.structure import GGT, Branch, Leaf, Node


def leaf(variables, score):
    return Leaf(tuple(variables), tuple(() for _ in variables), score)


@st.composite
def trees(draw, variables=tuple(range(6)), depth=3):
    """Any tree: what the sampler and the counters must cope with."""
    if depth == 0 or draw(st.booleans()):
        return leaf(variables, draw(st.floats(-4, 0)))
    branches = []
    for _ in range(draw(st.integers(1, 3))):
        k = draw(st.integers(0, len(variables) - 1))
        cut = draw(st.integers(0, k)) if k else 0
        parts = [part for part in (variables[:cut], variables[cut:k]) if part]
        ancestors = tuple(draw(trees(part, depth - 1)) for part in parts)
        branches.append(Branch(ancestors, draw(trees(variables[k:], depth - 1))))
    return Node(tuple(variables), tuple(branches))


@pytest.fixture(scope="session")
def make_leaf():
    """A function (variables, score) -> leaf without parents."""
    return leaf


@pytest.fixture(scope="session")
def any_tree():
    """A strategy: any tree over the variables 0 … 5."""
    return trees()


@pytest.fixture
def small_ggt():
    """Three sub-networks over four variables."""
    inner = Node((0, 1), (Branch((), leaf((0, 1), -1.0)), Branch((leaf((0,), -0.2),), leaf((1,), -0.3))))
    first = Branch((inner,), leaf((2, 3), -2.0))
    second = Branch((leaf((0,), -0.5), leaf((2,), -0.1)), leaf((1, 3), -1.4))
    return GGT(Node((0, 1, 2, 3), (first, second)), 4, num_rows=10)
