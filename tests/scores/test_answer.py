"""Scores of probabilities are those of the calibrated answer that they stand beside, behind every door."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet, swap_head
from brainet_pl.calibration import DensityScaling, TemperatureScaling
from brainet_pl.network import MLP, MCDropout
from brainet_pl.scores import GEN, Combined, Generative, KLMatching, Verdict
from brainet_pl.sklearn import BRAINetClassifier
from brainet_pl.uncertainty import entropy


def data(n, seed):
    """Three classes that overlap, so that a temperature is wanted."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    means = torch.tensor([[1.0, 0, 0, 0, 0, 0], [0, 1.0, 0, 0, 0, 0], [0, 0, 1.0, 0, 0, 0]])
    return means[y] + 0.8 * torch.randn(n, 6, generator=generator), y


def agrees(answer):
    p = answer["probabilities"]
    torch.testing.assert_close(answer["one_minus_max_p"], 1 - p.amax(dim=1), atol=1e-6, rtol=0)
    torch.testing.assert_close(answer["entropy"], entropy(p), atol=1e-5, rtol=1e-5)
    if "mutual_information" in answer:  # of several passes
        both = answer["expected_entropy"] + answer["mutual_information"]
        torch.testing.assert_close(both, answer["entropy"], atol=1e-5, rtol=1e-5)
        assert bool((answer["mutual_information"] >= 0).all())


def is_among(reference, values):
    """Each sample of a reference is one of those held out, of which others may have chosen and not calibrated."""
    assert len(reference) >= 75
    gap = (reference[:, None] - values[None]).abs().amin(dim=1)
    torch.testing.assert_close(gap, torch.zeros_like(gap), atol=2e-4, rtol=0)


def swapped(calibration, verdict=None):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    model = swap_head(network, data(240, 0), held=data(300, 1), head=MLP())
    parts = {"scores": [Generative(progress=False), GEN(), KLMatching()], "verdict": verdict}
    model.fit(max_epochs=6, progress=False, calibration=calibration, **parts)
    return model


@pytest.mark.parametrize("calibration", [TemperatureScaling, DensityScaling])
def test_of_a_swapped_model(calibration):
    model, x = swapped(calibration()), 2 * data(200, 2)[0]
    with torch.no_grad():
        passes = model.passes(x)
        answer = model.predict(x)
    agrees(answer)
    assert float((passes.scores["one_minus_max_p"] - answer["one_minus_max_p"]).abs().max()) > 0.003  # it calibrates
    torch.testing.assert_close(answer["energy"], passes.scores["energy"])  # of the logits
    gen = GEN().score(answer["probabilities"])["gen"]
    torch.testing.assert_close(answer["gen"], gen)
    torch.testing.assert_close(
        answer["kl_matching"], model.scores.members["KLMatching"].score(answer["probabilities"])["kl_matching"]
    )


@pytest.mark.parametrize("score", ["entropy", "one_minus_max_p", "gen", "kl_matching", "joint", "energy"])
def test_the_reference_of_a_verdict_is_what_held_out_samples_get(score):
    """With the calibrator that the fit has learned: else p-values of scores that it changes would mean nothing."""
    model = swapped(DensityScaling(), None if score == "joint" else Verdict(score=score))
    with torch.no_grad():
        answer, new = model.predict(data(300, 1)[0]), model.predict(data(900, 3)[0])
    if score != "joint":  # whose reference leaves every sample out of what it is judged by
        is_among(model.scores.reference[score], answer[score])
    count = len(model.scores.reference[score])
    for level in (0.05, 0.2, 0.5):
        share = float((new["known_p"] <= level).float().mean())
        assert share == pytest.approx(level, abs=3 * (level * (1 - level) * (1 / count + 1 / 900)) ** 0.5)


def test_of_an_estimator():
    x, y = data(150, 0)
    model = BRAINetClassifier(max_epochs=8, random_state=0).fit(x.numpy(), y.numpy())
    answer = model.network_.predict(torch.as_tensor(2 * data(100, 1)[0]).double())
    agrees({name: values.float() for name, values in answer.items()})


def test_of_a_trained_model(tmp_path, quiet_trainer):
    """After several validations, each with the calibrator of the one before while it runs."""
    parts = {"scores": [Generative(progress=False), GEN()], "calibration": DensityScaling()}
    model = BRAINet(3, head=MLP(), verdict=Verdict(score="gen"), **parts)
    loaders = [DataLoader(TensorDataset(*data(240, 0)), 40), DataLoader(TensorDataset(*data(200, 1)), 64)]
    quiet_trainer(tmp_path, max_epochs=3).fit(model, *loaders)
    with torch.no_grad():
        agrees(model.predict_step(2 * data(100, 2)[0], 0))
        answer = model.predict_step(data(200, 1)[0], 0)
    is_among(model.scores.reference["gen"], answer["gen"])


@pytest.mark.parametrize("score", ["gen", "joint"])
def test_a_calibrator_reads_no_score_of_what_it_calibrates(score):
    parts = {"scores": [Generative(progress=False), GEN(), Combined()]}
    with pytest.raises(
        ValueError, match=rf"expected score of DensityScaling to be one of .*generative.* got '{score}'"
    ):
        BRAINet(3, head=MLP(), calibration=DensityScaling(score=score), **parts)


def test_where_all_passes_agree_nothing_is_said_of_their_disagreement():
    x, silent = data(20, 5)[0], {"mutual_information", "expected_entropy"}
    assert not silent & set(swapped(TemperatureScaling()).predict(x))
    model = swap_head(nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3)), x, 3, head=MCDropout(), progress=False)
    assert silent < set(model.eval().predict(x))
