"""Trees on disk: keys that see what matters, files that are whole, and the number that must follow the algorithm."""

import json
import warnings

import numpy as np
import pytest
import torch

from brainet_pl._utils.shared import warn_if_shared
from brainet_pl.structure import GGT, Branch, Leaf, Node, cache, find_test, learn_structure
from brainet_pl.structure.cache import ALGORITHM, cache_key, load, store
from brainet_pl.structure.independence import PartialCorrelation
from brainet_pl.structure.settings import StructureSettings

# The trees of `integer_table` and the ALGORITHM they belong to. When a change of the learner makes this test fail, the
# trees that users have cached are not those that it would learn now: raise ALGORITHM, and update both here.
KNOWN_ALGORITHM = 6
KNOWN_VERSIONS = {"cmi": 1, "g2": 2, "gaussian": 1, "fisher_z": 2}
KNOWN_TREES = {
    "cmi": "3c8f0c2f72d51a96",
    "g2": "5915c6bf226abac1",
    "gaussian": "35a8d6e208351daf",
    "fisher_z": "fb6d644785201735",
}


def integer_table():
    """(600, 7) small integers: each column repeats an earlier one most of the time, so no test is a close call."""
    rng = np.random.default_rng(20)
    x = rng.integers(0, 4, size=(600, 7))
    for j, (cause, share) in enumerate([(0, 0), (0, 0.8), (0, 0), (1, 0.8), (2, 0.8), (2, 0.75), (5, 0.8)]):
        repeats = rng.random(600) < share
        x[repeats, j] = x[repeats, cause]
    return x


def without_scores(node):
    """The tree with all scores 0: floats may differ in their last digit between machines."""
    if isinstance(node, Leaf):
        return Leaf(node.variables, node.parents, 0.0, node.neighbours)
    branches = (Branch(tuple(map(without_scores, b.ancestors)), without_scores(b.descendant)) for b in node.branches)
    return Node(node.variables, tuple(branches))


def test_learned_trees_belong_to_the_number_of_the_algorithm():
    learned, versions = {}, {test: find_test(test).version for test in KNOWN_TREES}
    for test in KNOWN_TREES:
        ggt = learn_structure(integer_table(), test=test, max_order=2, progress=False)
        learned[test] = GGT(without_scores(ggt.root), ggt.num_variables, ggt.num_rows).fingerprint
    assert (ALGORITHM, versions, learned) == (KNOWN_ALGORITHM, KNOWN_VERSIONS, KNOWN_TREES), (
        "learned trees or brainet_pl.structure.cache.ALGORITHM have changed: if the trees differ from KNOWN_TREES, "
        f"raise ALGORITHM (now {ALGORITHM}), or the `version` of the tests whose trees differ (now {versions}): cached "
        f"trees are then learned again. Set KNOWN_ALGORITHM or KNOWN_VERSIONS to it and KNOWN_TREES to {learned}"
    )


def test_the_table_of_known_trees_has_no_close_calls():
    """A threshold a little higher or lower gives the same trees, so rounding on another machine can't change them."""
    for test in ("cmi", "gaussian"):
        found = learn_structure(integer_table(), test=test, max_order=2, progress=False)
        again = learn_structure(
            integer_table(), test=test, threshold=found.settings["threshold"] * 1.001, max_order=2, progress=False
        )
        assert without_scores(again.root) == without_scores(found.root)
    for test, default in (("cmi", 0.02), ("g2", 0.01), ("gaussian", 0.05), ("fisher_z", 0.01)):
        trees = {
            without_scores(learn_structure(integer_table(), test=test, threshold=t, max_order=2, progress=False).root)
            for t in (default * 0.999, default, default * 1.001)
        }
        assert len(trees) == 1


def test_the_key_sees_data_and_settings(features, monkeypatch):
    key = cache_key(features, StructureSettings())
    assert len(key) == 16
    assert int(key, 16) >= 0
    rng = np.random.default_rng(0)
    assert cache_key(features[rng.permutation(len(features))], StructureSettings()) == key
    assert cache_key(torch.tensor(features), StructureSettings(s=[4, np.int64(1)], test="gaussian")) == key
    assert (
        cache_key(features, StructureSettings(score="bge", threshold="auto", bootstrap="half", test="auto")) == key
    )  # as the defaults are
    changed = features.copy()
    changed[3, 2] += 1e-9
    others = [
        cache_key(changed, StructureSettings()),
        cache_key(features[:, ::-1], StructureSettings()),
        cache_key(features, StructureSettings(s=3)),
        cache_key(features, StructureSettings(seed=1)),
        cache_key(features, StructureSettings(threshold=0.02)),
        cache_key(features, StructureSettings(test="g2")),
        cache_key(features, StructureSettings(bootstrap="paper")),
        cache_key(features, StructureSettings(score="bic")),
        cache_key(features, StructureSettings(max_rows=50)),
    ]
    monkeypatch.setattr(cache, "ALGORITHM", ALGORITHM + 1)
    others.append(cache_key(features, StructureSettings()))
    assert len({key, *others}) == len(others) + 1


