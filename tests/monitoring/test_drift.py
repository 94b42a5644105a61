"""The drift alarm: its p-values, its bound on false alarms over thousands of clean streams, and what it notices."""

import itertools
import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import beta

from brainet_pl.monitoring import DriftMonitor
from brainet_pl.monitoring.betting import (
    BINS,
    EVEN,
    FALLING,
    HISTOGRAMS,
    OTHERS,
    RATES,
    Capital,
    beta_bets,
    grow,
    histogram_bets,
    urn_p_values,
    waiting,
)
from brainet_pl.monitoring.columns import CUTS, KEEP, TILTS, Columns

STREAMS = 1000
ALPHA = 0.1
MOST = ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / STREAMS)  # false alarms that chance allows


def test_gaps_follow_the_urn_exactly():
    """All orders of 2 held-out and 3 new values are equally likely: the law of their gaps, counted, is the urn's."""
    counted = Counter()
    for order in itertools.permutations(range(5)):
        held, new = order[:2], order[2:]
        counted[tuple(sum(h > x for h in held) for x in new)] += 1
    for gaps, count in counted.items():
        expected, urn = Fraction(1), [1, 1, 1]
        for g in gaps:
            expected *= Fraction(urn[g], sum(urn))
            urn[g] += 1
        assert Fraction(count, math.factorial(5)) == expected
    assert sum(counted.values()) == math.factorial(5)


def slow_p_values(gaps, urn, draws):
    urn, found = list(urn), []
    for g, u in zip(gaps, draws, strict=True):
        found.append((sum(urn[:g]) + u * urn[g]) / sum(urn))
        urn[g] += 1
    return found, urn


def slow_capital(p, falling, horizon):
    """Every starting time by itself: the product of what is paid from then on, weighted by what starts there."""
    bets = beta_bets(np.asarray(p)[:, None], falling)[..., 0]
    idle = waiting(np.arange(len(p) + 1), horizon)
    found = []
    for t in range(1, len(p) + 1):
        started = sum((idle[s] - idle[s + 1]) * bets[s:t].prod(axis=0) for s in range(t))
        found.append(started.mean() + idle[t])
    return found


@pytest.mark.parametrize("horizon", [None, 30, 200])
def test_the_fast_way_is_the_slow_one(horizon):
    rng = np.random.default_rng(0)
    gaps, draws, urn = rng.integers(0, 8, 60), rng.random(60), np.ones(8, dtype=np.int64)
    p, after = urn_p_values(gaps, urn, draws)
    slow, slow_after = slow_p_values(gaps, urn, draws)
    np.testing.assert_allclose(p, slow, rtol=1e-12)
    assert after.tolist() == slow_after
    for falling in (True, False):
        bets = beta_bets(p[:, None], falling)
        capital = Capital.initial(bets.shape[1], 1)
        paths = []
        for start, end in ((0, 1), (1, 25), (25, 60)):  # however inputs come
            capital, path = grow(capital, bets[start:end], start, horizon)
            paths.append(path[:, 0])
        np.testing.assert_allclose(np.exp(np.concatenate(paths)), slow_capital(p, falling, horizon), rtol=1e-9)


def test_capital_beyond_all_numbers_is_that_of_logarithms():
    """S ← (S + start)·f by logarithms, where it grows beyond what a float can hold."""
    rng = np.random.default_rng(5)
    paid = np.exp(rng.normal([40.0, -10.0], 20.0, (37, 3, 2)))
    idle, log, slow = waiting(np.arange(38), None), np.full((3, 2), -np.inf), []
    for t, factor in enumerate(paid):
        log = np.logaddexp(log, np.log(idle[t] - idle[t + 1])) + np.log(factor)
        slow.append(np.logaddexp(np.logaddexp.reduce(log, axis=0) - np.log(3), np.log(idle[t + 1])))
    capital, paths = Capital.initial(3, 2), []
    for start, end in ((0, 20), (20, 37)):
        capital, path = grow(capital, paid[start:end], start, None)
        paths.append(path)
    np.testing.assert_allclose(np.concatenate(paths), slow, rtol=1e-9)
    assert np.max(slow) > 710  # beyond what a float holds
    totals = np.log(paid).cumsum(axis=0)
    np.testing.assert_allclose(capital.total, totals[-1])
    ends = [*range(7, 20, 8), 19, 27, 35, 36]  # after blocks of 8
    best = totals[ends].argmin(axis=0)
    lowest = np.minimum(totals[ends].min(axis=0), 0.0)
    np.testing.assert_allclose(capital.lowest, lowest)
    np.testing.assert_array_equal(capital.since, np.where(lowest < 0, np.array(ends)[best] + 1, 0))


