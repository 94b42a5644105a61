"""What is behind the estimators: a `Predictor` of rows of numbers, and how it is fitted to a table."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from msgspec import Meta, Struct
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.stored import Stored
from brainet_pl._utils.tensor_file import check_build, check_sizes
from brainet_pl._utils.warn import warn
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.calibration import TemperatureScaling
from brainet_pl.calibration.temperature import scale
from brainet_pl.explain import Explanation, Units
from brainet_pl.explain.road import explain_passes
from brainet_pl.fitting.settle import Answered, settle
from brainet_pl.fitting.structure import learn_tree
from brainet_pl.network import BRAINetHead, HeadSettings
from brainet_pl.network.base import Head, Outputs
from brainet_pl.network.stack import HeadStack
from brainet_pl.network.training import TrainingSettings
from brainet_pl.network.tree import Tree, smallest_budget
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import KNN, Combined, Generative, Score, ScoreContext
from brainet_pl.scores.density import density_threshold
from brainet_pl.scores.fitting import fit_score, without_rows
from brainet_pl.scores.reference import p_values
from brainet_pl.scores.robust import far_rows, warn_of_far_rows
from brainet_pl.sklearn.encoding import DIRECTIONS, MOST_COLUMNS, Bins, Screen, Standardize, screen_folds
from brainet_pl.sklearn.rows import StoredRows
from brainet_pl.sklearn.training import Fold, Rows, Trained, train_folds
from brainet_pl.storage.container import Count
from brainet_pl.structure import GGT
from brainet_pl.tasks import Classification, MultiLabel, Task
from brainet_pl.tasks.passes import Passes

DRAW_SEED = 0  # of the sub-networks of a prediction: the same rows always give the same numbers
DENSITY_THRESHOLD = 0.02  # nats: a density wants more edges than a network of dense layers
BATCH = 4096  # rows predicted at a time
MOST_EXPECTED = 2000  # rows by which the average of all members is compared with those of a fold
FINAL_BATCH = 256  # rows of a step of a regression, once small batches gain no more
NEIGHBOURS = 5  # to the last of which a row's distance counts
BINS = 6  # of a column
MOST_WITH_BINS = 300  # columns and bins up to which bins are read: a structure of more takes long to learn
LEAST_SHARPER = 0.3  # of a temperature, below which the average of folds does not get
STRUCTURE = 0.15  # of the time that is left, for each tree
AFTERWARDS = 0.1  # of all the time, for what comes after training
PULL = 4.0  # rows that draw the weights of two kinds of members to a half
SHARES = [i / 20 for i in range(1, 20)]  # of the first kind, to choose from
VALIDATION_PASSES = 8  # sub-networks that a validation while training averages
PARTS = 5  # of the rows that an only fold holds back, each calibrated by the others


class Members(Head):
    """Networks on the same features, whose passes are joined; some read the first features alone.

    Args:
        heads: networks, as many of each fold, in the order of the folds.
        folds: number of folds.
        masked: whether each fold reads other features.

    Attributes:
        chosen: The fold whose members alone predict; None is all.
        masks: (F, d) the features that the members of each fold read, as ones; (0, d) where all read all.
        shares: (F, K) how much the K members of each fold count; those of a fold add up to 1.
    """

    masks: Tensor
    shares: Tensor

    def __init__(self, heads: Sequence[BRAINetHead], folds: int, masked: bool = False) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self.ggt, self.folds = heads[0].ggt, folds
        self.chosen: int | None = None
        kinds = len(heads) // folds
        self.register_buffer("masks", torch.ones(folds if masked else 0, heads[-1].in_features))
        self.register_buffer("shares", torch.full((folds, kinds), 1 / kinds))

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, d) → outputs (M, B, O) of all members."""
        read = zip(self._heads, self._features(x), strict=True)
        return torch.cat([head(features).unflatten(0, (-1, len(x))) for head, features in read])

    def _features(self, x: Tensor) -> Iterator[Tensor]:
        """What each of the members that predict reads of features (B, d)."""
        kinds = self.shares.shape[1]
        for place, head in enumerate(self._heads):
            read = x[:, : head.in_features]
            if len(self.masks):
                fold = place // kinds if self.chosen is None else self.chosen
                read = read * self.masks[fold, : head.in_features].to(read.dtype)
            yield read

    def of_fold(self, number: int) -> list[BRAINetHead]:
        """The members of one fold, one of each kind."""
        kinds = self.shares.shape[1]
        heads: list[BRAINetHead] = list(self.heads)  # type: ignore[arg-type]
        return heads[number * kinds : (number + 1) * kinds]

    @property
    def _heads(self) -> list[BRAINetHead]:
        """The members that predict: all, or those of the fold that was chosen."""
        return list(self.heads) if self.chosen is None else self.of_fold(self.chosen)  # type: ignore[arg-type]

    @property
    def trees(self) -> list[GGT]:
        """The trees of the kinds of members."""
        return [head.ggt for head in self._heads[: self.shares.shape[1]] if head.ggt is not None]

    @contextmanager
    def fixed_draws(self, count: int, seed: int) -> Iterator[None]:
        """Within it, every member takes the sub-networks that it draws when all begin at `seed`."""
        with ExitStack() as stack, isolated_rng(seed):
            for head, each in zip(self._heads, self._passes_of_each(count), strict=True):
                drawn = 0 if head.averages_all(each) else int(torch.randint(2**62, (1,)))  # as `stochastic` does
                stack.enter_context(head.fixed_draws(each, drawn))
            yield

    def _passes_of_each(self, count: int) -> list[int]:
        """How many passes each member has of `count` in all; one with few sub-networks averages all of them."""
        heads = self._heads
        return [count if h.ggt.num_subnetworks <= count else math.ceil(count / len(heads)) for h in heads]

    def passes(self, x: Tensor, count: int) -> Outputs:
        """Features (B, d) → outputs (T, B, O), as many of each member."""
        heads = self._heads
        given = zip(heads, self._features(x), self._passes_of_each(count), strict=True)
        found = [head.passes(features, each) for head, features, each in given]
        shares = self.shares.flatten() / self.folds if self.chosen is None else self.shares[self.chosen]
        weights = [share * _all_weights(one) for one, share in zip(found, shares, strict=True)]
        return Outputs(torch.cat([one.values for one in found]), torch.cat(weights))


