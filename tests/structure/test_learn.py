import contextlib
import importlib.util
import inspect
import pathlib
import subprocess
import sys
import time
import warnings

import docstring_parser
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from threadpoolctl import threadpool_limits
from tqdm.auto import tqdm as module_tqdm

import brainet_pl
from brainet_pl.graphs import rai
from brainet_pl.structure import GGT, FeatureStream, Leaf, PreparedData, find_score, find_test, learn_structure
from brainet_pl.structure.learn import check_memory, physical_memory

TESTS = ["cmi", "g2", "gaussian", "fisher_z"]


def learn(x, **settings):
    return learn_structure(x, progress=False, **settings)


def relabel(node, names):
    """The tree with variables renamed, in a form that does not depend on their order."""
    if isinstance(node, Leaf):
        parents = {
            names[x]: frozenset(names[p] for p in pa) for x, pa in zip(node.variables, node.parents, strict=True)
        }
        return (frozenset(parents.items()), node.score)
    return tuple(
        (frozenset(relabel(a, names) for a in b.ancestors), relabel(b.descendant, names)) for b in node.branches
    )


@pytest.mark.parametrize("test", TESTS)
def test_order_of_columns_and_rows_does_not_matter(features, test):
    expected = relabel(learn(features, test=test, max_order=2).root, range(10))
    rng = np.random.default_rng(0)
    for _ in range(3):
        columns = rng.permutation(10)
        shuffled = features[rng.permutation(len(features))][:, columns]
        assert relabel(learn(shuffled, test=test, max_order=2).root, columns) == expected
        graph = rai(features, test=test)
        assert rai(shuffled, test=test) == graph.permute(columns)


def test_order_does_not_matter_for_categories():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, size=(300, 1)) ^ (rng.random((300, 6)) < 0.2)
    expected = relabel(learn(x, threshold=0.01).root, range(6))
    columns = rng.permutation(6)
    assert relabel(learn(x[rng.permutation(300)][:, columns], threshold=0.01).root, columns) == expected


@pytest.mark.parametrize("test", ["cmi", "gaussian"])
def test_number_of_threads_does_not_matter(features, test):
    with threadpool_limits(1):
        one = learn(features, test=test)
    with threadpool_limits(2):
        assert learn(features, test=test) == one


