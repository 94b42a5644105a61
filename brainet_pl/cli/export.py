"""`brainet export`: the model of a checkpoint as a folder, or as one graph, ONNX or torch.export."""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from brainet_pl._utils import atomic
from brainet_pl.backbones.loading import Backbone
from brainet_pl.checkpoints.format import Checkpoint
from brainet_pl.cli.lightning_cli import TRUST, stored_config
from brainet_pl.cli.trust import vet
from brainet_pl.cli.words import check_ckpt_path
from brainet_pl.datamodules import Table
from brainet_pl.model.export import TRACED, export_onnx, export_program
from brainet_pl.model.export_folder import export_folder, features_of_table
from brainet_pl.model.lightning import BRAINet
from brainet_pl.serving.folder import read_about
from brainet_pl.serving.tables import Feature


def main(args: Sequence[str]) -> None:
    """`brainet export --ckpt_path FILE --out FOLDER|model.onnx|model.pt2`."""
    parser = argparse.ArgumentParser(
        "brainet export",
        description="Write the model of a checkpoint with a free batch size: inputs in; class, probabilities, scores "
        "and verdict out, by name. A folder has the graph, names, preparation of inputs, an example and a client.",
    )
    parser.add_argument("--ckpt_path", required=True, help="the checkpoint")
    parser.add_argument("--out", required=True, help="a folder; or a file, .onnx, or .pt2 for torch.export")
    parser.add_argument("--shape", help="shape of one input, as 3,32,32; needed where the checkpoint does not hold it")
    parser.add_argument("--passes", type=int, help="sub-networks that are drawn for the graph; the model's own number")
    parser.add_argument("--seed", type=int, default=0, help="seed of their draw")
    parser.add_argument(
        "--model.backbone", dest="backbone", help="the class of a backbone of your own, package.module:Class"
    )
    parser.add_argument(TRUST, dest="trust", action="store_true", help="import the backbone that the checkpoint names")
    words = parser.parse_args(args)
    out = Path(words.out)
    if out.suffix not in ("", ".onnx", ".pt2"):
        raise ValueError(f"expected --out to be a folder, or to end in .onnx or .pt2, got {out}: name it so")
    check_ckpt_path(words.ckpt_path)
    model = load(words.ckpt_path, words.backbone, words.trust)
    example = None if words.shape is None else torch.rand(TRACED, *_shape(words.shape))
    settings = {"passes": words.passes, "seed": words.seed}
    if out.suffix == "":
        export_folder(model, out, example, features=table_features(words.ckpt_path), **settings)
        outputs = tuple(one["name"] for one in read_about(out)["outputs"])
    elif out.suffix == ".onnx":
        outputs = export_onnx(model, out, example, **settings)
    else:
        program, _, outputs = export_program(model, example, **settings)
        buffer = io.BytesIO()  # torch ends the process where a disk is full while it writes to a file
        torch.export.save(program, buffer)
        with atomic.atomic_write(out) as temporary:
            temporary.write_bytes(buffer.getbuffer())
    print(f"{out}: {', '.join(outputs)}")


def load(path: str, backbone: str | None = None, trust: bool = False) -> BRAINet:
    """The model of a checkpoint; a backbone of the user's own is imported where the user names or trusts it."""
    stored = Checkpoint.read(path).hparams.get("backbone")
    given: dict[str, Any] = {}
    if backbone is not None or trust:
        settings: dict[str, Any] = dict(stored) if isinstance(stored, Mapping) else {"model": stored}
        given = {"backbone": Backbone(**settings | {"weights": None} | ({"model": backbone} if backbone else {}))}
    model: BRAINet = BRAINet.load_from_checkpoint(path, map_location="cpu", **given)
    return model


def table_features(path: str) -> list[Feature] | None:
    """How rows are prepared, where the checkpoint lies in a run whose data is a `Table`: read again from its file."""
    data = stored_config(Checkpoint.read(path)).get("data")
    if not isinstance(data, Mapping) or str(data.get("class_path")).rpartition(".")[2] != "Table":
        return None
    table = Table(**vet({"data": data})["data"]["init_args"])
    table.setup("fit")
    return features_of_table(table)


def _shape(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.strip().isdigit() and int(number) > 0 for number in numbers):
        raise ValueError(f"expected --shape to be whole numbers with commas, such as 3,32,32, got {text!r}")
    return [int(number) for number in numbers]
