"""What a verdict will notice, estimated without unknown data: each class in turn plays the unknown one.

The scores of features are fitted to the samples of the other classes, small networks stand in for the head, held-out
samples of the other classes are the reference, and the share of the left-out class that is called unknown is counted.
Samples whose features are permuted, each column by itself, are counted as well: all that a regression has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import Extracted
from brainet_pl.scores.expectation import Expectation
from brainet_pl.scores.reference import FEW, p_values
from brainet_pl.tasks.classification import predictive_scores
from brainet_pl.tasks.linear import PredictFunction, scalings
from brainet_pl.tasks.passes import Passes

if TYPE_CHECKING:
    from brainet_pl.scores.base import ScoreSet

MOST_ROWS = 5000  # training samples that the estimate reads
MOST_CLASSES = 10  # that are left out, one at a time
LEAST_CLASSES, MOST_FEATURES = 3, 3000  # fewer are left out where features are many: a density of them takes seconds
LEAST_IN_CLASS = 5  # samples of a class below which the share of them that is noticed says nothing
DRAWS = 3  # choices of the reference where there are few held-out samples, and one choice is a matter of luck
MARGIN = 0.1  # share by which one score must be ahead of the joint one to replace it, beside two standard errors
NETWORKS, HIDDEN, PENALTY = 4, 32, 1e-3  # small networks that stand in for the head, and what their weights cost
MOST_NUMBERS = 5 * 10**5  # features times samples that they are trained on, in less than a second


@torch.no_grad()
def expect(
    scores: ScoreSet, seen: Extracted, held: Extracted, default: str, level: float = 0.05, choose: bool = True
) -> Expectation:
    """Estimate which share of unknown inputs a verdict will notice, and by which score it should go.

    Args:
        scores: fitted ones; they stay as they are.
        seen: features of training samples and their labels from 0 on; all 0 where there are no classes.
        held: the same of samples that nothing was trained on.
        default: the score that the verdict goes by where no other is clearly better.
        level: the share of known samples that may be called unknown.
        choose: whether one of the scores that `default` joins may take its place.
    """
    seen, held, parts = _in_order(seen.sample(MOST_ROWS)), _in_order(held), scores.parts_of(default)
    nothing = Expectation(default, parts, level)
    if len(held.targets) < least_held(level):
        doubt = f"by {len(held.targets)} held-out samples none can be called unknown, give at least {least_held(level)}"
        return nothing._replace(doubt=doubt)
    if "energy" in scores.units and len(torch.unique(seen.targets)) < 2:
        return nothing._replace(doubt="all samples are of one class")
    labels, doubt = classes_to_leave_out(seen, held, level)
    shares = {} if doubt else leave_classes_out(scores, seen, held, labels, level)
    mixed = noticed(scores, seen, held, shuffle_columns(held), level)
    if default not in mixed:
        return nothing._replace(doubt=f"{default} can't be computed without the head")
    if not doubt and bool(shares[default].isnan().any()):
        doubt = "scores are NaN or infinite for some samples"
    if doubt:
        return nothing._replace(permuted=mixed[default], doubt=doubt)
    rows = torch.bincount(torch.cat([seen.targets, held.targets]))[labels]
    best = clearly_best(shares, default, [part for part in parts if part in shares], rows) if choose else default
    found, worst = shares[best], int(shares[best].argmin())
    return Expectation(
        score=best,
        parts=scores.parts_of(best),
        level=level,
        noticed=float(found.mean()),
        error=standard_error(found, found * (1 - found) / rows),
        worst=float(found[worst]),
        worst_class=int(labels[worst]),
        permuted=mixed[best],
    )


def least_held(level: float) -> int:
    """The least number of held-out samples by which one can be called unknown.

    >>> least_held(0.05)
    19
    """
    return math.ceil(1 / level - 1e-9) - 1


def _in_order(samples: Extracted) -> Extracted:
    """The samples in an order of their own, so that the estimate does not depend on the one they were read in."""
    features = samples.features.double().flatten(1)
    direction = torch.randn(features.shape[1], dtype=torch.double, generator=torch.Generator().manual_seed(0))
    return _rows(samples, (features @ direction.to(features.device)).argsort(stable=True))


def classes_to_leave_out(seen: Extracted, held: Extracted, level: float) -> tuple[Tensor, str]:
    """The numbers (K,) of the classes that can be left out, evenly chosen, and why there are none, or ""."""
    count = torch.bincount(torch.cat([seen.targets, held.targets]))
    present, large = int((count > 0).sum()), int((count >= LEAST_IN_CLASS).sum())
    enough = (count >= LEAST_IN_CLASS) & (count.sum() - count >= 2 * least_held(level))
    labels = enough.nonzero()[:, 0]
    if present < 3 or large == 2:
        return labels, f"it takes three classes of {LEAST_IN_CLASS} samples or more"
    if not len(labels) or min(len(seen.targets), MOST_NUMBERS // seen.features.shape[1]) < LEAST_IN_CLASS * present:
        return labels, f"{len(seen.targets):,} samples are too few for {present:,} classes"
    most = min(len(labels), MOST_CLASSES, max(LEAST_CLASSES, MOST_FEATURES // seen.features.shape[1]))
    return labels[torch.linspace(0, len(labels) - 1, most).round().long()], ""


def leave_classes_out(
    scores: ScoreSet, seen: Extracted, held: Extracted, labels: Tensor, level: float
) -> dict[str, Tensor]:
    """Score → the share (K,) of each left-out class that is noticed."""
    bar = tqdm(labels, "unknown inputs: leaving classes out", disable=None, delay=2, leave=False)
    found = [_leave_out(scores, seen, held, int(label), level) for label in bar]
    return {name: torch.tensor([one[name] for one in found]) for name in _in_all(found)}


def _leave_out(scores: ScoreSet, seen: Extracted, held: Extracted, label: int, level: float) -> dict[str, float]:
    """Score → the share of one class that is noticed by models of the others.

    Held-out samples of the other classes are the reference. Where they are few, as many as the verdict has are drawn
    from all samples of the other classes, a few times: one choice of few would be a matter of luck.
    """
    strange = _join(seen, held, lambda targets: targets == label)
    if int((held.targets != label).sum()) >= FEW // 2:
        return noticed(scores, _rows(seen, seen.targets != label), _rows(held, held.targets != label), strange, level)
    others = _join(seen, held, lambda targets: targets != label)
    size, found = min(len(held.targets), len(others.targets) // 2), []
    for draw in range(DRAWS):
        order = torch.randperm(len(others.targets), generator=torch.Generator().manual_seed(draw))
        found.append(noticed(scores, _rows(others, order[size:]), _rows(others, order[:size]), strange, level))
    return {name: sum(one[name] for one in found) / DRAWS for name in _in_all(found)}


def noticed(
    scores: ScoreSet, learned: Extracted, known: Extracted, strange: Extracted, level: float
) -> dict[str, float]:
    """Score → the share of strange samples called unknown by copies fitted to `learned`, with `known` as reference.

    NaN where a score is not finite: such samples are called unknown for a reason of their own.
    """
    labels = torch.unique(learned.targets, return_inverse=True)[1]
    if "energy" in scores.units and int(labels.max()) == 0:  # one class alone has no prediction to be unsure of
        return dict.fromkeys(scores.units, math.nan)
    copies = scores.refitted(learned.output, labels)
    classify = fit_networks(learned.features, labels) if int(labels.max()) > 0 else None

    def run(rows: Extracted) -> Passes:
        logits = rows.features.new_zeros(len(rows.features), 1) if classify is None else classify(rows.features)
        probs = logits.softmax(dim=1)
        predicted = {} if classify is None else predictive_scores(probs[None], logits[None])
        return Passes(logits[None], None, rows.features, probs, predicted, rows.output)

    usual = run(known)
    reference: dict[str, Tensor] = copies(usual)
    if not all(bool(values.isfinite().all()) for values in reference.values()):
        return dict.fromkeys(scores.units, math.nan)
    for score in copies:
        score.observe(usual.with_features_of(score.taps), reference)
    copies.set_reference(reference)
    found = {name: values for name, values in copies(run(strange)).items() if name in copies.reference}
    called = {name: (p_values(values, copies.reference[name]) <= level).double() for name, values in found.items()}
    return {name: float(c.mean()) if bool(found[name].isfinite().all()) else math.nan for name, c in called.items()}


def fit_networks(x: Tensor, labels: Tensor) -> PredictFunction:
    """A few small networks on features (N, d) and labels (N,), trained at once by L-BFGS; gives mean logits (B, C)."""
    step = -(-x.numel() // MOST_NUMBERS)
    prepare = scalings(x)[0]
    z, target = prepare(x[::step]).float(), labels[::step].repeat(NETWORKS)
    sizes = (z.shape[1], HIDDEN, int(labels.max()) + 1)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(NETWORKS, m, n, generator=generator) / m**0.5 for m, n in pairwise(sizes)]
    biases = [torch.zeros(NETWORKS, 1, n) for n in sizes[1:]]
    found = [tensor.requires_grad_() for tensor in (*weights, *biases)]

    def logits(rows: Tensor) -> Tensor:
        hidden = torch.baddbmm(biases[0], rows.expand(NETWORKS, *rows.shape), weights[0]).relu()
        return torch.baddbmm(biases[1], hidden, weights[1])

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = PENALTY * sum(weight.square().sum() for weight in weights)
        value = NETWORKS * F.cross_entropy(logits(z).flatten(0, 1), target) + penalty
        value.backward()
        return torch.as_tensor(value)

    optimizer = torch.optim.LBFGS(found, max_iter=30, line_search_fn="strong_wolfe")
    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    for tensor in found:
        tensor.requires_grad_(False)
    return lambda rows: logits(prepare(rows).float()).mean(dim=0)


def clearly_best(shares: Mapping[str, Tensor], default: str, parts: Sequence[str], rows: Tensor) -> str:
    """The one of `parts` that notices more than `default` by a clear margin over left-out classes, else `default`."""
    best = max(parts, key=lambda part: float(shares[part].mean()), default=default)
    ahead = shares[best] - shares[default]
    luck = sum(shares[name] * (1 - shares[name]) / rows for name in (best, default))
    clear = float(ahead.mean()) >= max(MARGIN, 2 * standard_error(ahead, luck))
    return best if clear else default


def standard_error(values: Tensor, luck: Tensor | float = 0.0) -> float:
    """Of the mean of values (K,) over classes, each with a variance of its own, `luck` (K,), by its few samples."""
    between = float(values.var()) if len(values) > 1 else 0.25
    return math.sqrt((between + float(torch.as_tensor(luck).mean())) / len(values))


def shuffle_columns(rows: Extracted) -> Extracted:
    """The same samples with every column of their features permuted by itself."""
    generator = torch.Generator().manual_seed(0)

    def shuffled(values: Tensor) -> Tensor:
        return values.gather(0, torch.rand(values.shape, generator=generator).argsort(dim=0).to(values.device))

    return Extracted(rows.output.map(shuffled), rows.targets)


def _rows(rows: Extracted, which: Tensor) -> Extracted:
    return Extracted(rows.output[which], rows.targets[which])


def _join(one: Extracted, other: Extracted, which: Callable[[Tensor], Tensor]) -> Extracted:
    parts = [_rows(rows, which(rows.targets)) for rows in (one, other)]
    output = BackboneOutput.concat([part.output for part in parts])
    return Extracted(output, torch.cat([part.targets for part in parts]))


def _in_all(found: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in found[0] if all(name in one for one in found)]
