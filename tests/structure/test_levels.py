"""Nominal columns: the names of their levels decide nothing, and what depends on them is found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl import learn_structure, rai
from brainet_pl.structure.levels import order_levels

pandas = pytest.importorskip("pandas")


def penguins(rows, seed):
    """Three species on three islands; the middle species, by its name, is the heavy one."""
    rng = np.random.default_rng(seed)
    species = rng.choice(["adelie", "chinstrap", "gentoo"], rows)
    sex = rng.choice(["female", "male"], rows)
    island = np.where(rng.random(rows) < 0.7, species, rng.choice(["adelie", "chinstrap", "gentoo"], rows))
    mass = np.where(species == "chinstrap", 2.0, 0.0) + (sex == "male") + 0.7 * rng.normal(size=rows)
    bill = 0.8 * mass + 0.7 * rng.normal(size=rows)
    coin = rng.choice(["a", "b", "c", "d"], rows)
    return pandas.DataFrame(
        {"species": species, "island": island, "sex": sex, "mass": mass, "bill": bill, "coin": coin}
    )


def renamed(frame, seed):
    rng, frame = np.random.default_rng(seed), frame.copy()
    for name in ("species", "island", "sex", "coin"):
        kinds = sorted(set(frame[name]))
        names = [f"{letter}{name}" for letter in rng.permutation(list("pqrstuvw"))[: len(kinds)]]
        frame[name] = frame[name].map(dict(zip(kinds, names, strict=True)))
    return frame


def test_names_of_levels_decide_nothing():
    frame = penguins(344, 0)
    graph, tree = rai(frame), learn_structure(frame, progress=False)
    for seed in range(5):
        other = renamed(frame, seed)
        np.testing.assert_array_equal(rai(other).adjacency, graph.adjacency)
        assert learn_structure(other, progress=False).fingerprint == tree.fingerprint


def test_what_depends_on_a_level_in_the_middle_is_found_and_a_coin_joined_to_nothing():
    edges = []
    for seed in range(10):
        graph = rai(penguins(344, seed))
        names = list(graph.names)
        joined = graph.skeleton
        edges.append([joined[names.index("species"), names.index("mass")], joined[names.index("coin")].any()])
    found, false = np.array(edges).sum(axis=0)
    assert found == 10
    assert false <= 2  # of 50 pairs


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(20, 80))
def test_codes_do_not_depend_on_names(seed, levels, rows):
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, levels, rows), rng.integers(0, 3, rows)
    number = rng.normal(size=rows) + (first == 1)
    columns = [np.unique(column, return_inverse=True)[1] for column in (first, second)]
    mixed = [rng.permutation(int(column.max()) + 1)[column] for column in columns]
    kinds = [True, True, False]
    for one, other in zip(order_levels([*columns, number], kinds), order_levels([*mixed, number], kinds), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_data_frame_is_read_by_its_types():
    frame = pandas.DataFrame(
        {
            "rooms": pandas.Categorical([3, 4, 6, 8] * 10),
            "price": [f"{1.5 + i % 7:.2f}".replace(".", ",") for i in range(40)],
            "day": pandas.date_range("2024-01-01", periods=40, tz="UTC"),
        }
    )
    by_hand = pandas.DataFrame(
        {
            "rooms": frame["rooms"].astype(str).map("r{}".format),
            "price": [1.5 + i % 7 for i in range(40)],
            "day": range(40),
        }
    )
    settings = {"test": "fisher_z", "climb": False}
    np.testing.assert_array_equal(rai(frame, **settings).adjacency, rai(by_hand, **settings).adjacency)
