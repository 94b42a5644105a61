"""A whole model as one graph with a free batch size, for `torch.export` and ONNX.

Inputs (B, …) go in, and what `predict_step` gives comes out under its names: class and probabilities, every score that
is fitted, and whatever else a model tells of a prediction. Where a prediction is the exact average over all
sub-networks of a BRAINet, the graph has it too; else they are drawn once, when it is made, so that one input always
gets one answer.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from brainet_pl._utils import atomic, checks
from brainet_pl._utils.texts import Texts, are_texts
from brainet_pl.backbones import batches
from brainet_pl.backbones.texts import TextEncoder
from brainet_pl.lightning.module import BRAINet
from brainet_pl.prediction.finite import first_bad_weight
from brainet_pl.prediction.prediction import Prediction
from brainet_pl.prediction.predictor import Predictor

INPUT = "input"  # the name of an only tensor
FEATURES = "features"  # the name of what the head reads
TRACED = 4  # samples of the example that a graph is made from: neither 0 nor 1, which compilers take for special
SENTENCES = ("a text", "another one, which is longer", "and a third", "the last of the four that stand for all texts")
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


def input_names(example: Any) -> tuple[str, ...]:
    """The names of the tensors of some inputs."""
    return tuple(example) if isinstance(example, Mapping) else (INPUT,)


class MapModel(Protocol):
    """What answers with maps of what a predictor says of single cells."""

    rows: Predictor

    @property
    def input_signature(self) -> Mapping[str, batches.Sample] | None:
        """Name → shape and type of a sample of the first inputs."""

    def answer(self, images: Tensor) -> Prediction:
        """Images (B, C, H, W) → maps by name."""

    def eval(self) -> Any:
        """Switch to evaluation mode."""


Model = BRAINet | Predictor | MapModel


def predictor_of(model: Model) -> Predictor:
    """What has the head, the scores and all that was learned of them."""
    if isinstance(model, Predictor):
        return model
    return model.predictor if isinstance(model, BRAINet) else model.rows


class Answers(nn.Module):
    """A model as a function of tensors, in the order of `inputs`, that gives a tuple in the order of `outputs`."""

    def __init__(self, model: Model, example: Any, features: bool = False) -> None:
        super().__init__()
        self.predictor = predictor_of(model)
        self.maps = None if isinstance(model, BRAINet | Predictor) else model
        self.named = isinstance(example, Mapping)
        self.reads_texts = self.predictor.backbone.takes_texts
        self.inputs = input_names(example)
        size = batches.size(example)
        answer = self._answer(example)
        wanted = set(answer) if features else set(answer) - {FEATURES}
        self.outputs = tuple(k for k, v in answer.items() if k in wanted and v.dim() and v.shape[0] == size)

    def _answer(self, given: Any) -> dict[str, Tensor]:
        if self.maps is not None:
            return self.maps.answer(given).to_dict()
        passes = self.predictor.passes(given)  # no `predict`: it warns of inputs that are made up here
        return self.predictor.describe(passes).to_dict() | {FEATURES: passes.features}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Maps tensors in the order of `inputs` to a tuple in the order of `outputs`."""
        given = dict(zip(self.inputs, tensors, strict=True)) if self.named else tensors[0]
        answer = self._answer(given)
        return tuple(answer[name] for name in self.outputs)


def export_program(model: Model, example: Any = None, *, passes: int | None = None, seed: int = 0) -> Exported:
    """A model as an exported program for any batch size.

    Args:
        model: with its head; it is left as it was.
        example: inputs of any batch size; None is made after the first inputs that the model ever got.
        passes: sub-networks of a head that draws; None is the model's own number, or 15.
        seed: of their draw.
    """
    with _ready(model, example, passes, seed) as (answers, tensors):
        free = {0: torch.export.Dim("batch", min=1)}
        if answers.reads_texts:
            free[1] = torch.export.Dim("tokens", min=2)
        shapes = {"tensors": tuple(free for _ in tensors)}
        program = torch.export.export(answers, tensors, dynamic_shapes=shapes)
        graph = program.module()
        _check(answers, tensors, lambda given: graph(*given))
        return Exported(program, answers.inputs, answers.outputs)