def _all_weights(passes: Outputs | Passes) -> Tensor:
    values, weights = passes.values if isinstance(passes, Outputs) else passes.outputs, passes.weights
    return values.new_full((len(values),), 1 / len(values)) if weights is None else weights


class PerFold(Score):
    """A score of columns that is fitted to the training rows of each fold: their mean, or that of the fold `chosen`.

    Args:
        folds: Number of folds.
        columns: Number of columns that are read, the first of the features.
        kind: Which score: "Generative", a density, or "KNN", the distance to neighbours.
    """

    units: ClassVar[Mapping[str, str]] = {"generative": "nats"}

    def __init__(self, folds: int, columns: int, kind: Literal["Generative", "KNN"] = "Generative") -> None:
        super().__init__()
        checks.one_of("kind", kind, ("Generative", "KNN"))
        self.folds, self.columns, self.kind = folds, columns, kind
        self.of = nn.ModuleList(_score_of_columns(kind) for _ in range(folds))
        first = _score_of_columns(kind)
        name = next(iter(first.units))  # its others need the prediction of all members
        self.units = {name: first.units[name]}  # type: ignore[misc]
        self.chosen: int | None = None

    @property
    def key(self) -> str:
        """Gives the name of the class of its scores."""
        return self.kind

    def fit_fold(self, number: int, context: ScoreContext, features: Tensor, labels: Tensor) -> None:
        """Fit the score of one fold to its training rows, features (N, d) and labels (N,)."""
        score = self.of[number]
        assert isinstance(score, Score)
        score.set_context(context)
        fit_score(score, features[:, : self.columns], labels)
        self.set_ready(all(one.ready for one in self.of))

    def without_classes(self, passes: Passes, hidden: Tensor) -> Tensor:
        """The score (K, B) of its rows by the training rows of the other classes."""
        passes = replace(passes, features=passes.features[:, : self.columns])
        return torch.stack([one.without_classes(passes, hidden) for one in self._scores]).mean(dim=0)  # type: ignore[misc]

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """One set of passes → the score (B,) of its rows."""
        passes = replace(passes, features=passes.features[:, : self.columns])
        name = next(iter(self.units))
        return {name: torch.stack([one(passes)[name] for one in self._scores]).mean(dim=0)}

    @property
    def densities(self) -> list[Score]:
        """Those of all folds, where they are densities."""
        return [one for score in self._scores for one in score.densities]

    @property
    def _scores(self) -> list[Score]:
        """Those of all folds, or of the fold that was chosen."""
        return list(self.of) if self.chosen is None else [self.of[self.chosen]]  # type: ignore[arg-type, list-item]


