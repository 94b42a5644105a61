"""How a swapped head is trained on features in memory, weighed against the network's own layer, and compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.framework import rank_zero_info, rank_zero_warn
from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.threads import SMALL, limit_threads
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones.batches import Columns, move, rows
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.stages import find_stages
from brainet_pl.calibration.density import make_density
from brainet_pl.calibration.temperature import fit_temperature, scale
from brainet_pl.features.extraction import Extracted, extract, extract_output, inputs_of, is_sized, unshuffled
from brainet_pl.features.training import SAMPLE_ROWS, TrainingFeatures
from brainet_pl.network.base import LEAST, HeadInputs, HeadSettings, Outputs, run_head
from brainet_pl.network.finalization import best_value
from brainet_pl.network.laplace import Laplace
from brainet_pl.network.training import fit_head
from brainet_pl.network.tree import Tree
from brainet_pl.prediction.finite import finite_samples
from brainet_pl.scores import Generative, Score, Stages
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.swap import data as swap_data
from brainet_pl.swap.data import MOST_CLASSES, DataLog, input_batches, labelled_batches
from brainet_pl.tasks import Classification

if TYPE_CHECKING:
    from brainet_pl.swap.model import SwappedModel

STEPS = 6  # of a fit
COPIES = 2  # further ones of an augmented training set, each drawn anew
DROPOUTS = (0.5, 0.1)  # of features, to choose from
SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, math.inf)  # of the head beside base logits; ∞ is it alone
LEAST_GAIN = 1e-4  # nats of mean NLL: a head that gains less is not worth running
ROWS = 512  # samples predicted at a time
VALIDATED = 4096  # the same while a head is trained
MOST_COMPARED = 4096  # features up to which the comparison has a Laplace approximation: its covariance is their square


class Training(NamedTuple):
    """How a head is trained on features in memory: the settings of `fit_head`; "auto" tries several dropouts."""

    max_epochs: int
    patience: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    input_dropout: float | Literal["auto"]
    copies: int | Literal["auto"] = "auto"
    rate_decays: int = 2


class Given:
    """What `swap_head` was given for a fit. It is no part of the model: copies share it, and no file has it."""

    def __init__(
        self,
        train: Any = None,
        held: Any = None,
        num_classes: int | None = None,
        learn: Mapping[str, Any] | None = None,
    ) -> None:
        self.train, self.held, self.num_classes, self.learn = train, held, num_classes, dict(learn or {})

    def without_data(self) -> Given:
        """The settings alone, without training and held-out data."""
        return Given(None, None, self.num_classes, self.learn)

    def __deepcopy__(self, memo: Any) -> Given:
        return self

    def __reduce__(self) -> Any:
        return Given, (None, None, self.num_classes, self.learn)


class Blend(DataSizedBuffers):
    """How much the logits of the network's own layer and those of the new head count in a prediction.

    Attributes:
        base: weight of the logits of the layer that was removed.
        head: weight of the outputs of the head. 0 is the network as it was.
    """

    may_be_missing: ClassVar[bool] = True
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([0.0, 1.0]))
        self.base, self.head = 0.0, 1.0  # numbers, so that an exported graph has no branches

    @property
    def active(self) -> bool:
        """Whether base logits count."""
        return self.base != 0

    def set(self, base: float, head: float) -> None:
        """Take the weights of the network's own logits and of the head."""
        self.base, self.head = base, head
        self.weights.copy_(torch.tensor([base, head]))

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Read the weights of a file; one without them is of the head alone."""
        self.base, self.head = stored["weights"].tolist() if "weights" in stored else (0.0, 1.0)

    def forward(self, base_logits: Tensor, outputs: Tensor) -> Tensor:
        """Base logits (B, O) and outputs (…, B, O) → their weighted sum (…, B, O)."""
        return self.base * base_logits + self.head * outputs


# -- one call ---------------------------------------------------------------------------------------------------------


def fit_swapped(
    model: SwappedModel,
    train: Any,
    held: Any,
    training: Training,
    said: Mapping[str, Any],
    given: Given,
    progress: bool,
) -> Comparison:
    """Do all that `SwappedModel.fit` promises; gives the comparison with other heads.

    Args:
        model: whose head is trained, and built first where there is none.
        train: inputs and labels.
        held: inputs and labels to stop and calibrate by, or None to hold some of `train` back.
        training: settings of the training.
        said: scores, calibration, conformal and verdict, as `Predictor.attach` takes them; scores None is a density.
        given: the number of classes, and settings of the structure.
        progress: show progress bars.
    """
    classes = given.num_classes if model.head is None else model.task.num_classes
    source, other = labelled_batches(train, "train"), None if held is None else labelled_batches(held, "held")
    first = swap_data.check_first_labels(source, classes, model.columns, "train")
    if other is not None:
        swap_data.check_first_labels(other, classes, model.columns, "held")
        swap_data.refuse_same_samples(source, other)
    log = DataLog("train", classes)
    features = TrainingFeatures(source, model.backbone, columns=model.columns, observe=log)
    with tqdm(total=STEPS, disable=None if progress else True, leave=False) as bar:

        def step(name: str) -> None:
            bar.set_description(f"fit: {name}")
            bar.update()

        step("layers")
        features.choose_layers(lambda labels: Classification(classes or MOST_CLASSES).check(labels), progress)
        scores = said["scores"]
        model.attach(**{**said, "scores": [_density(model.backbone, first)] if scores is None else scores})
        step("features")
        extracted = _extract(model, features, other, log, progress)
        seen, inside = extracted.seen, extracted.held
        step("structure")
        if model.head is None:
            _build(model, seen, given, progress)
        seen = _add_copies(model, source, extracted, training.copies, progress)
        step("training")
        epochs = train_on_features(model, seen, inside, training, progress)
        few = [part.sample(SAMPLE_ROWS) for part in (seen, inside)]
        model.finalize_head(few[0], few[1] if len(inside.targets) >= LEAST else None)
        has_base = choose_blend(model, inside)
        step("scores and verdict")
        model.fit_scores(features, [score for score in model.scores if score.needs_fit], progress)
        learned = model.calibrate_on(few[0], inside)
        step("comparison")
        found = compare(model, seen, inside, has_base)
    _tell(model, epochs, learned, found, has_base)
    return found


def learn_tree(
    data: Any, backbone: FeatureExtractor, settings: HeadSettings, columns: Columns | None, learn: Mapping[str, Any]
) -> tuple[GGT | None, int, Tensor | None]:
    """The tree of the features of some data, their number, and the logits of the network's own layer."""
    if isinstance(data, GGT):
        return data, data.num_variables, None
    batches = input_batches(data, learn.get("max_rows"))
    if is_sized(batches) or not isinstance(data, Iterator):  # what can be read once is left for the features
        source = batches if is_sized(batches) else data
        TrainingFeatures(source, backbone, columns=columns).choose_layers(progress=learn.get("progress", True))
    if backbone.search is not None:
        backbone.choose(None)
    few = not settings.needs_tree and backbone.taps is None
    inputs = batches if columns is None else (inputs_of(batch, columns) for batch in batches)
    readings = extract_output(backbone, inputs, max_rows=1 if few else None)
    features = (backbone.set_scale([readings])[0] if backbone.needs_scale else readings).features
    ggt = learn_structure(features, **learn).named(backbone.names) if settings.needs_tree else None
    return ggt, features.shape[1], readings.base_logits


