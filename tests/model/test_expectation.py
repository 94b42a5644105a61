"""A fit says by which score unknown inputs are told and how many it expects to notice, and its checkpoint knows."""

import logging
import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet
from brainet_pl._utils.framework import ModelCheckpoint
from brainet_pl.network import Linear
from brainet_pl.scores import Generative, Verdict
from brainet_pl.scores.expectation import Expectation


def loaders(numbers=False, held=120):
    generator = torch.Generator().manual_seed(0)
    means = 4 * torch.randn(4, 5, generator=generator)
    y = torch.arange(240 + held) % 4
    x = means[y] + torch.randn(len(y), 5, generator=generator)
    target = x.sum(dim=1) if numbers else y
    return [DataLoader(TensorDataset(x[rows], target[rows]), 40) for rows in (slice(0, 240), slice(240, None))]


def fitted(tmp_path, quiet_trainer, numbers=False, held=120, **settings):
    what = {"task": "Regression"} if numbers else {"num_classes": 4}
    model = BRAINet(**what, head=Linear(), scores=[Generative(progress=False)], **settings)
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    trainer = quiet_trainer(tmp_path, checkpoint)
    trainer.fit(model, *loaders(numbers, held))
    return model, trainer, checkpoint.last_model_path


def test_a_fit_says_it_logs_it_and_its_checkpoint_carries_it(tmp_path, quiet_trainer, caplog):
    with caplog.at_level(logging.INFO):
        model, trainer, path = fitted(tmp_path, quiet_trainer)
    found = model.predictor.expected
    assert 0.5 < found.noticed <= 1
    assert str(found) in caplog.text
    assert float(trainer.callback_metrics["verdict/noticed"]) == pytest.approx(found.noticed)
    assert {name for name in trainer.callback_metrics if name.startswith("verdict/")} == {
        "verdict/noticed",
        "verdict/noticed_worst",
        "verdict/permuted",
    }
    again = BRAINet.load_from_checkpoint(path)
    assert str(again.predictor.expected) == str(found)
    assert again.predictor.expected_noticed == pytest.approx(found.noticed)


def test_a_checkpoint_from_before_loads_without_it(tmp_path, quiet_trainer):
    model, _, _ = fitted(tmp_path, quiet_trainer)
    state = {name: value for name, value in model.state_dict().items() if ".expected." not in name}
    assert len(state) == len(model.state_dict()) - 2
    again = BRAINet(4, head=Linear(), scores=[Generative(progress=False)])
    again.predictor.build_head(again.head_settings, 5)
    again.load_state_dict(state)
    assert again.predictor.expected is None
    assert math.isnan(again.predictor.expected_noticed)


def test_the_verdict_goes_by_the_score_that_was_chosen(tmp_path, quiet_trainer):
    model, _, _ = fitted(tmp_path, quiet_trainer)
    predictor, x = model.eval().predictor, 3 * torch.randn(50, 5)
    for name in ("generative", "energy", "joint"):
        predictor.scores.expected.keep(Expectation(name))
        with torch.no_grad():
            answer = predictor.predict(x)
        reference = predictor.scores.reference[name]
        expected = (1 + (reference[None] >= answer[name][:, None]).sum(1)) / (len(reference) + 1)
        torch.testing.assert_close(answer["known_p"], expected.to(answer["known_p"]))
    predictor.verdict = Verdict(score="entropy")  # what a user names wins
    assert predictor.scores.verdict_score(answer, predictor.verdict) == "entropy"


def test_a_score_that_the_user_names_is_the_one_that_is_judged(tmp_path, quiet_trainer):
    model, _, _ = fitted(tmp_path, quiet_trainer, verdict=Verdict(score="entropy", level=0.1))
    assert (model.predictor.expected.score, model.predictor.expected.level) == ("entropy", 0.1)


def test_a_regression_permutes_columns(tmp_path, quiet_trainer):
    model, trainer, _ = fitted(tmp_path, quiet_trainer, numbers=True)
    assert math.isnan(model.predictor.expected.noticed)
    assert 0 <= float(trainer.callback_metrics["verdict/permuted"]) <= 1
    assert "verdict/noticed" not in trainer.callback_metrics


def test_too_few_held_out_samples_are_said(tmp_path, quiet_trainer, caplog):
    with caplog.at_level(logging.INFO):
        fitted(tmp_path, quiet_trainer, held=12)
    assert "by 12 held-out samples none can be called unknown, give at least 19" in caplog.text