def _score_of_columns(kind: str) -> Score:
    if kind == "KNN":
        return KNN(k=NEIGHBOURS, normalize=False)
    return Generative(threshold=None, normalize=False)


class Shapes(NamedTuple):
    """What the tensors of a `TablePredictor` have room for.

    Attributes:
        inputs: columns of a row.
        columns: those that are read, and directions.
        directions: in which all columns vary most.
        parts: bins of all columns that networks read beside them; 0 for none.
        folds: folds of rows, each held back by the members of the fold.
        held: rows held back in all.
        outputs: columns of a prediction.
    """

    inputs: Count
    columns: Count
    directions: Annotated[int, Meta(ge=0)]
    parts: Annotated[int, Meta(ge=0)]
    folds: Count
    held: Annotated[int, Meta(ge=0)]
    outputs: Count


class StoredTable(Struct, forbid_unknown_fields=True):
    """What a `TablePredictor` is built from: the trees of its heads, in the form of `GGT.to_dict`, and its sizes."""

    trees: list[dict[str, Any]]
    shapes: Shapes
    passes: Count


class StoredEstimator(Stored):
    """The file of an estimator, whose attributes after `fit` these are; `network` and `weights` are its predictor's."""

    settings: dict[str, Any]
    encoder: StoredRows
    inputs: Count
    named: list[str] | None
    epochs: int
    losses: list[float]
    importances: list[float] | None
    network: StoredTable
    weights: dict[str, Tensor]
    digest: str
    classes: list[Any] | None = None
    classes_dtype: str = ""


