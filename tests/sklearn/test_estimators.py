"""The estimators of scikit-learn: its own checks, promises of coverage, files without code."""

import pickle
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_friedman1
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from brainet_pl.scores.reference import p_values
from brainet_pl.sklearn.estimators import BRAINetClassifier, BRAINetRegressor
from brainet_pl.sklearn.fitting import mean_entropy


def blobs(rows, seed):
    """Two classes that overlap, five columns of which the last two hang together."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, rows)
    x = rng.normal(size=(rows, 5)) + y[:, None] * np.array([1.5, 0, 0, 0.5, 0])
    x[:, 4] = x[:, 3] + 0.1 * rng.normal(size=rows)
    return x, y


@pytest.fixture(scope="module")
def classifier():
    return BRAINetClassifier(random_state=0, max_epochs=15).fit(*blobs(2000, 0))


@pytest.fixture(scope="module")
def regressor():
    return BRAINetRegressor(random_state=0, max_epochs=15).fit(*make_friedman1(1000, 8, random_state=0))


def test_probabilities_beat_the_prior_and_repeat(classifier):
    x, y = blobs(1000, 1)
    probs = classifier.predict_proba(x)
    np.testing.assert_allclose(probs.sum(axis=1), 1.0)
    assert classifier.score(x, y) > 0.75
    assert -np.log(probs[np.arange(len(y)), y]).mean() < 0.55  # the prior has 0.69
    np.testing.assert_array_equal(probs, classifier.predict_proba(x))
    np.testing.assert_allclose(probs[::-1], classifier.predict_proba(x[::-1]), rtol=1e-9)  # a view that runs backwards
    again = clone(classifier).fit(*blobs(2000, 0))
    np.testing.assert_array_equal(probs, again.predict_proba(x))
    np.testing.assert_array_equal(classifier.predict(x), classifier.classes_[probs.argmax(axis=1)])


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_sets_hold_the_class_as_often_as_promised(classifier, method, level):
    x, y = blobs(4000, 2)
    covered = classifier.predict_set(x, level, method)[np.arange(len(y)), y].mean()
    # 300 rows held back set the threshold: three deviations of a Beta(300·level, 300·(1 - level)), and of the test.
    assert level - 3 * np.sqrt(level * (1 - level) * (1 / 300 + 1 / 4000)) < covered < 1.0


def test_sets_with_a_threshold_for_each_class(classifier):
    """By hand: of the rows of a class that were held back, the ⌈(n + 1) · level⌉-th smallest 1 - p of the class."""
    x, _ = blobs(400, 2)
    held, target = (values.numpy() for values in classifier.network_.held_out())
    probs, limits = classifier.predict_proba(x), []
    for one in (0, 1):
        doubts = np.sort(1 - held[target == one, one])
        limits.append(doubts[int(np.ceil((len(doubts) + 1) * 0.9)) - 1])
    expected = 1 - probs <= np.array(limits) + 1e-6
    expected[np.arange(len(x)), probs.argmax(axis=1)] = True  # a set always holds the most probable class
    assert (classifier.predict_set(x, 0.9, per_class=True) == expected).all()
    assert (classifier.predict_set(x, 0.9) != expected).any()
    with pytest.warns(UserWarning, match="of each class with finite predictions for a level of 0.9999"):
        assert classifier.predict_set(x, 0.9999, per_class=True).all()


@pytest.mark.parametrize("method", ["scaled", "quantile"])
def test_intervals_hold_the_number_as_often_as_promised(regressor, method):
    x, y = make_friedman1(3000, 8, random_state=1)
    ends = regressor.predict_interval(x, 0.9, method)
    assert (ends[:, 0] <= ends[:, 1]).all()
    covered = ((ends[:, 0] <= y) & (y <= ends[:, 1])).mean()
    # Above it, since the average of five networks is better than each of them, by whose errors the width goes.
    assert 0.9 - 3 * np.sqrt(0.09 * (1 / 150 + 1 / 3000)) < covered < 0.99
    mean, std = regressor.predict(x, return_std=True)
    assert regressor.score(x, y) > 0.7
    assert (std > 0).all()
    np.testing.assert_array_equal(mean, regressor.predict(x))


def test_strange_rows_are_told_and_usual_ones_rarely_accused(classifier, regressor):
    p = classifier.known_p(blobs(4000, 3)[0])
    for level in (0.05, 0.2):
        assert (p <= level).mean() < level + 3 * np.sqrt(level * (1 - level) * (1 / 300 + 1 / 4000))
    torn = blobs(500, 4)[0]
    torn[:, 4] = -torn[:, 4]  # each column as usual, but two that always agreed do not: only the structure can tell
    assert np.median(classifier.known_p(torn)) <= 0.01
    assert regressor.known_p(make_friedman1(200, 8, random_state=2)[0] + 5).max() < 0.05


@pytest.mark.parametrize("fitted", ["classifier", "regressor"])
def test_files_hold_everything_and_no_code(fitted, request, tmp_path):
    model = request.getfixturevalue(fitted)
    x = np.random.default_rng(5).normal(size=(50, model.n_features_in_))
    path = tmp_path / "model.pt"
    model.save(path)
    torch.load(path, weights_only=True)
    again = type(model).load(path)
    final = "predict_proba" if fitted == "classifier" else "predict"
    np.testing.assert_array_equal(getattr(again, final)(x), getattr(model, final)(x))
    np.testing.assert_array_equal(again.known_p(x), model.known_p(x))
    assert again.get_params() == model.get_params()
    assert again.tree_.fingerprint == model.tree_.fingerprint
    pickled = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(getattr(pickled, final)(x), getattr(model, final)(x))
    other = BRAINetRegressor if fitted == "classifier" else BRAINetClassifier
    with pytest.raises(
        ValueError, match=rf"expected an estimator in .*, a {other.__name__} of format \d, got '{type(model).__name__}'"
    ):
        other.load(path)
    with path.open("wb") as file:
        pickle.dump(model, file)  # a pickle may run anything
    with pytest.raises(ValueError, match="when reading"):
        type(model).load(path)
    with pytest.raises(FileNotFoundError, match="expected an estimator at"):
        type(model).load(tmp_path / "nothing.pt")


def test_data_frames_with_text_and_names():
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    colour = rng.choice(["red", "green", "blue"], 300)
    size = rng.normal(size=300) + (colour == "red")
    y = np.where((colour == "red") ^ (size > 1), "yes", "no")
    frame = pandas.DataFrame({"colour": colour, "size": size})
    model = BRAINetClassifier(random_state=0, max_epochs=30, members=2).fit(frame, y)
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.score(frame, y) > 0.85
    assert list(model.feature_names_in_) == ["colour", "size"]
    assert model.encoder_.names == ["colour=blue", "colour=green", "colour=red", "size"]
    assert "colour=red" in model.tree_.names
    np.testing.assert_array_equal(model.predict_proba(frame), model.predict_proba(frame[["size", "colour"]]))
    unseen = frame.assign(colour="violet")
    with pytest.warns(UserWarning, match=rf"in column 'colour': 'violet' \({len(unseen):,} rows\); such a value"):
        assert np.isfinite(model.predict_proba(unseen)).all()
    with pytest.raises(ValueError, match="expected the columns of fit, got none called size"):
        model.predict(frame[["colour"]])
    with pytest.raises(ValueError, match="expected a data frame with the columns colour, size"):
        model.predict(size[:, None])


def test_pipelines_and_grid_search():
    x, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), BRAINetClassifier(random_state=0, max_epochs=10, members=1))
    search = GridSearchCV(pipeline, {"brainetclassifier__s": [1, 2]}, cv=2).fit(x, y)
    assert search.best_score_ > 0.8
    assert cross_val_score(pipeline, x, y, cv=2).min() > 0.8


def test_few_rows_are_all_trained_on():
    x, y = blobs(20, 0)
    with pytest.warns(UserWarning, match="not calibrated, .* expected at least 40 rows to hold some back, got 20"):
        model = BRAINetClassifier(random_state=0, max_epochs=20).fit(x, y)
    assert np.isfinite(model.predict_proba(x)).all()
    with pytest.raises(ValueError, match="expected rows held back in fit for known_p, got none: fit with at least 40"):
        model.known_p(x)
    with pytest.raises(ValueError, match="expected rows held back in fit for predict_set"):
        model.predict_set(x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"passes": 0}, "passes"),
        ({"max_epochs": 0}, "max_epochs"),
        ({"validation_fraction": 1.5}, "validation_fraction"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"batch_size": 1}, "batch_size"),
        ({"s": 0}, "expected s"),
    ],
)
def test_wrong_settings_fail_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        BRAINetClassifier(**settings).fit(*blobs(60, 0))


def test_one_class_and_infinite_values_are_refused():
    x, y = blobs(60, 0)
    with pytest.raises(ValueError, match="expected at least two classes in y, got one class"):
        BRAINetClassifier().fit(x, np.zeros(60, dtype=int))
    x[3, 2] = np.inf
    with pytest.raises(ValueError, match="infinity"):
        BRAINetClassifier().fit(x, y)


FAST = {"random_state": 0, "max_epochs": 15, "members": 2}


def test_numbers_far_from_zero_are_read_in_64_bits():
    x, y = blobs(300, 0)
    moved = x * 1e-3 + 1e9
    plain, other = (BRAINetClassifier(**FAST).fit(rows[:200], y[:200]) for rows in (x, moved))
    scores = [one.score(rows[200:], y[200:]) for one, rows in ((plain, x), (other, moved))]
    assert scores[1] > scores[0] - 0.05  # as good as a coin in 32 bits
    x[7, 2] = 1e300
    with pytest.raises(
        ValueError, match=r"got 1e\+300 in column '2', row 7 \(1 such values in all\): correct the value"
    ):
        BRAINetClassifier(**FAST).fit(x, y)


def test_what_a_column_was_not_in_fit_is_told_and_refuses_no_row():
    pandas = pytest.importorskip("pandas")
    x, y = blobs(100, 0)
    for cylinders in (["4", "6"], [4, 6]):
        frame = pandas.DataFrame({"cylinders": np.array(cylinders)[y], "size": x[:, 1]})
        model = BRAINetClassifier(random_state=0, max_epochs=2, members=2).fit(frame, y)
        odd = pandas.DataFrame({"cylinders": ["4", "rotary"], "size": [0.0, 1.0]})
        with pytest.warns(UserWarning, match="got text in column 'cylinders': 'rotary'"):
            probs = model.predict_proba(odd)
        assert np.isfinite(probs).all()
        np.testing.assert_allclose(probs[:1], model.predict_proba(odd[:1]))


def test_arrays_with_text_are_read_like_data_frames(tmp_path):
    x, y = blobs(100, 0)
    rows = np.array([["red" if label else "blue", number] for label, number in zip(y, x[:, 1], strict=True)], object)
    model = BRAINetClassifier(random_state=0, max_epochs=15, members=2).fit(rows, y)
    assert model.score(rows, y) == 1
    assert not hasattr(model, "feature_names_in_")
    model.save(tmp_path / "model.pt")
    again = BRAINetClassifier.load(tmp_path / "model.pt")
    np.testing.assert_array_equal(again.predict_proba(rows), model.predict_proba(rows))
    with pytest.raises(ValueError, match="expected 2 columns, as in fit, got 1"):
        model.predict(rows[:, :1])


def test_targets_that_teach_nothing_are_told():
    x, _ = blobs(60, 0)
    for missing in (None, np.nan):
        with pytest.raises(ValueError, match="a target in every row, got 30 of 60 without one, the first in row 1"):
            BRAINetClassifier().fit(x, np.array(["a", missing] * 30, dtype=object))
    with pytest.warns(UserWarning, match="every y is 3, so that there is nothing to learn"):
        model = BRAINetRegressor(random_state=0, max_epochs=2).fit(x, np.full(60, 3.0))
    np.testing.assert_allclose(model.predict(x), 3.0)


def test_what_will_be_noticed_is_told(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 300)
    apart = rng.normal(size=(300, 3)) + 8 * np.eye(3)[y]
    settings = {"random_state": 0, "max_epochs": 5, "members": 2}
    clear = BRAINetClassifier(**settings).fit(apart, y)
    assert clear.network_.expected_noticed > 0.8
    assert "of a class left out" in clear.describe_known_p()
    hopeless = BRAINetClassifier(**settings).fit(rng.normal(size=(300, 3)), y)
    assert "do not rely on it here" in hopeless.describe_known_p()
    clear.save(tmp_path / "model.pt")
    assert BRAINetClassifier.load(tmp_path / "model.pt").describe_known_p() == clear.describe_known_p()
    with pytest.warns(UserWarning, match="not calibrated"):
        few = BRAINetClassifier(random_state=0, max_epochs=2).fit(apart[:30], y[:30])
    assert few.describe_known_p().startswith("nothing was held back")


def test_missing_numbers_are_filled_and_marked(tmp_path):
    x, y = blobs(300, 0)
    gone = np.random.default_rng(0).random(300) < 0.3
    y[gone] = 1  # what is missing says more than the number would
    x[gone, 1] = np.nan
    model = BRAINetClassifier(random_state=0, max_epochs=15, members=2).fit(x, y)
    assert model.encoder_.marked.tolist() == [1]
    probs = model.predict_proba(x)
    assert np.median(probs[gone, 1]) > 0.9
    filled = np.where(np.isnan(x), model.encoder_.fill, x)
    assert np.median(model.predict_proba(filled)[gone, 1]) < np.median(probs[gone, 1]) - 0.1
    model.save(tmp_path / "model.pt")
    np.testing.assert_array_equal(BRAINetClassifier.load(tmp_path / "model.pt").predict_proba(x), probs)
    x[0, 4] = np.nan  # no row of `fit` missed one: it is the mean, and nothing more
    mean = x[:1].copy()
    mean[0, 4] = model.encoder_.fill[4]
    np.testing.assert_array_equal(model.predict_proba(x[:1]), model.predict_proba(mean))


def test_rows_count_by_their_weights():
    x, y = blobs(300, 0)
    settings = {"random_state": 0, "max_epochs": 5, "members": 2}
    plain = BRAINetClassifier(**settings).fit(x, y).predict_proba(x)
    ones = BRAINetClassifier(**settings).fit(x, y, sample_weight=np.full(300, 3.0)).predict_proba(x)
    np.testing.assert_allclose(plain, ones, atol=1e-3)  # only how much one counts beside another matters
    kept = np.arange(300) % 3 > 0
    without = BRAINetClassifier(**settings).fit(x[kept], y[kept]).predict_proba(x)
    zero = BRAINetClassifier(**settings).fit(x, y, sample_weight=kept).predict_proba(x)
    np.testing.assert_allclose(without, zero, atol=1e-3)
    heavy = BRAINetClassifier(**settings, class_weight={0: 1, 1: 10}).fit(x, y).predict_proba(x)
    assert heavy[:, 1].mean() > plain[:, 1].mean() + 0.1
    by_rows = BRAINetClassifier(**settings).fit(x, y, sample_weight=np.where(y == 1, 10, 1)).predict_proba(x)
    np.testing.assert_allclose(heavy, by_rows)
    target = x[:, 0].copy()
    target[y == 1] += 5
    lifted = BRAINetRegressor(**settings).fit(x[:, 1:3], target, sample_weight=np.where(y == 1, 100, 1))
    even = BRAINetRegressor(**settings).fit(x[:, 1:3], target)
    assert lifted.predict(x[:, 1:3]).mean() > even.predict(x[:, 1:3]).mean() + 1
    with pytest.raises(ValueError, match="expected at least two rows of a sample_weight above 0, got 1"):
        BRAINetClassifier().fit(x, y, sample_weight=np.arange(300) == 0)


def test_known_rows_are_called_unknown_as_often_as_promised_by_few_of_them():
    shares = []
    for seed in range(3):
        model = BRAINetClassifier(random_state=seed, max_epochs=10).fit(*blobs(100, seed))
        shares.append((model.known_p(blobs(1000, 100 + seed)[0]) <= 0.05).mean())
    assert np.mean(shares) < 0.07  # 48 % on one split of wine, when 20 rows were held back


def test_scores_are_those_of_single_folds_and_few_sub_networks_are_averaged_exactly(classifier):
    network, rows = classifier.network_, classifier.encoded_rows(blobs(40, 9)[0])
    passes = network.passes(rows)
    heads = list(network.head.heads)
    assert len(passes.outputs) == sum(head.ggt.num_subnetworks for head in heads)
    joint = []
    for number in range(network.head.folds):  # the slow way: each fold by itself
        with network.fold(number):
            joint.append(network.all_scores(network.passes(rows))["joint"])
    mean = torch.stack(joint).mean(dim=0)
    torch.testing.assert_close(network.all_scores(passes)["joint"], mean, rtol=1e-4, atol=1e-4)
    expected = p_values(mean, network.scores.reference["joint"])
    assert network.expected.score == "joint"
    np.testing.assert_allclose(network.known_p(rows), expected, atol=1e-6)
    assert network.scores.parts_of("joint") == ("entropy", "generative", "knn")


def test_exact_numbers_of_very_different_size_are_fitted():
    """Targets as of UCI's yacht: a steep function without noise, whose few large values hold most of the variance."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, size=(300, 3))
    y = np.exp(5 * x[:, 0]) * (1 + 0.2 * x[:, 1])
    model = BRAINetRegressor(random_state=0, members=1).fit(x[:240], y[:240])
    error = np.sqrt(np.mean((model.predict(x[240:]) - y[240:]) ** 2))
    assert error < 0.055 * y.std()  # 0.072 with small batches alone


