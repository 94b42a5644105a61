"""`layers="auto"`: cross-validated ridge probes choose what a head reads, and the choice is kept."""

import pytest
import torch
import torchvision
from sklearn.linear_model import Ridge
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import Backbone, BRAINet, swap_head
from brainet_pl._utils.framework import pl
from brainet_pl.backbones.loading import make_backbone
from brainet_pl.backbones.stages import find_blocks, find_stages, trace_layers
from brainet_pl.backbones.taps import LayerSearch, Taps, candidates, width_of
from brainet_pl.callbacks import FeatureCache, StructureLearning
from brainet_pl.features import layers, ridge
from brainet_pl.features.identity import of_model
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.network import Linear
from brainet_pl.scores import KNN
from brainet_pl.tasks import Regression


class Corner(nn.Module):
    """Two stages and a classification layer; what tells the classes is where the first one is bright."""

    def __init__(self, classes=3):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.two = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU())
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        return self.fc(self.two(self.one(x)).mean((2, 3)))


def images(n=240, classes=3, seed=0):
    """Noise, and a bright corner that the class names: no mean over space tells it."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    x = torch.randn(n, 1, 8, 8, generator=generator) * 0.3
    for i, label in enumerate(y.tolist()):
        row, column = divmod(label, 2)
        x[i, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    return TensorDataset(x, y)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Corner().eval()


def chosen(model, data, **settings):
    body = Backbone(model, **settings).build()
    TrainingFeatures(DataLoader(data, batch_size=50), body).choose_layers(progress=False)
    return body


# -- ridge ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [7, 60])  # fewer features than samples, and more
@pytest.mark.parametrize("penalty", [0.5, 20.0])
def test_held_out_residuals_are_those_of_a_fit_for_each_fold(width, penalty):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, width, generator=generator, dtype=torch.float64)
    y = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    folds = ridge.deal_folds(torch.arange(40) % 3)
    table = ridge.Table.of(x)
    assert (table.features is None) == (width > 40)
    found = ridge.held_out_residuals(table, y, folds, penalty)
    scaled = (x - x.mean(0)) / x.std(0, correction=0)
    for fold in folds:
        rest = torch.tensor([i for i in range(40) if i not in fold])
        fitted = Ridge(alpha=penalty, fit_intercept=False).fit(scaled[rest].numpy(), y[rest].numpy())
        expected = y[fold].numpy() - fitted.predict(scaled[fold].numpy())
        torch.testing.assert_close(found[fold], torch.from_numpy(expected))


def test_joined_tables_are_one_table():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(30, width, generator=generator, dtype=torch.float64) for width in (4, 10, 25, 50)]
    joined = ridge.Table.of(parts[0])
    for i in range(1, 4):
        joined = joined.join(ridge.Table.of(parts[i]))
        whole = ridge.Table.of(torch.cat(parts[: i + 1], dim=1))
        assert joined.width == whole.width
        torch.testing.assert_close(joined.all_products(), whole.all_products())


def test_folds_spread_classes_and_hold_each_row_once():
    y = torch.tensor([0] * 50 + [1] * 10 + [2] * 5)
    folds = ridge.deal_folds(y)
    assert torch.cat(folds).sort().values.tolist() == list(range(65))
    assert all(y[fold].bincount().tolist() == [10, 2, 1] for fold in folds)


def test_tables_that_do_not_vary_and_repeat_are_no_trouble():
    x = torch.cat([torch.full((30, 3), 1e8), torch.arange(30.0)[:, None].expand(-1, 2)], dim=1)
    table = ridge.Table.of(x)
    assert table.features[:, :3].abs().max() == 0
    y = torch.arange(30.0)[:, None] - 14.5
    assert ridge.probe(table, y, ridge.deal_folds(y.flatten())).error < 1


def slow_select(features, targets, folds, most):
    """The same choice, every regression fitted anew."""

    def errors(names, scale):
        x = torch.cat([ridge.standardised(features[i]) for i in names], dim=1)
        found = torch.empty_like(targets)
        for fold in folds:
            rest = torch.tensor([i for i in range(len(x)) if i not in fold])
            system = x[rest].T @ x[rest] + scale * x.shape[1] * torch.eye(x.shape[1], dtype=x.dtype)
            found[fold] = targets[fold] - x[fold] @ torch.linalg.solve(system, x[rest].T @ targets[rest])
        return found.square().sum(1)

    def better(new, old):
        return (old - new).mean() > (old - new).std() / len(new) ** 0.5

    names, now, at = [], None, None
    while True:
        tried = {}
        for i, table in enumerate(features):
            if i not in names and sum(features[j].shape[1] for j in names) + table.shape[1] <= most:
                which = range(5) if at is None else {max(at - 1, 0), at}
                options = [(errors([*names, i], ridge.PENALTIES[k]), k) for k in sorted(which)]
                tried[i] = min(options, key=lambda option: option[0].mean())
        if not tried:
            return names
        best = min(tried.values(), key=lambda option: option[0].mean())[0]
        near = [i for i in tried if not better(best, tried[i][0])]
        new = min(near, key=lambda i: (features[i].shape[1], tried[i][0].mean()))
        if now is not None and not better(tried[new][0], now):
            return names
        names, (now, at) = [*names, new], tried[new]


@pytest.mark.parametrize("seed", range(4))
def test_the_selection_is_that_of_its_slow_twin(seed):
    generator = torch.Generator().manual_seed(seed)
    signal = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    noise = [torch.randn(60, width, generator=generator, dtype=torch.float64) for width in (2, 8, 80, 5)]
    features = [signal[:, :3] + 0.5 * noise[3][:, :3], torch.cat([signal[:, 3:], noise[1]], 1), noise[2], noise[0]]
    features.append(torch.cat([signal, noise[2][:, :40]], dim=1))
    targets = (signal @ torch.randn(6, 2, generator=generator, dtype=torch.float64)).sign()
    targets = targets - targets.mean(0)
    folds = ridge.deal_folds(torch.arange(60))
    steps = ridge.select([ridge.Table.of(x) for x in features], targets, folds, 100)
    assert [step.chosen for step in steps] == slow_select(features, targets, folds, 100)


# -- candidates -------------------------------------------------------------------------------------------------------

BLOCKS = {
    "resnet18": ["relu", "maxpool", *(f"layer{i}{j}" for i in range(1, 5) for j in (".0", ""))],
    "densenet121": ["relu0", "pool0", "denseblock1", "transition1", "denseblock2", "transition2", "denseblock3",
                    "transition3", "denseblock4"],
    "vit_b_16": [*(f"encoder.layers.encoder_layer_{i}" for i in range(11)), "encoder.layers", "encoder"],
}  # fmt: skip


def traced(model, x):
    with torch.no_grad():
        return trace_layers(model, lambda: model(x), 2)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_of_torchvision_models(name):
    with torch.device("meta"):
        model = torchvision.models.get_model(name, num_classes=10).eval()
        uses = traced(model, torch.zeros(2, 3, 224, 224))
    wanted = BLOCKS[name] if name != "densenet121" else [*(f"features.{block}" for block in BLOCKS[name]), "features"]
    assert find_blocks(model, uses) == wanted
    taps = candidates(model, uses, LayerSearch())
    assert len({tap.layer for tap in taps}) <= 16
    assert all(width_of(tap) <= 2048 for tap in taps)
    assert {tap.pool for tap in taps} == ({"mean", "mean_std", "cls"} if "vit" in name else {*layers_of_maps()})


def layers_of_maps():
    return "mean", "mean_std", "2x2", "4x4"


@pytest.mark.parametrize("name", ["vgg16_bn", "efficientnet_b0", "mobilenet_v2"])
def test_no_block_ends_in_front_of_its_activation(name):
    with torch.device("meta"):
        model = torchvision.models.get_model(name, num_classes=10).eval()
        uses = traced(model, torch.zeros(2, 3, 64, 64))
    for layer in [*find_blocks(model, uses), *find_stages(model, uses)]:
        assert not isinstance(model.get_submodule(layer), nn.Conv2d | nn.BatchNorm2d | nn.Dropout)


class Shared(nn.Module):
    """An activation that is used again and again, so that it can't be read: EfficientNet-Lite is built like this."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(a, 4, 3, 2, 1), nn.BatchNorm2d(4)) for a in (1, 4))
        self.conv, self.norm, self.act, self.fc = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = self.act(block(x))
        return self.fc(self.act(self.norm(self.conv(x))).mean((2, 3)))


