"""What notebooks show of a fitted estimator: what each column was read as."""

from __future__ import annotations

from html import escape

from brainet_pl.sklearn.rows import RowEncoder

MOST_SHOWN = 100  # columns


def describe_columns(encoder: RowEncoder, named: list[str] | None) -> list[tuple[str, str, str]]:
    """For each column its name, what it was read as, and what was decided about it."""
    features = encoder.features()
    missing = {feature.column for feature in features if feature.kind == "missing"}
    if encoder.columns is not None:
        found = [(column.name, column.describe(), column.note) for column in encoder.columns]
    else:
        names = named or [feature.column for feature in features if feature.kind != "missing"]
        found = [(name, "number", "") for name in names]
    lines = []
    for name, read, note in found:
        marked = ", and whether it is missing" if name in missing else ""
        lines.append((name, read + marked, note))
    return lines


def columns_html(encoder: RowEncoder, named: list[str] | None) -> str:
    """The same as a table of HTML, folded."""
    lines = describe_columns(encoder, named)
    rows = []
    for line in lines[:MOST_SHOWN]:
        cells = "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in line)
        rows.append(f"<tr>{cells}</tr>")
    if len(lines) > MOST_SHOWN:
        rows.append(f"<tr><td>and {len(lines) - MOST_SHOWN:,} more</td></tr>")
    head = "<tr><th>column</th><th>read as</th><th>note</th></tr>"
    return f"<details><summary>{len(lines):,} columns</summary><table>{head}{''.join(rows)}</table></details>"
