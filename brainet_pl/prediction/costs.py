"""What a prediction costs: parameters, floating-point operations and time of backbone and head."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from brainet_pl.backbones import batches
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import run_backbone
from brainet_pl.network.base import run_head
from brainet_pl.prediction.predictor import Predictor

REPEATS = 5  # of which the median is taken; a first run, which sets things up, does not count


class Cost(NamedTuple):
    """What one part of a model costs.

    Attributes:
        parameters: numbers that it holds and could learn.
        flops: floating-point operations for one sample, of matrix products and convolutions.
        seconds: for the whole batch.
    """

    parameters: int
    flops: float
    seconds: float


class Costs(NamedTuple):
    """What a prediction of `samples` samples with `passes` passes costs.

    Attributes:
        samples: B, of the batch that was measured.
        passes: T, of the head.
        backbone: of one run of the backbone; None where it was not run, because features were kept or are the inputs.
        head: of all passes of the head.
        one_pass: of a single pass of the head.
    """

    samples: int
    passes: int
    backbone: Cost | None
    head: Cost
    one_pass: Cost

    def to_dict(self) -> dict[str, Any]:
        """Gives the costs as primitives, for a record."""
        return {k: v._asdict() if isinstance(v, Cost) else v for k, v in self._asdict().items()}

    def numbers(self) -> dict[str, float]:
        """Each number by its name, for loggers: `cost/<part>/<what>`, times in milliseconds for the whole batch.

        >>> Costs(64, 15, None, Cost(16_000, 480e3, 0.002), Cost(16_000, 32e3, 0.0004)).numbers()["cost/head/ms"]
        2.0
        """
        parts = {"backbone": self.backbone, "head": self.head, "one_pass": self.one_pass}
        found: dict[str, float] = {"cost/samples": self.samples, "cost/passes": self.passes}
        for name, cost in parts.items():
            if cost is not None:
                found |= {f"cost/{name}/flops": cost.flops, f"cost/{name}/ms": 1000 * cost.seconds}
                if name != "one_pass":  # the same weights as those of all passes
                    found[f"cost/{name}/parameters"] = cost.parameters
        return found

    def line(self) -> str:
        """One line for a log or a report.

        >>> head = Cost(16_000, 480e3, 0.002)
        >>> Costs(64, 15, None, head, Cost(16_000, 32e3, 0.0004)).line()
        'head 0.48 MFLOP and 2.0 ms a batch of 64 with 15 passes, 0.4 ms with one'
        """
        body = ""
        if self.backbone is not None:
            body = f"backbone {_mega(self.backbone)} a sample and {_milli(self.backbone)} a batch of {self.samples}, "
        a_batch = "" if self.backbone is not None else f" a batch of {self.samples}"
        several = f" with {self.passes} passes, {_milli(self.one_pass)} with one" if self.passes > 1 else ""
        return f"{body}head {_mega(self.head)} and {_milli(self.head)}{a_batch}{several}"


@torch.no_grad()
def measure(model: Predictor, inputs: Any) -> Costs:
    """Run a batch of inputs through a model in evaluation, a few times, and measure.

    Args:
        model: with its head, in evaluation.
        inputs: as the model takes them, on its device; or what its backbone gave for them.
    """
    known = isinstance(inputs, BackboneOutput)
    readings = inputs if known else run_backbone(model.backbone, inputs)
    features, head, passes = readings.features, model.require_head(), model.num_passes
    samples = int(features.shape[0])

    def cost(parameters: int, work: Callable[[], Any]) -> Cost:
        with FlopCounterMode(display=False) as counter:
            work()
        return Cost(parameters, counter.get_total_flops() / max(1, samples), _seconds(work, features))

    backbone = None
    if not known and not model.backbone.raw:
        held = sum(p.numel() for p in model.backbone.parameters())
        backbone = cost(held, lambda: run_backbone(model.backbone, inputs))
    base_logits = model.base_outputs(readings)

    def run(count: int) -> Tensor:
        return run_head(head, features, count, base_logits).values

    return Costs(
        batches.size(features),
        len(run(passes)),
        backbone,
        cost(head.num_params, lambda: run(passes)),
        cost(head.num_params, lambda: run(1)),
    )


def _seconds(work: Callable[[], Any], where: Tensor) -> float:
    """The median of a few runs; work on a GPU is waited for."""
    times = []
    for _ in range(REPEATS):
        _wait(where)
        start = time.perf_counter()
        work()
        _wait(where)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(where: Tensor) -> None:
    if where.device.type == "cuda":
        torch.cuda.synchronize(where.device)


def _mega(cost: Cost) -> str:
    value = cost.flops / 1e6
    return f"{value:,.1f} MFLOP" if value >= 1 else f"{value:.2g} MFLOP"


def _milli(cost: Cost) -> str:
    value = 1000 * cost.seconds
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"