@settings(max_examples=60, deadline=None)
@given(
    x=hnp.arrays(
        np.float64, st.tuples(st.integers(2, 30), st.integers(1, 6)), elements=st.sampled_from([0, 0, 0.5, 1, 2, -3])
    ),
    s=st.integers(1, 3),
    max_order=st.integers(0, 3),
    test=st.sampled_from(TESTS),
    threshold=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_every_subnetwork_uses_each_input_exactly_once(x, s, max_order, test, threshold):
    ggt = learn(x, s=s, max_order=max_order, test=test, threshold=threshold)
    d = x.shape[1]
    for subnetwork in [ggt.map(), *ggt.sample(5), *ggt.sample_uniform(5), *ggt.sample_bottom_up(2)]:
        leaves = ggt.leaves(subnetwork)
        assert sorted(v for leaf in leaves for v in leaf.variables) == list(range(d))
        dag = ggt.dag(subnetwork)
        assert not dag.diagonal().any()
        assert np.isfinite(ggt.score(subnetwork))
    assert ggt.depth <= max_order + 1
    if s == 1:
        assert ggt.num_subnetworks == 1


@pytest.mark.parametrize(
    ("test", "score"), [("cmi", "bdeu"), ("g2", "bic"), ("gaussian", "bge"), ("fisher_z", "bic"), ("gaussian", "bdeu")]
)
def test_leaf_scores_add_up_to_the_score_of_the_dag(features, test, score):
    """A sub-network's score is the decomposable score of its Bayesian network, computed here from scratch."""
    ggt = learn(features, test=test, score=score, threshold=0.03)
    data = PreparedData.prepare(features, bins=3)
    local = find_score(score, find_test(test).kind).on(data, 1.0)
    place = np.argsort(data.columns)
    for subnetwork in ggt.sample_uniform(3):
        dag = ggt.dag(subnetwork)
        total = sum(local(int(place[x]), tuple(np.sort(place[np.flatnonzero(dag[:, x])]).tolist())) for x in range(10))
        assert ggt.score(subnetwork) == pytest.approx(total, rel=1e-9)


def test_limits_of_the_threshold(features):
    ensemble = learn(features, threshold=0.0, max_order=1)
    assert ensemble.settings["tests"] == 0  # nothing can be separated, so nothing is tested
    assert [len(b.ancestors) for b in ensemble.root.branches] == [0, 0, 0, 0]
    assert ensemble.num_subnetworks == 4
    assert ensemble.num_unique_structures == 1
    empty = learn(features, threshold=1e9)
    assert empty.depth == 1
    assert not empty.dag(empty.map()).any()
    with pytest.raises(ValueError, match="max_order when threshold is 0"):
        learn(features, threshold=0.0, max_order=None)


def test_unlimited_order_ends(features):
    start = time.monotonic()
    ggt = learn(features, max_order=None, threshold=0.01)
    assert time.monotonic() - start < 30
    assert ggt.depth >= 2


def test_budget_gives_a_smaller_valid_tree_and_says_so(features):
    full = learn(features, max_order=3, threshold=0.005)
    with pytest.warns(UserWarning, match="budget was spent"):
        small = learn(features, max_order=3, threshold=0.005, max_tests=60)
    assert small.settings["cut_short"]
    assert len(small.nodes) < len(full.nodes)
    leaves = small.leaves(small.map())
    assert sorted(v for leaf in leaves for v in leaf.variables) == list(range(10))
    with pytest.warns(UserWarning, match="budget was spent"):
        learn(features, max_order=3, threshold=0.005, max_seconds=0.0)


def test_fewer_rows_than_columns_are_said_and_end_soon():
    x = np.random.default_rng(0).normal(size=(3, 300))
    start = time.monotonic()
    for call in (learn_structure, rai):
        settings = {"progress": False} if call is learn_structure else {}
        with pytest.warns(UserWarning, match="more rows than columns, got 3 rows of 300") as said:
            call(x, **settings)
        assert said[0].filename == __file__
    assert time.monotonic() - start < 60


def test_a_budget_spent_in_the_last_order_is_said(features):
    with pytest.warns(UserWarning, match="budget was spent"):
        assert learn(features, s=3, max_order=0, max_tests=15).settings["cut_short"]


def test_many_levels_and_high_orders_fit_in_memory():
    rng = np.random.default_rng(0)
    x = (rng.integers(0, 16, size=(400, 1)) + rng.integers(0, 4, size=(400, 7))) % 16
    graph = rai(x, test="g2", threshold=0.5, max_order=4)
    assert graph.adjacency.shape == (7, 7)


def test_tensor_array_and_integers_are_taken(features):
    assert learn(torch.tensor(features)) == learn(features)
    x = np.random.default_rng(0).integers(0, 3, size=(100, 4))
    x[:, 1] = np.where(np.random.default_rng(1).random(100) < 0.7, x[:, 0], x[:, 1])
    assert rai(x * 7 - 5) == rai(x)  # gaps between codes do not matter
    assert rai(x).skeleton.any()


def test_max_rows_learns_from_a_sample(features):
    ggt = learn(features, max_rows=100)
    assert ggt.num_rows == 100
    assert learn(features[::-1], max_rows=100) == ggt


def test_seeds_differ_and_repeat(features):
    assert learn(features, seed=1) == learn(features, seed=1)
    prints = {learn(features, seed=seed, threshold=0.05).fingerprint for seed in range(5)}
    assert len(prints) > 1


def test_odd_tables_are_handled():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for test in TESTS:
            assert isinstance(learn(x[:, :1], test=test).root, Leaf)  # one column
            learn(np.c_[x, np.ones(50)], test=test)  # a constant column
            learn(np.c_[x, x], test=test)  # copies
            with pytest.warns(UserWarning, match="5 rows of 12"):
                learn(rng.normal(size=(5, 12)), test=test)
            learn(np.ones((10, 3)), test=test)  # nothing varies


@pytest.mark.parametrize(
    ("x", "settings", "message"),
    [
        (np.array([[1.0, np.nan], [0.0, 1.0]]), {}, "1 NaN or infinite values, the first in row 0, column 1"),
        (np.array([[1.0, np.inf], [0.0, 1.0]]), {}, "finite features"),
        (np.empty((0, 3)), {}, r"got \(0, 3\)"),
        (np.zeros(5), {}, "shape"),
        (np.zeros((2, 3, 4)), {}, "flatten"),
        (np.zeros((1, 3)), {}, "at least 2 rows"),
        (np.array([["a", "b"]]), {}, "encode categories"),
        (np.zeros((5, 2)), {"s": 0}, "s of at least 1"),
        (np.zeros((5, 2)), {"bins": 1}, "bins of at least 2"),
        (np.zeros((5, 2)), {"ess": 0.0}, "ess of at least"),
        (np.zeros((5, 2)), {"max_rows": 1}, "max_rows of at least 2"),
        (np.zeros((5, 2)), {"test": "magic"}, "one of cmi, fisher_z, g2, gaussian"),
        (np.zeros((5, 2)), {"score": "aic"}, "one of bdeu, bge, bic for a gaussian test, got 'aic'"),
        (np.zeros((5, 2)), {"threshold": -1.0}, "threshold of at least 0"),
        (np.zeros((5, 2)), {"test": "g2", "threshold": 2.0}, "significance level"),
        (np.zeros((5, 2)), {"max_order": -1}, "max_order of at least 0"),
    ],
)
def test_bad_input_is_named(x, settings, message):
    with pytest.raises(ValueError, match=message):
        learn(x, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bins": 0}, "bins of at least 2 and at most 256, got 0: "),
        ({"bins": 1}, "bins of at least 2 and at most 256, got 1: "),
        ({"bins": -5}, "bins of at least 2 and at most 256, got -5: "),
        ({"bins": 257}, "bins of at least 2 and at most 256, got 257: "),
        ({"bins": 300}, "at most 256, got 300: "),
        ({"bins": "3"}, "bins to be a whole number, got '3': "),
        ({"bins": True}, "bins to be a whole number, got True: "),
        ({"max_rows": -4990}, "max_rows of at least 2, got -4990: "),
        ({"max_rows": 1}, "max_rows of at least 2, got 1: "),
        ({"max_rows": 2.5}, "max_rows to be a whole number, got 2.5: "),
        ({"max_order": -1}, "max_order of at least 0, got -1: "),
        ({"max_order": 0.5}, "max_order to be a whole number, got 0.5: "),
        ({"max_tests": -1}, "max_tests of at least 0, got -1: "),
        ({"max_tests": np.inf}, "max_tests to be a whole number, got inf: None sets no limit"),
        ({"max_seconds": -1.0}, "max_seconds of at least 0, got -1.0: "),
        ({"max_seconds": np.nan}, "max_seconds to be a finite number, got nan: "),
        ({"threshold": "low"}, "expected a threshold .*, got 'low': "),
        ({"threshold": np.inf}, "expected a threshold .*, got inf: "),
    ],
)
def test_wrong_values_are_refused_by_both(features, settings, message):
    for call in (learn, rai):
        with pytest.raises(ValueError, match=message):
            call(features, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"s": 1.5}, "s to be a whole number, got 1.5: "),
        ({"s": "2"}, "s to be a whole number, got '2': "),
        ({"seed": -1}, "seed of at least 0, got -1: "),
        ({"seed": None}, "seed to be a whole number, got None: "),
        ({"ess": np.nan}, "ess to be a finite number, got nan: "),
        ({"ess": "one"}, "ess to be a finite number, got 'one': "),
        ({"score": ""}, "one of bdeu, bge, bic for a gaussian test, got '': "),
        ({"score": 3}, "for a gaussian test, got 3: "),
    ],
)
def test_wrong_values_of_the_tree_are_refused(features, settings, message):
    with pytest.raises(ValueError, match=message):
        learn(features, **settings)


