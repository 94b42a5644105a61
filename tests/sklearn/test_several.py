"""The estimator of several labels: targets in every form, what is promised, and what is kept."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix

from brainet_pl import BRAINetMultiLabelClassifier, ExportedModel, label_matrix
from brainet_pl.metrics.multilabel import share_found
from brainet_pl.tasks import MultiLabel

NAMES = ("coat", "hat", "shoe")


def rows(count, seed):
    """Three labels of six columns, a tenth of them not known; how probable each is."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 6))
    odds = np.stack([2 * x[:, 0] + x[:, 1], 2 * x[:, 2] - 2, x[:, 0] - x[:, 3]], axis=1)
    chances = 1 / (1 + np.exp(-odds))
    y = (rng.random(chances.shape) < chances).astype(float)
    y[rng.random(y.shape) < 0.1] = np.nan
    return x, y, chances


@pytest.fixture(scope="module")
def model():
    x, y, _ = rows(600, 1)
    return BRAINetMultiLabelClassifier(random_state=0, max_epochs=60, members=3).fit(x, pd.DataFrame(y, columns=NAMES))


def test_probabilities_are_near_the_best_and_sets_hold_what_they_promise(model):
    x, y, chances = rows(3000, 2)
    probs, task = model.predict_proba(x), MultiLabel(3)
    nll, best = (task.nll(torch.tensor(p), torch.tensor(y)).mean() for p in (probs, chances))
    assert float(nll - best) < 0.05
    found = share_found(torch.tensor(model.predict_set(x, 0.8)), torch.tensor(y)).nanmean()
    assert abs(float(found) - 0.8) < 0.04
    assert np.array_equal(model.predict(x), (probs >= 0.5).astype(int))
    assert model.predict_labels(x[:1]) == [[n for n, p in zip(NAMES, probs[0], strict=True) if p >= 0.5]]
    assert 0.02 < float((model.known_p(x) <= 0.05).mean()) < 0.08
    assert float((model.known_p(x + 9) <= 0.05).mean()) > 0.95


def test_a_file_says_the_same(model, tmp_path):
    x = rows(50, 3)[0]
    model.save(tmp_path / "model.pt")
    again = BRAINetMultiLabelClassifier.load(tmp_path / "model.pt")
    assert np.array_equal(again.predict_proba(x), model.predict_proba(x))
    assert again.classes_.tolist() == list(NAMES)
    assert np.array_equal(again.predict_set(x), model.predict_set(x))


@pytest.mark.integration
def test_an_exported_folder_says_the_same_by_names(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x = rows(50, 3)[0]
    small = {"random_state": 0, "max_epochs": 5, "members": 1, "num_params": 300, "s": 1}
    train, y, _ = rows(200, 1)
    model = BRAINetMultiLabelClassifier(**small).fit(train, pd.DataFrame(y, columns=NAMES))
    exported = ExportedModel(model.export(tmp_path / "model"))
    found = exported.predict(x)
    np.testing.assert_allclose(found["probabilities"], model.predict_proba(x), rtol=1e-4, atol=1e-6)
    assert np.array_equal(found["set"], model.predict_set(x))
    answers = exported.as_answers(found)
    assert [one["labels"] for one in answers] == model.predict_labels(x)
    assert set(answers[0]["probabilities"]) == set(NAMES)


def test_names_of_labels_and_weights_are_taken():
    x, y, _ = rows(120, 4)
    names = [[name for name, value in zip(NAMES, row, strict=True) if value == 1] for row in y]
    quick = {"random_state": 0, "max_epochs": 2, "members": 2}
    fitted = BRAINetMultiLabelClassifier(**quick).fit(x, names, np.arange(120.0) % 3)
    assert fitted.classes_.tolist() == list(NAMES)
    assert len(fitted.feature_importances_) == 6
    beside = BRAINetMultiLabelClassifier(**quick).fit(x[:80], names[:80], eval_set=(x[80:], names[80:]))
    assert beside.predict(x).shape == (120, 3)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([["hat", "coat"], [], None], NAMES[:2]),
        (["hat; coat", "", None], NAMES[:2]),
        (np.array([[1, 1], [0, 0], [math.nan, math.nan]]), ("0", "1")),
        (pd.DataFrame({"coat": [1, 0, None], "hat": [1, 0, None]}), NAMES[:2]),
        (({"hat", "coat"}, set(), None), NAMES[:2]),
    ],
)
def test_labels_as_people_write_them(given, names):
    matrix, found = label_matrix(given)
    np.testing.assert_array_equal(matrix, [[1, 1], [0, 0], [np.nan, np.nan]])
    assert found == names
    np.testing.assert_array_equal(label_matrix(csr_matrix([[0, 1]]))[0], [[0, 1]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.full((3, 2), 2.0), "labels of 0, 1 or NaN, got 2"),
        (np.zeros((3, 0)), "a column for each label"),
        ([3, 4], "expected the names of the labels of row 0, got 3"),
        ([[], []], "a column for each label"),
    ],
)
def test_what_are_no_labels_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        label_matrix(given)
    with pytest.raises(ValueError, match=r"among coat, got 'hat' too"):
        label_matrix([["hat"]], ["coat"])


def test_bad_labels_of_a_fit_are_told():
    x, y, _ = rows(60, 5)
    model = BRAINetMultiLabelClassifier(random_state=0, max_epochs=1, members=1)
    with pytest.raises(ValueError, match="as many labels as rows, got 59 for 60"):
        model.fit(x, y[:59])
    with pytest.raises(ValueError, match="with and without a label"):
        model.fit(x, np.zeros((60, 2)))
    y[:, 1] = 0
    with pytest.warns(UserWarning, match=r"of 60 training samples has the labels 1 \(from 0\)"):
        model.fit(x, y)
