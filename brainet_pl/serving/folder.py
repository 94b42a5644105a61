"""The folder of an exported model: `model.onnx`, `model.json`, `example.npz` and `client.py`; and its answers.

`model.json` says what goes in and comes out, how inputs are prepared, what classes are called, by which score and level
inputs are judged, and which values held-out data had, for the drift alarm. `client.py` shows the least that is needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils.stored import readable_errors
from brainet_pl._utils.texts import TextSteps, are_texts
from brainet_pl.monitoring import DriftMonitor
from brainet_pl.monitoring.signals import half_for_the_first, signals_of
from brainet_pl.serving.about import ADVICE, check_about
from brainet_pl.serving.images import ImageSteps
from brainet_pl.serving.tables import Feature, encode_array, encode_rows

GRAPH, ABOUT, EXAMPLE, CLIENT = "model.onnx", "model.json", "example.npz", "client.py"
TOKENIZER = "tokenizer.json"  # of a model of texts alone
CUT = "cut"  # whether a text is longer than the model reads
FEATURES = "features"  # the role of an output that is for the drift alarm alone
MAPS = "Segmentation"  # the task whose answers are maps, rows of pixels
NAMED = ("probabilities", "set")  # outputs (B, C) whose columns are classes
CLIENT_TEXT = '''"""Ask the model in this folder: needs numpy and onnxruntime. How inputs are made is in model.json."""

import json
from pathlib import Path

import numpy as np
import onnxruntime

HERE = Path(__file__).parent
ABOUT = json.loads((HERE / "model.json").read_text(encoding="utf-8"))
SESSION = onnxruntime.InferenceSession(str(HERE / "model.onnx"), providers=["CPUExecutionProvider"])


def predict(inputs):
    """Inputs by name, (B, …) → what the model says, by name."""
    given = {one["name"]: np.asarray(inputs[one["name"]], dtype=one["dtype"]) for one in ABOUT["inputs"]}
    names = [one["name"] for one in ABOUT["outputs"]]
    return dict(zip(names, SESSION.run(names, given)))


if __name__ == "__main__":
    example = np.load(HERE / "example.npz")
    for name, values in predict({one["name"]: example[one["name"]] for one in ABOUT["inputs"]}).items():
        print(name, values.tolist())
'''


class ExportedModel:
    """A model that was exported to a folder, run by onnxruntime.

    Args:
        folder: what `brainet export` or `export_folder` wrote.
        threads: of onnxruntime; None is its own choice.
        providers: what onnxruntime computes with, by its short names ("CPU", "CUDA", "OpenVINO"), the first one that
            can take a part of the graph; onnxruntime itself adds the CPU for parts that none of them takes.

    Attributes:
        about: the content of `model.json`.
        class_names: names of the classes, or None.
    """

    def __init__(self, folder: str | Path, threads: int | None = None, providers: Sequence[str] = ("CPU",)) -> None:
        import onnxruntime

        self.folder = Path(folder)
        self.about = read_about(self.folder)
        self.class_names: list[str] | None = self.about.get("class_names")
        images, features = self.about.get("images"), self.about.get("features")
        self.images = None if images is None else ImageSteps(**images)
        with readable_errors(f"features in {self.folder / ABOUT}", ADVICE):
            self.features = None if features is None else [Feature(**one) for one in features]
        self.texts: TextSteps | None = None
        if self.about.get("texts") is not None:
            self.texts = TextSteps((self.folder / TOKENIZER).read_text(encoding="utf-8"), **self.about["texts"])
        options = onnxruntime.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        graph = str(self.folder / GRAPH)
        wanted = provider_names(providers, onnxruntime.get_available_providers())
        self._session = onnxruntime.InferenceSession(graph, options, providers=wanted)
        provider_names(providers, self._session.get_providers())  # one whose libraries are missing is left out silently
        self._check_names()

    def _check_names(self) -> None:
        """Refuse a description of other inputs, outputs or classes than those of the graph."""
        outputs = {one.name: one.shape for one in self._session.get_outputs()}
        named = [one["name"] for one in self.about["outputs"]]
        inputs = sorted(one.name for one in self._session.get_inputs())
        if sorted(one["name"] for one in self.inputs) != inputs or not set(named) <= set(outputs):
            raise ValueError(
                f"expected the inputs and outputs of the graph in {self.folder / ABOUT}, got {', '.join(named)}: "
                f"{ADVICE}"
            )
        classes = outputs.get("probabilities", [])[1:2]
        known = classes and isinstance(classes[0], int)
        if self.class_names is not None and known and len(self.class_names) != classes[0]:
            raise ValueError(
                f"expected {classes[0]} class_names in {self.folder / ABOUT}, got {len(self.class_names)}: {ADVICE}"
            )

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Name, type and shape of each input; the first length, of a batch, is null."""
        return list(self.about["inputs"])

    def predict(self, inputs: Mapping[str, Any] | Any) -> dict[str, NDArray[Any]]:
        """Inputs (B, …), or several by name → all that the model says of each, by name.

        An array for a model of a table holds rows (B, columns) as `fit` had them, in the order of the columns. A model
        of texts takes a list of them.
        """
        if self.texts is not None and are_texts(inputs):
            return self.predict_texts(list(inputs))
        names = [one["name"] for one in self.about["outputs"]]
        return dict(zip(names, self._session.run(names, self.tensors(inputs)), strict=True))

    def tensors(self, inputs: Mapping[str, Any] | Any) -> dict[str, NDArray[Any]]:
        """Inputs (B, …), or several by name → arrays as the graph takes them, by name."""
        if isinstance(inputs, Mapping):
            given: Mapping[str, Any] = inputs
        else:
            given = {self.inputs[0]["name"]: inputs if self.features is None else encode_array(self.features, inputs)}
        tensors = {one["name"]: _tensor(one, given) for one in self.inputs}
        more = [str(name) for name in given if name not in tensors]
        if more:
            raise ValueError(f"expected the inputs {', '.join(tensors)}, got {', '.join(more)} too: leave it out")
        sizes = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"expected as many samples of each input, got {sizes}: give one of each")
        return tensors

    def predict_images(self, files: Iterable[bytes]) -> dict[str, NDArray[Any]]:
        """The bytes of image files → all that the model says of each."""
        if self.images is None:
            raise ValueError(
                "expected numbers: this model was exported without a way to prepare images; send inputs, or export it "
                "again with one, export_folder(…, images=…)"
            )
        shape = self.images.channels, self.images.crop, self.images.crop
        prepared = (self.images(file) for file in files)
        return self.predict(np.fromiter(prepared, dtype=np.dtype((np.float32, shape))))  # each is held once

    def predict_texts(self, texts: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Texts → all that the model says of each, and whether it was `cut`: longer than the model reads."""
        if self.texts is None:
            raise ValueError("expected numbers: this model was exported without a tokenizer; send inputs")
        tokens = self.texts(texts)
        self.texts.warn_of_cut(tokens.cut)
        return self.predict(tokens.inputs()) | {CUT: tokens.cut}

    def predict_rows(self, rows: Sequence[Mapping[str, Any] | Sequence[Any]]) -> dict[str, NDArray[Any]]:
        """Rows of a table, by the names of columns or in their order → all that the model says of each."""
        if self.features is None:
            raise ValueError("expected numbers: this model was exported without a way to prepare rows; send inputs")
        return self.predict({self.inputs[0]["name"]: encode_rows(self.features, rows)})

    def as_answers(self, outputs: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """Outputs of B samples → B answers that JSON can hold: classes by their names, scores by theirs."""
        scores, hidden = (
            {one["name"] for one in self.about["outputs"] if one["role"] == role} for role in ("score", FEATURES)
        )
        shown = {name: values for name, values in outputs.items() if name not in hidden}
        size = len(next(iter(shown.values())))
        return [self._answer({name: values[i] for name, values in shown.items()}, scores) for i in range(size)]

    def _answer(self, values: Mapping[str, Any], scores: set[str]) -> dict[str, Any]:
        names = self.class_names
        found: dict[str, Any] = {"scores": {name: _plain(values[name]) for name in values if name in scores}}
        for name, value in values.items():
            if name in scores:
                continue
            if name in ("set", "labels") and np.ndim(value) == 1:
                found[name] = [str(i) if names is None else names[i] for i in np.flatnonzero(value)]
            elif name in NAMED:
                found[name] = {str(i) if names is None else names[i]: _plain(v) for i, v in enumerate(value)}
            else:
                found[name] = _plain(value)
        if names is not None and "class" in values and np.ndim(values["class"]) == 0:
            found["class_name"] = names[int(values["class"])] if values["class"] >= 0 else None
        return found

    def monitor(self, alpha: float = 0.05, horizon: int | None = None) -> DriftMonitor | None:
        """A drift alarm with the held-out values in the folder; None where there are none."""
        held = self.about.get("held_out")
        if not held:
            return None
        with readable_errors(f"held-out values in {self.folder / ABOUT}", ADVICE):
            return DriftMonitor(held, alpha=alpha, horizon=horizon, weights=half_for_the_first(held))

    def signals(self, outputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
        """Outputs → what `monitor` watches."""
        found = {**outputs, **self.scores_of(outputs)}
        return {name: found[name] for name in self.about.get("held_out") or {}}

    def scores_of(self, outputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
        """Outputs → score, doubt and answer, as the drift alarm takes them."""
        return signals_of({n: v for n, v in outputs.items() if v.ndim == 1}, self.about["verdict"]["score"])


def read_about(folder: Path) -> dict[str, Any]:
    """`model.json` of a folder, checked against the graph beside it."""
    for name in (ABOUT, GRAPH):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"expected the folder of an exported model at {folder}, found no {name}: give one that "
                "`brainet export` wrote"
            )
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        json.dumps(about, ensure_ascii=False).encode()  # half a pair of surrogates is no text that a server can send
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {folder / ABOUT}, got {error}: export the model again") from error
    check_about(about, folder / ABOUT)
    if about["sha256"] != digest(folder / GRAPH):
        raise ValueError(f"expected the graph that {folder / ABOUT} belongs to, got another: take another copy")
    return about  # type: ignore[no-any-return]


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def provider_names(wanted: Sequence[str], available: Sequence[str]) -> list[str]:
    """Short names of what onnxruntime computes with → its own names; refuses what is not available.

    >>> provider_names(["cpu"], ["AzureExecutionProvider", "CPUExecutionProvider"])
    ['CPUExecutionProvider']
    """
    known = {name.removesuffix("ExecutionProvider").lower(): name for name in available}
    short = [name.removesuffix("ExecutionProvider").lower() for name in wanted]
    missing = [given for given, name in zip(wanted, short, strict=True) if name not in known]
    if missing or not short:
        have = ", ".join(name.removesuffix("ExecutionProvider") for name in available)
        raise ValueError(
            f"expected providers that this onnxruntime can use ({have}), got {', '.join(missing) or 'none'}: install "
            "the package that has them and the libraries of the device, such as onnxruntime-gpu for CUDA or "
            "onnxruntime-openvino for OpenVINO, or name others"
        )
    return [known[name] for name in short]


def _tensor(about: Mapping[str, Any], given: Mapping[str, Any]) -> NDArray[Any]:
    """One input as the graph takes it."""
    name, shape = about["name"], about["shape"]
    if name not in given:
        raise ValueError(f"expected the input {name}, got {', '.join(map(str, given)) or 'nothing'}: give it by name")
    try:
        with np.errstate(over="ignore"):  # beyond 32 bits is infinite, and has no class
            tensor = np.asarray(given[name], dtype=about["dtype"])
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(
            f"expected numbers of the shape {_shown(shape)} as {name}, got what is none ({error}): correct it"
        ) from error
    if tensor.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, tensor.shape, strict=True)):
        raise ValueError(f"expected {name} of the shape {_shown(shape)}, got {_shown(tensor.shape)}: reshape it")
    if not len(tensor):
        raise ValueError(f"expected at least one sample as {name}, got none: give some")
    return tensor


def _shown(shape: Sequence[int | None]) -> str:
    return f"({', '.join('B' if n is None else str(n) for n in shape)})"


def _plain(value: Any) -> Any:
    """A number, or a map of numbers to four places, as JSON has it; null where it is none."""
    if np.ndim(value):
        found = (
            np.round(value, 4).astype(np.float64).astype(object) if value.dtype.kind == "f" else value.astype(object)
        )
        found[~np.isfinite(value)] = None
        return found.tolist()
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not np.isfinite(plain) else plain
