"""A picture of one graph with matplotlib alone: causes above effects, in layers, with few crossings."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from brainet_pl.graphs.export import names_of
from brainet_pl.graphs.pdag import PDAG
from brainet_pl.structure.pdag import Bools, dag_extension, topological_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

Floats = NDArray[np.float64]
Bends = dict[tuple[int, int], list[tuple[float, float]]]
SWEEPS = 24  # over the layers, to lay neighbours under each other
GAP = 0.35  # between boxes, in inches
CHARACTER = 0.085  # inches of one character of a name
PORT = 0.14  # between the ends of two arrows at one box, in inches
HEIGHT = 0.85  # inches from one layer to the next
LONGEST = 18  # characters of a name that are shown
INK, BOX, FRAME = "#33475b", "#eef3f8", "#8aa0b4"
MOST_VARIABLES = 200


def draw_graph(graph: PDAG, probabilities: Floats | None = None, ax: Axes | None = None) -> Figure:
    """Draw a graph of up to 200 variables; variables without an edge stand below.

    Args:
        graph: what to draw: arrows have heads, edges without direction none.
        probabilities: (d, d) of arrows; edges are the paler the less sure they are.
        ax: where to draw. None: a new figure, as large as it needs to be.
    """
    from matplotlib.figure import Figure

    d = len(graph.adjacency)
    if d > MOST_VARIABLES:
        raise ValueError(
            f"expected at most {MOST_VARIABLES} variables to draw, got {d}: write_graphml for a tool that zooms"
        )
    names = [shortened(name) for name in names_of(graph)]
    width = np.array([max(3, len(name)) * CHARACTER + 0.16 for name in names])
    alone = np.flatnonzero(~graph.skeleton.any(axis=0)).tolist()
    x, y, bends = _layout(dag_extension(graph.adjacency), width, alone)
    bends = _apart(bends, width)
    through = [place for place, _ in chain.from_iterable(bends.values())]
    left, right = min([*(x - width / 2), *through]), max([*(x + width / 2), *through])
    if ax is None:
        size = max(4.0, right - left + 0.5), max(2.0, HEIGHT * (y.max(initial=0) - y.min(initial=0) + 1))
        ax = Figure(figsize=size, layout="constrained").subplots()
    figure = ax.get_figure(root=True)
    assert figure is not None
    sure = np.ones((d, d)) if probabilities is None else np.minimum(1.0, probabilities + probabilities.T)
    for (i, j), points in bends.items():
        _draw_arrow(ax, graph, (i, j), points, float(sure[i, j]))
    for i, name in enumerate(names):
        box = {"boxstyle": "round,pad=0.25", "facecolor": BOX, "edgecolor": FRAME, "linewidth": 0.7}
        ax.text(x[i], y[i], name, ha="center", va="center", fontsize=8, color="black", bbox=box, zorder=2)
    ax.set_xlim(left - 0.2, right + 0.2)
    ax.set_ylim(y.min(initial=0) - 0.5, y.max(initial=0) + 0.5)
    ax.axis("off")
    return figure


def _apart(bends: Bends, width: Floats) -> Bends:
    """The same ways with ends beside each other, in the order in which they come, so that no two heads are one."""
    found = {arrow: list(points) for arrow, points in bends.items()}
    for end, near in ((0, 1), (-1, -2)):  # where arrows begin, and where they end
        meeting: dict[int, list[tuple[int, int]]] = {}
        for arrow in found:
            meeting.setdefault(arrow[end], []).append(arrow)
        for variable, arrows in meeting.items():
            arrows.sort(key=lambda arrow: found[arrow][near])
            step = min(PORT, 0.8 * float(width[variable]) / len(arrows))
            for number, arrow in enumerate(arrows):
                a, b = found[arrow][end]
                found[arrow][end] = (a + step * (number - (len(arrows) - 1) / 2), b)
    return found


def _draw_arrow(ax: Axes, graph: PDAG, ends: tuple[int, int], points: list[tuple[float, float]], sure: float) -> None:
    """An edge along its points, with a head where it has a direction, and the paler the less `sure` it is."""
    from matplotlib.patches import FancyArrowPatch

    i, j = ends
    upwards = bool(graph.directed[j, i])
    ax.add_patch(
        FancyArrowPatch(
            path=_curve(points[::-1] if upwards else points),
            arrowstyle="-|>,head_length=5,head_width=2.4" if upwards or graph.directed[i, j] else "-",
            color=INK,
            alpha=0.2 + 0.7 * sure,
            linewidth=0.5 + 0.7 * sure,
            zorder=1,
        )
    )


def shortened(name: str) -> str:
    """A name of at most `LONGEST` characters."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _curve(points: list[tuple[float, float]]) -> Path:
    """A line through all points that leaves and enters every one of them vertically."""
    from matplotlib.path import Path

    vertices, codes = [points[0]], [Path.MOVETO]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        vertices += [(x0, middle), (x1, middle), (x1, y1)]
        codes += [Path.CURVE4] * 3
    return Path(vertices, codes)


