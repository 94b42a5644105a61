"""NaN and infinity: a loss that is not finite is noticed before it reaches a weight, and weights are checked."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl._utils.framework import rank_zero_warn
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import Extracted

if TYPE_CHECKING:
    from brainet_pl.prediction.predictor import Predictor
    from brainet_pl.tasks import Task

OnNaN = Literal["stop", "skip"]
CHECKED = ("backbone.", "head.", "task.", "calibration.")  # scores may hold infinity, and NaN for what is not fitted
_DATA = "correct or drop these samples"
_WEIGHT = (
    "an earlier step went too far; start again from the last checkpoint with a lower lr or "
    "Trainer(gradient_clip_val=1.0)"
)
_HALF = "train with precision 16-mixed, bf16-mixed or 32-true: weights of 16 bits (16-true) are too coarse for Adam"
_OVERFLOW = "look for overflow: train in 32-bit precision, scale the inputs, or lower lr"


class Culprit(NamedTuple):
    """The first tensor that is not finite, and what to do about it; `weight` says that no other batch would help."""

    what: str
    advice: str
    weight: bool = False


def first_bad_weight(predictor: Predictor, state: Mapping[str, Tensor] | None = None) -> str | None:
    """The name of the first parameter that is not finite, or buffer with NaN, of backbone, head, task and calibrator.

    Args:
        predictor: Whose parameters and buffers.
        state: Their values by name where they are not loaded yet; None are the values in the predictor.
    """
    parameters = dict(predictor.named_parameters())
    for name, value in (predictor.state_dict() if state is None else state).items():
        if not name.startswith(CHECKED) or not isinstance(value, Tensor) or not _is_real(value):
            continue
        value = local(value)
        if not bool(value.isfinite().all() if name in parameters else not value.isnan().any()):
            return name
    return None


def local(tensor: Tensor) -> Tensor:
    """The share of a sharded tensor that this process has; any other as it is."""
    share: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share


def nan_rows(x: Any, size: int) -> Tensor:
    """Inputs of `size` samples, in any form that a model takes → (B,) which of them have NaN somewhere."""
    tensors = [tensor for _, tensor in _named(x)]
    found = [tensor.isnan() if tensor.dim() == 1 else tensor.isnan().flatten(1).any(dim=1) for tensor in tensors]
    if not found:
        return torch.zeros(size, dtype=torch.bool)
    return found[0] if len(found) == 1 else torch.stack(found).any(dim=0)


def _named(x: Any) -> Iterator[tuple[str, Tensor]]:
    """The real-valued tensors of inputs, and what to call each."""
    if isinstance(x, BackboneOutput):
        yield "features", x.features
    elif isinstance(x, Mapping):
        yield from ((f"inputs[{k!r}]", v) for k, v in x.items() if isinstance(v, Tensor) and v.dim() and _is_real(v))
    elif isinstance(x, Tensor) and x.dim() and _is_real(x):
        yield "inputs", x


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def finite_rows(output: BackboneOutput) -> Tensor:
    """Which samples of a backbone's output are finite in all that it gives for them, (N,) of booleans."""
    finite = torch.ones(len(output), dtype=torch.bool, device=output.features.device)
    for tensor in (output.features, output.base_logits, *output.more.values()):
        if tensor is not None:
            finite &= tensor.isfinite().flatten(1).all(dim=1)
    return finite


def finite_samples(sample: Extracted) -> Extracted:
    """The samples whose features are finite, which statistics may be taken from; all where none is."""
    kept = finite_rows(sample.output)
    if bool(kept.all()) or not bool(kept.any()):
        return sample
    return Extracted(sample.output[kept], sample.targets[kept])


class BufferCopy:
    """Copies of what a training step changes beside weights, such as statistics of batch norm, to put them back."""

    def __init__(self, predictor: Predictor) -> None:
        parts = [predictor.head, predictor.task, None if predictor.backbone.frozen else predictor.backbone]
        self._buffers = [b for part in parts if part is not None for b in part.buffers() if b.is_floating_point()]
        self._values = [buffer.clone() for buffer in self._buffers]

    def restore(self) -> None:
        """Put the copies back."""
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._values, strict=True):
                buffer.copy_(value)

    def check_target(self, task: Task, target: Tensor) -> None:
        """Raise an error where targets are what makes a batch bad, with the copies put back."""
        try:
            task.check(target)
        except ValueError:
            self.restore()
            raise


