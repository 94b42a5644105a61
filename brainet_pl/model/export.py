"""A whole model as one graph with a free batch size, for `torch.export` and ONNX.

Inputs (B, …) go in, and what `predict_step` gives comes out under its names: class and probabilities, every score that
is fitted, and whatever else a model tells of a prediction. The sub-networks of a BRAINet are drawn once, when the graph
is made, so that one input always gets one answer.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brainet_pl._utils import atomic, checks
from brainet_pl.backbones import batches
from brainet_pl.model.lightning import BRAINet
from brainet_pl.model.swap import SwappedModel
from brainet_pl.network import BRAINetHead
from brainet_pl.network.base import run_head
from brainet_pl.tasks.predictive import predictive_scores

INPUT = "input"  # the name of an only tensor
TRACED = 4  # samples of the example that a graph is made from: neither 0 nor 1, which compilers take for special
CHECKED = (1, 7)  # samples with which the graph is run before it is handed out
CLOSE = 1e-3  # relative and absolute difference that rounding may make


class Exported(NamedTuple):
    """A graph, and what goes in and comes out, in this order.

    Attributes:
        program: it takes `inputs` and gives a tuple with one tensor for each of `outputs`.
        inputs: names of the inputs.
        outputs: names of the outputs.
    """

    program: torch.export.ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Answers(nn.Module):
    """A model as a function of tensors, in the order of `inputs`, that gives a tuple in the order of `outputs`."""

    def __init__(self, model: BRAINet | SwappedModel, example: Any, passes: int) -> None:
        super().__init__()
        self.model, self.passes = model, passes
        self.named = isinstance(example, Mapping)
        self.inputs = tuple(example) if isinstance(example, Mapping) else (INPUT,)
        size = batches.size(example)
        self.outputs = tuple(k for k, v in self._answer(example).items() if v.dim() and v.shape[0] == size)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Maps tensors in the order of `inputs` to a tuple in the order of `outputs`."""
        answer = self._answer(dict(zip(self.inputs, tensors, strict=True)) if self.named else tensors[0])
        return tuple(answer[name] for name in self.outputs)

    def _answer(self, x: Any) -> dict[str, Tensor]:
        if isinstance(self.model, BRAINet):
            return self.model.predict_step(x, 0)
        if self.model.scores is not None:  # it was calibrated
            return self.model.answer(x, self.passes)
        if self.model.calibration is not None:
            return self.model.answer(x, self.passes)
        features, base_logits = self.model.read(x)
        logits, weights = run_head(self.model.head, features, self.passes, base_logits)
        probs = logits.softmax(dim=-1)
        mean = probs.mean(dim=0) if weights is None else torch.tensordot(weights, probs, dims=1)
        return {"class": mean.argmax(dim=-1), "probabilities": mean} | predictive_scores(probs, logits, weights)


def export_program(
    model: BRAINet | SwappedModel, example: Any = None, *, passes: int | None = None, seed: int = 0
) -> Exported:
    """A model as an exported program for any batch size.

    Args:
        model: with its head; it is left as it was.
        example: inputs of any batch size; None is made after the first inputs that the model ever got.
        passes: sub-networks of a head that draws; None is the model's own number, or 15.
        seed: of their draw.
    """
    with _ready(model, example, passes, seed) as (answers, tensors):
        free = torch.export.Dim("batch", min=1)
        shapes = {"tensors": tuple({0: free} for _ in tensors)}
        program = torch.export.export(answers, tensors, dynamic_shapes=shapes)
        graph = program.module()
        _check(answers, tensors, lambda given: graph(*given))
        return Exported(program, answers.inputs, answers.outputs)


