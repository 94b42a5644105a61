"""Taps: pooled features against plain NumPy, stages of real models, scale, one pass, what can't be tapped."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from brainet_pl import Backbone, BRAINet, swap_head
from brainet_pl.backbones.extractor import FeatureExtractor
from brainet_pl.backbones.loading import make_backbone
from brainet_pl.backbones.stages import channels_of, find_stages, first_tensor, trace_layers
from brainet_pl.backbones.taps import Tap, Taps, pooled, width_of
from brainet_pl.callbacks import FeatureCache, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.network import Linear, Tree
from brainet_pl.scores import KNN, Generative, Mahalanobis


class Net(nn.Module):
    """Two stages of maps, the second changed in place after its end, and a classification layer."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.two = nn.Sequential(nn.Conv2d(4, 6, 2, stride=2), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1))
        self.fc = nn.Linear(6, 10)

    def forward(self, x):
        x = self.two(self.one(x))
        return self.fc(torch.relu_(x).mean(dim=(2, 3)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def outputs(model, x, *names):
    """What layers give, one by one, by plain hooks on a copy."""
    model, found = copy.deepcopy(model), {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda m, a, out, name=name: found.__setitem__(name, out.detach().clone())
        )
    with torch.no_grad():
        model(x)
    return [found[name] for name in names]


# -- pooling ----------------------------------------------------------------------------------------------------------


def test_pools_of_maps_against_numpy():
    maps = torch.randn(3, 5, 8, 6)
    x = maps.numpy()
    mean, std = x.mean(axis=(2, 3)), x.std(axis=(2, 3))
    grid = x.reshape(3, 5, 2, 4, 3, 2).mean(axis=(3, 5)).reshape(3, 30)
    expected = {"mean": mean, "mean_std": np.hstack([mean, std]), "2x3": grid, "flatten": x.reshape(3, -1)}
    for pool, value in expected.items():
        for channels, axes in ((1, (0, 1, 2, 3)), (-1, (0, 2, 3, 1))):
            if pool == "flatten" and channels == -1:
                continue
            found = pooled(maps.permute(axes), pool, channels)
            np.testing.assert_allclose(found, value, atol=1e-5)
            shape = tuple(maps.permute(axes).shape[1:])
            tap = Tap("a", pool, shape, channels)
            assert width_of(tap) == found.shape[1] == len(tap.names())


def test_pools_of_tokens_against_numpy():
    tokens = torch.randn(3, 7, 5)
    x = tokens.numpy()
    expected = {
        "mean": x.mean(axis=1), "tokens": x.mean(axis=1), "cls": x[:, 0], "flatten": x.reshape(3, -1),
        "mean_std": np.hstack([x.mean(axis=1), x.std(axis=1)]),
    }  # fmt: skip
    for pool, value in expected.items():
        found = pooled(tokens, pool, -1)
        np.testing.assert_allclose(found, value, atol=1e-5)
        assert width_of(Tap("a", pool, (7, 5), -1)) == found.shape[1] == len(Tap("a", pool, (7, 5), -1).names())
    np.testing.assert_allclose(pooled(tokens, "mean", 1), x.mean(axis=2), atol=1e-6)
    assert pooled(torch.ones(2, 3), "4x4").shape == (2, 3)


def test_pools_of_tokens_leave_padding_out():
    tokens = torch.randn(3, 7, 5)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5])
    tokens[mask == 0] = torch.nan
    for pool in ("mean", "tokens", "mean_std", "cls"):
        kept = [row[kept == 1][None] for row, kept in zip(tokens, mask, strict=True)]
        expected = torch.cat([pooled(row, pool, -1) for row in kept])
        torch.testing.assert_close(pooled(tokens, pool, -1, mask), expected)
    maps = torch.randn(3, 7, 5)
    torch.testing.assert_close(pooled(maps, "mean", 1, mask), maps.mean(2))  # channels, no tokens


