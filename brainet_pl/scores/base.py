"""What every score is: a number for each sample that is higher for an input more unlike the training data.

A score may learn from the features of the training data (`fit`), and from the scores of the validation data of a fit
(`finalize`, at the end of the epoch). What it learned are buffers: they travel in every checkpoint by themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.framework import rank_zero_warn
from brainet_pl._utils.parts import Part
from brainet_pl._utils.precision import full_precision, wide
from brainet_pl.backbones.taps import Taps
from brainet_pl.distributed.epoch_buffer import EpochBuffer
from brainet_pl.scores.expectation import Expected
from brainet_pl.scores.known import KnownSamples
from brainet_pl.scores.reference import Reference, Verdict, p_values
from brainet_pl.scores.robust import far_scores
from brainet_pl.structure.ggt import GGT
from brainet_pl.tasks.passes import Passes

FinishAnswer = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
ENERGIES = ("energy", "joint_energy")  # of logits: the verdict joins the one that a task has with those of features
_PREDICTED = "predicted of the passes"  # a column beside the scores, which no score is called


class LastLayer(NamedTuple):
    """The linear classification layer of a network: weight (C, d) and bias (C,)."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class ScoreContext:
    """What a score may want to know of the model around it.

    Attributes:
        num_classes: C; 1 for a regression.
        raw: whether features are the inputs themselves, with no backbone between.
        ggt: the tree of the head, or None.
        widths: how many of the features that the score reads come from each layer; nothing where one layer gives all.
        scaled: whether features come from taps, each brought to mean 0 and deviation 1: their length then says as much
            as their direction.
        moments: mean and deviation (d,) by which tapped features were standardised; None where they were not.
        last_layer: the network's own classification layer, where it is linear and its inputs stay as they are.
    """

    num_classes: int
    raw: bool = False
    ggt: GGT | None = None
    widths: tuple[int, ...] = ()
    scaled: bool = False
    moments: tuple[Tensor, Tensor] | None = None
    last_layer: LastLayer | None = None


class Score(Part, DataSizedBuffers, ABC):
    """One score, or a few that share their work. A class of one's own needs `forward`, and `fit` if it learns.

    Buffers registered in the constructor may have any shape there: they take the shape of what a checkpoint holds.

    Attributes:
        units: name → unit of each score that `forward` may give; "" for a number without one. Every score is higher for
            an input more unlike the training data.
        needs_fit: whether `fit` must run before the score can be used.
        fits_shares: whether `fit` takes `shared=True`: its rows are then a share of the samples, and it sums over all
            processes.
        name: what tells it from others of its class in one model: its scores end with `_<name>`. None for the only one.
        layers: layers of the backbone whose features are read; None is what the head reads.
        pool: how their maps and tokens become features.
        joins: whether `Combined` counts it where it is told of no names: "always", or "never" for what others say as
            well.
    """

    may_be_missing: ClassVar[bool] = True  # a checkpoint without this score leaves it unfitted
    units: ClassVar[Mapping[str, str]]
    needs_fit: ClassVar[bool] = True
    fits_shares: bool = False
    name: str | None = None
    layers: str | list[str] | None = None
    pool: str | list[str] | None = None
    joins: Literal["always", "never"] = "always"
    fitted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fitted", torch.tensor(not self.needs_fit))
        self._ready = not self.needs_fit  # the same outside the tensor: an exported graph can't branch on one

    @property
    def taps(self) -> Taps | None:
        """The layers whose features the score reads; None is the head's."""
        return Taps.of(self.layers, self.pool)

    @property
    def key(self) -> str:
        """What it is called among the scores of a model."""
        return self.name_in_model(type(self).__name__)

    def name_in_model(self, score: str) -> str:
        """The name in `units` and of `forward` → that in a model, which may have several of this class."""
        return score if self.name is None else f"{score}_{self.name}"

    @property
    def ready(self) -> bool:
        """Whether it can be used."""
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Say whether it can be used, here and in every checkpoint."""
        self._ready = ready
        self.fitted.fill_(ready)

    @property
    def densities(self) -> Sequence[Score]:
        """The densities of columns that it is the mean of; nothing where it is none."""
        return ()

    def check(self, has_classes: bool, raw: bool) -> None:
        """Refuse a model that the score can't be one of.

        Args:
            has_classes: whether the task gives logits of classes.
            raw: whether features are the inputs themselves, with no backbone between.
        """

    def set_context(self, context: ScoreContext) -> None:
        """Take what is known of the model around, before `fit`."""

    def fit(self, features: Tensor, labels: Tensor) -> Any:
        """Learn from training features (N, d) and labels (N,); see `brainet_pl.scores.fitting` for who calls it."""

    def without_classes(self, passes: Passes, hidden: Tensor) -> Tensor | None:
        """Its first score (K, B) as it would be if each of K groups of classes, (K, C), had not been learned.

        None where it can't tell; then no estimate is made of what a verdict by it will notice.
        """
        return None

    def observe(self, passes: Passes, scores: Mapping[str, Tensor]) -> None:
        """See a batch of the validation data of a fit, with all scores (B,) of it."""

    def finalize(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take all scores (N,) of a validation epoch as the reference from now on.

        Gives those of its own scores of the epoch that follow from the new reference.
        """
        return {}

    @abstractmethod
    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """One set of passes → the scores (B,) by name."""

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Read whether the score of the checkpoint was fitted."""
        self.set_ready(bool(stored.get("fitted", not self.needs_fit)))


class AnswerScore(Score):
    """A score of the final prediction alone, calibrated probabilities (B, C), which `predicted` of its passes is then.

    A class of one's own needs `score`, and `learn` if it keeps something of held-out samples.
    """

    needs_fit: ClassVar[bool] = False
    joins = "never"

    def learn(self, final: Tensor) -> dict[str, Tensor]:
        """See the final predictions (N, C) of all held-out samples; gives their scores (N,) by name."""
        return self.score(final)

    @abstractmethod
    def score(self, final: Tensor) -> dict[str, Tensor]:
        """Final predictions (B, C) → scores (B,) by name."""

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """One set of passes, with the final prediction as `predicted` → the scores (B,) by name."""
        return self.score(passes.predicted)


class JoinedScore(Score):
    """A score that is made of the other scores of a model, which are in the `scores` of the passes that it is given.

    Attributes:
        default_names: the scores that are joined where none are named: the first of every other part that joins, and
            the energy where there is one. `ScoreSet` sets it.
    """

    needs_fit: ClassVar[bool] = False
    default_names: Sequence[str] = ()

    @property
    def joined_names(self) -> list[str]:
        """The scores that are joined; a class of one's own says which."""
        return list(self.default_names)


