"""Accuracy without labels: how often its interval holds the truth while calibration holds, and what shifts do to it."""

import numpy as np
import pytest
import torch

from brainet_pl._utils.framework import pl
from brainet_pl.calibration import DensityScaling, TemperatureScaling
from brainet_pl.callbacks import StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.monitoring import estimate_accuracy
from brainet_pl.network import Tree
from brainet_pl.scores import Generative


def test_the_interval_holds_the_truth_as_often_as_it_says():
    rng, inside, with_held = np.random.default_rng(0), 0, 0
    for _ in range(1000):
        p = rng.uniform(0.5, 1.0, 300)
        right = rng.random(300) < p
        found = estimate_accuracy(p, level=0.9)
        inside += found.low <= right.mean() <= found.high
        # A model that is too sure by 5 points, which held-out samples tell.
        held = rng.uniform(0.5, 0.95, 200)
        held_right = rng.random(200) < held
        found = estimate_accuracy(np.minimum(p + 0.05, 1), np.minimum(held + 0.05, 1), held_right, level=0.9)
        with_held += found.low <= right.mean() <= found.high
    assert 0.87 < inside / 1000 < 0.93
    assert 0.86 < with_held / 1000 <= 0.96


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([],), "expected confidence"),
        (([1.2],), "between 0 and 1"),
        (([float("nan")],), "no NaN"),
        (([0.5], [0.5]), "got one of the two"),
        (([0.5], [0.5], [1.0]), "at least 30 held-out samples"),
    ],
)
def test_what_cant_be_meant_is_said(args, message):
    with pytest.raises(ValueError, match=message):
        estimate_accuracy(*args)
    with pytest.raises(ValueError, match="expected level between 0 and 1"):
        estimate_accuracy([0.5], level=0.0)


@pytest.mark.slow
def test_fading_probabilities_keep_the_estimate_near_the_truth_where_inputs_have_changed(tmp_path, quiet_trainer):
    """Digits under noise, where labels are known: the estimate by fading probabilities is nearer than the plain one."""
    errors = {}
    for name, calibration in (("plain", TemperatureScaling()), ("fading", DensityScaling())):
        pl.seed_everything(0, verbose=False)
        data, scores = Digits(), [Generative(progress=False)]
        model = BRAINet(8, head=Tree(num_params=8000), scores=scores, calibration=calibration, lr=0.01)
        quiet_trainer(tmp_path, StructureLearning(progress=False), epochs=10).fit(model, datamodule=data)
        x, y = (torch.stack([torch.as_tensor(one[i]) for one in data.test_set]) for i in (0, 1))
        found = []
        for noise in (0.0, 0.2, 0.4, 0.6, 0.8):
            torch.manual_seed(0)
            with torch.no_grad():
                probs = model.eval().predict_step(x + noise * torch.randn_like(x), 0)["probabilities"]
            estimate = estimate_accuracy(probs.amax(dim=1).clamp(0, 1).numpy())
            truth = float((probs.argmax(dim=1) == y).float().mean())
            print(f"{name}, noise {noise}: {estimate}, in truth {truth:.1%}")
            found.append(abs(estimate.accuracy - truth))
        errors[name] = found
    assert errors["fading"][0] < 0.05
    assert np.mean(errors["fading"]) < np.mean(errors["plain"])
