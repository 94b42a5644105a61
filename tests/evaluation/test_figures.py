"""Figures against slow twins, and on odd data."""

import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy.stats import binomtest

from brainet_pl.evaluation import figures
from brainet_pl.evaluation.curves import separation


def test_calibration_bins_against_a_loop():
    rng = np.random.default_rng(0)
    confidence = torch.tensor(np.r_[rng.random(200), 0.0, 1.0, 1 / 15], dtype=torch.float32)
    correct = torch.tensor(rng.integers(0, 2, 203), dtype=torch.float32)
    bins = figures.calibration_bins(confidence, correct)
    total = 0.0
    for b in range(15):
        inside = [i for i, p in enumerate(confidence.tolist()) if min(14, int(np.float32(p) * 15)) == b]
        assert bins.counts[b] == len(inside)
        if inside:
            gap = np.mean([confidence[i] for i in inside]) - np.mean([correct[i] for i in inside])
            assert bins.confidence[b] - bins.accuracy[b] == pytest.approx(gap, abs=1e-6)
            total += abs(gap) * len(inside) / 203
    assert bins.ece == pytest.approx(total, abs=1e-6)


def test_wilson_against_scipy():
    for hits, n in ((0, 5), (3, 7), (90, 100), (4, 4)):
        low, high = figures.wilson(np.array([hits / n]), np.array([float(n)]))
        exact = binomtest(hits, n).proportion_ci(method="wilson")
        assert (low[0], high[0]) == (pytest.approx(exact.low, abs=1e-4), pytest.approx(exact.high, abs=1e-4))


def test_a_thinned_curve_stays_where_it_was():
    rng = np.random.default_rng(0)
    y = np.sort(rng.random(50_000)) ** 8  # steep at one end
    x = np.linspace(0, 1, 50_000)
    xs, ys = figures.thin(x, y, 400)
    assert len(xs) <= 400
    assert (xs[0], ys[0], xs[-1], ys[-1]) == (x[0], y[0], x[-1], y[-1])
    assert np.abs(np.interp(x, xs, ys) - y).max() < 0.01
    flat = figures.thin(np.zeros(1000), np.zeros(1000))
    assert flat[0].tolist() == [0.0, 0.0]


def test_curves_can_be_told_apart_without_colour():
    styles = [figures.line(i) for i in range(20)]
    assert len({(str(style.linestyle), style.marker) for style in styles}) == 20
    assert len({str(style.linestyle) for style in styles[:6]}) == 6


ODD = {
    "ordinary": (torch.rand(40), torch.rand(30) + 0.3),
    "constant": (torch.ones(40), torch.ones(30)),
    "infinite": (torch.rand(40), torch.full((30,), torch.inf)),
    "huge": (1e30 * torch.rand(40), -1e30 * torch.rand(30)),
}


def text_of(figure):
    parts = [figure.get_suptitle()]
    for ax in figure.axes:
        parts += [ax.get_title(), ax.get_title("left"), ax.get_xlabel(), ax.get_ylabel()]
        parts += ax.get_legend_handles_labels()[1]
    parts += [text.get_text() for legend in figure.legends for text in (legend.get_title(), *legend.get_texts())]
    return " ".join(parts)


def test_figures_take_odd_data_and_name_their_axes(tmp_path):
    known = {name: pair[0] for name, pair in ODD.items()}
    unknown = {name: pair[1] for name, pair in ODD.items()}
    measured = {name: separation(*pair) for name, pair in ODD.items()}
    auroc = measured["ordinary"]["AUROC"]
    wrong = (torch.rand(40, generator=torch.Generator().manual_seed(0)) < 0.2).float()
    confidence = torch.rand(40)
    metrics = {"NLL": [0.5, 0.4], "error": [0.1, 0.1], "ECE": [0.0, 0.0]}
    drawn = {
        "histograms": (
            figures.score_histograms(known, unknown, "held_out", measured, {"huge": "nats"}),
            ["n = 40", "n = 30", "share of set", "huge (nats)", f"AUROC {auroc:.3f}"],
        ),
        "curves": (
            figures.ood_curves(known, unknown, "held_out", measured),
            ["n = 40", "n = 30", "TPR", "recall", f"ordinary: {auroc:.3f}"],
        ),
        "risk": (figures.risk_coverage_curves(known, wrong), ["n = 40", "coverage", "risk"]),
        "perfect": (figures.risk_coverage_curves(known, torch.zeros(40)), ["0 errors"]),
        "single": (figures.risk_coverage_curves({"entropy": torch.rand(1)}, torch.ones(1)), ["1 errors"]),
        "reliability": (
            figures.reliability({"before": (confidence, 1 - wrong), "after": (confidence**2, 1 - wrong)}),
            ["n = 40", "confidence", "accuracy", "samples", "before, ECE", "after, ECE"],
        ),
        "sure": (figures.reliability({"all": (torch.ones(3), torch.ones(3))}), ["n = 3"]),
        "passes": (figures.pass_curves([1, 2], metrics, {"entropy": {"a_b": [0.5, 0.6]}}, 40), ["n = 40", "passes"]),
        "alone": (figures.pass_curves([1, 2], metrics, {}, 40), ["nats"]),
        "training": (figures.training_curves({"train/loss": ([0, 5], [1.0, 0.5])}), ["optimiser steps"]),
    }
    for name, (figure, words) in drawn.items():
        assert isinstance(figure, Figure)
        figure.savefig(tmp_path / f"{name}.png", dpi=40)
        for word in words:
            assert word in text_of(figure), name
        assert figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