def test_flags_are_flags(features):
    with pytest.raises(ValueError, match="progress to be True or False, got 'no'"):
        learn_structure(features, progress="no")
    with pytest.raises(ValueError, match="second_pass to be True or False, got 0"):
        rai(features, second_pass=0)


def test_256_bins_keep_their_codes():
    x = np.random.default_rng(0).normal(size=(600, 2))
    x[:, 1] = x[:, 0] ** 3
    assert PreparedData.prepare(x, bins=256).table.arities.tolist() == [256, 256]
    assert rai(x, test="cmi", bins=256).skeleton[0, 1]


def test_numbers_of_numpy_are_numbers(features):
    plain = {"s": 2, "max_order": 1, "bins": 3, "seed": 1, "max_rows": 200, "max_tests": 10_000}
    real = {"threshold": 0.25, "ess": 2.0, "max_seconds": 1000.0}
    expected = learn(features, **plain, **real)
    for whole, number in ((np.int64, np.float64), (np.int32, np.float32), (np.uint8, np.float16)):
        settings = {name: whole(value) for name, value in plain.items() if value < 256}
        settings |= {name: number(value) for name, value in real.items()}
        ggt = learn(features, **{**plain, **settings})
        assert ggt.to_json() == expected.to_json()
        assert GGT.from_json(ggt.to_json()).settings == expected.settings
        assert {type(value) for value in ggt.settings.values()} <= {int, float, str, bool}
    assert rai(features, bins=np.int64(3), max_order=np.int32(2), max_rows=np.uint8(200)) == rai(
        features, max_order=2, max_rows=200
    )


