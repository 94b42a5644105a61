"""Calibration, selective prediction and separation against numpy, sklearn, torchmetrics and slow twins."""

import math
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.metrics import roc_curve as sklearn_roc
from torchmetrics.classification import MulticlassCalibrationError

from brainet_pl.metrics.catalogue import SEPARATION
from brainet_pl.metrics.curves import (
    N_BINS,
    adaptive_calibration_error,
    calibration_error,
    calibration_sums,
    coverage_at_risk,
    detection_risk,
    generalized_risk,
    risk_coverage,
    separation,
)
from brainet_pl.metrics.measures import CalibrationError

# -- separation -------------------------------------------------------------------------------------------------------

numbers = st.sampled_from([0.0, 0.1, 0.1, 0.5, 1.0, -3.0, 1e30, float("inf"), float("-inf"), 1 / 3])


@settings(max_examples=200, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=30), st.lists(numbers, min_size=1, max_size=30))
def test_against_sklearn_with_ties_and_infinities(known, unknown):
    got = separation(torch.tensor(known), torch.tensor(unknown))
    # sklearn takes no infinities: ranks keep the order and the ties
    scores = np.unique(np.array(known + unknown, dtype=np.float32), return_inverse=True)[1].astype(float)
    labels = np.r_[np.zeros(len(known)), np.ones(len(unknown))]
    fpr, tpr, _ = sklearn_roc(labels, scores, drop_intermediate=False)
    assert got["AUROC"] == pytest.approx(roc_auc_score(labels, scores))
    assert got["AUPR_out"] == pytest.approx(average_precision_score(labels, scores))
    assert got["AUPR_in"] == pytest.approx(average_precision_score(1 - labels, -scores))
    assert got["FPR95"] == pytest.approx(fpr[tpr >= 0.95].min())
    assert got["DetErr"] == pytest.approx((0.5 * (fpr + 1 - tpr)).min())
    assert (got["n_id"], got["n_ood"]) == (len(known), len(unknown))


def test_bad_scores_are_named():
    with pytest.raises(ValueError, match="expected scores of unknown inputs, got none"):
        separation(torch.rand(3), torch.empty(0))
    with pytest.raises(ValueError, match="1 NaN of known inputs"):
        separation(torch.tensor([0.0, float("nan")]), torch.rand(3))


def test_every_measure_has_a_direction():
    beside = {"AUROC_full", "SCOD"}  # by the record, where there are shifts and classes
    assert list(separation(torch.rand(3), torch.rand(4))) == [name for name in SEPARATION if name not in beside]


# -- selective prediction ---------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.2, 0.5, 0.9]), st.booleans()), min_size=1, max_size=12))
def test_risk_coverage_is_the_mean_over_all_orders_of_ties(samples):
    groups = {}
    for score, wrong in samples:
        groups.setdefault(score, []).append(float(wrong))
    if np.prod([math.factorial(len(g)) for g in groups.values()]) > 5000:
        return
    curves = []
    for order in product(*(list(permutations(groups[score])) for score in sorted(groups))):
        wrong = np.concatenate([np.array(part) for part in order])
        curves.append(np.cumsum(wrong) / np.arange(1, len(wrong) + 1))
    got = risk_coverage(torch.tensor([s for s, _ in samples]), torch.tensor([w for _, w in samples]).float())
    np.testing.assert_allclose(got, np.mean(curves, axis=0), atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.2, 0.9]), st.booleans()), min_size=1, max_size=40))
def test_the_adaptive_error_shares_out_ties(samples):
    """Against bins that are filled one after the other, with shares of the groups of equal confidences."""
    gaps = {p: [hit - p for q, hit in samples if q == p] for p in sorted({p for p, _ in samples})}
    sizes = [len(part) for part in np.array_split(np.arange(len(samples)), min(N_BINS, len(samples)))]
    left = [[np.mean(gap), len(gap)] for gap in gaps.values()]
    total = 0.0
    for size in sizes:
        inside = 0.0
        while size:
            taken = min(size, left[0][1])
            inside, size, left[0][1] = inside + taken * left[0][0], size - taken, left[0][1] - taken
            left = left if left[0][1] else left[1:]
        total += abs(inside)
    got = adaptive_calibration_error(
        torch.tensor([p for p, _ in samples]), torch.tensor([float(h) for _, h in samples])
    )
    assert float(got) == pytest.approx(total / len(samples), abs=1e-6)


def test_right_as_often_as_it_says_is_calibrated_in_any_order():
    """Half of the answers of confidence ½ are right; it was .48 for sorted and .27 for shuffled ones."""
    hits = torch.arange(100) % 2.0
    for order in (hits.argsort(), torch.randperm(100), torch.arange(100)):
        assert float(adaptive_calibration_error(torch.full((100,), 0.5), hits[order])) == pytest.approx(0, abs=1e-7)


@settings(max_examples=100, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=20), st.lists(numbers, min_size=1, max_size=20), st.randoms())
def test_separation_in_any_order(known, unknown, random):
    wrong = [float(random.random() < 0.5) for _ in known]
    pairs = list(zip(known, wrong, strict=True))
    before = separation(torch.tensor(known), torch.tensor(unknown))
    before["SCOD"] = detection_risk(torch.tensor(known), torch.tensor(wrong), torch.tensor(unknown))
    random.shuffle(pairs)
    random.shuffle(unknown)
    known, wrong = (torch.tensor(part) for part in zip(*pairs, strict=True))
    after = separation(known, torch.tensor(unknown))
    after["SCOD"] = detection_risk(known, wrong, torch.tensor(unknown))
    assert after == pytest.approx(before, abs=1e-9)


# -- calibration ------------------------------------------------------------------------------------------------------