def _density(backbone: FeatureExtractor, inputs: Any) -> Score:
    """A density for the verdict: of all stages where the network has some, else of the features that the head reads."""
    found = make_density(None if backbone.raw else backbone.model)
    if isinstance(found, Stages) and not isinstance(inputs, BackboneOutput):
        device = next((p.device for p in backbone.parameters()), torch.device("cpu"))
        try:
            find_stages(backbone.model, backbone.layer_uses(move(rows(inputs, slice(0, 2)), device)))
        except ValueError:
            return Generative()
    return found if not isinstance(inputs, BackboneOutput) else Generative()


class _Samples(NamedTuple):
    """Features of training and of held-out samples, and the numbers of training samples that were held back."""

    seen: Extracted
    held: Extracted
    held_back: Tensor


def _extract(
    model: SwappedModel, features: TrainingFeatures, held: Iterable[Any] | None, log: DataLog, progress: bool
) -> _Samples:
    """Features of training samples and of held-out ones, whose inputs and labels are checked on the way."""
    labels = features.all(progress=progress).targets
    total = swap_data.count_classes(labels, log.num_classes)
    if model.head is None:
        model.task = Classification(total)
    model.input_scale.set(log)
    held_back = torch.empty(0, dtype=torch.int64)
    if held is None:
        held_back = swap_data.rows_to_hold_back(labels, log.hashes)
        inside = features.hold_back(held_back)
        rank_zero_info(f"held back {len(inside.targets):,} of {len(labels):,} training samples, to stop and choose by")
    else:
        other = DataLog("held", total)
        settings: dict[str, Any] = {"progress": progress, "columns": model.columns, "observe": other}
        inside = extract(model.backbone, unshuffled(held), **settings)
        fresh = swap_data.rows_not_repeated(log.hashes, other.hashes)
        inside = Extracted(inside.output[fresh], inside.targets[fresh])
        if other.sums is not None and other.sums[0]:
            model.input_scale.warn_if_mean_is_far(other.sums[1] / other.sums[0], other.sums[0], "held-out inputs")
    inside = finite_samples(inside)
    count = len(inside.targets)
    if count < swap_data.LEAST_HELD:
        raise ValueError(
            f"expected at least {swap_data.LEAST_HELD} held-out samples, got {count}: so few can't tell when to stop "
            "training; give more of them, or more training samples to hold 15 % back from"
        )
    if count < LEAST:
        rank_zero_warn(
            f"everything is chosen by {count} held-out samples, which say little: give {LEAST} at the least, better 200"
        )
    return _Samples(finite_samples(features.all()), inside, held_back)


