"""Images with several labels each: files in both forms, a run by the command line, and files that are wrong."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from brainet_pl.cli import main
from brainet_pl.datamodules import LabelledImages

NAMES = ("bright", "red")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Sixty small images, bright or dark, red or blue, with their labels as names and as columns."""
    place = tmp_path_factory.mktemp("labelled")
    names, columns = ["image,labels"], ["image,red,bright"]
    for i in range(60):
        red, bright = i % 2, i // 2 % 2
        pixels = np.random.default_rng(i).integers(0, 60, (12, 12, 3)) + 120 * bright
        pixels[:, :, 0 if red else 2] += 60
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.png")
        listed = [name for name, there in zip(NAMES, (bright, red), strict=True) if there]
        names.append(f"{i}.png,{';'.join(listed)}")
        columns.append(f"{i}.png,{red},{'' if i == 7 else bright}")
    (place / "labels.csv").write_text("\n".join(names))
    (place / "columns.csv").write_text("\n".join(columns))
    return place


def test_labels_are_read_as_names_and_as_columns(root):
    rows = {}
    for file in ("labels.csv", "columns.csv"):
        data = LabelledImages(str(root), file, size=8, val_fraction=0.2)
        data.setup("fit")
        assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [38, 10, 12]
        assert not set(data.train_set.files) & set(data.test_set.files)
        x, y = next(iter(data.val_dataloader()))
        assert x.shape == (10, 3, 8, 8)
        data.train_set.number(NAMES)
        rows |= {(file, name): row for name, row in zip(data.train_set.files, data.train_set.labels, strict=True)}
        assert y.shape == (10, 2)
    for name in {name for _, name in rows}:
        i, one, other = int(name[:-4]), rows["labels.csv", name], rows["columns.csv", name]
        assert one.tolist() == [i // 2 % 2, i % 2]
        torch.testing.assert_close(other, torch.tensor([math.nan, 1.0]) if i == 7 else one, equal_nan=True)


@pytest.mark.integration
def test_the_command_line_fits_and_tests_several_labels(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    quiet = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.max_epochs=2"]
    given = ["--data=LabelledImages", f"--data.root={root}", "--data.size=8", "--model.task=MultiLabel"]
    given += ["--model.task.num_labels=2", "--model.head=MLP"]
    given += ['--model.backbone={"model": "torch.nn:Flatten", "head_layer": ""}']
    main(["fit", *given, *quiet, "--trainer.accelerator=cpu"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("image", "a column of images and one or more of labels"),
        ("image,hat\n0.png,1\nnone.png,0", "got no file at .*none.png"),
        ("image,hat\n0.png,1\n0.png,0", "got some twice"),
        ("image,hat,coat\n0.png,1,2", r"expected 1, 0 or nothing for every label in .*, got \['0.png', '1', '2'\]"),
    ],
)
def test_files_that_are_wrong_are_told(root, content, message):
    (root / "wrong.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        LabelledImages(str(root), "wrong.csv", size=8).setup("fit")
    with pytest.raises(FileNotFoundError, match="a CSV file of labels at"):
        LabelledImages(str(root), "other.csv", size=8).setup("fit")
