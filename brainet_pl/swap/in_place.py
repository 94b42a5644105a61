"""A BRAINet head in the place of a layer of any model: the model goes on as it was, and gets logits from it.

`swap_layer` is for a training loop of your own, the callback `SwapHead` for Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from brainet_pl._utils import checks
from brainet_pl._utils.parts import make_part
from brainet_pl.backbones import batches, removal
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.removal import FeaturesReached
from brainet_pl.calibration import Calibrator
from brainet_pl.explain import Explanation
from brainet_pl.explain.road import FEATURES_ALONE, explain_passes
from brainet_pl.features.extraction import extract, inputs_of, is_sharded
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.fitting.build import base_logits_help
from brainet_pl.fitting.calibrate import calibrate
from brainet_pl.fitting.scores import fit_scores
from brainet_pl.fitting.structure import learn_tree
from brainet_pl.network import HeadSettings
from brainet_pl.prediction.defaults import AUTO_CALIBRATION
from brainet_pl.prediction.finite import nan_rows
from brainet_pl.prediction.inputs import InputReader
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.network import device_of
from brainet_pl.prediction.prediction import Prediction
from brainet_pl.scores import Score, Verdict
from brainet_pl.structure import GGT
from brainet_pl.swap.data import labelled_batches
from brainet_pl.swap.layer import (
    SwappedLayer,
    check_rows,
    make_layer,
    num_classes_of,
    place_layer,
    swapped_layers,
    watch_state,
)
from brainet_pl.tasks import Classification, MultiLabel
from brainet_pl.tasks.passes import Passes

Kind = Literal["Classification", "MultiLabel"]
Forward = Callable[[Any, Any], Any]  # the model and the inputs of a batch → anything, through the layer
Learn = Callable[[TrainingFeatures], GGT]
FORWARD = (
    "say how the model is run on the inputs of a batch, forward=lambda module, inputs: …, and name them where batches "
    "have names, columns=Columns(inputs=…, target=…)"
)


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
        self.training = False  # extraction puts this mode back, of the model with its head: answers need evaluation
        self._forward = run_model if forward is None else forward

    def forward(self, x: Any, more: bool = False) -> Any:
        """Inputs → features (B, d); with `more`, beside the logits of the original layer."""
        place = self.model.get_submodule(self.layer)
        reached: list[Any] = []
        whole = is_sharded(self.model)  # its processes end every pass together

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            reached.append(self._output(place, [*args, *kwargs.values()][0], more))
            if not whole:
                raise FeaturesReached(None)

        handle = place.register_forward_pre_hook(look, with_kwargs=True)
        try:
            self._forward(self.model, batches.cast_for(self.model, x))
        except FeaturesReached:
            pass
        finally:
            handle.remove()
        if not reached:
            raise ValueError(
                f"expected a pass over a batch to reach the layer {self.layer!r} of {type(self.model).__name__}, got "
                f"one that does not use it: {FORWARD}"
            )
        return reached[0]

    @staticmethod
    def _output(place: nn.Module, features: Any, more: bool) -> Any:
        """What a layer is given; with `more`, beside the logits of the original layer."""
        check_rows(features)
        if not more:
            return features
        own = place.base_layer if isinstance(place, SwappedLayer) else place
        logits = own.forward(features) if isinstance(own, nn.Linear) else None  # without the hook on it
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


# -- building ---------------------------------------------------------------------------------------------------------


def build_layer(
    features: TrainingFeatures,
    learn: Learn,
    settings: HeadSettings,
    *,
    num_classes: int | None = None,
    task: Kind = "Classification",
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
        task: one class a sample, or several labels.
        passes: how often a head that draws is run for a prediction.
        progress: show progress bars.
        **parts: scores, calibration, conformal and verdict, as `Predictor.attach` takes them.
    """
    reader = cast(LayerInputs, features.backbone)
    name, original = reader.layer, reader.model.get_submodule(reader.layer)
    checks.one_of("task", task, get_args(Kind), "a layer of logits gives one class a sample, or several labels")
    several = task == "MultiLabel"
    outputs = num_classes_of(original, name, num_classes, 1 if several else 2)
    tree = learn(features) if settings.needs_tree else None
    sample = features.sample()
    made = MultiLabel(outputs) if several else Classification(outputs)
    try:
        made.check(sample.targets)
        if made.needs_targets:
            made.prepare(features.targets())
    except ValueError as error:
        raise ValueError(f"labels of the training data and outputs of {name!r} do not fit: {error}") from error
    helps = base_logits_help(made, sample)
    layer = make_layer(original, settings, sample.features.shape[1], made, tree, helps, passes, **parts)
    place_layer(reader.model, name, layer)
    fit_scores(layer.predictor, features, progress=progress)
    watch_state(reader.model)
    return layer