def test_of_many_columns_those_are_read_that_say_something(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 400))
    y = (x[:, 7] + x[:, 70] > 0).astype(int)
    with pytest.warns(UserWarning, match="of 400 columns, those that say most of y"):
        model = BRAINetClassifier(random_state=0, members=2, max_epochs=20).fit(x[:300], y[:300])
    assert model.score(x[300:], y[300:]) > 0.8
    model.save(tmp_path / "model.pt")
    again = BRAINetClassifier.load(tmp_path / "model.pt")
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))
    np.testing.assert_array_equal(again.known_p(x), model.known_p(x))


def test_one_bad_row_blinds_nothing_and_is_named():
    x, y = blobs(210, 0)
    x = x + 5  # so that a row three times as large is a strange one
    settings = {"random_state": 0, "members": 2, "max_epochs": 15}
    clean = BRAINetClassifier(**settings).fit(x, y)
    bad = x.copy()
    bad[0] *= 1000
    with pytest.warns(UserWarning, match="without 1 of 210 training rows, row 0: .* correct or drop them"):
        model = BRAINetClassifier(**settings).fit(bad, y)
    new, labels = blobs(500, 1)
    noticed = [(one.known_p(3 * (new + 5)) <= 0.05).mean() for one in (clean, model)]
    assert min(noticed) > 0.95  # 0 % where scales were those of the bad row
    assert abs(model.score(new + 5, labels) - clean.score(new + 5, labels)) < 0.05
    scales = [one.network_.backbone.model[2].scale for one in (clean, model)]
    torch.testing.assert_close(*scales, rtol=0.1, atol=0.0)


