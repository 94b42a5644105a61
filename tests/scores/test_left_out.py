"""What a verdict will notice, estimated as if classes had not been learned."""

import math

import pytest
import torch

from brainet_pl.backbones.extractor import FeatureExtractor
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import Extracted
from brainet_pl.fitting import left_out as module
from brainet_pl.fitting.left_out import LeftOut, groups_of, noticed, scores_without
from brainet_pl.fitting.settle import answer_rows, settle
from brainet_pl.network import Linear
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import GEN, KNN, Combined, Generative, Mahalanobis, Score, ScoreContext, Stages, Verdict
from brainet_pl.scores.combined import cross_fitted
from brainet_pl.scores.expectation import Expectation, Expected, least_held
from brainet_pl.scores.fitting import fit_score
from brainet_pl.scores.reference import fit_surprise
from brainet_pl.tasks import Classification, Regression


def clusters(n, classes=4, distance=8.0, seed=0, d=6):
    generator = torch.Generator().manual_seed(seed)
    means = distance * torch.randn(classes, d, generator=torch.Generator().manual_seed(9)) / d**0.5
    labels = torch.arange(n) % classes
    return Extracted(BackboneOutput(torch.randn(n, d, generator=generator) + means[labels]), labels)


def fitted(seen, *scores, task=None, **parts):
    """A linear head by least squares on one-hot labels, and scores."""
    task = task or Classification(int(seen.targets.max()) + 1)
    d = seen.features.shape[1]
    head = Linear().build(d, task.out_features, None)
    if isinstance(task, Classification):
        x = torch.cat([seen.features, torch.ones(len(seen.targets), 1)], dim=1)
        goal = 10 * torch.nn.functional.one_hot(seen.targets, task.num_classes).float()
        solution = torch.linalg.lstsq(x, goal).solution
        weight, bias = (p for p in head.parameters())
        weight.data, bias.data = solution[:-1].t().contiguous(), solution[-1].contiguous()
    scores = scores or (Generative(progress=False, normalize=False),)
    predictor = Predictor(FeatureExtractor(None), task, head, scores=scores, **parts).eval()
    labels, count = task.classes(seen.targets)
    for score in predictor.scores:
        if score.needs_fit:
            score.set_context(ScoreContext(count, raw=True))
            fit_score(score, seen.features, labels)
    return predictor


def settled(predictor, held):
    settle(predictor, answer_rows(predictor, held))
    return predictor.expected


def test_far_classes_are_noticed_and_near_ones_are_not():
    for distance, low, high, unreliable in ((12.0, 0.4, 1.0, False), (0.0, 0.0, 0.6, True)):
        found = settled(fitted(clusters(400, distance=distance)), clusters(300, distance=distance, seed=1))
        assert low <= found.low <= found.noticed <= found.high <= 1
        assert found.low <= high
        assert found.unreliable == unreliable
        assert ("do not rely on it" in str(found)) == unreliable
        assert found.parts == ("generative", "energy")
        assert "of a class left out, " in str(found)


def test_scores_are_those_without_the_class():
    """The logit is taken away, and so are the density of the class and its training samples."""
    seen, held = clusters(200), clusters(60, seed=1)
    own, knn = Generative(progress=False, normalize=False), KNN(k=3, normalize=False)
    predictor = fitted(seen, own, knn, GEN())
    passes = predictor.passes(held.output)
    hidden = torch.tensor([[False, True, False, False], [True, False, False, True]])
    found = scores_without(predictor, passes, hidden)
    for row, group in enumerate(hidden):
        logits = passes.outputs[0][:, ~group]
        torch.testing.assert_close(found["energy"][row], -logits.logsumexp(dim=1))
        torch.testing.assert_close(found["one_minus_max_p"][row], 1 - logits.softmax(dim=1).amax(dim=1))
        p = logits.softmax(dim=1).clamp(1e-7, 1 - 1e-7)
        extra = (
            float(group.sum()) * (1e-7 * (1 - 1e-7)) ** 0.1
        )  # of classes that are left out: GEN counts 1e-7 for each
        torch.testing.assert_close(found["gen"][row], (p * (1 - p)).pow(0.1).sum(dim=1) + extra)
        density = own.density(held.features)[:, ~group]
        torch.testing.assert_close(found["generative"][row], -density.amax(dim=1))
        others = seen.features[~group[seen.targets]]
        distance = torch.cdist(held.features, others).square().sort(dim=1).values[:, 2]
        torch.testing.assert_close(found["knn"][row], distance, atol=1e-3, rtol=1e-3)


