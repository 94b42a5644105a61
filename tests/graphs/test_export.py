"""Learned graphs in the hands of other tools."""

import numpy as np
import pandas as pd
import pytest

from brainet_pl.graphs import (
    PDAG,
    draw_graph,
    edge_table,
    rai,
    structure_posterior,
    to_networkx,
    to_pgmpy,
    write_bif,
    write_graphml,
)
from brainet_pl.graphs.draw_graph import _layout, _spread


def graph():
    """rain → wet ← sprinkler, season — mood, and a variable of its own."""
    A = np.zeros((6, 6), dtype=bool)
    A[0, 1] = A[2, 1] = A[3, 4] = A[4, 3] = True
    return PDAG(A, ("rain", "wet", "sprinkler", "season", "mood", "coin"))


def test_a_table_of_edges():
    table = edge_table(graph())
    assert [(edge.first, edge.mark, edge.second) for edge in table] == [
        ("rain", "→", "wet"),
        ("sprinkler", "→", "wet"),
        ("season", "—", "mood"),
    ]
    p = np.zeros((6, 6))
    p[0, 1], p[1, 2], p[2, 1], p[0, 5], p[5, 0], p[0, 3], p[3, 0] = 0.7, 0.1, 0.8, 0.02, 0.02, 0.1, 0.2
    table = edge_table(graph(), p)
    assert [(edge.first, edge.second) for edge in table] == [
        ("sprinkler", "wet"),
        ("rain", "wet"),
        ("season", "rain"),
    ]
    assert [edge.mark for edge in table] == ["→", "→", ""]  # the last is not in the graph
    assert (table[0].joined, table[0].forward, table[0].backward) == pytest.approx((0.9, 0.8, 0.1))
    frame = pd.DataFrame(table)
    assert list(frame.columns) == ["first", "second", "mark", "joined", "forward", "backward"]
    assert edge_table(PDAG(graph().adjacency))[0].first == "0"


def test_networkx_and_graphml(tmp_path):
    networkx = pytest.importorskip("networkx")
    found = to_networkx(graph())
    assert set(found.nodes) == set(graph().names)
    assert found.edges["rain", "wet"]["directed"]
    assert not found.has_edge("wet", "rain")
    assert not found.edges["season", "mood"]["directed"]
    assert not found.edges["mood", "season"]["directed"]
    write_graphml(graph(), tmp_path / "graph.graphml", np.full((6, 6), 0.25))
    again = networkx.read_graphml(tmp_path / "graph.graphml")
    assert set(again.edges) == set(found.edges)
    assert again.edges["rain", "wet"]["probability"] == 0.25


def lawn(n=2000):
    rng = np.random.default_rng(0)
    rain, sprinkler = rng.choice(["no", "yes"], n, p=[0.7, 0.3]), rng.choice(["off", "on"], n)
    soaked = (rain == "yes") | (sprinkler == "on")
    wet = np.where(soaked ^ (rng.random(n) < 0.1), "wet lawn", "dry")
    return pd.DataFrame({"rain": rain, "sprinkler, front": sprinkler, "wet": wet})


def test_pgmpy():
    pytest.importorskip("pgmpy")
    plain = to_pgmpy(graph())
    assert ("rain", "wet") in plain.directed_edges
    assert set(plain.nodes) == set(graph().names)
    data = lawn()
    network = to_pgmpy(rai(data), data, ess=1e-6)
    assert network.check_model()
    assert set(network.edges) == {("rain", "wet"), ("sprinkler, front", "wet")}
    counts = data.groupby(["rain", "sprinkler, front"])["wet"].apply(lambda wet: (wet == "dry").mean())
    table = network.get_cpds("wet")
    for (rain, sprinkler), share in counts.items():
        given = {"rain": rain, "sprinkler, front": sprinkler, "wet": "dry"}
        assert table.get_value(**given) == pytest.approx(share, abs=1e-4)


def test_a_bif_file_is_what_readers_expect(tmp_path):
    pytest.importorskip("pgmpy")
    from pgmpy.readwrite import BIFReader

    data = lawn()
    write_bif(rai(data), data, tmp_path / "lawn.bif")
    reader = BIFReader(str(tmp_path / "lawn.bif"))
    assert set(reader.variable_names) == {"rain", "sprinkler__front", "wet"}
    assert sorted(reader.variable_parents["wet"]) == ["rain", "sprinkler__front"]
    assert reader.variable_states["wet"] == ["dry", "wet_lawn"]
    rainy = (data["rain"] == "yes").mean()
    assert np.asarray(reader.variable_cpds["rain"]).ravel()[1] == pytest.approx(rainy, abs=0.01)
    assert reader.get_model().check_model()


def test_what_has_no_tables_is_refused(tmp_path):
    numbers = np.random.default_rng(0).normal(size=(50, 6))
    with pytest.raises(ValueError, match="numbers with a fraction in column 0"):
        write_bif(graph(), numbers, tmp_path / "no.bif")
    with pytest.raises(ValueError, match="a column for each of 6 variables, got 2"):
        write_bif(graph(), numbers[:, :2], tmp_path / "no.bif")
    with pytest.raises(ValueError, match="differ in letters"):
        write_bif(PDAG(np.zeros((2, 2), dtype=bool), ("a b", "a-b")), numbers[:, :2], tmp_path / "no.bif")
    assert not list(tmp_path.iterdir())


def test_a_posterior_has_its_own_table():
    found = structure_posterior(lawn(300), draws=40)
    table = found.edges()
    assert {(edge.first, edge.second) for edge in table[:2]} == {("rain", "wet"), ("sprinkler, front", "wet")}
    assert table[0].joined == pytest.approx(1, abs=0.05)


def test_a_drawing_shows_every_variable_and_edge(tmp_path):
    figure = draw_graph(graph(), np.full((6, 6), 0.3))
    axes = figure.axes[0]
    assert {text.get_text() for text in axes.texts} == set(graph().names)
    assert len(axes.patches) == 3
    figure.savefig(tmp_path / "graph.png")
    assert (tmp_path / "graph.png").stat().st_size > 1000
    draw_graph(PDAG(np.zeros((1, 1), dtype=bool)))
    with pytest.raises(ValueError, match="at most 200 variables"):
        draw_graph(PDAG(np.zeros((201, 201), dtype=bool)))


def test_boxes_do_not_touch_and_causes_are_above(random_dag):
    for seed in range(5):
        dag = random_dag(seed, 40, 0.06)
        width = np.random.default_rng(seed).uniform(0.3, 1.5, 40)
        alone = np.flatnonzero(~(dag | dag.T).any(axis=0)).tolist()
        x, y, points = _layout(dag, width, alone)
        for i, j in np.argwhere(dag).tolist():
            assert y[i] > y[j]
            assert points[i, j][0][0] == x[i]
            assert points[i, j][-1][0] == x[j]
        for i in range(40):
            for j in range(i):
                assert y[i] != y[j] or abs(x[i] - x[j]) > (width[i] + width[j]) / 2


def test_members_of_a_layer_move_as_little_as_they_can():
    x = np.array([0.0, 0.1, 5.0])
    _spread([0, 1, 2], x, [1.0, 1.0, 1.0])
    assert x == pytest.approx([0.05 - 0.675, 0.05 + 0.675, 5.0])