class TablePredictor(Predictor):
    """A predictor of rows of numbers: members, each with a fold of the rows held back, and what they said of these.

    Every row of the training data was held back by the members of one fold. What these say of it is what calibration,
    sets, intervals and p-values go by: they are learned from all rows, none of which had a part in its own prediction.

    Args:
        task: a classification or a regression.
        heads: those of the first fold, then those of the second, and so on; the first of each reads columns alone.
        shapes: how much there is of everything.
        passes: sub-networks that a prediction averages.
    """

    head: Members
    sharper: Tensor
    held_predicted: Tensor
    held_target: Tensor

    def __init__(self, task: Task, heads: Sequence[BRAINetHead], shapes: Shapes, passes: int) -> None:
        screen = Screen(shapes.columns - shapes.directions, shapes.inputs, shapes.directions)
        encoding = nn.Sequential(screen, Bins(shapes.parts), Standardize(shapes.columns + shapes.parts))
        is_classes, several = isinstance(task, Classification), isinstance(task, MultiLabel)
        doubt = ["entropy"] if is_classes else ["joint_energy"] if several else []
        scores = [PerFold(shapes.folds, shapes.columns, kind) for kind in ("Generative", "KNN")]
        super().__init__(
            FeatureExtractor(encoding),
            task,
            Members(heads, shapes.folds, masked=bool(shapes.directions)),
            passes,
            scores=[*scores, Combined(of=[*doubt, "generative", "knn"])],
            calibration="TemperatureScaling" if is_classes else "LabelScaling" if several else None,
        )
        self.shapes = shapes
        self.held_rows: Tensor | None = None  # their numbers in the fit that this was made by
        self.fold_scores = [score for score in self.scores if isinstance(score, PerFold)]
        self.register_buffer("sharper", torch.ones(()))  # factor of the temperature for the average of all folds
        self.register_buffer("held_predicted", torch.zeros(shapes.held, shapes.outputs))
        held = torch.zeros(shapes.held, shapes.outputs) if several else torch.zeros(shapes.held)
        self.register_buffer("held_target", held.to(torch.long if is_classes else torch.float64))

    @contextmanager
    def fold(self, number: int) -> Iterator[None]:
        """Within it, only the members of this fold predict, and scores are those of its training rows."""
        self._choose(number)
        try:
            yield
        finally:
            self._choose(None)

    def _choose(self, number: int | None) -> None:
        self.head.chosen = number
        for score in self.fold_scores:
            score.chosen = number

    def all_scores(self, passes: Passes) -> dict[str, Tensor]:
        """Every score (B,) of a prediction by name, as a fold gives it, and the mean over folds.

        What the members of one fold say of rows that they held back is what these are compared with. The average of all
        members is less sure than they are, so that its entropy would call too many rows unknown.
        """
        if self.head.chosen is not None:
            return super().all_scores(passes)
        found = self.scores_of_folds(passes)
        return {name: torch.stack([scores[name] for scores in found]).mean(dim=0) for name in found[0]}

    def scores_of_folds(self, passes: Passes) -> list[dict[str, Tensor]]:
        """Every score (B,) of a prediction by name, as the members of each fold give it."""
        parts = zip(passes.outputs.chunk(self.head.folds), _all_weights(passes).chunk(self.head.folds), strict=True)
        found = []
        for number, (outputs, weights) in enumerate(parts):
            weights = weights / weights.sum()
            predicted, scores = self.task.predictive(outputs, weights), self.task.scores(outputs, weights)
            one = replace(passes, outputs=outputs, weights=weights, predicted=predicted, scores=scores)
            with self.fold(number):
                found.append(super().all_scores(one))
        return found

    @torch.no_grad()
    def final_rows(self, rows: Tensor) -> Tensor:
        """Rows (N, d) → calibrated probabilities (N, C), or means and variances (N, 2); always the same numbers."""
        return torch.cat([self.calibrated(passes, {}) for passes in self._passes_of(rows)])

    def _passes_of(self, rows: Tensor) -> Iterator[Passes]:
        """Passes of rows (N, d), a batch at a time, with the same sub-networks for all batches."""
        with evaluation_mode(self):
            for part in rows.split(BATCH):  # type: ignore[no-untyped-call]
                with isolated_rng(DRAW_SEED):
                    yield self.passes(part)

    @torch.no_grad()
    def known_p(self, rows: Tensor) -> Tensor:
        """The conformal p-value (N,) of rows (N, d): (1 + #{held back at least as strange}) / (H + 1)."""
        self._require_held("known_p")
        if len(self.held_target) + 1 < 1 / self.verdict.level:
            warn(
                f"no row can be called unknown at {self.verdict.level:.0%}: its p-value is no finer than "
                f"1/{len(self.held_target) + 1}, by the rows held back in fit; fit with more rows, or a larger "
                "validation_fraction"
            )
        p = []
        for passes in self._passes_of(rows):
            scores = self.all_scores(passes)
            name = self.scores.verdict_score(scores, self.verdict)
            assert name is not None
            p.append(p_values(scores[name], self.scores.reference[name]))
        return torch.cat(p)

    @torch.no_grad()
    def explain(self, rows: Tensor, units: Sequence[Units]) -> Explanation:
        """Why rows (N, d) look known or unknown, by columns as a user knows them."""
        parts = []
        for passes in self._passes_of(rows):
            parts.append(explain_passes(self, passes, units, members=self.scores_of_folds(passes)))
        return Explanation.concat(parts)

    @torch.no_grad()
    def answered(self, rows: Tensor) -> Tensor:
        """Whether the answer to each row (N, d) keeps what was promised, (N,)."""
        if self.risk.promise is None:
            raise ValueError(
                "expected a promise to answer by, got none: make one first, brainet_pl.risk_control(model, error=0.02)"
            )
        return torch.cat([self.describe(passes)["answered"] for passes in self._passes_of(rows)])

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Predictions and targets of the rows held back."""
        self._require_held("predict_set and predict_interval")
        return self.held_predicted, self.held_target

    def _require_held(self, who: str) -> None:
        if not len(self.held_target):
            raise ValueError(
                f"expected rows held back in fit for {who}, got none: fit with at least 40 rows and a "
                "validation_fraction above 0"
            )

    @torch.no_grad()
    def hold(self, rows: Tensor, target: Tensor, folds: Sequence[Fold]) -> None:
        """Weigh kinds of members and calibrate by what those of each fold say of its rows, and remember it.

        Args:
            rows: (N, d) all training rows.
            target: (N,) their targets.
            folds: the roles of the rows in each fold.
        """
        with evaluation_mode(self):
            self._weigh(rows, target, folds)
            answered: list[Answered] = []
            settle(self, self._kept_in(answered, self._answer_folds(rows, target, folds)))
            few = torch.randperm(len(rows), generator=torch.Generator().manual_seed(DRAW_SEED))[:MOST_EXPECTED]
            factor = self._sharpen_average(rows[few])
        predicted = torch.cat([answer.passes.predicted for answer in answered])
        held = torch.cat([fold.held for fold in folds])
        number = torch.repeat_interleave(torch.arange(len(folds)), torch.tensor([len(fold.held) for fold in folds]))
        part = number if len(folds) > 1 else torch.arange(len(held)) % PARTS
        predicted = self._calibrated_by_others(predicted, target[held], part)
        # What sets go by is made as much surer as what they are made of, or they would be too small.
        self.held_predicted.copy_(predicted if factor == 1 else scale(predicted, factor))
        self.held_target.copy_(target[held])
        self.held_rows = held
        if isinstance(self.task, Classification):
            self.risk.keep(self.held_predicted, self.held_target, self.risk.confidence >= 0)

    def _sharpen_average(self, rows: Tensor) -> float:
        """Lower the temperature of the average of all folds until it is as sure as its parts, which it was fitted to.

        An average is less sure than what it is made of, and no less right: with their temperature it is too careful.
        Gives the factor of the temperature.

        Args:
            rows: (N, d) any rows.
        """
        calibration = self.calibration
        if not isinstance(calibration, TemperatureScaling) or self.head.folds == 1:
            return 1.0
        predicted = []
        for number in range(self.head.folds):
            with self.fold(number):
                predicted.append(torch.cat([passes.predicted for passes in self._passes_of(rows)]))
        parts, average = torch.stack(predicted), torch.stack(predicted).mean(dim=0)
        wanted = mean_entropy(scale(parts, calibration.tau))
        low, high = LEAST_SHARPER * calibration.tau, calibration.tau
        for _ in range(30):
            middle = 0.5 * (low + high)
            surer = mean_entropy(scale(average, middle)) < wanted
            low, high = torch.where(surer, middle, low), torch.where(surer, high, middle)
        factor = float(high / calibration.tau)
        self.sharper.copy_(high / calibration.tau)
        return factor

    def _finish(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """What a single fold predicts has the temperature of folds, and so have the scores that `known_p` compares."""
        final = super()._finish(predicted, scores)
        if self.head.chosen is not None or not isinstance(self.task, Classification):
            return final
        return scale(final, self.sharper)

    def _calibrated_by_others(self, predicted: Tensor, target: Tensor, part: Tensor) -> Tensor:
        """Predictions (H, …) of rows held back, each calibrated as the rows of all other parts (H,) say."""
        if self.calibration is None:
            return predicted
        found = torch.empty_like(predicted)
        for one in set(part.tolist()):
            calibrator = type(self.calibration)().to(predicted.dtype).quiet()
            calibrator.check(self.task)
            calibrator.observe(predicted[part != one], target[part != one], {})
            calibrator.finalize()
            found[part == one] = calibrator(predicted[part == one], {})
        return found

    def _answer_folds(self, rows: Tensor, target: Tensor, folds: Sequence[Fold]) -> Iterator[Answered]:
        """What the members of each fold say of the rows that they held back, a batch at a time."""
        for number, fold in enumerate(folds):
            for part in fold.held.split(BATCH):  # type: ignore[no-untyped-call]
                with self.fold(number), isolated_rng(DRAW_SEED):
                    passes = self.passes(rows[part])
                    yield Answered(passes, self.all_scores(passes), target[part])

    @staticmethod
    def _kept_in(kept: list[Answered], answered: Iterator[Answered]) -> Iterator[Answered]:
        """The same answers one by one, each while its fold is chosen, and all of them in the list."""
        for one in answered:
            kept.append(one)
            yield one

    def _weigh(self, rows: Tensor, target: Tensor, folds: Sequence[Fold]) -> None:
        """Set how much each of two kinds of members of a fold counts: what predicts rows of other folds best.

        It is drawn to a half. An only fold goes by its rows that select.
        """
        if self.head.shares.shape[1] == 1:
            return
        shares = torch.tensor(SHARES, dtype=torch.double)
        nll = torch.stack([self._nll_of_shares(rows, target, fold, number) for number, fold in enumerate(folds)])
        others = nll.sum(dim=0) - nll if len(folds) > 1 else nll
        best = shares[(others - PULL * (4 * shares * (1 - shares)).log()).argmin(dim=1)]
        self.head.shares.copy_(torch.stack([best, 1 - best], dim=1))

    def _nll_of_shares(self, rows: Tensor, target: Tensor, fold: Fold, number: int) -> Tensor:
        """The sum of the NLL of the rows of a fold that select, for each of `SHARES`, (S,)."""
        found = torch.zeros(len(SHARES), dtype=torch.double)
        for part in fold.select.split(BATCH):  # type: ignore[no-untyped-call]
            with self.fold(number), isolated_rng(DRAW_SEED):
                passes = self.passes(rows[part])
            assert passes.weights is not None
            # Passes of the first kind come first, and both kinds have counted alike.
            first = passes.weights.cumsum(0) < 0.5 + 1e-9
            for place, share in enumerate(SHARES):
                weights = passes.weights * 2 * torch.where(first, share, 1 - share)
                nll = self.task.nll(self.task.predictive(passes.outputs, weights), target[part])
                assert nll is not None
                found[place] += nll.sum()
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values of `StoredTable`, which the same modules are built from, for their tensors to be loaded into."""
        trees = [tree.to_dict() for tree in self.head.trees]
        return {"trees": trees, "shapes": list(self.shapes), "passes": self.num_passes}

    @classmethod
    def from_stored(
        cls, task: Task, settings: HeadSettings, stored: StoredTable, weights: Mapping[str, Tensor]
    ) -> TablePredictor:
        """The predictor that `to_dict` describes, with its weights; one much larger than these is refused."""
        trees = [GGT.from_dict(tree) for tree in stored.trees]
        shapes = stored.shapes
        check_sizes([settings.settings(), {"out_features": task.out_features}, shapes._asdict()], weights)
        for tree in trees:
            check_build(partial(build_member, settings, task, tree), weights)
        widths = [shapes.columns, shapes.columns + shapes.parts][: len(trees)]
        held = tuple(weights["held_predicted"].shape)
        if [tree.num_variables for tree in trees] != widths or held != (shapes.held, shapes.outputs):
            raise ValueError("expected weights of the shapes in the file, got others: take another copy")
        heads = [build_member(settings, task, tree) for _ in range(shapes.folds) for tree in trees]
        made = cls(task, heads, shapes, stored.passes).double()
        made.load_state_dict(weights)
        return made


