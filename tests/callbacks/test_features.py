"""The cache of features: each input once through the backbone, whatever comes first, and nothing left behind."""

import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import brainet_pl
from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl._utils.rng import isolated_rng
from brainet_pl.backbones.loading import Backbone
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.callbacks import FeatureCache, StructureLearning
from brainet_pl.callbacks.baseline import BaselineComparison
from brainet_pl.datamodules import Digits
from brainet_pl.datamodules.base import Samples
from brainet_pl.features.extraction import Extracted, extract, unshuffled
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Linear, MCDropout, Tree
from brainet_pl.scores import KNN

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
    return BRAINet(
        8, **({"backbone": Backbone(Body(), layers=None), "head": Tree(num_params=6000), "scores": []} | settings)
    )


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


@pytest.mark.parametrize("scores", [[], ["KNN"]])
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
    model = BRAINet(task="Regression", backbone=Body(), head=Linear(), scores=[])
    seen, data = watched(model), Digits(images=True)
    quiet_trainer(tmp_path, FeatureCache(progress=False), epochs=2).fit(model, datamodule=data)
    assert len(seen) == len(data.structure_dataloader()) + len(data.val_dataloader())


def test_a_frozen_backbone_does_not_move_and_the_head_learns_from_memory(tmp_path, quiet_trainer):
    model, data = small(lr=0.01), Digits(images=True)
    before = {k: v.clone() for k, v in model.backbone.state_dict().items()}
    quiet_trainer(tmp_path, FeatureCache(progress=False), structure(), epochs=6).fit(model, datamodule=data)
    for k, v in model.backbone.state_dict().items():
        assert torch.equal(v, before[k.replace("base_layer.", "model.fc.")])
    seen = watched(model)
    results = together(quiet_trainer(tmp_path).test(model, datamodule=data, verbose=False))
    assert results["test/cls/Acc"] > 0.5
    assert seen[0] == (64, 1, 8, 8)  # a test is from images again


def test_with_and_without_the_cache_validation_gives_the_same(tmp_path, quiet_trainer):
    """Draws of training differ, so what is compared is a model that does not learn."""
    found = []
    for callbacks in ([FeatureCache(progress=False)], []):
        model = small(head=Linear(), lr=1e-20)
        model.predictor.build_head(model.head_settings, 48)
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
        assert not isinstance(inputs, BackboneOutput), name
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
    assert set(while_fitting) == {BackboneOutput}
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


def test_a_loader_that_was_set_on_the_datamodule_is_cached_and_stays(tmp_path, quiet_trainer):
    data, model, seen = Digits(images=True), small(head=Linear()), []
    loader = DataLoader(TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 8), batch_size=10)
    data.val_dataloader = lambda: loader
    step = model.validation_step
    model.validation_step = lambda batch, batch_idx: (seen.append(type(batch[0])), step(batch, batch_idx))[1]
    quiet_trainer(tmp_path, FeatureCache(progress=False)).fit(model, datamodule=data)
    assert set(seen) == {BackboneOutput}
    assert data.val_dataloader() is loader


def test_a_fit_from_loaders_is_refused_after_one_from_a_datamodule(tmp_path, quiet_trainer):
    trainer = quiet_trainer(tmp_path, FeatureCache(progress=False))
    trainer.fit(small(head=Linear()), datamodule=Digits(images=True))
    loader = DataLoader(TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 8), batch_size=10)
    with pytest.raises(RuntimeError, match="expected a datamodule to cache features of, got plain loaders"):
        trainer.fit(small(head=Linear()), loader, loader)


# -- on disk -----------------------------------------------------------------------------------------------------------


def fit(folder, quiet_trainer, cache, *callbacks, data=None, epochs=1, resume=None, **settings):
    pl.seed_everything(0, verbose=False)
    model = small(**({"lr": 0.01} | settings))
    seen = watched(model)
    trainer = quiet_trainer(folder, cache, structure(), *callbacks, epochs=epochs)
    trainer.fit(model, datamodule=Digits(images=True) if data is None else data, ckpt_path=resume)
    return model, seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_same(one, other):
    for name, value in one[0].state_dict().items():
        assert torch.equal(value, other[0].state_dict()[name]), name
    assert one[2] == other[2]


