"""The layer that takes the place of a model's dense layer, and how it travels in the model's state dict.

What rebuilds it is text in the state dict, which is data and never code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl._utils.parts import make_part, primitive
from brainet_pl._utils.precision import wide
from brainet_pl._utils.stored import FORMAT, parse, readable_errors
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import is_sharded
from brainet_pl.network import Head, HeadSettings
from brainet_pl.network.base import train_head
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.storage.container import StoredPredictor, check_kind
from brainet_pl.storage.sharded import EXTRA
from brainet_pl.structure import GGT
from brainet_pl.swap.every_branch import every_branch
from brainet_pl.tasks import Classification, MultiLabel, Task
from brainet_pl.tasks.passes import Passes

KIND = "SwappedLayer"


class SwappedLayer(nn.Module):
    """A head where a model has had a dense layer: features (B, d) → logits (B, C), as that layer gave them.

    While training they are of one drawn sub-network for each sample, and a plain cross-entropy on them trains every
    branch. In evaluation they are the logarithm of the averaged, calibrated probabilities: `softmax` gives these.

    Args:
        settings: settings of the head.
        predictor: the head, with scores and calibration.
        original: the layer whose place it takes.

    Attributes:
        base_layer: the original layer, where the head adds to its logits; else None.
        keep: whether to keep what the last evaluation gave, in `kept`.
        seen: (2,) how many backward passes came from a plain cross-entropy, and how many from another loss.
    """

    seen: Tensor

    def __init__(self, settings: HeadSettings, predictor: Predictor, original: nn.Module) -> None:
        super().__init__()
        self.settings, self.predictor = settings, predictor
        self._original = [original]  # a list: it is no part of the model any more
        adds = predictor.adds_base_logits
        self.base_layer = original.requires_grad_(False) if adds else None
        self.keep = False
        self.kept: Passes | None = None
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    @property
    def original(self) -> nn.Module:
        """The layer whose place this takes."""
        return self._original[0]

    @property
    def head(self) -> Head:
        """The network that gives the logits."""
        return self.predictor.require_head()

    @property
    def ggt(self) -> GGT | None:
        """The learned tree, or None."""
        return self.predictor.ggt

    def train(self, mode: bool = True) -> SwappedLayer:
        """Switch the mode as any module does; a layer whose logits are added to stays in evaluation mode."""
        super().train(mode)
        if self.base_layer is not None:
            self.base_layer.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, d) → logits (B, C), in 32 bits at the least."""
        check_rows(x)
        base_logits = None if self.base_layer is None else self.base_layer(x)
        if self.training:
            logits = wide(train_head(self.head, x, base_logits))
            loss = "cross-entropy" if isinstance(self.predictor.task, Classification) else "binary"
            return every_branch(logits, None if torch.compiler.is_compiling() else self.seen, loss)
        passes = self.predictor.passes(BackboneOutput(x, base_logits=base_logits))
        if self.keep:
            self.kept = passes
        return self.predictor.task.as_outputs(self.predictor.final(passes))

    def take_kept(self) -> Passes:
        """What the last evaluation gave, once."""
        kept, self.kept = self.kept, None
        if kept is None:
            raise RuntimeError("expected an evaluation with keep=True first, got none: run the model on a batch")
        return kept

    def describe(self) -> dict[str, Any]:
        """Everything that builds the same layer again, as primitives."""
        return described(self.predictor, self.settings, KIND)

    def get_extra_state(self) -> Tensor:
        """`describe` as bytes of JSON: it travels in the state dict of the model."""
        text = json.dumps(self.describe(), sort_keys=True)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing to do: `rebuild_layers` has built the layer by it."""


def described(predictor: Predictor, settings: HeadSettings, kind: str) -> dict[str, Any]:
    """What rebuilds a head of classes and all that is said of its predictions, as plain values of `StoredPredictor`."""
    content = {
        "kind": kind,
        "format": FORMAT,
        "head": settings,
        "ggt": None if predictor.ggt is None else predictor.ggt.to_dict(),
        "in_features": predictor.in_features,
        "num_classes": predictor.task.out_features,
        "task": predictor.task if isinstance(predictor.task, MultiLabel) else None,
        "base_logits": predictor.has_base_logits,
        "scores": list(predictor.scores),
        "calibration": predictor.calibration,
        "conformal": predictor.conformal,
        "verdict": vars(predictor.verdict),
        "passes": predictor.num_passes,
    }
    return cast(dict[str, Any], primitive(content))


def stored_task(stored: StoredPredictor) -> Classification | MultiLabel:
    """What the outputs of a head in a file mean."""
    if stored.task is None:
        return Classification(stored.num_classes)
    made = make_part(Task, stored.task, "task")
    if not isinstance(made, MultiLabel) or made.num_labels != stored.num_classes:
        raise ValueError(f"expected a MultiLabel of {stored.num_classes} labels in the file, got {made.describe()}")
    return made


def check_rows(x: Any) -> None:
    """Refuse what is no row of features for each sample, (B, d)."""
    if not isinstance(x, Tensor) or x.dim() != 2:
        got = f"inputs of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"expected one row of features for each sample, (B, d), in front of the layer, got {got}: name a dense "
            "layer that comes after pooling, one that gives one row of logits for each sample"
        )


def make_layer(
    original: nn.Module,
    settings: HeadSettings,
    in_features: int,
    task: Classification | MultiLabel,
    ggt: GGT | None,
    base_logits: bool = False,
    passes: int = 15,
    **parts: Any,
) -> SwappedLayer:
    """A layer for the place of another, on its device. `parts` are those of `Predictor.attach`."""
    predictor = Predictor(FeatureExtractor(nn.Identity(), frozen=False), task, num_passes=passes, **parts)
    predictor.build_head(settings, in_features, ggt, base_logits)
    head = predictor.require_head()
    if head.penalty() is not None:
        raise ValueError(
            f"expected a head that a cross-entropy alone trains, got {settings.describe()}, whose loss has a further "
            "term: take another head, or the LightningModule brainet_pl.BRAINet"
        )
    device = next((p.device for p in original.parameters()), torch.device("cpu"))
    return SwappedLayer(settings, predictor, original).to(device)


def num_classes_of(layer: nn.Module, name: str, num_classes: int | None, least: int = 2) -> int:
    """The number of outputs of a layer, which must be one for each class; `num_classes` where it does not say."""
    outputs = getattr(layer, "out_features", None)
    if outputs is None and num_classes is None:
        raise ValueError(
            f"expected a dense layer, whose outputs are counted, got {type(layer).__name__} at {name!r}: name the last "
            "dense layer, or say num_classes=…"
        )
    if outputs is not None and num_classes is not None and outputs != num_classes:
        raise ValueError(
            f"expected num_classes={num_classes} to be the outputs of {name!r}, got {outputs}: leave num_classes out"
        )
    count = cast(int, outputs if num_classes is None else num_classes)
    if count < least:
        raise ValueError(
            f"expected a layer with one logit for each class at {name!r}, got {count} output: a real number, or a "
            "single logit as of a discriminator, is no classification; name another layer, or give two outputs and a "
            "cross-entropy"
        )
    return checks.whole("num_classes", count, least, 10**7)


def swapped_layers(model: nn.Module) -> dict[str, SwappedLayer]:
    """Path → layer of all that were swapped in a model."""
    return {name: part for name, part in model.named_modules() if isinstance(part, SwappedLayer)}


def place_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of another."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


# -- state dicts ------------------------------------------------------------------------------------------------------


def stored_layers(state: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Path → description of the swapped layers in a state dict."""
    found = {}
    for key, value in state.items():
        name = key.removeprefix(prefix).removesuffix(f".{EXTRA}")
        if not (key.startswith(prefix) and key.endswith(f".{EXTRA}") and isinstance(value, Tensor)):
            continue
        if value.dtype != torch.uint8 or value.dim() != 1:
            continue
        try:
            content = json.loads(bytes(value.cpu().numpy()).decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict) and content.get("kind") == KIND:
            found[name] = content
    return found