def test_bets_are_densities():
    """So that a bet on a uniform number pays 1 on average."""
    p = np.linspace(0.001, 0.999, 50)
    for falling, shapes in ((True, FALLING), (False, FALLING + OTHERS)):
        paid = beta_bets(p[:, None], falling)[..., 0]
        np.testing.assert_allclose(paid, np.stack([beta.pdf(p, *shape) for shape in shapes], axis=1), rtol=1e-9)
        assert (np.diff(paid, axis=0) <= 0).all() == falling


def test_histograms_know_the_past_alone_and_are_densities():
    p = np.random.default_rng(2).random(50)
    paid, parts, counts = [], [], np.zeros((len(RATES), 2, sum(BINS)))
    for start, end in ((0, 1), (1, 30), (30, 50)):
        part, counts = histogram_bets(np.stack([p, 1 - p], axis=1)[start:end], counts, start)
        parts.append(part[..., 0])
    for bins, keep in HISTOGRAMS:
        column, past = [], np.zeros(bins)
        for value in p:
            density = (past + EVEN / bins) / (past.sum() + EVEN)
            assert density.sum() == pytest.approx(1.0)
            column.append(bins * density[int(value * bins)])
            past *= keep
            past[int(value * bins)] += 1
        paid.append(column)
    np.testing.assert_allclose(np.concatenate(parts), np.array(paid).T, rtol=1e-9)


def draws_of(kind, rng, size):
    if kind == "smooth":
        return rng.normal(size=size)
    if kind == "tied":
        return rng.poisson(1.0, size=size).astype(float)
    return np.where(rng.random(size) < 0.5, 0.0, rng.exponential(size=size))  # half are one value


def known_p(held, values):
    """As a model gives them: conservative where there are ties."""
    return (1 + (held[:, None] >= values[None, :]).sum(axis=0)) / (len(held) + 1)


# -- many columns -----------------------------------------------------------------------------------------------------


def last_capital(order, held):
    """The capital after the last of some values, as one column whose first values are held out."""
    values = np.array(order, dtype=float)[:, None]
    table = Columns(values[:held], np.random.default_rng(0))
    path, _ = table.advance(values[held:], np.full((2, len(order) - held), 0.5), 0, None)
    return math.exp(path[-1])


@pytest.mark.parametrize(("held", "new"), [(1, 4), (3, 3), (4, 2)])
def test_capital_of_columns_is_1_on_average_over_all_orders(held, new):
    """Exactly: every order of held-out and new values is as likely, so that their mean is the expected capital."""
    found = [last_capital(order, held) for order in itertools.permutations(range(held + new))]
    assert np.mean(found) == pytest.approx(1.0, rel=1e-12)
    assert np.std(found) > 0.01  # something was bet


def slow_columns(held, values, ties, draws):
    """Every column, value and bet by itself: (T, d) the capital."""
    n = len(held)
    cuts = np.unique(np.clip(np.rint(np.array(CUTS) * (n + 1)).astype(int), 1, n))
    ends = np.array([0, *cuts, n + 1])
    idle, found = waiting(np.arange(len(values) + 1), None), np.empty(values.shape)
    for j in range(values.shape[1]):
        edges = [sorted(zip(held[:, j], ties, strict=True))[cut - 1] for cut in cuts]
        urn, recent, capital = np.diff(ends).astype(float), np.zeros(len(ends) - 1), np.zeros(5)
        for t, (value, draw) in enumerate(zip(values[:, j], draws, strict=True)):
            b = sum((value, draw) > edge for edge in edges)
            p = ends / (n + 1)
            bets = [np.diff(p**a) for a in TILTS] + [np.diff(1 - (1 - p) ** a) for a in TILTS]
            bets.append((recent + EVEN * np.diff(p)) / (recent.sum() + EVEN))
            assert np.allclose(np.sum(bets, axis=1), 1.0)
            capital = (capital + idle[t] - idle[t + 1]) * [bet[b] / (urn[b] / urn.sum()) for bet in bets]
            urn[b] += 1
            recent *= KEEP
            recent[b] += 1
            found[t, j] = capital.mean() + idle[t + 1]
    return found


