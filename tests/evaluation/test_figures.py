"""Charts against slow twins and on odd data, and as figures."""

import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from msgspec.structs import replace
from scipy.stats import binomtest, norm
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from brainet_pl.evaluation import chart_parts, charts, figures
from brainet_pl.evaluation.chart import Axis, Panel, Series, as_text, limits, ticks
from brainet_pl.evaluation.record import SetRecord, TestRecord
from brainet_pl.metrics.curves import calibration_sums, separation
from brainet_pl.metrics.passes import pass_sums


def test_calibration_bins_against_a_loop():
    rng = np.random.default_rng(0)
    confidence = torch.tensor(np.r_[rng.random(200), 0.0, 1.0, 1 / 15], dtype=torch.float32)
    correct = torch.tensor(rng.integers(0, 2, 203), dtype=torch.float32)
    bins = charts.bins_of(calibration_sums(confidence, correct))
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
        low, high = chart_parts.wilson(np.array([hits / n]), np.array([float(n)]))
        exact = binomtest(hits, n).proportion_ci(method="wilson")
        assert (low[0], high[0]) == (pytest.approx(exact.low, abs=1e-4), pytest.approx(exact.high, abs=1e-4))


def test_a_thinned_curve_stays_where_it_was():
    rng = np.random.default_rng(0)
    y = np.sort(rng.random(50_000)) ** 8  # steep at one end
    x = np.linspace(0, 1, 50_000)
    xs, ys = chart_parts.thin(x, y, 400)
    assert len(xs) <= 400
    assert (xs[0], ys[0], xs[-1], ys[-1]) == (x[0], y[0], x[-1], y[-1])
    assert np.abs(np.interp(x, xs, ys) - y).max() < 0.01
    flat = chart_parts.thin(np.zeros(1000), np.zeros(1000))
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


def a_test_of_numbers(n=40, **answers):
    """The record of a regression of noise."""
    rng = torch.Generator().manual_seed(0)
    mean, std = torch.randn(n, generator=rng), torch.rand(n, generator=rng) + 0.5
    target = mean + std * torch.randn(n, generator=rng)
    record = TestRecord({"test": "known"})
    scores, given = {"std": std, "epistemic_std": std / 2}, {"predicted": mean, "target": target} | answers
    record.sets["test"] = SetRecord("test", "known", torch.arange(n), scores, given)
    return record


def a_test_of_classes(n=40):
    """The record of a classification of noise in three passes, and of an unknown set."""
    rng = torch.Generator().manual_seed(0)
    probs = torch.rand(3, n, 4, generator=rng).softmax(-1)
    label = torch.randint(4, (n,), generator=rng)
    confidence, predicted = probs.mean(0).max(dim=1)
    answers = {"predicted": predicted, "label": label, "confidence": confidence}
    answers["wrong"] = (predicted != label).float()
    record = TestRecord({"test": "known", "far_off": "far"})
    scores = {"entropy": torch.rand(n, generator=rng), "energy": torch.rand(n, generator=rng)}
    running = {"entropy": torch.rand(2, n, generator=rng)}
    sums = pass_sums(probs[:2], label)
    record.sets["test"] = SetRecord("test", "known", torch.arange(n), scores, answers, running, sums)
    outside = {name: values + 0.5 for name, values in scores.items()}
    record.sets["far_off"] = SetRecord("far_off", "far", torch.arange(n), outside, {}, running)
    record.steps = [1, 2]
    return record


