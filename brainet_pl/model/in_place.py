"""A BRAINet head in the place of a layer of any model: the model goes on as it was, and gets logits from it.

`swap_layer` is for a training loop of your own, the callback `SwapHead` for Lightning. What rebuilds the head travels
in the model's own state dict, as text that is data and never code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl._utils.parts import make_part, primitive
from brainet_pl._utils.precision import wide
from brainet_pl._utils.tensor_file import check_build, check_sizes
from brainet_pl.backbones import FeatureExtractor, batches, removal
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.removal import FeaturesReached
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.model.predictor import Predictor
from brainet_pl.model.swap_data import labelled_batches
from brainet_pl.network import Head, HeadSettings
from brainet_pl.network.base import train_head
from brainet_pl.scores import Score
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.tasks import Classification
from brainet_pl.tasks.passes import Passes

Forward = Callable[[Any, Any], Any]  # the model and the inputs of a batch → anything, through the layer
Learn = Callable[[TrainingFeatures], GGT]
FORMAT = 1
KIND = "SwappedLayer"
EXTRA = "_extra_state"  # of the keys of a state dict, by torch
SAME = (
    1e-3  # share by which samples' weights and gradients in a plain cross-entropy may differ from what they should be
)
SURE = 1e-3  # probability of all other classes, below which a gradient is rounded too much to tell its weight
FORWARD = (
    "say how the model is run on the inputs of a batch, forward=lambda module, inputs: …, and name them where batches "
    "have names, columns=Columns(inputs=…, target=…)"
)


# -- logits that train every branch -----------------------------------------------------------------------------------


class _EveryBranch(torch.autograd.Function):
    """Outputs (M, B, C) of M draws → those of one of them for each sample, (B, C); the gradient trains all M.

    The gradient of w · cross-entropy in the logits z is w · (softmax(z) − e_y). Where the one that comes back has this
    form, with one w for all samples, label and w can be read from it, and each draw gets the gradient of its own
    cross-entropy, divided by M. Where it has not (smoothed labels, weights, other losses), the chosen draws alone get
    what came back. `seen` counts both kinds.
    """

    @staticmethod
    def forward(outputs: Tensor, chosen: Tensor, seen: Tensor | None) -> Tensor:
        return outputs[chosen, torch.arange(len(chosen), device=chosen.device)]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.seen = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        outputs, chosen = ctx.saved_tensors
        rows = torch.arange(len(chosen), device=chosen.device)
        probs, size = outputs.softmax(dim=2), grad.abs().amax(dim=1)
        own = probs[chosen, rows]
        # The label's gradient alone is below zero; where it was rounded to zero, the label is what the draw is sure of.
        which = torch.where(grad.amin(dim=1) < 0, grad.argmin(dim=1), own.argmax(dim=1))
        label = torch.zeros_like(grad).scatter_(1, which.unsqueeze(1), 1.0)
        wrong = (own * (1 - label)).sum(dim=1)  # probability of the other classes
        tells = (size > 0) & (wrong > SURE)  # of a sample that is ignored nothing comes back
        weights = (grad * (1 - label)).sum(dim=1) / wrong
        weight = torch.where(tells, weights, -torch.inf).amax()
        least = torch.where(tells, weights, torch.inf).amin()
        fits = (grad - weight * (own - label)).abs().amax(dim=1) <= 2 * SAME * size
        plain = (weight - least <= SAME * weight) & (fits | ~tells).all() & tells.any() & (least > 0)
        every = weight * (probs - label) * (size > 0).unsqueeze(1) / len(outputs)
        alone = torch.zeros_like(outputs)
        alone[chosen, rows] = grad
        if ctx.seen is not None:
            ctx.seen += torch.stack([plain, ~plain])
        return torch.where(plain, every, alone), None, None


def every_branch(outputs: Tensor, seen: Tensor | None = None) -> Tensor:
    """Logits (B, C) or, of M draws, (M, B, C) → (B, C), of a draw by chance for each sample; see `_EveryBranch`."""
    if outputs.dim() == 2:
        return outputs
    if len(outputs) == 1:
        return outputs[0]
    chosen = torch.randint(len(outputs), (outputs.shape[1],), device=outputs.device)
    return cast(Tensor, _EveryBranch.apply(outputs, chosen, seen))


# -- the layer --------------------------------------------------------------------------------------------------------


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
        adds = predictor._adds_base_logits
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
        _check_rows(x)
        base_logits = None if self.base_layer is None else self.base_layer(x)
        if self.training:
            logits = wide(train_head(self.head, x, base_logits))
            return every_branch(logits, None if torch.compiler.is_compiling() else self.seen)
        passes = self.predictor.passes(BackboneOutput(x, base_logits=base_logits))
        if self.keep:
            self.kept = passes
        calibration = self.predictor.calibration
        final = self.predictor.calibrated(passes, {} if calibration is None else self.predictor.scores(passes))
        return final.clamp_min(torch.finfo(torch.float32).tiny).log()

    def take_kept(self) -> Passes:
        """What the last evaluation gave, once."""
        kept, self.kept = self.kept, None
        if kept is None:
            raise RuntimeError("expected an evaluation with keep=True first, got none: run the model on a batch")
        return kept

    def describe(self) -> dict[str, Any]:
        """Everything that builds the same layer again, as primitives."""
        predictor, ggt = self.predictor, self.ggt
        content = {
            "kind": KIND,
            "format": FORMAT,
            "head": self.settings,
            "ggt": None if ggt is None else ggt.to_dict(),
            "in_features": predictor.in_features,
            "num_classes": cast(Classification, predictor.task).num_classes,
            "base_logits": predictor.has_base_logits,
            "scores": list(predictor.scores),
            "calibration": predictor.calibration,
            "conformal": predictor.conformal,
            "verdict": vars(predictor.verdict),
            "passes": predictor.num_passes,
        }
        return cast(dict[str, Any], primitive(content))

    def get_extra_state(self) -> Tensor:
        """`describe` as bytes of JSON: it travels in the state dict of the model."""
        text = json.dumps(self.describe(), sort_keys=True)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing to do: `rebuild_layers` has built the layer by it."""


