import math

import numpy as np
import pytest
from scipy.special import gammaln
from scipy.stats import t as student_t

from brainet_pl.structure import PreparedData, Score, find_score, learn_structure
from brainet_pl.structure import score as module
from brainet_pl.structure.discretize import Codes
from brainet_pl.structure.score import BDeu, BGe, DiscreteBIC, GaussianBIC, bdeu, bge, discrete_bic, gaussian_bic
from brainet_pl.structure.statistics import CodeTable, bootstrap_weights, correlation


def random_table(seed, arities=(2, 3, 2, 4, 3), n=80):
    rng = np.random.default_rng(seed)
    codes = np.stack([rng.integers(0, r, size=n) for r in arities], axis=1).astype(np.uint8)
    return Codes(codes, np.array(arities))


def brute_force_bdeu(data, x, parents, ess):
    r, q = int(data.arities[x]), math.prod(int(data.arities[p]) for p in parents)
    counts = {}
    for row in data.codes:
        counts.setdefault(tuple(row[list(parents)]), np.zeros(r))[row[x]] += 1
    total = 0.0
    for n in counts.values():
        total += gammaln(ess / q) - gammaln(ess / q + n.sum())
        total += (gammaln(ess / (q * r) + n) - gammaln(ess / (q * r))).sum()
    return total


@pytest.mark.parametrize("ess", [1.0, 10.0])
@pytest.mark.parametrize("parents", [(), (1,), (0, 3), (1, 2, 3, 4)])
def test_bdeu_is_the_gamma_formula(parents, ess):
    data = random_table(0)
    x = 4 if 4 not in parents else 0
    score = bdeu(CodeTable(data), ess)
    assert score(x, parents) == pytest.approx(brute_force_bdeu(data, x, parents, ess), rel=1e-9)


def test_bdeu_matches_pgmpy():
    estimators = pytest.importorskip("pgmpy.estimators", reason="pgmpy is in the extra `benchmarks`")
    import pandas as pd

    for seed in range(3):
        data = random_table(seed)
        frame = pd.DataFrame(data.codes, columns=[str(j) for j in range(5)])
        names = {str(j): list(range(r)) for j, r in enumerate(data.arities)}
        theirs = estimators.BDeu(frame, state_names=names, equivalent_sample_size=5)
        ours = bdeu(CodeTable(data), 5.0)
        for x, parents in [(0, ()), (1, (0, 2)), (4, (0, 1, 3))]:
            expected = theirs.local_score(str(x), [str(p) for p in parents])
            assert ours(x, parents) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("make", [lambda t: bdeu(t, 2.0), discrete_bic], ids=["bdeu", "bic"])
def test_discrete_scores_do_not_see_the_direction_of_a_covered_edge(make):
    score = make(CodeTable(random_table(1)))
    assert score(0, ()) + score(1, (0,)) == pytest.approx(score(1, ()) + score(0, (1,)), rel=1e-9)


def gaussian_data(seed=0, n=120, d=4):
    rng = np.random.default_rng(seed)
    z = (rng.normal(size=(n, d)) @ rng.normal(size=(d, d))).astype(np.float32)
    return (z - z.mean(0)) / z.std(0)


@pytest.mark.parametrize("make", [lambda c: bge(c, 120, 1.0), lambda c: gaussian_bic(c, 120)], ids=["bge", "bic"])
def test_gaussian_scores_do_not_see_the_direction_of_covered_edges(make):
    score = make(correlation(gaussian_data()))
    forward = score(0, ()) + score(1, (0,)) + score(2, (0, 1))
    backward = score(2, ()) + score(1, (2,)) + score(0, (1, 2))
    assert forward == pytest.approx(backward, rel=1e-9)


def test_bge_of_one_variable_is_a_product_of_student_t_predictions():
    """With one variable the model is normal–gamma: every row given the rows before it is Student t."""
    x = gaussian_data(d=1)[:, 0].astype(np.float64)
    strength = 1.0
    a_w, t0 = 1 + strength + 1, strength * strength / (strength + 1)
    weight, degrees, mean, spread, total = strength, a_w, 0.0, t0, 0.0
    for value in x:
        scale = np.sqrt(spread * (weight + 1) / (weight * degrees))
        total += student_t.logpdf(value, degrees, mean, scale)
        spread += weight / (weight + 1) * (value - mean) ** 2
        mean = (weight * mean + value) / (weight + 1)
        weight, degrees = weight + 1, degrees + 1
    assert bge(correlation(x[:, None].astype(np.float32)), len(x), strength)(0, ()) == pytest.approx(total, rel=1e-5)


def test_gaussian_bic_is_the_regression_likelihood():
    z = gaussian_data().astype(np.float64)
    weights = np.linalg.lstsq(z[:, 1:3], z[:, 0], rcond=None)[0]
    variance = ((z[:, 0] - z[:, 1:3] @ weights) ** 2).mean()
    expected = -60 * (np.log(2 * np.pi * variance) + 1) - 0.5 * np.log(120) * 4
    assert gaussian_bic(correlation(z.astype(np.float32)), 120)(0, (1, 2)) == pytest.approx(expected, rel=1e-5)


