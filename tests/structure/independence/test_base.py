"""The family of tests: declared by a class, found by a name, and nothing falls through."""

import numpy as np
import pytest

from brainet_pl.graphs import rai
from brainet_pl.structure import GGT, IndependenceTest, PreparedData, find_test, learn_structure
from brainet_pl.structure.independence import ConditionalMutualInformation, FisherZ, GSquare, PartialCorrelation, base
from brainet_pl.structure.statistics import correlation


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What a test defines here, no other test should find."""
    monkeypatch.setattr(base, "_named", dict(base._named))


def define_toy(**attributes):
    """A test of one's own: the absolute correlation against a threshold; condition sets are ignored."""

    class Toy(IndependenceTest):
        name = "toy"
        kind = "gaussian"
        unit = "nats"
        default_threshold = 0.3
        default_score = "bge"

        def __init__(self, margins):
            self.margins = margins

        @classmethod
        def on(cls, data, weights, threshold):
            return cls(np.abs(correlation(data.scores, weights)) - threshold)

        def block(self, condition, left, right):
            return self.margins[np.ix_(left, right)]

        def pairs(self, x, y, conditions):
            return self.margins[x, y]

    return type("Own", (Toy,), attributes) if attributes else Toy


def test_what_the_four_tests_declare():
    declared = {
        name: (cls := find_test(name), cls.kind, cls.unit, cls.default_threshold, cls.default_score)
        for name in ("cmi", "g2", "gaussian", "fisher_z")
    }
    assert declared == {
        "cmi": (ConditionalMutualInformation, "discrete", "nats", 0.02, "bdeu"),
        "g2": (GSquare, "discrete", "significance level", 0.01, "bdeu"),
        "gaussian": (PartialCorrelation, "gaussian", "nats", 0.05, "bge"),
        "fisher_z": (FisherZ, "gaussian", "significance level", 0.01, "bge"),
    }


@pytest.mark.parametrize("name", ["cmi", "g2", "gaussian", "fisher_z"])
def test_a_class_is_as_good_as_its_name(features, name):
    chosen = find_test(name)
    by_name = learn_structure(features, test=name, progress=False)
    by_class = learn_structure(features, test=chosen, progress=False)
    assert by_class == by_name
    assert by_class.settings == by_name.settings
    assert rai(features, test=chosen) == rai(features, test=name)
    bound = chosen.on(PreparedData.prepare(features, bins=3), None, chosen.default_threshold)
    assert rai(10, test=bound).skeleton.sum() == rai(features, test=name, climb=False).skeleton.sum()


def test_a_test_of_ones_own_is_used_by_its_name(features):
    toy = define_toy()
    assert find_test("toy") is toy
    ggt = learn_structure(features, test="toy", progress=False)
    assert (ggt.settings["test"], ggt.settings["threshold"], ggt.settings["score"]) == ("toy", 0.3, "bge")
    assert GGT.from_json(ggt.to_json()) == ggt
    data = PreparedData.prepare(features, bins=3)
    dependent = np.abs(correlation(data.scores)) > 0.3
    place = np.argsort(data.columns)
    expected = dependent[np.ix_(place, place)] & ~np.eye(10, dtype=bool)
    assert 0 < expected.sum() < 90
    np.testing.assert_array_equal(rai(features, test="toy").skeleton, expected)
    np.testing.assert_array_equal(rai(features, test=toy).skeleton, expected)


@pytest.mark.parametrize("unknown", ["magic", "", "G2", None, 3, dict, object])
def test_an_unknown_test_is_refused_by_both(features, unknown):
    message = r"expected test to be .*, got"
    with pytest.raises(ValueError, match=message):
        learn_structure(features, test=unknown, progress=False)
    with pytest.raises(ValueError, match=message):
        rai(features, test=unknown)


def test_the_refusal_lists_what_there_is():
    with pytest.raises(ValueError, match=r"one of cmi, fisher_z, g2, gaussian or a subclass .* got 'magic': choose"):
        find_test("magic")
    define_toy()
    with pytest.raises(ValueError, match="one of cmi, fisher_z, g2, gaussian, toy or"):
        find_test("magic")


