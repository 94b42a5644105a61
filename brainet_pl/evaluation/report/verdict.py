"""What a test found, in a few plain sentences with their numbers: the first thing on a page. `rules` colours them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from brainet_pl.evaluation.chart import Chart, Series, readable
from brainet_pl.evaluation.report import rules
from brainet_pl.evaluation.report.rules import Share, Tone
from brainet_pl.evaluation.schema import DataSet, Record, ShiftedMeasures

History = Mapping[str, tuple[list[float], list[float]]]
BASELINES = {"linear": "a linear layer on the same features", "own": "the layer that it replaces"}
MOST_NAMES = 5  # of classes in a sentence
CALIBRATED = "test/scaled/"  # of the keys of metrics after calibration


class Line(NamedTuple):
    """A sentence, and how good the news is; the sentence says it too."""

    text: str
    tone: Tone = "plain"


class Bins(NamedTuple):
    """What a reliability chart tells of all its bins: confidence less accuracy, and the ECE that chance alone gives."""

    lean: float
    chance: float


def verdict_of(record: Record, history: History | None = None) -> list[Line]:
    """The sentences that a record, and the curves of its fit, allow; see `rules.RULES` for their colours."""
    values, known = record.values(), record.known_set()
    final = dict(values)  # of the prediction that a user gets
    for key, value in stage_of(values, CALIBRATED).items():
        final[f"test/{key}"] = value
    samples = 0 if known is None else known.samples
    chart = next((chart for chart in record.charts if chart.name == "test/reliability"), None)
    lines = [
        _accuracy(final, samples),
        _never_predicted(record),
        _errors(final, samples),
        _calibration(values, chart, samples),
        _intervals(values, samples),
        _calibrator(record, values),
        *_shifts(record.shifts),
        *_unknown(record),
        _known(record),
        _expected(record),
        _refusal(final),
        _promise(record),
        *_baselines(history or {}),
    ]
    return [line for line in lines if line is not None]


def stage_of(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The metrics of a stage by their keys without it."""
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _percent(value: float) -> str:
    """Two digits of a share: 1.5 %, 97 %, 0.04 %."""
    shown = 100 * value
    return f"{shown:.0f}\u00a0%" if shown >= 9.95 else f"{shown:.2g}\u00a0%"


def _line(text: str, tone: Tone, samples: int) -> Line:
    """A judged sentence about so many samples; few make it doubtful."""
    few = f" Only {samples:,} samples: too few to be sure." if samples < rules.FEW else ""
    return Line(text + few, rules.doubted(tone, samples))


def _accuracy(values: Mapping[str, float], samples: int) -> Line | None:
    accuracy = values.get("test/cls/Acc")
    return None if accuracy is None else Line(f"{100 * accuracy:.1f}\u00a0% of {samples:,} test samples are right.")


def _never_predicted(record: Record) -> Line | None:
    """The classes that the test set has and no sample is taken for."""
    if record.confusion is None:
        return None
    counts = record.confusion.counts
    missing = []
    for place, name in enumerate(record.confusion.names):
        if sum(counts[place]) and not any(row[place] for row in counts):
            missing.append(f"{name} (n\u00a0=\u00a0{sum(counts[place]):,})")
    if not missing:
        return None
    shown = ", ".join(missing[:MOST_NAMES]) + (f" and {len(missing) - MOST_NAMES} more" if missing[MOST_NAMES:] else "")
    which = "class" if len(missing) == 1 else "classes"
    return Line(f"Never predicted: no test sample is taken for the {which} {shown}.", "poor")


def _errors(values: Mapping[str, float], samples: int) -> Line | None:
    error = values.get("test/reg/RMSE")
    if error is None:
        return None
    return Line(f"Predictions of {samples:,} test samples are off by {error:.3g}, in units of the target (RMSE).")


