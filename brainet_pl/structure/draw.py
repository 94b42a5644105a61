"""Pictures of a tree of structures, with matplotlib alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from brainet_pl.structure.text import short

if TYPE_CHECKING:
    from brainet_pl.structure.ggt import GGT, SubNetwork, Tree

INPUT, DESCENDANT, LAYER = "#56B4E9", "#E69F00", "#009E73"  # Okabe–Ito: distinct to colour-blind readers
MOST_BOXES = 4000  # sets that are drawn of a tree
MOST_NAMES = 64  # inputs of a network up to which their names are written


class _Box(NamedTuple):
    """A set of variables in the icicle: where it lies, how likely it is used, and what it is."""

    left: float
    width: float
    level: int
    probability: float
    node: Tree
    is_descendant: bool


def _icicle(ggt: GGT, temperature: float) -> Iterator[_Box]:
    """Boxes from the root down: the branches of a node share its width equally, the sets of a branch by their size."""
    probabilities = ggt.branch_probabilities(temperature)
    number = {id(node): i for i, node in enumerate(ggt.nodes)}
    queue = [_Box(0.0, 1.0, 0, 1.0, ggt.root, False)]
    for box in queue:  # grows while it is read: breadth first
        yield box
        branches = getattr(box.node, "branches", ())
        for t, branch in enumerate(branches):
            left, width = box.left + box.width * t / len(branches), box.width / len(branches)
            p = box.probability * float(probabilities[number[id(box.node)]][t])
            for child in branch.children:
                share = width * len(child.variables) / len(box.node.variables)
                queue.append(_Box(left, share, box.level + 1, p, child, child is branch.descendant))
                left += share


def _axes(ax: Axes | None, height: float) -> tuple[Axes, Figure]:
    """Where to draw: the given axes, or those of a new figure."""
    ax = ax or Figure(figsize=(9, height), layout="constrained").subplots()
    figure = ax.get_figure(root=True)
    assert figure is not None
    return ax, figure


def draw_ggt(ggt: GGT, temperature: float | None = None, ax: Axes | None = None) -> Figure:
    """The tree as an icicle: one row a level, colour the probability that a set is part of a sampled sub-network."""
    temperature = ggt.auto_temperature if temperature is None else temperature
    ax, figure = _axes(ax, 1.6 + 1.1 * (ggt.depth + 1))
    colours = colormaps["cividis"]
    for box in islice(_icicle(ggt, temperature), MOST_BOXES):
        _draw_box(box, ax, colours(box.probability))
    ax.set_xlim(0, 1)
    ax.set_ylim(-ggt.depth - 0.9, 0.1)
    ax.set_yticks(-0.4 - np.arange(ggt.depth + 1))
    ax.set_yticklabels(["all", *(f"order {order}" for order in range(ggt.depth))])
    ax.set_xticks([])
    ax.set_ylabel("split by tests of")
    ax.set_title(
        f"{ggt.num_variables} variables, {short(ggt.num_subnetworks)} sub-networks, "
        f"{short(ggt.num_unique_structures)} unique structures (temperature {temperature:.3g})",
        fontsize=10,
    )
    scale = ScalarMappable(Normalize(0, 1), colours)
    figure.colorbar(scale, ax=ax, label="probability of being used", fraction=0.03, pad=0.01)
    sets = len(ggt.nodes)
    more = f"; {MOST_BOXES:,} of {sets:,} sets shown" if sets > MOST_BOXES else ""
    ax.set_xlabel(
        f"number: variables in a set; hatched: descendant set; black tick: next alternative{more}", fontsize=8
    )
    return figure


def _draw_box(box: _Box, ax: Axes, face: tuple[float, float, float, float]) -> None:
    """A set of variables, with its size where there is room, and a tick between its alternatives."""
    inset = min(0.002, box.width * 0.1)
    x, y, w = box.left + inset, -box.level, box.width - 2 * inset
    hatch = "///" if box.is_descendant else None
    ax.add_patch(Rectangle((x, y - 0.8), w, 0.8, facecolor=face, edgecolor="white", linewidth=0.4, hatch=hatch))
    if box.width > 0.03:
        ink = "black" if box.probability > 0.5 else "white"
        back = {"facecolor": face, "edgecolor": "none", "pad": 1.0}
        label = str(len(box.node.variables))
        ax.text(x + w / 2, y - 0.4, label, ha="center", va="center", color=ink, fontsize=8, bbox=back)
    alternatives = len(getattr(box.node, "branches", ()))
    for t in range(1, alternatives):
        split = box.left + box.width * t / alternatives
        ax.plot([split, split], [y - 1, y - 0.8], color="black", linewidth=1.2)


def draw_network(
    ggt: GGT, subnetwork: SubNetwork, ax: Axes | None = None, names: Sequence[str] | None = None
) -> Figure:
    """One sub-network as layers: inputs at the bottom, each dense layer above what it reads."""
    ax, figure = _axes(ax, 1.8 + 0.9 * (ggt.depth + 1))
    picture = _NetworkPicture(ggt, subnetwork, ax)
    top = picture.draw(ggt.root, False)
    inputs = picture.inputs
    ax.text(len(inputs) / 2, top.height + 1.15, "output", ha="center", va="bottom", fontsize=9)
    for left, right in top.spans:
        place = [(left + right) / 2, len(inputs) / 2]
        ax.plot(place, [top.height + 0.5, top.height + 1.1], "-", color="0.4", linewidth=0.9)
    shown = ggt.names if names is None else names
    for position, variable in enumerate(inputs if len(inputs) <= MOST_NAMES else []):
        label = str(variable) if shown is None else shown[variable]
        ax.text(position + 0.5, -0.1, label, ha="center", va="top", fontsize=6, rotation=90)
    ax.set_xlim(0, len(inputs))
    ax.set_ylim(-0.9, top.height + 1.7)
    ax.axis("off")
    kinds = {"inputs of ancestor sets": INPUT, "inputs of descendant sets": DESCENDANT, "dense layers": LAYER}
    handles = [Patch(facecolor=colour, label=label) for label, colour in kinds.items()]
    ax.legend(handles=handles, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0.02), fontsize=8, frameon=False)
    share = np.exp(ggt.log_prob(subnetwork))
    ax.set_title(f"one sub-network of {len(inputs)} inputs, posterior probability {share:.3g}", fontsize=10)
    return figure


class _Drawn(NamedTuple):
    """The deepest layers of a node: where they are, from left to right, and at which height."""

    spans: list[tuple[float, float]]
    height: int

    @property
    def whole(self) -> tuple[float, float]:
        """From the left end of the first layer to the right end of the last."""
        return self.spans[0][0], self.spans[-1][1]


class _NetworkPicture:
    """Draws the nodes of a sub-network, each above what it reads."""

    def __init__(self, ggt: GGT, subnetwork: SubNetwork, ax: Axes) -> None:
        self.ax, self.taken = ax, dict(ggt.path(subnetwork))
        self.number = {id(node): i for i, node in enumerate(ggt.nodes)}
        self.inputs: list[int] = []  # drawn so far

    def draw(self, node: Tree, is_descendant: bool) -> _Drawn:
        """Draw a node and all below it."""
        number = self.number[id(node)]
        if number not in self.taken:
            return self._draw_leaf(node, DESCENDANT if is_descendant else INPUT)
        branch = node.branches[self.taken[number]]  # type: ignore[union-attr]
        ancestors = [self.draw(child, False) for child in branch.ancestors]
        descendant = self.draw(branch.descendant, True)
        height = 1 + max(descendant.height, *(ancestor.height for ancestor in ancestors), 0)
        spans = [ancestor.whole for ancestor in ancestors] or [descendant.whole]
        for i, (left, right) in enumerate(spans):
            self.ax.add_patch(Rectangle((left + 0.05, height), right - left - 0.1, 0.5, facecolor=LAYER))
            middle = (left + right) / 2
            if ancestors:
                self._draw_lines(ancestors[i], middle, height, "-")
            self._draw_lines(descendant, middle, height, ":")
        return _Drawn(spans, height)

    def _draw_leaf(self, leaf: Tree, colour: str) -> _Drawn:
        left = float(len(self.inputs))
        self.inputs.extend(leaf.variables)
        self.ax.add_patch(Rectangle((left + 0.05, 0), len(leaf.variables) - 0.1, 0.5, facecolor=colour))
        return _Drawn([(left, float(len(self.inputs)))], 0)

    def _draw_lines(self, below: _Drawn, middle: float, height: int, style: str) -> None:
        """From the layers of a node to the middle of one that reads them."""
        for left, right in below.spans:
            place = [(left + right) / 2, middle]
            self.ax.plot(place, [below.height + 0.5, height], style, color="0.4", linewidth=0.9)
