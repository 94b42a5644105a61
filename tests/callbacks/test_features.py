"""The cache of features: each input once through the backbone, whatever comes first, and nothing left behind."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl.backbones import Backbone
from brainet_pl.batches import Precomputed
from brainet_pl.callbacks import FeatureCache, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.framework import pl
from brainet_pl.module import BRAINet
from brainet_pl.network import Linear, Tree

LOADERS = ("train_dataloader", "structure_dataloader", "val_dataloader", "test_dataloader")


class Body(nn.Module):
    """A small convolutional network with a classification layer to remove."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(48, 10)

    def forward(self, x):
        return self.fc(self.pool(self.body(x)).flatten(1))


def small(**settings):
    torch.manual_seed(0)
    return BRAINet(8, backbone=Body(), **({"head": Tree(num_params=6000)} | settings))


def structure(**settings):
    return StructureLearning(threshold=0.1, cache="", progress=False, **settings)


def together(results):
    return {name: value for part in results for name, value in part.items()}


def watched(model):
    """The shapes of all inputs that go through the backbone from now on."""
    seen = []
    model.backbone.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape)))
    return seen


def order_of(name, *others):
    """The cache before or after the other callbacks."""
    cache = FeatureCache(progress=False)
    return [cache, *others] if name == "first" else [*others, cache]


# -- each input once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scores", [None, ["KNN"]])
@pytest.mark.parametrize("place", ["first", "last"])
def test_every_input_goes_through_the_backbone_once(tmp_path, quiet_trainer, place, scores):
    data, model = Digits(images=True), small(scores=scores)
    seen = watched(model)
    quiet_trainer(tmp_path, *order_of(place, structure()), epochs=3).fit(model, datamodule=data)
    batches = len(data.structure_dataloader()) + len(data.val_dataloader())
    assert len(seen) == batches == 17
    assert sum(shape[0] for shape in seen) == len(data.structure_set) + len(data.val_set)


