"""What another pass buys, against a loop over passes."""

import pytest
import torch

from brainet_pl import uncertainty
from brainet_pl.metrics.measures import CalibrationError, NegativeLogLikelihood
from brainet_pl.metrics.passes import (
    chosen_steps,
    pass_metrics,
    pass_sums,
    running_mean,
    running_scores,
    trace_passes,
)


def probabilities(passes, n, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(passes, n, classes, generator=generator)).softmax(dim=-1)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_of_the_first_passes_against_a_loop(weighted):
    probs, target = probabilities(5, 60, 4), torch.randint(4, (60,), generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1]) if weighted else None
    steps = chosen_steps(5)
    means, scores = running_mean(probs, weights, steps), running_scores(probs, weights, steps)
    halves = [pass_sums(means[:, part], target[part]) for part in (slice(0, 25), slice(25, 60))]
    found = pass_metrics(halves[0] + halves[1])  # batches add up
    for i, t in enumerate(steps):
        part = None if weights is None else weights[:t] / weights[:t].sum()
        mean = uncertainty.predictive(probs[:t], part)
        torch.testing.assert_close(means[i], mean)
        torch.testing.assert_close(scores["entropy"][i], uncertainty.predictive_entropy(probs[:t], part))
        expected = uncertainty.mutual_information(probs[:t], part)
        torch.testing.assert_close(scores["mutual_information"][i], expected, atol=1e-5, rtol=1e-4)
        nll, ece = NegativeLogLikelihood(), CalibrationError()
        nll.update(mean, target)
        ece.update(mean, target)
        assert found["NLL"][i] == pytest.approx(float(nll.compute()), rel=1e-5)
        assert found["error"][i] == pytest.approx(float((mean.argmax(1) != target).float().mean()))
        assert found["ECE"][i] == pytest.approx(float(ece.compute()), abs=1e-5)


def test_steps():
    assert chosen_steps(1) == [1]
    assert chosen_steps(16) == list(range(1, 17))
    many = chosen_steps(1000)
    assert (many[0], many[-1]) == (1, 1000)
    assert len(many) <= 16


@pytest.mark.parametrize("labelled", [True, False])
def test_a_trace_is_all_of_it_in_one(labelled):
    probs = probabilities(5, 60, 4)
    target = torch.randint(4, (60,), generator=torch.Generator().manual_seed(1)) if labelled else None
    trace = trace_passes(probs, None, target)
    assert trace.steps == [1, 2, 3, 4, 5]
    for name, values in running_scores(probs, None, trace.steps).items():
        torch.testing.assert_close(trace.scores[name], values)
    assert (trace.sums is not None) == labelled
    if labelled:
        assert pass_metrics(trace.sums) == pass_metrics(pass_sums(running_mean(probs, None, trace.steps), target))
    assert trace_passes(probs[:1], None, target) is None