def mean_entropy(probs: Tensor) -> Tensor:
    """Probabilities (…, C) → their mean entropy () in nats."""
    return torch.as_tensor(torch.special.entr(probs).sum(dim=-1).mean())


def build_member(settings: HeadSettings, task: Task, ggt: GGT) -> BRAINetHead:
    """The head of a tree, with more parameters than asked for where the tree needs more."""
    if isinstance(settings, Tree) and settings.num_params != "auto":
        least = smallest_budget(ggt, task.out_features, min_width=settings.min_width or 1, norm=settings.norm)
        if settings.num_params < least:
            settings = copy.copy(settings)
            settings.num_params = least
    head = settings.build(ggt.num_variables, task.out_features, ggt)
    assert isinstance(head, BRAINetHead)
    return head


class Table(NamedTuple):
    """The rows of one fit.

    Attributes:
        rows: (N, d) numbers.
        target: (N,) targets.
        weights: (N,) how much each row counts while training; None is all alike.
        folds: what the rows do for the members of each fold.
        names: (d,) names of the columns, where they have names.
    """

    rows: Tensor
    target: Tensor
    weights: Tensor | None
    folds: Sequence[Fold]
    names: Sequence[str] | None


class Clock(NamedTuple):
    """What is left of the time that a fit may take.

    Attributes:
        end: of `time.monotonic`.
        seconds: that there are in all; infinite where there is no limit.
    """

    end: float = math.inf
    seconds: float = math.inf

    def left(self, share: float) -> float | None:
        """A share of the seconds that are left; None where there is no limit."""
        return None if math.isinf(self.end) else max(0.0, share * (self.end - time.monotonic()))

    def deadline(self, share: float) -> float:
        """When a share of the time that is left is over, less what is kept for the end."""
        if math.isinf(self.end):
            return math.inf
        return time.monotonic() + max(0.0, share * (self.end - AFTERWARDS * self.seconds - time.monotonic()))