def export_onnx(
    model: Model,
    path: str | Path,
    example: Any = None,
    *,
    passes: int | None = None,
    seed: int = 0,
    features: bool = False,
) -> tuple[str, ...]:
    """Write a model as ONNX for any batch size; the names of its outputs.

    The arguments are those of `export_program`; with `features`, what the head reads is an output too. With onnxruntime
    installed, the file is run and compared first.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"expected a file that ends in .onnx, got {path}: name it so")
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("ONNX needs the packages onnx and onnxscript: pip install onnx onnxscript") from error
    ready = _ready(model, example, passes, seed, features)
    with ready as (answers, tensors), atomic.atomic_write(path) as temporary, _quiet():
        axes = {0: "batch", 1: "tokens"} if answers.reads_texts else {0: "batch"}
        torch.onnx.export(
            answers,
            tensors,
            str(temporary),
            input_names=list(answers.inputs),
            output_names=list(answers.outputs),
            dynamic_shapes={"tensors": tuple(axes for _ in tensors)},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        _check_onnx(answers, tensors, temporary)
        return answers.outputs


@contextlib.contextmanager
def _ready(
    model: Model, example: Any, passes: int | None, seed: int, features: bool = False
) -> Iterator[tuple[Answers, tuple[Tensor, ...]]]:
    """The model in evaluation with draws that stay, and example inputs; everything is put back afterwards."""
    predictor = predictor_of(model)
    weight = first_bad_weight(predictor)
    if weight is not None:
        raise ValueError(
            f"expected finite weights to export, got NaN or infinity in {weight}: export an earlier checkpoint, or "
            "train again with a lower learning rate"
        )
    head, training, before = predictor.require_head(), predictor.training, predictor.num_passes
    count = checks.whole("passes", before if passes is None else passes, 1, 10**4)
    device = next((p.device for p in predictor.parameters()), torch.device("cpu"))
    predictor.eval()
    try:
        predictor.num_passes = count
        with head.fixed_draws(count, seed), torch.no_grad():
            given = batches.move(example_of(model, example), device)
            tensors = tuple(given.values()) if isinstance(given, Mapping) else (given,)
            yield Answers(model, given, features).eval(), tensors
    finally:
        predictor.train(training)
        predictor.num_passes = before


def example_of(model: Model, given: Any) -> Any:
    """Inputs of `TRACED` samples like those given, or like those that the model was given first."""
    source = predictor_of(model).backbone if isinstance(model, BRAINet | Predictor) else model
    encoder = getattr(source, "model", None)
    if isinstance(encoder, TextEncoder) and (given is None or are_texts(given)):
        given = encoder.tokens(Texts(SENTENCES if given is None else given))
    samples = source.input_signature if given is None else batches.signature(given)
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
        if answers.reads_texts and size == CHECKED[0]:
            given = tuple(tensor[:, : max(2, tensor.shape[1] - 1)] for tensor in given)
        ours = dict(zip(answers.outputs, answers(*given), strict=True))
        theirs = {name: torch.as_tensor(value) for name, value in zip(answers.outputs, graph(given), strict=True)}
        for name in answers.outputs:
            if not _agree(name, ours, theirs):
                raise RuntimeError(
                    f"expected the graph to give the model's {name} for a batch of {size}, got another: this model is "
                    "not the same as a graph; one whose head draws dropout masks or weights differs each time"
                )


def _agree(name: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether an output is the same but for rounding, which may also decide between two equally probable classes."""
    one, other = ours[name].cpu(), theirs[name].cpu()
    if one.shape != other.shape:
        return False
    if one.is_floating_point():
        return torch.allclose(one.double(), other.double(), CLOSE, CLOSE, equal_nan=True)
    if name == "class" and not torch.equal(one, other):
        chosen = [ours["probabilities"].cpu().gather(1, label.long().unsqueeze(1)) for label in (one, other)]
        return bool(((chosen[0] - chosen[1]).abs() <= CLOSE).all())
    return torch.equal(one, other)


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
