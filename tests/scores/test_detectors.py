"""Published detectors: against plain twins, and against pytorch-ood where it is installed."""

import copy

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from torch import nn

from brainet_pl import Backbone, BRAINet, load_swapped, swap_head
from brainet_pl.datamodules import Digits
from brainet_pl.network import Linear
from brainet_pl.scores import FDBD, GEN, KNN, RMDS, KLMatching, Mahalanobis, NNGuide, Score, ScoreContext, Shaped, ViM
from brainet_pl.scores.base import LastLayer
from brainet_pl.scores.fitting import fit_score
from brainet_pl.tasks.passes import Passes

CLASSES, WIDTH = 5, 12


def features(seed, n):
    """(n, 12) behind a ReLU, of five classes, and labels (n,)."""
    draw = np.random.default_rng(seed)
    y = draw.integers(CLASSES, size=n)
    means = np.random.default_rng(99).normal(size=(CLASSES, WIDTH))
    return np.maximum(means[y] + 0.5 * draw.normal(size=(n, WIDTH)), 0).astype(np.float32), y


@pytest.fixture
def digits():
    return Digits()


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES)


def fitted(score, layer, moments=None):
    """A score of 300 samples, which are standardised by `moments` where there are some."""
    z, y = (torch.tensor(v) for v in features(0, 300))
    score.set_context(
        ScoreContext(
            CLASSES,
            scaled=moments is not None,
            moments=moments,
            last_layer=LastLayer(layer.weight.detach(), layer.bias.detach()),
        )
    )
    fit_score(score, z if moments is None else (z - moments[0]) / moments[1], y)
    return score


def found(score, z, logits=None):
    logits = torch.zeros(len(z), CLASSES) if logits is None else logits
    (column,) = score(Passes(logits[None], None, z, logits.softmax(dim=1))).values()
    return column


def weights(layer):
    return layer.weight.detach().numpy().astype(np.float64), layer.bias.detach().numpy().astype(np.float64)


def slow_vim(layer, bank, z, dim):
    w, b = weights(layer)
    origin = -np.linalg.pinv(w) @ b
    gap = bank - origin
    _, _, directions = np.linalg.svd(gap)
    rest = directions[dim:]
    alpha = (bank @ w.T + b).max(axis=1).mean() / np.mean([np.linalg.norm(rest @ row) for row in gap])
    return [alpha * np.linalg.norm(rest @ (row - origin)) - logsumexp(w @ row + b) for row in z]


def slow_fdbd(layer, bank, z):
    (w, b), mean, scores = weights(layer), bank.mean(axis=0), []
    for row in z:
        logits = w @ row + b
        top = logits.argmax()
        gaps = [(logits[top] - logits[c]) / np.linalg.norm(w[top] - w[c]) for c in range(CLASSES) if c != top]
        scores.append(-np.mean(gaps) / np.linalg.norm(row - mean))
    return scores


def slow_nnguide(layer, bank, z, k):
    (w, b), scores = weights(layer), []
    for row in z:
        near = [
            logsumexp(w @ other + b) * (row @ other) / (np.linalg.norm(row) * np.linalg.norm(other)) for other in bank
        ]
        scores.append(-np.mean(sorted(near)[-k:]) * logsumexp(w @ row + b))
    return scores


def slow_shaped(layer, z, kind, share):
    (w, b), scores = weights(layer), []
    for row in z:
        kept = len(row) - round(len(row) * share)
        largest = np.argsort(-row, kind="stable")[:kept]
        factor = np.exp(row.sum() / row[largest].sum())
        shaped = row if kind == "scale" else np.where(np.isin(np.arange(len(row)), largest), row, 0)
        scores.append(-logsumexp(w @ (factor * shaped) + b))
    return scores


