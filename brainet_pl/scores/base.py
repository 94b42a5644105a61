"""What every score is: a number for each sample that is higher for an input more unlike the training data.

A score may learn from the features of the training data (`fit`), and from the validation data of a fit (`observe` each
batch, `finalize` at the end of the epoch). What it learned are buffers: they travel in every checkpoint by themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl._utils.parts import Part
from brainet_pl.backbones.taps import Taps
from brainet_pl.distributed.collectives import exchange, rank, serve_rank_zero, total
from brainet_pl.features.extraction import ExtractedShare
from brainet_pl.scores.density import check_training, keep_wide
from brainet_pl.scores.reference import Reference, Verdict, p_values
from brainet_pl.structure.ggt import GGT
from brainet_pl.tasks.passes import Passes


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
    """

    num_classes: int
    raw: bool = False
    ggt: GGT | None = None
    widths: tuple[int, ...] = ()
    scaled: bool = False


class Score(Part, nn.Module, ABC):
    """One score, or a few that share their work. A class of one's own needs `forward`, and `fit` if it learns.

    Buffers registered in the constructor may have any shape there: they take the shape of what a checkpoint holds.

    Attributes:
        units: name → unit of each score that `forward` may give; "" for a number without one. Every score is higher for
            an input more unlike the training data.
        needs_fit: whether `fit` must run before the score can be used.
        name: what tells it from others of its class in one model: its scores end with `_<name>`. None for the only one.
        shared: while `fit` runs, whether it is given a share of the samples and other processes have the rest.
    """

    units: ClassVar[Mapping[str, str]]
    needs_fit: ClassVar[bool] = True
    name: str | None = None
    shared: bool = False
    fitted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fitted", torch.tensor(not self.needs_fit))
        self._ready = not self.needs_fit  # the same outside the tensor: an exported graph can't branch on one

    @property
    def taps(self) -> Taps | None:
        """The layers whose features the score reads, from its settings `layers` and `pool`; None is the head's."""
        return Taps.of(getattr(self, "layers", None), getattr(self, "pool", None))

    @property
    def key(self) -> str:
        """What it is called among the scores of a model."""
        return type(self).__name__ if self.name is None else f"{type(self).__name__}_{self.name}"

    def called(self, score: str) -> str:
        """The name in `units` and of `forward` → that in a model, which may have several of this class."""
        return score if self.name is None else f"{score}_{self.name}"

    @property
    def ready(self) -> bool:
        """Whether it can be used."""
        return self._ready

    def _mark(self, ready: bool) -> None:
        self._ready = ready
        self.fitted.fill_(ready)

    def set_context(self, context: ScoreContext) -> None:
        """Hear of the model around, before `fit`."""

    def learn(self, features: Tensor, labels: Tensor) -> None:
        """`fit` after a check of what it is given; afterwards the score is ready.

        Args:
            features: (N, d) of the training data.
            labels: (N,) from 0 on; all 0 where there are no classes.
        """
        check_training(features, labels)
        self.fit(features, labels)
        self._mark(True)

    @property
    def sums(self) -> bool:
        """Whether `fit` can take a share of the samples, because it passes all that it adds up through `sum`."""
        return False

    def sum(self, tensor: Tensor) -> Tensor:
        """A sum over the samples that `fit` was given → over those of all processes."""
        return total(tensor) if self.shared else tensor

    def learn_share(self, features: Tensor, labels: Tensor) -> None:
        """`learn` from shares (n, d) and (n,) of the samples in all processes; a collective, for a score that `sums`.

        A share may be empty, whatever its d.
        """

        def check() -> int:
            if len(features):
                check_training(features, labels)
            return int(features.shape[1])

        width = max(exchange(check))
        self.shared = True
        try:
            self.fit(features if len(features) else features.new_empty(0, width), labels)
        finally:
            self.shared = False
        self._mark(True)

    def learn_alone(self, share: ExtractedShare) -> None:
        """`learn` in the first process, from the samples of all; the others take what it learned. A collective."""
        found = share.gather()

        def work(ask: Any) -> dict[str, Tensor]:
            self.learn(found.output.view(self.taps), found.targets)
            return {name: value.cpu() for name, value in self.state_dict().items()}

        learned = serve_rank_zero(work, lambda request: None)
        if rank() > 0:
            self.load_state_dict(learned)

    def fit(self, features: Tensor, labels: Tensor) -> Any:
        """Learn from training features (N, d) and labels (N,)."""

    def observe(self, passes: Passes, scores: Mapping[str, Tensor]) -> None:
        """See a batch of the validation data of a fit, with all scores (B,) of it."""

    def finalize(self) -> None:
        """Take what `observe` saw of the epoch as the reference from now on."""

    def complete(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """After `finalize`, all scores (N,) of the epoch → those of its own that follow from the new reference."""
        return {}

    @abstractmethod
    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """One set of passes → the scores (B,) by name."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves as any module, but keeps 32 bits where the rest is made 16: scores are sums of many terms."""
        return super()._apply(keep_wide(fn), recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:  # type: ignore[no-untyped-def]
        """Take the shapes of what is loaded; a checkpoint without this score leaves it unfitted."""
        if f"{prefix}fitted" not in state_dict:
            self._mark(not self.needs_fit)
            return
        self._ready = bool(state_dict[f"{prefix}fitted"])
        for name, buffer in list(self._buffers.items()):
            stored = state_dict.get(prefix + name)
            if buffer is not None and stored is not None and stored.shape != buffer.shape:
                self._buffers[name] = buffer.new_empty(stored.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class JoinedScore(Score):
    """A score that is made of the other scores of a model, and knows those of the validation data.

    Attributes:
        leading: the first score of every other part, and the energy where there is one; the model says so.
    """

    needs_fit: ClassVar[bool] = False
    leading: Sequence[str] = ()

    @abstractmethod
    def refer(self, columns: Mapping[str, Tensor]) -> None:
        """Take all other scores (N,) of a validation epoch as the reference from now on."""

    @abstractmethod
    def join(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All other scores (B,) → those made of them (B,)."""

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """The same of the scores in passes."""
        return self.join(passes.scores)


def check_name(name: Any) -> str | None:
    """The name of one score among several of its class, or None; a part of the names of columns and tensors."""
    if name is None or (isinstance(name, str) and name.isidentifier()):
        return name
    raise ValueError(
        f"expected name of a score to be a word of letters, digits and _, got {checks.shown(name)}: choose one such as "
        "'stages', or leave it out"
    )


def check_taps(score: Score) -> None:
    """Refuse layers or pools that a score can't read."""
    if score.taps is None and getattr(score, "pool", None) is not None:
        raise ValueError(
            f"expected layers of {type(score).__name__} to pool, got pool={score.pool!r} alone: give layers too, or "
            "leave pool out"
        )


class ScoreSet(nn.Module):
    """All scores of a model that are more than its prediction, by their class and name.

    Args:
        scores: no two of which may give a score of the same name.
        taken: name → unit of the task's own scores.

    Attributes:
        reference: all scores of the last validation epoch of a fit.
    """

    def __init__(self, scores: Iterable[Score], taken: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._taken = dict(taken or {})
        self.members = nn.ModuleDict()
        self.reference = Reference()
        for score in scores:
            self.add(score)

    def add(self, score: Score) -> None:
        """Adds one more score to the set, under its key."""
        twice = sorted(set(self.units) & {score.called(name) for name in score.units})
        if twice:
            raise ValueError(
                f"expected scores of different names, got {', '.join(twice)} twice: leave one "
                f"{type(score).__name__} out, or give it a name of its own, {type(score).__name__}(name=…)"
            )
        self.members[score.key] = score
        for part in self:
            if isinstance(part, JoinedScore):
                part.leading = self._leading()

    @property
    def units(self) -> dict[str, str]:
        """Name → unit of every score that a model may give, the prediction's own first."""
        ours = {score.called(name): unit for score in self for name, unit in score.units.items()}
        return self._taken | ours

    @property
    def preferred(self) -> list[str]:
        """The names of scores by which an input is best called strange, the best first."""
        return [*sorted(self._joined), *self._leading()]

    def _leading(self) -> list[str]:
        parts = [part for part in self if not isinstance(part, JoinedScore)]
        return [part.called(next(iter(part.units))) for part in parts] + ["energy"] * ("energy" in self._taken)

    def __iter__(self) -> Iterator[Score]:
        return iter(self.members.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, key: str) -> bool:
        return key in self.members

    @property
    def unfitted(self) -> list[Score]:
        """Scores that wait for training features."""
        return [score for score in self if not score.ready]

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """One set of passes → all scores (B,): the prediction's own, then those of every score that is ready."""
        found = dict(passes.scores)
        for score in self:
            if score.ready and not isinstance(score, JoinedScore):
                found |= {score.called(name): values for name, values in score(passes.seen_by(score.taps)).items()}
        return found | self._read(found)

    def _read(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scores (B,) → the scores that are made of them."""
        more: dict[str, Tensor] = {}
        for score in self:
            if isinstance(score, JoinedScore) and score.ready:
                more |= {score.called(name): values for name, values in score.join(found).items()}
        return more

    def observe(self, passes: Passes, scores: Mapping[str, Tensor]) -> None:
        """Show a batch of validation data and its scores to all, each with its own scores by the names it knows."""
        self.reference.collected.update({name: v for name, v in scores.items() if name not in self._joined})
        for score in self:
            if score.ready:
                score.observe(passes.seen_by(score.taps), self._as_known_to(score, scores))

    @staticmethod
    def _as_known_to(score: Score, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name: scores[score.called(name)] for name in score.units if score.called(name) in scores}
        return {**scores, **own}

    def judge(self, scores: Mapping[str, Tensor], verdict: Verdict, first: str | None = None) -> dict[str, Tensor]:
        """Scores (B,) → the verdict: `known_p`, a conformal p-value, and `known`; nothing without validation data.

        `known_p` is (1 + #{validation samples at least as strange}) / (n + 1). Of inputs like the validation data at
        most a share `verdict.level` is called unknown, whatever the model; an input with NaN in its score is.

        Args:
            scores: name → (B,).
            verdict: which score, at which level.
            first: the score to go by where the verdict names none, such as that of a calibrator.
        """
        there = [name for name in scores if name in self.reference]
        if not there or (verdict.score is not None and verdict.score not in there):
            return {}
        score = verdict.choose([*([] if first is None else [first]), *self.preferred], there)
        self.reference.warn_of_few(score)
        p = p_values(scores[score], self.reference[score])
        return {"known_p": p, "known": p > verdict.level}

    @property
    def _joined(self) -> set[str]:
        return {score.called(name) for score in self if isinstance(score, JoinedScore) for name in score.units}

    def finalize(self) -> None:
        """End a validation epoch: its scores are the reference from now on."""
        for score in self:
            if score.ready:
                score.finalize()
        if not self.reference.collected.update_called:
            return
        columns = self.reference.collected.columns()
        self.reference.collected.reset()
        for score in self:
            if score.ready:
                more = score.complete(self._as_known_to(score, columns))
                columns |= {score.called(name): values for name, values in more.items()}
        for score in self:
            if isinstance(score, JoinedScore):
                score.refer(columns)
        self.reference.keep(columns | self._read(columns))