def test_another_head_starts_from_the_disk(tmp_path, quiet_trainer):
    settings = {"scores": ["KNN"], "head": Linear()}
    twin = fit(tmp_path, quiet_trainer, FeatureCache("", progress=False), **settings)
    assert not (tmp_path / "features").exists()
    fit(tmp_path, quiet_trainer, FeatureCache(progress=False))
    again = fit(tmp_path, quiet_trainer, FeatureCache(progress=False), **settings)
    assert again[1] == [(8, 1, 8, 8)] * 2  # a look at training and at validation data
    assert_same(twin, again)


def test_structure_scores_and_taps_are_served_alike(tmp_path, quiet_trainer):
    taps = {"backbone": Backbone(Body(), layers=["body"], pool="2x2"), "scores": [KNN(layers=["pool"], pool="mean")]}
    twin = fit(tmp_path / "a", quiet_trainer, FeatureCache("", progress=False), **taps)
    first = fit(tmp_path / "b", quiet_trainer, FeatureCache(progress=False), **taps)
    again = fit(tmp_path / "b", quiet_trainer, FeatureCache(progress=False), **taps)
    assert len(again[1]) == 2
    assert_same(twin, first)
    assert_same(first, again)
    assert again[0].ggt == twin[0].ggt


def test_the_comparison_after_a_fit_reads_tapped_features_from_the_disk(tmp_path, quiet_trainer, monkeypatch):
    """Their scale gives the backbone another name in the store, under which there is nothing of the training data."""
    monkeypatch.setattr("brainet_pl.callbacks.baseline.SAMPLE_ROWS", 100)  # so that it wants all of them
    compared = []
    keep = BaselineComparison._compare
    monkeypatch.setattr(BaselineComparison, "_compare", lambda *args: (compared.append(args[-1]), keep(*args)))
    taps = {"backbone": Backbone(Body(), layers=["body"], pool="2x2"), "scores": [KNN(layers=["pool"], pool="mean")]}
    twin = fit(tmp_path / "a", quiet_trainer, FeatureCache("", progress=False), **taps)
    found = fit(tmp_path / "b", quiet_trainer, FeatureCache(progress=False), **taps)
    data = Digits(images=True)
    data.setup("fit")
    once = len(data.train_set) + len(data.val_set)
    assert once <= sum(shape[0] for shape in found[1]) <= once + 32  # and a few to trace layers with
    from_disk = compared[1]
    in_memory = compared[0].sample(len(from_disk.targets))
    assert len(data.train_set) - 64 < len(from_disk.targets)  # an epoch has no incomplete batch
    assert torch.equal(in_memory.targets, from_disk.targets)
    assert_same(twin, found)
    views = [None, *in_memory.output.more]
    assert len(views) == 2
    for taps in views:
        assert torch.equal(in_memory.output.view(taps), from_disk.output.view(taps))
    assert torch.equal(in_memory.output.base_logits, from_disk.output.base_logits)


def test_the_size_of_a_batch_of_features_is_not_guessed(tmp_path, quiet_trainer):
    """Of a network that had no classifier there are no logits, for which Lightning counts one sample."""
    features = Backbone(nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), layers=None, head_layer="")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(tmp_path, quiet_trainer, FeatureCache("", progress=False), backbone=features)
    assert not [one for one in said if "infer the `batch_size`" in str(one.message)]


class Noisy(Digits):
    """Digits with noise from every random generator that an augmentation may draw from."""

    def setup(self, stage):
        super().setup(stage)
        data = self.train_set.dataset
        self.train_set = Subset(Samples(data.x, data.y, self.noisy), self.train_set.indices)

    @staticmethod
    def noisy(x):
        return x + 0.1 * (torch.rand(()) + float(np.random.rand()) + random.random())  # noqa: NPY002


class Unplanned(pl.LightningDataModule):
    """The same without a loader for structures: what is extracted is augmented."""

    def __init__(self):
        super().__init__()
        self.data = Noisy(images=True)
        self.data.setup("fit")

    def train_dataloader(self):
        return self.data.train_dataloader()

    def val_dataloader(self):
        return self.data.val_dataloader()


