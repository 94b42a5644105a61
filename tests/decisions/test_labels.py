"""Labels that look wrong: scores against cleanlab, flipped labels found behind several doors, pages that show them."""

import csv

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import nn

from brainet_pl import BRAINetClassifier, BRAINetRegressor, find_label_issues, swap_head, swap_layer
from brainet_pl.decisions import issues_of, label_quality
from brainet_pl.decisions.quality import looks_wrong

cleanlab = pytest.importorskip("cleanlab")


def judged(n=300, classes=4, seed=0, flipped=0.1):
    """Probabilities of which labels are drawn, and labels of which some are flipped."""
    draw = np.random.default_rng(seed)
    logits = 2 * draw.normal(size=(n, classes))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array([draw.choice(classes, p=row) for row in probabilities])
    labels[:classes] = range(classes)
    wrong = draw.random(n) < flipped
    labels[wrong] = (labels[wrong] + 1) % classes
    return probabilities, labels


@pytest.mark.parametrize("seed", range(3))
def test_quality_is_that_of_cleanlab(seed):
    probabilities, labels = judged(seed=seed)
    for ours, theirs in (("self_confidence", "self_confidence"), ("margin", "normalized_margin")):
        expected = cleanlab.rank.get_label_quality_scores(labels, probabilities, method=theirs)
        np.testing.assert_allclose(label_quality(probabilities, labels, ours), expected, atol=1e-12)
    for n, (row, label) in enumerate(zip(probabilities[:50], labels[:50], strict=True)):
        others = max(p for c, p in enumerate(row) if c != label)
        assert label_quality(probabilities, labels, "margin")[n] == pytest.approx((row[label] - others + 1) / 2)


@pytest.mark.parametrize("seed", range(3))
def test_what_looks_wrong_is_what_cleanlab_counts_off_the_diagonal(seed):
    probabilities, labels = judged(seed=seed)
    expected = cleanlab.filter.find_label_issues(
        labels, probabilities, filter_by="confident_learning", n_jobs=1, min_examples_per_class=0
    )
    found = looks_wrong(probabilities, labels)
    assert found.sum() > 10
    assert (found == expected).all()


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_order_of_samples_does_not_matter(seed):
    probabilities, labels = judged(60, seed=seed)
    order = np.random.default_rng(seed).permutation(60)
    one, two = issues_of(probabilities, labels), issues_of(probabilities[order], labels[order])
    assert (order[two.order] == one.order).all()
    assert (one.wrong[order] == two.wrong).all()


def blobs(n=400, seed=0, flipped=0.05):
    """Three classes that overlap a little; gives inputs, labels of which some are flipped, and which."""
    draw = np.random.default_rng(seed)
    y = np.arange(n) % 3
    x = draw.normal(size=(n, 6)).astype(np.float32)
    x[np.arange(n), y] += 3.5
    wrong = draw.random(n) < flipped
    return x, np.where(wrong, (y + 1) % 3, y), wrong


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def behind_swap_head(x, y):
    model = swap_head(network(), (torch.tensor(x), torch.tensor(y)), layers=None, progress=False)
    return find_label_issues(model.fit(max_epochs=3, progress=False), (x, y), progress=False)


def behind_swap_layer(x, y):
    model = network()
    swap_layer(model, (torch.tensor(x), torch.tensor(y)), "2", progress=False)
    return find_label_issues(model, (x, y), progress=False)


def behind_an_estimator(x, y):
    return find_label_issues(BRAINetClassifier(random_state=0, members=3, max_epochs=30).fit(x, y))


@pytest.mark.parametrize("judge", [behind_swap_head, behind_swap_layer, behind_an_estimator])
def test_flipped_labels_are_found(judge, tmp_path):
    x, y, wrong = blobs()
    found = judge(x, y)
    assert (found.label == y).all()
    assert roc_auc_score(wrong, -found.quality) > 0.95
    assert found.wrong[wrong].mean() > 0.5
    assert found.wrong[~wrong].mean() < 0.1
    assert "labels look wrong; the worst is sample" in str(found)
    page = found.save(tmp_path, torch.tensor(x).view(-1, 1, 2, 3), ["a", "b", "c"], top=7)
    assert page.read_text().count("<tr>") == 8
    assert page.read_text().count("data:image/png") == 7
    assert (tmp_path / "labels.png").is_file()
    with (tmp_path / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(y)
    assert rows[0]["label"] in "abc"
    assert int(rows[0]["sample"]) == found.order[0]


def test_a_head_never_judges_what_it_was_trained_on():
    """With labels that say nothing, quality out of fold is that of chance; a head that saw them would remember some."""
    x, _, _ = blobs(240)
    y = np.random.default_rng(5).integers(0, 3, 240)
    found = behind_swap_layer(x, y)
    assert abs(found.quality.mean() - 1 / 3) < 0.06


def test_bad_input():
    x, y, _ = blobs(90)
    with pytest.raises(ValueError, match="expected labels of two classes at the least, got 90 of one"):
        issues_of(np.full((90, 3), 1 / 3), np.zeros(90, int))
    model = network()
    swap_layer(model, (torch.tensor(x), torch.tensor(y)), "2", progress=False)
    with pytest.raises(ValueError, match="expected two classes with 2 samples each at the least, got 1 classes"):
        find_label_issues(model, (x, np.zeros(90, int)), progress=False)
    with pytest.raises(ValueError, match="expected inputs and labels to judge, got None"):
        find_label_issues(model)
    estimator = BRAINetClassifier(random_state=0, members=1, max_epochs=2).fit(x, y)
    with pytest.raises(ValueError, match=r"held back once.*members=5"):
        find_label_issues(estimator)
    with pytest.raises(ValueError, match="expected a classification, got Regression"):
        find_label_issues(BRAINetRegressor(random_state=0, members=1, max_epochs=2).fit(x, x[:, 0]))
    with pytest.raises(ValueError, match="expected a fitted BRAINet"):
        find_label_issues(nn.Linear(2, 2), (x, y))
