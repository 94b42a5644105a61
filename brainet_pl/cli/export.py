"""`brainet export`: the model of a checkpoint as one graph, ONNX or torch.export."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

import torch

from brainet_pl._utils import atomic
from brainet_pl.model.export import TRACED, export_onnx, export_program
from brainet_pl.model.lightning import BRAINet


def main(args: Sequence[str]) -> None:
    """`brainet export --ckpt_path FILE --out model.onnx`."""
    parser = argparse.ArgumentParser(
        "brainet export",
        description="Write the model of a checkpoint as one graph with a free batch size: inputs in; class, "
        "probabilities, scores and verdict out, by name.",
    )
    parser.add_argument("--ckpt_path", required=True, help="the checkpoint")
    parser.add_argument("--out", required=True, help="the file to write: .onnx, or .pt2 for torch.export")
    parser.add_argument("--shape", help="shape of one input, as 3,32,32; needed where the checkpoint does not hold it")
    parser.add_argument("--passes", type=int, help="sub-networks that are drawn for the graph; the model's own number")
    parser.add_argument("--seed", type=int, default=0, help="seed of their draw")
    words = parser.parse_args(args)
    out = Path(words.out)
    if out.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"expected --out to end in .onnx or .pt2, got {out}: name it so")
    model = BRAINet.load_from_checkpoint(words.ckpt_path, map_location="cpu")
    example = None if words.shape is None else torch.rand(TRACED, *_shape(words.shape))
    if out.suffix == ".onnx":
        outputs = export_onnx(model, out, example, passes=words.passes, seed=words.seed)
    else:
        program, _, outputs = export_program(model, example, passes=words.passes, seed=words.seed)
        buffer = io.BytesIO()  # torch ends the process where a disk is full while it writes to a file
        torch.export.save(program, buffer)
        with atomic.atomic_write(out) as temporary:
            temporary.write_bytes(buffer.getbuffer())
    print(f"{out}: {', '.join(outputs)}")


def _shape(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.strip().isdigit() and int(number) > 0 for number in numbers):
        raise ValueError(f"expected --shape to be whole numbers with commas, such as 3,32,32, got {text!r}")
    return [int(number) for number in numbers]