def _calibration(values: Mapping[str, float], chart: Chart | None, samples: int) -> Line | None:
    """How far confidence and accuracy lie apart, of the prediction that a user gets."""
    before, after = values.get("test/cal/ECE"), values.get(f"{CALIBRATED}cal/ECE")
    error = before if after is None else after
    if error is None:
        return None
    bins = _bins(chart, last=after is not None)
    tone = rules.up_to(error, rules.ECE, bins.chance if bins else 0.0)
    text = "Confidence" if after is None else "After calibration, confidence"
    text += " can be read as a probability: it and" if tone == "good" else " and"
    text += f" accuracy differ by {_percent(error)} on average over bins of confidence (calibration error, ECE)"
    if bins is not None:
        text += _lean(bins.lean, tone)
    text += "."
    if tone == "fair" and bins is not None and error <= rules.CHANCE * bins.chance:
        text += f" With {samples:,} samples chance alone gives about {_percent(bins.chance)}."
    return _line(text, tone, samples)


def _lean(lean: float, tone: Tone) -> str:
    """On which side of the accuracy the confidence lies."""
    side, feeling = ("above", "too sure") if lean >= 0 else ("below", "not sure enough")
    text = f"; over all samples confidence is {100 * abs(lean):.2g} points {side} accuracy"
    return text if tone == "good" else f"{text}, {feeling}"


def _bins(chart: Chart | None, last: bool) -> Bins | None:
    """What the first or the last curve of a reliability chart says; None without one."""
    if chart is None or len(chart.panels) < 2:
        return None
    curves = [series for series in chart.panels[0].series if series.kind == "line"]
    bars = chart.panels[1].series
    if not curves or len(curves) != len(bars):
        return None
    which = -1 if last else 0
    counts = [count for count in bars[which].y if count > 0]
    return _lean_and_chance(curves[which], counts) if len(counts) == len(curves[which].x) else None


def _lean_and_chance(curve: Series, counts: Sequence[float]) -> Bins:
    """Confidence less accuracy over all bins, of so many samples each, and the ECE that chance alone gives."""
    total, gaps, noise = sum(counts), 0.0, 0.0
    for count, confidence, accuracy in zip(counts, curve.x, curve.y, strict=True):
        gaps += count * (confidence - accuracy)
        if 0 < confidence < 1:
            # The mean distance of a binomial share from its mean is about √(2/π) standard deviations.
            noise += math.sqrt(2 / math.pi * count * confidence * (1 - confidence))
    return Bins(gaps / total, noise / total)


def _intervals(values: Mapping[str, float], samples: int) -> Line | None:
    """Whether intervals of a regression hold as many targets as they promise."""
    stage = CALIBRATED if f"{CALIBRATED}cal/QCE" in values else "test/"
    error, inside = values.get(f"{stage}cal/QCE"), values.get(f"{stage}cal/coverage95")
    if error is None or inside is None or not samples:
        return None
    chance = math.sqrt(2 / math.pi / samples) * 0.41  # 0.41: the mean of √(q (1 - q)) over levels q from 5 to 95 %
    tone = rules.up_to(error, rules.QCE, chance)
    promise = "hold what they promise within" if tone == "good" else "miss what they promise by"
    how = "" if tone == "good" else ", too narrow" if inside < 0.94 else ", too wide" if inside > 0.96 else ""
    when = "Intervals" if stage == "test/" else "After calibration, intervals"
    text = f"{when} {promise} {_percent(error)}{how}: {100 * inside:.1f}\u00a0% of the targets are inside the "
    return _line(f"{text}95\u00a0% interval.", tone, samples)


def _calibrator(record: Record, values: Mapping[str, float]) -> Line | None:
    """What calibration on validation data changed on the test set, or that it had nothing to learn from."""
    if record.model.calibration is not None and not record.model.calibrated:
        return Line(f"Not calibrated: {record.model.calibration} has learned nothing from validation data, so the "
                    "predictions are as the head gives them.", "fair")  # fmt: skip
    before, after = stage_of(values, "test/"), stage_of(values, CALIBRATED)
    named = {"cal/ECE": "ECE", "cal/QCE": "QCE", "cls/NLL": "NLL", "reg/NLL": "NLL"}
    pairs = {name: (before[key], after[key]) for key, name in named.items() if key in before and key in after}
    return _changed("Calibration on validation data", "", pairs)


