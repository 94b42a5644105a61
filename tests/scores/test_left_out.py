"""What a verdict will notice, estimated by leaving each class out."""

import math

import pytest
import torch

from brainet_pl.backbones.extractor import FeatureExtractor
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import Extracted
from brainet_pl.fitting.settle import Settling
from brainet_pl.network import Linear
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import KNN, Combined, Generative, Mahalanobis, Score, ScoreContext, ScoreSet
from brainet_pl.scores import left_out as module
from brainet_pl.scores.expectation import Expectation, Expected
from brainet_pl.scores.fitting import fit_score
from brainet_pl.scores.left_out import clearly_best, expect, fit_networks, least_held, noticed, shuffle_columns
from brainet_pl.tasks import Classification


def clusters(n, classes=4, distance=8.0, seed=0, d=6):
    generator = torch.Generator().manual_seed(seed)
    means = distance * torch.randn(classes, d, generator=torch.Generator().manual_seed(9)) / d**0.5
    labels = torch.arange(n) % classes
    return Extracted(BackboneOutput(torch.randn(n, d, generator=generator) + means[labels]), labels)


def fitted(seen, *scores, energy=True):
    found = ScoreSet(scores or [Generative(progress=False)], {"energy": ""} if energy else {"std": ""})
    for score in found:
        score.set_context(ScoreContext(int(seen.targets.max()) + 1, raw=True))
        fit_score(score, seen.features, seen.targets)
    if energy:
        found.join_for_verdict()
    return found


def test_far_classes_are_noticed_and_near_ones_are_not():
    for distance, (low, high), unreliable in ((12.0, (0.9, 1.0), False), (0.0, (0.0, 0.1), True)):
        seen, held = clusters(400, distance=distance), clusters(300, distance=distance, seed=1)
        found = expect(fitted(seen), seen, held, "joint")
        assert low <= found.noticed <= high
        assert found.unreliable == unreliable
        assert ("do not rely on it" in str(found)) == unreliable
        assert found.worst <= found.noticed
        assert 0 <= found.worst_class < 4
        assert found.parts == ("generative", "energy") or found.score in ("generative", "energy")


def test_it_is_what_scores_fitted_without_the_class_notice():
    """By hand: a density of three classes, its held-out scores, and the share of the fourth above their 95 %."""
    seen, held = clusters(400, distance=4.0), clusters(300, distance=4.0, seed=1)
    scores = fitted(seen)
    shares = module.leave_classes_out(scores, seen, held, torch.tensor([2]), 0.05)
    inside, outside = seen.targets != 2, held.targets != 2
    labels = torch.tensor([0, 1, -1, 2])[seen.targets[inside]]
    density = next(iter(scores)).density.refitted(seen.features[inside], labels)
    reference = density.scores(held.features[outside])["generative"]
    strange = density.scores(torch.cat([seen.features[~inside], held.features[~outside]]))["generative"]
    p = (1 + (reference[None] >= strange[:, None]).sum(1)) / (len(reference) + 1)
    assert shares["generative"].item() == pytest.approx((p <= 0.05).double().mean().item(), abs=1e-6)
    assert set(shares) >= {"joint", "energy", "generative"}


def test_nothing_is_changed_and_it_is_the_same_each_time():
    seen, held = clusters(200), clusters(60, seed=1)
    scores = fitted(seen, Generative(progress=False), KNN(k=3), Mahalanobis(normalize=False))
    before, state = {k: v.clone() for k, v in scores.state_dict().items()}, torch.get_rng_state()
    found = expect(scores, seen, held, "joint")
    assert expect(scores, seen, held, "joint") == found
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v.nan_to_num(), before[k].nan_to_num()) for k, v in scores.state_dict().items())


