"""Some training rows that are errors change next to nothing of what is noticed, and are named."""

import warnings

import numpy as np
import pytest
import torch
from sklearn import datasets

from brainet_pl.backbones.extractor import FeatureExtractor
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import Extracted
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.fitting.scores import fit_scores
from brainet_pl.fitting.settle import answer_rows, settle
from brainet_pl.network import Linear
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import KNN, Generative, Mahalanobis, ScoreSet, Verdict
from brainet_pl.scores.reference import fit_surprise
from brainet_pl.scores.robust import far_rows, far_scores
from brainet_pl.sklearn import BRAINetClassifier
from brainet_pl.tasks import Classification

SETS = {"wine": 130, "breast_cancer": 400, "digits": 1000}


def table(name):
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = torch.tensor(x[order], dtype=torch.float32), torch.tensor(y[order])
    spread = x.std(dim=0)
    return x[:, spread > 0] / spread[spread > 0], y


def noticed(x, y, rows, strange, bad):
    """The share of strange rows that is called unknown, and of known ones."""
    x = x.clone()
    x[bad] *= 1000
    train, held = Extracted(BackboneOutput(x[:rows]), y[:rows]), Extracted(BackboneOutput(x[rows:]), y[rows:])
    torch.manual_seed(0)
    head = Linear().build(x.shape[1], int(y.max()) + 1, None)
    scores = [Generative(progress=False), KNN(k=5), Mahalanobis(normalize=False)]
    predictor = Predictor(FeatureExtractor(None), Classification(int(y.max()) + 1), head, scores=scores)
    loader = [(train.features, train.targets)]
    fit_scores(predictor, TrainingFeatures(loader, predictor.backbone), progress=False)
    settle(predictor, answer_rows(predictor, held))
    shares = {}
    for score in ("generative", "knn", "mahalanobis", "combined", "joint"):
        predictor.verdict = Verdict(score=score)
        with torch.no_grad():
            shares[score] = 1 - float(predictor.predict(strange)["known"].float().mean())
    return shares


@pytest.mark.parametrize("name", SETS)
def test_bad_rows_do_not_blind_a_verdict(name):
    x, y = table(name)
    rows = SETS[name]
    strange = 1.5 * (x[rows:] - x.mean(dim=0)) + x.mean(dim=0) + 0.7  # some are noticed, and some are not
    before = noticed(x, y, rows, strange, [])
    bad = torch.arange(0, rows, 100)
    with pytest.warns(UserWarning, match=rf"fitted without {len(bad)} of {rows:,} training rows, rows? 0"):
        after = noticed(x, y, rows, strange, bad)
    for score, share in before.items():
        assert after[score] == pytest.approx(share, abs=0.05), (score, before, after)
    assert 0.15 < max(before.values()) < 1


def test_one_bad_row_does_not_blind_an_estimator():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(210, 5)) @ generator.normal(size=(5, 5))
    y = (x[:, 0] > 0).astype(int)
    shares = []
    for factor in (1, 1000):
        x[0] *= factor
        if factor > 1:
            with pytest.warns(UserWarning, match="fitted without 1 of 210 training rows, row 0"):
                model = BRAINetClassifier(max_epochs=3, random_state=0).fit(x, y)
        else:
            model = BRAINetClassifier(max_epochs=3, random_state=0).fit(x, y)
        shares.append(float((model.known_p(3 * x[1:]) <= 0.05).mean()))
    assert shares[1] == pytest.approx(shares[0], abs=0.05)


def test_errors_among_calibration_samples_do_not_move_the_limit():
    """With them as the strangest known samples, less that is unknown would be called so."""
    generator = torch.Generator().manual_seed(0)
    clean = {"generative": 40 * torch.rand(500, generator=generator), "energy": torch.rand(500, generator=generator)}
    bad = {name: values.clone() for name, values in clean.items()}
    bad["generative"][::100] = 1e6
    limits = []
    for columns in (clean, bad):
        scores = ScoreSet([Generative()], {"energy": "nats"})
        scores.join_for_verdict()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scores.set_reference(dict(columns))
        said = [
            str(one.message) for one in caught if "goes by 495 of 500 held-out samples, without 5" in str(one.message)
        ]
        assert len(said) == (columns is bad)
        assert len(scores.reference["joint"]) == (500 if columns is clean else 495)
        limits.append(float(scores.reference["joint"].quantile(0.95)))
    assert limits[1] == pytest.approx(limits[0], rel=0.03)


def test_what_is_not_finite_or_low_is_no_error():
    usual = torch.linspace(0, 1, 99)
    for last, expected in ((500.0, [99]), (torch.inf, []), (torch.nan, []), (-500.0, []), (3.0, [])):
        assert far_scores([torch.cat([usual, torch.tensor([last])])]).tolist() == expected
    assert not len(far_scores([torch.full((50,), torch.nan)]))


def test_far_rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator)
    x[:, 4] = (torch.rand(400, generator=generator) < 0.01).float()  # a rare category
    x[:, 5] = x[:, 5].exp().square()  # a long tail
    labels = torch.arange(400) % 3
    assert not len(far_rows(x, labels))
    x[7, 0], x[123, 4] = 1e4, -1e3
    assert far_rows(x, labels).tolist() == [7, 123]
    labels[123] = 3  # the only row of its class
    assert far_rows(x, labels).tolist() == [7]
    tails = torch.randn(400, 300, generator=generator) / torch.rand(400, 300, generator=generator)
    assert not len(far_rows(tails, labels))  # where many rows are far, tails are long
    assert not len(far_rows(torch.ones(2, 3), labels[:2]))


def test_a_surprise_does_not_listen_to_a_few_errors():
    known = -torch.rand(1000, generator=torch.Generator().manual_seed(0)).log()  # of an exponential: slope 1
    spoiled = known.clone()
    spoiled[::100] = 1e9
    for values in (known, spoiled):
        surprise = fit_surprise(values)
        assert 0.65 < float(surprise.slope) < 1.2
    assert float(fit_surprise(spoiled)(torch.tensor([12.0]))) > 7
