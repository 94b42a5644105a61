"""`swap_head(…).fit()`: the road from a user's data to the engine, and what is said of the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from brainet_pl._utils.framework import rank_zero_info, rank_zero_warn
from brainet_pl._utils.rng import isolated_rng
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones.batches import move, rows
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.stages import find_stages
from brainet_pl.calibration.density import make_density
from brainet_pl.features.extraction import Extracted, extract, inputs_and_target, unshuffled
from brainet_pl.features.training import SAMPLE_ROWS, TrainingFeatures
from brainet_pl.fitting.blend import choose_blend
from brainet_pl.fitting.build import build_head
from brainet_pl.fitting.comparison import Comparison, compare
from brainet_pl.fitting.samples import LEAST_HELD, Samples, rows_of, split_held_out, take_from_training
from brainet_pl.fitting.scores import fit_scores
from brainet_pl.fitting.settle import Settling, answer_rows, settle
from brainet_pl.fitting.structure import learn_tree
from brainet_pl.fitting.timeline import Timeline
from brainet_pl.fitting.train import train_best
from brainet_pl.network.base import MIN_VALIDATION
from brainet_pl.network.training import TrainingSettings
from brainet_pl.network.tree import Tree
from brainet_pl.prediction.finite import finite_rows, finite_samples
from brainet_pl.scores import Generative, Score, Stages
from brainet_pl.scores.robust import name_rows
from brainet_pl.swap import data as swap_data
from brainet_pl.swap.data import Classes, DataLog, labelled_batches
from brainet_pl.tasks import Classification, MultiLabel

if TYPE_CHECKING:
    from brainet_pl.swap.model import SwappedModel

STEPS = 6  # of the progress bar of a fit
COPIES = 2  # further readings of an augmented training set, each drawn anew


class Plan(NamedTuple):
    """What `SwappedModel.fit` was asked for.

    Attributes:
        candidates: settings of the training; of several, those are kept that predict held-out samples best.
        copies: further readings of the training samples, or "auto" for `COPIES` where the data set augments them.
        parts: scores, calibration, conformal and verdict, as `Predictor.attach` takes them; scores None is a density.
    """

    candidates: Sequence[TrainingSettings]
    copies: int | Literal["auto"]
    parts: Mapping[str, Any]


class Given:
    """What `swap_head` was given for a fit. It is no part of the model: copies share it, and no file has it."""

    def __init__(
        self,
        train: Any = None,
        held: Any = None,
        classes: Classes | Literal["MultiLabel"] = None,
        learn: Mapping[str, Any] | None = None,
    ) -> None:
        self.train, self.held, self.classes, self.learn = train, held, classes, dict(learn or {})

    def labels(self, model: SwappedModel, loader: Iterable[Any]) -> Classes:
        """What labels are, by what was said, or by the first of them."""
        if model.head is not None:
            return model.task if isinstance(model.task, MultiLabel) else model.task.num_classes
        if not isinstance(self.classes, str):
            return self.classes
        for batch in unshuffled(loader):
            target = torch.as_tensor(inputs_and_target(batch, model.columns)[1])
            return MultiLabel(target.shape[1] if target.dim() == 2 else 1)
        return None

    def without_data(self) -> Given:
        """The settings alone, without training and held-out data."""
        return Given(None, None, self.classes, self.learn)

    def __deepcopy__(self, memo: Any) -> Given:
        return self

    def __reduce__(self) -> Any:
        return Given, (None, None, self.classes, self.learn)


def fit_swapped(model: SwappedModel, train: Any, held: Any, plan: Plan, given: Given, progress: bool) -> Comparison:
    """Do all that `SwappedModel.fit` promises; gives the comparison with other heads.

    Args:
        model: whose head is trained, and built first where there is none.
        train: inputs and labels.
        held: inputs and labels to stop and calibrate by, or None to hold some of `train` back.
        plan: what was asked for.
        given: what labels are, and settings of the structure.
        progress: show progress bars.
    """
    loader = labelled_batches(train, "train")
    classes = given.labels(model, loader)
    held_loader = None if held is None else labelled_batches(held, "held")
    first_inputs = swap_data.check_first_labels(loader, classes, model.columns, "train")
    if held_loader is not None:
        swap_data.check_first_labels(held_loader, classes, model.columns, "held")
        swap_data.refuse_same_samples(loader, held_loader)
    if isinstance(classes, MultiLabel):
        model.task = classes
    log = DataLog("train", classes)
    features = TrainingFeatures(loader, model.backbone, columns=model.columns, observe=log)
    timeline = Timeline()
    with tqdm(total=STEPS, disable=None if progress else True, leave=False) as bar:

        def step(name: str) -> None:
            bar.set_description(f"fit: {name}")
            bar.update()
            if progress and bar.disable:  # nobody sees the bar, as where the output goes to a file
                rank_zero_info(f"fit: {name}")
            timeline.begin(name)

        step("network")
        features.choose_layers(swap_data.first_task(classes).check, progress)
        parts = dict(plan.parts)
        if parts["scores"] is None:
            parts["scores"] = [_density(model.backbone, first_inputs)]
        model.attach(**parts)
        samples, taken = _extract(model, features, held_loader, log, progress)
        training = _add_copies(model, loader, samples.train, taken, plan.copies, progress)
        step("structure")
        if model.head is None:
            _build(model, samples.train, given, progress)
        step("training")
        settling, sample = Settling(model), samples.train.sample(SAMPLE_ROWS)
        data, select = model.head_inputs(training), model.head_inputs(samples.select)
        passes = model.num_passes
        epochs = train_best(model.head, model.task, data, select, plan.candidates, passes=passes, progress=progress)
        step("choices")
        settling.choose(sample, samples.select.sample(SAMPLE_ROWS))
        task = model.task
        layer = task.linear(training.features, training.targets) if isinstance(task, Classification) else None
        choose_blend(model, layer, samples.select)
        step("scores and verdict")
        fit_scores(model, features, progress=progress)
        learned = settle(model, answer_rows(model, samples.calibrate))
        step("comparison")
        comparison = compare(model, layer, samples.calibrate)
    _report(model, epochs, learned, comparison)
    rank_zero_info(f"where the time went: {timeline.describe()}")
    return comparison


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


def _extract(
    model: SwappedModel, features: TrainingFeatures, held: Iterable[Any] | None, log: DataLog, progress: bool
) -> tuple[Samples, Tensor]:
    """Features of training and held-out samples by role, whose inputs and labels are checked on the way.

    Gives also the numbers of the training samples that are not trained on. Samples with NaN or infinity are left out.
    """
    labels = features.all(progress=progress).targets
    task = swap_data.task_of(labels, log.classes)
    if model.head is None:
        model.task = task
    model.input_scale.set(log)
    given = None if held is None else _extract_held_out(model, held, log, progress)
    if given is not None:
        _check_count(len(given.targets))
    finite = _check_finite(features.all(), "training")
    may_leave = swap_data.rows_not_twice(log.hashes) & finite
    held_out, select = taken = take_from_training(labels, may_leave, 0 if given is None else len(given.targets))
    left_out = torch.cat([taken.all, (~finite).nonzero()[:, 0]])
    removed = features.hold_back(left_out)
    if given is None:
        given = rows_of(removed, torch.arange(len(held_out)))
        _check_count(len(given.targets))
    if len(select):
        chosen = rows_of(removed, torch.arange(len(held_out), len(taken.all)))
        samples = Samples(features.all(), chosen, given)
    else:
        samples = Samples(features.all(), *split_held_out(given))
    _report_roles(samples, len(labels), len(held_out), len(select))
    return samples, left_out


def _check_finite(samples: Extracted, kind: str) -> Tensor:
    """Which samples have finite features, (N,) of booleans; a warning names the others, which are left out."""
    finite = finite_rows(samples.output)
    bad = (~finite).nonzero()[:, 0]
    if len(bad) == len(finite):
        raise ValueError(
            f"expected finite features of {kind} samples, got NaN or infinity in all {len(finite):,}: check the inputs "
            "and the weights of the network"
        )
    if len(bad):
        rank_zero_warn(
            f"left out {len(bad):,} of {len(finite):,} {kind} samples, {name_rows(bad)}: their features have NaN or "
            "infinity; correct or drop them"
        )
    return finite


def _report_roles(samples: Samples, total: int, held_back: int, selecting: int) -> None:
    """Say which samples choose and which calibrate."""
    select, calibrate = len(samples.select.targets), len(samples.calibrate.targets)
    given = f"held back {held_back:,} of {total:,} training samples" if held_back else "held-out samples"
    if selecting:
        rank_zero_info(
            f"{given}: {calibrate:,} calibrate; {select:,} further training samples choose the epoch and the blend"
        )
    else:
        rank_zero_info(f"{given}: {select:,} choose the epoch and the blend, {calibrate:,} others calibrate")


def _extract_held_out(model: SwappedModel, held: Iterable[Any], log: DataLog, progress: bool) -> Extracted:
    """Features of the held-out samples that are not among the training samples."""
    task = model.task
    held_log = DataLog("held", task if isinstance(task, MultiLabel) else task.num_classes)
    held_out = extract(model.backbone, unshuffled(held), progress=progress, columns=model.columns, observe=held_log)
    fresh = swap_data.rows_not_repeated(log.hashes, held_log.hashes) & _check_finite(held_out, "held-out")
    if held_log.sums is not None and held_log.sums[0]:
        count, total, _ = held_log.sums
        model.input_scale.warn_if_mean_is_far(total / count, count, "held-out inputs")
    return Extracted(held_out.output[fresh], held_out.targets[fresh])


def _check_count(count: int) -> None:
    """Refuse held-out samples that are too few to stop by, and warn of few."""
    if count < LEAST_HELD:
        raise ValueError(
            f"expected at least {LEAST_HELD} held-out samples, got {count}: so few can't tell how sure a "
            "prediction may be; give more of them, or more training samples to hold 15 % back from"
        )
    if count < MIN_VALIDATION:
        rank_zero_warn(
            f"probabilities and verdict go by {count} held-out samples, which say little: give {MIN_VALIDATION} at the "
            "least, better 200"
        )


def _build(model: SwappedModel, training: Extracted, given: Given, progress: bool) -> None:
    """Build the head for extracted features, wired by their structure."""
    settings = model.settings or Tree()
    tree = None
    if settings.needs_tree:
        tree = learn_tree(training.features, given.learn, model.backbone.names, progress)
    build_head(model, settings, tree, training)
    model.settings = settings.resolve_skip(model.has_base_logits)


def _add_copies(
    model: SwappedModel,
    loader: Iterable[Any],
    training: Extracted,
    taken: Tensor,
    copies: int | Literal["auto"],
    progress: bool,
) -> Extracted:
    """Training features with those of further copies of the samples, which their data set augments anew."""
    if copies == "auto":
        copies = COPIES if swap_data.is_augmented(loader, model.columns) else 0
        if copies:
            rank_zero_info(f"the training set augments its samples: {copies} further copies of each are extracted")
    if not copies:
        return training
    parts = [training]
    for seed in range(1, copies + 1):
        with isolated_rng(seed):
            batches = unshuffled(loader, seed=seed)
            copy = extract(model.backbone, batches, progress=progress, columns=model.columns)
        kept = torch.ones(len(copy.targets), dtype=torch.bool)
        kept[taken] = False
        parts.append(finite_samples(Extracted(copy.output[kept], copy.targets[kept])))
    outputs = BackboneOutput.concat([part.output for part in parts])
    return Extracted(outputs, torch.cat([part.targets for part in parts]))


def _report(model: SwappedModel, epochs: int, learned: Mapping[str, float], comparison: Comparison) -> None:
    """Say in a few lines what a fit learned."""
    rank_zero_info(f"trained {epochs} epochs, temperature {learned.get('temperature', 1.0):.3g}")
    rank_zero_info(str(comparison))
    if model.expected is not None:
        rank_zero_info(str(model.expected))
