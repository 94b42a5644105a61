"""A fit says by which score unknown inputs are told and how many it expects to notice, and its checkpoint knows."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet
from brainet_pl._utils.framework import ModelCheckpoint
from brainet_pl.network import Linear
from brainet_pl.scores import Generative, Verdict


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
    assert 0.5 < found.share <= 1
    assert 0 <= found.low <= found.noticed <= found.high
    assert str(found) in caplog.text
    assert float(trainer.callback_metrics["verdict/noticed"]) == pytest.approx(found.share)
    assert {name for name in trainer.callback_metrics if name.startswith("verdict/")} == {
        "verdict/noticed",
        "verdict/noticed_low",
        "verdict/noticed_high",
        "verdict/permuted",
    }
    again = BRAINet.load_from_checkpoint(path)
    assert str(again.predictor.expected) == str(found)
    assert again.predictor.expected_noticed == pytest.approx(found.share)


def test_a_score_that_the_user_names_is_the_one_that_is_judged(tmp_path, quiet_trainer):
    model, _, _ = fitted(tmp_path, quiet_trainer, verdict=Verdict(score="entropy", level=0.1))
    assert (model.predictor.expected.score, model.predictor.expected.level) == ("entropy", 0.1)


def test_a_regression_permutes_columns(tmp_path, quiet_trainer):
    model, trainer, _ = fitted(tmp_path, quiet_trainer, numbers=True)
    assert not model.predictor.expected.noticed >= 0
    assert 0 <= float(trainer.callback_metrics["verdict/permuted"]) <= 1
    assert "verdict/noticed" not in trainer.callback_metrics


def test_too_few_held_out_samples_are_said(tmp_path, quiet_trainer, caplog):
    with caplog.at_level(logging.INFO):
        fitted(tmp_path, quiet_trainer, held=12)
    assert "by 12 held-out samples none can be called unknown, give at least 19" in caplog.text