def test_charts_take_odd_data_and_name_their_axes(tmp_path):
    known = {name: pair[0] for name, pair in ODD.items()}
    unknown = {name: pair[1] for name, pair in ODD.items()}
    measured = {name: separation(*pair) for name, pair in ODD.items()}
    auroc = measured["ordinary"]["AUROC"]
    wrong = (torch.rand(40, generator=torch.Generator().manual_seed(0)) < 0.2).float()
    confidence = torch.rand(40)
    classes = a_test_of_classes()
    made = {chart.name: chart for chart in charts.charts_of(classes, classes.separations(), None, "energy")}
    numbers = {chart.name: chart for chart in charts.charts_of(a_test_of_numbers(), {})}
    assert list(made) == [
        "test/reliability", "test/risk_coverage", "test/passes", "ood/far_off/histograms", "ood/far_off/curves"
    ]  # fmt: skip
    assert list(numbers) == ["test/predicted", "test/coverage", "test/spread", "test/residuals", "test/refusal"]
    drawn = {
        "histograms": (
            charts.histograms(known, unknown, "held_out", measured, {"huge": "nats"}),
            ["n = 40", "n = 30", "share of set", "huge (nats)", f"AUROC {auroc:.3f}"],
        ),
        "curves": (charts.separation_curves(known, unknown, "held_out", measured), ["TPR", "recall", f"{auroc:.3f} /"]),
        "risk": (charts.risk_coverage_chart(known, wrong), ["n = 40", "coverage", "risk"]),
        "perfect": (charts.risk_coverage_chart(known, torch.zeros(40)), ["0 errors"]),
        "single": (charts.risk_coverage_chart({"entropy": torch.rand(1)}, torch.ones(1)), ["1 errors"]),
        "reliability": (
            charts.reliability({"before": (confidence, 1 - wrong), "after": (confidence**2, 1 - wrong)}),
            ["n = 40", "confidence", "accuracy", "samples", "before: ECE", "after: ECE"],
        ),
        "sure": (charts.reliability({"all": (torch.ones(3), torch.ones(3))}), ["n = 3"]),
        "passes": (made["test/passes"], ["passes averaged", "AUROC, entropy", "nats"]),
        "predicted": (numbers["test/predicted"], ["true value", "predicted value"]),
        "residuals": (numbers["test/residuals"], ["stated deviation", "true − predicted"]),
        "two": (charts.charts_of(a_test_of_numbers(2), {})[2], ["stated"]),
    }
    for name, (chart, words) in drawn.items():
        figure = figures.draw(chart)
        assert isinstance(figure, Figure)
        figure.savefig(tmp_path / f"{name}.png", dpi=40)
        for word in words:
            assert word in text_of(figure), name
        assert figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
        for panel in chart.panels:
            assert all(np.isfinite(series.x).all() and np.isfinite(series.y).all() for series in panel.series), name
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def series_of(chart, panel, name):
    (found,) = (s for p in chart.panels if p.key == panel for s in p.series if s.name == name)
    return found


def test_coverage_and_spread_against_loops():
    record = a_test_of_numbers(200)
    made = {chart.name: chart for chart in charts.charts_of(record, {})}
    mean, target, std = (
        values.double().numpy()
        for values in (record.known.answers["predicted"], record.known.answers["target"], record.known.scores["std"])
    )
    coverage = series_of(made["test/coverage"], "coverage", "test set")
    for level, share in list(zip(coverage.x, coverage.y, strict=True))[1:]:
        half = norm.ppf(0.5 + level / 2) * std
        inside = sum(abs(t - m) <= h for t, m, h in zip(target, mean, half, strict=True)) / 200
        assert share == pytest.approx(inside, abs=1e-4)
    spread = series_of(made["test/spread"], "spread", "test set")
    order = np.argsort(std)
    for i, part in enumerate(np.array_split(order, 10)):
        assert spread.y[i] == pytest.approx(np.sqrt(np.mean((target - mean)[part] ** 2)), rel=1e-4)
        assert spread.x[i] == pytest.approx(np.sqrt(np.mean(std[part] ** 2)), rel=1e-4)
    refused = series_of(made["test/refusal"], "refusal", "std")
    assert refused.y[-1] == pytest.approx(np.sqrt(np.mean((target - mean) ** 2)), rel=1e-4)
    half = sorted(range(200), key=lambda i: std[i])[:100]
    at_half = np.interp(0.5, refused.x, refused.y)
    assert at_half == pytest.approx(np.sqrt(np.mean((target - mean)[half] ** 2)), rel=0.02)