def test_copies_of_the_training_data_are_augmented_and_stored(tmp_path, quiet_trainer):
    met = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            met.append((batch[0].features, batch[1]))

    def run(copies):
        met.clear()
        cache = FeatureCache(copies=copies, progress=False)
        found = fit(tmp_path, quiet_trainer, cache, Watch(), data=Noisy(images=True), head=Linear())
        return found, list(met)

    first, batches = run(2)
    again, repeated = run(2)
    assert len(first[1]) == 14 + 14 + 14 + 3
    assert len(again[1]) == 2 + 2  # what draws otherwise than by torchvision streams by, and is found by its bytes
    assert_same(first, again)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, repeated, strict=True))
    data = Noisy(images=True)
    data.setup("fit")
    copies = []
    for seed in (1, 2):
        with isolated_rng(seed):
            copies.append(extract(again[0].backbone, unshuffled(data.train_dataloader(), seed=seed), progress=False))
    plain = extract(again[0].backbone, data.structure_dataloader(), progress=False)
    assert not torch.equal(copies[0].features, copies[1].features)
    drawn = set()
    for features, targets in batches:
        equal = [(features[:, None] == copy.features).all(dim=2) for copy in (*copies, plain)]  # (B, N) each
        assert torch.equal(equal[0].sum(dim=1) + equal[1].sum(dim=1), torch.ones(len(features)))
        assert not equal[2].any()
        for copy, where in zip(copies, equal, strict=False):
            rows, places = where.nonzero(as_tuple=True)
            assert torch.equal(copy.targets[places], targets[rows])
        drawn |= {i for i in range(2) if equal[i].any()}
    assert drawn == {0, 1}