def test_names_say_layer_channel_and_place():
    assert Tap("layer2", "2x2", (3, 8, 8), 1).names()[4:6] == ["layer2[1]@(0,0)", "layer2[1]@(0,1)"]
    assert Tap("a", "mean_std", (2, 4, 4), 1).names() == ["a[0]", "a[1]", "a[0]:std", "a[1]:std"]
    assert Tap("a", "flatten", (2, 3), -1).names() == [f"a[{c}]@({t})" for t in range(2) for c in range(3)]
    one = torch.zeros(1, 3, 8, 8)
    one[0, 1, 0, 7] = 1
    for pool in ("2x2", "flatten"):
        tap = Tap("a", pool, (3, 8, 8), 1)
        (where,) = pooled(one, pool).flatten().nonzero().tolist()
        assert tap.names()[where[0]] == ("a[1]@(0,1)" if pool == "2x2" else "a[1]@(0,7)")


# -- one pass ---------------------------------------------------------------------------------------------------------


def test_taps_give_what_the_layers_give_and_leave_the_model_alone(net):
    x = torch.randn(5, 1, 8, 8)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    body = Backbone(net, layers=["one", "two"], pool=["2x2", "mean_std"]).build()
    one, two = outputs(net, x, "one", "two")
    expected = torch.cat([pooled(one, "2x2"), pooled(two, "mean_std")], dim=1)
    for _ in range(2):
        torch.testing.assert_close(body(x), expected)  # although the model goes on in place
    reading = body(x, more=True)
    torch.testing.assert_close(reading.base_logits, net(x))
    assert body.names[0] == "one[0]@(0,0)"
    assert len(body.names) == expected.shape[1]
    assert not any(m._forward_hooks for m in net.modules())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_a_copy_reads_its_own_weights(net):
    x = torch.randn(5, 1, 8, 8)
    body = Backbone(net, layers="one").build()
    first = body(x)
    other = copy.deepcopy(body)
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(2)
    assert not torch.allclose(other(x), first)
    torch.testing.assert_close(body(x), first)


def test_every_view_comes_from_one_pass(net):
    passes = []
    body = Backbone(net, layers=["two"]).build()
    body.add_view(Taps.of("one", "2x2"))
    body.add_view(Taps.of(["one", "two"], "mean"))
    x = torch.randn(5, 1, 8, 8)
    body(x)
    body.model.register_forward_hook(lambda *args: passes.append(1))
    found = body(x, more=True)
    assert len(passes) == 1
    assert [v.shape[1] for v in (found.features, *found.more.values())] == [6, 16, 10]
    one, two = outputs(net, x, "one", "two")
    torch.testing.assert_close(found.view(Taps.of("one", "2x2")), pooled(one, "2x2"))
    torch.testing.assert_close(found.view(Taps.of(["one", "two"])), torch.cat([one.mean((2, 3)), two.mean((2, 3))], 1))


def test_gradients_reach_the_layers_of_a_backbone_that_trains(net):
    body = Backbone(net, freeze=False, layers="one", pool="2x2").build()
    x = torch.randn(5, 1, 8, 8)
    body.train()(x).sum().backward()
    twin = copy.deepcopy(body.model)
    for p in twin.parameters():
        p.grad = None
    one = nn.Sequential(*twin.one)
    one._forward_hooks.clear()
    pooled(one(x), "2x2").sum().backward()
    torch.testing.assert_close(body.model.one[0].weight.grad, one[0].weight.grad)
    assert body.base_layer.weight.grad is None


@pytest.mark.parametrize("frozen", [True, False])
def test_the_scale_is_that_of_the_training_features(net, frozen):
    x = torch.randn(50, 1, 8, 8)
    body = Backbone(net, freeze=frozen, layers=["one", "two"]).build().eval()
    body.add_view(Taps.of("one", "2x2"))
    raw = body(x, more=True)
    assert body.needs_scale
    whole = body.set_scale([raw[:20].map(torch.detach), raw[20:].map(torch.detach)])
    assert not body.needs_scale
    found = body(x, more=True)
    for taps in (None, Taps.of("one", "2x2")):
        before, after = raw.view(taps), found.view(taps)
        expected = (before - before.mean(0)) / before.std(0, correction=0)
        torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)
        parts = torch.cat([part.view(taps) for part in whole])
        torch.testing.assert_close(parts, after.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.base_logits, raw.base_logits)