def test_the_average_of_folds_is_as_sure_as_each_of_them(classifier):
    network, rows = classifier.network_, classifier.encoded_rows(blobs(1000, 8)[0])
    before, sharper, factors = network.calibration.tau.clone(), network.sharper.clone(), []
    for start in (1.0, 2.0):
        network.calibration.tau.fill_(start)
        wanted = []
        for number in range(network.head.folds):
            with network.fold(number):
                wanted.append(float(mean_entropy(network.final_rows(rows))))
        network._sharpen_average(rows)
        assert abs(float(mean_entropy(network.final_rows(rows))) - np.mean(wanted)) < 1e-3
        assert float(network.calibration.tau) == start
        factors.append(float(network.sharper))
    network.calibration.tau.copy_(before)
    network.sharper.copy_(sharper)
    assert 0.5 < min(factors) <= max(factors) < 1


def test_time_is_kept():
    x, y = blobs(2000, 0)
    BRAINetClassifier(max_epochs=1).fit(x[:50], y[:50])  # imports take their time once
    before = time.monotonic()
    with pytest.warns(UserWarning, match="the time was over in epoch .* raise max_seconds"):
        model = BRAINetClassifier(random_state=0, max_seconds=3, patience=500).fit(x, y)
    assert time.monotonic() - before < 4.5  # 3.3 on a machine that does nothing else
    assert model.score(x, y) > 0.7
    with pytest.raises(ValueError, match="max_seconds"):
        BRAINetClassifier(max_seconds=0).fit(x, y)