def export_onnx(
    model: BRAINet | SwappedModel, path: str | Path, example: Any = None, *, passes: int | None = None, seed: int = 0
) -> tuple[str, ...]:
    """Write a model as ONNX for any batch size; the names of its outputs.

    The arguments are those of `export_program`. With onnxruntime installed, the file is run and compared first.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"expected a file that ends in .onnx, got {path}: name it so")
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("ONNX needs the packages onnx and onnxscript: pip install onnx onnxscript") from error
    with _ready(model, example, passes, seed) as (answers, tensors), atomic.atomic_write(path) as temporary, _quiet():
        torch.onnx.export(
            answers,
            tensors,
            str(temporary),
            input_names=list(answers.inputs),
            output_names=list(answers.outputs),
            dynamic_shapes={"tensors": tuple({0: "batch"} for _ in tensors)},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        _check_onnx(answers, tensors, temporary)
        return answers.outputs


@contextlib.contextmanager
def _ready(
    model: BRAINet | SwappedModel, example: Any, passes: int | None, seed: int
) -> Iterator[tuple[Answers, tuple[Tensor, ...]]]:
    """The model in evaluation with draws that stay, and example inputs; everything is put back afterwards."""
    head = model.head
    if head is None:
        raise ValueError("expected a model with a head, got one that was never fitted: fit it, or load a checkpoint")
    count = passes if passes is not None else getattr(model, "passes", 15)
    count = checks.whole("passes", count, 1, 10**4)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    training, before = model.training, getattr(model, "passes", None)
    held = head.held if isinstance(head, BRAINetHead) else None
    model.eval()
    try:
        if isinstance(head, BRAINetHead) and head.inference in ("auto", "stochastic"):
            head.hold(head.ggt.sample(count, head.temperature, seed))
        if isinstance(model, BRAINet):
            model.passes = count
        with torch.no_grad():
            given = batches.move(_example(model, example), device)
            tensors = tuple(given.values()) if isinstance(given, Mapping) else (given,)
            yield Answers(model, given, count).eval(), tensors
    finally:
        model.train(training)
        if isinstance(head, BRAINetHead):
            head.hold(held)
        if isinstance(model, BRAINet) and before is not None:
            model.passes = before


def _example(model: BRAINet | SwappedModel, given: Any) -> Any:
    """Inputs of `TRACED` samples like those given, or like those that the model was given first."""
    samples = model.backbone.input_signature if given is None else batches.signature(given)
    if samples is None:
        raise ValueError(
            "expected example inputs, because this model has not seen any: give some, export_onnx(model, path, x), or "
            "on the command line their shape, --shape 3,32,32"
        )
    if given is None:
        return batches.example(samples, TRACED)
    rows = torch.arange(TRACED) % batches.size(given)
    return batches.rows(given, rows)


def _check(answers: Answers, tensors: tuple[Tensor, ...], graph: Any) -> None:
    """Run the graph with other batch sizes than the one it was made from, and compare."""
    for size in CHECKED:
        given = tuple(tensor[torch.arange(size) % len(tensor)] for tensor in tensors)
        for name, ours, theirs in zip(answers.outputs, answers(*given), graph(given), strict=True):
            there = torch.as_tensor(theirs)
            if ours.shape != there.shape or not _close(ours, there):
                raise RuntimeError(
                    f"expected the graph to give the model's {name} for a batch of {size}, got another: this model is "
                    "not the same as a graph; one whose head draws dropout masks or weights differs each time"
                )


def _close(ours: Tensor, theirs: Tensor) -> bool:
    if not ours.is_floating_point():
        return bool((ours.cpu() == theirs.cpu()).float().mean() > 0.5)  # near a tie, rounding may decide
    return torch.allclose(ours.cpu().double(), theirs.cpu().double(), CLOSE, CLOSE, equal_nan=True)


def _check_onnx(answers: Answers, tensors: tuple[Tensor, ...], path: Path) -> None:
    try:
        import onnxruntime
    except ImportError:
        return
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    _check(
        answers,
        tensors,
        lambda given: session.run(None, {n: tensor.cpu().numpy() for n, tensor in zip(names, given, strict=True)}),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says to those who develop it."""
    loggers = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript", "torch.onnx")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