def slow_rmds(bank, labels, z):
    means = [bank[labels == c].mean(axis=0) for c in range(CLASSES)]
    within = sum((bank[labels == c] - means[c]).T @ (bank[labels == c] - means[c]) for c in range(CLASSES)) / len(bank)
    inside, around = np.linalg.inv(within), np.linalg.inv(np.cov(bank.T, bias=True))
    whole = bank.mean(axis=0)
    return [min((r - m) @ inside @ (r - m) for m in means) - (r - whole) @ around @ (r - whole) for r in z]


def slow_kl(held, probs):
    typical = [held[held.argmax(axis=1) == k].mean(axis=0) for k in np.unique(held.argmax(axis=1))]
    return [min(sum(p * np.log(p / d) for p, d in zip(row, t, strict=True)) for t in typical) for row in probs]


def twins(layer):
    """Name → the score and its slow twin's values for 40 samples, those of pytorch-ood's class by its name."""
    bank, labels = features(0, 300)
    z = features(1, 40)[0] + 0.1 * np.random.default_rng(2).random((40, WIDTH)).astype(np.float32)
    bank64, z64 = bank.astype(np.float64), z.astype(np.float64)
    return torch.tensor(z), {
        "vim": (ViM(dim=4), slow_vim(layer, bank64, z64, 4)),
        "fdbd": (FDBD(), slow_fdbd(layer, bank64, z64)),
        "nnguide": (NNGuide(k=7), slow_nnguide(layer, bank64, z64, 7)),
        "scale": (Shaped("scale", 0.7), slow_shaped(layer, z64, "scale", 0.7)),
        "ash": (Shaped("ash", 0.7), slow_shaped(layer, z64, "ash", 0.7)),
        "rmds": (RMDS(), slow_rmds(bank64, labels, z64)),
    }


NAMES = ["vim", "fdbd", "nnguide", "scale", "ash", "rmds"]


@pytest.mark.parametrize("name", NAMES)
def test_against_a_twin_after_loading_too(name, layer):
    z, made = twins(layer)
    score, expected = made[name]
    fitted(score, layer)
    again = type(score)(**score.settings())
    again.load_state_dict(score.state_dict())
    for one in (score, again):
        assert one.ready
        np.testing.assert_allclose(found(one, z), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["vim", "fdbd", "nnguide", "scale", "ash"])