def test_a_feature_that_does_not_vary_stays_finite(net):
    with torch.no_grad():
        net.one[3].weight[1].zero_()
    body = Backbone(net, layers="one").build()
    x = torch.randn(20, 1, 8, 8)
    body.set_scale([body(x, more=True)])
    assert body(x).isfinite().all()
    assert float(body(x)[:, 1].abs().max()) < 1e-6


@pytest.mark.parametrize("backend", ["eager"])
def test_taps_compile_without_a_break(net, backend):
    x = torch.randn(4, 1, 8, 8)
    body = Backbone(net, layers=["one", "two"], pool="2x2").build()
    expected = body(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(body, backend=backend, fullgraph=True)(x), expected)


def test_taps_export_with_a_free_batch_size(net):
    body = Backbone(net, layers=["one", "two"], pool="2x2").build()
    body(torch.randn(4, 1, 8, 8))
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(body, (torch.randn(4, 1, 8, 8),), dynamic_shapes={"x": {0: batch}})
    x = torch.randn(7, 1, 8, 8)
    torch.testing.assert_close(program.module()(x), body(x))


class ByName(nn.Module):
    """Takes its input by name, and gives logits by name."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, pixels):
        return {"logits": self.net(pixels)}


@pytest.mark.parametrize("form", ["plain", "left at its layer", "by name"])
def test_the_last_layer_exports_with_a_free_batch_size(net, form):
    wrap = {"plain": lambda m: m, "left at its layer": lambda m: nn.Sequential(m, nn.Softmax(1)), "by name": ByName}
    body = Backbone(wrap[form](net)).build()

    def given(n):
        x = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(n))
        return {"pixels": x} if form == "by name" else x

    body(given(4))
    assert body.removed.leave == (form == "left at its layer")
    free = {0: torch.export.Dim("batch", min=2)}
    shapes = {"x": {"pixels": free} if form == "by name" else free}
    program = torch.export.export(body, (given(4),), dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(given(7)), body(given(7)))


# -- stages of real models --------------------------------------------------------------------------------------------

STAGES = {
    "resnet18": ["layer1", "layer2", "layer3", "layer4"],
    "resnet50": ["layer1", "layer2", "layer3", "layer4"],
    "vgg16": ["features.3", "features.8", "features.15", "features.22", "features.29"],
    "convnext_tiny": ["features.1", "features.3", "features.5", "features"],
    "vit_b_16": [f"encoder.layers.encoder_layer_{i}" for i in (2, 5, 8, 11)],
    "swin_t": ["features.1", "features.3", "features.5", "permute"],
    "densenet121": ["features.denseblock1", "features.denseblock2", "features.denseblock3", "features"],
}


@pytest.mark.parametrize("name", STAGES)
def test_the_stages_of_torchvision_models(name):
    with torch.device("meta"):
        model = torchvision.models.get_model(name, num_classes=10).eval()
        x = torch.zeros(2, 3, 224, 224)
        with torch.no_grad():
            uses = trace_layers(model, lambda: model(x), 2)
    found = find_stages(model, uses)
    assert found == STAGES[name]


def test_the_stages_of_a_cifar_network():
    body = Backbone(make_backbone("cifar_resnet20"), layers="stages", pool="mean_std").build()
    assert body(torch.zeros(2, 3, 32, 32)).shape == (2, 2 * (16 + 32 + 64))
    assert [tap.layer for tap in body.views[0].resolved] == ["layer1", "layer2", "layer3"]


def test_a_small_network_with_one_layer_a_stage():
    convolutions = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(36, 10))
    body = Backbone(model, layers="stages").build()
    body(torch.zeros(2, 1, 12, 12))
    assert [tap.layer for tap in body.views[0].resolved] == ["1", "4"]


class Windows(nn.Module):
    """Two stages of channels-last blocks that work on windows, whose batch is not that of the samples."""

    def __init__(self, width):
        super().__init__()
        self.dense, self.more = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        windows = x.unflatten(1, (2, -1)).unflatten(3, (2, -1)).permute(0, 1, 3, 2, 4, 5).flatten(0, 2)
        new = self.more(torch.relu(self.dense(windows.flatten(1, 2)))).view_as(windows)
        return x + new.unflatten(0, (len(x), 2, 2)).permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)


class Merge(nn.Module):
    def __init__(self, width, new):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(width), nn.Linear(4 * width, new)

    def forward(self, x):
        x = self.norm(x)
        return self.dense(torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=3))


@pytest.mark.parametrize("width", [4, 8, 12])  # 8: as wide as the maps are high
def test_stages_of_maps_with_channels_last_and_windows(width):
    stages = [nn.Sequential(Windows(width), Windows(width)), nn.Sequential(Merge(width, 10), Windows(10))]
    model = nn.Sequential(*stages, nn.Flatten(), nn.Linear(160, 3))
    body = Backbone(model, layers="stages").build()
    x = torch.randn(3, 8, 8, width)
    found = body(x)
    assert [(tap.layer, tap.channels) for tap in body.views[0].resolved][1] == ("1", -1)
    assert body.views[0].resolved[0].layer == "0"
    if width != 8:
        first = stages[0](x)
        torch.testing.assert_close(found, torch.cat([first.mean((1, 2)), stages[1](first).mean((1, 2))], dim=1))
    with pytest.raises(ValueError, match=r"got '0.0.dense', which gave 8 rows for another number of samples"):
        Backbone(model, layers="0.0.dense").build()(x)


def test_channels_are_where_the_width_is():
    convolutions = nn.Sequential(nn.Conv2d(3, 64, 1), nn.Conv2d(64, 16, 1))
    assert channels_of((64, 16, 16), convolutions) == 1  # not the 16 of the last layer
    assert channels_of((5, 7, 32), nn.LayerNorm(32)) == -1
    assert channels_of((8, 8, 16), nn.Conv2d(3, 8, 1)) == 1  # though the first two axes agree
    assert channels_of((20, 6), nn.Sequential(nn.Conv1d(3, 20, 3), nn.AvgPool1d(2))) == 1
    assert channels_of((20, 6), nn.Sequential(nn.LayerNorm(6), nn.AdaptiveAvgPool1d(1))) == -1
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.MaxPool1d(2))
    uses = trace_layers(model, lambda: model(torch.zeros(2, 1, 20)), 2)
    assert [use.channels for use in uses.values()] == [1, 1, 1]


def test_one_sample_is_enough_to_find_the_layers(net):
    x = torch.randn(4, 1, 8, 8)
    body = Backbone(net, layers="stages").build()
    alone = body(x[:1])
    torch.testing.assert_close(body(x)[:1], alone)


@pytest.mark.parametrize("how", ["compiled", "weight norm", "cache"])
def test_models_that_hold_on_to_a_graph_are_copied(net, how):
    x = torch.randn(4, 1, 8, 8)
    expected = Backbone(net, layers="one").build()(x)
    if how == "compiled":
        model = torch.compile(net, backend="eager")
    else:
        model = net
        net.kept = {"bias": net.fc(torch.zeros(1, 6))} if how == "cache" else None
        if how == "weight norm":
            with pytest.warns(FutureWarning):
                nn.utils.weight_norm(net.one[0])
        net(x)
    torch.testing.assert_close(Backbone(model, layers="one").build()(x), expected)


def test_layers_that_give_several_things_are_tapped_at_the_first():
    @dataclasses.dataclass
    class Output:
        maps: torch.Tensor
        extra: str = ""

    class Odd(nn.Module):
        def __init__(self, form):
            super().__init__()
            self.conv, self.form = nn.Conv2d(1, 3, 3), form

        def forward(self, x):
            return self.form(self.conv(x))

    class Whole(nn.Module):
        def __init__(self, form):
            super().__init__()
            self.odd, self.fc = Odd(form), nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(self.odd.conv(x).mean((2, 3))) + 0 * first_tensor(self.odd(x)).sum()

    x = torch.randn(3, 1, 8, 8)
    for form in (lambda y: (y, 1), lambda y: {"maps": y}, lambda y: [{"a": y}], Output):
        model = Whole(form)
        found = Backbone(model, layers="odd").build()(x)
        torch.testing.assert_close(found, model.odd.conv(x).mean((2, 3)))


def test_patterns_stay_within_one_part_of_a_path(net):
    body = Backbone(net, layers=["two.*"]).build()
    body(torch.zeros(2, 1, 8, 8))
    assert [tap.layer for tap in body.views[0].resolved] == ["two.0", "two.1", "two.2"]


# -- what can't be tapped ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": "onne"}, "got 'onne', which is none: the nearest are one"),
        ({"layers": "one", "pool": "cls"}, r"expected a pool for maps of shape \(4, 8, 8\) from 'one', got 'cls'"),
        ({"layers": "fc"}, "got 'fc', the classification layer, which is removed"),
        ({"layers": ["one", "two"], "pool": ["mean"] * 3}, "one for each of 2, got 3"),
        ({"layers": "one", "pool": "middle"}, "expected pool to be one of mean, .* got 'middle'"),
        ({"layers": "one", "pool": "0x4"}, "got '0x4'"),
        ({"layers": []}, r"paths of layers, patterns or 'auto', got \[\]"),
        ({"layers": None, "pool": ["mean"]}, "expected one pool where no layers are named"),
    ],
)
def test_what_cannot_be_tapped_is_told(net, settings, message):
    with pytest.raises(ValueError, match=message):
        Backbone(net, **settings).build()(torch.zeros(2, 1, 8, 8))


def test_a_layer_that_is_used_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.a, self.b = nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.b(self.act(self.a(self.act(x))))

    with pytest.raises(ValueError, match="got 'act', which is used 2 times: tap the block around it"):
        Backbone(Twice(), layers="act").build()(torch.zeros(2, 4))


def test_too_many_features_ask_for_a_pool(net):
    message = "got 40,000, of which 40,000 from 'one' by 'flatten': pool it: mean 4, mean_std 8, 2x2 16, 4x4 64"
    with pytest.raises(ValueError, match=message):
        Backbone(net, layers="one", pool="flatten").build()(torch.zeros(2, 1, 100, 100))


def test_too_many_features_of_the_last_layer_ask_for_a_pool():
    model = nn.Sequential(nn.Linear(8, 128), nn.ReLU())
    with pytest.raises(
        ValueError, match="got 25,600, of which 25,600 from 'the last layer' by 'flatten': pool it: mean"
    ):
        Backbone(model, head_layer="").build()(torch.zeros(2, 200, 8))
    assert Backbone(model, head_layer="", pool="mean").build()(torch.zeros(2, 200, 8)).shape == (2, 128)


def test_inputs_of_another_size_are_told_where_it_matters(net):
    body = Backbone(net, layers="one", pool="flatten").build()
    body.set_scale([body(torch.randn(9, 1, 8, 8), more=True)])
    with pytest.raises(ValueError, match=r"expected 256 features from one .flatten. as in training, got 400"):
        body(torch.randn(3, 1, 10, 10))
    free = Backbone(net, layers="one", pool="2x2").build()
    free.set_scale([free(torch.randn(9, 1, 8, 8), more=True)])
    assert free(torch.randn(3, 1, 10, 10)).shape == (3, 16)


def test_raw_features_have_no_layers():
    with pytest.raises(ValueError, match="expected a backbone to read layers of, got none"):
        Backbone(layers="one").build()
    with pytest.raises(ValueError, match=r"expected a backbone to read one .mean. of, got none"):
        BRAINet(8, scores=[KNN(layers="one")])
    with pytest.raises(ValueError, match="expected layers of KNN to pool, got pool='4x4' alone"):
        KNN(pool="4x4")


def test_a_model_without_a_classification_layer_is_fine_where_layers_are_named():
    body = FeatureExtractor(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU()), head_layer=None, taps=Taps.of("1"))
    found = body(torch.zeros(2, 1, 8, 8), more=True)
    assert found.base_logits is None
    assert found.features.shape == (2, 3)


# -- through Lightning ------------------------------------------------------------------------------------------------


def learn(**settings):
    return StructureLearning(threshold=0.05, cache="", progress=False, **settings)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("head", [Tree(num_params=6000), Linear()])
def test_fit_test_and_a_lone_checkpoint(tmp_path, quiet_trainer, net, cached, head):
    model = BRAINet(
        8,
        Backbone(net, layers=["one", "two"], pool="2x2"),
        head,
        scores=[Generative(layers="stages", pool="mean_std", progress=False), KNN(layers="two"), Mahalanobis()],
    )
    callbacks = [learn()] + ([FeatureCache(progress=False)] if cached else [])
    trainer = quiet_trainer(tmp_path, *callbacks, max_epochs=2)
    trainer.fit(model, datamodule=Digits(images=True))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    x = torch.rand(6, 1, 8, 8)
    model.eval()
    found = model.backbone(x, more=True)
    widths = [found.features.shape[1], *(v.shape[1] for v in found.more.values())]
    assert widths == [40, 20, 6]
    assert model.scores.members["Generative"].density.ggt.num_variables == 20
    assert not model.scores.members["Generative"].density.normalize  # taps have a scale: their length says something
    assert model.backbone.is_scaled(None)  # the head's own features are of taps too
    assert model.scores.members["KNN"].bank.shape[1] == 6
    assert model.scores.members["Mahalanobis"].center.shape == (40,)
    body = Backbone(Net(), layers=["one", "two"], pool="2x2")
    again = BRAINet.load_from_checkpoint(tmp_path / "a.ckpt", backbone=body).eval()
    predicted = []
    for one in (model, again):
        torch.manual_seed(0)
        predicted.append(one.predict_step([x], 0))
    first, second = predicted
    assert first.keys() == second.keys() >= {"generative", "knn", "mahalanobis"}
    for name in first:
        torch.testing.assert_close(first[name], second[name])
    assert again.backbone.names == model.backbone.names
    trainer.test(model, datamodule=Digits(images=True), verbose=False)


def test_training_features_are_on_their_scale_whoever_asks_first(tmp_path, quiet_trainer, net):
    seen = {}

    class Watched(BRAINet):
        def set_structure(self, ggt):
            seen["features"] = self.training_features.all(progress=False).features
            super().set_structure(ggt)

    model = Watched(8, Backbone(net, layers="stages"), Tree(num_params=6000))
    quiet_trainer(tmp_path, learn(), max_epochs=1).fit(model, datamodule=Digits(images=True))
    torch.testing.assert_close(seen["features"].mean(0), torch.zeros(10), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen["features"].std(0, correction=0), torch.ones(10), atol=1e-3, rtol=0)


def test_swap_head_with_layers(net):
    x = torch.rand(300, 1, 8, 8)
    swapped = swap_head(net, x, 3, layers=["one", "two"], pool="2x2", threshold=0.05, progress=False).eval()
    assert swapped.backbone.names[-1] == "two[5]@(1,1)"
    assert swapped.probabilities(x[:4], passes=3).shape == (3, 4, 3)
    torch.testing.assert_close(swapped.base_logits(x[:4]), net(x[:4]))
    assert swap_head(net, x, 3, layers="two", head="Linear")(x[:4]).shape == (4, 3)