def test_a_normalisation_whose_activation_is_shared_ends_no_stage():
    model = Shared().eval()
    uses = traced(model, torch.zeros(2, 1, 16, 16))
    assert find_stages(model, uses)[-1] == "blocks.1"
    assert find_blocks(model, uses) == ["blocks.0", "blocks.1"]


def test_candidates_of_a_wide_model_are_bounded():
    model = nn.Sequential(nn.Conv2d(1, 3000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3000, 2))
    uses = traced(model.eval(), torch.zeros(2, 1, 4, 4))
    assert [tap.pool for tap in candidates(model, uses, LayerSearch(max_features=4096))] == ["mean"]
    assert candidates(model, uses, LayerSearch(max_features=100)) == []
    assert [tap.pool for tap in candidates(model, uses, LayerSearch(pools=("2x2", "cls"), max_features=20_000))] == [
        "2x2"
    ]


# -- the choice -------------------------------------------------------------------------------------------------------


def test_the_layer_that_tells_the_classes_is_found(net):
    body = chosen(net, images())
    assert "x" in body.taps.pools[0]
    assert body.evidence.startswith(f"layers: {body.taps.layers[0]} as ")
    assert "(last alone " in body.evidence
    assert body.search is None
    again = chosen(net, images())
    assert (again.taps, again.evidence) == (body.taps, body.evidence)


