"""Tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as a Markdown table; floats with three digits, all else as it is."""
    print(f"\n{markdown(header, rows)}")


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as a Markdown table; floats with three digits, all else as it is."""
    lines = ["| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row) + " |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *lines])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """mean ± standard deviation, the latter 0 for a single value.

    >>> spread([1.0, 2.0, 3.0])
    '2.00 ± 1.00'
    """
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"
