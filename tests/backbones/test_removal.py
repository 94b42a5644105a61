"""Which layer of a classifier is its head, and the features of the model without it."""

import copy

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet
from brainet_pl.backbones import Backbone, FeatureExtractor
from brainet_pl.backbones.removal import find_head


@pytest.mark.parametrize(
    ("name", "layer", "features"),
    [
        ("resnet18", "fc", 512),
        ("mobilenet_v3_small", "classifier.3", 1024),
        ("vgg16", "classifier.6", 4096),
        ("vit_b_32", "heads.head", 768),
        ("swin_t", "head", 768),
        ("densenet121", "classifier", 1024),
        ("convnext_tiny", "classifier.2", 768),
        ("efficientnet_b0", "classifier.1", 1280),
        ("inception_v3", "fc", 2048),  # both have auxiliary heads, which do not run in evaluation
        ("googlenet", "fc", 1024),
    ],
)
def test_the_classification_layer_is_found_in_torchvision_models(name, layer, features):
    options = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    with torch.device("meta"):  # shapes only: no time, no memory
        model = torchvision.models.get_model(name, weights=None, **options)
        body = Backbone(model).build()
        out = body(torch.zeros(2, 3, 299 if name == "inception_v3" else 224, 299 if name == "inception_v3" else 224))
    assert body.removed == (layer, False)
    assert out.shape == (2, features)
    assert isinstance(model.get_submodule(layer), nn.Linear)  # the original is not changed


@pytest.mark.parametrize("layer", [None, "classifier.1"])
def test_a_convolution_of_single_pixels_can_be_the_classifier(layer):
    model = torchvision.models.squeezenet1_1(num_classes=10).eval()
    x = torch.rand(2, 3, 64, 64)
    assert find_head(model, x, layer) == ("classifier.1", True)
    body = Backbone(model, head_layer=layer).build()
    torch.testing.assert_close(body(x), model.features(x).mean(dim=(2, 3)))


def test_a_convolution_after_the_pooling_gives_own_logits():
    convolutions = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 3, 1), nn.Flatten()]
    model, x = nn.Sequential(*convolutions), torch.rand(2, 1, 8, 8)
    body = Backbone(model).build()
    found = body(x, more=True)
    assert body.removed == ("3", False)
    torch.testing.assert_close(found.features, model[:3](x).flatten(1))
    torch.testing.assert_close(found.base_logits, model(x))


def test_a_convolution_inside_a_body_is_no_classifier():
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1)).eval()
    with pytest.raises(ValueError, match=r"expected a dense .* got an output that comes from"):
        find_head(body, torch.rand(2, 1, 8, 8))


class Misordered(nn.Module):
    """The classifier is registered before the block that is used before it."""

    def __init__(self, names=("top", "attention")):
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(6, 4) if name in ("top", "fc") else nn.Linear(6, 6))

    def forward(self, x):
        last, first = (self.get_submodule(name) for name in self.names)
        return last(torch.tanh(first(x)))


@pytest.mark.parametrize("names", [("top", "attention"), ("top", "fc_block")])
def test_the_order_of_registration_does_not_matter(names):
    model, x = Misordered(names), torch.randn(5, 6)
    body = Backbone(model).build()
    torch.testing.assert_close(body(x), torch.tanh(model.get_submodule(names[1])(x)))
    assert body.removed == ("top", False)


class Distilled(nn.Module):
    """A transformer in miniature with a head for the label and one for the teacher."""

    def __init__(self, average):
        super().__init__()
        self.body, self.head, self.head_dist = nn.Linear(6, 8), nn.Linear(4, 3), nn.Linear(4, 3)
        self.average = average

    def forward(self, x):
        a, b = self.body(x).chunk(2, dim=1)
        a, b = self.head(a), self.head_dist(b)
        return (a + b) / 2 if self.average else (a, b)


@pytest.mark.parametrize("average", [True, False])
def test_two_heads_are_both_named_and_either_can_be_chosen(average):
    model, x = Distilled(average), torch.randn(5, 6)
    with pytest.raises(ValueError, match=r"got 2 .* 'head' and 'head_dist': name the one .*head_layer='head'"):
        Backbone(model).build()(x)
    body = Backbone(model, head_layer="head").build()
    torch.testing.assert_close(body(x), model.body(x)[:, :4])
    assert body.removed == ("head", True)


