"""Datamodules: splits, loaders by name, targets, and settings that are documented and checked at once."""

import inspect
import subprocess
import sys

import docstring_parser
import numpy as np
import pytest
import torch
import torchvision
from sklearn.datasets import load_digits

import brainet_pl.datamodules
from brainet_pl._utils.framework import pl
from brainet_pl.datamodules import (
    UCI,
    Arrays,
    Digits,
    ImageFolder,
    ImageLists,
    LabelledImages,
    SplitData,
    Table,
    TorchvisionData,
)  # fmt: skip
from brainet_pl.datamodules.arrays import as_targets
from brainet_pl.datamodules.base import Samples
from brainet_pl.datamodules.digits import read_digits

OFFERED = [getattr(brainet_pl.datamodules, name) for name in brainet_pl.datamodules.__all__]
MODULES = [part for part in OFFERED if issubclass(part, SplitData)]  # beside them there are settings such as `Shifts`


def test_digits_are_those_of_scikit_learn():
    for found, expected in zip(read_digits(), load_digits(return_X_y=True), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


@pytest.mark.integration
def test_scikit_learn_is_imported_only_where_it_is_used():
    code = "import sys, brainet_pl.cli.lightning_cli; brainet_pl.datamodules.Digits().setup('fit'); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "brainet_pl.datamodules.table" in said.split()
    assert "sklearn" not in said.split()


def test_digits_hold_classes_out_and_never_mix_splits():
    data = Digits()
    data.setup("fit")
    assert data.num_classes == 8
    sets = [data.train_set, data.val_set, data.test_set]
    seen = [{x.numpy().tobytes() for x, _ in samples} for samples in sets]
    assert sum(map(len, sets)) + len(data.ood_sets["held_out"]) == 1797
    labels = torch.tensor([y for samples in sets for _, y in samples])
    assert sorted(labels.unique().tolist()) == list(range(8))
    assert {y for _, y in data.ood_sets["held_out"]} == {8, 9}
    for a in range(3):
        for b in range(a):
            assert len(seen[a] & seen[b]) <= 1  # scikit-learn's digits may hold a true duplicate
    x, _ = next(iter(data.structure_dataloader()))
    assert x.shape == (64, 64)
    assert 0 <= x.min() <= x.max() <= 1
    Digits(images=True).setup("fit")


def test_validation_is_the_same_for_a_seed_and_comes_from_training():
    a, b = Digits(seed=3), Digits(seed=3)
    for data in (a, b):
        data.setup("fit")
    assert [y for _, y in a.val_set] == [y for _, y in b.val_set]
    tests = []
    for seed in (0, 1):
        data = Digits(seed=seed)
        data.setup("test")
        tests.append(torch.stack([x for x, _ in data.test_set]))
    torch.testing.assert_close(*tests)  # the test set does not depend on the seed


def save(path, n, shape, seed=0, classes=3):
    rng = np.random.default_rng(seed)
    np.savez(path, x=rng.integers(0, 256, size=(n, *shape), dtype=np.uint8), y=rng.integers(0, classes, n))
    return str(path)


class TwoUnknown(SplitData):
    """Numbers in memory, and unknown sets of any names."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def setup(self, stage):
        known = Samples(torch.randn(20, 3), torch.zeros(20))
        self.take(known, known, 20)
        self.test_set = known
        self.ood_sets = {name: Samples(torch.randn(4 + i, 3), torch.zeros(4 + i)) for i, name in enumerate(self.names)}


def test_test_loaders_go_by_name():
    data = TwoUnknown("far", "a/b")
    data.setup("test")
    loaders = data.test_dataloader()
    assert {name: len(loader.dataset) for name, loader in loaders.items()} == {"test": 20, "far": 4, "a/b": 5}
    assert next(iter(loaders)) == "test"


class Seen(pl.LightningModule):
    """Remembers which loader gave how many samples."""

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        seen = self.trainer.test_dataloaders
        self.found = getattr(self, "found", {}) | {list(seen)[dataloader_idx]: len(batch[0])}


def test_lightning_takes_loaders_by_name(tmp_path):
    model = Seen()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.test(model, datamodule=TwoUnknown("far", "near"), verbose=False)
    assert model.found == {"test": 20, "far": 4, "near": 5}


def test_names_that_would_overwrite_each_other_are_refused(tmp_path):
    for names, message in (
        (["test"], "expected names of out-of-distribution sets other than 'test'.*, got 'test': rename"),
        (["a/b", "a_b"], "expected .* files have different names, got 'a/b' and 'a_b', both written as 'a_b': rename"),
    ):
        with pytest.raises(ValueError, match=message):
            TwoUnknown(*names).setup("fit")
        with pytest.raises(ValueError, match=message):
            Arrays("a.npz", "b.npz", ood=dict.fromkeys(names, "c.npz"))
    with pytest.raises(ValueError, match="got 'svhn' and 'svhn'"):
        TorchvisionData("cifar10", ood=("svhn", "svhn"))


def test_digits_without_unknown_ones_name_no_near_set():
    assert Digits(held_out=()).near == ()
    assert Digits().near == ("held_out",)


def test_numbers_as_targets_stay_numbers(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.uniform(0, 1, 30)
    path = str(tmp_path / "regression.npz")
    np.savez(path, x=rng.normal(size=(30, 4)), y=y)
    data = Arrays(path, path, val=path)
    data.setup("fit")
    _, target = next(iter(data.test_dataloader()["test"]))
    assert target.dtype is torch.float32
    np.testing.assert_allclose(target, y, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.uint32, np.int64, bool])
def test_integers_as_targets_are_labels(dtype):
    values = np.array([0, 1, 1, 0], dtype=dtype)
    for y in (values, values[:, None]):
        assert as_targets(y, "file").dtype is torch.long
        assert as_targets(y, "file").tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble, ">f8"])
def test_every_float_becomes_float32(dtype):
    y = as_targets(np.array([0.5, -2.25], dtype=dtype), "file")
    assert y.dtype is torch.float32
    assert y.tolist() == [0.5, -2.25]


def test_other_targets_are_refused(tmp_path):
    def refuse(y, message):
        np.savez(tmp_path / "bad.npz", x=np.zeros((3, 2)), y=y)
        with pytest.raises(ValueError, match=message):
            Arrays(str(tmp_path / "bad.npz"), str(tmp_path / "bad.npz")).setup("fit")

    refuse(np.array(["cat", "dog", "cat"]), "got values of type <U3: number the classes from 0")
    refuse(np.zeros(3, dtype=complex), "got values of type complex128")
    refuse(np.zeros(3, dtype="datetime64[D]"), "got values of type datetime64")
    refuse(np.zeros((3, 2)), r"expected one target for each sample .*, got \(3, 2\): keep one column")
    refuse(np.zeros((3, 1, 1)), "expected one target for each sample")
    refuse(np.array(1.0), "expected one target for each sample")
    refuse(np.array([{}, {}, {}]), "got Python objects: store arrays of numbers")
    refuse(np.zeros(4), "expected as many targets as inputs, got 4 targets for 3 inputs: check")


def test_arrays_of_images_and_of_features(tmp_path):
    files = {"train": save(tmp_path / "a.npz", 40, (8, 8, 3)), "test": save(tmp_path / "b.npz", 20, (8, 8, 3))}
    data = Arrays(
        **files, ood={"far": save(tmp_path / "c.npz", 5, (8, 8, 3))}, mean=(0.5,) * 3, std=(0.25,) * 3, augment=True
    )
    data.setup("fit")
    x, y = next(iter(data.test_dataloader()["test"]))
    assert x.shape == (20, 3, 8, 8)
    raw = np.load(files["test"])["x"]
    np.testing.assert_allclose(x[0].permute(1, 2, 0), (raw[0] / 255 - 0.5) / 0.25, atol=1e-5)
    assert y.dtype is torch.long
    assert len(data.train_set) == len(data.structure_set) == 36
    assert len(data.ood_dataloaders()["far"].dataset) == 5
    plain = torch.stack([x for x, _ in data.structure_set])
    torch.testing.assert_close(plain, torch.stack([x for x, _ in data.structure_set]))
    assert not torch.equal(plain, torch.stack([x for x, _ in data.train_set]))

    np.savez(tmp_path / "f.npz", x=np.random.default_rng(0).normal(size=(30, 5)), y=np.zeros(30))
    flat = Arrays(str(tmp_path / "f.npz"), str(tmp_path / "f.npz"), val=str(tmp_path / "f.npz"), limit=10)
    flat.setup("fit")
    assert flat.train_set[0][0].dtype is torch.float32
    assert len(flat.train_set) == len(flat.val_set) == 10
    with pytest.raises(FileNotFoundError, match=r"expected an .npz file"):
        Arrays("nowhere.npz", files["test"]).setup("fit")
    np.savez(tmp_path / "unlabelled.npz", x=np.zeros((3, 2)))
    with pytest.raises(ValueError, match="expected arrays x and y"):
        Arrays(str(tmp_path / "unlabelled.npz"), files["test"]).setup("fit")
    np.savez(tmp_path / "bad.npz", images=np.zeros(3))
    with pytest.raises(ValueError, match="expected arrays x and y"):
        Arrays(str(tmp_path / "bad.npz"), files["test"]).setup("fit")


class Stub:
    """Stands in for a torchvision class: a few random images, no file."""

    def __init__(self, shape, labels="targets"):
        self.shape, self.labels = shape, labels

    def __call__(self, root, download=False, **split):
        rng = np.random.default_rng(0)
        n = 40 if split.get("train", split.get("split") == "train") else 20
        made = type("Made", (), {})()
        made.data = rng.integers(0, 256, size=(n, *self.shape), dtype=np.uint8)
        setattr(made, self.labels, rng.integers(0, 10, n))
        return made


def test_torchvision_sets_are_one_table(monkeypatch):
    from brainet_pl.datamodules import vision

    shapes = {
        "mnist": (28, 28),
        "fashion_mnist": (28, 28),
        "kmnist": (28, 28),
        "cifar10": (32, 32, 3),
        "cifar100": (32, 32, 3),
    }
    for name in vision.TABLE:
        stub = Stub(shapes.get(name, (3, 32, 32)), "labels" if name == "svhn" else "targets")
        monkeypatch.setitem(vision.TABLE, name, vision.TABLE[name]._replace(source=stub))
    for name, entry in vision.TABLE.items():
        data = TorchvisionData(name, download=True, batch_size=8)
        data.prepare_data()
        data.setup("fit")
        x, _ = next(iter(data.train_dataloader()))
        assert x.shape == (8, len(entry.mean), entry.size, entry.size)
        assert x.dtype is torch.float32
    ood = TorchvisionData("cifar10", ood=("svhn",))
    ood.setup("test")
    assert list(ood.ood_dataloaders()) == ["svhn"]


def test_missing_files_and_bad_names_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected mnist in .*set download"):
        TorchvisionData("mnist", root=str(tmp_path)).setup("fit")
    with pytest.raises(ValueError, match="val_fraction"):
        Digits(val_fraction=0.0)
    with pytest.raises(ValueError, match="batch_size of at least 2"):
        Digits(batch_size=1)
    assert torchvision.__version__


@pytest.mark.parametrize("module", OFFERED)
def test_every_setting_is_described(module):
    """The command line prints these descriptions; one that shares a line with another is lost."""
    found = {p.arg_name: p.description for p in docstring_parser.parse(module.__doc__).params if p.args[0] == "param"}
    for name in inspect.signature(module).parameters:
        assert len((found.get(name) or "").split()) >= 3, f"{module.__name__}: {name} is without a description"


REQUIRED = {
    UCI: {"name": "yacht"},
    Arrays: {"train": "a.npz", "test": "b.npz"},
    Digits: {},
    SplitData: {},
    ImageFolder: {"root": "images"},
    ImageLists: {"root": "data", "test": "test.txt"},
    LabelledImages: {"root": "images"},
    Table: {"file": "a.csv", "target": "y"},
    TorchvisionData: {"name": "mnist"},
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("setting", "value"), [("val_fraction", 0.0), ("val_fraction", 1.0), ("batch_size", 1)])
def test_shared_settings_are_checked_at_once(module, setting, value):
    module(**REQUIRED[module])
    with pytest.raises(ValueError, match=f"expected (a )?{setting} .*, got {value}: "):
        module(**REQUIRED[module], **{setting: value})


@pytest.mark.parametrize(
    ("module", "setting", "value", "message"),
    [
        (UCI, "name", "yatch", "expected name to be one of 'boston', .*, got 'yatch': choose"),
        (TorchvisionData, "name", "imagenet", "expected name to be one of 'mnist', .*, got 'imagenet': choose"),
        (TorchvisionData, "ood", ("svnh",), "expected ood to be one of 'mnist', .*, got 'svnh': choose"),
        (TorchvisionData, "near", ("svhn",), r"expected near to name .*\(there are none\), got svhn: correct near"),
        (Arrays, "near", ("far",), r"expected near to name .*\(there are none\), got far: correct near"),
        (Arrays, "mean", (0.5,), "expected both mean and std, or neither, got mean=.*: give the other"),
        (Digits, "held_out", (10,), r"expected held_out to be digits from 0 to 9 .*, got \(10,\): correct"),
        (Digits, "held_out", range(9), "leave two or more to learn"),
        (Digits, "test_fraction", 1.5, "expected a test_fraction between 0 and 1, got 1.5"),
        (
            Table,
            "task",
            "ranking",
            "expected task to be one of 'auto', 'regression', 'classification', got 'ranking': choose",
        ),
        (Table, "missing", "drop", "expected missing to be one of 'impute', 'refuse', got 'drop': choose"),
        (Table, "test_fraction", 0.0, "expected a test_fraction between 0 and 1, got 0.0"),
        (Table, "encoding", "utf8000", "expected encoding to be .*, got 'utf8000': "),
        (Table, "delimiter", "comma", "expected delimiter to be one character, got 'comma': "),
        (Table, "max_categories", 0, "expected max_categories of at least 1, got 0: "),
        (Table, "drop", "id", r"expected drop to be a list of columns, got 'id': write \['id'\]"),
        (Table, "categorical", "id", r"expected categorical to be a list of columns, got 'id': write \['id'\]"),
    ],
)
def test_a_misspelt_choice_is_refused_at_once(module, setting, value, message):
    with pytest.raises(ValueError, match=message):
        module(**(REQUIRED[module] | {setting: value}))