@pytest.mark.parametrize("kind", ["gaussian", "discrete"])
def test_refitted_to_the_same_samples_a_score_is_the_same(kind):
    seen = clusters(300, distance=2.0)
    for score in fitted(seen, Generative(kind=kind, progress=False, max_features=4), KNN(k=3), Mahalanobis()):
        if score.needs_fit:
            again = score.refitted(seen.features, seen.targets)
            assert all(torch.equal(a, b) for a, b in zip(_buffers(again), _buffers(score), strict=True))


def _buffers(score):
    return [v for k, v in score.state_dict().items() if k not in ("blueprint", "reference")]


# -- which score ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("joint", "member", "chosen"),
    [
        ([0.3, 0.4, 0.35, 0.3], [0.7, 0.8, 0.8, 0.7], "member"),
        ([0.3, 0.4, 0.35, 0.3], [0.38, 0.46, 0.4, 0.36], "joint"),  # by less than ten points
        ([0.3, 0.9, 0.1, 0.9], [1.0, 0.9, 0.8, 0.2], "joint"),  # by less than two standard errors
        ([0.5], [0.9], "joint"),  # one class says nothing
    ],
)
def test_a_member_replaces_the_joint_score_by_a_clear_margin_only(joint, member, chosen):
    shares = {"joint": torch.tensor(joint), "member": torch.tensor(member), "other": torch.zeros(len(joint))}
    assert clearly_best(shares, "joint", ["member", "other"], torch.full((len(joint),), 100)) == chosen


def test_a_score_that_a_user_names_stays():
    seen, held = clusters(300), clusters(200, seed=1)
    found = expect(fitted(seen), seen, held, "energy", choose=False)
    assert (found.score, found.parts) == ("energy", ())
    assert str(found).startswith("unknown inputs are told by energy; of a class left out")


# -- regression, bad input --------------------------------------------------------------------------------------------


def test_a_regression_permutes_columns():
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(1, 5, generator=generator)
    seen, held = (
        Extracted(
            BackboneOutput(torch.randn(n, 1, generator=generator) @ mix + 0.1 * torch.randn(n, 5, generator=generator)),
            torch.zeros(n, dtype=torch.long),
        )
        for n in (500, 300)
    )
    found = expect(fitted(seen, energy=False), seen, held, "generative")
    assert math.isnan(found.noticed)
    assert found.permuted > 0.8
    assert "rows with permuted columns were noticed in" in str(found)
    assert not found.unreliable
    mixed = shuffle_columns(held)
    assert torch.equal(mixed.features.sort(dim=0).values, held.features.sort(dim=0).values)
    assert not torch.equal(mixed.features, held.features)


class Broken(Score):
    """NaN for some samples."""

    needs_fit = False
    units = {"broken": ""}  # noqa: RUF012

    def forward(self, passes):
        return {"broken": passes.features[:, 0].masked_fill(passes.features[:, 0] > 1, math.nan)}


@pytest.mark.parametrize(
    ("classes", "rows", "held", "doubt"),
    [
        (3, 6, 6, "by 6 held-out samples none can be called unknown, give at least 19"),
        (3, 6, 30, None),  # the held-out ones count too
        (1, 200, 100, "all samples are of one class"),
        (2, 200, 100, "no class could be left out: it takes three classes of 5 samples or more"),
        (40, 100, 100, "100 samples are too few for 40 classes"),
    ],
)
def test_what_can_not_be_estimated_is_said(classes, rows, held, doubt):
    seen, known = clusters(rows, classes), clusters(held, classes, seed=1)
    found = expect(fitted(seen), seen, known, "joint")
    if doubt is None:
        assert "too few for 3 classes" in str(found)
        return
    assert doubt in str(found)
    assert math.isnan(found.noticed)


def test_classes_of_one_row_stay_known_and_nan_scores_are_doubted():
    seen, held = clusters(300), clusters(200, seed=1)
    lonely = Extracted(seen.output, torch.cat([torch.tensor([4]), seen.targets[1:]]))
    found = expect(fitted(lonely), lonely, held, "joint")
    assert found.noticed > 0.5
    assert found.worst_class != 4
    scores = ScoreSet([Broken()], {"energy": ""})
    scores.join_for_verdict()
    found = expect(scores, seen, held, "joint")
    assert math.isnan(found.share)
    assert "scores are NaN or infinite for some samples" in str(found)