def rebuild_layers(model: nn.Module, state: Mapping[str, Any], prefix: str = "", early: bool = False) -> None:
    """Build the swapped layers of a state dict in a model where they are not there yet. Weights are not loaded.

    A sharded model takes them only `early`: before an optimizer is made, and before they are sharded themselves.
    """
    for name, content in stored_layers(state, prefix).items():
        here = model.get_submodule(name)
        if isinstance(here, SwappedLayer) and here.describe() == content:
            continue
        if is_sharded(model) and not early:
            raise RuntimeError(
                "expected a checkpoint with the head that was sharded, got another, because Lightning tells of it too "
                "late: say it before, trainer.ckpt_path = path, and call fit or test without ckpt_path"
            )
        what = f"a swapped layer at {name!r}"
        check_kind(content, KIND, what)
        original = here.original if isinstance(here, SwappedLayer) else here
        weights = {key: value for key, value in state.items() if key.startswith(f"{prefix}{name}.")}
        with readable_errors(what):
            made = _layer_of(parse(StoredPredictor, content, what), original, weights)
        place_layer(model, name, made.train(here.training))


def _layer_of(stored: StoredPredictor, original: nn.Module, weights: Mapping[str, Any]) -> SwappedLayer:
    settings = make_part(HeadSettings, stored.head, "head")
    features, classes, base = stored.in_features, stored.num_classes, stored.base_logits
    tree = stored.checked_tree(
        lambda tree: settings.resolve_skip(base).build(features, classes, tree),
        settings.settings() | stored.sizes,
        weights,
    )
    return make_layer(original, settings, features, stored_task(stored), tree, base, stored.passes, **stored.parts)


def _before_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    rebuild_layers(module, state, prefix)


def watch_state(model: nn.Module) -> None:
    """Have `load_state_dict` of a model build the swapped layers that the state has, before it loads weights."""
    if not any(getattr(hook, "hook", hook) is _before_load for hook in model._load_state_dict_pre_hooks.values()):
        model.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]


def restore_layers(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Give a model, as its own code builds it, the swapped layers and all weights of a state dict; gives the model.

    Args:
        model: changed in place.
        state: of `model.state_dict()`, or a checkpoint of Lightning with one as "state_dict".
    """
    inner = state.get("state_dict")
    watch_state(model)
    model.load_state_dict(inner if isinstance(inner, Mapping) else state)
    return model