class FitSettings(NamedTuple):
    """How the members of an estimator are built and trained.

    Attributes:
        head: settings of the head of every member.
        learn: settings of `learn_structure`; None is its default.
        training: epochs, batches and learning rate.
        passes: sub-networks that a prediction averages.
        progress: show progress bars.
        clock: what is left of the time.
    """

    head: HeadSettings
    learn: Mapping[str, Any]
    training: TrainingSettings
    passes: int
    progress: bool
    clock: Clock


def fit_network(task: Task, table: Table, settings: FitSettings) -> tuple[TablePredictor, Trained]:
    """Structure, members and calibration of a table; the predictor, the most epochs that a member took, and its curve.

    Structures are learned once, from all rows and no targets. Each fold has a member that reads the columns, and one
    that reads their bins too, unless these are too many.
    """
    if task.needs_targets:
        task.prepare(table.target)
    labels, num_classes = task.classes(table.target)
    encoding, masks, far = _learn_encoding(task, table, labels)
    features = encoding(table.rows)
    learned = _within_usual(features, far)  # one row far out would turn structures and batches to itself
    screen = encoding[0]
    assert isinstance(screen, Screen)
    columns = screen.columns
    trees = _learn_trees(learned, columns, _names_of(table, encoding), settings)
    network = _build_network(task, table, encoding, trees, settings)
    if masks is not None:
        network.head.masks.copy_(masks[:, : network.head.masks.shape[1]])
    warn_of_far_rows(far, len(labels))
    usual, _ = without_rows(far, features[:, :columns], labels)
    context = ScoreContext(num_classes, raw=True, ggt=_density_tree(usual, settings))
    for number, fold in enumerate(table.folds):
        for score in network.fold_scores:
            score.fit_fold(number, context, features[fold.train], labels[fold.train])
    network.scores.known.fit(features[:, :columns])
    trained = []
    for kind in range(len(trees)):
        deadline = settings.clock.deadline(1 / (len(trees) - kind))
        trained.append(_train_kind(network, kind, task, learned, table, settings, deadline))
    network.double()
    if all(len(fold.held) for fold in table.folds):
        network.hold(table.rows.double(), table.target, table.folds)
    return network, max(trained, key=lambda one: one.epochs)