def test_stages_lose_the_class_in_every_layer():
    seen, x = clusters(300), clusters(50, seed=1).features
    score = Stages(progress=False)
    score.set_context(ScoreContext(4, widths=(2, 4), scaled=True))
    fit_score(score, seen.features, seen.targets)
    hidden = torch.tensor([[False, False, True, False]])
    passes = module.Passes(torch.zeros(1, 50, 4), None, x, torch.full((50, 4), 0.25))
    found = score.without_classes(passes, hidden)
    expected = torch.zeros(50)
    for part, columns, (mean, deviation) in zip(score.parts, x.split([2, 4], dim=1), score.moments, strict=True):
        expected += (-part.density(columns)[:, [0, 1, 3]].amax(dim=1) - mean) / deviation
    torch.testing.assert_close(found, expected[None], atol=1e-4, rtol=1e-4)
    nothing = score.without_classes(passes, torch.zeros(1, 4, dtype=torch.bool))
    torch.testing.assert_close(nothing[0], score(passes)["stages"], atol=1e-4, rtol=1e-4)


def test_a_share_is_what_a_verdict_without_the_class_calls_unknown():
    generator = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, 400, generator=generator)
    inside = torch.arange(400) % 4 == 0
    one[inside] += 2
    surprises = [fit_surprise(v[~inside])(v[inside]) for v in (one, two)]
    reference = cross_fitted([one[~inside], two[~inside]])
    p = (1 + (reference[None] >= sum(surprises)[:, None]).sum(1)) / (len(reference) + 1)
    assert noticed([one, two], [1.0, 1.0], inside, 0.05) == pytest.approx((p <= 0.05).double().mean().item())
    halved = 0.5 * surprises[0] + 0.5 + surprises[1]
    p = (1 + (reference[None] >= halved[:, None]).sum(1)) / (len(reference) + 1)
    assert noticed([one, two], [0.5, 1.0], inside, 0.05) == pytest.approx((p <= 0.05).double().mean().item())
    alone = (1 + (one[~inside][None] >= one[inside][:, None]).sum(1)) / 301
    assert noticed([one], [1.0], inside, 0.05) == pytest.approx((alone <= 0.05).double().mean().item())


def test_groups_of_classes():
    assert not len(groups_of(2))
    assert torch.equal(groups_of(4).sum(dim=1), torch.ones(4, dtype=torch.long))
    for classes, size in ((10, 1), (49, 1), (150, 3), (1000, 20)):
        hidden = groups_of(classes)
        assert hidden.shape == (min(10, classes), classes)
        assert torch.equal(hidden.sum(dim=1), torch.full((len(hidden),), size))
        assert hidden.sum(dim=0).max() == 1  # no class twice


def test_nothing_is_changed_and_it_is_the_same_each_time():
    seen, held = clusters(200), clusters(60, seed=1)
    predictor = fitted(seen, Generative(progress=False, normalize=False), KNN(k=3))
    first = settled(predictor, held)
    before, state = {k: v.clone() for k, v in predictor.state_dict().items()}, torch.get_rng_state()
    assert settled(predictor, held) == first
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v.nan_to_num(), before[k].nan_to_num()) for k, v in predictor.state_dict().items())


@pytest.mark.parametrize("in_order", [False, True])
def test_many_samples_are_bounded_and_a_sorted_set_is_as_good(monkeypatch, in_order):
    monkeypatch.setattr(module, "MOST_ROWS", 300)
    predictor, held = fitted(clusters(400, 12)), clusters(3000, 12, seed=1)
    if in_order:
        order = held.targets.argsort()
        held = Extracted(held.output[order], held.targets[order])
    asked = LeftOut(predictor)
    seen = 0
    for answered in answer_rows(predictor, held):
        numbers = torch.arange(seen, seen + len(answered.target))
        seen += len(numbers)
        asked.observe(answered.passes, answered.target, numbers)
        assert sum(len(one.draw) for one in asked._asked) <= 300
    targets = torch.cat([one.columns[module.TARGET] for one in asked._asked])
    assert len(targets) > 100
    assert torch.bincount(targets, minlength=12).min() >= 5
    assert settled(predictor, held).noticed > 0.3