class Steps(nn.Module):
    """A body, a dense layer and what a function makes of them."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.fc, self.body, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.run(self, torch.relu(self.body(x)))


@pytest.mark.parametrize(
    "run",
    [
        lambda m, h: m.fc(h).softmax(dim=1),
        lambda m, h: F.log_softmax(m.fc(h) * m.scale, dim=1),
        lambda m, h: m.fc(h)[:, :3],
        lambda m, h: {"logits": m.fc(h).exp()},
        lambda m, h: F.relu(m.fc(h), inplace=True),
    ],
)
def test_what_comes_after_the_layer_does_not_change_the_features(run):
    model, x = Steps(run), torch.randn(5, 6)
    body = Backbone(model).build()
    torch.testing.assert_close(body(x), torch.relu(model.body(x)))
    assert body.removed == ("fc", True)


@pytest.mark.parametrize(
    "pick", [lambda x: x[:, -1], lambda x: x[torch.arange(len(x)), torch.tensor([0, 2, 1, 6, 3])[: len(x)]]]
)
def test_one_token_that_is_chosen_after_the_layer_is_kept(pick):
    model, x = Steps(lambda m, h: {"logits": pick(m.fc(h)), "hidden": h}), torch.randn(5, 7, 6)
    body = Backbone(model).build()
    found = body(x, more=True)
    torch.testing.assert_close(found.features, pick(torch.relu(model.body(x))))
    torch.testing.assert_close(found.base_logits, model(x)["logits"])
    assert body.removed == ("fc", False)


def test_a_mean_over_places_after_the_layer_is_kept():
    model, x = Steps(lambda m, h: m.fc(h).mean(dim=1)), torch.randn(5, 7, 6)
    body = Backbone(model).build()
    torch.testing.assert_close(body(x), torch.relu(model.body(x)).mean(dim=1))
    assert body.removed == ("fc", False)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda m, h: m.fc(h) + m.fc(h.flip(1)), "layer 'fc' of Steps to be used once in a pass, got 2 uses"),
        (lambda m, h: m.fc(m.fc(h)), "used once in a pass, got 2 uses"),
        (lambda m, h: h + m.fc(h), "got 2 whose outputs reach the output: 'body' and 'fc'"),
        (lambda m, h: m.fc(h) @ m.fc.weight, r"got an output that comes from fc\.weight as well"),
        (lambda m, h: m.fc(h).argmax(dim=1), "got none: name the layer to remove"),
        (lambda m, h: m.fc(h).detach(), "got none: name the layer to remove"),
    ],
)
def test_what_is_not_clear_is_asked_for(run, message):
    with pytest.raises(ValueError, match=message):
        Backbone(Steps(run)).build()(torch.randn(5, 6))


def test_a_residual_network_without_a_head_does_not_lose_a_layer():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return x + self.fc(x)

    x = torch.randn(5, 6)
    with pytest.raises(ValueError, match="got an output that comes from its inputs as well"):
        Backbone(Residual()).build()(x)
    assert Backbone(Residual(), head_layer="").build()(x).shape == (5, 6)
    body = Backbone(Residual(), head_layer="fc").build()
    torch.testing.assert_close(body(x), x)


def test_attention_after_a_dense_layer_is_not_overlooked():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            h = self.embed(x)
            return self.attention(h, h, h)[0].mean(dim=1)

    with pytest.raises(ValueError, match=r"comes from attention\.\S*proj"):
        Backbone(Attention()).build()(torch.randn(2, 4, 6))


def test_a_layer_that_is_not_used_is_refused():
    model = Steps(lambda m, h: h)
    with pytest.raises(ValueError, match="layer 'fc' of Steps to be used once in a pass, got 0 uses"):
        Backbone(model, head_layer="fc").build()(torch.randn(5, 6))
    with pytest.raises(ValueError, match=r"to name a layer of the model \(fc, body\), got 'nope'"):
        Backbone(model, head_layer="nope").build()


def test_the_pass_leaves_no_trace():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).train()
    model[0].weight.requires_grad_(False)
    model[2].eval()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with torch.inference_mode():  # as in trainer.test
        head = find_head(model, torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    assert head == ("3", False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == [True, True, True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True, True, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(m._forward_hooks for m in model.modules())


def test_a_frozen_trunk_and_token_inputs():
    model = nn.Sequential(nn.EmbeddingBag(10, 6), nn.Linear(6, 3)).requires_grad_(False)
    tokens = torch.randint(0, 10, (4, 5))
    torch.testing.assert_close(Backbone(model).build()(tokens), model[0](tokens))


def test_features_are_reached_through_the_extractor_alone():
    body = FeatureExtractor(Steps(lambda m, h: m.fc(h).softmax(dim=1)), head_layer=None)
    assert body.needs_sample
    body(torch.randn(5, 6))
    assert not body.needs_sample
    with pytest.raises(Exception, match="call it through a FeatureExtractor"):
        body.model(torch.randn(5, 6))


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("run", [lambda m, h: m.fc(h), lambda m, h: m.fc(h).softmax(dim=1)])
def test_a_model_finds_the_layer_at_setup_and_a_checkpoint_remembers_it(tmp_path, quiet_trainer, run, freeze):
    x = torch.randn(32, 6)
    loader = DataLoader(TensorDataset(x, torch.arange(32) % 3), batch_size=8)
    model = BRAINet(3, backbone=Backbone(Steps(run), freeze=freeze), head="Linear")
    trainer = quiet_trainer(tmp_path)
    trainer.fit(model, loader)
    held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert {id(p) for p in model.parameters() if p.requires_grad} == held  # no weight of the old head is optimized
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = BRAINet.load_from_checkpoint(tmp_path / "a.ckpt", backbone=Steps(run))
    assert not loaded.backbone.needs_sample
    torch.testing.assert_close(loaded.eval()(x), model.eval()(x))


def test_a_model_that_never_fits_finds_the_layer_with_the_first_inputs(tmp_path, quiet_trainer):
    model = BRAINet(3, backbone=Misordered(), head="Linear")
    model.predictor.build_head(model.head_settings, 6)
    loader = DataLoader(TensorDataset(torch.randn(8, 6), torch.arange(8) % 3), batch_size=4)
    quiet_trainer(tmp_path).test(model, loader, verbose=False)  # in inference mode
    assert model.backbone.removed == ("top", False)