def _train_kind(
    network: TablePredictor,
    kind: int,
    task: Task,
    features: Tensor,
    table: Table,
    settings: FitSettings,
    deadline: float,
) -> Trained:
    """Train the members of one kind, those of all folds at once."""
    heads = [network.head.of_fold(number)[kind] for number in range(len(table.folds))]
    width = heads[0].in_features
    masks = network.head.masks[:, None, :width] if len(network.head.masks) else None
    return train_folds(
        HeadStack(heads),
        task,
        Rows(features[:, :width].contiguous(), table.target, table.weights, masks),
        table.folds,
        settings.training,
        passes=VALIDATION_PASSES,
        deadline=deadline,
        progress=settings.progress,
    )


def _within_usual(features: Tensor, far: Tensor) -> Tensor:
    """Features (N, d) whose rows `far` (K,) have no value beyond those of all other rows."""
    if not len(far):
        return features
    others = without_rows(far, features, far.new_zeros(len(features)))[0]
    found = features.clone()
    found[far] = found[far].clamp(others.amin(dim=0), others.amax(dim=0))
    return found


def _learn_encoding(task: Task, table: Table, labels: Tensor) -> tuple[nn.Sequential, Tensor | None, Tensor]:
    """Columns that are read, their bins and scales; which of all that each fold reads, (F, d), if not all; far rows.

    Bins and scales are those of the rows that do not lie far out, see `far_rows`. There are no bins where there are too
    many, or no rows to stop by.
    """
    screen, masks = Screen(table.rows.shape[1], table.rows.shape[1]), None
    if table.rows.shape[1] > MOST_COLUMNS:
        kept, masks = screen_folds(
            table.rows, _target_columns(task, table.target), [fold.train for fold in table.folds]
        )
        screen = Screen.learn(table.rows, kept)
        masks = torch.cat([masks, masks.new_ones(len(masks), screen.columns - len(kept))], dim=1)
        warn(
            f"reads {len(kept)} of {table.rows.shape[1]:,} columns, those that say most of y, and {DIRECTIONS} "
            f"directions in which all vary; of up to {MOST_COLUMNS} columns all are read"
        )
    rows = screen(table.rows)
    far, columns = far_rows(rows, labels), rows.shape[1]
    usual = without_rows(far, rows, labels)[0]
    bins = Bins.learn(usual, BINS)
    if columns + len(bins.low) > MOST_WITH_BINS or not len(table.folds[0].select):
        bins = Bins(0)
    if masks is not None:
        masks = torch.cat([masks, masks[:, bins.column]], dim=1)
    scales = Standardize(columns + len(bins.low)).fit(bins(usual))
    return nn.Sequential(screen, bins, scales), masks, far