def test_numbers_of_classes_and_confusion_against_scikit_learn():
    known = a_test_of_classes(200).known
    label, predicted = known.answers["label"].numpy(), known.answers["predicted"].numpy()
    matrix = charts.confusion(known)
    np.testing.assert_array_equal(matrix.counts, confusion_matrix(label, predicted, labels=range(4)))
    precision, recall, f1, support = precision_recall_fscore_support(label, predicted, labels=range(4))
    rows = charts.class_numbers(known, ["a", "b", "c", "d"])
    assert [row.name for row in rows] == ["a", "b", "c", "d"]
    for i, row in enumerate(rows):
        assert (row.samples, row.recall, row.precision, row.f1) == (
            support[i], pytest.approx(recall[i]), pytest.approx(precision[i]), pytest.approx(f1[i])
        )  # fmt: skip
        assert row.confidence == pytest.approx(known.answers["confidence"].numpy()[predicted == i].mean())
        assert row.overconfidence == pytest.approx(row.confidence - row.precision)
    assert charts.class_numbers(a_test_of_numbers().known) == []
    assert charts.confusion(a_test_of_numbers().known) is None
    figures.draw_matrix(matrix)


def test_few_curves_are_seen_at_first_and_the_headline_is_one_of_them():
    scores = {f"score_{i}": torch.rand(50, generator=torch.Generator().manual_seed(i)) for i in range(9)}
    wrong = (torch.arange(50) % 5 == 0).float()
    (panel,) = charts.risk_coverage_chart(scores, wrong, "score_7").panels
    shown = [series.name for series in panel.series if series.shown and series.kind == "line"]
    assert len(shown) == 3
    assert "score 7" in shown


@pytest.mark.parametrize(
    ("low", "high", "whole"), [(0, 1, False), (0.537, 0.571, False), (-3, 1e6, False), (1, 15, True), (1, 2, True)]
)
def test_ticks_are_few_round_and_inside(low, high, whole):
    found = ticks(low, high, whole=whole)
    assert 2 <= len(found) <= 5
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    steps = np.diff(found)
    np.testing.assert_allclose(steps, steps[0])
    if whole:
        assert all(tick == round(tick) for tick in found)


def test_numbers_read_as_their_unit_says():
    assert as_text(0.5, "share") == "50\u00a0%"
    assert as_text(0.005, "share", 0.0025) == "0.50\u00a0%"
    assert as_text(12_345.0, "count") == "12,345"
    assert as_text(0.571234, "number") == "0.5712"
    assert as_text(0.55, "number", 0.01) == "0.55"


def test_axes_have_room_for_everything_but_where_they_say_where_to_end():
    series = Series("a", [0.0, 2.0], [1.0, 1.0])
    panel = Panel("p", "p", Axis("x"), Axis("y"), [series])
    (x0, x1), (y0, y1) = limits(panel)
    assert (x0, x1) == (0.0, 2.0)
    assert y0 < 1.0 < y1
    assert limits(replace(panel, y=Axis("y", "share", 0.0, 1.0)))[1] == (0.0, 1.0)
    bars = Series("b", [0.0, 1.0, 2.0], [3.0, 5.0], "bars")
    assert limits(replace(panel, series=[bars]))[1][0] <= 0.0
    flat = limits(replace(panel, series=[Series("rate", [0.0, 2.0], [0.003, 0.003])]))[1]
    assert 0.002 < flat[0] < 0.003 < flat[1] < 0.004  # a small number that stays is not drawn around 0


def test_small_bins_are_joined_and_no_sample_is_lost():
    """The ECE is that of all bins; what is drawn has at least ten samples a point, or all of them in one."""
    torch.manual_seed(0)
    for n in (3, 12, 60, 700):
        confidence = torch.rand(n).sqrt()
        sums = calibration_sums(confidence, (torch.rand(n) < confidence).float())
        joined = charts.join_small_bins(sums)
        torch.testing.assert_close(joined.sum(0), sums.sum(0))
        assert len(joined) == 1 or bool((joined[:, 0] >= 10).all())
        assert bool((joined[1:, 1] / joined[1:, 0] > joined[:-1, 1] / joined[:-1, 0]).all())