def test_a_score_that_a_user_names_is_judged():
    seen, held = clusters(300), clusters(200, seed=1)
    found = settled(fitted(seen, verdict=Verdict(score="energy", level=0.1)), held)
    assert (found.score, found.parts, found.level) == ("energy", (), 0.1)
    assert str(found).startswith("unknown inputs are told by energy; of a class left out")


# -- what can't be estimated ------------------------------------------------------------------------------------------


class Broken(Score):
    """NaN for some samples."""

    needs_fit = False
    units = {"broken": ""}  # noqa: RUF012

    def forward(self, passes):
        return {"broken": passes.features[:, 0].masked_fill(passes.features[:, 0] > 1, math.nan)}

    def without_classes(self, passes, hidden):
        return self(passes)["broken"].expand(len(hidden), -1)


@pytest.mark.parametrize(
    ("classes", "held", "doubt"),
    [
        (3, 12, "by 12 held-out samples none can be called unknown, give at least 19"),
        (2, 100, "no class could be left out: it takes three classes"),
        (40, 100, "no class could be left out: fewer than 2 classes have 5 held-out samples"),
    ],
)
def test_what_can_not_be_estimated_is_said(classes, held, doubt):
    found = settled(fitted(clusters(400, classes)), clusters(held, classes, seed=1))
    assert doubt in str(found)
    assert math.isnan(found.noticed)
    assert math.isnan(found.low)
    assert math.isnan(found.permuted) == (held == 12)


def test_scores_that_can_not_forget_a_class_and_nan_are_doubted():
    seen, held = clusters(300), clusters(200, seed=1)
    found = settled(fitted(seen, Mahalanobis(normalize=False), verdict=Verdict("mahalanobis")), held)
    assert "mahalanobis can't be computed as if a class were unknown" in str(found)
    assert found.permuted > 0.3
    found = settled(fitted(seen, Broken(), verdict=Verdict("broken")), held)
    assert "scores are NaN or infinite for some samples" in str(found)


def test_a_regression_permutes_columns():
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(1, 5, generator=generator)
    seen, held = (
        Extracted(
            BackboneOutput(torch.randn(n, 1, generator=generator) @ mix + 0.1 * torch.randn(n, 5, generator=generator)),
            torch.randn(n, generator=generator),
        )
        for n in (500, 300)
    )
    task = Regression()
    task.prepare(seen.targets)
    found = settled(fitted(seen, task=task), held)
    assert math.isnan(found.noticed)
    assert found.permuted > 0.8
    assert "rows with permuted columns were noticed in" in str(found)
    assert not found.unreliable


@pytest.mark.parametrize("rare", [1, 2, 3, 5, 8])
def test_a_rare_class_beside_two_large_ones_breaks_nothing(rare):
    seen, held = clusters(180, 2), clusters(120, 2, seed=1)
    seen.targets[:rare] = 2
    held.targets[:rare] = 2
    predictor = fitted(seen, Generative(progress=False), Combined(of=["entropy", "generative"]))
    found = settled(predictor, held)
    assert 0 <= found.low <= found.high <= 1


def test_an_error_in_the_estimate_does_not_end_a_fit():
    class Unwilling(Broken):
        def without_classes(self, passes, hidden):
            raise RuntimeError("expected something else")

    predictor = fitted(clusters(300), Unwilling())
    with pytest.warns(UserWarning, match=r"how many unknown inputs will be noticed is not known.*something else"):
        found = settled(predictor, clusters(200, seed=1))
    assert math.isnan(found.share)
    assert "expected something else" in str(found)
    assert "joint" in predictor.scores.reference


# -- parts ------------------------------------------------------------------------------------------------------------


def test_held_out_samples_that_are_needed():
    for level in (0.01, 0.05, 0.1, 0.3):
        assert 1 / (least_held(level) + 1) <= level < 1 / least_held(level)


def test_an_estimate_travels_as_a_buffer():
    value = Expectation("knn", ("a", "b"), 0.1, 0.25, 0.5, 0.375, 0.75, "why")
    kept, loaded = Expected(), Expected()
    kept.keep(value)
    loaded.load_state_dict(kept.state_dict())
    assert loaded.value == value
    unknown = Expectation("joint", ("energy",), doubt="there are only two")
    kept.keep(unknown)
    loaded.load_state_dict(kept.state_dict())
    assert str(loaded.value) == str(unknown)
    assert math.isnan(loaded.value.share)
    assert math.isnan(loaded.value.permuted)
    loaded.load_state_dict(Expected().state_dict())
    assert loaded.value is None