def test_standardised_features_are_read_as_the_layer_was_given_them(name, layer):
    z, made = twins(layer)
    score, expected = made[name]
    moments = torch.rand(WIDTH), torch.rand(WIDTH) + 0.5
    fitted(score, layer, moments)
    again = type(score)(**score.settings())
    again.load_state_dict(score.state_dict())
    np.testing.assert_allclose(found(again, (z - moments[0]) / moments[1]), expected, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("name", NAMES)
def test_against_pytorch_ood(name, layer):
    peers = pytest.importorskip("pytorch_ood.detector")
    (bank, labels), (z, made) = (torch.tensor(v) for v in features(0, 300)), twins(layer)
    head = nn.Sequential(nn.Flatten(), layer)
    if name in ("scale", "ash"):
        peer = {"scale": peers.SCALE, "ash": peers.ASH}[name](nn.Identity(), head, percentile=0.7)
        expected = peer.predict(z[:, :, None, None])
    else:
        peer = {
            "vim": lambda: peers.ViM(None, 4, layer.weight, layer.bias),
            "fdbd": lambda: peers.fDBD(nn.Identity(), layer),
            "nnguide": lambda: peers.NNGuide(nn.Identity(), layer, k=7),
            "rmds": lambda: peers.RMD(None),
        }[name]()
        expected = peer.fit_features(bank, labels).predict_features(z)
        expected = expected * len(bank) if name == "rmds" else expected  # its covariances are sums
    ours = found(fitted(made[name][0], layer), z)
    np.testing.assert_allclose(ours, expected.detach(), rtol=1e-3, atol=1e-3)


# -- the prediction alone ---------------------------------------------------------------------------------------------


def probabilities(seed, n=60):
    return softmax(3 * np.random.default_rng(seed).normal(size=(n, CLASSES)), axis=1)


@pytest.mark.parametrize("most", [3, 100])
def test_generalised_entropy(most):
    probs = probabilities(0)
    largest = -np.sort(-probs, axis=1)[:, :most]
    expected = (largest**0.3 * (1 - largest) ** 0.3).sum(axis=1)
    np.testing.assert_allclose(GEN(0.3, most).score(torch.tensor(probs))["gen"], expected, rtol=1e-5)
    peers = pytest.importorskip("pytorch_ood.detector")
    peer = peers.GEN.score(torch.tensor(probs).log(), gamma=0.3, M=most) * min(most, CLASSES)
    np.testing.assert_allclose(expected, peer, rtol=1e-4)


def test_kl_matching():
    held, probs = probabilities(0), probabilities(1)
    held[:, 4] *= 1e-6  # a class that is never predicted
    held /= held.sum(axis=1, keepdims=True)
    score = KLMatching()
    assert score(Passes(torch.zeros(1, 2, 5), None, torch.zeros(2, 5), torch.full((2, 5), 0.2))) == {}
    reference = score.learn(torch.tensor(held, dtype=torch.float32))["kl_matching"]
    np.testing.assert_allclose(reference, slow_kl(held, held), rtol=1e-3, atol=1e-5)
    assert len(score.typical) == 4
    again = KLMatching()
    again.load_state_dict(score.state_dict())
    for one in (score, again):
        z = torch.tensor(probs)
        np.testing.assert_allclose(found(one, z, z.log()), slow_kl(held, probs), rtol=1e-3, atol=1e-5)
    peers = pytest.importorskip("pytorch_ood.detector")
    peer = peers.KLMatching(None).fit_logits(torch.tensor(held).log(), torch.zeros(len(held), dtype=torch.long))
    np.testing.assert_allclose(peer.predict_logits(torch.tensor(probs).log()), slow_kl(held, probs), rtol=1e-4)


def test_an_epoch_replaces_the_typical_predictions_of_the_one_before():
    score = KLMatching()
    score.learn(torch.tensor(probabilities(0)))
    score.learn(torch.tensor(probabilities(7)))
    probs = probabilities(1)
    np.testing.assert_allclose(
        score.score(torch.tensor(probs))["kl_matching"], slow_kl(probabilities(7), probs), rtol=1e-3, atol=1e-5
    )


# -- taps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "as_they_are"), [({"raw": True}, True), ({"scaled": True}, True), ({}, False)])
def test_mahalanobis_reads_inputs_and_taps_as_they_are(context, as_they_are):
    z, y = (torch.tensor(v) for v in features(0, 300))
    score, plain = Mahalanobis(), Mahalanobis(normalize=not as_they_are)
    score.set_context(ScoreContext(CLASSES, **context))
    for one in (score, plain):
        fit_score(one, z, y)
    again = Mahalanobis()
    again.load_state_dict(score.state_dict())
    for one in (score, again):
        torch.testing.assert_close(one.distances(z[:9]), plain.distances(z[:9]))


def test_a_checkpoint_of_before_still_loads():
    z, y = (torch.tensor(v) for v in features(0, 300))
    score, again = Mahalanobis(), Mahalanobis()
    fit_score(score, z, y)
    state = score.state_dict()
    del state["unit"]
    again.load_state_dict(state)
    torch.testing.assert_close(again.distances(z), score.distances(z))


# -- in a model -------------------------------------------------------------------------------------------------------


def network(classes=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, classes)).eval()


LAST = [ViM(), FDBD(), NNGuide(), Shaped()]


@pytest.mark.parametrize("score", LAST, ids=lambda score: type(score).__name__)
def test_a_model_without_the_layer_is_refused(score, tmp_path, quiet_trainer, digits):
    name = type(score).__name__
    wanted = f"expected a frozen network with its linear classification layer for the score {name}, got"
    with pytest.raises(ValueError, match=f"{wanted} a model without a backbone"):
        BRAINet(8, head=Linear(), scores=[type(score)()])
    for body in (Backbone(network()[:3], head_layer=""), Backbone(network(), freeze=False)):
        with pytest.raises(ValueError, match=f"{wanted} a backbone without one, or one that is trained"):
            quiet_trainer(tmp_path).fit(BRAINet(8, body, Linear(), scores=[type(score)()]), datamodule=digits)