def test_importing_the_estimators_loads_no_torch():
    code = (
        "import sys, brainet_pl.sklearn.estimators; "
        "assert not {'torch', 'pytorch_lightning', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BRAINetClassifier, BRAINetRegressor])
def test_scikit_learns_own_checks(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(kind(max_epochs=30), on_fail=None)
    failed = {result["check_name"]: str(result["exception"]) for result in results if result["status"] == "failed"}
    assert len(results) > 40
    # A row of weight 2 is not the same as two rows: batches and folds are drawn from rows.
    weights = "check_sample_weight_equivalence_on_{}_data"
    assert set(failed) <= {weights.format("dense"), weights.format("sparse")}, failed
    skipped = {result["check_name"] for result in results if result["status"] not in ("passed", "failed")}
    assert skipped <= {"check_array_api_input"}  # it needs SCIPY_ARRAY_API=1 before anything is imported


def test_known_rows_are_as_strange_as_the_rows_held_back(classifier):
    """What is compared was calibrated alike: the sharper temperature of the average moves no p-value."""
    network, rows = classifier.network_, classifier.encoded_rows(blobs(40, 9)[0])
    before = network.known_p(rows)
    sharper = network.sharper.clone()
    assert 0.3 <= float(sharper) <= 1
    network.sharper.fill_(0.3)
    torch.testing.assert_close(network.known_p(rows), before)
    network.sharper.copy_(sharper)