def _check_rows(x: Any) -> None:
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
    num_classes: int,
    ggt: GGT | None,
    base_logits: bool = False,
    passes: int = 15,
    **parts: Any,
) -> SwappedLayer:
    """A layer for the place of another, on its device. `parts` are those of `Predictor.attach`."""
    predictor = Predictor(
        FeatureExtractor(nn.Identity(), frozen=False), Classification(num_classes), num_passes=passes, **parts
    )
    predictor.build_head(settings, in_features, ggt, base_logits)
    head = predictor.require_head()
    if head.penalty() is not None or head.output_variance(torch.zeros(2, in_features)) is not None:
        raise ValueError(
            f"expected a head that a cross-entropy alone trains, got {settings.describe()}, whose loss has a further "
            "term: take another head, or the LightningModule brainet_pl.BRAINet"
        )
    device = next((p.device for p in original.parameters()), torch.device("cpu"))
    return SwappedLayer(settings, predictor, original).to(device)


def num_classes_of(layer: nn.Module, name: str, num_classes: int | None) -> int:
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
    if count < 2:
        raise ValueError(
            f"expected a layer with one logit for each class at {name!r}, got {count} output: a real number, or a "
            "single logit as of a discriminator, is no classification; name another layer, or give two outputs and a "
            "cross-entropy"
        )
    return checks.whole("num_classes", count, 2, 10**7)


# -- features in front of a layer -------------------------------------------------------------------------------------


class LayerInputs(nn.Module):
    """A model up to one of its layers, as inputs → features (B, d): what that layer is given.

    Args:
        model: any module.
        layer: path of the layer.
        forward: runs the model on the inputs of a batch; None calls it.
        frozen: whether features stay the same, so that those of a data set are kept.
    """

    supports_more, raw, needs_scale, needs_sample, search = True, False, False, False, None

    def __init__(self, model: nn.Module, layer: str, forward: Forward | None = None, frozen: bool = False) -> None:
        super().__init__()
        self.model, self.layer, self.frozen = model, layer, frozen
        self._forward = run_model if forward is None else forward

    def forward(self, x: Any, more: bool = False) -> Any:
        """Inputs → features (B, d); with `more`, beside the logits of the original layer."""
        place = self.model.get_submodule(self.layer)

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise FeaturesReached([*args, *kwargs.values()][0])

        handle = place.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._forward(self.model, batches.cast_for(self.model, x))
        except FeaturesReached as reached:
            features = reached.features
        else:
            raise ValueError(
                f"expected a pass over a batch to reach the layer {self.layer!r} of {type(self.model).__name__}, got "
                f"one that does not use it: {FORWARD}"
            )
        finally:
            handle.remove()
        _check_rows(features)
        if not more:
            return features
        own = place.base_layer if isinstance(place, SwappedLayer) else place
        logits = own(features) if isinstance(own, nn.Linear) else None
        return BackboneOutput(features, base_logits=logits)