def _levels(dag: Bools) -> NDArray[np.intp]:
    """(d,) the layer of each variable: below all its parents, and as near to its children as that allows."""
    order = topological_order(dag)
    level = np.zeros(len(dag), dtype=np.intp)
    for v in order:
        level[v] = max((level[p] + 1 for p in np.flatnonzero(dag[:, v])), default=0)
    for v in reversed(order):
        children = np.flatnonzero(dag[v])
        if len(children):
            level[v] = max(level[v], level[children].min() - 1)
    return level


def _layout(dag: Bools, width: Floats, alone: list[int]) -> tuple[Floats, Floats, Bends]:
    """Places x (d,), y (d,), and the points that each arrow i → j passes.

    An arrow over several layers has a bend in each of them, which takes part in the layout like a narrow variable.
    """
    d = len(dag)
    net = _Net(dag, width)
    layers: list[list[int]] = [[] for _ in range(max(net.depth, default=-1) + 1)]
    for v in np.setdiff1d(np.arange(len(net.depth)), alone).tolist():
        layers[net.depth[v]].append(v)
    x = np.zeros(len(net.depth))
    for layer in layers:
        _spread(layer, x, net.wide)
    for sweep in range(SWEEPS):
        numbers = list(range(len(layers)))
        side = -1 if sweep % 2 == 0 else 1  # down, and up again
        for number in numbers[::-side]:
            _align(layers[number], number + side, x, net)
    y = -np.array(net.depth, dtype=np.float64)
    if alone:
        _rows_of_single(alone, x, y, net.wide, layers)
    points = {}
    for arrow, way in net.ways.items():
        heights = y[way]
        heights[[0, -1]] += -0.16, 0.18  # from the lower edge of a box to the upper edge of another
        points[arrow] = list(zip(x[way].tolist(), heights.tolist(), strict=True))
    return x[:d], y[:d], points


class _Net:
    """The variables of a DAG and the bends of its long arrows, which are laid out alike.

    Attributes:
        depth: the layer of each variable and bend.
        wide: their widths.
        joined: what each is joined to, in layers beside it.
        ways: arrow i → j → the numbers that it passes, from i to j.
    """

    def __init__(self, dag: Bools, width: Floats) -> None:
        self.depth: list[int] = _levels(dag).tolist()
        self.wide: list[float] = width.tolist()
        self.joined: list[set[int]] = [set() for _ in self.depth]
        self.ways: dict[tuple[int, int], list[int]] = {}
        for i, j in np.argwhere(dag).tolist():
            way = [i]
            for layer in range(self.depth[i] + 1, self.depth[j]):
                way.append(len(self.depth))
                self.depth.append(layer)
                self.wide.append(0.1)
                self.joined.append(set())
            way.append(j)
            self.ways[i, j] = way
            for a, b in pairwise(way):
                self.joined[a].add(b)
                self.joined[b].add(a)


def _align(layer: list[int], beside: int, x: Floats, net: _Net) -> None:
    """Move each of a layer, in place, to the middle of what it is joined to in the layer `beside`, or anywhere."""
    for v in layer:
        joined = net.joined[v]
        near = [x[w] for w in joined if net.depth[w] == beside] or [x[w] for w in joined]
        if near:
            x[v] = float(np.mean(near))
    layer.sort(key=lambda v: (x[v], v))
    _spread(layer, x, net.wide)


def _spread(layer: list[int], x: Floats, wide: list[float]) -> None:
    """Push the members of a layer apart, in their order and in place, as little as keeps them from touching."""
    if not layer:
        return
    need = [0.0]
    for a, b in pairwise(layer):
        need.append(need[-1] + (wide[a] + wide[b]) / 2 + GAP)
    # The closest increasing places (isotonic regression): neighbours that would touch move together.
    blocks: list[list[float]] = []  # [sum, count]
    for v, offset in zip(layer, need, strict=True):
        blocks.append([x[v] - offset, 1.0])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    place = 0
    for total, count in blocks:
        for _ in range(int(count)):
            x[layer[place]] = total / count + need[place]
            place += 1


def _rows_of_single(alone: list[int], x: Floats, y: Floats, wide: list[float], layers: list[list[int]]) -> None:
    """Put variables without an edge below the others, in rows no wider than the drawing."""
    drawn = [v for layer in layers for v in layer]
    left = min((x[v] - wide[v] / 2 for v in drawn), default=0.0)
    right = max([left + 6.0, *(x[v] + wide[v] / 2 for v in drawn)])
    bottom = min((y[v] for v in drawn), default=0.0) - 1.0
    at = left
    for v in alone:
        if at > left and at + wide[v] > right:
            at, bottom = left, bottom - 0.7
        x[v], y[v] = at + wide[v] / 2, bottom
        at += wide[v] + GAP
