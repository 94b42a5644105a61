"""The page of a run: what it says, and how a real headless browser shows it."""

import base64
import copy
import hashlib
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from brainet_pl.cli import console, main
from brainet_pl.evaluation.chart import readable
from brainet_pl.evaluation.report import HERE, read_run, render, write_report
from brainet_pl.evaluation.report.plot import drawing_of, styles_of
from brainet_pl.evaluation.report.rules import RULES
from brainet_pl.evaluation.report.verdict import verdict_of
from brainet_pl.evaluation.report.view import fill_rows, target_of
from brainet_pl.evaluation.schema import parse_record
from brainet_pl.structure import learn_structure

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FIGURES = {"structure/tree": "structure"}
CHARTS = {
    "test/reliability": "test",
    "test/risk_coverage": "test",
    "ood/held_out/histograms": "ood",
    "ood/held_out/curves": "ood",
    "ood/svhn/curves": "ood",
}
MEASURES = ("AUROC", "AUPR_out", "AUPR_in", "FPR95", "DetErr", "n_id", "n_ood")
CHOICES = {"role", "unit", "better", "group", "kind"}  # keys of the record whose texts are words of its format
EVIL = "<script>alert(1)</script>\"'&"


def row(name, score, *values):
    return {"set": name, "score": score, **dict(zip(MEASURES, values, strict=False))}


def metric(key, value, title, unit, better):
    return {"key": key, "value": value, "title": title, "unit": unit, "better": better}


def series(name, kind="line", **more):
    known = {"name": name, "kind": kind, "note": "0.9", "low": None, "high": None, "shown": True, "group": ""}
    x = [0.0, 0.5, 1.0] if kind == "bars" else [0.25, 0.75]
    return known | {"x": x, "y": [0.5, 0.75]} | more


def panel(key, *drawn, **axis):
    share = {"label": "share", "unit": "share", "low": 0.0, "high": 1.0, "log": False}
    return {"key": key, "title": f"Panel {key}", "x": share, "y": share | axis, "series": list(drawn)}


def chart(name, group, *panels, choose=False):
    words = {"caption": f"How to read {name}", "alt": f"What {name} shows"}
    return {"name": name, "group": group, **words, "panels": list(panels), "choose": choose}


def some_charts():
    guide = series("by chance", "guide")
    curve = series("as predicted", low=[0.25, 0.5], high=[0.75, 1.0])
    counts = panel("counts", series("as predicted", "bars", y=[4.0, 12.0]), unit="count", low=0.5, high=None, log=True)
    few = [series("entropy"), series("energy", shown=False)]
    return [
        chart("test/reliability", "test", panel("reliability", series("perfect", "guide"), curve), counts),
        chart("test/risk_coverage", "test", panel("risk", *few)),
        chart(
            "ood/held_out/histograms",
            "ood",
            panel("a", series("test set", "bars")),
            panel("b", series("test set", "bars")),
            choose=True,
        ),
        chart("ood/held_out/curves", "ood", panel("roc", guide, *few), panel("pr", guide, *few)),
        chart("ood/svhn/curves", "ood", panel("roc", guide, series("samples", "points"))),
    ]


def a_record():
    """What a test of a small classifier leaves, written by hand."""
    samples = [(17, 3, 5, 0.41, 1.25), (4, 2, 2, 0.44, 1.125), (1234, 7, 1, 0.5, 1.0), (8, 1, 1, 0.52, 0.875)]
    better = {"FPR95": "lower", "DetErr": "lower", "n_id": None, "n_ood": None}
    return {
        "format": 3,
        "seed": 0,
        "settings": {},
        "charts": some_charts(),
        "confusion": {"names": ["cat", "dog"], "counts": [[7, 1], [0, 1425]]},
        "created": "2026-01-01T00:00:00+00:00",
        "model": {
            "head": "Tree", "task": "Classification", "inference": "stochastic", "head_parameters": 8000,
            "parameters": 9000, "passes": 15, "temperature": 123.4,
        },
        "headline_score": "entropy",
        "sets": [
            {"name": "test", "samples": 1433, "role": "known"},
            {"name": "held_out", "samples": 354, "role": "near"},
            {"name": "svhn", "samples": 100, "role": "far"},
        ],
        "metrics": [
            metric("test/cls/Acc", 0.98127, "Accuracy", "share", "higher"),
            metric("test/cls/NLL", 0.0567, "NLL", "nats", "lower"),
            metric("test/cls/Brier", None, "Brier score", "", "lower"),
            metric("test/cal/ECE", 0.1281, "Calibration error", "share", "lower"),
            metric("test/scaled/cal/ECE", 0.0237, "Calibration error", "share", "lower"),
            metric("test/sc/AURC", 0.0021, "Risk–coverage area, by confidence", "share", "lower"),
        ],
        "separation": [
            row("held_out", "entropy", 0.931, 0.811, 0.821, 0.301, 0.141, 1433, 354),
            row("held_out", "energy", 0.911, 0.841, 0.801, 0.251, 0.151, 1433, 354),
            row("held_out", "one_minus_max_p", 0.921, 0.801, 0.831, 0.401, 0.131, 1433, 354),
            row("svhn", "entropy", 0.711, 0.611, 0.621, 0.701, 0.341, 1433, 100),
            row("svhn", "energy", 0.741, None, 0.641, 0.651, 0.321, 1433, 100),
            row("near_mean", "entropy", 0.931, 0.811, 0.821, 0.301, 0.141),
        ],
        "separation_measures": [{"name": name, "better": better.get(name, "higher")} for name in MEASURES],
        "figures": [
            {"name": name, "file": name.replace("/", "_") + ".png", "alt": f"What {name} shows", "group": group}
            for name, group in FIGURES.items()
        ],
        "tables": [
            {
                "name": "test/most_uncertain",
                "caption": "The 4 test samples of the highest entropy, the most uncertain first",
                "columns": ["sample", "picture", "predicted", "label", "probability", "entropy"],
                "rows": [
                    [number, {"picture": f"test_most_uncertain/{i}_1.png"}, *rest]
                    for i, (number, *rest) in enumerate(samples)
                ],
            }
        ],
    }  # fmt: skip