def test_a_layer_that_is_good_enough_stays_alone(net):
    """What the last layer shows of the classes nobody else shows better."""
    data = images()
    with torch.no_grad():
        y = ridge.standardised(Backbone(net, layers=None).build()(data.tensors[0])) @ torch.randn(6, 3)
    body = chosen(net, TensorDataset(data.tensors[0], y.argmax(1)), pool="mean")
    assert body.taps is None
    assert "no better with others" in body.evidence


def test_the_last_layer_joins_others(net):
    x = images().tensors[0]
    body = Backbone(net, layers=["last", "one"], pool=["mean", "2x2"]).build()
    found = body(x)
    expected = [Backbone(net, layers=None).build()(x), Backbone(net, layers="one", pool="2x2").build()(x)]
    torch.testing.assert_close(found, torch.cat(expected, dim=1))
    assert body.names[:2] == ["last[0]", "last[1]"]
    left = Backbone(nn.Sequential(net, nn.Softmax(1)), layers=["last", "0.one"]).build()
    assert left(x).shape == (240, 10)


@pytest.mark.parametrize("kind", ["numbers", "column", "text"])
def test_regression_and_text(kind):
    torch.manual_seed(0)
    if kind == "text":
        block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.Sequential(nn.Embedding(20, 8), nn.TransformerEncoder(block, 3), nn.Flatten(), nn.Linear(40, 2))
        tokens = torch.randint(20, (300, 5))
        body = chosen(model.eval(), TensorDataset(tokens, (tokens == 3).any(dim=1).long()), max_features=24)
        assert body.taps.layers[0].startswith("1")
        return
    data = images()
    y = data.tensors[0][:, 0, :4, :4].mean((1, 2))
    body = chosen(Corner().eval(), TensorDataset(data.tensors[0], y[:, None] if kind == "column" else y))
    assert "R² 0." in body.evidence
    assert body.taps is not None


