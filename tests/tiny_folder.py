"""The folder of a tiny exported model that is written without torch: for environments that have none.

A linear layer on numbers, on rows of a table or on images, with every kind of output that an exported model has.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save

from brainet_pl import __version__
from brainet_pl.serving.about import FORMAT
from brainet_pl.serving.folder import ABOUT, EXAMPLE, GRAPH, digest

OUTPUTS = {"class": "answer", "probabilities": "answer", "set": "answer", "known_p": "answer", "known": "answer",
           "energy": "score", "joint": "score"}  # fmt: skip
NUMBERS = 20


def write_tiny(folder, shape=(NUMBERS,), classes=("cat", "dog", "owl"), hidden=0, **about):
    """A folder that `ExportedModel` reads; `about` are more fields of model.json, such as features or images."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    inside = int(np.prod(shape))
    rng = np.random.default_rng(0)
    widths = [inside, *([hidden] * 3 if hidden else []), len(classes)]
    weights, nodes, last = [], [helper.make_node("Flatten", ["input"], ["x0"], axis=1)], "x0"
    for i, (old, new) in enumerate(pairwise(widths)):
        weights.append(numpy_helper.from_array((rng.normal(size=(old, new)) / old**0.5).astype("f4"), f"w{i}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"y{i}"]))
        nodes.append(helper.make_node("Relu", [f"y{i}"], [f"x{i + 1}"]))
        last = f"y{i}" if new == len(classes) and i == len(widths) - 2 else f"x{i + 1}"
    constants = {"axes": np.array([1]), "few": np.float32(0.2), "level": np.float32(0.5)}
    weights += [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    nodes += [
        helper.make_node("Softmax", [last], ["probabilities"], axis=1),
        helper.make_node("ArgMax", [last], ["class"], axis=1, keepdims=0),
        helper.make_node("Greater", ["probabilities", "few"], ["set"]),
        helper.make_node("ReduceMax", ["probabilities", "axes"], ["known_p"], keepdims=0),
        helper.make_node("Greater", ["known_p", "level"], ["known"]),
        helper.make_node("ReduceLogSumExp", [last, "axes"], ["minus"], keepdims=0),
        helper.make_node("Neg", ["minus"], ["energy"]),
        helper.make_node("ReduceSumSquare", ["x0", "axes"], ["joint"], keepdims=0),
    ]
    kinds = {"class": TensorProto.INT64, "set": TensorProto.BOOL, "known": TensorProto.BOOL}
    lengths = {name: ["B", len(classes)] if name in ("probabilities", "set") else ["B"] for name in OUTPUTS}
    outputs = [helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), lengths[n]) for n in OUTPUTS]
    given = [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["B", *shape])]
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(helper.make_graph(nodes, "tiny", given, outputs, weights), opset_imports=opsets)
    model.ir_version = 9
    checker.check_model(model)
    save(model, folder / GRAPH)
    content = {
        "format": FORMAT, "brainet_pl": __version__, "torch": "none", "sha256": digest(folder / GRAPH),
        "task": "Classification", "class_names": list(classes),
        "inputs": [{"name": "input", "dtype": "float32", "shape": [None, *shape]}],
        "outputs": [{"name": name, "role": role} for name, role in OUTPUTS.items()],
        "verdict": {"score": "joint", "level": 0.05}, "conformal": None, "images": None, "features": None,
        "held_out": None,
    }  # fmt: skip
    (folder / ABOUT).write_text(json.dumps(content | about))
    np.savez(folder / EXAMPLE, input=rng.normal(size=(2, *shape)).astype("f4"))
    return folder


def numbers(rows, seed=0):
    """Rows (B, 20) of numbers as float32."""
    return np.random.default_rng(seed).normal(size=(rows, NUMBERS)).astype(np.float32)