def png(path, size=(3.0, 2.0), seed=0):
    """A small picture, unlike those of other seeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=size)
    figure.subplots().imshow(np.random.default_rng(seed).random((8, 8)))
    figure.savefig(path, dpi=60)


def write_fit(folder):
    """Write what `brainet fit` leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    header = "epoch,step,train/loss,val/cls/Acc,val/cls/NLL,val/cal/ECE"
    rows = ((f"{2 / (i + 1)},,," if i % 2 else f",0.{50 + i},1.{50 - i},0.0{9 - i}") for i in range(8))
    lines = [f"{i},{10 * i},{cells}" for i, cells in enumerate(rows)]
    (folder / "metrics.csv").write_text("\n".join([header, *lines]) + "\n")
    (folder / "config.yaml").write_text("seed_everything: 0\nmodel:\n  head: tree\n")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    x = np.c_[x, x @ rng.normal(size=(3, 3)) + 0.3 * rng.normal(size=(200, 3))]
    (folder / "structure.json").write_text(learn_structure(x, threshold=0.05).to_json())


def write_test(folder, record):
    """Write what `brainet test` leaves, with these findings."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, figure in enumerate(record["figures"]):
        png(folder / "figures" / figure["file"], seed=i)
    for i in range(4):
        png(folder / "tables" / "test_most_uncertain" / f"{i}_1.png", (1, 1), seed=100 + i)
    (folder / "record.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a run that was fitted and tested; nobody writes into it but its report."""
    folder = tmp_path_factory.mktemp("digits") / "version_0"
    write_fit(folder)
    return write_test(folder, a_record())


def page_with(folder, record):
    """The page of a run with only this record.json, without pictures."""
    (folder / "record.json").write_text(json.dumps(record))
    return render(read_run(folder))


def section(text, key):
    return re.search(rf'<section id="{key}".*?</section>', text, re.S).group()


class Page(html.parser.HTMLParser):
    """Tags with attributes, and whether every tag that was opened is closed."""

    EMPTY = ("meta", "link", "img", "br", "wbr")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def test_the_page_holds_every_figure_and_number(written, capsys):
    main(["report", str(written)])
    path = written / "report.html"
    assert str(path) in capsys.readouterr().out
    text = path.read_text()
    page, stored = Page(text), a_record()
    sources = [image["src"] for image in page.all("img")]
    assert {figure["aria-label"] for figure in page.all("figure") if "chart" in figure.get("class", "")} == {
        *(f"What {name} shows" for name in CHARTS),
        next(f["aria-label"] for f in page.all("figure") if "Training" in f.get("aria-label", "")),
    }
    for figure in stored["figures"]:
        data = (written / "figures" / figure["file"]).read_bytes()
        assert "data:image/png;base64," + base64.b64encode(data).decode() in sources
        assert any(image["alt"] == figure["alt"] for image in page.all("img"))
    assert len(sources) == len(FIGURES) + 4  # and thumbnails
    for shown in ("Tree head, Classification", "8,000 parameters in the head", "15 passes", "2026-01-01 00:00:00 UTC"):
        assert shown in text
    assert "test set: n\u00a0=\u00a01,433" in text
    assert "held out: n\u00a0=\u00a0354" in text
    assert read_run(written).ggt.fingerprint in text
    assert "123.4" in section(text, "structure")
    assert "head: tree" in section(text, "configuration")
    for entry in stored["metrics"]:
        assert entry["key"] in section(text, "metrics")
    assert "0.9813</td>" in section(text, "metrics")
    assert "train/loss" in section(text, "metrics")


def cells(text):
    """The texts of all table cells, by row."""
    rows = re.findall(r"<tr.*?</tr>", text, re.S)
    return [
        [re.sub(r"<.*?>", "", cell).strip() for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.S)] for row in rows
    ]


def test_the_page_of_a_real_run_holds_every_number(run, tmp_path):
    record = json.loads((run / "record.json").read_text())
    text = write_report(run, tmp_path / "page.html").read_text()
    page, shown = Page(text), {row[0]: row[1] for row in cells(section(text, "metrics")) if len(row) == 2}
    assert len(record["metrics"]) >= 14
    for entry in record["metrics"]:
        assert float(shown[entry["key"]]) == pytest.approx(entry["value"], rel=1e-3, abs=5e-5)
    table = [row for row in cells(section(text, "unknown")) if row[0] == "held out"]
    assert len(table) == len(record["separation"]) == 10
    for row, entry in zip(table, record["separation"], strict=True):
        assert row[1] == readable(entry["score"])
        numbers = [float(re.sub("[^0-9.]", "", cell)) for cell in row[2:]]
        shown = [measure["name"] for measure in record["separation_measures"] if measure["better"]]
        assert numbers == pytest.approx([entry[name] for name in shown], abs=5e-4)
    for figure in record["figures"]:
        data = base64.b64encode((run / "figures" / figure["file"]).read_bytes()).decode()
        (image,) = (i for i in page.all("img") if i["src"] == "data:image/png;base64," + data)
        assert image["alt"] == figure["alt"]
    shown = 4 + 2 * 4  # samples in doubt, and strange ones with where they are
    assert len(page.all("img")) == len(record["figures"]) + shown
    assert len([f for f in page.all("figure") if "chart" in f.get("class", "")]) == len(record["charts"]) + 1
    _, doubtful, classes = record["tables"]
    assert [row[0] for row in cells(section(text, "classes"))[-8:]] == [row[0] for row in classes["rows"]]
    told = cells(section(text, "doubtful"))
    assert [float(row[0].replace(",", "")) for row in told[1:]] == [row[0] for row in doubtful["rows"]]
    assert "Tree head, Classification" in text
    assert "test set: n\u00a0=\u00a0433" in text


