"""Folders of images: classes, splits, unknown sets, presets, files that are none, and predictions that name files."""

import csv
import os

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

from brainet_pl._utils.framework import ModelCheckpoint
from brainet_pl.backbones.loading import Preset, find_preset
from brainet_pl.callbacks import FeatureCache, PredictionFile
from brainet_pl.cli import UsageError, main
from brainet_pl.datamodules import ImageFolder
from brainet_pl.datamodules.corruptions import corrupt_image
from brainet_pl.datamodules.images import list_images, read_image
from brainet_pl.features import identity
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Linear

COLOURS = {"blue": (0, 0, 200), "green": (0, 200, 0), "red": (200, 0, 0)}


def paint(path, colour, size=(12, 10), seed=0):
    """An image of one colour with some noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 50, (size[1], size[0], 3))
    Image.fromarray((np.array(colour) + noise).astype(np.uint8)).save(path)


def painted(root, count=10, names=COLOURS, first=0):
    for kind in names:
        for i in range(first, first + count):
            paint(root / kind / f"{i:02d}.png", COLOURS[kind], seed=i)
    return root


def ready(root, stage="fit", **settings):
    data = ImageFolder(str(root), **({"size": 8, "batch_size": 4} | settings))
    data.setup(stage)
    return data


def files(samples):
    return set(samples.files)


class Mean(nn.Module):
    """Mean colours as features, with a layer to remove."""

    def __init__(self):
        super().__init__()
        self.grid, self.fc = nn.AdaptiveAvgPool2d(2), nn.Linear(12, 3)

    def forward(self, x):
        return self.fc(self.grid(x).flatten(1))


def test_shifts_corrupt_images_of_the_size_that_the_model_takes(tmp_path):
    painted(tmp_path)
    plain = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    data = ready(tmp_path, "test", shifts={"corruptions": ["contrast"], "severities": [5], "limit": 5}, **plain)
    loaders = data.test_dataloader()
    assert list(loaders) == ["test", "shift"]
    places = [i * len(data.test_set) // 5 for i in range(5)]
    x = torch.cat([x for x, _ in loaders["shift"]])
    assert [int(y) for _, part in loaders["shift"] for y in part] == [data.test_set.labels[i] for i in places]
    for found, i in zip(x, places, strict=True):
        small = torchvision.transforms.v2.functional.resize(read_image(data.test_set.paths[i]), 8, antialias=True)
        bytes_ = corrupt_image(torchvision.transforms.v2.functional.center_crop(small, 8), "contrast", 5, i)
        torch.testing.assert_close(found, (bytes_.float() / 255 - 0.5) / 0.25)


# -- splits -----------------------------------------------------------------------------------------------------------


def test_classes_are_split_by_a_seed(tmp_path):
    painted(tmp_path)
    data = ready(tmp_path, val_fraction=0.25, test_fraction=0.2)
    assert data.class_names == ("blue", "green", "red")
    assert data.num_classes == 3
    sets = [data.train_set, data.val_set, data.test_set]
    assert [len(one) for one in sets] == [18, 6, 6]
    assert len(set.union(*map(files, sets))) == 30
    for one in sets:
        assert {kind: one.kinds.count(kind) for kind in COLOURS} == dict.fromkeys(COLOURS, len(one) // 3)
    assert files(data.structure_set) == files(data.train_set)
    again, other = ready(tmp_path, val_fraction=0.25), ready(tmp_path, val_fraction=0.25, seed=1)
    assert again.val_set.files == data.val_set.files != other.val_set.files
    assert other.test_set.files == data.test_set.files  # the test images do not depend on the seed
    for x, y in data.val_dataloader():
        assert x.shape[1:] == (3, 8, 8)
        assert torch.equal(x.mean(dim=(2, 3)).argmax(dim=1), 2 - y)  # blue is the last channel and the first class


def test_directories_are_the_split(tmp_path):
    for first, part in enumerate(("train", "valid", "test")):
        painted(tmp_path / part, 3 + first, first=10 * first)
    data = ready(tmp_path)
    assert [len(one) for one in (data.train_set, data.val_set, data.test_set)] == [9, 12, 15]
    assert all(name.startswith("valid" + os.sep) for name in data.val_set.files)
    os.rename(tmp_path / "valid", tmp_path / "elsewhere")
    data = ready(tmp_path, val_fraction=0.34)
    assert [len(one) for one in (data.train_set, data.val_set, data.test_set)] == [6, 3, 15]
    os.rename(tmp_path / "train", tmp_path / "moved")
    assert len(ready(tmp_path, "test").test_set) == 15
    with pytest.raises(FileNotFoundError, match=r"expected training images in .*train, found no such folder"):
        ready(tmp_path)


def test_held_out_classes_and_folders_are_unknown_sets(tmp_path):
    painted(tmp_path / "known")
    paint(tmp_path / "other" / "deep" / "a.png", (9, 9, 9))
    paint(tmp_path / "other" / "b.JPG", (9, 9, 9))
    data = ready(tmp_path / "known", held_out=["red"], ood={"other": str(tmp_path / "other")}, near=[])
    assert data.class_names == ("blue", "green")
    assert data.near == ("held_out",)
    assert {name: len(part) for name, part in data.ood_sets.items()} == {"held_out": 10, "other": 2}
    assert not any("red" in name for one in (data.train_set, data.val_set, data.test_set) for name in one.files)
    assert list(data.test_dataloader()) == ["test", "held_out", "other"]
    for loader in data.test_dataloader().values():
        assert next(iter(loader))[0].shape[1:] == (3, 8, 8)
    with pytest.raises(ValueError, match=r"held_out to name classes in .* \(blue, green, red\), got pink"):
        ready(tmp_path / "known", held_out=["pink"])
    with pytest.raises(ValueError, match="expected near to name"):
        ready(tmp_path / "known", near=["other"])
    with pytest.raises(FileNotFoundError, match=r"expected images in .*nowhere, found no folder"):
        ready(tmp_path / "known", ood={"far": str(tmp_path / "nowhere")})


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_that_are_no_images_are_named(tmp_path):
    painted(tmp_path / "a", 4)
    (tmp_path / "a" / "README.txt").write_text("beside the classes: fine")
    (tmp_path / "a" / "red" / ".DS_Store").write_text("")
    (tmp_path / "a" / "red" / "Thumbs.db").write_text("")
    assert len(list_images(tmp_path / "a" / "red")) == 4
    ready(tmp_path / "a")
    (tmp_path / "a" / "red" / "notes.txt").write_text("not an image")
    with pytest.raises(ValueError, match=r"expected images \(.bmp.*\) in .*red, got notes.txt: move it away"):
        ready(tmp_path / "a")
    painted(tmp_path / "b", 4)
    broken = tmp_path / "b" / "red" / "00.png"
    for content in (b"", b"no image", broken.read_bytes()[:60]):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=r"expected an image in .*00.png, got a file that can't be read as one"):
            read_image(broken)
    Image.fromarray(np.full((4, 4), 60000, dtype=np.uint16)).save(broken)
    with pytest.raises(ValueError, match=r"expected an image of 8 bits a channel in .*00.png, got mode I;16"):
        read_image(broken)


def test_folders_without_classes_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a folder of images at .*nowhere"):
        ready(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"expected directories with images, .*, got no directory"):
        ready(tmp_path)
    painted(tmp_path, names=["red"])
    with pytest.raises(ValueError, match=r"expected directories of two or more classes in .*, got red"):
        ready(tmp_path)
    (tmp_path / "blue").mkdir()
    with pytest.raises(ValueError, match="got none in blue"):
        ready(tmp_path)


def test_a_class_of_the_test_images_alone_is_told_before_the_fit(tmp_path):
    painted(tmp_path / "train", names=["red", "blue"])
    painted(tmp_path / "test")
    with pytest.raises(ValueError, match="expected directories of the classes blue, red, got green too: name them in"):
        ready(tmp_path)
    assert ready(tmp_path, held_out=["green"]).class_names == ("blue", "red")
    ready(tmp_path, "test")  # here the model's classes count, which may be more


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "1"])
def test_every_kind_of_image_has_the_channels_that_were_asked_for(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new("RGB", (6, 4), (200, 0, 0)).convert(mode).save(path)
    for channels in (1, 3):
        image = read_image(path, channels)
        assert image.shape == (channels, 4, 6)
        assert image.dtype == torch.uint8


def test_images_stand_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").shape == (3, 6, 4)


def test_settings_are_checked(tmp_path):
    for settings, message in (
        ({"held_out": "red"}, "expected held_out to be a list of classes"),
        ({"channels": 2}, "expected channels to be 1 or 3"),
        ({"mean": (0.5,)}, "expected both mean and std"),
        ({"size": 0}, "size"),
        ({"test_fraction": 1.0}, "test_fraction"),
    ):
        with pytest.raises(ValueError, match=message):
            ImageFolder(str(tmp_path), **settings)
    painted(tmp_path, 4)
    with pytest.raises(ValueError, match=r"expected a backbone of torchvision or timm, .*or a size, got neither"):
        ready(tmp_path, size=None).train_dataloader()
    with pytest.raises(ValueError, match="expected mean and std of 3 channels, got 2 and 2 numbers"):
        ready(tmp_path, mean=(0.5, 0.5), std=(1.0, 1.0)).train_dataloader()
    painted(tmp_path / "few", 1)
    with pytest.raises(ValueError, match=r"expected enough images to hold out 0.2 of each class, got 3 images, one of"):
        ready(tmp_path / "few")


def test_names_of_files_do_not_matter_to_their_identity_but_bytes_and_transforms_do(tmp_path):
    painted(tmp_path / "a", 4)
    painted(tmp_path / "b", 4)

    def name(root, **settings):
        return identity.of_batches(ready(root, **settings).structure_dataloader(), 0)

    plain = name(tmp_path / "a")
    assert plain is not None
    assert name(tmp_path / "b") == plain
    assert len({plain, name(tmp_path / "a", size=6), name(tmp_path / "a", channels=1)}) == 3
    paint(tmp_path / "a" / ready(tmp_path / "a").train_set.files[2], (1, 2, 3))
    assert name(tmp_path / "a") != plain


# -- presets ----------------------------------------------------------------------------------------------------------


def test_presets_are_those_of_the_weights():
    weights = torchvision.models.ResNet50_Weights
    for name in ("IMAGENET1K_V1", "IMAGENET1K_V2"):
        theirs = weights[name].transforms()
        ours = find_preset("torchvision/resnet50", name)
        assert [ours.resize] == theirs.resize_size
        assert [ours.crop] == theirs.crop_size
        assert list(ours.mean) == theirs.mean
        assert list(ours.std) == theirs.std
    assert find_preset("torchvision/resnet50") == ours  # the recommended ones are the last
    assert Preset.from_dict(ours.to_dict()) == ours
    for other in (None, "cifar_resnet20", "torchvision/nothing", "package:Class", nn.Linear(2, 2)):
        assert find_preset(other) is None
    with pytest.raises(ValueError, match="expected the preset of a checkpoint to have"):
        Preset.from_dict({"resize": 3})


def test_images_are_prepared_as_torchvision_does_it(tmp_path, quiet_trainer):
    """Up to the rounding of a resize on bytes."""
    painted(tmp_path, 4)
    data = ImageFolder(str(tmp_path), batch_size=4)
    model = BRAINet(3, backbone=Mean(), head=Linear())
    model.preset = BRAINet(3, "torchvision/squeezenet1_1").preset
    quiet_trainer(tmp_path, fast_dev_run=True).fit(model, datamodule=data)
    theirs = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()
    inputs = next(iter(data.val_dataloader()))[0]
    expected = torch.stack([theirs(Image.open(path)) for path in data.val_set.paths])
    assert inputs.shape == expected.shape
    torch.testing.assert_close(inputs, expected, atol=0.03, rtol=0)


def test_a_preset_of_timm(monkeypatch):
    timm = pytest.importorskip("timm")
    preset = find_preset("timm/vit_tiny_patch16_224")
    assert preset.crop == 224
    assert preset == find_preset(timm.create_model("vit_tiny_patch16_224"))


# -- a run ------------------------------------------------------------------------------------------------------------


def test_fit_test_and_predictions_of_a_folder_without_classes(tmp_path, quiet_trainer):
    painted(tmp_path / "images", 12)
    for i, (name, colour) in enumerate(COLOURS.items()):
        paint(tmp_path / "new" / f"=is_{name}.png", colour, seed=100 + i)
    settings = {"size": 8, "batch_size": 8, "num_workers": 0}
    data = ImageFolder(str(tmp_path / "images"), **settings)
    keep = ModelCheckpoint(tmp_path, filename="model")
    torch.manual_seed(0)
    model = BRAINet(3, backbone=Mean(), head=Linear(), lr=0.3)
    fit = quiet_trainer(tmp_path, keep, FeatureCache(progress=False), epochs=15)
    fit.fit(model, datamodule=data)
    (found,) = quiet_trainer(tmp_path).test(model, datamodule=data, verbose=False)
    assert found["test/cls/Acc"] == 1
    loaded = BRAINet.load_from_checkpoint(tmp_path / "model.ckpt", backbone=Mean())
    alone = ImageFolder("nowhere", predict=str(tmp_path / "new"), **settings)
    quiet_trainer(tmp_path, PredictionFile()).predict(loaded, datamodule=alone, return_predictions=False)
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [row["file"] for row in rows] == [f"'=is_{name}.png" for name in COLOURS]  # no formula for a spreadsheet
    assert [row["class_name"] for row in rows] == list(COLOURS)
    for row in rows:
        assert sum(float(row[f"probabilities_{name}"]) for name in COLOURS) == pytest.approx(1, abs=1e-5)
        assert float(row["entropy"]) >= 0
    # one image, and test images with names
    one = ImageFolder("nowhere", predict=str(tmp_path / "new" / "=is_red.png"), **settings)
    quiet_trainer(tmp_path, PredictionFile()).predict(loaded, datamodule=one, return_predictions=False)
    (row,) = csv.DictReader((tmp_path / "predictions.csv").open())
    assert row["class_name"] == "red"
    quiet_trainer(tmp_path, PredictionFile()).predict(loaded, datamodule=data, return_predictions=False)
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [row["file"].split(os.sep)[0] for row in rows] == [row["class_name"] for row in rows]
    # a test with fewer classes keeps the numbers of the trained ones; one with others is refused
    painted(tmp_path / "two" / "test", 4, names=["green", "red"], first=50)
    two = ImageFolder(str(tmp_path / "two"), **settings)
    (found,) = quiet_trainer(tmp_path).test(loaded, datamodule=two, verbose=False)
    assert found["test/cls/Acc"] == 1
    assert two.class_names == tuple(COLOURS)
    os.rename(tmp_path / "two" / "test" / "red", tmp_path / "two" / "test" / "pink")
    with pytest.raises(ValueError, match="expected directories of the classes blue, green, red, got pink too"):
        quiet_trainer(tmp_path).test(loaded, datamodule=ImageFolder(str(tmp_path / "two"), **settings), verbose=False)


def test_the_command_line_predicts_a_folder_from_a_checkpoint_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    painted(tmp_path / "images", 8)
    paint(tmp_path / "new" / "x.png", COLOURS["red"], seed=1)
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--trainer.logger=CSVLogger"]
    quiet += ["--trainer.logger.save_dir=runs"]
    words = ["--model.num_classes=3", "--model.head=Linear", "--data.root=images", "--data.size=8", *quiet]
    main(["fit", "--data=ImageFolder", *words, "--trainer.max_epochs=2", "--data.batch_size=4"])
    (checkpoint,) = tmp_path.rglob("*.ckpt")  # in the folder of its run, whose config.yaml names the data
    (tmp_path / "images").rename(tmp_path / "gone")
    main(["predict", f"--ckpt_path={checkpoint}", "--data.predict=new", *quiet])
    (path,) = tmp_path.rglob("predictions.csv")
    checkpoint.rename("model.ckpt")
    with pytest.raises(UsageError, match=r"expected data for model.ckpt, got none: .*--data=Digits"):
        main(["predict", "--ckpt_path=model.ckpt", "--data.predict=new", *quiet])
    (row,) = csv.DictReader(path.open())
    assert row["file"] == "x.png"
    assert row["class_name"] in COLOURS
    assert float(row["probabilities_red"]) >= 0


def test_weights_that_differ_in_their_preset_are_told_by_the_checkpoint(tmp_path, quiet_trainer):
    """A checkpoint does not keep the name of the weights, but what they expect."""
    painted(tmp_path / "images", 4)
    model = BRAINet(3, head=Linear())
    model.preset = find_preset("torchvision/resnet50", "IMAGENET1K_V1")
    trainer = quiet_trainer(tmp_path, fast_dev_run=False, limit_train_batches=1, limit_val_batches=1)
    trainer.fit(model, datamodule=ImageFolder(str(tmp_path / "images"), size=8, batch_size=4))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = BRAINet.load_from_checkpoint(tmp_path / "model.ckpt")
    assert loaded.preset == model.preset != find_preset("torchvision/resnet50")