@pytest.mark.parametrize("call", [learn_structure, rai])
def test_every_argument_has_its_own_help(call):
    parsed = docstring_parser.parse(call.__doc__)  # as the command line reads it
    assert [p.arg_name for p in parsed.params] == list(inspect.signature(call).parameters)
    assert all(len(p.description) > 15 for p in parsed.params)


def test_the_function_rai_hides_no_module():
    assert importlib.util.find_spec("brainet_pl.graphs.rai") is None
    assert brainet_pl.rai is rai


def test_progress_bar_counts_tests_and_leaves(features, capsys, monkeypatch):
    from brainet_pl.structure import learn as module

    monkeypatch.setattr(
        module, "tqdm", lambda **kw: module_tqdm(**{**kw, "delay": 0, "mininterval": 0, "disable": bool(kw["disable"])})
    )
    learn_structure(features, progress=True)
    shown = capsys.readouterr().err
    assert "learning structure" in shown
    assert "tests" in shown
    assert "leaves=" in shown


def test_summary_fits_a_terminal_and_pictures_are_drawn(features, tmp_path):
    from brainet_pl.structure.draw import draw_ggt, draw_network

    ggt = learn(features, max_order=2, threshold=0.01)
    text = ggt.summary(width=60)
    assert all(len(line) <= 60 for line in text.splitlines())
    assert f"{ggt.num_subnetworks:,} sub-networks" in text
    for name, figure in (("tree", draw_ggt(ggt)), ("network", draw_network(ggt, ggt.map()))):
        path = tmp_path / f"{name}.png"
        figure.savefig(path)
        assert path.stat().st_size > 5000
    single = GGT(Leaf((0,), ((),), 0.0), 1)
    draw_ggt(single)
    draw_network(single, single.map())


