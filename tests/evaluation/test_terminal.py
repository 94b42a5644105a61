"""The lines at the end of a fit and of a test, from numbers alone."""

from brainet_pl.evaluation.schema import parse_record
from brainet_pl.evaluation.terminal import lines_of_fit, lines_of_test

MODEL = {"head": "Tree()", "task": None, "head_parameters": 9, "parameters": 9, "passes": 4, "temperature": 1.0}


def a_record(metrics, sets, separation=(), **more):
    entry = {"title": "", "unit": "", "better": "lower"}
    return parse_record(
        {
            "format": 3,
            "created": "2026-01-01T00:00:00+00:00",
            "model": MODEL,
            "seed": None,
            "settings": {},
            "headline_score": "entropy",
            "ranking_score": "entropy",
            "level": 0.05,
            "verdict_score": "entropy",
            "verdict_samples": 500,
            "sets": sets,
            "metrics": [{"key": key, "value": value} | entry for key, value in metrics.items()],
            "separation": list(separation),
            "separation_measures": [],
            "charts": [],
            "confusion": None,
            "figures": [],
            "tables": [],
        }
        | more
    )


def known(samples=1000, unknown=40):
    return {"name": "test", "samples": samples, "role": "known", "unknown": unknown}


def test_a_classification_says_numbers_sets_verdict_cost_and_what_is_next():
    metrics = {"test/cls/Acc": 0.98127, "test/cls/NLL": 0.0567, "test/cls/Brier": 0.03, "test/cal/ECE": 0.08}
    metrics |= {"test/scaled/cal/ECE": 0.011, "test/scaled/cls/NLL": 0.05}
    sets = [known(), {"name": "svhn", "samples": 200, "role": "far", "unknown": 184}]
    rows = [{"set": "svhn", "score": "entropy", "AUROC": 0.9876}, {"set": "svhn", "score": "energy", "AUROC": 0.5}]
    lines = lines_of_test(a_record(metrics, sets, rows), folder="runs/a", page="runs/a/report.html", cost="head 1 ms")
    assert lines == [
        "test, 1,000 samples: accuracy 98.1 %, NLL 0.0567, ECE 8.0 %, Brier 0.03",
        "after calibration: NLL 0.05, ECE 1.1 %",
        "unknown set svhn: AUROC 98.8 % (entropy), 92 % of 200 called unknown",
        "+ After calibration, confidence can be read as a probability",
        "+ Calibration on validation data helps",
        "+ Most unknown inputs (svhn) are noticed",
        "+ 4 % of the known test samples are called unknown, where at most 5 % are meant to be",
        "a prediction costs: head 1 ms",
        "files: runs/a",
        "next: open runs/a/report.html",
    ]


def test_a_regression_has_its_own_numbers():
    metrics = {"test/reg/RMSE": 2.5, "test/reg/NLL": 1.25, "test/cal/QCE": 0.1, "test/cal/coverage95": 0.8}
    lines = lines_of_test(a_record(metrics, [known(unknown=None)], level=None), folder="runs/a")
    assert lines == [
        "test, 1,000 samples: RMSE 2.5, NLL 1.25, QCE 10.0 %, 80.0 % in the 95 % interval",
        "- Intervals miss what they promise by 10 %, too narrow",
        "files: runs/a",
        "next: brainet report runs/a",
    ]


def test_many_sets_and_sentences_stay_few_lines_and_bad_news_are_among_them():
    sets = [known(), *({"name": f"s{i}", "samples": 500, "role": "far", "unknown": 500} for i in range(8))]
    sets[-1]["unknown"] = 10
    lines = lines_of_test(a_record({"test/cls/Acc": 0.9}, sets), folder="runs/a")
    assert len(lines) <= 13
    assert "and 4 more unknown sets, see the page" in lines
    assert "- Unknown inputs (s7) are not noticed" in lines


def test_a_fit_tells_the_validation_of_its_best_checkpoint_and_the_next_command():
    history = {
        "val/cls/NLL": ([9.0, 19.0, 29.0], [0.5, 0.3, 0.4]),
        "val/cls/Acc": ([9.0, 19.0, 29.0], [0.8, 0.9, 0.95]),
        "train/loss": ([9.0], [7.0]),
    }
    given = {"folder": "runs/a", "checkpoint": "runs/a/checkpoints/epoch=1 b.ckpt"}
    lines = lines_of_fit(history, {}, monitor="val/cls/NLL", higher=False, tested=False, **given)
    assert lines == [
        "fit, validation at the best checkpoint: accuracy 90.0 %, NLL 0.3",
        "files: runs/a",
        "checkpoint: runs/a/checkpoints/epoch=1 b.ckpt",
        "next: brainet test --ckpt_path 'runs/a/checkpoints/epoch=1 b.ckpt'",
    ]
    own = lines_of_fit(history, {}, monitor=None, higher=False, tested=False, trust="--trust_checkpoint", **given)
    assert own[-1].endswith("epoch=1 b.ckpt' --trust_checkpoint")
    best = lines_of_fit(history, {}, monitor="val/cls/Acc", higher=True, tested=True, **given)
    assert best[0] == "fit, validation at the best checkpoint: accuracy 95.0 %, NLL 0.4"
    assert not any(line.startswith("next") for line in best)
    bare = lines_of_fit(
        {}, {"val/reg/RMSE": 2.0}, monitor=None, higher=False, folder="r", checkpoint=None, tested=False
    )
    assert bare == ["fit, last validation: RMSE 2", "files: r"]