def test_one_class_and_features_that_do_not_vary_are_refused(layer):
    z, y = (torch.tensor(v) for v in features(0, 300))
    with pytest.raises(ValueError, match="expected training samples of at least two classes for the score RMDS"):
        fit_score(RMDS(), z, torch.zeros(300, dtype=torch.long))
    one = nn.Linear(WIDTH, 1)
    for score in (ViM(dim=4), FDBD(), NNGuide(), Shaped()):
        with pytest.raises(ValueError, match="got a layer of one output, which tells no classes"):
            fitted(score, one)
    for score in (KNN(), Mahalanobis(), FDBD()):
        score.set_context(ScoreContext(CLASSES, last_layer=LastLayer(layer.weight.detach(), layer.bias.detach())))
        with pytest.raises(ValueError, match="expected features that vary"):
            fit_score(score, torch.ones_like(z), y)


@pytest.mark.parametrize("score", [GEN, KLMatching])
def test_a_task_without_classes_is_refused(score):
    with pytest.raises(ValueError, match=f"expected a classification for the score {score.__name__}, got a task"):
        BRAINet(task="Regression", head=Linear(), scores=[score()])


def test_settings_are_checked():
    with pytest.raises(ValueError, match="kind to be one of"):
        Shaped("ashes")
    with pytest.raises(ValueError, match="a share of at least 0 and below 1"):
        Shaped(share=1.0)
    with pytest.raises(ValueError, match="dim of at least 1"):
        ViM(dim=0)
    with pytest.raises(ValueError, match="expected scores to be one of"):
        BRAINet(8, scores="most")


def test_every_score_of_a_model(tmp_path, quiet_trainer, digits):
    net = network()
    model = BRAINet(8, Backbone(net, layers=None), Linear(), scores="all")
    trainer = quiet_trainer(tmp_path)
    trainer.fit(model, datamodule=digits)
    path = tmp_path / "all.ckpt"
    trainer.save_checkpoint(path)
    x = torch.cat([x for x, _ in digits.test_dataloader()["test"]])
    loaded = BRAINet.load_from_checkpoint(path, backbone=Backbone(network(), layers=None))
    answer, again = model.eval().predict_step([x], 0), loaded.eval().predict_step([x], 0)
    names = [
        "generative",
        "knn",
        "mahalanobis",
        "rmds",
        "gen",
        "kl_matching",
        "own_energy",
        "vim",
        "fdbd",
        "nnguide",
        "shaped",
        "shaped_ash",
        "joint",
    ]
    for name in names:
        torch.testing.assert_close(answer[name], again[name], msg=name)
        assert bool(answer[name].isfinite().all()), name
    with torch.no_grad():
        z = net[:3](x)
        logits = model.backbone.base_layer(z)
        top = logits.amax(dim=1)
    w = model.backbone.base_layer.weight
    gaps = torch.cdist(w, w) + torch.eye(8)
    mean = net[:3](torch.stack([x for x, *_ in digits.train_dataloader().dataset])).mean(dim=0)
    expected = -((top[:, None] - logits) / gaps[logits.argmax(dim=1)]).sum(dim=1) / 7 / (z - mean).norm(dim=1)
    torch.testing.assert_close(answer["fdbd"], expected, rtol=1e-3, atol=1e-4)


def test_every_score_of_inputs_alone():
    model = BRAINet(8, head=Linear(), scores="all")
    assert {type(score).__name__ for score in model.scores} == {
        "Generative", "KNN", "Mahalanobis", "RMDS", "GEN", "KLMatching", "Combined",
    }  # fmt: skip
    assert all(isinstance(score, Score) for score in model.scores)
    assert "gen" not in BRAINet(task="Regression", head=Linear(), scores="all").scores.units


