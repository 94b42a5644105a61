import numpy as np
import pytest
import torch
import torchvision

from brainet_pl.datamodules import Arrays, Digits, TorchvisionData


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


def test_arrays_of_images_and_of_features(tmp_path):
    files = {"train": save(tmp_path / "a.npz", 40, (8, 8, 3)), "test": save(tmp_path / "b.npz", 20, (8, 8, 3))}
    data = Arrays(
        **files, ood={"far": save(tmp_path / "c.npz", 5, (8, 8, 3))}, mean=(0.5,) * 3, std=(0.25,) * 3, augment=True
    )
    data.setup("fit")
    x, y = next(iter(data.test_dataloader()[0]))
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
    with pytest.raises(ValueError, match="expected one of mnist"):
        TorchvisionData("imagenet")
    with pytest.raises(ValueError, match="val_fraction"):
        Digits(val_fraction=0.0)
    with pytest.raises(ValueError, match="batch_size of at least 2"):
        Digits(batch_size=1)
    assert torchvision.__version__