def test_looking_at_the_data_draws_nothing(tmp_path, quiet_trainer):
    states = []

    class Watch(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            states.append(torch.get_rng_state())

    callbacks = (Watch(), FeatureCache(progress=False), Watch())
    model = small(head=Linear())
    quiet_trainer(tmp_path, *callbacks).fit(model, datamodule=Digits(images=True))
    before, after = states
    assert torch.equal(before, after)


def test_the_order_of_callbacks_changes_nothing(tmp_path, quiet_trainer):
    models = []
    for place in ("first", "last"):
        model = small()
        fit = quiet_trainer(tmp_path, *order_of(place, structure(max_rows=300)), fast_dev_run=True)
        fit.fit(model, datamodule=Digits(images=True))
        models.append(model)
    plain = small()
    quiet_trainer(tmp_path, structure(max_rows=300), fast_dev_run=True).fit(plain, datamodule=Digits(images=True))
    assert models[0].ggt == models[1].ggt == plain.ggt
    assert plain.ggt.num_rows == 300


def test_heads_without_a_tree_and_a_regression_need_no_further_look(tmp_path, quiet_trainer):
    model = BRAINet(task="Regression", backbone=Body(), head=Linear())
    seen, data = watched(model), Digits(images=True)
    quiet_trainer(tmp_path, FeatureCache(progress=False), epochs=2).fit(model, datamodule=data)
    assert len(seen) == len(data.structure_dataloader()) + len(data.val_dataloader())


def test_a_frozen_backbone_does_not_move_and_the_head_learns_from_memory(tmp_path, quiet_trainer):
    model, data = small(lr=0.01), Digits(images=True)
    before = {k: v.clone() for k, v in model.backbone.state_dict().items()}
    quiet_trainer(tmp_path, FeatureCache(progress=False), structure(), epochs=6).fit(model, datamodule=data)
    for k, v in model.backbone.state_dict().items():
        assert torch.equal(v, before[k.replace("own.", "model.fc.")])
    seen = watched(model)
    results = together(quiet_trainer(tmp_path).test(model, datamodule=data, verbose=False))
    assert results["test/cls/Acc"] > 0.5
    assert seen[0] == (64, 1, 8, 8)  # a test is from images again


def test_with_and_without_the_cache_validation_gives_the_same(tmp_path, quiet_trainer):
    """Draws of training differ, so what is compared is a model that does not learn."""
    found = []
    for callbacks in ([FeatureCache(progress=False)], []):
        model = small(head=Linear(), lr=1e-20)
        model._build_head(48)
        fit = quiet_trainer(tmp_path, *callbacks)
        fit.fit(model, datamodule=Digits(images=True))
        found.append({name: float(value) for name, value in fit.callback_metrics.items() if name.startswith("val/")})
    assert "val/cls/NLL" in found[0]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


# -- nothing is left behind -------------------------------------------------------------------------------------------


def check_restored(data, keys):
    """The datamodule is as a fit without the cache leaves it, and gives inputs."""
    assert set(vars(data)) == keys
    for name in LOADERS:
        loaders = getattr(data, name)()
        inputs = next(iter(loaders["test"] if isinstance(loaders, dict) else loaders))[0]
        assert not isinstance(inputs, Precomputed), name
        assert inputs.shape[1:] == (1, 8, 8), name


@pytest.fixture
def keys(tmp_path, quiet_trainer):
    """The attributes of a datamodule after a fit without the cache."""
    data = Digits(images=True)
    quiet_trainer(tmp_path, fast_dev_run=True).fit(small(head=Linear()), datamodule=data)
    return set(vars(data))


def test_the_datamodule_is_as_before_after_a_fit(tmp_path, quiet_trainer, keys):
    data, cache, while_fitting = Digits(images=True), FeatureCache(progress=False), []
    model = small(head=Linear())
    step = model.training_step
    model.training_step = lambda batch, batch_idx: (while_fitting.append(type(batch[0])), step(batch, batch_idx))[1]
    quiet_trainer(tmp_path, cache).fit(model, datamodule=data)
    assert set(while_fitting) == {Precomputed}
    check_restored(data, keys)
    while_fitting.clear()
    quiet_trainer(tmp_path, fast_dev_run=True).fit(model, datamodule=data)
    assert set(while_fitting) == {torch.Tensor}


@pytest.mark.parametrize("hook", ["training_step", "validation_step", "on_fit_start", "configure_optimizers"])
def test_the_datamodule_is_as_before_after_a_fit_that_failed(tmp_path, quiet_trainer, keys, hook, monkeypatch):
    data, model = Digits(images=True), small(head=Linear())
    cache = FeatureCache(progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(BRAINet, hook, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quiet_trainer(tmp_path, cache).fit(model, datamodule=data)
    check_restored(data, keys)
    quiet_trainer(tmp_path, cache).fit(model, datamodule=data)  # and once more, with the same callback
    check_restored(data, keys)


@pytest.mark.parametrize("place", ["first", "last"])
def test_the_datamodule_is_as_before_where_another_callback_failed(tmp_path, quiet_trainer, keys, place):
    data, model = Digits(images=True), small()
    learn = StructureLearning(file="nowhere.json", progress=False)
    with pytest.raises(FileNotFoundError):
        quiet_trainer(tmp_path, *order_of(place, learn)).fit(model, datamodule=data)
    check_restored(data, keys)


class Bare(pl.LightningDataModule):
    """A datamodule that offers no `structure_dataloader`."""

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 8), batch_size=10, shuffle=True)

    val_dataloader = train_dataloader


def test_a_datamodule_without_a_structure_loader_has_none_afterwards(tmp_path, quiet_trainer):
    data = Bare()
    quiet_trainer(tmp_path, FeatureCache(progress=False)).fit(small(head=Linear()), datamodule=data)
    assert not hasattr(data, "structure_dataloader")
    assert next(iter(data.train_dataloader()))[0].shape == (10, 1, 8, 8)


# -- what can't be cached ---------------------------------------------------------------------------------------------


def test_what_cannot_be_cached_is_named(tmp_path, quiet_trainer, monkeypatch):
    def fit(model, data=None, **settings):
        trainer = quiet_trainer(tmp_path, FeatureCache(progress=False))
        trainer.fit(model, datamodule=Digits(images=True) if data is None and not settings else data, **settings)

    with pytest.raises(RuntimeError, match="expected a frozen backbone to cache features of, got one that trains"):
        fit(BRAINet(8, Backbone(Body(), freeze=False), head=Linear()))
    loader = DataLoader(TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 8), batch_size=10)
    with pytest.raises(RuntimeError, match="expected a datamodule to cache features of, got plain loaders"):
        fit(small(head=Linear()), train_dataloaders=loader)
    own = Digits(images=True)
    own.val_dataloader = lambda: loader
    with pytest.raises(RuntimeError, match="got val_dataloader set on the object itself: define them in its class"):
        fit(small(head=Linear()), own)
    assert own.val_dataloader() is loader
    monkeypatch.setattr(Digits, "val_dataloader", lambda self: [])
    with pytest.raises(RuntimeError, match="expected one validation DataLoader to cache features of, got list"):
        fit(small(head=Linear()))