def test_samples_of_copies_come_in_the_order_that_was_asked_for():
    copies = [Extracted(BackboneOutput(torch.arange(20.0)[:, None] + 100 * i), torch.arange(20)) for i in range(3)]
    torch.manual_seed(0)
    features, targets = next(iter(copies[0].loader(copies, batch_size=20)()))
    assert torch.equal(targets, torch.arange(20))
    assert torch.equal(features.features[:, 0] % 100, torch.arange(20.0))
    assert len((features.features // 100).unique()) == 3


def test_a_resumed_fit_with_copies_repeats_the_uninterrupted_one(tmp_path, quiet_trainer):
    def run(resume=None, **settings):
        keep = ModelCheckpoint(tmp_path, filename="{epoch}-{step}", save_top_k=-1, **settings)
        cache = FeatureCache(copies=2, progress=False)
        data, head = Noisy(images=True), MCDropout(num_params=4000)
        return fit(tmp_path, quiet_trainer, cache, keep, data=data, head=head, epochs=2, resume=resume)

    whole = run(every_n_train_steps=5)
    for step in (5, 15):  # in the middle of the first and of the second epoch
        (file,) = tmp_path.glob(f"*step={step}.ckpt")
        assert_same(whole, run(file))


def test_augmented_data_without_a_plain_loader_is_extracted_once(tmp_path, quiet_trainer):
    """What is drawn for the features leaves no trace, whether they come from the disk or not."""
    caches = [FeatureCache(folder, progress=False) for folder in ("", None, None)]
    runs = [fit(tmp_path, quiet_trainer, cache, data=Unplanned(), head=Linear()) for cache in caches]
    assert len(runs[2][1]) == 2
    assert_same(runs[0], runs[1])
    assert_same(runs[1], runs[2])


def test_a_disk_that_cannot_be_written_is_said_and_done_without(tmp_path, quiet_trainer):
    twin = fit(tmp_path, quiet_trainer, FeatureCache("", progress=False), head=Linear())
    (tmp_path / "features").write_text("in the way")
    with pytest.warns(UserWarning, match="features are not kept on disk: .*Not a directory"):
        found = fit(tmp_path, quiet_trainer, FeatureCache(progress=False), head=Linear())
    assert_same(twin, found)


TWO = """
import runpy, sys
from datetime import timedelta
from pathlib import Path
import torch
from brainet_pl._utils.framework import pl

space, folder = runpy.run_path(sys.argv[1]), Path(sys.argv[2])

class Tell(pl.Callback):
    def on_fit_start(self, trainer, pl_module):
        kept = pl_module.training_features._all
        found = {"x": kept.features.clone(), "y": kept.targets.clone(), "seen": len(self.seen)}
        torch.save(found, folder / f"{devices}_{run}_{trainer.global_rank}.pt")

for devices in (1, 2):
    for run in range(2):
        pl.seed_everything(0, verbose=False)
        model, tell = space["small"](scores=["KNN"]), Tell()
        tell.seen = space["watched"](model)
        forked = pl.strategies.DDPStrategy(start_method="fork", timeout=timedelta(seconds=120))
        strategy = forked if devices > 1 else "auto"
        cache = space["FeatureCache"](copies=1, progress=False)
        pl.Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, default_root_dir=str(folder / str(devices)),
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[tell, cache, space["structure"](max_rows=400 if run else None)],
        ).fit(model, datamodule=space["Noisy"](images=True))
"""


@pytest.mark.slow
def test_two_processes_extract_and_find_what_one_does(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TWO, __file__, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    one, *others = (
        torch.load(tmp_path / f"{name}.pt") for name in ("1_0_0", "1_1_0", "2_0_0", "2_0_1", "2_1_0", "2_1_1")
    )
    assert all(torch.equal(one[part], other[part]) for other in others for part in "xy")
    assert one["seen"] == 14 + 14 + 3
    assert [other["seen"] for other in others] == [3, 16, 15, 3, 3]  # a share of the batches, then a look at each set


def test_settings_of_the_cache_are_checked():
    with pytest.raises(ValueError, match="copies"):
        FeatureCache(copies=-1)


# -- samplers and batch samplers --------------------------------------------------------------------------------------


class Sampled(Digits):
    """Digits whose training loader has a sampler or a batch sampler of the user's, made from the labels."""

    def __init__(self, make, rows=None):
        super().__init__(images=True)
        self.make, self.rows = make, rows

    def train_dataloader(self):
        labels = torch.tensor([int(y) for _, y in self.structure_set])
        return DataLoader(self.structure_set, **self.make(labels))

    def structure_dataloader(self):
        if self.rows is None:
            return self.train_dataloader()
        return DataLoader(Subset(self.structure_set, range(self.rows)), batch_size=64)


class Labels(pl.Callback):
    """Keeps the labels that a fit trains on."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch[1].tolist())


def by_class(labels):
    """Batches of the samples of one class."""
    return [(labels == c).nonzero()[:16, 0].tolist() for c in (3, 5, 3)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda y: {"batch_size": 16, "sampler": WeightedRandomSampler((y == 0).double(), 40)},
            [[0] * 16] * 2 + [[0] * 8],
        ),
        (lambda y: {"batch_sampler": by_class(y)}, [[3] * 16, [5] * 16, [3] * 16]),
        (lambda y: {"batch_size": 9, "sampler": SubsetRandomSampler((y == 2).nonzero()[:20, 0])}, [[2] * 9] * 2),
    ],
    ids=["weighted", "batches", "subset"],
)
@pytest.mark.parametrize("copies", [0, 2])
def test_samples_are_chosen_as_without_the_cache(tmp_path, quiet_trainer, make, expected, copies):
    labels = Labels()
    trainer = quiet_trainer(tmp_path, FeatureCache(copies=copies, progress=False), labels)
    trainer.fit(small(head=Linear()), datamodule=Sampled(make))
    assert labels.batches == expected


def test_a_sampler_over_other_samples_than_are_extracted_is_refused(tmp_path, quiet_trainer):
    weighted = Sampled(lambda y: {"sampler": WeightedRandomSampler((y == 0).double(), 40)}, rows=50)
    message = "expected features of all [0-9,]+ samples that WeightedRandomSampler chooses from, got 50: let structure"
    with pytest.raises(RuntimeError, match=message):
        quiet_trainer(tmp_path, FeatureCache(progress=False)).fit(small(head=Linear()), datamodule=weighted)


def test_a_sample_is_that_of_the_loader_and_rows_that_were_asked_for():
    x, y = torch.rand(40, 6), torch.arange(40) % 2
    one, two = (DataLoader(TensorDataset(x + add, y), batch_size=8) for add in (0, 1))
    for whole in (False, True):
        features = TrainingFeatures(one, Backbone().build())
        if whole:
            features.all(progress=False)
        assert [len(features.sample(rows).targets) for rows in (10, 5, 20)] == [10, 5, 20]
        features.release()
        assert len(features.sample(7).targets) == 7
        first, second = (features.validation_sample(loader, 40).features for loader in (one, two))
        torch.testing.assert_close(second, first + 1)


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
    plain = pl.LightningModule()
    plain.training_step, plain.configure_optimizers = (lambda *batch: None), (lambda: None)
    with pytest.warns(UserWarning, match="expected a BRAINet to cache features of, got LightningModule: every step"):
        fit(plain)
    monkeypatch.setattr(Digits, "val_dataloader", lambda self: [])
    with pytest.raises(RuntimeError, match="expected one validation DataLoader to cache features of, got list"):
        fit(small(head=Linear()))
