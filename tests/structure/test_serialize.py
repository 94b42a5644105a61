"""A stored tree is read whole and sound, or refused with what is wrong about it."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl._utils.stored import FORMAT
from brainet_pl.structure import GGT, Leaf


def change(path, value):
    """A function that sets, or with no value deletes, what lies at `path`."""

    def apply(data):
        *way, last = path
        for step in way:
            data = data[step]
        if value is ...:
            del data[last]
        else:
            data[last] = value

    return apply


# small_ggt: node 0 (0, 1, 2, 3) has the branches [1, 5] and [6, 7, 8]; node 1 (0, 1) has [2] and [3, 4]
WRONG = {
    "child 0": (change(("nodes", 0, "branches", 0, 0), 0), "children with numbers from 1 to 8 in node 0 .*, got 0:"),
    "child -1": (change(("nodes", 0, "branches", 0, 0), -1), "children with numbers from 1 to 8 in node 0 .*, got -1:"),
    "child behind the end": (change(("nodes", 0, "branches", 0, 0), 9), "numbers from 1 to 8 .*, got 9:"),
    "child above": (change(("nodes", 1, "branches", 0, 0), 1), "numbers from 2 to 8 in node 1 .*, got 1:"),
    "child True": (change(("nodes", 0, "branches", 0, 0), True), "got True:"),
    "child 1.0": (change(("nodes", 0, "branches", 0, 0), 1.0), "got 1.0:"),
    "child twice in a branch": (change(("nodes", 0, "branches", 0), [1, 1]), "belong to one branch .* child 1 twice"),
    "child of two branches": (change(("nodes", 0, "branches", 1), [1, 5]), "belong to one branch .* child 1 twice"),
    "node without a place": (change(("nodes", 0, "branches"), [[1, 5]]), "to be a child in node 6"),
    "no branches": (change(("nodes", 0, "branches"), []), r"at least one branch in node 0 .*, got \[\]"),
    "empty branch": (change(("nodes", 0, "branches", 0), []), "list of at least one child in node 0"),
    "unknown variable": (change(("nodes", 5, "variables"), [2, 4]), "numbers from 0 to 3 in node 5 .* got .2, 4."),
    "negative variable": (change(("nodes", 5, "variables"), [2, -1]), "numbers from 0 to 3 in node 5"),
    "variable twice": (change(("nodes", 5, "variables"), [2, 2]), "every variable once in node 5 .* variable 2 twice"),
    "no variables": (change(("nodes", 5, "variables"), []), "at least one variable in node 5"),
    "variables as text": (change(("nodes", 5, "variables"), "23"), "numbers from 0 to 3 in node 5"),
    "not a partition": (change(("nodes", 5, "variables"), [1, 3]), r"share out its variables .* got \[0, 1, 1, 3\]"),
    "more than the parent": (change(("nodes", 1, "variables"), [0, 1, 2]), "share out its variables"),
    "less than the parent": (change(("nodes", 1, "variables"), [0]), "share out its variables"),
    "fewer variables": (change(("num_variables",), 3), "numbers from 0 to 2"),
    "more variables": (change(("num_variables",), 5), "all variables from 0 to 4 in node 0 .* got 4 of them"),
    "no rows": (change(("num_rows",), 0), "num_rows of the tree of at least 1, got 0"),
    "rows as text": (change(("num_rows",), "10"), "num_rows of the tree to be a whole number, got '10'"),
    "own parent": (change(("nodes", 5, "parents", 0), [2]), "no variable to be its own parent in node 5"),
    "unknown parent": (change(("nodes", 5, "parents", 0), [7]), r"numbers from 0 to 3 in node 5 .* got \[7\]"),
    "parents missing": (change(("nodes", 5, "parents"), [[]]), "parents for each of its 2 variables in node 5"),
    "own neighbour": (change(("nodes", 5, "neighbours"), [[2], [0]]), "no variable to be its own neighbour in node 5"),
    "unknown neighbour": (
        change(("nodes", 5, "neighbours"), [[7], [0]]),
        r"numbers from 0 to 3 in node 5 .* got \[7\]",
    ),
    "neighbours missing": (
        change(("nodes", 5, "neighbours"), [[0]]),
        "neighbours for each of its 2 variables, or none",
    ),
    "neighbours as text": (change(("nodes", 5, "neighbours"), "01"), "neighbours for each of its 2 variables, or none"),
    "score -inf": (change(("nodes", 5, "score"), float("-inf")), "a finite score in node 5 .* got -inf"),
    "score nan": (change(("nodes", 5, "score"), float("nan")), "a finite score in node 5 .* got nan"),
    "score as text": (change(("nodes", 5, "score"), "1"), "a finite score in node 5 .* got '1'"),
    "settings": (change(("settings",), None), "settings to be a dictionary in the tree, got None"),
    "no nodes": (change(("nodes",), []), "list of at least one node in the tree"),
    "a node of text": (change(("nodes", 5), "leaf"), "a dictionary in node 5 .* got 'leaf'"),
    **{
        f"{'/'.join(map(str, path))} missing": (change(path, ...), f"the key '{path[-1]}' in .*, got only")
        for path in [
            ("num_variables",),
            ("num_rows",),
            ("settings",),
            ("nodes",),
            ("nodes", 5, "variables"),
            ("nodes", 5, "parents"),
            ("nodes", 5, "score"),
        ]
    },
    "branches missing": (change(("nodes", 0, "branches"), ...), "the key 'parents' in node 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(small_ggt, wrong):
    apply, message = WRONG[wrong]
    data = json.loads(small_ggt.to_json())
    assert GGT.from_dict(copy.deepcopy(data)) == small_ggt
    apply(data)
    with pytest.raises(ValueError, match=f"expected .*{message}"):
        GGT.from_dict(data)


def test_text_that_is_cut_short_or_something_else(small_ggt):
    text = small_ggt.to_json()
    for cut in (text[: len(text) // 2], "", "tree"):
        with pytest.raises(ValueError, match=r"expected a GGT in JSON, got text that is none .* learn the structure"):
            GGT.from_json(cut)
    for other in ("[]", "3", "null", '{"format": 2}', '{"a": 1}'):
        with pytest.raises(ValueError, match=f"expected a GGT in JSON format {FORMAT}, got"):
            GGT.from_json(other)
    with pytest.raises(ValueError, match=r"a finite score in node 5 .* got -inf"):
        GGT.from_json(text.replace("-2.0", "-Infinity"))


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_tree_comes_back(any_tree, data):
    ggt = GGT(data.draw(any_tree), 6, 20, {"s": 2})
    again = GGT.from_json(ggt.to_json())
    assert again == ggt
    assert again.to_json() == ggt.to_json()


def test_neighbours_come_back_and_make_another_tree():
    plain, near = (Leaf((0, 1), ((), (0,)), -1.0, found) for found in ((), ((1,), (0,))))
    ggt = GGT(near, 2)
    assert GGT.from_json(ggt.to_json()) == ggt != GGT(plain, 2)
    assert GGT(near, 2).fingerprint != GGT(plain, 2).fingerprint
    assert "neighbours" not in GGT(plain, 2).to_json()