def _changed(what: str, when: str, pairs: Mapping[str, tuple[float, float]]) -> Line | None:
    """A sentence on what calibration made of each error, from its values before and after."""
    if not pairs:
        return None
    added = {name: after - before for name, (before, after) in pairs.items()}
    limits = {name: rules.WORSE_NLL[0] if name == "NLL" else rules.WORSE_ECE[0] for name in added}
    tone = rules.calibrator(added.get("ECE", added.get("QCE")), added.get("NLL"))
    worse = " and ".join(name for name in added if added[name] > limits[name])
    better = " and ".join(name for name in added if added[name] < -limits[name])
    numbers = []
    for name, values in pairs.items():
        before, after = [f"{value:.3f}" if name == "NLL" else _percent(value) for value in values]
        numbers.append(f"{name} {before} before, {after} after")
    return Line(f"{what} {_effect(better, worse)}{when}: {'; '.join(numbers)}.", tone)


def _effect(better: str, worse: str) -> str:
    """What calibration does, by the names of the errors that it lowers and raises."""
    if better and worse:
        return f"lowers {better} and raises {worse}"
    if worse:
        return "makes it worse"
    return "helps" if better else "changes little"


def _shifts(shifts: Sequence[ShiftedMeasures]) -> list[Line]:
    """How confidence holds after shifts of the test set, and whether calibration makes that worse."""
    clean = [s for s in shifts if not s.severity]
    shifted = [s for s in shifts if s.severity]
    if not shifted:
        return []
    final = all(s.final is not None for s in shifted)
    pairs = {}
    for name in ("ECE", "NLL") if final else ():
        plain, calibrated = _mean(shifted, name, False), _mean(shifted, name, True)
        if plain is not None and calibrated is not None:
            pairs[name] = (plain, calibrated)
    lines = [_after_shifts(clean, shifted, final), _changed("Calibration", " after these shifts", pairs)]
    return [line for line in lines if line is not None]


def _after_shifts(clean: Sequence[ShiftedMeasures], shifted: Sequence[ShiftedMeasures], final: bool) -> Line | None:
    """How far confidence and accuracy lie apart after shifts, beside unchanged inputs."""
    error, accuracy = _mean(shifted, "ECE", final), _mean(shifted, "Acc", final)
    if error is None:
        return None
    before, right = _mean(clean, "ECE", final), _mean(clean, "Acc", final)
    text = f"After {len(shifted)} shifts of the test inputs confidence and accuracy differ by {_percent(error)} "
    text += "(ECE, mean over shifts)" + ("" if before is None else f", on unchanged inputs by {_percent(before)}")
    if accuracy is not None and right is not None:
        text += f"; {_percent(accuracy)} are right, {_percent(right)} without a shift"
    samples = min(shift.samples for shift in shifted)
    return _line(f"{text}.", rules.up_to(error, rules.SHIFTED_ECE), samples)


def _mean(shifts: Sequence[ShiftedMeasures], name: str, final: bool) -> float | None:
    """The mean of a measure over shifts, as predicted or after calibration; None where one of them lacks it."""
    total = 0.0
    for shift in shifts:
        value = ((shift.final if final else shift.predicted) or {}).get(name)
        if value is None:
            return None
        total += value
    return total / len(shifts) if shifts else None


def _flagged(part: DataSet) -> Share | None:
    return None if part.unknown is None or not part.samples else Share(part.unknown, part.samples)


