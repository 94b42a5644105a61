"""Swap the head of a trained model, outside Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from brainet_pl._utils import checks
from brainet_pl._utils.parts import make_part
from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.texts import are_texts
from brainet_pl.backbones import Backbone, FeatureExtractor
from brainet_pl.backbones import batches as batching
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.removal import HeadLayer
from brainet_pl.calibration import Calibrator, Conformal
from brainet_pl.explain import Explanation
from brainet_pl.explain.road import explain_batch
from brainet_pl.features.extraction import extract, extract_output, inputs_of, is_sized, run_backbone
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.fitting.calibrate import calibrate
from brainet_pl.fitting.comparison import Comparison
from brainet_pl.fitting.structure import learn_tree
from brainet_pl.network import Head, HeadSettings, Tree
from brainet_pl.network.training import TrainingSettings
from brainet_pl.prediction.defaults import AUTO_CALIBRATION
from brainet_pl.prediction.inputs import InputReader
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.network import device_of
from brainet_pl.prediction.prediction import Prediction
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.prediction.transforms import class_names_of, image_steps_of
from brainet_pl.scores import Score, Verdict
from brainet_pl.serving.images import ImageSteps
from brainet_pl.structure import GGT
from brainet_pl.swap.data import (
    Classes,
    InputScale,
    are_classes,
    check_first_labels,
    input_batches,
    is_labelled_pair,
    labelled_batches,
)
from brainet_pl.swap.fit import Given, Plan, fit_swapped
from brainet_pl.tasks import Classification, MultiLabel, Task

LEAST_FEATURES, MOST_FEATURES = 64, 2048  # that chosen layers have together, where nobody says how many
DROPOUTS = (0.5, 0.1)  # shares of the features set to zero, for "auto" to choose from


class SwappedModel(Predictor):
    """A feature extractor with a new head: inputs → the logarithm of calibrated probabilities (B, C).

    `fit` does all there is to do. Or train it by its own `loss`, which has every branch of the tree learn from every
    sample; after `calibrate`, `predict` then also says how sure it may be and which inputs it knows.

    Args:
        backbone: the feature extractor.
        head: the new head; None is built by `fit`.
        num_classes: number of classes; or a task, such as `MultiLabel`.
        settings: settings of the head, from which `fit` builds it and `save` writes it down.
        columns: the names of inputs and labels, where batches have names.

    Attributes:
        comparison: the NLL of held-out samples beside that of other heads; None before `fit`.
        class_names: names of the classes, where the training data set has them as `classes`.
        images: how image files are prepared, where the transform of the data set tells it; for `export_folder`.
    """

    task: Classification | MultiLabel
    head: Head

    def __init__(
        self,
        backbone: FeatureExtractor,
        head: Head | None,
        num_classes: int | Classification | MultiLabel,
        *,
        settings: HeadSettings | None = None,
        columns: Columns | None = None,
    ) -> None:
        task = Classification(num_classes) if isinstance(num_classes, int) else num_classes
        super().__init__(backbone, task, head)
        self.settings, self.columns = settings, columns
        self.input_scale = InputScale()
        self.comparison: Comparison | None = None
        self.class_names: tuple[str, ...] | None = None
        self.images: ImageSteps | None = None
        self._given = Given()

    @torch.no_grad()
    def predict(self, x: Any, passes: int | None = None) -> Prediction:
        """Inputs → all that is said of each, by name.

        `probabilities` (B, C), `class` (B,) and every score (B,); after `calibrate` also `known_p` (B,), the share of
        calibration samples that are at least as strange, and `known` (B,). Inputs on another scale than those of `fit`
        are warned of, once.

        Args:
            x: a tensor or an array, (B, …) or one sample; a dictionary of tensors; a dataset or a loader, with or
                without labels; a table of numbers; texts, of a `TextEncoder`. Images as Pillow has them, paths of
                images, pixels of 8 bits, or lists of these are prepared as those of `fit`, where its data set said how.
                All are predicted batch by batch.
            passes: sub-networks that a prediction averages; None is the model's own number.
        """
        reader = InputReader(self.backbone.input_signature, self.images, self.columns, self.backbone.takes_texts)
        answers = []
        for batch in reader.batches(x):
            self.input_scale.warn_if_far(batch)
            answers.append(super().predict(batching.move(batch, device_of(self)), passes))
        return Prediction.concat(answers)

    @torch.no_grad()
    def explain(self, x: Any, passes: int | None = None) -> Explanation:
        """Inputs as `predict` takes them → why they look known or unknown, in words, maps and resembling samples.

        Args:
            x: images or rows, as for `predict`.
            passes: sub-networks that a prediction averages; None is the model's own number.
        """
        reader = InputReader(self.backbone.input_signature, self.images, self.columns, self.backbone.takes_texts)
        moved = (batching.move(batch, device_of(self)) for batch in reader.batches(x))
        return Explanation.concat([explain_batch(self, batch, passes) for batch in moved])

    @torch.no_grad()
    def probabilities(self, x: Any, passes: int = 15) -> Tensor:
        """Inputs (B, …) → probabilities (T, B, C) of T passes, before calibration; the backbone runs once.

        Where a head gives all of its few sub-networks with their weights instead of draws, each is among the T as often
        as its weight says: their mean is the head's prediction.
        """
        with evaluation_mode(self):
            outputs = self.passes(x, passes)
        values, weights = outputs.outputs.softmax(dim=-1), outputs.weights
        if weights is None:
            return values
        share = (torch.arange(passes, device=weights.device) + 0.5) / passes
        upto = weights.cumsum(0)
        return values[torch.searchsorted(upto / upto[-1], share.to(upto.dtype)).clamp_max(len(values) - 1)]

    @torch.no_grad()
    def calibrate(
        self,
        train: Any,
        held: Any,
        *,
        calibration: Calibrator | str | Mapping[str, Any] | None = AUTO_CALIBRATION,
        scores: Sequence[Score | str | Mapping[str, Any]] | str | None = None,
        verdict: Verdict | None = None,
        passes: int = 15,
        progress: bool = True,
    ) -> dict[str, float]:
        """Learn how sure the trained model may be, and which inputs it knows: what `predict` tells. Nothing is trained.

        The temperature of the posterior over sub-networks, that of probabilities, the reference of the verdict, and an
        estimate of what it will notice.

        Args:
            train: inputs and labels that the model was trained on, which scores such as a density are fitted to: a pair
                of tensors, a dataset, or a loader.
            held: inputs and labels that it was not trained on, 200 or more.
            calibration: maps probabilities to better calibrated ones; "auto" as in `fit`.
            scores: scores of how unlike the training data an input is; None is a density of the features.
            verdict: by which score and at which level an input is called known; None is the calibrator's, at 5 %.
            passes: sub-networks that a prediction averages.
            progress: show progress bars.

        Returns:
            What was learned, by name.
        """
        self.num_passes = checks.whole("passes", passes, 1)
        self.attach(scores, calibration, None, verdict)
        features = TrainingFeatures(labelled_batches(train, "train"), self.backbone, columns=self.columns)
        features.prepare_backbone()
        held_out = extract(self.backbone, labelled_batches(held, "held"), progress=progress, columns=self.columns)
        self._describe(train, held)
        return calibrate(self, features, held_out, progress)

    @torch.no_grad()
    def base_logits(self, x: Any) -> Tensor | None:
        """Inputs (B, …) → logits (B, C') of the layer that was removed, or None where none was."""
        with evaluation_mode(self):
            return run_backbone(self.backbone, x).base_logits

    # -- one call -----------------------------------------------------------------------------------------------------

    def fit(
        self,
        train: Any = None,
        held: Any = None,
        *,
        max_epochs: int = 200,
        patience: int = 10,
        batch_size: int | None = 128,
        learning_rate: float = 1e-3,
        weight_decay: float = 1.0,
        input_dropout: float | Literal["auto"] = "auto",
        copies: int | Literal["auto"] = "auto",
        calibration: Calibrator | str | Mapping[str, Any] | None = AUTO_CALIBRATION,
        scores: Sequence[Score | str | Mapping[str, Any]] | str | None = None,
        verdict: Verdict | None = None,
        conformal: Conformal | str | Mapping[str, Any] | None = None,
        passes: int = 15,
        seed: int = 0,
        progress: bool = True,
    ) -> SwappedModel:
        """Choose layers, extract features once, learn the structure, train the head on them, calibrate. Returns itself.

        Training ends by held-out samples, and keeps the best epoch: more epochs cost nothing but time. They also choose
        what predicts: the head, a linear layer on the same features, the network's own layer where it has the same
        classes, or a sum of their logits; the network as it was stays unless something else is better by more than a
        standard error. Other held-out samples calibrate, see `brainet_pl.fitting.samples`, and at the end one line
        compares all on these. A head that was built before is trained further.

        Args:
            train: inputs and labels, a loader, a dataset or a pair of tensors; None is what `swap_head` was given.
            held: the same of samples that are not trained on. None is what `swap_head` was given, or else 15 % of the
                training samples, the same share of each class.
            max_epochs: epochs at the most.
            patience: epochs without a better one after which the learning rate falls, twice, and then training ends;
                fewer of more than 5,000 samples, 3 at least.
            batch_size: samples in a batch; None chooses by the number of training samples.
            learning_rate: learning rate of Adam at the start.
            weight_decay: decoupled weight decay, times the learning rate.
            input_dropout: share of features that is set to zero for each sample and step; "auto" trains with 0.5 and
                with 0.1, and keeps what predicts the held-out samples better.
            copies: how many more times training samples are read where their data set augments them at random, each
                time a pass of the network; "auto" is 2 for such a set, else 0.
            calibration: maps probabilities to better calibrated ones; "auto" is a temperature, and confidence that
                fades on inputs unlike the training data. "TemperatureScaling" does not fade, None leaves probabilities.
            scores: scores of how unlike the training data an input is; None is a density of the features.
            verdict: by which score and at which level an input is called known; None is 5 %.
            conformal: sets of classes that hold the truth at a chosen level, such as "Conformal"; None has none.
            passes: sub-networks that a prediction averages.
            seed: of all that is drawn; it leaves no trace in other draws.
            progress: show progress bars.
        """
        if train is None:
            train, held = self._given.train, self._given.held if held is None else held
        if train is None:
            raise ValueError("expected training data, got none: give inputs and labels, fit(train, held)")
        if not self.backbone.frozen:
            raise ValueError(
                "expected a frozen backbone, because features are extracted once, got freeze=False: leave it out, or "
                "train with your own loop or Lightning"
            )
        candidates = []
        for rate in DROPOUTS if input_dropout == "auto" else (input_dropout,):
            candidates.append(
                TrainingSettings(max_epochs, patience, batch_size, learning_rate, weight_decay, rate, rate_decays=2)
            )
        if copies != "auto":
            checks.whole("copies", copies, 0, 1000)
        self.num_passes = checks.whole("passes", passes, 1)
        parts = {"calibration": calibration, "conformal": conformal, "verdict": verdict, "scores": scores}
        plan = Plan(candidates, copies, parts)
        with isolated_rng(seed):
            self.comparison = fit_swapped(self, train, held, plan, self._given, progress)
        self._describe(train, held)
        self._given = self._given.without_data()
        return self.eval()

    def _describe(self, train: Any, held: Any) -> None:
        """Take the names of classes and the preparation of images from data sets; held-out images have no draws."""
        self.class_names = class_names_of(train, self.task.out_features) or self.class_names
        self.images = image_steps_of(held) or image_steps_of(train) or self.images

    # -- keeping ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the model to a file of tensors and plain values, which `load_swapped` reads without running code."""
        from brainet_pl.swap.file import save_swapped

        save_swapped(self, path)

    def export(self, path: str | Path, example: Any = None) -> tuple[str, ...]:
        """Write the model as ONNX for any batch size; gives the names of its outputs.

        Args:
            path: a file that ends in .onnx.
            example: inputs; None is made after those that the model has met.
        """
        from brainet_pl.export.graph import export_onnx

        return export_onnx(self, path, example)

    def report(self, path: str | Path, test: Any, unknown: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Test the model and write one self-contained page about it; gives the metrics of the test by name.

        Args:
            path: the file to write, such as page.html.
            test: inputs and labels that neither `train` nor `held` had.
            unknown: name → inputs unlike the training data, to see whether they are noticed.
        """
        from brainet_pl.swap.report import report_swapped

        return report_swapped(self, path, test, unknown)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights, as of any module; the layer that the other model has removed is removed here too."""
        self._remove_as_in(state_dict)
        known = self.state_dict()
        parts = sorted({key.split(".")[0] for key in state_dict if key not in known} & {"scores", "calibration"})
        if parts and strict and not any(key.startswith("calibration.") for key in known):
            raise ValueError(
                f"expected the state of a model that was not calibrated, got one with {' and '.join(parts)}: keep "
                "calibrated models by save(path) and load_swapped(path, model)"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def _remove_as_in(self, state: Mapping[str, Any]) -> None:
        prefix = "backbone.base_layer."
        stored = {key.removeprefix(prefix): value.shape for key, value in state.items() if key.startswith(prefix)}
        if not stored or not self.backbone.needs_sample:
            return
        for name, layer in self.backbone.model.named_modules():
            ours = {key: value.shape for key, value in layer.state_dict().items()}
            if name and ours == stored and not any(f"backbone.model.{name}.{key}" in state for key in stored):
                self.backbone.remove(HeadLayer(name, leave=True))
                return


def swap_head(
    model: nn.Module,
    data: Any,
    num_classes: int | None = None,
    *,
    held: Any = None,
    head_layer: str | None = None,
    freeze: bool = True,
    layers: str | list[str] | None = "auto",
    pool: str | list[str] | None = None,
    max_features: int | None = None,
    head: HeadSettings | str | None = None,
    columns: Columns | None = None,
    task: MultiLabel | str | None = None,
    **learn: Any,
) -> SwappedModel:
    """Replace the classification layer of a trained model by a BRAINet head, outside Lightning.

    `swap_head(model, train, held=held).fit()` does it all. Without `num_classes`, or with `held`, nothing is computed
    before `fit`. With `num_classes` alone, the structure is learned and the head built at once, to be trained by `fit`
    or by a loop of your own.

    Args:
        model: any classifier; it is copied, never changed.
        data: inputs and labels for `fit`: a loader, a dataset or a pair of tensors, or of texts and labels for a
            `TextEncoder`. To build the head at once also
            inputs alone, as a tensor or NumPy array, a dictionary of tensors or batches, or a learned tree. All of it
            is read; of a stream of unknown length `max_rows` rows, or 50,000.
        num_classes: outputs of the new head, classes or labels; None counts those of the data.
        held: inputs and labels that are not trained on, by which `fit` stops and calibrates.
        head_layer: the layer to remove; None finds it.
        freeze: keep the backbone as it is.
        layers: the layers whose outputs are the features, as in `Backbone`: paths or patterns; None is what the
            classification layer was given. "auto" chooses them by the labels of a sample of `data`; where batches have
            none, or a tree is given, it is None.
        pool: how maps and tokens become features, as in `Backbone`.
        max_features: the largest number of features that "auto" chooses; None is 2,048, and at most half as many as
            training samples, but not below 64.
        head: settings of the new head; None is `Tree()`, a BRAINet sized by the number of features. Where the removed
            layer had `num_classes` outputs, `Tree(skip="base_logits_or_linear")` adds to its logits.
        columns: the names of inputs and labels, where batches have names that can't be guessed.
        task: "MultiLabel", or one with thresholds, where a sample has several labels: rows (N, L) of 0, 1 and NaN,
            which is not known. None is one class a sample.
        **learn: settings of `learn_structure`.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    >>> swapped = swap_head(model, torch.randn(100, 6), 3, head=Tree(num_params=2000), test="gaussian", progress=False)
    >>> swapped.eval().predict(torch.randn(2, 6))["probabilities"].shape
    torch.Size([2, 3])
    """
    settings = make_part(HeadSettings, Tree() if head is None else head, "head")
    at_once = isinstance(data, GGT) or (num_classes is not None and held is None)
    if at_once or num_classes is not None:
        num_classes = checks.whole("num_classes", num_classes, 1, 10**7)
    most = most_features(data) if max_features is None else max_features
    reads: dict[str, Any] = {"layers": layers, "pool": pool, "max_features": most}
    backbone = Backbone(model, head_layer=head_layer, freeze=freeze, **reads).build()
    classes = _classes(num_classes, task)
    known = 2 if classes is None or isinstance(classes, str) else classes  # until `fit` has seen the labels
    swapped = SwappedModel(backbone, None, known, settings=settings, columns=columns)
    if not at_once:
        if num_classes is None and isinstance(data, Tensor | np.ndarray | Mapping):
            raise ValueError("expected num_classes for inputs without labels, got None: give it, or a pair (x, y)")
        labelled_batches(data, "train")  # refuses what has no labels
        swapped._given = Given(data, held, classes, learn)
        return swapped
    if isinstance(data, GGT):
        swapped.build_head(settings, data.num_variables, data)
    else:
        if is_labelled_pair(data) and are_classes(data[1]):
            check_first_labels(labelled_batches(data, "data"), known, columns, "data")
        _build_from_inputs(swapped, settings, data, learn)
    swapped.settings = settings.resolve_skip(swapped.has_base_logits)
    can_be_read_again = not isinstance(data, GGT | Iterator | Tensor)
    swapped._given = Given(data if can_be_read_again else None, None, classes, learn)
    return swapped


def _classes(num_classes: int | None, task: Any) -> Classes | Literal["MultiLabel"]:
    """What labels are, as far as that was said: a number of classes, or several labels at once."""
    if task is None or (isinstance(task, str) and task == "Classification"):
        return num_classes
    if isinstance(task, str) and task == "MultiLabel":
        return "MultiLabel" if num_classes is None else MultiLabel(num_classes)
    made = make_part(Task, task, "task")
    if not isinstance(made, MultiLabel) or num_classes not in (None, made.num_labels):
        raise ValueError(
            f"expected task to be 'MultiLabel', or a MultiLabel of num_classes={num_classes} labels, got "
            f"{made.describe()}: leave task out for one class a sample; for numbers take BRAINet(task='Regression')"
        )
    return made


def most_features(data: Any) -> int:
    """How many features layers may have together: a structure of more columns than half the rows is mostly chance."""
    source = getattr(data, "dataset", data)
    if isinstance(source, tuple | list):
        source = source[0] if is_labelled_pair(source) else None
    is_rows = source.ndim > 0 if isinstance(source, Tensor | np.ndarray) else are_texts(source)
    is_rows |= isinstance(source, Dataset)
    if not is_rows or not hasattr(source, "__len__"):
        return MOST_FEATURES
    return min(MOST_FEATURES, max(LEAST_FEATURES, len(source) // 2))


def _build_from_inputs(model: SwappedModel, settings: HeadSettings, data: Any, learn: Mapping[str, Any]) -> None:
    """Learn the structure of the features of inputs, which may have no labels, and build the head."""
    backbone, columns, progress = model.backbone, model.columns, learn.get("progress", True)
    batches = input_batches(data, learn.get("max_rows"))
    if is_sized(batches) or not isinstance(data, Iterator):  # what can be read once is left for the features
        source = batches if is_sized(batches) else data
        TrainingFeatures(source, backbone, columns=columns).choose_layers(progress=progress)
    if backbone.search is not None:
        backbone.choose(None)
    readings = extract_output(backbone, _inputs_alone(batches, columns), max_rows=_rows_to_read(settings, backbone))
    if backbone.needs_scale:
        readings = backbone.set_scale([readings])[0]
    tree = learn_tree(readings.features, learn, backbone.names, progress) if settings.needs_tree else None
    base_logits = readings.base_logits
    fits = base_logits is not None and model.task.base_fits(base_logits.shape[1])
    model.build_head(settings, readings.features.shape[1], tree, fits)


def _inputs_alone(batches: Iterable[Any], columns: Columns | None) -> Iterable[Any]:
    return batches if columns is None else (inputs_of(batch, columns) for batch in batches)


def _rows_to_read(settings: HeadSettings, backbone: FeatureExtractor) -> int | None:
    """One row tells the number of features; a structure, and the scale of tapped features, are learned from all."""
    return None if settings.needs_tree or backbone.taps is not None else 1
