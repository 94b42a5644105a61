"""What a user of scikit-learn looks for beside fit and predict."""

import pickle
import warnings

import numpy as np
import pytest
import sklearn
from scipy import sparse
from sklearn.datasets import make_friedman1
from sklearn.model_selection import GroupKFold, cross_validate
from sklearn.utils import get_tags

from brainet_pl.sklearn.answers import quantiles
from brainet_pl.sklearn.estimators import BRAINetClassifier, BRAINetRegressor
from brainet_pl.sklearn.folds import folds_by_group, roles_of

pandas = pytest.importorskip("pandas")
FAST = {"random_state": 0, "max_epochs": 15, "members": 2}


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    colour = rng.choice(["red", "green", "blue"], 400)
    size, noise = rng.normal(size=(2, 400))
    size[rng.random(400) < 0.1] = np.nan
    frame = pandas.DataFrame({"noise": noise, "colour": colour, "size": size})
    return frame, np.where((colour == "red") ^ (np.nan_to_num(size) > 0.5), "yes", "no")


@pytest.fixture(scope="module")
def classifier(table):
    return BRAINetClassifier(random_state=0, max_epochs=40, members=2).fit(*table)


@pytest.fixture(scope="module")
def regressor():
    return BRAINetRegressor(**FAST).fit(*make_friedman1(1000, 8, random_state=0))


def test_log_probabilities(classifier, table):
    np.testing.assert_allclose(np.exp(classifier.predict_log_proba(table[0])), classifier.predict_proba(table[0]))


def test_quantiles_hold_their_shares_and_intervals_have_several_levels(regressor):
    x, y = make_friedman1(3000, 8, random_state=1)
    levels = (0.05, 0.25, 0.5, 0.75, 0.95)
    found = regressor.predict_quantiles(x, levels)
    assert (np.diff(found, axis=1) >= 0).all()
    below = (y[:, None] <= found).mean(axis=0)
    np.testing.assert_allclose(below, levels, atol=0.06)
    ends = regressor.predict_interval(x[:20], [0.5, 0.9])
    assert ends.shape == (20, 2, 2)
    np.testing.assert_array_equal(ends[:, 1], regressor.predict_interval(x[:20], 0.9))
    with pytest.raises(ValueError, match="levels of at least 0 and below 1"):
        regressor.predict_quantiles(x, [1.5])


def test_quantiles_by_hand():
    rng = np.random.default_rng(0)
    held, target = np.stack([rng.normal(size=99), rng.uniform(1, 4, 99)], axis=1), rng.normal(size=99)
    far = sorted((y - mean) / variance**0.5 for (mean, variance), y in zip(held, target, strict=True))
    found = quantiles(np.array([[5.0, 9.0]]), held, target, [0.1, 0.9])
    np.testing.assert_allclose(found, [[5 + 3 * far[9], 5 + 3 * far[89]]])
    with pytest.warns(UserWarning, match="at least 199 rows held back in fit for quantiles of 0.995, got 99"):
        quantiles(np.array([[5.0, 9.0]]), held, target, [0.995])


def test_importances_are_of_what_was_held_back(classifier, table):
    found = classifier.feature_importances_
    assert found.shape == (3,)
    noise, colour, size = found
    assert min(colour, size) > 0.2
    assert abs(noise) < 0.1
    assert classifier.feature_importances_ is found
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.feature_importances_, found)
    assert again._fit_rows is None


def test_importances_are_in_files(classifier, tmp_path):
    found = classifier.feature_importances_
    classifier.save(tmp_path / "model.pt")
    again = BRAINetClassifier.load(tmp_path / "model.pt")
    np.testing.assert_array_equal(again.feature_importances_, found)
    assert again.loss_curve_ == classifier.loss_curve_


def test_an_evaluation_set_stops_and_calibrates(table):
    frame, y = table
    model = BRAINetClassifier(random_state=0, max_epochs=40).fit(frame[:250], y[:250], eval_set=(frame[250:], y[250:]))
    assert len(model.network_.held_target) == 75  # half of it
    assert len(model.loss_curve_) == model.n_iter_
    assert model.score(frame, y) > 0.8
    (fold,) = model._fit_rows.folds
    assert fold.train.max() < 250 <= min(fold.select.min(), fold.held.min())
    with pytest.raises(ValueError, match="expected classes of y in eval_set, got 'maybe' too"):
        model.fit(frame[:250], y[:250], eval_set=(frame[250:], np.full(150, "maybe")))
    with pytest.raises(ValueError, match="an eval_set of at least 20 rows and as many targets, got 150 and 149"):
        model.fit(frame[:250], y[:250], eval_set=(frame[250:], y[251:]))