def test_columns_at_once_are_columns_one_by_one():
    rng = np.random.default_rng(4)
    held, values = rng.poisson(3.0, (60, 3)).astype(float), rng.poisson(3.5, (90, 3)).astype(float)  # with ties
    draws = rng.random((2, 90))
    table = Columns(held, np.random.default_rng(7))
    ties = np.random.default_rng(7).random((60, 1))[:, 0]
    parts = [table.advance(values[a:b], draws[:, a:b], a, None) for a, b in ((0, 1), (1, 40), (40, 90))]
    slow = slow_columns(held, values, ties, draws[0])
    np.testing.assert_allclose(np.exp(np.concatenate([path for path, _ in parts])), slow.max(axis=1) / 3, rtol=1e-9)
    assert table.leading == slow[-1].argmax()


def test_a_column_that_moves_is_named_and_the_state_goes_through_a_file():
    rng = np.random.default_rng(0)
    held, clean = rng.normal(size=(300, 20)), rng.normal(size=(100, 20))
    moved = rng.normal(size=(60, 20)) + 1.5 * (np.arange(20) == 7)
    reference = {"score": rng.normal(size=300), "features": held}
    monitor = DriftMonitor(reference, seed=2)
    monitor.update({"score": rng.normal(size=100), "features": clean})
    kept = json.loads(json.dumps(monitor.state_dict()))
    given = {"score": rng.normal(size=60), "features": moved}
    state = monitor.update(given)
    assert (state.alarm, state.leading, state.column) == (True, "features", 7)
    assert 100 < state.alarm_at < 140
    assert abs(state.changed_at - 101) < 15
    assert np.mean(state.p_values["features"]) < 0.3
    resumed = DriftMonitor(reference, seed=2)
    resumed.load_state_dict(kept)
    np.testing.assert_array_equal(resumed.update(given).path, state.path)
    with pytest.raises(ValueError, match=r"expected values \(B, 20\) of features"):
        monitor.update({"score": [1.0], "features": [[1.0]]})
    with pytest.raises(ValueError, match="expected the state of a monitor"):
        DriftMonitor(reference | {"features": held[:, :5]}).load_state_dict(kept)
    short = Columns.of("features", held, np.random.default_rng(5))
    again = Columns(json.loads(json.dumps(short.to_dict())), np.random.default_rng(6))
    draws = rng.random((2, 60))
    assert again.advance(moved, draws, 0, None)[0].tolist() == short.advance(moved, draws, 0, None)[0].tolist()


QUICK = {("smooth", "p-values")}  # the others take longer
STREAM_KINDS = itertools.product(
    ["smooth", "tied", "half zero"], ["scores", "p-values", "two scores, horizon", "columns"]
)


@pytest.mark.parametrize(
    ("kind", "given"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in STREAM_KINDS]
)
def test_false_alarms_are_as_rare_as_promised(kind, given):
    """One fixed set of 50 held-out samples a stream, and streams twenty times as long."""
    alarms = 0
    for seed in range(STREAMS):
        rng = np.random.default_rng([seed, len(kind)])
        held, values = draws_of(kind, rng, 50), draws_of(kind, rng, 1000)
        if given == "scores":
            state = DriftMonitor({"score": held}, alpha=ALPHA, seed=seed).update(values)
        elif given == "p-values":
            state = DriftMonitor(50, alpha=ALPHA, seed=seed).update(known_p(held, values))
        elif given == "columns":
            state = DriftMonitor({"all": np.stack([held, held**2], 1)}, alpha=ALPHA, seed=seed).update(
                np.stack([values, values**2], 1)
            )
        else:
            reference, stream = {"one": held, "two": held**2}, {"one": values, "two": values**2}
            state = DriftMonitor(reference, alpha=ALPHA, horizon=1000, seed=seed).update(stream)
        alarms += state.alarm
    print(f"{kind}, {given}: {alarms} false alarms in {STREAMS} streams")
    assert alarms / STREAMS <= MOST


def test_ranks_among_a_fixed_set_would_break_the_promise():
    """Why there is an urn: the same bets on plain conformal p-values find out how 50 samples differ from all."""
    alarms = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        held, values = rng.normal(size=50), rng.normal(size=1000)
        p = ((held[:, None] > values).sum(axis=0) + rng.random(1000)) / 51
        bets = beta_bets(p[:, None], falling=False)
        alarms += grow(Capital.initial(bets.shape[1], 1), bets, 0, None)[1].max() >= -math.log(ALPHA)
    assert alarms / 200 > 3 * ALPHA