def _add_copies(
    model: SwappedModel, source: Iterable[Any], samples: _Samples, copies: int | Literal["auto"], progress: bool
) -> Extracted:
    """Training features with those of further copies of the samples, which their data set augments anew."""
    if copies == "auto":
        copies = COPIES if swap_data.is_augmented(source, model.columns) else 0
        if copies:
            rank_zero_info(f"the training set augments its samples: {copies} further copies of each are extracted")
    parts = [samples.seen]
    for seed in range(1, copies + 1):
        with isolated_rng(seed):
            settings: dict[str, Any] = {"progress": progress, "columns": model.columns}
            found = extract(model.backbone, unshuffled(source, seed=seed), **settings)
        kept = torch.ones(len(found.targets), dtype=torch.bool)
        kept[samples.held_back] = False
        parts.append(finite_samples(Extracted(found.output[kept], found.targets[kept])))
    if len(parts) == 1:
        return samples.seen
    return Extracted(BackboneOutput.concat([p.output for p in parts]), torch.cat([p.targets for p in parts]))


def _build(model: SwappedModel, seen: Extracted, given: Given, progress: bool) -> None:
    """Build the head for extracted features, wired by their structure."""
    settings, base, task = model.settings or Tree(), seen.output.base_logits, model.task
    helps = base is not None and task.base_fits(base.shape[1]) and task.base_helps(base, task.check(seen.targets))
    tree = None
    if settings.needs_tree:
        tree = learn_structure(seen.features, **{"progress": progress, **given.learn}).named(model.backbone.names)
    model.build_head(settings, seen.features.shape[1], tree, helps)
    model.settings = settings.resolve_skip(helps)