def error_of(confidence, correct, n_bins=N_BINS):
    """The definition, in 64 bits and one bin after the other; bins are those of the 32-bit product."""
    place = np.minimum((np.float32(confidence) * np.float32(n_bins)).astype(int), n_bins - 1)
    p, hit = np.float32(confidence).astype(np.float64), correct.astype(np.float64)
    gaps = (abs(hit[place == b].mean() - p[place == b].mean()) * (place == b).mean() for b in set(place.tolist()))
    return sum(gaps)


confidences = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 1 / 15, 14 / 15, 1.0 - 2**-24]), st.floats(0, 1, width=32))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(confidences, st.booleans()), min_size=1, max_size=60), st.integers(0, 60))
def test_calibration_error_against_numpy_and_in_any_batches(samples, cut):
    confidence = torch.tensor([p for p, _ in samples])
    correct = torch.tensor([float(hit) for _, hit in samples])
    parts = [calibration_sums(confidence[part], correct[part]) for part in (slice(0, cut), slice(cut, None))]
    assert float(parts[0][:, 0].sum() + parts[1][:, 0].sum()) == len(samples)
    expected = error_of(confidence.numpy(), correct.numpy())
    assert float(calibration_error(parts[0] + parts[1])) == pytest.approx(expected, abs=1e-9)


def test_confidences_of_exactly_0_and_1_and_empty_bins():
    sums = calibration_sums(torch.tensor([0.0, 1.0, 1.0, 1.0000001]), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert sums[0].tolist() == [1, 0, 1]
    assert sums[-1].tolist() == [3, 3, 2]
    assert sums[1:-1].abs().sum() == 0
    assert float(calibration_error(sums)) == (1 + 1) / 4
    assert sums.dtype == torch.float64


@pytest.mark.parametrize("classes", [2, 5, 10])
@pytest.mark.parametrize("concentration", [0.05, 0.5, 5.0])
def test_calibration_error_against_torchmetrics(classes, concentration):
    """Theirs has a bin of its own for a confidence of 1, and edges rounded another way; elsewhere both agree."""
    rng = np.random.default_rng(classes)
    p = torch.tensor(rng.dirichlet(np.full(classes, concentration), size=2000), dtype=torch.float32)
    away = ((p.amax(dim=1) * N_BINS) % 1 - 0.5).abs() < 0.5 - 1e-4
    p, y = p[away], torch.tensor(rng.integers(0, classes, int(away.sum())))
    assert len(p) > 500
    ours, theirs = CalibrationError(), MulticlassCalibrationError(classes, n_bins=N_BINS, norm="l1")
    for a, b in zip(p.split(300), y.split(300), strict=True):
        ours.update(a, b)
        theirs.update(a, b)
    assert float(ours.compute()) == pytest.approx(float(theirs.compute()), abs=1e-6)


def test_sums_of_many_confidences_keep_their_digits():
    """32 bits would lose the third digit of a million equal terms."""
    sums = calibration_sums(torch.full((1_000_000,), 0.9), torch.ones(1_000_000))
    assert float(calibration_error(sums)) == pytest.approx(1 - float(torch.tensor(0.9)), abs=1e-9)


def test_leading_dimensions_are_kept_apart():
    confidence, correct = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)), torch.ones(3, 40)
    together = calibration_error(calibration_sums(confidence, correct))
    apart = [calibration_error(calibration_sums(a, b)) for a, b in zip(confidence, correct, strict=True)]
    torch.testing.assert_close(together, torch.stack(apart))


# -- selective prediction ---------------------------------------------------------------------------------------------


def selective(seed, n=60, levels=12):
    draw = np.random.default_rng(seed)
    return draw.integers(levels, size=n) / levels, (draw.random(n) < 0.3).astype(float), draw.random(n) + 0.1


@pytest.mark.parametrize("seed", range(6))
def test_generalized_risk_by_its_closed_form(seed):
    """AUGRC = (1 - AUROC of errors) · accuracy · error + error² / 2 (Traub et al. 2024, eq. 8)."""
    score, wrong, _ = selective(seed)
    error = wrong.mean()
    pairs = [(a > b) + 0.5 * (a == b) for a in score[wrong == 1] for b in score[wrong == 0]]
    expected = (1 - np.mean(pairs)) * (1 - error) * error + error**2 / 2
    assert generalized_risk(torch.tensor(score), torch.tensor(wrong)) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(6))
def test_weights_are_copies_of_samples(seed):
    score, wrong, _ = selective(seed)
    copies = np.random.default_rng(seed).integers(1, 5, size=len(score))
    many = [torch.tensor(np.repeat(v, copies)) for v in (score, wrong)]
    few = torch.tensor(score), torch.tensor(wrong)
    weight = torch.tensor(copies)
    assert generalized_risk(*few, weight) == pytest.approx(generalized_risk(*many))
    assert coverage_at_risk(*few, 0.2, weight) == pytest.approx(coverage_at_risk(*many, 0.2))


@pytest.mark.parametrize("risk", [0.0, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_coverage_at_risk_by_trying_every_threshold(seed, risk):
    score, wrong, weight = selective(seed)
    best = 0.0
    for threshold in score:
        kept = score <= threshold
        if (weight * wrong)[kept].sum() <= risk * weight[kept].sum() + 1e-12:
            best = max(best, weight[kept].sum() / weight.sum())
    found = coverage_at_risk(torch.tensor(score), torch.tensor(wrong), risk, torch.tensor(weight))
    assert found == pytest.approx(best)


def test_nan_can_not_be_ranked():
    for function in (generalized_risk, coverage_at_risk):
        with pytest.raises(ValueError, match="without NaN"):
            function(torch.tensor([0.1, torch.nan]), torch.tensor([0.0, 1.0]))