def _target_columns(task: Task, target: Tensor) -> Tensor:
    """Targets as columns (N, O): of classes one of zeros and ones for each."""
    if isinstance(task, Classification):
        return torch.nn.functional.one_hot(target, task.classes(target)[1]).float()
    if isinstance(task, MultiLabel):
        return torch.where(target.isnan(), target.nanmean(dim=0), target).nan_to_num(nan=0.5).float()
    return target.float().unsqueeze(1)


def _names_of(table: Table, encoding: nn.Sequential) -> list[str] | None:
    """The names of what is read, where columns have names."""
    if not table.names:
        return None
    screen = encoding[0]
    assert isinstance(screen, Screen)
    directions = [f"direction {number}" for number in range(1, screen.directions.shape[1] + 1)]
    return [table.names[i] for i in screen.kept.tolist()] + directions


def _learn_trees(features: Tensor, columns: int, names: Sequence[str] | None, settings: FitSettings) -> list[GGT]:
    """The tree of the columns, and that of columns and bins where there are bins."""
    learn = {name: value for name, value in settings.learn.items() if value is not None}
    learn["max_seconds"] = settings.clock.left(STRUCTURE)
    trees = [learn_tree(features[:, :columns], learn, names or None, settings.progress)]
    if features.shape[1] > columns:
        learn["max_seconds"] = settings.clock.left(STRUCTURE)
        trees.append(learn_tree(features, learn, progress=settings.progress))
    return trees


def _density_tree(features: Tensor, settings: FitSettings) -> GGT:
    """The tree of a density of the columns, with more edges than a network of dense layers wants."""
    threshold = density_threshold(DENSITY_THRESHOLD, len(features))
    learn = {"test": "gaussian", "threshold": threshold, "seed": settings.learn["seed"]}
    learn["max_seconds"] = settings.clock.left(STRUCTURE)
    return learn_tree(features, learn, progress=settings.progress)


def _another(head: BRAINetHead) -> BRAINetHead:
    """A head of the same tree and plan with weights of its own; to find the widths anew would take longer."""
    found = copy.deepcopy(head, {id(head.ggt): head.ggt})
    found.reset_parameters()
    return found


def _build_network(
    task: Task, table: Table, encoding: nn.Sequential, trees: Sequence[GGT], settings: FitSettings
) -> TablePredictor:
    """The predictor with an untrained member for each fold and tree."""
    kinds = [build_member(settings.head, task, tree) for tree in trees]
    heads = list(kinds)
    while len(heads) < len(table.folds) * len(trees):
        heads.append(_another(heads[len(heads) % len(trees)]))
    screen, bins = encoding[0], encoding[1]
    assert isinstance(bins, Bins)
    assert isinstance(screen, Screen)
    held_back = sum(len(fold.held) for fold in table.folds)
    outputs = task.out_features if isinstance(task, Classification | MultiLabel) else 2
    shapes = Shapes(
        table.rows.shape[1],
        screen.columns,
        screen.directions.shape[1],
        len(bins.low),
        len(table.folds),
        held_back,
        outputs,
    )
    network = TablePredictor(task, heads, shapes, settings.passes)
    network.backbone.model.load_state_dict(encoding.state_dict())
    return network