def test_the_curve_is_that_of_rows_that_select(classifier):
    curve = classifier.loss_curve_
    assert len(curve) == classifier.n_iter_
    assert min(curve) < 0.6 < curve[0] + 0.2


def test_no_group_is_on_both_sides():
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 30, 300)
    for members in (5, 1):
        for fold in roles_of(300, None, groups, members, 0.2, 0):
            assert not set(groups[fold.train]) & set(groups[fold.held])
            if members == 1:
                assert not set(groups[fold.train]) & set(groups[fold.select])
    sizes = np.bincount(folds_by_group(groups, 5, 0))
    assert sizes.max() - sizes.min() < 15
    with pytest.raises(ValueError, match="rows of at least two groups, got 1"):
        folds_by_group(np.zeros(9), 5, 0)


def test_groups_keep_copies_from_vouching(table):
    """Five copies of each row: without groups calibration goes by rows that were learned."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).repeat(5, axis=0), rng.integers(0, 2, 60).repeat(5)
    settings = {"random_state": 0, "max_epochs": 30, "members": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = BRAINetClassifier(**settings).fit(x, y)
        grouped = BRAINetClassifier(**settings).fit(x, y, groups=np.arange(60).repeat(5))
    new = rng.normal(size=(300, 4))
    sure = [one.predict_proba(new).max(axis=1).mean() for one in (plain, grouped)]
    assert sure[1] < 0.65 < sure[0]  # there is nothing to learn


def test_weights_and_groups_are_routed(table):
    frame, y = table
    groups = np.arange(len(y)) // 4
    with sklearn.config_context(enable_metadata_routing=True):
        model = BRAINetClassifier(random_state=0, max_epochs=2, members=2)
        model.set_fit_request(sample_weight=True, groups=True).set_score_request(sample_weight=False)
        found = cross_validate(
            model,
            frame,
            y,
            cv=GroupKFold(2),
            params={"sample_weight": np.ones(len(y)), "groups": groups},
            return_estimator=True,
            error_score="raise",
        )
    for one in found["estimator"]:
        for fold in one._fit_rows.folds:
            assert len(fold.held) % 4 == 0


def test_sparse_matrices_are_written_out():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 5)) * (rng.random((120, 5)) < 0.4)
    y = (x[:, 0] > 0).astype(int)
    model, other = (
        BRAINetClassifier(random_state=0, max_epochs=3, members=2).fit(rows, y) for rows in (x, sparse.csr_matrix(x))
    )
    np.testing.assert_array_equal(model.predict_proba(x), other.predict_proba(sparse.csc_array(x)))
    huge = sparse.csr_matrix((100_000, 10_000))
    with pytest.raises(ValueError, match="cells of a sparse matrix, got 100,000 × 10,000: reduce its columns first"):
        model.fit(huge, np.zeros(100_000))


def test_names_and_the_page_of_a_notebook(classifier):
    names = classifier.get_feature_names_out().tolist()
    assert names == ["noise", "colour=blue", "colour=green", "colour=red", "size", "size missing"]
    page = classifier._repr_html_()
    assert '<td style="text-align:left">3 categories</td>' in page
    assert "number, and whether it is missing" in page
    assert "read as" not in BRAINetClassifier()._repr_html_()
    nasty = pandas.DataFrame({"<b>": np.arange(60.0)})
    model = BRAINetRegressor(random_state=0, max_epochs=1, members=2).fit(nasty, np.arange(60.0))
    assert "&lt;b&gt;" in model._repr_html_()
    assert model._importances is None  # a page asks for every attribute
    assert len(model.feature_importances_) == 1


def test_tags_tell_what_is_taken():
    tags = get_tags(BRAINetClassifier()).input_tags
    assert tags.categorical
    assert tags.string
    assert tags.sparse
    assert tags.allow_nan


@pytest.mark.parametrize("wrong", [0, "two"])
def test_threads(wrong):
    with pytest.raises(ValueError, match="expected n_jobs to be a number of threads"):
        BRAINetClassifier(n_jobs=wrong).fit(np.ones((60, 2)), [0, 1] * 30)