def test_p_values_are_uniform_and_independent():
    rng = np.random.default_rng(0)
    first, lagged = [], []
    for seed in range(400):
        monitor = DriftMonitor({"score": rng.poisson(2.0, 20)}, seed=seed)
        p = monitor.update(rng.poisson(2.0, 200)).p_values["score"]
        first.append(p[-1])
        lagged.append(np.corrcoef(p[1:], p[:-1])[0, 1])
    assert abs(np.mean(first) - 0.5) < 4 * math.sqrt(1 / 12 / 400)
    assert abs(np.mean(np.array(first) < 0.1) - 0.1) < 4 * math.sqrt(0.09 / 400)
    assert abs(np.mean(lagged)) < 4 / math.sqrt(400 * 200)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        (lambda rng, n: rng.normal(3.0, size=n), 12),  # much stranger
        (lambda rng, n: rng.normal(1.0, size=n), 60),
        (lambda rng, n: rng.normal(-1.0, size=n), 60),  # more ordinary
        (lambda rng, n: 0.2 * rng.normal(size=n), 60),  # the ends are gone
        (lambda rng, n: rng.normal(np.linspace(0, 3, n)), 200),  # little by little
    ],
)
def test_changes_are_noticed(change, most):
    late, wrong = [], []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        monitor = DriftMonitor({"score": rng.normal(size=500)}, seed=seed)
        assert monitor.update(rng.normal(size=400)).inputs == 400
        state = monitor.update(change(rng, 300))
        late.append((state.alarm_at or 10**9) - 400)
        wrong.append(abs((state.changed_at or 10**9) - 401))
    assert np.median(late) <= most
    assert np.median(wrong) <= most


def test_one_by_one_is_the_same_for_the_p_values_and_it_goes_on_from_a_file():
    rng = np.random.default_rng(1)
    held, values = rng.normal(size=100), np.concatenate([rng.normal(size=50), rng.normal(2.5, size=30)])
    whole = DriftMonitor({"score": held}, seed=3)
    state = whole.update(values)
    assert state.alarm
    assert len(state.path) == len(state.p_values["score"]) == 80
    assert state.path[-1] == pytest.approx(state.evidence)
    assert np.flatnonzero(state.path >= 20)[0] + 1 == state.alarm_at
    again = DriftMonitor({"score": held}, seed=3)
    again.update(values[:40])
    kept = json.loads(json.dumps(again.state_dict()))
    resumed = DriftMonitor({"score": held}, seed=3)
    resumed.load_state_dict(kept)
    assert resumed.update(values[40:]).path.tolist() == again.update(values[40:]).path.tolist()
    whole.reset()
    fresh = whole.update([])
    assert (fresh.inputs, fresh.evidence, fresh.alarm, fresh.alarm_at) == (0, 1.0, False, None)
    with pytest.raises(ValueError, match=r"expected the state of a monitor with .* gaps"):
        DriftMonitor({"score": held[:5]}).load_state_dict(kept)
    older = {name: value for name, value in kept.items() if name != "format"}
    with pytest.raises(ValueError, match=r"in format 2, got None: .* Go on without it"):
        resumed.load_state_dict(older)


def test_nan_is_strange():
    for reference in (50, {"known_p": np.arange(50.0)}):
        state = DriftMonitor(reference).update(np.full(20, np.nan))
        assert state.alarm, reference
    seen_before = DriftMonitor({"score": np.where(np.arange(50) < 25, np.nan, 0.0)})
    assert not seen_before.update(np.where(np.arange(60) % 2, np.nan, 0.0)).alarm


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DriftMonitor({}), "expected at least one signal to watch, got none"),
        (lambda: DriftMonitor(0), "expected validation samples behind known_p of at least 1"),
        (lambda: DriftMonitor({"a": []}), "expected held-out values of a, got none"),
        (lambda: DriftMonitor(5, alpha=0.0), "expected alpha between 0 and 1"),
        (lambda: DriftMonitor(5, horizon=0), "expected horizon of at least 1"),
        (lambda: DriftMonitor({"a": [1.0]}, weights={"b": 1.0}), "expected weights of a, got those of b"),
        (lambda: DriftMonitor(5).update(1.5), "expected p-values between 0 and 1, got 1.5"),
        (lambda: DriftMonitor({"a": [1.0], "b": [1.0]}).update([1.0]), "by name, got one column"),
        (lambda: DriftMonitor({"a": [1.0], "b": [1.0]}).update({"a": [1.0]}), "got none of b"),
        (lambda: DriftMonitor({"a": [1.0], "b": [1.0]}).update({"a": [1.0], "b": []}), "as many values of every"),
        (lambda: DriftMonitor({"a": [1.0]}).update([[1.0]]), "expected values .B,. of a"),
    ],
)
def test_what_cant_be_meant_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