def test_hundreds_of_parents_stay_finite():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, size=(50, 1500)).astype(np.uint8)
    table = CodeTable(Codes(codes, np.full(1500, 3)))
    parents = tuple(range(1, 1500))
    for score in (bdeu(table, 1.0), discrete_bic(table)):
        assert np.isfinite(score(0, parents))
    # α below exp(-600) takes a limit form: it must join the exact one
    few, more = (bdeu(table, 1.0)(0, tuple(range(1, k))) for k in (540, 560))
    assert more == pytest.approx(few, rel=1e-6)


@pytest.fixture
def forget(monkeypatch):
    """What a test defines, no other test should find."""
    monkeypatch.setattr(module, "_named", dict(module._named))


def test_a_name_and_the_kind_of_the_test_choose_the_score():
    chosen = {
        (name, kind): find_score(name, kind) for name in ("bdeu", "bge", "bic") for kind in ("discrete", "gaussian")
    }
    assert chosen == {
        ("bdeu", "discrete"): BDeu,
        ("bdeu", "gaussian"): BDeu,
        ("bge", "discrete"): BGe,
        ("bge", "gaussian"): BGe,
        ("bic", "discrete"): DiscreteBIC,
        ("bic", "gaussian"): GaussianBIC,
    }


def test_each_score_computes_its_own_function(features):
    data = PreparedData.prepare(features, bins=3)
    c = correlation(data.scores)
    expected = {BDeu: bdeu(data.table, 2.0), BGe: bge(c, data.n, 2.0)}
    expected |= {DiscreteBIC: discrete_bic(data.table), GaussianBIC: gaussian_bic(c, data.n)}
    for cls, local in expected.items():
        assert cls.on(data, 2.0)(0, (1, 3)) == local(0, (1, 3))
    assert len({cls.on(data, 2.0)(0, (1, 3)) for cls in expected}) == 4


def test_a_score_that_does_not_go_with_the_test_is_refused(features, forget):
    class OnlyGaussian(Score):
        name = "only_gaussian"
        kind = "gaussian"

        @classmethod
        def on(cls, data, ess):
            return lambda x, parents: -float(len(parents))

    message = "one of bdeu, bge, bic for a discrete test, got .*[oO]nly_?[gG]aussian.*: choose one of these"
    for score in ("only_gaussian", OnlyGaussian):
        with pytest.raises(ValueError, match=message):
            learn_structure(features, test="cmi", score=score, progress=False)
        ggt = learn_structure(features, test="gaussian", score=score, progress=False)
        assert ggt.settings["score"] == "only_gaussian"
        assert ggt.score(ggt.map()) == -ggt.dag(ggt.map()).sum()


@pytest.mark.parametrize("unknown", ["aic", "", "BDeu", None, 3, dict, Score])
def test_an_unknown_score_is_refused(unknown):
    for kind in ("discrete", "gaussian"):
        with pytest.raises(ValueError, match=f"one of bdeu, bge, bic for a {kind} test, got .*: choose one"):
            find_score(unknown, kind)


def test_an_incomplete_score_is_refused(forget):
    incomplete = type("Incomplete", (Score,), {"name": "incomplete", "kind": "discrete"})
    for score in ("incomplete", incomplete):
        with pytest.raises(TypeError, match="complete score, got Incomplete without `on`"):
            find_score(score, "discrete")
    with pytest.raises(TypeError, match="declare kind as one of discrete, gaussian, got 'binary'"):
        type("Wrong", (Score,), {"name": "wrong", "kind": "binary"})
    with pytest.raises(ValueError, match=r"free for Other, got \('bic', 'discrete'\), which belongs to .*DiscreteBIC"):
        type("Other", (Score,), {"name": "bic", "kind": "discrete"})


@pytest.mark.parametrize(
    ("name", "kind"), [("bdeu", "discrete"), ("bic", "discrete"), ("bge", "gaussian"), ("bic", "gaussian")]
)
def test_a_sample_is_scored_as_its_rows_would_be(features, name, kind):
    """Weights stand for repeated rows; the levels, or the ranks, stay those of the whole table."""
    data = PreparedData.prepare(features, 3)
    weights = bootstrap_weights(data.n, 0, (1,))
    scoring = find_score(name, kind)
    sample = data.resampled(weights)
    sampled, grown = scoring.on(sample, 1.0), scoring.growth_on(sample, 1.0)
    rows = np.repeat(np.arange(data.n), weights)
    if kind == "discrete":
        table = CodeTable(Codes(data.table.codes[rows], data.table.arities))
        expected = bdeu(table, 1.0) if name == "bdeu" else discrete_bic(table)
    else:
        matrix = correlation(data.scores[rows])
        expected = bge(matrix, data.n, 1.0) if name == "bge" else gaussian_bic(matrix, data.n)
        twice = 2 * np.ones(data.n, dtype=np.int64)
        assert np.allclose(sample.correlation(twice), matrix, atol=1e-5)
        assert np.allclose(correlation(sample.scores), matrix, atol=1e-5)
    assert (sample.n, sample.categories, sample.only_categories) == (data.n, data.categories, data.only_categories)
    for x, parents in ((0, ()), (3, (1,)), (5, (0, 2, 7))):
        assert sampled(x, parents) == pytest.approx(expected(x, parents), rel=1e-5)
        more = np.array([4, 6])
        several = [expected(x, tuple(sorted((*parents, int(c))))) for c in more]
        assert grown(x, parents, more) == pytest.approx(several, rel=1e-5)
        if parents:  # without, standardised numbers all score alike
            assert sampled(x, parents) != pytest.approx(scoring.on(data, 1.0)(x, parents), rel=1e-5)