@pytest.mark.parametrize("missing", ["on", "block", "pairs"])
def test_an_incomplete_test_can_not_be_used(features, missing):
    complete = {
        "on": classmethod(lambda cls, data, weights, threshold: cls()),
        "block": lambda self, condition, left, right: np.ones((len(left), len(right))),
        "pairs": lambda self, x, y, conditions: np.ones(len(x)),
    }
    declared = {"kind": "discrete", "unit": "nats", "default_threshold": 0.1, "default_score": "bdeu"}
    del complete[missing]
    incomplete = type("Incomplete", (IndependenceTest,), {"name": "incomplete", **declared, **complete})
    with pytest.raises(TypeError, match="abstract"):
        incomplete()
    for test in ("incomplete", incomplete):
        for use in (learn_structure, rai):
            with pytest.raises(TypeError, match=f"complete independence test, got Incomplete without {missing}"):
                use(features, test=test)


def test_the_base_itself_can_not_be_used(features):
    with pytest.raises(TypeError, match="without block, on, pairs"):
        rai(features, test=IndependenceTest)
    with pytest.raises(NotImplementedError, match="define `on`"):
        IndependenceTest.on(PreparedData.prepare(features, bins=3), None, 0.1)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": ""}, "name to be a name, got ''"),
        ({"name": "x", "kind": "discreet"}, "kind to be 'discrete' or 'gaussian', got 'discreet'"),
        ({"name": "x", "unit": "bits"}, "unit to be 'nats' or 'significance level', got 'bits'"),
        ({"name": "x", "default_score": None}, "default_score to be a name, got None"),
        ({"name": "x", "default_threshold": "low"}, "default_threshold to be a number, got 'low'"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_stands(attributes, message):
    with pytest.raises(TypeError, match=message):
        define_toy(**attributes)
    with pytest.raises(ValueError, match="expected test to be one of"):
        find_test("x")


def test_a_name_belongs_to_one_class():
    with pytest.raises(ValueError, match=r"got 'gaussian', which belongs to .*PartialCorrelation: choose another name"):
        define_toy(name="gaussian")
    assert find_test("gaussian") is PartialCorrelation
    first, second = define_toy(), define_toy()  # the same class defined anew, as in a notebook
    assert first is not second
    assert find_test("toy") is second


def test_a_subclass_without_a_name_of_its_own_does_not_take_its_parents_place():
    quiet = type("Quiet", (PartialCorrelation,), {})
    assert find_test("gaussian") is PartialCorrelation
    assert find_test(quiet) is quiet


@pytest.mark.parametrize("name", ["cmi", "g2", "gaussian", "fisher_z"])
def test_thresholds_are_checked_in_the_unit_of_the_test(name):
    cls = find_test(name)
    assert cls.check_threshold(None) == cls.default_threshold
    assert type(cls.check_threshold(np.float32(0.5))) is float
    for wrong in (-0.1, np.nan, np.inf, "low"):
        with pytest.raises(ValueError, match=f"threshold .* for the test '{name}', got .*: None takes"):
            cls.check_threshold(wrong)
    if cls.unit == "nats":
        assert cls.check_threshold(7) == 7.0
    else:
        with pytest.raises(ValueError, match="between 0 and 1"):
            cls.check_threshold(7)


def test_the_level_of_fisher_z_falls_with_the_number_of_pairs():
    assert find_test("fisher_z").check_threshold(None, 100) == pytest.approx(1 / 4950)
    assert find_test("g2").check_threshold(None, 100) == 0.01
    assert find_test("fisher_z").check_threshold(0.3, 100) == 0.3
    wide = np.random.default_rng(0).normal(size=(200, 40))
    settings = learn_structure(wide, test="fisher_z", s=1, progress=False).settings
    assert settings["threshold"] == pytest.approx(1 / 780)
    noise = np.random.default_rng(1).normal(size=(300, 100))
    assert rai(noise, test="fisher_z").skeleton.sum() / 2 < 5  # one is expected, a fixed 0.05 finds dozens
    assert rai(noise, test="fisher_z", threshold=0.05, climb=False).skeleton.sum() / 2 > 24


def test_what_is_given_beside_a_test_object_is_not_silently_ignored(features):
    bound = GSquare.on(PreparedData.prepare(features, bins=3), None, 0.05)
    for settings in ({"threshold": 0.1}, {"max_rows": 100}, {"climb": True}):
        with pytest.raises(ValueError, match=f"no {next(iter(settings))} beside a test object"):
            rai(10, test=bound, **settings)
    with pytest.raises(
        ValueError, match=r"expected features to be a whole number, got a ndarray: .* number of variables"
    ):
        rai(features, test=bound)
    assert rai(np.int64(10), test=bound).adjacency.shape == (10, 10)