def test_a_vision_transformer_is_probed():
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(8, 4, 3, 2, 12, 24, num_classes=3).eval()
    x, y = images(120).tensors
    body = chosen(model, TensorDataset(x.expand(-1, 3, -1, -1), y))
    assert body.search is None
    assert body.evidence.startswith("layers: ")


BAD = {
    "few": (images(3), "3 samples are too few"),
    "one class": (TensorDataset(images().tensors[0], torch.zeros(240, dtype=torch.long)), "the same target"),
    "no labels": (TensorDataset(images().tensors[0]), "no labels"),
    "many targets": (TensorDataset(images().tensors[0], torch.rand(240, 5)), "one target for each sample"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_choose_keeps_the_last_layer(net, name):
    data, reason = BAD[name]
    body = chosen(net, data)
    assert body.taps is None
    assert body.search is None
    assert reason in body.evidence


def test_a_model_without_stages_keeps_the_last_layer():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    body = chosen(model, TensorDataset(torch.randn(200, 5), torch.arange(200) % 2))
    assert body.evidence == "layers: the last (Sequential has no block of at most 2,048 features)"


def test_a_last_layer_of_very_many_features_is_sketched():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 40, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=7), nn.Flatten())
    model = nn.Sequential(model, nn.Linear(125_440, 3)).eval()
    body = chosen(model, images(120))
    assert "last" in body.evidence
    wide = torch.randn(30, 50_000)
    narrow = layers._sketch(wide)
    assert narrow.shape == (30, layers.WIDEST)
    torch.testing.assert_close((narrow @ narrow.T).diagonal(), (wide @ wide.T).diagonal(), rtol=0.1, atol=0)


def test_batches_of_other_sizes_are_pooled_alike(net):
    x, y = images().tensors
    larger = nn.functional.interpolate(x[120:], scale_factor=2)
    batches = [(x[:120], y[:120]), (larger, y[120:])]
    choice = layers.choose_layers(Backbone(net).build(), batches, progress=False)
    assert choice.taps is not None


def test_a_backbone_that_trains_and_a_fixed_list_are_not_probed(net):
    assert Backbone(net, freeze=False).build().search is None
    assert Backbone(net, layers=["one"]).build().search is None
    assert Backbone(net, layers=None).build().search is None
    assert Backbone(None).build().search is None


# -- where it is carried ----------------------------------------------------------------------------------------------


class Data(pl.LightningDataModule):
    def __init__(self, numbers=False):
        super().__init__()
        x, y = images().tensors
        self.data = TensorDataset(x, x[:, 0, :4, :4].mean((1, 2)) if numbers else y)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=40, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=40)


@pytest.mark.parametrize("cached", [False, True])
def test_a_fit_chooses_once_and_its_checkpoint_remembers(tmp_path, quiet_trainer, net, cached, monkeypatch):
    callbacks = [FeatureCache(progress=False)] if cached else []
    model = BRAINet(3, Backbone(net), Linear(), scores=[KNN(k=3, layers="one", pool="2x2")])
    fit = quiet_trainer(tmp_path, *callbacks, epochs=1)
    fit.fit(model, datamodule=Data())
    assert model.backbone.taps is not None
    fit.save_checkpoint(tmp_path / "one.ckpt")
    monkeypatch.setattr("brainet_pl.features.training.choose_layers", lambda *args, **settings: pytest.fail("probed"))
    loaded = BRAINet.load_from_checkpoint(tmp_path / "one.ckpt", backbone=net).eval()
    x = images(20, seed=1).tensors[0]
    torch.testing.assert_close(loaded(x), model.eval()(x))
    assert (loaded.backbone.taps, loaded.backbone.evidence) == (model.backbone.taps, model.backbone.evidence)