def run_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model on inputs, a tensor or a dictionary; an error that says how to help where that can't be done."""
    try:
        return batches.call(model, inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AttributeError) as error:  # NotImplementedError is a RuntimeError
        given = ", ".join(inputs) if isinstance(inputs, Mapping) else f"a tensor {tuple(inputs.shape)}"
        raise ValueError(
            f"expected {type(model).__name__} to take the inputs of a batch, got {type(error).__name__} for {given} "
            f"({error}): {FORWARD}"
        ) from error


def find_layer(model: nn.Module, layer: str | None, sample: Any, forward: Forward | None = None) -> str:
    """The path of a layer as `named_modules` has it; None finds the dense layer that the whole output comes from.

    `sample` is a function without arguments that gives two inputs; it is called only where the layer is to be found.
    """
    if layer is None:
        return str(removal.find_head(model, sample(), call=run_model if forward is None else forward).name)
    known: dict[str, str] = {
        name.replace("_orig_mod.", ""): name for name, _ in model.named_modules()
    }  # torch.compile adds a level
    if not layer or layer.replace("_orig_mod.", "") not in known:
        names = ", ".join(name for name, part in model.named_modules() if isinstance(part, nn.Linear))
        raise ValueError(f"expected the path of a layer of the model (dense: {names}), got {layer!r}: give its path")
    return known[layer.replace("_orig_mod.", "")]


def swapped_layers(model: nn.Module) -> dict[str, SwappedLayer]:
    """Path → layer of all that were swapped in a model."""
    return {name: part for name, part in model.named_modules() if isinstance(part, SwappedLayer)}


def place_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of another."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


# -- building ---------------------------------------------------------------------------------------------------------


def build_layer(
    features: TrainingFeatures,
    learn: Learn,
    settings: HeadSettings,
    *,
    num_classes: int | None = None,
    passes: int = 15,
    progress: bool = True,
    **parts: Any,
) -> SwappedLayer:
    """Learn the structure of what a layer is given, and put a head in its place. All processes call it.

    Args:
        features: of training data, by `LayerInputs`.
        learn: learns a tree from them.
        settings: of the head.
        num_classes: number of classes, where the layer does not tell.
        passes: how often a head that draws is run for a prediction.
        progress: show progress bars.
        **parts: scores, calibration, conformal and verdict, as `Predictor.attach` takes them.
    """
    reader = cast(LayerInputs, features.backbone)
    name, original = reader.layer, reader.model.get_submodule(reader.layer)
    classes = num_classes_of(original, name, num_classes)
    task, width = Classification(classes), features.first().features.shape[1]
    tree = learn(features) if settings.needs_tree else None
    sample = features.sample()
    try:
        target = task.check(sample.targets)
    except ValueError as error:
        raise ValueError(f"labels of the training data and outputs of {name!r} do not fit: {error}") from error
    base = sample.output.base_logits
    helps = base is not None and task.base_fits(base.shape[1]) and task.base_helps(base, target)
    layer = make_layer(original, settings, width, classes, tree, helps, passes, **parts)
    place_layer(reader.model, name, layer)
    wanted = [score for score in layer.predictor.scores if score.needs_fit]
    layer.predictor.fit_scores(features, wanted, progress)
    watch_state(reader.model)
    return layer


