"""What a fit or a test says at its end, in about ten lines: numbers, verdict, cost, where the files are, what is next.

Pure functions from numbers to lines; a callback and the command line print them. Nothing here needs torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from brainet_pl.evaluation.chart import readable
from brainet_pl.evaluation.report.verdict import CALIBRATED, History, Line, stage_of, verdict_of
from brainet_pl.evaluation.schema import Record
from brainet_pl.metrics.catalogue import facts_of

# What is shown, in this order, by its name on the line.
SHOWN = {
    "cls/Acc": "accuracy",
    "reg/RMSE": "RMSE",
    "cls/NLL": "NLL",
    "reg/NLL": "NLL",
    "cal/ECE": "ECE",
    "cls/Brier": "Brier",
    "cal/QCE": "QCE",
    "cal/coverage95": "in the 95 % interval",
}
MOST_SETS = 4  # unknown sets on the terminal; the page has all
MOST_SENTENCES = 4
MARKS = {"good": "+", "fair": "~", "poor": "-"}


def numbers_line(values: Mapping[str, float]) -> str:
    """Metrics by their keys without the stage → one line of the few that matter.

    >>> numbers_line({"cls/Acc": 0.98127, "cls/NLL": 0.0567, "cal/ECE": 0.0237, "sc/AURC": 0.1})
    'accuracy 98.1 %, NLL 0.0567, ECE 2.4 %'
    """
    shown = []
    for key, name in SHOWN.items():
        if key in values:
            share = facts_of(key).unit == "share"
            number = f"{100 * values[key]:.1f} %" if share else f"{values[key]:.3g}"
            shown.append(f"{number} {name}" if name.startswith("in ") else f"{name} {number}")
    return ", ".join(shown)


def lines_of_test(
    record: Record, history: History | None = None, *, folder: str, page: str | None = None, cost: str | None = None
) -> list[str]:
    """The lines after a test.

    Args:
        record: Of the test.
        history: The curves of the fit, for its comparison with simpler layers.
        folder: Of the run.
        page: The file of its page, if it was written.
        cost: What a prediction costs, in a line.
    """
    values, known = record.values(), record.known_set()
    plain, calibrated = stage_of(values, "test/"), stage_of(values, CALIBRATED)
    lines = [f"test, {0 if known is None else known.samples:,} samples: {numbers_line(plain)}"]
    if numbers_line(calibrated):
        lines.append(f"after calibration: {numbers_line(calibrated)}")
    lines += _set_lines(record)
    lines += [f"{MARKS[line.tone]} {_short(line)}" for line in _chosen(verdict_of(record, history))]
    if record.model.promise:
        lines.append(f"risk control: {record.model.promise}")
    if cost:
        lines.append(f"a prediction costs: {cost}")
    lines.append(f"files: {folder}")
    lines.append(f"next: open {page}" if page else f"next: brainet report {folder}")
    return lines


def lines_of_fit(
    history: History,
    last: Mapping[str, float],
    *,
    monitor: str | None,
    higher: bool,
    folder: str,
    checkpoint: str | None,
    tested: bool,
    trust: str | None = None,
) -> list[str]:
    """The lines after a fit.

    Args:
        history: The curves of the fit.
        last: Metric → value of the last validation, where there are no curves.
        monitor: The metric by which the best checkpoint was chosen.
        higher: Whether more of it is better.
        folder: Of the run.
        checkpoint: The best checkpoint, if there is one.
        tested: Whether a test follows, which will say what is next.
        trust: The word that the next command needs, for the checkpoint names code of the user's own.
    """
    when, values = _at_best(history, monitor, higher)
    values = stage_of(values or last, "val/")
    lines = [f"fit, {when}: {numbers_line(values)}"] if numbers_line(values) else []
    lines.append(f"files: {folder}")
    if checkpoint is not None:
        lines.append(f"checkpoint: {checkpoint}")
        words = " ".join(filter(None, [shlex.quote(checkpoint), trust]))
        lines += [] if tested else [f"next: brainet test --ckpt_path {words}"]
    return lines


def _at_best(history: History, monitor: str | None, higher: bool) -> tuple[str, dict[str, float]]:
    """When the monitored metric was best, and all of validation then; the last values if nothing is monitored."""
    curves = {key: curve for key, curve in history.items() if key.startswith("val/") and curve[1]}
    if monitor is None or monitor not in curves:
        return "last validation", {key: curve[1][-1] for key, curve in curves.items()}
    steps, values = curves[monitor]
    best = steps[values.index((max if higher else min)(values))]
    at_best = {}
    for key, curve in curves.items():
        by_step = dict(zip(*curve, strict=True))
        if best in by_step:
            at_best[key] = by_step[best]
    return "validation at the best checkpoint", at_best


def _set_lines(record: Record) -> list[str]:
    """Of each unknown set its AUROC and the share that is called unknown."""
    aurocs, lines, unknown = record.headline_aurocs(), [], record.unknown_sets()
    for part in unknown[:MOST_SETS]:
        auroc, facts = aurocs.get(part.name), []
        if auroc is not None:
            facts.append(f"AUROC {100 * auroc:.1f} % ({readable(record.headline_score or '')})")
        if part.unknown is not None and part.samples:
            facts.append(f"{100 * part.unknown / part.samples:.0f} % of {part.samples:,} called unknown")
        if facts:
            lines.append(f"unknown set {part.name}: {', '.join(facts)}")
    more = len(unknown) - MOST_SETS
    return [*lines, f"and {more} more unknown sets, see the page"] if more > 0 else lines


def _chosen(lines: Sequence[Line]) -> list[Line]:
    """The judged sentences in their order; where there are many, bad news stay."""
    judged = [line for line in lines if line.tone in MARKS]
    worst_first = sorted(judged, key=lambda line: list(MARKS).index(line.tone), reverse=True)[:MOST_SENTENCES]
    return [line for line in judged if line in worst_first]


def _short(line: Line) -> str:
    """The sentence up to its numbers: they stand above, and on the page.

    >>> _short(Line("Most unknown inputs (svhn) are noticed: 92\u00a0% of 100 are called unknown."))
    'Most unknown inputs (svhn) are noticed'
    """
    return re.split(r"[:;.](?:\s|$)", line.text, maxsplit=1)[0].replace("\u00a0", " ")
