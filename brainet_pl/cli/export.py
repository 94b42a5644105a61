"""`brainet export`: the model of a checkpoint as a folder, or as one graph, ONNX or torch.export."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from brainet_pl import datamodules
from brainet_pl._utils import atomic, checks
from brainet_pl.backbones.loading import Backbone
from brainet_pl.cli.lightning_cli import TRUST, stored_config
from brainet_pl.cli.trust import vet
from brainet_pl.cli.words import find_ckpt_path
from brainet_pl.datamodules import ImageFolder, Table
from brainet_pl.decisions.risk import risk_control
from brainet_pl.export.folder import export_folder, features_of_table
from brainet_pl.export.graph import TRACED, export_onnx, export_program
from brainet_pl.features.extraction import inputs_of
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.sets import TEST
from brainet_pl.serving.folder import read_about
from brainet_pl.serving.images import ImageSteps
from brainet_pl.storage.format import Checkpoint


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
    parser.add_argument(
        "--held",
        choices=("val", "test"),
        help="into a folder, take the answers and features of the run's validation or test data for the drift alarm; "
        "without, it has the scores of validation data that the checkpoint keeps",
    )
    parser.add_argument("--risk", type=float, help="the share of answers that may be wrong; answers are then marked")
    words = parser.parse_args(args)
    out = Path(words.out)
    if words.held and out.suffix:
        raise ValueError(f"expected a folder as --out with --held, got {out}: name one")
    if out.suffix not in ("", ".onnx", ".pt2"):
        raise ValueError(f"expected --out to be a folder, or to end in .onnx or .pt2, got {out}: name it so")
    words.ckpt_path = find_ckpt_path(words.ckpt_path)
    model = load(words.ckpt_path, words.backbone, words.trust)
    if words.risk is not None:
        print(risk_control(model, words.risk))
    example = None if words.shape is None else torch.rand(TRACED, *shape_of(words.shape))
    settings = {"passes": words.passes, "seed": words.seed}
    if out.suffix == "":
        known = from_data(words.ckpt_path, model, words.held)
        export_folder(model, out, example, **known, **settings)
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
    settings: dict[str, Any] = dict(stored) if isinstance(stored, Mapping) else {"model": stored}
    given: dict[str, Any] = {}
    if backbone is not None or trust:
        given = {"backbone": Backbone(**settings | {"weights": None} | ({"model": backbone} if backbone else {}))}
    elif ":" in str(settings["model"]) and str(settings["model"]).partition(":")[0] not in sys.modules:
        raise ValueError(
            f"expected a known backbone in the checkpoint, got {checks.shown(settings['model'])}, and nothing is "
            f"imported because a file names it: add --model.backbone {settings['model']}, or {TRUST} if you know who "
            "made the file"
        )
    model: BRAINet = BRAINet.load_from_checkpoint(path, map_location="cpu", **given)
    return model


def from_data(path: str, model: BRAINet, held: str | None) -> dict[str, Any]:
    """Arguments of `export_folder` that the data of the checkpoint's run tell: how inputs are prepared, and some."""
    name, data = data_of_run(path)
    if data is None:
        if held is not None:
            raise ValueError(
                f"expected a run of brainet_pl's own data for --held, got {name or 'none'}: call export_folder(held=…)"
            )
        return {}
    found: dict[str, Any] = {}
    if isinstance(data, ImageFolder):
        steps = ImageSteps(**data.preparation(model.preset).to_dict(), channels=data.channels)
        found["images"] = steps
    if held is not None or isinstance(data, Table):
        data.setup("fit" if held != "test" else "test")
    if isinstance(data, Table):
        found["features"] = features_of_table(data)
    if held is not None and isinstance(data, ImageFolder):
        files: Any = data.val_set if held == "val" else data.test_set
        paths = files.paths
        found["held"] = (
            torch.from_numpy(np.stack([steps(path.read_bytes()) for path in paths[i : i + 256]]))
            for i in range(0, len(paths), 256)
        )
    elif held is not None:
        loader = data.val_dataloader() if held == "val" else data.test_dataloader()[TEST]
        found["held"] = (inputs_of(batch, model.columns) for batch in loader)
    return found


def data_of_run(path: str) -> tuple[str, Any]:
    """The name of the class of the data that a checkpoint's run was fitted to, and the data where it is ours."""
    config = stored_config(Checkpoint.read(path)).get("data")
    if not isinstance(config, Mapping):
        return "", None
    name = str(config.get("class_path")).rpartition(".")[2]
    kind = getattr(datamodules, name, None)
    return name, None if kind is None else kind(**vet({"data": config})["data"].get("init_args", {}))


def shape_of(text: str) -> list[int]:
    """The numbers of a shape on the command line."""
    numbers = text.split(",")
    if not all(number.strip().isdigit() and int(number) > 0 for number in numbers):
        raise ValueError(f"expected a shape to be whole numbers with commas, such as 3,32,32, got {text!r}")
    return [int(number) for number in numbers]
