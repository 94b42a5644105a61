"""What an edge means in words: which column depends on which, how, how strongly, and how sure that is."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainet_pl.graphs.export import edge_table
from brainet_pl.graphs.knowledge import Knowledge
from brainet_pl.graphs.pdag import PDAG
from brainet_pl.structure.discretize import normal_scores
from brainet_pl.tables import Column, read_column

Floats = NDArray[np.float64]
LEAST_ROWS = 5  # of a pair of categories whose lift is told: that of fewer is chance
CAUSES = {  # nothing else in a table makes them what they are
    *("sex", "gender", "age", "race", "ethnicity"),
    *("born", "birth", "birthday", "birthdate", "birthyear", "dob"),
    *("date", "year", "month", "day", "weekday", "hour", "season", "quarter", "timestamp"),
}


class Dependence(NamedTuple):
    """One line of a table of dependences.

    Attributes:
        effect, cause: "effect depends on cause"; where `directed` is False it may as well be the other way.
        directed: whether the graph has an arrow.
        how: the dependence in words.
        strength: the correlation ρ of two numbers by ranks; the share η² of a number that a category explains; Cramér's
            V of two categories. All but ρ are between 0 and 1.
        probability: of the edge, whichever its direction; 1 for a graph without probabilities.
    """

    effect: str
    cause: str
    directed: bool
    how: str
    strength: float
    probability: float


def dependence_table(
    graph: PDAG, frame: Any, probabilities: Floats | None = None, least: float = 0.05
) -> list[Dependence]:
    """What each edge of a graph over a data frame means; `pandas.DataFrame` of it is a table for people.

    The numbers are of the two columns by themselves, not given others. Pass `graph()` and `edge_probabilities` of a
    `structure_posterior` to know how sure each edge is.

    Args:
        graph: of the columns of the frame, with their names.
        frame: the data frame that it was learned from.
        probabilities: (d, d) of arrows.
        least: the probability from which an edge is listed.

    Example:
        >>> import pandas
        >>> frame = pandas.DataFrame({"colour": ["red"] * 6 + ["blue"] * 6, "size": [3.0, 3.5] * 3 + [1.0, 1.5] * 3})
        >>> graph = PDAG(np.array([[0, 1], [0, 0]], dtype=bool), ("colour", "size"))
        >>> line = dependence_table(graph, frame)[0]
        >>> f"{line.effect} depends on {line.cause}: {line.how}"
        'size depends on colour: highest for red (3.25 on average), lowest for blue (1.25)'
    """
    columns = {str(name): (read_column(str(name), frame[name], most=max(2, len(frame))), frame[name]) for name in frame}
    found = []
    for edge in edge_table(graph, probabilities, least):
        if not edge.mark:
            continue
        how, strength = _explain(columns[edge.second], columns[edge.first])
        found.append(Dependence(edge.second, edge.first, edge.mark == "→", how, strength, edge.joined))
    return found


def _explain(effect: tuple[Column, Any], cause: tuple[Column, Any]) -> tuple[str, float]:
    """How one column goes with another, and how strongly."""
    kinds = [column.kind == "category" for column, _ in (effect, cause)]
    if all(kinds):
        return _lift(effect, cause)
    if any(kinds):
        number, category = (cause, effect) if kinds[0] else (effect, cause)
        how, share = _means(number, category)
        return (f"{number[0].name} is {how}" if kinds[0] else how), share
    x, y = (normal_scores(column.encode(values).numbers)[:, 0] for column, values in (cause, effect))
    rho = float(np.mean(x * y))
    return f"{'rises' if rho > 0 else 'falls'} with it, ρ = {rho:.2f}", rho


def _means(number: tuple[Column, Any], category: tuple[Column, Any]) -> tuple[str, float]:
    """For which category a number is highest and lowest, and the share of its variance that categories explain."""
    values = number[0].encode(number[1]).numbers[:, 0]
    codes, names = category[0].codes(category[1]), category[0].categories or []
    count = np.bincount(codes, minlength=len(names))
    means = np.bincount(codes, values, len(names)) / np.maximum(count, 1)
    explained = float((count * (means - values.mean()) ** 2).sum() / max(len(values) * values.var(), 1e-300))
    often = np.flatnonzero(count >= min(LEAST_ROWS, count.max()))
    high, low = often[means[often].argmax()], often[means[often].argmin()]
    how = f"highest for {names[high]} ({means[high]:.3g} on average), lowest for {names[low]} ({means[low]:.3g})"
    return how, explained


def _lift(effect: tuple[Column, Any], cause: tuple[Column, Any]) -> tuple[str, float]:
    """Which pair of categories comes most often beside what chance gives, and Cramér's V."""
    rows = [column.codes(values) for column, values in (effect, cause)]
    names = [column.categories or [] for column, _ in (effect, cause)]
    counts = np.zeros((len(names[0]), len(names[1])))
    np.add.at(counts, tuple(rows), 1.0)
    chance = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / counts.sum()
    lift = np.where((counts >= LEAST_ROWS) & (chance > 0), counts / np.maximum(chance, 1e-300), 0.0)
    i, j = np.unravel_index(int(lift.argmax()), lift.shape)
    squared = ((counts - chance) ** 2 / np.maximum(chance, 1e-300)).sum() / counts.sum()
    strength = float(np.sqrt(squared / max(1, min(counts.shape) - 1)))
    return f"{names[0][i]} where it is {names[1][j]}, {lift[i, j]:.1f} times as often as by chance", strength


def knowledge_of_columns(frame: Any) -> Knowledge:
    """What the types and names of columns say before the data: no arrow leads into a date, an age or a sex.

    Columns of dates, and those with a word such as sex, age or year in their name, come before all others; among
    themselves nothing is assumed. Look at the result, and give your own where it is wrong.

    Example:
        >>> import pandas
        >>> frame = pandas.DataFrame({"income": [1.0, 2.0], "Sex": ["m", "f"], "sold": ["2024-01-01", "2024-01-02"]})
        >>> knowledge_of_columns(frame).tiers
        [['Sex', 'sold'], ['income']]
    """
    first: list[str] = []
    others: list[str] = []
    for name in map(str, frame.columns):
        words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
        is_cause = (
            not CAUSES.isdisjoint(words) or read_column(name, frame[name], most=max(2, len(frame))).kind == "date"
        )
        (first if is_cause else others).append(name)
    return Knowledge(tiers=[first, others]) if first and others else Knowledge()