@pytest.mark.parametrize("rare", [1, 2, 3, 5, 8])
def test_a_rare_class_beside_two_large_ones_breaks_nothing(rare):
    seen, held = clusters(180, 2), clusters(120, 2, seed=1)
    seen.targets[:rare] = 2
    scores = fitted(seen, Generative(progress=False), Combined(of=["entropy", "generative"]))
    found = expect(scores, seen, held, "joint")
    assert math.isnan(found.noticed) or 0 <= found.noticed <= 1
    assert math.isnan(found.noticed) == (rare < 5)


def test_an_error_in_the_estimate_does_not_end_a_fit():
    class Unwilling(Mahalanobis):
        def refitted(self, features, labels):
            raise RuntimeError("expected something else")

    seen, held = clusters(300), clusters(200, seed=1)
    head = Linear().build(6, 4, None)
    predictor = Predictor(FeatureExtractor(None), Classification(4), head, scores=[Unwilling(normalize=False)])
    for score in predictor.scores:
        if score.needs_fit:
            fit_score(score, seen.features, seen.targets)
    with pytest.warns(UserWarning, match=r"how many unknown inputs will be noticed is not known.*something else"):
        found = Settling(predictor).expect(seen, held)
    assert math.isnan(found.share)
    assert "expected something else" in str(found)


def test_a_class_that_is_nearly_all_data_leaves_enough_of_the_others():
    seen, held = clusters(400), clusters(25, seed=1)
    targets = seen.targets.masked_fill(torch.arange(400) % 4 != 0, 3)
    targets[:20] = torch.arange(20) % 3
    found = expect(fitted(seen), Extracted(seen.output, targets), held, "joint")
    assert 0 <= found.noticed <= 1


def test_many_classes_and_samples_are_bounded(monkeypatch):
    tried = []
    monkeypatch.setattr(module, "noticed", lambda scores, *rows: tried.append(rows[0]) or noticed(scores, *rows))
    seen, held = clusters(9000, 30), clusters(600, 30, seed=1)
    expect(fitted(seen, Mahalanobis(normalize=False)), seen, held, "joint")
    assert len(tried) == module.MOST_CLASSES + 1
    assert max(len(rows.targets) for rows in tried) <= module.MOST_ROWS


# -- parts ------------------------------------------------------------------------------------------------------------


def test_networks_that_stand_in_for_the_head_classify():
    seen, held = clusters(300), clusters(200, seed=1)
    logits = fit_networks(seen.features, seen.targets)(held.features)
    assert not logits.requires_grad
    assert (logits.argmax(dim=1) == held.targets).float().mean() > 0.95


def test_held_out_samples_that_are_needed():
    for level in (0.01, 0.05, 0.1, 0.3):
        assert 1 / (least_held(level) + 1) <= level < 1 / least_held(level)


def test_an_estimate_travels_as_buffers_and_old_checkpoints_have_none():
    value = Expectation("knn", ("a", "b"), 0.1, 0.5, 0.25, 0.125, 3, 0.75, "why")
    kept, loaded = Expected(), Expected()
    kept.keep(value)
    loaded.load_state_dict(kept.state_dict())
    assert loaded.value == value
    unknown = Expectation("joint", ("energy",), permuted=0.5, doubt="there are only two")
    kept.keep(unknown)
    loaded.load_state_dict(kept.state_dict())
    assert (str(loaded.value), loaded.value.worst_class) == (str(unknown), -1)
    assert math.isnan(loaded.value.noticed)
    nothing = Expected()
    nothing.load_state_dict({})
    assert nothing.value is None
    loaded.load_state_dict(Expected().state_dict())
    assert loaded.value is None