def _unknown(record: Record) -> list[Line]:
    """Whether each unknown set is noticed: by what is called unknown, or without a verdict by its rank."""
    aurocs, known = record.headline_aurocs(), record.known_set()
    usual = None if known is None else _flagged(known)
    lines = []
    for part in record.unknown_sets():
        share, auroc, name = _flagged(part), aurocs.get(part.name), readable(part.name)
        rank = "" if auroc is None else _rank(auroc, record.headline_score or "")
        if share is not None and usual is not None:
            tone = rules.unknown(share, usual)
            text = f"{_noticed(name, tone)}: {_percent(share.value)} of {share.samples:,} are called unknown, "
            text += f"{_percent(usual.value)} of the known ones."
            lines.append(_line(f"{text} {rank}".rstrip(), tone, min(share.samples, usual.samples)))
        elif auroc is not None:
            lines.append(_line(f"Unknown inputs ({name}): {rank}", rules.ranking(auroc), part.samples))
    return lines


def _rank(auroc: float, score: str) -> str:
    """How often an unknown input has the higher score."""
    return (
        f"In {100 * auroc:.0f} of 100 pairs of an unknown and a known input the unknown one has the higher score "
        f"({readable(score)}, AUROC); chance is 50."
    )


def _noticed(name: str, tone: Tone) -> str:
    """Whether an unknown set is noticed, in words."""
    start = {"good": "Most unknown inputs", "fair": "Only some unknown inputs"}.get(tone, "Unknown inputs")
    return f"{start} ({name}) {'are not noticed' if tone == 'poor' else 'are noticed'}"


def _known(record: Record) -> Line | None:
    """How many known inputs are called unknown, beside what was promised and what chance adds."""
    known = record.known_set()
    share = None if known is None else _flagged(known)
    if share is None or record.level is None:
        return None
    level, behind = record.level, record.verdict_samples
    tone = rules.known(share, level, behind)
    most = level + rules.SURE * rules.level_error(level, share.samples, behind)
    rest = "" if behind is None else f" and {behind:,} validation samples behind the limit"
    text = f"{_percent(share.value)} of the known test samples are called unknown, where at most {_percent(level)} are "
    text += f"meant to be; up to {_percent(most)} may be chance, with {share.samples:,} of them{rest}."
    return _line(text, tone, share.samples)


def _expected(record: Record) -> Line | None:
    """What the verdict should notice, found without unknown data."""
    text = record.model.expected
    if text is None:
        return None
    sentence = f"{text[:1].upper()}{text[1:]}.".replace(" %", "\u00a0%")
    return Line(sentence, rules.expected(record.model.expected_share))


def _refusal(values: Mapping[str, float]) -> Line | None:
    accuracy, risk = values.get("test/cls/Acc"), values.get("test/sc/Risk@80Cov")
    if accuracy is None or risk is None or accuracy >= 1:
        return None
    return Line(f"Answering only the surest 80\u00a0% takes errors from {_percent(1 - accuracy)} to {_percent(risk)}.")


def _promise(record: Record) -> Line | None:
    """The share of inputs that may be answered with few errors, by calibration data alone."""
    text = record.model.promise
    return None if text is None else Line(f"Risk control {text}.".replace(" %", "\u00a0%"))


def _baselines(history: History) -> list[Line]:
    """Whether the head was worth it, by what the fit logged of the comparison with simpler layers."""
    last = {key: values[-1] for key, (_, values) in history.items() if key.startswith("versus/") and values}
    head, lines = last.get("versus/head/NLL"), []
    for name, title in BASELINES.items():
        other, error = last.get(f"versus/{name}/NLL"), last.get(f"versus/{name}/Error")
        if head is None or other is None:
            continue
        tone = rules.baseline(head - other, error)
        level = error is not None and abs(head - other) <= error
        how = "is level with" if level else "is better than" if head < other else "is worse than"
        beside = "" if error is None else f"; the difference has a standard error of {error:.2g}"
        text = (
            f"On validation data the head {how} {title}: NLL {head:.3g} and {other:.3g}, each at its best temperature"
        )
        lines.append(Line(f"{text}{beside}.", tone))
    return lines
