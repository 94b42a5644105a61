"""Edges in words, and what the types of columns say before the data."""

import numpy as np
import pytest

from brainet_pl.graphs import dependence_table, knowledge_of_columns, rai
from brainet_pl.graphs.draw_graph import _apart

pandas = pytest.importorskip("pandas")


def people(rows=600):
    rng = np.random.default_rng(0)
    sex = rng.choice(["f", "m"], rows)
    job = np.where(rng.random(rows) < 0.8, np.where(sex == "m", "smith", "nurse"), rng.choice(["smith", "nurse"], rows))
    pay = np.where(job == "nurse", 3.0, 2.0) + 0.3 * rng.normal(size=rows)
    return pandas.DataFrame({"sex": sex, "job": job, "pay": pay, "rent": 10 - pay + 0.2 * rng.normal(size=rows)})


def test_edges_are_told_in_words():
    frame = people()
    lines = {(line.effect, line.cause): line for line in dependence_table(rai(frame), frame)}
    told = {frozenset(pair): line for pair, line in lines.items()}
    number = told[frozenset({"job", "pay"})]
    means = frame.groupby("job")["pay"].mean()
    assert f"highest for nurse ({means['nurse']:.3g} on average), lowest for smith ({means['smith']:.3g})" in number.how
    between = frame.groupby("job")["pay"].transform("mean").var(ddof=0) / frame["pay"].var(ddof=0)
    assert number.strength == pytest.approx(between)
    down = told[frozenset({"pay", "rent"})]
    assert "falls with it, ρ = -0.9" in down.how
    assert down.strength == pytest.approx(frame["pay"].corr(frame["rent"], method="spearman"), abs=0.05)
    pair = told[frozenset({"sex", "job"})]
    share = pandas.crosstab(frame["job"], frame["sex"], normalize=True)
    lifts = {(i, j): share.loc[i, j] / share.loc[i].sum() / share[j].sum() for i in share.index for j in share}
    assert f"{max(lifts.values()):.1f} times as often as by chance" in pair.how
    assert all(line.probability == 1 for line in lines.values())


def test_probabilities_come_along():
    frame = people()
    graph = rai(frame)
    found = dependence_table(graph, frame, 0.4 * graph.adjacency)
    assert {line.probability for line in found} <= {0.4, 0.8}


def test_columns_that_nothing_causes():
    frame = people()
    known = knowledge_of_columns(frame)
    assert known.tiers == [["sex"], ["job", "pay", "rent"]]
    graph = rai(frame, knowledge=known)
    names = list(graph.names)
    assert not graph.directed[:, names.index("sex")].any()
    assert not knowledge_of_columns(frame[["pay", "rent"]]).tiers
    for name in ("birthYear", "age_at_entry", "DATE"):
        assert knowledge_of_columns(frame.rename(columns={"sex": name})).tiers[0] == [name]
    assert not knowledge_of_columns(frame.rename(columns={"sex": "wages"})).tiers


def test_no_two_heads_meet():
    ways = {(0, 3): [(0.0, 0.0), (1.0, -1.0)], (1, 3): [(2.0, 0.0), (1.0, -1.0)], (2, 3): [(1.0, 0.0), (1.0, -1.0)]}
    ends = {arrow: points[-1] for arrow, points in _apart(ways, np.ones(4)).items()}
    assert len(set(ends.values())) == 3
    assert ends[0, 3][0] < ends[2, 3][0] < ends[1, 3][0]  # in the order in which they come