def swap_layer(
    model: nn.Module,
    data: Any,
    layer: str | None = None,
    *,
    head: HeadSettings | str | None = None,
    num_classes: int | None = None,
    task: Kind = "Classification",
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
        task: "MultiLabel" where each logit is of a label that may be there or not, whatever the others.
        scores: scores of how unlike the training data an input is, fitted to the features as they are now.
        passes: sub-networks that a prediction averages.
        forward: runs the model on the inputs of a batch; None calls it.
        columns: the names of inputs and labels, where batches have names that can't be guessed.
        progress: show progress bars.
        **learn: settings of `learn_structure`.

    Returns:
        The new layer. `layer.predictor.predict(features)` says all that is known of a sample, once `calibrate_layer`
        has learned from held-out samples.

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

    def learned(source: TrainingFeatures) -> GGT:
        return learn_tree(source.all(learn.get("max_rows"), progress).features, learn, progress=progress)

    settings = make_part(HeadSettings, "Tree" if head is None else head, "head")
    given: dict[str, Any] = {"num_classes": num_classes, "task": task, "passes": passes, "scores": scores}
    with evaluation_mode(model):
        return build_layer(features, learned, settings, **given, progress=progress)


@torch.no_grad()
def calibrate_layer(
    model: nn.Module,
    train: Any,
    held: Any,
    layer: str | None = None,
    *,
    calibration: Calibrator | str | Mapping[str, Any] | None = AUTO_CALIBRATION,
    scores: Sequence[Score | str | Mapping[str, Any]] | str | None = None,
    verdict: Verdict | None = None,
    forward: Forward | None = None,
    columns: Columns | None = None,
    progress: bool = True,
) -> dict[str, float]:
    """Learn how sure a model with a swapped layer may be, and which inputs it knows. Nothing is trained.

    Call it when your training loop has ended; the state dict carries what was learned.

    Args:
        model: with a layer that `swap_layer` has put in.
        train: inputs and labels that the model was trained on: a loader, a dataset or a pair of tensors.
        held: inputs and labels that it was not trained on, 200 or more.
        layer: path of the swapped layer; None where there is one.
        calibration: maps probabilities to better calibrated ones; "auto" is a temperature, and confidence that fades on
            inputs unlike the training data.
        scores: scores of how unlike the training data an input is; None is a density of what the layer is given.
        verdict: by which score and at which level an input is called known; None is 5 %.
        forward: runs the model on the inputs of a batch; None calls it.
        columns: the names of inputs and labels, where batches have names that can't be guessed.
        progress: show progress bars.

    Returns:
        What was learned, by name.
    """
    name, swapped = swapped_layer(model, layer)
    predictor = swapped.predictor
    predictor.attach(scores, calibration, None, verdict)
    predictor.to(device_of(model))
    reader: Any = LayerInputs(model, name, forward, frozen=True)
    with evaluation_mode(model):
        features = TrainingFeatures(labelled_batches(train, "train"), reader, columns=columns)
        held_out = extract(reader, labelled_batches(held, "held"), progress=progress, columns=columns)
        return calibrate(predictor, features, held_out, progress)


@torch.no_grad()
def predict_layer(model: nn.Module, x: Any, layer: str | None = None, *, forward: Forward | None = None) -> Prediction:
    """Everything that a model with a swapped layer says of inputs, and not its logits alone.

    Args:
        model: with a layer that `swap_layer` or `SwapHead` has put in; it is run in evaluation mode.
        x: a tensor or an array (B, …), a dictionary of tensors, a dataset or a loader, predicted batch by batch.
        layer: path of the swapped layer; None where there is one.
        forward: runs the model on inputs; None calls it.
    """
    predictor = swapped_layer(model, layer)[1].predictor
    return Prediction.concat([predictor.describe(passes) for passes in _passes_of(model, x, layer, forward)])


@torch.no_grad()
def explain_layer(model: nn.Module, x: Any, layer: str | None = None, *, forward: Forward | None = None) -> Explanation:
    """Why inputs look known or unknown to a model with a swapped layer: in words, and the known samples they resemble.

    The arguments are those of `predict_layer`.
    """
    predictor = swapped_layer(model, layer)[1].predictor
    passes = _passes_of(model, x, layer, forward)
    return Explanation.concat([explain_passes(predictor, part, why_no_map=FEATURES_ALONE) for part in passes])


def _passes_of(model: nn.Module, x: Any, layer: str | None, forward: Forward | None) -> Iterator[Passes]:
    """The passes of inputs through a model up to its swapped layer, batch by batch."""
    name, swapped = swapped_layer(model, layer)
    reader = LayerInputs(model, name, forward)
    with evaluation_mode(model):
        for batch in InputReader(None).batches(x):
            inputs = batches.move(batch, device_of(model))
            passes = swapped.predictor.passes(reader(inputs, more=True))
            yield replace(passes, nan_inputs=nan_rows(inputs, len(passes.predicted)))


def swapped_layer(model: nn.Module, layer: str | None) -> tuple[str, SwappedLayer]:
    """The path of a swapped layer of a model, and the layer; None finds the only one."""
    layers = {name.replace("_orig_mod.", ""): name for name in swapped_layers(model)}
    wanted = next(iter(layers)) if layer is None and len(layers) == 1 else layer
    if wanted not in layers:
        there = ", ".join(layers) or "none"
        raise ValueError(f"expected the path of a swapped layer ({there}), got {layer!r}: call swap_layer first")
    name = layers[wanted]
    return name, swapped_layers(model)[name]


def first_inputs(loader: Any, columns: Columns | None, device: torch.device | None = None) -> Any:
    """Two samples of the inputs of a loader."""
    for batch in loader:
        inputs = inputs_of(batch, columns)
        few = batches.rows(inputs, [0, 1] if batches.size(inputs) > 1 else [0, 0])
        return few if device is None else batches.move(few, device)
    raise ValueError("expected training data to find the layer by, got an empty loader: check the data")