def _tell(model: SwappedModel, epochs: int, learned: Mapping[str, float], found: Comparison, has_base: bool) -> None:
    """Say in a few lines what a fit found."""
    line = f"trained {epochs} epochs, temperature {learned.get('temperature', 1.0):.3g}"
    if has_base and not model.blend.active:
        line += "; predicts by the new head alone"
    elif has_base and not model.blend.head:
        line += "; predicts by the network's own layer, which the new head does not beat by more than a standard error"
    elif has_base:
        line += f"; predicts by the network's own logits and {model.blend.head:g} times those of the new head"
    for text in [line, str(found), *([] if model.expected is None else [str(model.expected)])]:
        rank_zero_info(text)


def train_on_features(model: SwappedModel, seen: Extracted, held: Extracted, training: Training, progress: bool) -> int:
    """Train the head of a model on features; it ends with the weights that predict `held` best. Gives the epochs."""
    data, checked, head = model.head_inputs(seen), model.head_inputs(held), model.head
    small = head.num_params <= SMALL and data.x.device.type == "cpu"

    def validate() -> float:
        total = 0.0
        for i in range(0, len(checked.x), VALIDATED):
            few = slice(i, i + VALIDATED)
            base_logits = None if checked.base_logits is None else checked.base_logits[few]
            with isolated_rng(0):  # the same sub-networks each time
                outputs, weights = run_head(head, checked.x[few], model.num_passes, base_logits)
            total += float(model.task.nll(model.task.predictive(outputs, weights), checked.target[few]).sum())
        return total / len(checked.x)

    start, tried = copy.deepcopy(head.state_dict()), []
    with limit_threads(1 if small else torch.get_num_threads()):
        for rate in DROPOUTS if training.input_dropout == "auto" else (training.input_dropout,):
            head.load_state_dict(start)
            settings: dict[str, Any] = training._replace(input_dropout=rate)._asdict()
            del settings["copies"]
            epochs = fit_head(
                head,
                data.x,
                data.target,
                model.task.loss,
                validate,
                base_logits=data.base_logits,
                progress=progress,
                **settings,
            )
            head.eval()
            with torch.no_grad():
                tried.append((validate(), epochs, copy.deepcopy(head.state_dict())))
    _, epochs, state = min(tried, key=lambda one: math.inf if math.isnan(one[0]) else one[0])
    head.load_state_dict(state)
    return epochs


@torch.no_grad()
def choose_blend(model: SwappedModel, held: Extracted) -> bool:
    """Weigh the head against the network's own logits on held-out samples; gives whether there were such logits.

    Logits are (base + α · head) / τ, each α with the τ that is best for it. α is 0, the network with a temperature,
    unless another predicts better by more than a standard error, sample by sample.
    """
    task, base_logits = model.task, held.output.base_logits
    model.blend.set(0.0, 1.0)
    if base_logits is None or not task.base_fits(base_logits.shape[1]):
        return False
    target = task.check(held.targets)
    if not task.base_helps(base_logits, target):
        return False
    base, outputs = task.base_outputs(base_logits), predict_rows(model, held)
    losses = {}
    for share in SHARES:
        if math.isinf(share):
            values = outputs.values
        else:
            values = base.unsqueeze(0) if share == 0 else base + share * outputs.values
        weights = None if share == 0 else outputs.weights
        losses[share] = tempered_nll(task, task.predictive(values, weights), target)
    chosen, nll = best_value(losses, usual=0.0)
    if nll[0.0] - nll[chosen] < LEAST_GAIN:
        chosen = 0.0
    model.blend.set(*((0.0, 1.0) if math.isinf(chosen) else (1.0, chosen)))
    return True


@torch.no_grad()
def predict_rows(model: SwappedModel, data: Extracted) -> Outputs:
    """Outputs (T, N, O) of a model for extracted samples, before calibration, on the CPU."""
    model.eval()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    found = []
    for i in range(0, len(data.targets), ROWS):
        with isolated_rng(0):  # the same sub-networks for all batches
            found.append(model.head_outputs(data.output[i : i + ROWS].to(device), model.num_passes))
    weights = found[0].weights
    return Outputs(torch.cat([part.values.cpu() for part in found], dim=1), None if weights is None else weights.cpu())


