"""Risk control: thresholds against MAPIE and loops, promises kept over many draws, refusals that say what would do."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mapie.risk_control import BinaryClassificationController, control_fwer
from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value

from brainet_pl.calibration import Promise, RiskControl, risk
from brainet_pl.calibration.risk import LIMITS, find_limit, least_rows, p_values, parts_of_delta, passed


def answers(n, seed=0, classes=4, sure=2.0):
    """Probabilities that are right, and labels drawn from them."""
    draw = torch.Generator().manual_seed(seed)
    probs = (sure * torch.randn(n, classes, generator=draw)).softmax(1)
    return probs, torch.multinomial(probs, 1, generator=draw).squeeze(1)


def kept(n=2000, **settings_):
    control = RiskControl()
    control.keep(*answers(n, **settings_))
    return control


def wrong_among(control, final, target, known=None):
    """The share of wrong ones among those answered, and the share answered."""
    chosen = control(final, known)["answered"]
    wrong = final.argmax(1) != target
    return float(wrong[chosen].double().mean()) if chosen.any() else 0.0, float(chosen.double().mean())


# -- thresholds -------------------------------------------------------------------------------------------------------


def test_p_values_are_those_of_mapie_and_of_a_sum():
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 400, 60)
    bad = (counts * draw.random(60) * 0.3).astype(int)
    found = p_values(bad, counts, 0.05)
    share = np.maximum(bad - 1e-9, 0) / counts  # MAPIE rounds n times the share up, and so at times k to k + 1
    mapie = compute_hoeffding_bentkus_p_value(share, counts, 0.05, binary=True)[:, 0]
    np.testing.assert_allclose(found, mapie, rtol=1e-9)
    for k, n, p in zip(bad[:20].tolist(), counts[:20].tolist(), found[:20], strict=True):
        slow = sum(math.comb(n, i) * 0.05**i * 0.95 ** (n - i) for i in range(k + 1))
        assert p == pytest.approx(slow, rel=1e-9)


@given(st.lists(st.floats(1e-6, 0.2), min_size=3, max_size=25), st.sampled_from([0.01, 0.05, 0.1]))
@settings(max_examples=100, deadline=None)
def test_the_procedure_lies_between_those_of_mapie(p, delta):
    """With all of delta at the start it is fixed-sequence testing; with even parts it rejects what Bonferroni does."""
    p, first, even = np.asarray(p), np.zeros(len(p)), np.full(len(p), 1 / len(p))
    first[0] = 1.0
    assert np.flatnonzero(passed(p, delta, first)).tolist() == control_fwer(p, delta, "fixed_sequence").tolist()
    assert set(control_fwer(p, delta, "bonferroni")) <= set(np.flatnonzero(passed(p, delta, even)))


def test_the_limit_is_that_of_mapies_controller():
    """Selective classification is the precision of "is right" by confidence."""
    final, target = answers(1500, seed=3, sure=4.0)
    confidence, right = final.max(1).values.numpy(), (final.argmax(1) == target).numpy()
    controller = BinaryClassificationController(
        lambda x: np.stack([1 - x[:, 0], x[:, 0]], axis=1),
        risk="precision",
        target_level=0.9,
        confidence_level=0.95,
        fwer_method="bonferroni",
        list_predict_params=LIMITS[:-1],
    )
    controller.calibrate(confidence[:, None].astype(np.float64), right.astype(int))
    counts = (confidence[:, None] >= LIMITS[:-1]).sum(0)
    wrong = (~right[:, None] & (confidence[:, None] >= LIMITS[:-1])).sum(0)
    ours = LIMITS[:-1][p_values(wrong, counts, 0.1) <= 0.05 / len(LIMITS[:-1])]
    assert 0 < len(ours) < len(LIMITS) - 1
    np.testing.assert_allclose(sorted(controller.valid_predict_params), sorted(ours))


def test_the_limit_against_loops():
    final, target = answers(800, seed=5)
    confidence, wrong = final.max(1).values.numpy(), (final.argmax(1) != target).numpy()
    best, handed = math.inf, 0.0
    for limit, part in zip(LIMITS, parts_of_delta(), strict=True):
        rows = [bool(w) for c, w in zip(confidence, wrong, strict=True) if c >= limit]
        n, k = len(rows), sum(rows)
        p = sum(math.comb(n, i) * 0.1**i * 0.9 ** (n - i) for i in range(k + 1)) if n else 1.0
        handed = handed + part if p <= 0.05 * (part + handed) else 0.0
        best = float(limit) if handed else best
    assert find_limit(confidence, np.ones(800, bool), wrong, 0.1, 0.05) == best < math.inf


# -- promises ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.floats(0.01, 0.5), st.floats(0.01, 0.5), st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_stricter_promise_never_answers_more(seed, one, two, per_class):
    control, (new, _) = kept(600, seed=seed, sure=3.0), answers(200, seed=seed + 1, sure=3.0)
    strict, loose = sorted((one, two))
    for less, more in (((strict, 0.1), (loose, 0.1)), ((0.1, strict), (0.1, loose))):
        answered = []
        for error, delta in (less, more):
            try:
                control.control(error, delta, per_class=per_class)
                answered.append(control(new)["answered"])
            except ValueError:
                answered.append(torch.zeros(200, dtype=torch.bool))
        assert bool((answered[1] | ~answered[0]).all())


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_the_order_of_rows_does_not_matter(seed):
    final, target = answers(500, seed=seed, sure=3.0)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(seed))
    one, two = RiskControl(), RiskControl()
    one.keep(final, target)
    two.keep(final[order], target[order])
    assert one.control(0.2) == two.control(0.2)
    assert torch.equal(one.limits, two.limits)


@pytest.mark.parametrize(
    ("rows", "error", "delta", "sure"), [(300, 0.1, 0.1, 4.0), (1000, 0.05, 0.05, 4.0), (300, 0.2, 0.2, 2.0)]
)
def test_the_promise_is_broken_no_more_often_than_delta(rows, error, delta, sure):
    """The true risk of what is answered is a mean over many fresh rows."""
    fresh, broken, draws = answers(50_000, seed=10**6, sure=sure), 0, 150
    wrong, confidence = fresh[0].argmax(1) != fresh[1], fresh[0].max(1).values
    true = {float(limit): float(wrong[confidence >= limit].double().mean()) for limit in LIMITS}
    for seed in range(draws):
        final, target = answers(rows, seed=seed, sure=sure)
        bad = (final.argmax(1) != target).numpy()
        limit = find_limit(final.max(1).values.numpy(), np.ones(rows, bool), bad, error, delta)
        broken += limit < math.inf and true[limit] > error
    assert broken <= draws * (delta + 2 * math.sqrt(delta * (1 - delta) / draws))


def test_each_class_keeps_it():
    control, (new, target) = kept(8000, sure=3.0), answers(20_000, seed=9, sure=3.0)
    new, target = torch.cat([new, new[:, [1, 0, 2, 3]]]), torch.cat([target, target])
    control.keep(new[::2], target[::2])  # classes 0 and 1 are mixed up in half of the rows
    promise = control.control(0.15, per_class=True)
    assert promise.silent == 2
    answered, said, wrong = control(new)["answered"], new.argmax(1), new.argmax(1) != target
    assert not answered[said < 2].any()
    for c in (2, 3):
        assert float(wrong[answered & (said == c)].double().mean()) < 0.15


def test_of_a_class_few_are_missed():
    control, (new, target) = kept(4000, sure=2.0), answers(50_000, seed=9)
    promise = control.control(0.05, missed=2)
    assert "of class 2 as another" in str(promise)
    answered, said = control(new)["answered"], new.argmax(1)
    missed = (answered & (said != 2) & (target == 2)).sum() / (target == 2).sum()
    assert 0.01 < float(missed) < 0.05
    assert bool(answered[said == 2].all())  # this answer misses none


def test_what_the_verdict_does_not_know_is_not_answered():
    control, (final, target) = RiskControl(), answers(3000, sure=4.0)
    known = torch.arange(3000) % 3 > 0
    broken = torch.where(known, target, 3 - target)
    control.keep(final, broken, known)
    promise = control.control(0.05)
    risk_, share = wrong_among(control, final, broken, known)
    assert risk_ < 0.05
    assert share == pytest.approx(promise.share)
    assert not control(final, known)["answered"][~known].any()


def test_no_promise_no_answered_and_nan_is_not_answered():
    control, (final, _) = kept(), answers(4)
    assert control(final) == {}
    control.control(0.2)
    final[1] = math.nan
    assert not bool(control(final)["answered"][1])


def test_it_travels_in_a_state_dict_and_withdraws_what_other_rows_promised():
    control, (new, _) = kept(sure=4.0), answers(100, sure=4.0)
    promise = control.control(0.05)
    other = RiskControl()
    other.load_state_dict(control.state_dict())
    assert other.promise == promise
    assert torch.equal(other(new)["answered"], control(new)["answered"])
    wanted = RiskControl(0.2)
    wanted.load_state_dict(control.state_dict())  # it wants another error than the file has
    assert wanted.promise.error == 0.2
    with pytest.warns(UserWarning, match="nothing is answered: expected at least 72 calibration rows"):
        other.keep(*answers(30))
    assert not other(new)["answered"].any()
    RiskControl().load_state_dict({})  # of a version that kept no rows


def test_the_curve_is_what_is_promised():
    control = kept(sure=3.0)
    errors = np.array([0.001, 0.05, 0.1, 0.2])
    shares = control.curve(errors)
    assert shares[0] == 0
    assert [control.control(error).share for error in errors[1:]] == shares[1:].tolist()


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [0, 1, -0.1, True, "a", math.nan])
def test_an_error_that_no_rows_can_promise(error):
    with pytest.raises(ValueError, match=r"expected error above 0 and below 1, got .*0\.01 needs 368 calibration rows"):
        kept().control(error)


@pytest.mark.parametrize("delta", [0, 1])
def test_a_delta_that_no_rows_can_promise(delta):
    with pytest.raises(ValueError, match=r"expected delta above 0 and below 1, got [01]: 0.05 is to be 95 % sure"):
        kept().control(0.1, delta)


@pytest.mark.parametrize("error", [0.02, 0.1])
def test_the_number_of_rows_that_would_do_does(error):
    """All right and sure: with one row less there is a refusal that names this number and an error that would do."""
    n = least_rows(error, 0.05)
    probs, labels = torch.tensor([[0.96, 0.04], [0.04, 0.96]]).repeat(n, 1), torch.tensor([0, 1]).repeat(n)
    control = RiskControl()
    control.keep(probs[:n], labels[:n])
    assert control.control(error).share == 1
    control = RiskControl()
    control.keep(probs[: n - 1], labels[: n - 1])
    with pytest.raises(ValueError, match=f"at least {n} calibration rows .* got {n - 1}") as refusal:
        control.control(error)
    control.control(float(re.search(r"error of at least ([\d.]+)", str(refusal.value))[1]))


def test_an_error_that_would_do_does():
    control = kept(500, sure=1.0)
    with pytest.raises(ValueError, match="wrong answers among the surest 183: an error of") as refusal:
        control.control(0.02)
    would = float(re.search(r"an error of ([\d.]+) would do", str(refusal.value))[1])
    assert 0 < control.control(would).share <= 1
    with pytest.raises(ValueError, match="would do"):
        control.control(0.9 * would)


def test_all_labels_wrong_one_class_and_none():
    final, target = answers(400)
    control = RiskControl()
    control.keep(final, (final.argmax(1) + 1) % 4)
    with pytest.raises(ValueError, match=r"183 wrong ones among the surest 183 of 400 .*check the labels"):
        control.control(0.02)
    control.keep(final, torch.full_like(target, 2))
    with pytest.raises(ValueError, match="expected calibration rows of two classes at the least, got 400 of class 2"):
        control.control(0.1)
    with pytest.raises(ValueError, match="got none: fit with held-out data, 183 rows or more"):
        RiskControl().control()
    with pytest.raises(ValueError, match="expected per_class or missed, got both"):
        kept().control(0.1, per_class=True, missed=1)
    with pytest.raises(ValueError, match="missed"):
        kept().control(0.1, missed=4)


def test_the_sentence():
    assert str(Promise(0.005, 0.1, 0.5, 100)) == "answers 50 % of inputs, at most 0.5 % wrong, 90 % sure"
    assert "(2 classes are never answered)" in str(Promise(0.1, 0.1, 0.5, 100, per_class=True, silent=2))
    assert risk.percent(1.0) == "100 %"