def test_the_key_tells_categories_from_numbers():
    x = np.random.default_rng(0).integers(0, 5, size=(50, 3))
    assert cache_key(x, StructureSettings()) != cache_key(x.astype(float), StructureSettings())


def test_the_key_tells_a_test_from_one_derived_of_it(features):
    derived = type("Derived", (PartialCorrelation,), {})
    changed = type("Derived", (PartialCorrelation,), {"version": 2})
    keys = {
        cache_key(features, StructureSettings(test=test)) for test in ("gaussian", PartialCorrelation, derived, changed)
    }
    assert len(keys) == 3


def test_a_setting_that_is_none_is_refused():
    with pytest.raises(TypeError, match="straps"):
        StructureSettings(straps=3)
    with pytest.raises(ValueError, match="one of cmi, fisher_z, g2, gaussian"):
        StructureSettings(test="magic")


def test_what_is_stored_is_loaded(small_ggt, tmp_path):
    path = tmp_path / "new" / "folder" / "tree.json"
    assert load(path) is None
    store(path, small_ggt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(path) == small_ggt
        assert load(str(path)).fingerprint == small_ggt.fingerprint
    store(path, small_ggt.only(small_ggt.map()))
    assert load(path).num_subnetworks == 1
    assert [p.name for p in path.parent.iterdir()] == ["tree.json"]


@pytest.mark.parametrize("content", ["", "{", '{"format": 1}', "[1, 2]", "cut", b"\xff\xfe\x00", b"\x80PK"])
def test_a_file_that_is_no_tree_is_set_aside(small_ggt, tmp_path, content):
    path = tmp_path / "tree.json"
    text = small_ggt.to_json()[:-20] if content == "cut" else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(UserWarning, match=r"set .*tree.json aside as tree.json.bad and go on without it: "):
        assert load(path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["tree.json.bad"]
    assert load(path) is None  # without a second warning
    store(path, small_ggt)
    assert load(path) == small_ggt


def test_a_write_that_fails_leaves_the_old_file(small_ggt, tmp_path, monkeypatch):
    path = tmp_path / "tree.json"
    store(path, small_ggt)
    monkeypatch.setattr(cache.os, "replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store(path, small_ggt.only(small_ggt.map()))
    assert [p.name for p in tmp_path.iterdir()] == ["tree.json"]
    assert load(path) == small_ggt


# -- caches that others write to --------------------------------------------------------------------------------------


def test_a_tree_under_the_name_of_another_is_set_aside(small_ggt, tmp_path):
    store(tmp_path / "one.json", small_ggt)
    (tmp_path / "two.json").write_bytes((tmp_path / "one.json").read_bytes())
    with pytest.warns(UserWarning, match=r"set .*two.json aside .*: expected the tree that was learned for two, as it"):
        assert load(tmp_path / "two.json") is None
    assert load(tmp_path / "one.json", small_ggt.num_variables) == small_ggt
    with pytest.warns(UserWarning, match=r"expected a tree of 64 variables, got one of"):
        assert load(tmp_path / "one.json", 64) is None


def test_a_changed_tree_is_set_aside(small_ggt, tmp_path):
    path = tmp_path / "one.json"
    store(path, small_ggt)
    content = json.loads(path.read_text())
    leaf = next(node for node in content["nodes"] if "score" in node)
    leaf["score"] += 1.0
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="expected the tree that was learned for one"):
        assert load(path) is None


@pytest.mark.parametrize("entry", [None, 3, "x", [], {}, {"key": "one"}])
def test_a_tree_without_its_key_is_set_aside(small_ggt, tmp_path, entry):
    (tmp_path / "one.json").write_text(json.dumps(small_ggt.to_dict() | {"cache": entry}))
    with pytest.warns(UserWarning, match="expected the tree that was learned for one"):
        assert load(tmp_path / "one.json") is None


def test_the_file_is_a_tree_for_everyone(small_ggt, tmp_path):
    store(tmp_path / "one.json", small_ggt)
    assert GGT.from_json((tmp_path / "one.json").read_text()) == small_ggt


def test_a_folder_that_all_may_write_to_is_said_once(tmp_path):
    tmp_path.chmod(0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_shared(tmp_path, "trees")
        warn_if_shared(tmp_path / "none", "trees")
        tmp_path.chmod(0o777)
        with pytest.warns(UserWarning, match="trees are taken from .*, to which every user of this machine may write"):
            warn_if_shared(tmp_path, "trees")
        warn_if_shared(tmp_path, "trees")