def test_more_features_than_memory_has_room_for_are_refused_before_the_work(monkeypatch):
    monkeypatch.setattr(
        "brainet_pl.structure.learn.physical_memory", lambda: 8 * (32 * 10**2 + 50 * 10) + 4096 * 4 * 10
    )
    x = np.random.default_rng(0).normal(size=(50, 11))
    learn_structure(x[:, :10], progress=False)
    many = r"expected at most \d+ features, .* got 11 of 50 samples, .*: give the features of a backbone"
    with pytest.raises(ValueError, match=many):
        learn_structure(x, progress=False)
    with pytest.raises(ValueError, match="got 10 of 500 samples"):
        learn_structure(np.tile(x[:, :10], (10, 1)), progress=False)
    learn_structure(FeatureStream(lambda: [x[:, :10]] * 10), progress=False)  # holds no rows
    monkeypatch.setattr("brainet_pl.structure.learn.physical_memory", lambda: None)  # a machine that does not say
    learn_structure(x, progress=False)


def test_a_container_has_the_memory_that_it_was_given(monkeypatch, tmp_path):
    whole = physical_memory()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("brainet_pl.structure.learn.CONTAINER", (str(limit), str(tmp_path / "none")))
    for text, expected in (("max\n", whole), ("1048576\n", 2**20), (f"{2**70}\n", whole)):
        limit.write_text(text)
        assert physical_memory() == expected


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").is_file(), reason="peaks of memory are read from /proc")
@pytest.mark.parametrize("settings", [{}, {"s": 4}])
def test_the_estimate_of_memory_is_enough_and_less_than_twice_too_much(settings, monkeypatch):
    """In a process of its own, whose peak is that of learning."""
    code = f"""
import numpy as np, pathlib, re
from brainet_pl.structure import learn_structure
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
rng, d = np.random.default_rng(0), 1000
x = (rng.normal(size=(2000, d // 20)).repeat(20, axis=1) + rng.normal(size=(2000, d))).astype(np.float32)
before = peak()
learn_structure(x, progress=False, **{settings})
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    peak = int(done.stdout)
    data = PreparedData.prepare(np.random.default_rng(0).normal(size=(2000, 1000)), 3)
    for memory, fits in ((peak, False), (2 * peak, True)):
        monkeypatch.setattr("brainet_pl.structure.learn.physical_memory", lambda memory=memory: memory)
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="expected at most"):
            check_memory(data, (settings.get("s", 2),) * 2)


@pytest.mark.parametrize("test", ["fisher_z", "g2"])
def test_neighbours_of_a_significance_test_are_the_strongest(test):
    """All strong dependences have p-values of 0, which says nothing about their order."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 1))
    weights = np.array([0.6, 2.0, 0.9, 3.0, 1.4])
    columns = np.hstack([x, weights * x + rng.normal(size=(2000, 5))])
    columns = columns if test == "fisher_z" else (columns > 0).astype(int)
    ggt = learn_structure(columns, test=test, progress=False)
    near = [
        leaf.neighbours[leaf.variables.index(0)] for leaf in ggt.nodes if isinstance(leaf, Leaf) and 0 in leaf.variables
    ]
    assert set(near) == {tuple(1 + np.argsort(-weights))}


def test_the_time_of_a_call_counts_from_its_beginning(monkeypatch):
    """Reading a table takes time too, and what it took is not there for tests any more."""
    prepare = PreparedData.prepare

    def slowly(*args):
        time.sleep(0.3)
        return prepare(*args)

    monkeypatch.setattr(PreparedData, "prepare", staticmethod(slowly))
    x = np.random.default_rng(0).normal(size=(60, 6)).cumsum(axis=1)
    with pytest.warns(UserWarning, match="the budget was spent"):
        assert learn_structure(x, max_seconds=0.3, progress=False).settings["cut_short"]
    assert not learn_structure(x, max_seconds=60, progress=False).settings["cut_short"]
