"""Images by lists, as OpenOOD has them: what a test of them measures, and lists that are wrong."""

import json

import pytest
import torch

from brainet_pl.cli import main
from brainet_pl.datamodules import ImageLists

LISTS = "benchmark_imglist/cifar10"


@pytest.fixture
def root(tmp_path, image_lists):
    return image_lists(tmp_path)


def lists(root, **settings):
    named = {"near": {"tin": f"{LISTS}/test_tin.txt"}, "far": {"svhn": f"{LISTS}/test_svhn.txt"}}
    given = {"test": f"{LISTS}/test_cifar10.txt", "train": f"{LISTS}/train_cifar10.txt", "size": 8} | named
    return ImageLists(str(root), **given | settings)


def test_labels_are_the_numbers_of_the_lists(root):
    data = lists(root, val=f"{LISTS}/val_cifar10.txt")
    data.setup("fit")
    assert data.class_names == tuple("0123456789")
    assert (data.num_classes, data.near) == (10, ("tin",))
    x, y = next(iter(data.val_dataloader()))
    rows = (root / LISTS / "val_cifar10.txt").read_text().splitlines()
    assert y.tolist() == [int(row.split()[1]) for row in rows]
    assert x.shape == (len(rows), 3, 8, 8)
    assert len(data.train_set) == len((root / LISTS / "train_cifar10.txt").read_text().splitlines())


def test_training_images_are_held_out_where_no_list_validates(root):
    data = lists(root, val_fraction=0.25)
    data.setup("fit")
    rows = len((root / LISTS / "train_cifar10.txt").read_text().splitlines())
    assert len(data.train_set) + len(data.val_set) == rows
    assert not set(data.train_set.files) & set(data.val_set.files)
    assert set(data.val_set.labels) <= set(range(10))


def test_a_test_needs_no_training_images_and_has_all_sets(root):
    data = lists(root, train=None, shifted={"cifar10c": f"{LISTS}/test_cifar10c.txt"}, limit=5)
    data.setup("test")
    loaders = data.test_dataloader()
    assert list(loaders) == ["test", "tin", "svhn", "shift/cifar10c/1"]
    assert [len(loader.dataset) for loader in loaders.values()] == [5, 5, 5, 5]
    rows = (root / LISTS / "test_cifar10c.txt").read_text().splitlines()
    spread = [int(rows[i * len(rows) // 5].split()[1]) for i in range(5)]
    assert next(iter(loaders["shift/cifar10c/1"]))[1].tolist() == spread
    with pytest.raises(ValueError, match="expected a list of training images, got none: set train"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        ("a.png", ValueError, "expected lines of a path and the number of a class in .*, got 'a.png': correct"),
        ("cifar10/0.png cat", ValueError, "the number of a class"),
        ("cifar10/0.png -1", ValueError, "the number of a class"),
        ("cifar10/none.png 3", FileNotFoundError, "expected the image cifar10/none.png of .* found none: set images"),
        ("", ValueError, "expected lines of images in .*, got none"),
    ],
)
def test_wrong_lists_are_refused(root, line, error, said):
    (root / LISTS / "test_cifar10.txt").write_text(f"{line}\n")
    with pytest.raises(error, match=said):
        lists(root).setup("test")


def test_a_missing_list_and_names_that_clash_are_refused(root):
    with pytest.raises(FileNotFoundError, match=r"expected a list of images at .*none.txt, found none: set root"):
        lists(root, test="none.txt").setup("test")
    with pytest.raises(ValueError, match="expected names of out-of-distribution sets other than 'test'"):
        lists(root, far={"test": "x.txt"})


def test_the_configuration_measures_what_openood_does(root, tmp_path, monkeypatch):
    """Near and far means, full spectrum and selective prediction in the record of `brainet test`."""
    monkeypatch.chdir(tmp_path)
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--trainer.logger=CSVLogger"]
    quiet += ["--trainer.logger.save_dir=runs", "--trainer.logger.name=ood"]
    few = ["--model.scores=[KNN]", "--structure.threshold=0.5", "--trainer.max_epochs=1", "--data.batch_size=16"]
    main(["fit", "--config", "openood_cifar10", f"--data.root={root}", *few, *quiet])
    cli = main(["test", "--ckpt_path", str(next((tmp_path / "runs").rglob("last.ckpt"))), *quiet])
    record = json.loads(next((tmp_path / "runs").rglob("record.json")).read_text())
    rows = {(row["set"], row["score"]): row for row in record["separation"]}
    near, far = ("cifar100", "tin"), ("mnist", "svhn", "texture", "places365")
    for mean, names in (("near_mean", near), ("far_mean", far)):
        for measure in ("AUROC", "AUROC_full", "SCOD"):
            values = torch.tensor([rows[name, "knn"][measure] for name in names])
            assert rows[mean, "knn"][measure] == pytest.approx(float(values.mean()), abs=1e-6)
            assert float(cli.trainer.callback_metrics[f"ood/{mean}/knn/{measure}"]) == pytest.approx(
                rows[mean, "knn"][measure], abs=1e-6
            )
    assert rows["near_mean", "knn"]["AUROC"] != rows["near_mean", "knn"]["AUROC_full"]
    assert "test/sc/AUGRC" in {entry["key"] for entry in record["metrics"]}