def check_name(name: Any) -> str | None:
    """The name of one score among several of its class, or None; a part of the names of columns and tensors."""
    if name is None or (isinstance(name, str) and name.isidentifier()):
        return name
    raise ValueError(
        f"expected name of a score to be a word of letters, digits and _, got {checks.shown(name)}: choose one such as "
        "'stages', or leave it out"
    )


def set_source(score: Score, layers: str | list[str] | None, pool: str | list[str] | None, name: str | None) -> None:
    """Keep which layers a score reads and what it is called; refuses what it can't read."""
    score.layers, score.pool, score.name = layers, pool, check_name(name)
    if score.taps is None and pool is not None:
        raise ValueError(
            f"expected layers of {type(score).__name__} to pool, got pool={pool!r} alone: give layers too, or leave "
            "pool out"
        )


class ScoreSet(nn.Module):
    """All scores of a model that are more than its prediction, by their class and name.

    Args:
        scores: no two of which may give a score of the same name.
        task_units: name → unit of the scores of the prediction itself, which the task gives.

    Attributes:
        reference: all scores of the last validation epoch of a fit.
        expected: what share of unknown inputs the verdict will notice, where that was estimated.
        known: some training samples, by the features that the verdict reads.
    """

    def __init__(self, scores: Iterable[Score], task_units: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._task_units = dict(task_units or {})
        self.members = nn.ModuleDict()
        self.reference = Reference()
        self.expected = Expected()
        self.known = KnownSamples()
        self._observed = EpochBuffer()
        self._warned_of_errors = False
        for score in scores:
            self.add(score)

    def add(self, score: Score) -> None:
        """Adds one more score to the set, under its key."""
        twice = sorted(set(self.units) & {score.name_in_model(name) for name in score.units})
        if twice:
            raise ValueError(
                f"expected scores of different names, got {', '.join(twice)} twice: leave one "
                f"{type(score).__name__} out, or give it a name of its own, {type(score).__name__}(name=…)"
            )
        self.members[score.key] = score
        self._tell_joined()

    def _tell_joined(self) -> None:
        """Let scores that join others know of them."""
        wanted = [part for part in self._independent if part.joins != "never"] or self._independent
        names = [part.name_in_model(next(iter(part.units))) for part in wanted]
        for joined in self._joined:
            joined.default_names = [*names, *self._of_logits]

    @property
    def units(self) -> dict[str, str]:
        """Name → unit of every score that a model may give, the prediction's own first."""
        ours = {score.name_in_model(name): unit for score in self for name, unit in score.units.items()}
        return self._task_units | ours

    @property
    def before_calibration(self) -> list[str]:
        """The names of scores that a calibrator may read: they need neither a calibrated answer nor a reference."""
        later = [score for score in self if isinstance(score, AnswerScore | JoinedScore)]
        names = {name for score in later for name in _names(score)}
        return [name for name in self.units if name not in names]

    @property
    def for_verdict(self) -> list[str]:
        """The names of scores by which an input is best called unknown, the best first.

        No single score finds every unknown input, so those that join several come first.
        """
        return [*sorted(self._joined_names), *self._first_names]

    def join_for_verdict(self) -> None:
        """Join the prediction's energy and the scores of the features in one, where there are both and nobody has."""
        if self._independent and not self._joined and self._of_logits:
            from brainet_pl.scores.combined import Combined  # it derives from the classes above

            self.add(Combined())

    def parts_of(self, name: str) -> tuple[str, ...]:
        """The names of the scores that the score `name` joins; nothing where it is a single one."""
        found = [joined.joined_names for joined in self._joined if name in _names(joined)]
        return tuple(found[0]) if found else ()

    @property
    def _of_logits(self) -> list[str]:
        """The energy of the prediction, of classes or of labels, where it has one."""
        return [name for name in ENERGIES if name in self._task_units]

    @property
    def _first_names(self) -> list[str]:
        """The first score of every part that is not joined, and the energy where there is one."""
        first = [part.name_in_model(next(iter(part.units))) for part in self._independent]
        return first + self._of_logits

    @property
    def _joined(self) -> list[JoinedScore]:
        return [score for score in self if isinstance(score, JoinedScore)]

    @property
    def _joined_names(self) -> set[str]:
        return {name for score in self._joined for name in _names(score)}

    @property
    def _independent(self) -> list[Score]:
        return [score for score in self if not isinstance(score, JoinedScore)]

    def __iter__(self) -> Iterator[Score]:
        return iter(self.members.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, key: str) -> bool:
        return key in self.members

    @property
    def unfitted(self) -> list[Score]:
        """Scores that wait for training features."""
        return [score for score in self if score.needs_fit and not score.ready]

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """One set of passes → all scores (B,) by name, where nothing is calibrated: the answer is the average."""
        return self.of_answer(passes, self.of_passes(passes))

    def of_passes(self, passes: Passes) -> dict[str, Tensor]:
        """The scores (B,) that need no final prediction: those of the passes, and those of the features."""
        scores = dict(passes.scores)
        with full_precision(passes.predicted.device):
            for score in self._independent:
                if score.ready and not isinstance(score, AnswerScore):
                    seen = passes.with_features_of(score.taps)
                    scores |= _named(score, score(replace(seen, features=wide(seen.features))))
        return scores

    def of_answer(self, passes: Passes, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All scores (B,): to those that there are come those of the final prediction, then those that join others.

        Args:
            passes: with the final prediction as `predicted`.
            scores: of the passes, of the features, and those of the task, taken from the final prediction.
        """
        scores = dict(scores)
        with full_precision(passes.predicted.device):
            scores |= self.of_answer_alone(passes)
            for joined in self._joined:
                if joined.ready:
                    scores |= _named(joined, joined(replace(passes, scores=scores)))
        return scores

    def observe(self, passes: Passes, scores: Mapping[str, Tensor]) -> None:
        """Show a batch of validation data and its scores to all, each with its own scores by the names it knows."""
        joined = self._joined_names
        columns = {name: values.float() for name, values in scores.items() if name not in joined}
        self._observed.append(columns | {_PREDICTED: passes.predicted})
        for score in self:
            if score.ready:
                score.observe(passes.with_features_of(score.taps), _by_own_names(score, scores))

    def finalize(self, finish: FinishAnswer | None = None) -> tuple[Tensor, dict[str, Tensor]] | None:
        """End a validation epoch: its scores are the reference from now on. Gives final predictions and scores.

        Args:
            finish: averaged predictions (N, …) and scores (N,) → final predictions, and the task's scores of them;
                None where nothing is calibrated.
        """
        columns = self._observed.collect()
        if not columns:
            return None
        final = columns.pop(_PREDICTED)
        if finish is not None:
            final, of_answer = finish(final, columns)
            columns |= {name: values.float() for name, values in of_answer.items()}
        for score in self._independent:
            if isinstance(score, AnswerScore):
                columns |= _named(score, score.learn(final))
        self.set_reference(columns)
        return final, columns

    def set_reference(self, columns: dict[str, Tensor]) -> None:
        """Take all scores (N,) of held-out samples, but those that join others, as the reference from now on.

        Samples that lie far out under a density or a distance are errors, see `far_rows`: with them less that is
        unknown would be called so.
        """
        for score in self._independent:
            if score.ready:
                columns |= _named(score, score.finalize(_by_own_names(score, columns)))
        columns = self._without_errors(columns)
        self._tell_joined()
        made = [_named(joined, joined.finalize(columns)) for joined in self._joined]
        for more in made:
            columns |= more
        self.reference.keep(columns)

    def _without_errors(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """The scores (N,) of the samples that no score of the features finds far out; says once how many others are."""
        of_features = []
        for score in self._independent:
            names = [name for name in map(score.name_in_model, score.units) if score.needs_fit and name in columns]
            of_features += [columns[name] for name in names]
        far = far_scores(of_features) if of_features else torch.empty(0, dtype=torch.long)
        if not len(far):
            return columns
        total = len(of_features[0])
        if not self._warned_of_errors:
            self._warned_of_errors = True
            rank_zero_warn(
                f"the verdict goes by {total - len(far):,} of {total:,} held-out samples, without {len(far):,} that "
                "lie so far out that they must be errors; correct or drop them"
            )
        kept = torch.ones(total, dtype=torch.bool)
        kept[far] = False
        return {name: values[kept.to(values.device)] for name, values in columns.items()}

    def without_classes(self, passes: Passes, hidden: Tensor) -> dict[str, Tensor]:
        """Score → (K, B) as it would be if each of K groups of classes, (K, C), had not been learned."""
        found = {}
        for score in self._independent:
            if score.ready:
                seen = passes.with_features_of(score.taps)
                values = score.without_classes(replace(seen, features=wide(seen.features)), hidden)
                if values is not None:
                    found[score.name_in_model(next(iter(score.units)))] = values
        return found

    def of_answer_alone(self, passes: Passes) -> dict[str, Tensor]:
        """The scores (B,) that read nothing but the final prediction."""
        scores: dict[str, Tensor] = {}
        for score in self._independent:
            if score.ready and isinstance(score, AnswerScore):
                scores |= _named(score, score(passes))
        return scores

    def judge(self, scores: Mapping[str, Tensor], verdict: Verdict, first: str | None = None) -> dict[str, Tensor]:
        """Scores (B,) → the verdict: `known_p`, a conformal p-value, and `known`; nothing without validation data.

        `known_p` is (1 + #{validation samples at least as strange}) / (n + 1). Of inputs like the validation data at
        most a share `verdict.level` is called unknown, whatever the model; an input with NaN in its score has 0 and is.

        Args:
            scores: name → (B,).
            verdict: which score, at which level.
            first: the score to go by where the verdict names none and none joins several, such as a calibrator's.
        """
        score = self.verdict_score(scores, verdict, first)
        if score is None:
            return {}
        self.reference.warn_of_few(score)
        p = p_values(scores[score], self.reference[score])
        return {"known_p": p, "known": p > verdict.level}

    def verdict_score(self, scores: Iterable[str], verdict: Verdict, first: str | None = None) -> str | None:
        """The name of the score behind the verdict, among those that there are; None without validation data.

        Where the verdict names none, it is one that joins several, else `first`, else the first of the features.
        """
        there = [name for name in scores if name in self.reference]
        if not there or (verdict.score is not None and verdict.score not in there):
            return None
        return verdict.choose(self._defaults(first), there)

    def default_score(self, verdict: Verdict, first: str | None = None) -> str | None:
        """The score that a verdict goes by before anything is known of how much it notices; None where there is none.

        The arguments are those of `judge`.
        """
        return verdict.score or next(iter(self._defaults(first)), None)

    def _defaults(self, first: str | None) -> list[str]:
        return [*sorted(self._joined_names), *([] if first is None else [first]), *self._first_names]


def _names(score: Score) -> list[str]:
    return [score.name_in_model(name) for name in score.units]


def _named(score: Score, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a score gave, under the names that it has in a model."""
    return {score.name_in_model(name): column for name, column in values.items()}


def _by_own_names(score: Score, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All scores of a model, and those of one score also under the names in its `units`."""
    own = {name: scores[score.name_in_model(name)] for name in score.units if score.name_in_model(name) in scores}
    return {**scores, **own}