def test_sections_come_in_order_with_their_figures(written):
    text = render(read_run(written))
    keys = [tag["id"] for tag in Page(text).all("section")]
    assert keys == ["test", "unknown", "classes", "doubtful", "training", "structure", "metrics", "configuration"]
    for name, group in {**FIGURES, **CHARTS}.items():
        assert f'"What {name} shows"' in section(text, {"ood": "unknown"}.get(group, group))
    assert section(text, "test").count("<figcaption>") == 2
    assert 'class="wide"' in section(text, "structure")
    assert 'class="wide"' not in section(text, "test")
    assert "<details open>" in section(text, "structure")
    assert "<details>" in section(text, "configuration")


def cards(text):
    found = re.findall(r"<dt>(.*?)</dt><dd><b>(.*?)</b><small>(.*?)</small>", text.replace("\u00a0", " "))
    return {name: (value, note) for name, value, note in found}


def test_headlines_are_those_of_the_record(written):
    assert cards(render(read_run(written))) == {
        "Accuracy": ("98.13 %", "higher is better"),
        "NLL": ("0.0567", "nats, lower is better"),
        "Calibration error": ("2.37 %", "lower is better; calibrated; 12.81 % before"),
        "Risk–coverage area, by confidence": ("0.21 %", "lower is better"),
        "Unknown: held out": ("93.10 %", "AUROC by entropy, higher is better"),
        "Unknown: svhn": ("71.10 %", "AUROC by entropy, higher is better"),
    }


def test_headlines_are_of_the_calibrated_predictions(tmp_path):
    record = a_record()
    record["metrics"] += [
        metric("test/scaled/cls/Acc", 0.98127, "Accuracy", "share", "higher"),
        metric("test/scaled/cls/NLL", 0.0456, "NLL", "nats", "lower"),
        metric("test/scaled/sc/AURC", None, "Risk–coverage area, by confidence", "share", "lower"),
        metric("test/sc/Risk@80Cov", 0.009, "Errors", "share", "lower"),
        metric("test/scaled/sc/Risk@80Cov", 0.002, "Errors", "share", "lower"),
    ]
    text = page_with(tmp_path, record)
    assert cards(text)["Accuracy"] == ("98.13 %", "higher is better")  # nothing changed
    assert cards(text)["NLL"] == ("0.0456", "nats, lower is better; calibrated; 0.0567 before")
    assert cards(text)["Risk–coverage area, by confidence"] == ("0.21 %", "lower is better")
    assert "the surest 80\u00a0% takes errors from 1.9\u00a0% to 0.2\u00a0%" in text


def test_names_units_and_directions_are_those_of_the_record(tmp_path):
    record = a_record()
    record["metrics"] = [
        metric("test/cls/Acc", 0.5, "Hits", "", None),
        metric("test/reg/RMSE", 2.5, "Root of the mean square", "target", "lower"),
        metric("test/reg/NLL", None, "NLL", "nats", "lower"),
    ]
    record["separation"].append(row("test", "entropy", 0.5))  # a known set is no headline, whatever it is called
    record["separation_measures"][0]["better"] = None
    record["sets"].pop()
    assert cards(page_with(tmp_path, record)) == {
        "Hits": ("0.5000", ""),
        "Root of the mean square": ("2.5000", "in units of the target, lower is better"),
        "Unknown: held out": ("93.10 %", "AUROC by entropy"),
    }
    record["headline_score"] = None
    assert len(cards(page_with(tmp_path, record))) == 2


def said(record, history=None):
    """The sentences of a record, each with its colour."""
    return [(line.text.replace("\u00a0", " "), line.tone) for line in verdict_of(record, history)]


def sentences(**values):
    record = parse_record(a_record())
    metrics = [
        replace(record.metrics[0], key=f"test/{key.replace('_', '/', 1)}", value=value) for key, value in values.items()
    ]
    return said(replace(record, metrics=metrics))


PAIRS = "of 100 pairs of an unknown and a known input the unknown one has the higher score (entropy, AUROC)"


def test_the_verdict_says_plainly_what_was_found():
    known = [
        (f"Unknown inputs (held out): In 93 {PAIRS}; chance is 50.", "fair"),
        (f"Unknown inputs (svhn): In 71 {PAIRS}; chance is 50.", "poor"),
    ]
    # of 4 samples the chart says 25 % and half are right, of 12 it says 75 % and three quarters are
    assert sentences(cls_Acc=0.9721, cal_ECE=0.0149) == [
        ("97.2 % of 1,433 test samples are right.", "plain"),
        (
            "Confidence can be read as a probability: it and accuracy differ by 1.5 % on average over bins of "
            "confidence (calibration error, ECE); over all samples confidence is 6.2 points below accuracy.",
            "good",
        ),
        *known,
    ]
    off, tone = sentences(cal_ECE=0.3)[0]
    assert off.startswith("Confidence and accuracy differ by 30 % on average over bins of confidence")
    assert off.endswith("over all samples confidence is 6.2 points below accuracy, not sure enough.")
    assert tone == "poor"
    assert sentences(reg_RMSE=0.51749)[0][0].startswith("Predictions of 1,433 test samples are off by 0.517,")
    held = sentences(cal_QCE=0.0211, cal_coverage95=0.944)[0]
    assert held[0].startswith("Intervals hold what they promise within 2.1 %: 94.4 % of the targets are inside")
    missed = sentences(cal_QCE=0.062, cal_coverage95=0.975)[0]
    assert missed[0].startswith("Intervals miss what they promise by 6.2 %, too wide")
    assert (held[1], missed[1]) == ("good", "poor")


def judged(unknown=None, known=22, level=0.05, behind=1000, far=354, samples=433):
    """The sentences about one unknown set, and about known inputs."""
    record = parse_record(a_record())
    test, held_out, _ = record.sets
    sets = [replace(test, samples=samples, unknown=known), replace(held_out, samples=far, unknown=unknown)]
    return said(replace(record, metrics=[], sets=sets, level=level, verdict_samples=behind))