def swap_layer(
    model: nn.Module,
    data: Any,
    layer: str | None = None,
    *,
    head: HeadSettings | str | None = None,
    num_classes: int | None = None,
    scores: Sequence[Score | str | Mapping[str, Any]] | str = (),
    passes: int = 15,
    forward: Forward | None = None,
    columns: Columns | None = None,
    progress: bool = True,
    **learn: Any,
) -> SwappedLayer:
    """Put a BRAINet head in the place of a layer of a model, for a training loop of your own. Nothing is trained.

    Call it before the optimizer is made. The model is changed; its state dict carries what `restore_layers` needs.

    Args:
        model: any module that ends in logits; it is run in evaluation mode, where its weights are.
        data: inputs and labels of training: a loader, a dataset or a pair of tensors.
        layer: path of the dense layer that gives the logits; None finds it.
        head: settings of the head; None is `Tree()`.
        num_classes: number of classes, where the layer does not tell.
        scores: scores of how unlike the training data an input is, fitted to the features as they are now.
        passes: sub-networks that a prediction averages.
        forward: runs the model on the inputs of a batch; None calls it.
        columns: the names of inputs and labels, where batches have names that can't be guessed.
        progress: show progress bars.
        **learn: settings of `learn_structure`.

    Returns:
        The new layer. `layer.predictor.predict(features)` says all that is known of a sample.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    >>> layer = swap_layer(model, (torch.randn(100, 6), torch.arange(100) % 3), "2", progress=False)
    >>> model(torch.randn(2, 6)).shape, model.eval()(torch.randn(2, 6)).exp().sum(1)
    (torch.Size([2, 3]), tensor([1.0000, 1.0000], grad_fn=<SumBackward1>))
    """
    loader = labelled_batches(data, "data")

    def sample() -> Any:
        return first_inputs(loader, columns)

    name = find_layer(model, layer, sample, forward)
    reader = LayerInputs(model, name, forward, frozen=True)
    features = TrainingFeatures(loader, reader, columns=columns)  # type: ignore[arg-type]

    def learned(found: TrainingFeatures) -> GGT:
        return learn_structure(found.all(learn.get("max_rows"), progress).features, **{"progress": progress, **learn})

    settings = make_part(HeadSettings, "Tree" if head is None else head, "head")
    given: dict[str, Any] = {"num_classes": num_classes, "passes": passes, "progress": progress, "scores": scores}
    with keep_modes(model):
        return build_layer(features, learned, settings, **given)


def first_inputs(loader: Any, columns: Columns | None, device: torch.device | None = None) -> Any:
    """Two samples of the inputs of a loader."""
    from brainet_pl.features.extraction import inputs_of

    for batch in loader:
        inputs = inputs_of(batch, columns)
        few = batches.rows(inputs, [0, 1] if batches.size(inputs) > 1 else [0, 0])
        return few if device is None else batches.move(few, device)
    raise ValueError("expected training data to find the layer by, got an empty loader: check the data")


class keep_modes:
    """Puts back the modes of all parts of a model, which extraction switches to evaluation as a whole."""

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(part, part.training) for part in model.modules()]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        for part, mode in self._modes:
            part.training = mode


# -- keeping ----------------------------------------------------------------------------------------------------------


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


def rebuild_layers(model: nn.Module, state: Mapping[str, Any], prefix: str = "") -> None:
    """Build the swapped layers of a state dict in a model where they are not there yet. Weights are not loaded."""
    for name, content in stored_layers(state, prefix).items():
        here = model.get_submodule(name)
        if isinstance(here, SwappedLayer) and here.describe() == content:
            continue
        if content.get("format") != FORMAT:
            raise ValueError(
                f"expected a swapped layer of format {FORMAT} at {name!r}, got format {content.get('format')}: load it "
                "with the version of brainet_pl that wrote it"
            )
        original = here.original if isinstance(here, SwappedLayer) else here
        weights = {key: value for key, value in state.items() if key.startswith(f"{prefix}{name}.")}
        try:
            made = _layer_of(content, original, weights)
        except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ValueError(
                f"expected a swapped layer as brainet_pl describes it at {name!r}, got another ({error}): the file was "
                "changed; take another copy"
            ) from error
        place_layer(model, name, made.train(here.training))


def _layer_of(content: Mapping[str, Any], original: nn.Module, weights: Mapping[str, Any]) -> SwappedLayer:
    settings = make_part(HeadSettings, content["head"], "head")
    features, classes, base = content["in_features"], content["num_classes"], content["base_logits"]
    check_sizes([settings.settings(), {"num_classes": classes, "in_features": features}], weights)
    tree = None if content["ggt"] is None else GGT.from_dict(content["ggt"])
    check_build(lambda: settings.resolve_skip(base).build(features, classes, tree), weights)
    parts = {name: content[name] for name in ("scores", "calibration", "conformal", "verdict")}
    return make_layer(original, settings, features, classes, tree, base, content["passes"], **parts)


def _before_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    rebuild_layers(module, state, prefix)


def watch_state(model: nn.Module) -> None:
    """Have `load_state_dict` of a model build the swapped layers that the state has, before it loads weights."""
    if _before_load not in model._load_state_dict_pre_hooks.values():
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
