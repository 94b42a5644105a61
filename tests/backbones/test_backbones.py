import warnings
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet, swap_head
from brainet_pl._utils.checks import UsageError
from brainet_pl.backbones.cifar import CIFAR
from brainet_pl.backbones.extractor import FeatureExtractor
from brainet_pl.backbones.loading import Backbone, load_weights, make_backbone
from brainet_pl.network import BayesHead, EnsembleHead, Linear, LinearHead, MLPHead, Tree, stacked_tree


@pytest.mark.parametrize(("name", "features"), [("cifar_resnet20", 64), ("cifar_vgg13", 512), ("cifar_vgg16", 512)])
def test_cifar_networks(name, features):
    model = make_backbone(name)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert Backbone(model).build()(torch.zeros(2, 3, 32, 32)).shape == (2, features)


@pytest.mark.parametrize(
    ("name", "features", "params"), [("cifar_preresnet164", 256, 1.70e6), ("cifar_wrn28_10", 640, 36.5e6)]
)
def test_large_cifar_networks(name, features, params):
    with torch.device("meta"):
        model = CIFAR[name]()
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(params, rel=0.02)
        assert Backbone(model).build()(torch.zeros(2, 3, 32, 32)).shape == (2, features)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {k: v for k, v in s.items() if not k.endswith("num_batches_tracked")},  # of an old torch
    ],
)
def test_weight_files_in_usual_layouts(tmp_path, wrap):
    source = make_backbone("cifar_resnet20")
    path = tmp_path / "weights.pth"
    torch.save(wrap(source.state_dict()), path)
    loaded = make_backbone("cifar_resnet20", str(path))
    torch.testing.assert_close(loaded.conv1.weight, source.conv1.weight)
    with pytest.raises(ValueError, match="expected the weights of CifarVGG"):
        load_weights(make_backbone("cifar_vgg13"), path)


def test_frozen_means_statistics_too():
    body = FeatureExtractor(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4)), frozen=True)
    wrapper = nn.ModuleList([body]).train()
    assert not body.training
    before = body.model[1].running_mean.clone()
    body(torch.randn(8, 4) + 5)
    torch.testing.assert_close(body.model[1].running_mean, before)
    assert not any(p.requires_grad for p in wrapper.parameters())
    live = FeatureExtractor(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4)), frozen=False).train()
    live(torch.randn(8, 4) + 5)
    assert live.model[1].running_mean.abs().sum() > 0


class Odd(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, x):
        return self.result(x)


def test_features_are_flattened_or_averaged():
    maps = FeatureExtractor(Odd(lambda x: torch.ones(len(x), 5, 3, 3)))
    assert maps(torch.zeros(2, 1)).shape == (2, 5)
    assert FeatureExtractor(None)(torch.zeros(2, 1, 8, 8)).shape == (2, 64)
    with pytest.raises(ValueError, match=r"return one tensor, got 0 \(2, 1\), 1 \(2, 1\): name the layer"):
        FeatureExtractor(Odd(lambda x: (x, x)))(torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"shape \(batch, d\)"):
        FeatureExtractor(Odd(lambda x: torch.zeros(7)))(torch.zeros(2, 1))


def test_bad_names_are_named():
    with pytest.raises(ValueError, match=r"torchvision/NAME.*got 'resnet99'"):
        make_backbone("resnet99")
    with pytest.raises(ValueError, match="head_layer to name a layer"):
        Backbone("cifar_resnet20", head_layer="top").build()


@pytest.mark.parametrize("budget", [5_000, 60_000])
def test_other_heads_meet_the_budget_and_give_passes(budget):
    x = torch.randn(6, 20)
    heads = {
        "mlp": MLPHead(20, 4, budget),
        "mc_dropout": MLPHead(20, 4, budget, dropout=0.2),
        "ensemble": EnsembleHead(stacked_tree(20, 2), 4, budget, members=3),
        "bayes": BayesHead(20, 4, budget),
    }
    for name, head in heads.items():
        size = sum(p.numel() for p in head.parameters())
        assert size == pytest.approx(budget, rel=0.15), name
        head.eval()
        with torch.no_grad():
            logits = head.passes(x, 5).values
        assert logits.shape == ({"mlp": 1, "ensemble": 3}.get(name, 5), 6, 4)
        if name in ("mc_dropout", "bayes"):
            assert not torch.allclose(logits[0], logits[1])
    assert LinearHead(20, 4).passes(x, 5).values.shape == (1, 6, 4)
    ensemble = heads["ensemble"]
    with torch.no_grad():
        torch.testing.assert_close(ensemble(x), ensemble.passes(x, 1).values)
    assert heads["bayes"].penalty() > 0


def test_a_hidden_layer_is_needed():
    with pytest.raises(ValueError, match=r"hidden of at least 1 .*got 0: without a hidden layer, use the head Linear"):
        MLPHead(20, 4, 5000, hidden=0)


def test_swap_head_outside_lightning():
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=7)
    images = torch.rand(60, 3, 32, 32)
    swapped = swap_head(
        model, images, num_classes=3, head=Tree(num_params=60_000), threshold=0.3, test="gaussian", progress=False
    )
    assert isinstance(model.fc, nn.Linear)
    assert swapped.train()(images[:4]).shape == (4, 3)
    assert not swapped.backbone.training
    probs = swapped.eval().probabilities(images[:4], passes=5)
    assert probs.shape == (5, 4, 3)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    again = swap_head(model, swapped.head.ggt, num_classes=3)
    assert again.head.ggt is swapped.head.ggt
    other = swap_head(model, images, num_classes=3, head="MLP")  # any head, and no structure where none is needed
    assert other.eval().predict(images[:4])["probabilities"].shape == (4, 3)


def test_a_frozen_network_without_weights_is_warned_of(tmp_path, quiet_trainer):
    data = DataLoader(TensorDataset(torch.rand(24, 3, 32, 32), torch.arange(24) % 2), batch_size=8)
    torch.save(make_backbone("cifar_resnet20").state_dict(), tmp_path / "weights.pth")

    def said(model):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = quiet_trainer(tmp_path)
            trainer.fit(model, data)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return any("features are those of a random network" in str(one.message) for one in caught)

    def fresh(**settings):
        return BRAINet(2, backbone=Backbone("cifar_resnet20", layers=None, **settings), head=Linear())

    assert said(fresh())
    assert not said(BRAINet.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True))
    assert not said(fresh(weights=str(tmp_path / "weights.pth")))
    assert not said(fresh(freeze=False))


def test_weights_that_cannot_be_downloaded_say_what_to_do(monkeypatch, tmp_path):
    def offline(*_, **__):
        raise URLError("Name or service not known")

    monkeypatch.setattr("torch.hub.download_url_to_file", offline)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"weights DEFAULT of torchvision/resnet18, got Name .* a file of weights"):
        make_backbone("torchvision/resnet18", "DEFAULT")