def test_unknown_inputs_that_are_not_noticed_are_red():
    """Flagged at 4.2 %, where known inputs are at 5.1 %: what the page once showed in green."""
    (missed, tone), (kept, other) = judged(unknown=15)
    assert missed.startswith(
        "Unknown inputs (held out) are not noticed: 4.2 % of 354 are called unknown, 5.1 % of the known ones. In 93 "
    )
    assert (tone, other) == ("poor", "good")
    assert kept == (
        "5.1 % of the known test samples are called unknown, where at most 5 % are meant to be; up to 7.5 % may be "
        "chance, with 433 of them and 1,000 validation samples behind the limit."
    )
    assert judged(unknown=176)[0][1] == "fair"  # one less than half
    assert judged(unknown=176)[0][0].startswith("Only some unknown inputs (held out) are noticed: 50 % of 354")
    assert judged(unknown=177)[0][1] == "good"
    assert judged(unknown=177)[0][0].startswith("Most unknown inputs (held out) are noticed")
    # 5.1 % of known inputs: two standard errors of the difference lie between 29 and 31 of 354
    assert [judged(unknown=n)[0][1] for n in (29, 32)] == ["poor", "fair"]


def test_known_inputs_that_are_called_unknown_too_often():
    assert [judged(unknown=300, known=n)[1][1] for n in (0, 32, 33, 58, 59)] == ["good", "good", "fair", "fair", "poor"]
    # with 152 validation samples behind the limit, 39 of 433 are no surprise
    assert [judged(unknown=300, known=39, behind=n)[1][1] for n in (152, 10_000)] == ["good", "fair"]
    assert judged(unknown=300, behind=99)[1][1] == "fair"
    assert judged(unknown=300, behind=None)[1][0].endswith("with 433 of them.")


@pytest.mark.parametrize(("share", "tone"), [(0.63, "good"), (0.3, "fair"), (None, "fair")])
def test_what_the_verdict_should_notice(share, tone):
    record = parse_record(a_record())
    model = replace(record.model, expected="unknown inputs are told by joint", expected_share=share)
    assert said(replace(record, metrics=[], sets=[], model=model)) == [("Unknown inputs are told by joint.", tone)]


def test_of_few_samples_nothing_is_sure():
    for unknown in (0, 20, 45):
        line, tone = judged(unknown=unknown, far=49)[0]
        assert tone == "fair"
        assert line.endswith("Only 49 samples: too few to be sure.")
    assert judged(unknown=45, far=50)[0][1] == "good"
    assert [tone for _, tone in judged(unknown=300, known=2, samples=30)] == ["fair", "fair"]


def test_an_error_that_chance_alone_gives_is_no_red():
    """The chart has bins of 4 and 12 samples: a calibrated model would have an ECE of 12 % by chance."""
    line, tone = sentences(cal_ECE=0.17)[0]
    assert tone == "fair"
    assert line.endswith("With 1,433 samples chance alone gives about 12 %.")
    assert sentences(cal_ECE=0.18)[0][1] == "poor"


def calibrated(**values):
    """The sentence about what calibration changed."""
    named = {key.replace("_", "/", 1): value for key, value in values.items()}
    record = parse_record(a_record())
    metrics = [replace(record.metrics[0], key=f"test/{key}", value=pair[0]) for key, pair in named.items()]
    metrics += [replace(record.metrics[0], key=f"test/scaled/{key}", value=pair[1]) for key, pair in named.items()]
    return next(line for line in said(replace(record, metrics=metrics)) if line[0].startswith("Calibration on"))


def test_calibration_that_made_it_worse_is_said():
    assert calibrated(cal_ECE=(0.019, 0.035), cls_NLL=(0.301, 0.3)) == (
        "Calibration on validation data makes it worse: ECE 1.9 % before, 3.5 % after; NLL 0.301 before, 0.300 after.",
        "fair",
    )
    assert calibrated(cal_ECE=(0.019, 0.04), cls_NLL=(0.3, 0.3))[1] == "poor"
    assert calibrated(cal_ECE=(0.019, 0.019), cls_NLL=(0.3, 0.41))[1] == "poor"
    mixed, tone = calibrated(cal_ECE=(0.019, 0.03), cls_NLL=(0.3, 0.2))
    assert mixed.startswith("Calibration on validation data lowers NLL and raises ECE")
    assert tone == "fair"
    assert calibrated(cal_ECE=(0.1, 0.02), cls_NLL=(0.3, 0.2))[0].startswith("Calibration on validation data helps")
    little = calibrated(cal_ECE=(0.02, 0.021), cls_NLL=(0.3, 0.3))
    assert little[0].startswith("Calibration on validation data changes little")
    assert little[1] == "good"
    none = replace(parse_record(a_record()).model, calibration="TemperatureScaling", calibrated=False)
    line, tone = said(replace(parse_record(a_record()), model=none, metrics=[]))[0]
    assert line.startswith("Not calibrated: TemperatureScaling has learned nothing from validation data")
    assert tone == "fair"


def shifted(before, after, clean=0.02):
    part = {"samples": 433, "corruption": "noise"}
    found = [part | {"severity": 0, "predicted": {"ECE": clean, "Acc": 0.95}, "final": {"ECE": clean, "Acc": 0.95}}]
    for severity, share in ((1, 0.5), (2, 1.5)):
        values = [None if ece is None else {"ECE": share * ece, "Acc": 0.8} for ece in (before, after)]
        found.append(part | {"severity": severity, "predicted": values[0], "final": values[1]})
    return said(parse_record(a_record() | {"metrics": [], "shifts": found}))[: 2 if after is not None else 1]


def test_confidence_after_shifts_is_said_before_and_after_calibration():
    (after, tone), (change, other) = shifted(0.07, 0.14)
    assert after == (
        "After 2 shifts of the test inputs confidence and accuracy differ by 14 % (ECE, mean over shifts), on "
        "unchanged inputs by 2 %; 80 % are right, 95 % without a shift."
    )
    assert change == "Calibration makes it worse after these shifts: ECE 7 % before, 14 % after."
    assert (tone, other) == ("fair", "poor")
    assert [tone for _, tone in shifted(0.03, 0.04)] == ["good", "fair"]
    assert [tone for _, tone in shifted(0.3, 0.2)] == ["poor", "good"]
    assert [tone for _, tone in shifted(0.16, None)] == ["poor"]


