"""The generative score against loops over every sub-network, class and family."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from brainet_pl.scores import Generative, ScoreContext, TreeDensity
from brainet_pl.scores.density import RARE_KURTOSIS, GaussianFamilies
from brainet_pl.scores.fitting import fit_score
from brainet_pl.structure import learn_structure
from brainet_pl.structure.ggt import GGT, Leaf
from brainet_pl.tasks.passes import Passes

CLASSES = 3


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    y = rng.integers(0, CLASSES, 600)
    causes = rng.normal(size=(600, 3)) + y[:, None]
    x = causes @ rng.normal(size=(3, 8)) + 0.7 * rng.normal(size=(600, 8))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@pytest.fixture(scope="module")
def ggt(data):
    tree = learn_structure(data[0], test="gaussian", threshold=0.1, s=3, max_order=2, progress=False)
    assert tree.num_subnetworks > 20
    assert tree.depth > 1
    return tree


def mixture(score, x, log_family):
    """log Σ_G P(G) Π families, with one Python loop for everything."""
    out = np.full((len(x), CLASSES), -np.inf)
    temperature = score.ggt.auto_temperature
    for subnetwork in score.ggt.enumerate():
        total = np.full((len(x), CLASSES), score.ggt.log_prob(subnetwork, temperature))
        for leaf in score.ggt.leaves(subnetwork):
            for v, parents in zip(leaf.variables, leaf.parents, strict=True):
                for c in range(CLASSES):
                    total[:, c] += log_family(v, parents, c)
        out = np.logaddexp(out, total)
    return out


def test_gaussian_densities_are_those_of_every_network_in_turn(data, ggt):
    x, y = data
    score = TreeDensity(ggt, CLASSES, normalize=False, prior=30).fit(x, y)
    a, b = x.double().numpy(), y.numpy()
    means = np.stack([a[b == c].mean(0) for c in range(CLASSES)])
    common = np.cov((a - means[b]).T, bias=True)
    test = a[:20]

    def log_family(v, parents, c):
        n = (b == c).sum()
        s = (30 * common + n * np.cov(a[b == c].T, bias=True)) / (30 + n)
        p = list(parents)
        slopes = np.linalg.solve(s[np.ix_(p, p)], s[p, v]) if p else np.empty(0)
        expected = means[c, v] + (test[:, p] - means[c, p]) @ slopes
        return norm.logpdf(test[:, v], expected, np.sqrt(s[v, v] - s[v, p] @ slopes))

    np.testing.assert_allclose(score(x[:20]), mixture(score, test, log_family), rtol=2e-3, atol=2e-2)


def fit_one_family_at_a_time(families, floor, common, covariance, mean):
    """The slow twin of `GaussianFamilies.fit`, from the covariances (C, d, d) of all classes on."""
    for i, (v, parents) in enumerate(families._families):
        p = torch.tensor(parents, dtype=torch.long)
        most = families.parents.shape[1]
        if len(p) > most:
            strength = (common[v, p] / common.diagonal()[p].sqrt()).abs()
            p = p[strength.topk(most).indices.sort().values]
        slopes = torch.linalg.solve(covariance[:, p][:, :, p] + 1e-3 * torch.diag(floor[p]), covariance[:, p, v])
        variance = covariance[:, v, v] - 2 * (slopes * covariance[:, p, v]).sum(1)
        variance = variance + torch.einsum("cp,cpq,cq->c", slopes, covariance[:, p][:, :, p], slopes)
        intercept = mean[:, v] - (slopes * mean[:, p]).sum(1)
        yield i, p, slopes, intercept, variance.clamp_min(floor[v]).log()


@pytest.mark.parametrize(("max_parents", "room"), [(64, 2**25), (2, 2**25), (64, 30)])
def test_blocks_of_families_are_the_families_one_at_a_time(data, max_parents, room, monkeypatch):
    """Families of 0 to 7 parents, more than are kept, and in blocks of a few."""
    monkeypatch.setattr("brainet_pl.scores.density._ROOM", room)
    x, y = data[0].double(), data[1]
    x = x / x.std(0)
    every = [(v, tuple(p for p in range(8) if p != v)[:count]) for v in range(8) for count in range(8)]
    families = GaussianFamilies(every, 8, CLASSES, 30.0, max_parents)
    families.fit(x, y)
    mean = torch.stack([x[y == c].mean(0) for c in range(CLASSES)])
    residual = x - mean[y]
    common, count = residual.t() @ residual / len(x), torch.bincount(y)[:, None, None]
    assert (residual.pow(4).mean(0) < RARE_KURTOSIS * common.diagonal().square()).all()  # else the floor is another
    own = torch.stack([residual[y == c].t() @ residual[y == c] for c in range(CLASSES)])
    floor = 1e-3 * common.diagonal() + 1e-6 * common.diagonal().mean()
    covariance = (30 * common + own) / (30 + count)
    seen = set()
    for i, p, slopes, intercept, log_variance in fit_one_family_at_a_time(families, floor, common, covariance, mean):
        assert families.parents[i].tolist() == [*p.tolist(), *[8] * (families.parents.shape[1] - len(p))]
        torch.testing.assert_close(families.slopes[i, : len(p)].double(), slopes.t(), atol=1e-6, rtol=1e-5)
        assert not families.slopes[i, len(p) :].any()
        torch.testing.assert_close(families.intercept[i, 0].double(), intercept, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(families.log_variance[i, 0].double(), log_variance, atol=1e-6, rtol=1e-5)
        seen.add(len(p))
    assert seen == set(range(min(max_parents, 7) + 1))


@pytest.mark.parametrize("most", [3, 40])
def test_families_of_like_size_together_are_those_of_one_width(most):
    """Families of 0 to 40 parents: values and gradients are those of one product in which all are as wide."""
    rng = np.random.default_rng(0)
    x, y = torch.tensor(rng.normal(size=(400, 41)) @ rng.normal(size=(41, 41))), torch.tensor(rng.integers(0, 3, 400))
    drawn = [(v, {int(p) for p in rng.permutation(41)[:width]}) for v, width in enumerate(rng.permutation(41))]
    every = [(v, tuple(sorted(parents - {v}))) for v, parents in drawn]
    families = GaussianFamilies(every, 41, CLASSES, 30.0, most).double()
    families.fit(x, y)
    families.double()
    assert (len(families._widths), sum(families._widths.values())) == ({3: 2, 40: 6}[most], 41)
    rows = x[:7].clone().requires_grad_()
    columns = torch.cat([rows, rows.new_zeros(7, 1)], dim=1).t()
    expected = columns[families.parents].transpose(1, 2) @ families.slopes + families.intercept
    error = columns[families.variable][:, :, None] - expected
    slow = -0.5 * (error**2 / families.log_variance.exp() + families.log_variance + math.log(2 * math.pi))
    (wanted,) = torch.autograd.grad(slow.square().sum(), rows)
    (found,) = torch.autograd.grad(families(rows).square().sum(), rows)
    torch.testing.assert_close(families(rows), slow)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("max_parents", [0, 1, 2])
def test_discrete_densities_are_those_of_every_network_in_turn(data, ggt, max_parents):
    x, y = data
    bins, prior = 3, 4.0
    settings = {"kind": "discrete", "bins": bins, "prior": prior, "max_parents": max_parents, "normalize": False}
    score = TreeDensity(ggt, CLASSES, **settings).fit(x, y)
    edges = np.quantile(x.numpy(), [1 / 3, 2 / 3], axis=0)
    codes = (x.numpy()[:, None, :] > edges).sum(1)
    chosen = dict(zip(score.families._families, score.families.chosen.tolist(), strict=True))

    def log_family(v, parents, c):
        kept = [p for p in chosen[v, parents] if p < 8]
        assert set(kept) <= set(parents)
        out = []
        for code in codes[:20]:
            rows = np.all([codes[:, p] == code[p] for p in kept], axis=0) if kept else np.ones(len(codes), bool)
            alpha = 1 / bins ** (len(kept) + 1)
            common = np.array([(codes[rows, v] == k).sum() for k in range(bins)])
            mean = (common + alpha) / (common.sum() + alpha * bins)
            own = np.array([(codes[rows & (y.numpy() == c), v] == k).sum() for k in range(bins)])
            out.append(math.log(((own + prior * mean) / (own.sum() + prior))[code[v]]))
        return np.array(out)

    np.testing.assert_allclose(score(x[:20]), mixture(score, codes[:20], log_family), rtol=1e-4, atol=1e-3)
    if max_parents == 2:
        assert any(p < 8 for row in score.families.chosen.tolist() for p in row)


def test_few_parents_and_one_covariance_for_all(data, ggt, monkeypatch):
    x, y = data
    few = TreeDensity(ggt, CLASSES, normalize=False, max_parents=1).fit(x, y)
    assert few.families.slopes.shape[1] == 1
    assert len({row for row in few.families.parents[:, 0].tolist() if row < 8}) > 2
    all_parents, none = (TreeDensity(ggt, CLASSES, normalize=False, **s).fit(x, y) for s in ({}, {"max_parents": 0}))
    likelihoods = [s(x).gather(1, y[:, None]).mean().item() for s in (none, few, all_parents)]
    assert likelihoods == sorted(likelihoods)
    monkeypatch.setattr("brainet_pl.scores.density._TIED", 10)
    tied = TreeDensity(ggt, CLASSES, normalize=False).fit(x, y)
    monkeypatch.undo()
    same = TreeDensity(ggt, CLASSES, normalize=False, prior=1e12).fit(x, y)
    assert tied.families.slopes.shape[2] == 1
    torch.testing.assert_close(tied(x), same(x), atol=1e-3, rtol=1e-3)
    monkeypatch.setattr("brainet_pl.scores.density._ROOM", 10)  # sample by sample
    torch.testing.assert_close(same(x[:9]), same(x)[:9], atol=1e-4, rtol=1e-4)


def test_a_table_of_probabilities_sums_to_one(data):
    """Over all 3^4 configurations of four variables, whatever the tree."""
    x, y = data
    tree = learn_structure(x[:, :4], test="gaussian", threshold=0.05, s=2, max_order=1, progress=False)
    score = TreeDensity(tree, CLASSES, kind="discrete", bins=3, normalize=False).fit(x[:, :4], y)
    edges = score.families.edges
    middle = torch.stack([edges[:, 0] - 1, edges.mean(1), edges[:, 1] + 1])  # one value in each bin
    grid = torch.cartesian_prod(*middle.t())
    torch.testing.assert_close(score(grid).exp().sum(0), torch.ones(CLASSES), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gaussian", "discrete"])
def test_unlike_features_score_high_and_a_copy_is_exact(data, ggt, kind):
    x, y = data
    score = TreeDensity(ggt, CLASSES, kind=kind).fit(x, y)
    again = TreeDensity.from_dict(score.to_dict())
    again.load_state_dict(score.state_dict())
    shuffled = torch.stack([column[torch.randperm(len(x))] for column in x.t()], dim=1)  # same margins, no dependence
    known, unknown = (again.scores(v)["generative"] for v in (x, shuffled))
    assert unknown.mean() > known.mean() + 1
    torch.testing.assert_close(again(x), score(x))
    torch.testing.assert_close(score(x[:5]), score(5 * x[:5]))  # normalised


def passes_of(x, probs, energy):
    """One set of passes that predicted `probs`."""
    return Passes(probs.log().unsqueeze(0), None, x, probs, {"energy": energy})


def test_scores_by_hand_and_the_reference_of_the_combination(data):
    x, y = data
    score = Generative(normalize=False, progress=False)
    score.set_context(ScoreContext(CLASSES))
    fit_score(score, x, y)
    probs, energy = torch.rand(len(x), CLASSES).softmax(1), torch.randn(len(x))
    found = score(passes_of(x, probs, energy))
    assert set(found) == {"generative", "generative_weighted"}  # nothing to compare with yet
    density = score.density(x)
    torch.testing.assert_close(found["generative"], -density.max(1).values)
    torch.testing.assert_close(found["generative_weighted"], -(probs * density).sum(1))
    of_epoch = score.finalize({"generative": found["generative"], "energy": energy})["combined"]
    combined = score(passes_of(x, probs, energy))["combined"]
    torch.testing.assert_close(of_epoch, combined)
    expected = torch.zeros(len(x))
    for v in (found["generative"], energy):  # the strangest and the least strange fiftieth as those next to them
        ordered, cut = v.sort().values, -(-len(v) // 50)
        usual = v.clamp(ordered[cut], ordered[-1 - cut])
        expected += (v - usual.mean()) / usual.std(correction=0)
    torch.testing.assert_close(combined, expected, atol=1e-3, rtol=1e-3)
    again = Generative(normalize=False)
    again.load_state_dict(score.state_dict())
    torch.testing.assert_close(again(passes_of(x, probs, energy))["combined"], combined)


def test_edge_cases(data, ggt):
    x, y = data
    with pytest.raises(ValueError, match=r"expected features of shape \(batch, 8\), got \(4, 3\)"):
        TreeDensity(ggt, CLASSES)(torch.rand(4, 3))
    with pytest.raises(ValueError, match="as many labels"):
        TreeDensity(ggt, CLASSES).fit(x, y[:5])
    with pytest.raises(ValueError, match="expected kind"):
        TreeDensity(ggt, CLASSES, kind="tree")
    constant = x.clone()
    constant[:, 0], constant[:, 1] = 0.0, constant[:, 2]  # a dead feature and a copy
    for kind in ("gaussian", "discrete"):
        score = TreeDensity(ggt, CLASSES + 1, kind=kind).fit(constant, y)  # one class has no row
        assert score(torch.cat([constant, 100 * torch.rand(4, 8), torch.zeros(1, 8)])).isfinite().all()
        assert score(x[:0]).shape == (0, CLASSES + 1)
    single = GGT(Leaf((0, 1), ((), (0,)), 0.0), 2)
    assert TreeDensity(single, 1).fit(x[:, :2], torch.zeros(600)).scores(x[:3, :2])["generative"].shape == (3,)
    same = Generative()
    same.finalize({"generative": torch.ones(3), "energy": torch.ones(3)})
    assert (same.reference[1] > 0).all()


@pytest.mark.parametrize("kind", ["gaussian", "discrete"])
def test_densities_keep_their_precision(data, kind):
    x, y = data
    score = Generative(kind=kind, progress=False)
    score.set_context(ScoreContext(CLASSES))
    fit_score(score, x, y)
    passes = passes_of(x[:20], torch.full((20, CLASSES), 1 / CLASSES), torch.rand(20))
    score.finalize({"generative": torch.rand(20), "energy": passes.scores["energy"]})
    expected = score(passes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = score(passes)
    halved = score.bfloat16()(passes)
    doubled = score.double()(dataclasses.replace(passes, features=x[:20].double()))
    for name, values in expected.items():
        torch.testing.assert_close(mixed[name], values)
        torch.testing.assert_close(halved[name], values)
        torch.testing.assert_close(doubled[name].float(), values, atol=1e-4, rtol=1e-4)
