"""An exported graph whose backbone counts in 8 bits, if answers and verdict stay the same.

onnxruntime's quantiser first infers the shapes of the graph, and stops where those that torch wrote beside the values
contradict its own; without them it goes through. Only the backbone is quantised: the head is small, and scores,
calibration and verdict are sums of small differences that 8 bits can't hold.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("Conv", "Gemm", "MatMul", "Add", "Relu")  # of nodes that count in 8 bits
WEIGHTS = "predictor.backbone."  # how weights of the backbone are called in a graph
LEAST_SAME = 0.98  # share of samples whose class, and whose verdict, has to be that of the graph in 32 bits
LEAST_SAMPLES = 200  # to check by
MOST_RANGES = 512  # samples that the ranges of values are taken from

Batch = dict[str, Any]


def int8_graph(path: Path, held: Sequence[Batch], task: str) -> tuple[dict[str, float], list[Batch]]:
    """Replace a graph by one in 8 bits; how far it agrees, and the held-out batches by which that was checked.

    Every other held-out sample gives the ranges of values, the others compare both graphs.

    Args:
        path: of the graph.
        held: batches of held-out inputs, by name.
        task: the name of the model's task.
    """
    if task != "Classification":
        raise ValueError(f"expected a classifier for 8 bits, got {task}: export it without int8")
    ranges, checked = ([{name: array[i::2] for name, array in part.items()} for part in held] for i in (0, 1))
    count = sum(len(next(iter(part.values()))) for part in checked)
    if count < LEAST_SAMPLES:
        raise ValueError(
            f"expected at least {2 * LEAST_SAMPLES} held-out samples to choose and check a graph in 8 bits, got "
            f"{sum(len(next(iter(part.values()))) for part in held)}: give more as held (--held), or leave int8 out"
        )
    small = path.with_suffix(".int8.onnx")
    _quantise(path, small, ranges)
    found = compare(_run(path, checked), _run(small, checked))
    if min(found["same_class"], found.get("same_verdict", 1.0)) < LEAST_SAME:
        small.unlink()
        said = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        raise ValueError(
            f"expected a graph in 8 bits with the same class and verdict for {LEAST_SAME:.0%} of held-out samples, got "
            f"{said}: export it without int8"
        )
    os.replace(small, path)
    return found, checked


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """How far the answers of a graph in 8 bits are those of the one in 32, as `model.json` has it."""
    found = {"samples": float(len(one["class"])), "same_class": float((one["class"] == other["class"]).mean())}
    apart = np.abs(one["probabilities"] - other["probabilities"])
    found |= {"probability_off_mean": float(apart.max(axis=1).mean()), "probability_off_most": float(apart.max())}
    if "known" in one:
        same = float((one["known"] == other["known"]).mean())
        found |= {"same_verdict": same, "known": float(one["known"].mean()), "known_int8": float(other["known"].mean())}
    return found


def _run(path: Path, held: Sequence[Batch]) -> dict[str, Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    parts = [dict(zip(names, session.run(names, part), strict=True)) for part in held]
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _quantise(path: Path, out: Path, ranges: Sequence[Batch]) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.parts = iter(_first(ranges, MOST_RANGES))

        def get_next(self) -> dict[str, Any] | None:
            return next(self.parts, None)

    graph = onnx.load(str(path))
    nodes = backbone_nodes(graph)
    if not nodes:
        raise ValueError("expected a backbone with weights for 8 bits, got none: export the model without int8")
    del graph.graph.value_info[:]
    plain = path.with_suffix(".plain.onnx")
    onnx.save(graph, str(plain))
    try:
        with _quiet():
            quantize_static(
                str(plain),
                str(out),
                Reader(),
                quant_format=QuantFormat.QDQ,
                nodes_to_quantize=nodes,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
    finally:
        plain.unlink()


def _first(parts: Sequence[Batch], most: int) -> Iterator[Batch]:
    """The first samples of some batches, 64 at a time."""
    left = most
    for part in parts:
        size = min(left, len(next(iter(part.values()))))
        for i in range(0, size, 64):
            yield {name: array[i : min(i + 64, size)] for name, array in part.items()}
        left -= size


def backbone_nodes(graph: Any) -> list[str]:
    """Names of the nodes with weights of the backbone, those before them, and sums and ReLUs right behind them.

    Without the latter the last outputs would be rounded with their negative half, which a ReLU takes away.
    """
    makers = {value: node for node in graph.graph.node for value in node.output}
    left = [node for node in graph.graph.node if any(name.startswith(WEIGHTS) for name in node.input)]
    found: dict[str, Any] = {}
    while left:
        node = left.pop()
        if node.name not in found:
            found[node.name] = node
            left += [makers[value] for value in node.input if value in makers]
    made = {value for node in found.values() for value in node.output}
    fixed = {one.name for one in graph.graph.initializer}
    for node in graph.graph.node:  # in the order in which they run
        if node.op_type in ("Add", "Relu") and made & set(node.input) and set(node.input) <= made | fixed:
            found[node.name] = node
            made |= set(node.output)
    return [node.name for node in graph.graph.node if node.name in found and node.op_type in KINDS]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the quantiser's advice."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with np.errstate(invalid="ignore"):  # a value that never varies
            yield
    finally:
        logging.disable(before)
