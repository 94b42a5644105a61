"""`brainet labels`: which labels of the training data of a run look wrong, as a table and a page of pictures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from brainet_pl.cli.export import data_of_run, load, shape_of
from brainet_pl.cli.words import find_ckpt_path
from brainet_pl.decisions import find_label_issues
from brainet_pl.features.extraction import inputs_of, unshuffled


def main(args: Sequence[str]) -> None:
    """`brainet labels --ckpt_path FILE --out FOLDER`."""
    parser = argparse.ArgumentParser(
        "brainet labels",
        description="Judge the label of each training sample of a run by heads that learned from the others: "
        "labels.csv, and the worst as labels.html and labels.png.",
    )
    parser.add_argument("--ckpt_path", required=True, help="the checkpoint")
    parser.add_argument("--out", default="labels", help="the folder to write to; labels")
    parser.add_argument("--top", type=int, default=100, help="labels on the page; 100")
    add_image_shape(parser)
    words = parser.parse_args(args)
    words.ckpt_path = find_ckpt_path(words.ckpt_path)
    model, data = load(words.ckpt_path), own_data(words.ckpt_path)
    data.setup("fit")
    loader = unshuffled(data.train_dataloader())
    found = find_label_issues(model, loader)
    page = found.save(words.out, pictures_of(loader, words.image_shape), model.class_names, words.top)
    print(f"{found}\npage: {page}")


def add_image_shape(parser: argparse.ArgumentParser) -> None:
    """The option that both commands have."""
    parser.add_argument("--image_shape", help="of inputs that are flattened images, as 8,8 or 3,32,32")


def pictures_of(loader: Any, image_shape: str | None) -> Callable[[int], Any]:
    """The number of a sample of a loader → its picture."""

    def picture(number: int) -> Any:
        inputs = inputs_of(loader.dataset[number], None)
        return inputs if image_shape is None else inputs.view(shape_of(image_shape))

    return picture


def own_data(path: str) -> Any:
    """The data that the run of a checkpoint was fitted to."""
    name, data = data_of_run(path)
    if data is None:
        raise ValueError(
            f"expected a run of brainet_pl's own data, got {name or 'none'}: call find_label_issues or "
            "rank_for_labelling on data of your own"
        )
    return data