class LossGuard:
    """Decides what happens at a training step whose loss is not finite.

    Args:
        on_nan: "stop" ends the fit with an error; "skip" leaves the batch out, with one warning an epoch that counts.
    """

    def __init__(self, on_nan: OnNaN = "stop") -> None:
        checks.one_of("on_nan", on_nan, get_args(OnNaN))
        self.on_nan = on_nan
        self._skipped = 0
        self._first = ""

    def check_processes(self, count: int) -> None:
        """Refuse to skip batches with several processes: Lightning can't, because the others wait for gradients."""
        if self.on_nan == "skip" and count > 1:
            raise ValueError(
                f"expected one process for on_nan='skip', got {count}: use one, or on_nan='stop' and correct the data"
            )

    def handle(
        self, predictor: Predictor, before: BufferCopy, x: Any, outputs: Tensor, loss: Tensor, epoch: int, batch: int
    ) -> None:
        """Undo what the forward pass of a bad batch has changed, then raise an error or count the batch as skipped."""
        before.restore()
        culprit = find_culprit(predictor, x, outputs)
        before.restore()
        if self.on_nan == "stop" or culprit.weight:
            hint = "" if culprit.weight else "; BRAINet(on_nan='skip') leaves such batches out"
            raise ValueError(
                f"expected a finite loss, got {float(loss.detach()):g} in epoch {epoch}, batch {batch}: {culprit.what} "
                f"(the first that is not finite). This batch has changed no weight. To go on, {culprit.advice}{hint}"
            )
        warnings.filterwarnings("ignore", message="`training_step` returned `None`")  # `report` says more
        self._first = self._first or f"batch {batch} with the loss {float(loss.detach()):g}: {culprit.what}"
        self._skipped += 1

    def report(self, epoch: int, batches: float) -> None:
        """Warn once of the batches that an epoch has skipped; a stream has infinitely many."""
        if self._skipped:
            total = "" if math.isinf(batches) else f" of {batches:,.0f}"
            rank_zero_warn(
                f"skipped {self._skipped:,}{total} batches of epoch {epoch}, whose loss was not finite; the "
                f"first was {self._first}. Their samples were not learned: correct or drop them"
            )
        self._skipped, self._first = 0, ""


def find_culprit(predictor: Predictor, x: Any, outputs: Tensor) -> Culprit:
    """Where a loss that is not finite began: inputs, a weight, features, outputs, or the loss alone."""
    for name, tensor in _named(x):
        if not bool(tensor.isfinite().all()):
            return Culprit(f"{name} {_where(tensor)}", _DATA)
    weight = first_bad_weight(predictor)
    if weight is not None:
        half = predictor.state_dict()[weight].dtype == torch.float16
        return Culprit(f"the weight {weight} has NaN or infinity", _HALF if half else _WEIGHT, weight=True)
    with torch.no_grad():
        features = predictor.read(x).features
    if not bool(features.isfinite().all()):
        return Culprit(f"features {_where(features)}, from inputs and weights that are finite", _OVERFLOW)
    if not bool(outputs.isfinite().all()):
        by_sample = outputs if outputs.dim() == 2 else outputs.transpose(0, 1)
        return Culprit(f"outputs {_where(by_sample)}, from features and weights that are finite", _OVERFLOW)
    return Culprit("the loss, from outputs that are finite", _OVERFLOW)


def _where(tensor: Tensor) -> str:
    bad = ~tensor.isfinite()
    rows = bad if bad.dim() == 1 else bad.flatten(1).any(dim=1)
    first = int(rows.nonzero()[0])
    return f"have NaN or infinity in {int(rows.sum())} of {len(rows)} samples, the first at place {first}"
