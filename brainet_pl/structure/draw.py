"""Pictures of a tree of structures, with matplotlib alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
MOST_BOXES = 4000


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


def draw_ggt(ggt: GGT, temperature: float | None = None, ax: Axes | None = None) -> Figure:
    """The tree as an icicle: one row a level, colour the probability that a set is part of a sampled sub-network."""
    temperature = ggt.auto_temperature if temperature is None else temperature
    ax = ax or Figure(figsize=(9, 1.6 + 1.1 * (ggt.depth + 1)), layout="constrained").subplots()
    figure = ax.get_figure(root=True)
    assert figure is not None
    colours = colormaps["cividis"]
    drawn = 0
    for box in _icicle(ggt, temperature):
        drawn += 1
        if drawn > MOST_BOXES:
            break
        inset = min(0.002, box.width * 0.1)
        x, y, w = box.left + inset, -box.level, box.width - 2 * inset
        hatch = "///" if box.is_descendant else None
        face = colours(box.probability)
        ax.add_patch(Rectangle((x, y - 0.8), w, 0.8, facecolor=face, edgecolor="white", linewidth=0.4, hatch=hatch))
        if box.width > 0.03:
            ink = "black" if box.probability > 0.5 else "white"
            back = {"facecolor": face, "edgecolor": "none", "pad": 1.0}
            label = str(len(box.node.variables))
            ax.text(x + w / 2, y - 0.4, label, ha="center", va="center", color=ink, fontsize=8, bbox=back)
        alternatives = len(getattr(box.node, "branches", ()))
        for t in range(1, alternatives):
            split = box.left + box.width * t / alternatives
            ax.plot([split, split], [-box.level - 1, -box.level - 0.8], color="black", linewidth=1.2)
    ax.set_xlim(0, 1)
    ax.set_ylim(-ggt.depth - 0.9, 0.1)
    ax.set_yticks([-level - 0.4 for level in range(ggt.depth + 1)])
    ax.set_yticklabels(["all" if not level else f"order {level - 1}" for level in range(ggt.depth + 1)])
    ax.set_xticks([])
    ax.set_ylabel("split by tests of")
    ax.set_title(
        f"{ggt.num_variables} variables, {short(ggt.num_subnetworks)} sub-networks, "
        f"{short(ggt.num_unique_structures)} unique structures (temperature {temperature:.3g})",
        fontsize=10,
    )
    scale = ScalarMappable(Normalize(0, 1), colours)
    figure.colorbar(scale, ax=ax, label="probability of being used", fraction=0.03, pad=0.01)
    more = f"; {drawn - 1:,} of {len(ggt.nodes):,} sets shown" if drawn > MOST_BOXES else ""
    ax.set_xlabel(
        f"number: variables in a set; hatched: descendant set; black tick: next alternative{more}", fontsize=8
    )
    return figure


def draw_network(
    ggt: GGT, subnetwork: SubNetwork, ax: Axes | None = None, names: Sequence[str] | None = None
) -> Figure:
    """One sub-network as layers: inputs at the bottom, each dense layer above what it reads."""
    ax = ax or Figure(figsize=(9, 1.8 + 0.9 * (ggt.depth + 1)), layout="constrained").subplots()
    figure = ax.get_figure(root=True)
    assert figure is not None
    shown = ggt.names if names is None else names
    taken = dict(ggt.path(subnetwork))
    number = {id(node): i for i, node in enumerate(ggt.nodes)}
    inputs: list[int] = []

    def place(node: Tree, is_descendant: bool) -> tuple[list[tuple[float, float]], int]:
        """Draw a node; where its deepest layers are (left, right), and at which height."""
        if number[id(node)] not in taken:
            left = float(len(inputs))
            inputs.extend(node.variables)
            colour = DESCENDANT if is_descendant else INPUT
            ax.add_patch(Rectangle((left + 0.05, 0), len(node.variables) - 0.1, 0.5, facecolor=colour))
            return [(left, float(len(inputs)))], 0
        branch = node.branches[taken[number[id(node)]]]  # type: ignore[union-attr]
        ancestors = [place(child, False) for child in branch.ancestors]
        descendant, d_height = place(branch.descendant, True)
        height = 1 + max([d_height, *(h for _, h in ancestors)])
        spans = [(min(a for a, _ in boxes), max(b for _, b in boxes), boxes, h) for boxes, h in ancestors]
        if not spans:
            spans = [(descendant[0][0], descendant[-1][1], [], d_height)]
        for left, right, boxes, h in spans:
            ax.add_patch(Rectangle((left + 0.05, height), right - left - 0.1, 0.5, facecolor=LAYER))
            middle = (left + right) / 2
            for group, level, style in ((boxes, h, "-"), (descendant, d_height, ":")):
                for a, b in group:
                    ax.plot([(a + b) / 2, middle], [level + 0.5, height], style, color="0.4", linewidth=0.9)
        return [(left, right) for left, right, _, _ in spans], height

    top, height = place(ggt.root, False)
    ax.text(len(inputs) / 2, height + 1.15, "output", ha="center", va="bottom", fontsize=9)
    for left, right in top:
        ax.plot([(left + right) / 2, len(inputs) / 2], [height + 0.5, height + 1.1], "-", color="0.4", linewidth=0.9)
    if len(inputs) <= 64:
        for position, variable in enumerate(inputs):
            label = str(variable) if shown is None else shown[variable]
            ax.text(position + 0.5, -0.1, label, ha="center", va="top", fontsize=6, rotation=90)
    ax.set_xlim(0, len(inputs))
    ax.set_ylim(-0.9, height + 1.7)
    ax.axis("off")
    kinds = {"inputs of ancestor sets": INPUT, "inputs of descendant sets": DESCENDANT, "dense layers": LAYER}
    handles = [Patch(facecolor=colour, label=label) for label, colour in kinds.items()]
    ax.legend(handles=handles, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0.02), fontsize=8, frameon=False)
    share = np.exp(ggt.log_prob(subnetwork))
    ax.set_title(f"one sub-network of {len(inputs)} inputs, posterior probability {share:.3g}", fontsize=10)
    return figure