def test_a_head_that_is_worse_than_a_linear_layer_is_red():
    record = replace(parse_record(a_record()), metrics=[], sets=[])

    def against(head, linear, error=0.01):
        values = {"versus/head/NLL": head, "versus/linear/NLL": linear, "versus/linear/Error": error}
        return said(record, {key: ([3.0], [value]) for key, value in values.items() if value is not None})[0]

    assert against(0.488, 0.182) == (
        "On validation data the head is worse than a linear layer on the same features: NLL 0.488 and 0.182, each at "
        "its best temperature; the difference has a standard error of 0.01.",
        "poor",
    )
    assert [against(0.2 + gap, 0.2)[1] for gap in (-0.1, 0.009, 0.015, 0.03)] == ["good", "good", "fair", "poor"]
    assert "is level with" in against(0.209, 0.2)[0]
    assert "is better than" in against(0.1, 0.2)[0]
    assert against(0.5, 0.2, None)[1] == "fair"  # of an earlier version, which logged no error
    assert said(record, {}) == []


def test_the_rules_are_on_the_page_and_in_the_docs(written):
    page = section_of_rules(render(read_run(written)))
    text = (Path(__file__).parents[2] / "docs" / "howto" / "report.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    documented = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert documented == [[part.replace("\u00a0", " ") for part in rule] for rule in RULES.values()]
    assert [row for row in cells(page) if row] == [["what", "green", "amber", "red"], *map(list, RULES.values())]


def section_of_rules(text):
    return re.search(r'<details class="legend">.*?</details>', text, re.S).group()


def test_the_best_of_each_set_is_bold(written):
    shown = section(render(read_run(written)), "unknown").split("<table>")[1]
    rows = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", line, re.S) for line in re.findall(r"<tr>(.*?)</tr>", shown, re.S)]
    heads = ["set", "score", "AUROC ↑", "AUPR out ↑", "AUPR in ↑", "FPR95 ↓", "DetErr ↓"]
    assert rows[0] == heads
    bold = [
        (*cells[:2], *(heads[j].split(" ↓")[0].split(" ↑")[0] for j in range(2, 7) if "<strong>" in cells[j]))
        for cells in rows[1:]
    ]
    assert bold == [
        ("held out", "entropy", "AUROC"),
        ("held out", "energy", "AUPR out", "FPR95"),  # the lowest false positive rate, 0.251
        ("held out", "1 − max p", "AUPR in", "DetErr"),
        ("svhn", "entropy", "AUPR out"),
        ("svhn", "energy", "AUROC", "AUPR in", "FPR95", "DetErr"),
        ("near mean", "entropy", "AUROC", "AUPR out", "AUPR in", "FPR95", "DetErr"),
    ]
    assert rows[2][5] == "<strong>0.251</strong>"
    assert "Samples: held out 354, svhn" in shown  # once, and none of means over sets


def test_one_thing_has_one_colour_on_the_whole_page():
    """The second chart begins with another score than the first: energy keeps its colour."""
    first = chart("a", "test", panel("p", series("entropy"), series("energy"), series("knn")))
    second = chart("b", "ood", panel("p", series("by chance", "guide"), series("energy"), series("joint")))
    charts = parse_record(a_record() | {"charts": [first, second]}).charts
    styles = styles_of(charts)
    drawn = {key.name: key.style for part in charts for key in drawing_of(part, styles).keys}
    assert drawn == {"entropy": 0, "energy": 1, "knn": 2, "by chance": None, "joint": 0}
    many = chart("c", "test", panel("p", *(series(str(i)) for i in range(9))))
    (part,) = parse_record(a_record() | {"charts": [many]}).charts
    assert [key.style for key in drawing_of(part).keys] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_what_is_not_a_number_is_never_the_best(tmp_path):
    record = a_record()
    record["separation"] = [row("svhn", name, 0.5, 0.5, 0.5, value) for name, value in [("a", math.nan), ("b", 0.3)]]
    assert re.findall(r"<strong>(0.3.*?|nan)<", page_with(tmp_path, record)) == ["0.300"]
    record["separation"].reverse()
    assert re.findall(r"<strong>(0.3.*?|nan)<", page_with(tmp_path, record)) == ["0.300"]


def test_doubtful_samples_and_their_wrong_predictions(written):
    shown = section(render(read_run(written)), "doubtful")
    assert re.findall(r'<span class="wrong">(.*?)</span>', shown) == ["3 ✗", "7 ✗"]
    assert "✗ marks a wrong prediction." in shown
    assert re.findall(r'<th scope="row">(.*?)</th>', shown) == ["17", "4", "1,234", "8"]
    assert 'alt="input of sample 17"' in shown


def test_a_regression_has_no_wrong_predictions(tmp_path):
    record = a_record()
    record["model"] |= {"task": "Regression", "passes": 3, "temperature": None}
    table = {"name": "test/most_uncertain", "caption": "Doubtful", "columns": ["sample", "predicted", "target"]}
    record["tables"] = [table | {"rows": [[3, 0.5, 0.75], [4, None, True]]}]
    text = page_with(tmp_path, record)
    assert "3 passes" in text
    assert "wrong" not in section(text, "doubtful")
    assert "0.7500" in section(text, "doubtful")


def test_other_tables_are_shown_too(tmp_path):
    record = a_record()
    record["tables"] = [{"name": "test/mine", "caption": "By class", "columns": ["class"], "rows": [["cat"]]}]
    text = page_with(tmp_path, record)
    assert "By class." in section(text, "tables")
    assert "cat" in section(text, "tables")
    assert "Most uncertain" not in text


def test_the_record_comes_before_the_history(written, tmp_path):
    (tmp_path / "metrics.csv").write_text("step,test/cls/Acc,val/cls/Acc,ood/svhn/entropy/AUROC\n0,0.25,0.75,0.5\n")
    shown = section(page_with(tmp_path, a_record()), "metrics")
    assert "0.2500" not in shown
    assert "0.9813" in shown
    assert "0.7500" in shown
    assert "ood/" not in shown  # they have a table of their own
    assert re.search(r"test/cls/Brier</th>\s*<td>–</td>", shown)


def test_pictures_outside_the_folder_are_not_shown(tmp_path):
    png(tmp_path / "secret.png")
    record = a_record()
    for outside in ("../../secret.png", str(tmp_path / "secret.png"), "zero\0byte.png", "x" * 5000, "link.png", "."):
        record["figures"] = [{"name": "structure/tree", "file": outside, "alt": "outside", "group": "structure"}]
        record["tables"][0]["rows"] = [[1, {"picture": outside}, 1, 1, 0.5, 0.5]]
        folder = write_test(tmp_path / "run", record | {"figures": []})
        for place in ("figures", "tables"):
            (folder / place).mkdir(exist_ok=True)
            if not (folder / place / "link.png").exists():
                (folder / place / "link.png").symlink_to(tmp_path / "secret.png")
        assert not Page(page_with(folder, record)).all("img"), outside


def test_the_page_is_accessible_and_asks_for_nothing(written):
    text = render(read_run(written))
    page = Page(text)
    assert page.all("html")[0]["lang"] == "en"
    assert all(image["alt"].strip() for image in page.all("img"))
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    assert len(page.all("caption")) == len(page.all("table")) >= 4
    assert all(cell.get("scope") in ("row", "col") for cell in page.all("th"))
    assert {link["href"][1:] for link in page.all("a")} <= {tag.get("id") for _, tag in page.tags}
    kinds = [script.get("type") for script in page.all("script")]
    assert kinds == ["application/json"] * (len(CHARTS) + 1) + [None]  # data, and the one script that its policy names
    (policy,) = (tag["content"] for tag in page.all("meta") if tag.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256((HERE / "charts.js").read_bytes()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", text)
    assert "url(" not in text
    assert "@import" not in text


def contrast(a, b):
    """WCAG's contrast ratio of two colours #rrggbb."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast_in_both_modes(written):
    modes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", render(read_run(written)), re.S)
    ]
    assert len(modes) == 2
    for colours in modes:
        for ink in ("ink", "soft", "accent", "bad"):
            for ground in ("page", "panel", "shade"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


def hostile(value, key=""):
    """The same record with a script in every text that is not a word of its format; files stay files."""
    if isinstance(value, dict):
        return {name: hostile(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [hostile(part, key) for part in value]
    return f"{EVIL}{value}" if isinstance(value, str) and key not in CHOICES | {"file", "picture"} else value


def test_everything_from_files_is_escaped(written, tmp_path):
    record = hostile(a_record())
    for part in record["separation"]:  # the measures are keys there
        part |= {EVIL + name: part[name] for name in MEASURES if name in part}
    for part in record["metrics"]:
        part["key"] = part["key"].removeprefix(EVIL)  # the keys choose the cards
    record["metrics"].append(metric(EVIL, 1.0, EVIL, "", None))
    cells = ["<b>", {"picture": "<i>"}, "<u>", "<s>", "<b>", "<b>"]
    record["tables"].append(a_record()["tables"][0] | {"caption": EVIL, "rows": [cells]})
    record["figures"].append({"name": EVIL, "file": "<b>\"'&.png", "alt": EVIL, "group": "ood"})
    folder = tmp_path / f"<em>{EVIL.replace('/', '')}"
    write_test(folder, record)
    shutil.copytree(written, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("record.json", "report.html"))
    png(folder / "figures" / "<b>other.png")
    (folder / "config.yaml").write_text(f"name: {EVIL}\n")
    quoted = EVIL.replace('"', '""')
    (folder / "metrics.csv").write_text(f'step,train/loss,"{quoted}"\n0,1.5,1\n1,2.5,1\n')
    text = render(read_run(folder))

    def kinds(page):
        return {(tag, name) for tag, attributes in page.tags for name in ["", *attributes]}

    assert kinds(Page(text)) <= kinds(Page(render(read_run(written))))
    assert text.count("&lt;script&gt;") > 50
    safe = text.replace((HERE / "charts.js").read_text(), "")
    assert not re.search(r"<(b|i|u|s|em)>(?!\d)", safe)
    assert safe.count("<script") == len(Page(text).all("script"))
    assert section(text, "others").count("<figure>") == 2


def test_half_a_character_does_not_stop_the_page(tmp_path):
    record = a_record()
    record["model"]["head"] = "\ud800"
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert "? head" in write_report(tmp_path).read_text()


def test_a_run_that_was_only_fitted_has_a_page_too(tmp_path):
    write_fit(tmp_path)
    png(tmp_path / "figures" / "structure_tree.png")
    png(tmp_path / "figures" / "my_own.png")
    text = write_report(tmp_path, tmp_path / "deep" / "page.html").read_text()
    assert "not tested" in text
    assert "Training</h2>" in text
    assert cards(text) == {
        "Accuracy": ("56.00 %", "higher is better"),
        "NLL": ("1.4400", "nats, lower is better"),
        "Calibration error": ("3.00 %", "lower is better"),
    }
    assert "The learned tree" in section(text, "structure")
    assert 'alt="Figure: my own"' in section(text, "others")


def test_folders_that_are_no_runs(written, tmp_path):
    with pytest.raises(FileNotFoundError, match="found none at"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="run `brainet fit`"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"did you mean .*version_0\?"):
        read_run(written.parent)
    with pytest.raises(IsADirectoryError, match="--out FILE"):
        write_report(written, tmp_path)
    with pytest.raises(FileNotFoundError, match="expected the folder of a run"):
        main(["report", str(tmp_path / "nowhere")])


def test_other_files_of_a_run_that_cannot_be_read(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,val/cls/Acc\n0,half\n")
    with pytest.raises(ValueError, match=r"expected a number in the column 'val/cls/Acc' of .*, got 'half': fit"):
        read_run(tmp_path)
    (tmp_path / "metrics.csv").write_text("step,val/cls/Acc\n0,0.5\n")
    for content in ("{oops", "[]", "{}", '{"root": 3}'):
        (tmp_path / "structure.json").write_text(content)
        with pytest.raises(ValueError, match=r"expected a learned structure in .*: fit the model again"):
            read_run(tmp_path)
    (tmp_path / "structure.json").unlink()
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.png").write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="expected a PNG for 'Figure: a', got another format"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{oops", "expected JSON in"),
        ("\udcff", "expected JSON in"),
        ("[" * 200_000, "expected JSON in"),
        ("[1]", "expected an object in .*, got list"),
        ("{}", "expected format 3 in .*, got none"),
        ('{"format": 2}', "expected format 3 in .*, got 2"),
        ('{"format": "3"}', 'expected format 3 in .*, got "3"'),
        ('{"format": true}', "expected format 3 in .*, got true"),
        ('{"format": 3}', "expected the key separation_measures, got only format, in"),
    ],
)
def test_records_that_are_none(tmp_path, capsys, monkeypatch, text, message):
    (tmp_path / "record.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message + r".*: test the model again") as error:
        read_run(tmp_path)
    monkeypatch.setattr(sys, "argv", ["brainet", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        console()
    assert end.value.code == 1
    (shown,) = capsys.readouterr().err.splitlines()
    assert str(error.value) in shown


def places(value, way=()):
    """The way to each value in a document."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*way, key)
        yield from places(part, (*way, key))


def changed(record, way, change):
    """A copy of the record, with the value at the end of the way replaced or, by None, deleted."""
    record = copy.deepcopy(record)
    *before, last = way
    part = record
    for key in before:
        part = part[key]
    if change is None:
        del part[last]
    else:
        part[last] = change[0]
    return record


OPTIONAL = {("model", "inference"), ("settings",)}  # further facts of the model may be anything
CATALOGUED = {("metrics", 0, name) for name in ("title", "unit", "better")}  # the catalogue knows them too


def test_every_value_of_a_record_is_checked(tmp_path):
    record = a_record()
    for part in ("sets", "metrics", "separation", "figures"):  # one of each will do
        record[part] = record[part][:1]
    record["tables"][0]["rows"] = record["tables"][0]["rows"][:1]
    record["charts"] = record["charts"][:1]
    page_with(tmp_path, record)
    for way in [way for way in places(record) if way not in OPTIONAL]:
        measured = way[0] == "separation" and way[-1] in MEASURES
        if isinstance(way[-1], str) and not measured and way not in CATALOGUED:
            with pytest.raises(ValueError, match=rf"expected .*\b{way[-1]}\b.*, got .*: test the model again"):
                page_with(tmp_path, changed(record, way, None))
        for wrong in ([[]], {"a": 1}, 10**400):
            if way[-1] in ("low", "high") and wrong == {"a": 1} and way[-2:-1] == ("series",):
                continue
            with pytest.raises(ValueError, match=r"expected .*, got .*: test the model again"):
                page_with(tmp_path, changed(record, way, [wrong]))


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (("sets", 1, "role"), "unknown", r'one of "known", "near", "far" as sets\[1\].role, got "unknown"'),
        (
            ("sets", 1, "role"),
            "a @ b - at `$.c`",
            r'one of "known", "near", "far" as sets\[1\].role, got "a @ b - at .*"',
        ),
        (("charts", 0, "panels"), [], r"at least one panel as charts\[0\].panels, got \[\]"),
        (("sets", 1, "samples"), -1, r"a count as sets\[1\].samples, got -1"),
        (("sets", 1, "samples"), True, r"a count as sets\[1\].samples, got true"),
        (("metrics", 0, "value"), "0.98", r'a number or null as metrics\[0\].value, got "0.98"'),
        (("metrics", 0, "value"), True, r"a number or null as metrics\[0\].value, got true"),
        (("metrics", 0, "better"), "up", r'one of "higher", "lower", null as metrics\[0\].better, got "up"'),
        (("separation", 0, "AUROC"), "0.9", r'a number or null as separation\[0\].AUROC, got "0.9"'),
        (("tables", 0, "rows", 1), [1, 2], r"6 cells as tables\[0\].rows\[1\], got \[1, 2\]"),
        (("headline_score",), 3, "a text as headline_score, got 3"),
        (("model", "temperature"), "auto", 'a number or null as model.temperature, got "auto"'),
    ],
)
def test_errors_say_where(tmp_path, way, value, message):
    with pytest.raises(ValueError, match=f"expected {message}, in .*record.json: test the model again"):
        page_with(tmp_path, changed(a_record(), way, [value]))


def test_template_and_style_are_shipped():
    tomllib = pytest.importorskip("tomllib", reason="in the standard library since Python 3.11")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["package-data"]["brainet_pl.evaluation.report"]
    assert set(listed) == {path.name for path in HERE.iterdir() if path.is_file() and path.suffix != ".py"}


# Puts the pipes where the browser looks for them, first out of the way of each other, and becomes the browser.
TRAMPOLINE = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A headless chromium over its debugging pipe: JSON messages that end in a zero byte, on descriptors 3 and 4."""

    def __init__(self, profile):
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
            f"--disable-component-update --disable-sync --user-data-dir={profile} --remote-debugging-pipe about:blank"
        )
        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()
        command = [sys.executable, "-c", TRAMPOLINE, str(to_read), str(to_write), BROWSER, *flags.split()]
        self.process = subprocess.Popen(command, pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def message(self):
        while b"\0" not in self.rest:
            part = os.read(self.read, 1 << 20)
            assert part, "the browser ended"
            self.rest += part
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **params):
        self.number += 1
        sent = {"id": self.number, "method": method, "params": params}
        os.write(self.write, json.dumps(sent | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def show(self, path, width, dark=False):
        """Load a page at a width; the URLs it asked for, and what the browser complained about."""
        self.events = []
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self.message())
        urls = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return urls, [e["params"]["entry"]["text"] for e in self.events if e["method"] == "Log.entryAdded"]

    def ask(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"]["value"]

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=20)
        os.close(self.read)
        os.close(self.write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if BROWSER is None:
        pytest.skip("no browser found: install chromium to see the report in one")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def interact(browser):
    """Hide a line, show another, look at a value, choose a histogram and an unknown set."""
    keys = "[...document.querySelectorAll('#test figure:nth-child(2) .key')]"
    lines = "[...document.querySelectorAll('#test figure:nth-child(2) .mark')].map(g => getComputedStyle(g).display)"
    assert browser.ask(lines) == ["inline", "none"]
    browser.ask(f"{keys}.map(key => key.click() ?? 0)")
    assert browser.ask(lines) == ["none", "inline"]
    point = (
        "(() => { const svg = document.querySelector('#test figure:nth-child(2) svg.plot'), b ="
        " svg.getBoundingClientRect(); svg.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + 0.9 *"
        " b.width, clientY: b.top + 20})); return document.querySelector('#test figure:nth-child(2) .tip').innerText"
        " })()"
    )
    assert browser.ask(point).split("\n")[:3] == ["share 75\u00a0%", "energy", "75\u00a0%"]
    choose = "(() => {{ const s = document.querySelector('{0}'); s.value = '{1}'; s.dispatchEvent(new Event('change'));"
    panels = "return [...document.querySelectorAll('#unknown [data-set=held_out] figure:first-child .panel')]"
    assert browser.ask(choose.format("select.choice", 1) + panels + ".map(p => p.hidden) })()") == [True, False]
    sets = "return [...document.querySelectorAll('[data-set]')].map(s => s.hidden) })()"
    assert browser.ask(choose.format("select.sets", "svhn") + sets) == [True, False]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_real_browser(written, browser, tmp_path, width, dark):
    page = write_report(written, tmp_path / "page.html")
    urls, complaints = browser.show(page, width, dark)
    assert [url for url in urls if not url.startswith("data:")] == [page.resolve().as_uri()]
    assert not complaints
    assert browser.ask("innerWidth") == width
    page_width = browser.ask("document.documentElement.clientWidth")  # a desktop's scroll bar takes some
    assert browser.ask("document.documentElement.scrollWidth") == page_width  # nothing to scroll sideways
    every = "Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth > 0, () => false)))"
    decoded = browser.ask(every)
    assert len(decoded) == len(FIGURES) + 4
    assert all(decoded)
    shown = "[...document.querySelectorAll('svg.plot')].filter(e => e.getBoundingClientRect().width)"
    figures = browser.ask(f"{shown}.map(e => e.getBoundingClientRect().width)")
    assert len(figures) == 2 + 1 + 1 + 2 + 4  # one histogram of two, one unknown set of two, four of training
    assert all(0.75 * min(width, 400) < w <= width for w in figures)
    text = "[...document.querySelectorAll('p:not(.ylabel),td,th,a,pre')]"
    small = browser.ask(f"Math.min(...{text}.map(e => parseFloat(getComputedStyle(e).fontSize)))")
    assert small >= 12
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 150) == dark
    assert ("invert" in browser.ask("getComputedStyle(document.querySelector('figure img')).filter")) == dark
    interact(browser)
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000


def test_the_target_is_that_of_the_data_alone():
    config = "model:\n  init_args:\n    target: no\n"
    config += "data:\n  class_path: Table\n  init_args:\n    target: 'price'\n    file: x.csv\n"
    assert target_of(config) == "price"
    assert target_of(config.replace("'price'", "null")) is None
    assert target_of("") is target_of("data:\n  class_path: Digits\ntrainer:\n  init_args:\n    target: a\n") is None


def test_a_class_that_is_never_predicted_is_told():
    record = a_record() | {"confusion": {"names": ["cat", "dog", "cow"], "counts": [[0, 8, 0], [0, 9, 0], [0, 0, 0]]}}
    assert ("Never predicted: no test sample is taken for the class cat (n = 8).", "poor") in said(parse_record(record))
    many = [[0] * 7 + [1] for _ in range(8)]
    record["confusion"] = {"names": list("abcdefgh"), "counts": many}
    (line,) = [text for text, _ in said(parse_record(record)) if text.startswith("Never predicted")]
    assert line.endswith("the classes a (n = 1), b (n = 1), c (n = 1), d (n = 1), e (n = 1) and 2 more.")
    assert not any("Never" in text for text, _ in said(parse_record(a_record())))


def test_no_chart_leaves_two_thirds_of_a_row_empty():
    def drawn(*panels):
        charts = [chart(str(i), "test", *(panel(str(k), series("a")) for k in range(n))) for i, n in enumerate(panels)]
        return [drawing_of(part) for part in parse_record(a_record() | {"charts": charts}).charts]

    assert [one.alone for one in fill_rows(drawn(2, 1, 5, 1))] == [False, False, False, True]
    assert [one.alone for one in fill_rows(drawn(1, 1, 2, 1))] == [False] * 4
    assert [one.alone for one in fill_rows(drawn(1, 3))] == [True, False]


def test_a_legend_folds_away_the_lines_that_nobody_has_asked_for(tmp_path):
    hidden = [series(f"score {i}") | {"shown": False} for i in range(5)]
    record = a_record() | {"charts": [chart("a", "test", panel("p", series("entropy"), series("energy"), *hidden))]}
    shown = page_with(tmp_path, record)
    assert "<summary>5 more lines</summary>" in shown
    assert shown.index("entropy") < shown.index("5 more lines") < shown.index("<span>score 4")
    record["charts"] = [chart("a", "test", panel("p", series("entropy"), *hidden[:2]))]
    assert "more lines" not in page_with(tmp_path, record)