@pytest.mark.parametrize("other", [False, True])
def test_a_resumed_fit_reads_the_layers_of_its_checkpoint(tmp_path, quiet_trainer, net, other, monkeypatch):
    model = BRAINet(3, Backbone(net), Linear())
    fit = quiet_trainer(tmp_path, epochs=1)
    fit.fit(model, datamodule=Data())
    fit.save_checkpoint(tmp_path / "one.ckpt")
    if other:  # other data might choose other layers, before the checkpoint is restored
        choice = layers.LayerChoice(Taps(("two",), ("mean",)), "layers: two as mean")
        monkeypatch.setattr("brainet_pl.features.training.choose_layers", lambda *args, **settings: choice)
    resumed = BRAINet(3, Backbone(net), Linear())
    quiet_trainer(tmp_path, epochs=2).fit(resumed, datamodule=Data(), ckpt_path=tmp_path / "one.ckpt")
    assert (resumed.backbone.taps, resumed.backbone.evidence) == (model.backbone.taps, model.backbone.evidence)


def test_the_settings_of_a_named_backbone_hold_the_choice(tmp_path, quiet_trainer):
    torch.manual_seed(0)
    model = BRAINet(3, f"{__name__}:Corner", Linear())
    assert model.hparams["backbone"]["layers"] == "auto"
    fit = quiet_trainer(tmp_path, epochs=1)
    fit.fit(model, datamodule=Data())
    assert model.hparams["backbone"]["layers"] == list(model.backbone.taps.layers)
    fit.save_checkpoint(tmp_path / "one.ckpt")
    loaded = BRAINet.load_from_checkpoint(tmp_path / "one.ckpt")
    assert loaded.backbone.taps == model.backbone.taps


def test_a_tree_is_learned_from_the_chosen_layers(tmp_path, quiet_trainer, net):
    structure = StructureLearning(threshold=0.1, cache="", progress=False)
    model = BRAINet(backbone=Backbone(net, max_features=40), task=Regression())
    quiet_trainer(tmp_path, structure, epochs=1).fit(model, datamodule=Data(numbers=True))
    assert model.ggt.num_variables == len(model.backbone.names) <= 40


def test_swap_head_probes_where_there_are_labels(net):
    settings = {"head": "Linear", "progress": False}
    swapped = swap_head(net, images(), 3, **settings)
    assert swapped.backbone.taps is not None
    assert swapped(images().tensors[0][:4]).shape == (4, 3)
    assert swap_head(net, images().tensors[0], 3, **settings).backbone.taps is None
    assert swap_head(net, images(), 3, layers=None, **settings).backbone.taps is None
    once = iter([tuple(images().tensors)])
    assert swap_head(net, once, 3, **settings).backbone.taps is None


def test_stored_features_are_named_by_the_choice(net):
    bodies = [chosen(net, images(), max_features=most) for most in (10, 2048)]
    for body in bodies:
        body.trace(images().tensors[0][:2])
    assert bodies[0].taps != bodies[1].taps
    assert len({of_model(body, torch.device("cpu")) for body in bodies}) == 2


def test_a_cifar_network_is_probed():
    torch.manual_seed(0)
    x, y = images(120).tensors
    large = nn.functional.interpolate(x, scale_factor=4).expand(-1, 3, -1, -1)
    body = chosen(make_backbone("cifar_resnet20").eval(), TensorDataset(large, y))
    assert body.taps is not None


def test_other_processes_read_what_the_first_one_chose(net, monkeypatch):
    choice = layers.LayerChoice(Taps(("one",), ("2x2",)), "layers: one as 2×2")
    body = Backbone(net).build()

    def exchange(work):
        assert work() is None  # another process does not probe
        return [choice, None]

    monkeypatch.setattr("brainet_pl.features.training.exchange", exchange)
    TrainingFeatures(DataLoader(images(), batch_size=50), body, rank=1, processes=2).choose_layers()
    assert (body.taps, body.evidence, body.search) == (*choice, None)