def tempered_nll(task: Classification, predicted: Tensor, target: Tensor) -> Tensor:
    """The NLL (N,) of probabilities (N, C) at their best temperature for these samples."""
    if bool(predicted.isfinite().all()):
        predicted = scale(predicted, fit_temperature(predicted, target))
    return task.nll(predicted, target).double()


class Comparison(NamedTuple):
    """The mean NLL of held-out samples by who predicts them, each at its best temperature, and what the head gains.

    Attributes:
        nll: name → mean NLL: "swapped", and where they could be had "network" (its own layer), and on the same features
            "linear" (a linear layer) and "laplace" (one with a Gaussian over its weights).
        gains: name of another → by how much the swapped model's NLL is lower, and the standard error of that.
        samples: number of held-out samples.
    """

    nll: dict[str, float]
    gains: dict[str, tuple[float, float]]
    samples: int

    def __str__(self) -> str:
        """One line for a user.

        >>> print(Comparison({"swapped": 0.25, "linear": 0.262}, {"linear": (0.012, 0.004)}, 300))
        NLL of 300 held-out samples, each at its best temperature: swapped 0.250; linear layer on the same features \
0.262 (gained 0.012 ± 0.004)
        """
        titles = {
            "network": "the network's own layer",
            "linear": "linear layer on the same features",
            "laplace": "the same with a Laplace approximation",
        }
        others = [
            f"{titles[name]} {self.nll[name]:.3f} (gained {gain:.3f} ± {error:.3f})"
            for name, (gain, error) in self.gains.items()
        ]
        start = f"NLL of {self.samples:,} held-out samples, each at its best temperature"
        return f"{start}: " + "; ".join([f"swapped {self.nll['swapped']:.3f}", *others])


@torch.no_grad()
def compare(model: SwappedModel, seen: Extracted, held: Extracted, has_base: bool) -> Comparison:
    """Compare a model on held-out samples with the network's own layer, and linear layers on the same features."""
    task, target = model.task, model.task.check(held.targets)
    outputs = predict_rows(model, held)
    predicted = {"swapped": task.predictive(outputs.values, outputs.weights)}
    if has_base and held.output.base_logits is not None:
        own: Any = task.base_predicted(held.output.base_logits)
        predicted["network"] = own
    linear = task.linear(seen.features, seen.targets)
    if linear is not None:
        predicted["linear"] = linear(held.features)
        if seen.features.shape[1] <= MOST_COMPARED:
            predicted["laplace"] = _predict_by_laplace(model, seen.sample(SAMPLE_ROWS), held)
    losses = {name: tempered_nll(task, values, target) for name, values in predicted.items()}
    gaps = {name: loss - losses["swapped"] for name, loss in losses.items() if name != "swapped"}
    gains = {name: (float(gap.mean()), float(gap.std()) / math.sqrt(len(gap))) for name, gap in gaps.items()}
    return Comparison({name: float(loss.mean()) for name, loss in losses.items()}, gains, len(target))


def _predict_by_laplace(model: SwappedModel, seen: Extracted, held: Extracted) -> Tensor:
    """Probabilities (N, C) of held-out samples by a linear layer whose weights have a Gaussian, fitted to samples."""
    task, target = model.task, model.task.check(seen.targets)
    head = Laplace().build(seen.features.shape[1], task.num_classes)
    inside = HeadInputs(held.features, task.check(held.targets))

    def nll(outputs: Tensor, weights: Tensor | None, targets: Tensor) -> Tensor:
        return task.nll(task.predictive(outputs, weights), targets)

    def validate() -> float:
        return float(nll(head(inside.x).unsqueeze(0), None, inside.target).mean())

    settings = {"max_epochs": 100, "patience": 5, "batch_size": 128, "learning_rate": 3e-3}
    with torch.enable_grad():
        fit_head(head, seen.features, target, task.loss, validate, **settings)  # type: ignore[arg-type]
    few = inside if len(inside.x) >= LEAST else None
    head.eval().finalize(HeadInputs(seen.features, target), few, nll, model.num_passes)
    outputs = head.passes(inside.x, model.num_passes)
    return task.predictive(outputs.values, outputs.weights)