# -- in the place of a head, outside Lightning ------------------------------------------------------------------------


class Maps(nn.Module):
    """Two small stages, and a layer that `swap_head` removes; `flat` lets nothing of the second through."""

    def __init__(self, flat=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in ((1, 4), (4, 8))
        )
        self.fc, self.flat = nn.Linear(8, 3), flat

    def features(self, x):
        z = self.second(self.first(x)).mean(dim=(2, 3))
        return torch.ones_like(z) + 0 * z if self.flat else z

    def forward(self, x):
        return self.fc(self.features(x))


def brightness(n, seed):
    x = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    y = torch.arange(n) % 3
    return x + 0.4 * (y - 1)[:, None, None, None], y


SWAP = {"head": Linear(), "progress": False}
FIT = {"scores": "all", "max_epochs": 3, "input_dropout": 0.1, "progress": False}


def test_every_score_of_a_swapped_head(tmp_path):
    """One call with all detectors: which there are, two by hand, the same from a file, and strange images far up."""
    net = Maps().eval()
    model = swap_head(copy.deepcopy(net), brightness(240, 0), held=brightness(120, 1), **SWAP).fit(**FIT)
    known, strange = brightness(60, 2)[0], 4 * brightness(60, 3)[0]
    found, far = model.predict(known), model.predict(strange)
    expected = {"generative", "stages", "knn", "mahalanobis", "rmds", "gen", "kl_matching", "own_energy", "vim", "fdbd"}
    assert expected | {"nnguide", "shaped", "shaped_ash", "joint"} <= set(found)
    for name in expected:
        assert bool(found[name].isfinite().all()), name
    with torch.no_grad():
        z, train = net.features(known), net.features(brightness(240, 0)[0])
        torch.testing.assert_close(found["own_energy"], -net(known).logsumexp(dim=1))
        logits, w = net.fc(z), net.fc.weight
        gaps = torch.cdist(w, w) + torch.eye(3)
        top = logits.amax(dim=1, keepdim=True)
        fdbd = -((top - logits) / gaps[logits.argmax(dim=1)]).sum(dim=1) / 2 / (z - train.mean(dim=0)).norm(dim=1)
    torch.testing.assert_close(found["fdbd"], fdbd, rtol=1e-3, atol=1e-4)
    for name in ("stages", "mahalanobis", "joint"):
        assert float(far[name].median()) > float(found[name].max()), name
    model.save(tmp_path / "model.pt")
    again = load_swapped(tmp_path / "model.pt", Maps().eval()).predict(known)
    for name, values in found.items():
        torch.testing.assert_close(again[name], values, msg=name, rtol=1e-4, atol=1e-5)


def test_swapped_heads_refuse_what_detectors_cannot_read():
    train, held = brightness(120, 0), brightness(60, 1)
    headless = nn.Sequential(Maps().first, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    for score, wanted in (("ViM", "linear classification layer for the score ViM"), ("Own", "for the score Own")):
        model = swap_head(headless, train, held=held, num_classes=3, head_layer="", **SWAP)
        with pytest.raises(ValueError, match=f"{wanted}, got a backbone without one"):
            model.fit(**FIT | {"scores": [score]})
    model = swap_head(headless, train, held=held, num_classes=3, head_layer="", **SWAP).fit(**FIT)
    assert not {"vim", "own_energy", "fdbd"} & set(model.scores.units)  # "all" is what the model can have
    one = (train[0], torch.zeros_like(train[1]))
    with pytest.raises(ValueError, match="expected training samples of at least two classes, got 120 of class 0 alone"):
        swap_head(Maps().eval(), one, held=(held[0], torch.zeros_like(held[1])), **SWAP).fit(**FIT)
    with pytest.raises(ValueError, match="expected features that vary to fit a score to, got the same 8 numbers"):
        swap_head(Maps(flat=True).eval(), train, held=held, **SWAP).fit(**FIT)
