"""Real offline runs of W&B, each kind from the command line, read back chart by chart and artifact by artifact."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from offline import files_of, read_wandb

import brainet_pl
from brainet_pl.structure import GGT

pytestmark = pytest.mark.slow

SCRIPT = """
import wandb
from brainet_pl.cli import main

quiet = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
last = "runs/digits/version_0/checkpoints/last.ckpt"
for words in (
    ["fit", "--config", "digits", "--trainer.max_epochs=2"],
    ["test", "--ckpt_path", last],
    ["test", "--ckpt_path", last, "--new_run"],
    ["predict", "--ckpt_path", last],
    ["predict", "--ckpt_path", last, "--new_run"],
    ["fit", "--config", "table", "--data.file=price.csv", "--data.target=price", "--trainer.max_epochs=2", "--test"],
):
    main([*words, *quiet])
    wandb.finish()
"""
KINDS = ("fit", "test", "new_test", "predict", "new_predict", "regression")
OWN = ("structure", "model", "evaluation", "predictions")  # the other artifacts hold the rows of charts and tables


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder, and what was written by each command."""
    folder = tmp_path_factory.mktemp("wandb")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3))
    rows = [f"{a},{b},{c},{a * 10 + rng.normal()}" for a, b, c in x]
    (folder / "price.csv").write_text("\n".join(["a,b,c,price", *rows]))
    env = {k: v for k, v in os.environ.items() if "WANDB" not in k} | {"WANDB_MODE": "offline"}
    env["PYTHONPATH"] = str(Path(brainet_pl.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    written = files_of(folder)
    assert len(written) == len(KINDS)
    return folder, dict(zip(KINDS, map(read_wandb, written), strict=True))


def test_a_fit_that_fails_leaves_neither_a_run_nor_links_to_one(tmp_path):
    env = {k: v for k, v in os.environ.items() if "WANDB" not in k} | {"WANDB_MODE": "offline"}
    env["PYTHONPATH"] = str(Path(brainet_pl.__file__).parents[1])
    words = ["fit", "--config", "digits", "--data.class_path", "fails.Data"]
    failing = (
        "from brainet_pl.datamodules import Digits\n\nclass Data(Digits):\n    def setup(self, stage):\n        1 / 0\n"
    )
    (tmp_path / "fails.py").write_text(failing)
    command = [sys.executable, "-m", "brainet_pl.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ZeroDivisionError: division by zero (--debug shows where)" in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(("version_", "offline-run", "latest-run"))]
    assert not (tmp_path / "runs" / "wandb").exists()


def artifacts(run):
    """(kind, whether it was used rather than made, name) of the package's own artifacts, in their order."""
    return [(a.type, a.use_after_commit, a.name) for a in run.artifacts if a.type in OWN]


def content(artifact):
    return {entry.path: entry.digest for entry in artifact.manifest.contents}


def only(run, kind):
    (found,) = [artifact for artifact in run.artifacts if artifact.type == kind]
    return found


def rows_of(run, name):
    (path,) = run.history[f"{name}/path"]
    return json.loads((run.files / path).read_text())


# -- what came from what ----------------------------------------------------------------------------------------------


def test_the_way_from_structure_to_model_to_results(runs):
    folder, found = runs
    me = found["fit"].config["run"].run_id
    model, other = f"model-{me}", {kind: found[kind].config["run"].run_id for kind in KINDS}
    assert artifacts(found["fit"]) == [("structure", True, "structure"), ("model", False, model)]
    # the same run: its model is one of its outputs already, and W&B's graph has no circles
    assert artifacts(found["test"]) == [("evaluation", False, f"evaluation-{me}")]
    assert artifacts(found["predict"]) == [("predictions", False, f"predictions-{me}")]
    # another run: made from the model of the first
    test, predict = other["new_test"], other["new_predict"]
    assert artifacts(found["new_test"]) == [("model", True, model), ("evaluation", False, f"evaluation-{test}")]
    assert artifacts(found["new_predict"]) == [("model", True, model), ("predictions", False, f"predictions-{predict}")]
    assert other["test"] == other["predict"] == me
    assert len({me, test, predict, other["regression"]}) == 4
    # by its content, W&B finds the version that the fit has logged
    logged = only(found["fit"], "model")
    assert sorted(logged.aliases) == ["best", "last", "latest"]  # one content: the last epoch is the best
    for kind in ("new_test", "new_predict"):
        used = only(found[kind], "model")
        assert used.user_created  # not made by this run
        assert content(used) == content(logged)
        assert used.digest == logged.digest
    ggt = GGT.from_json((folder / "runs/digits/version_0/checkpoints/structure.json").read_text())
    assert list(content(only(found["fit"], "structure"))) == ["structure.json"]
    told = [only(found["fit"], "structure"), logged, only(found["test"], "evaluation")]
    facts = [json.loads(artifact.metadata) for artifact in told]
    assert facts[0]["fingerprint"] == facts[1]["structure"] == facts[2]["structure"] == ggt.fingerprint
    assert facts[2]["checkpoint"] == "last.ckpt"
    assert facts[1]["val/cls/NLL"] == pytest.approx(found["fit"].history["val/cls/NLL"][-1])


def test_jobs_have_their_names(runs):
    _, found = runs
    jobs = {kind: found[kind].config["run"].job_type for kind in ("fit", "new_test", "new_predict", "regression")}
    assert jobs == {"fit": "fit", "new_test": "test", "new_predict": "predict", "regression": "fit"}
    assert found["regression"].config["run"].display_name == "price-TreeEnsemble-0"
    assert list(found["regression"].config["run"].tags) == ["TreeEnsemble", "Regression"]


# -- what each has ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "folder"), [("test", "digits/version_0"), ("new_test", "digits/version_1"),
                                              ("regression", "table/version_0")])  # fmt: skip
def test_a_test_has_its_charts_tables_and_numbers(runs, kind, folder):
    root, found = runs
    run, place = found[kind], root / "runs" / folder
    record = json.loads((place / "record.json").read_text())
    visual = run.config["_wandb"]["visualize"]
    assert set(visual) == (
        {"test/coverage", "test/refusal"} if kind == "regression" else {"test/reliability", "test/risk_coverage"}
    )
    for chart in record["charts"]:
        name = chart["name"]
        if name not in visual:
            assert run.history[f"{name}/_type"] == ["images/separated"], name
            continue
        assert visual[name]["panel_config"]["panelDefId"] == "wandb/area-under-curve/v0", name
        table = rows_of(run, f"{name}_table")
        series = [s for s in chart["panels"][0]["series"] if s["kind"] == "line"]
        lines = {s["name"] for s in series}
        kept = [row[-2:] for row in table["data"] if row[0] in lines]
        assert kept == [list(p) for s in series for p in zip(s["x"], s["y"], strict=True)], name
    tables = [path.stem for path in (place / "tables").glob("*.csv")]
    assert tables
    for name in tables:
        with (place / "tables" / f"{name}.csv").open() as file:
            saved = list(csv.reader(file))
        table = rows_of(run, name.replace("_", "/", 1))
        assert table["columns"] == saved[0]
        assert len(table["data"]) == len(saved) - 1
    evaluation = only(run, "evaluation")
    assert set(content(evaluation)) == {"record.json", "report.html", "scores.csv"}
    facts = json.loads(evaluation.metadata)
    for metric in record["metrics"]:
        (logged,) = run.history[metric["key"]]
        assert facts[metric["key"]] == pytest.approx(metric["value"]) == pytest.approx(logged), metric["key"]


def test_the_charts_of_a_regression_are_its_own(runs):
    _, found = runs
    run = found["regression"]
    for name in ("test/predicted", "test/spread", "test/residuals"):
        assert run.history[f"{name}/_type"] == ["images/separated"], name
    assert "test/confusion/_type" not in run.history
    for name in ("val/reg/NLL", "val/reg/RMSE", "train/lr"):
        assert len(found["regression"].history[name]) == 2, name


@pytest.mark.parametrize(("kind", "version"), [("predict", 0), ("new_predict", 2)])
def test_a_prediction_has_its_file(runs, kind, version):
    root, found = runs
    made = only(found[kind], "predictions")
    (entry,) = made.manifest.contents
    assert entry.path == "predictions.csv"
    ours = (root / f"runs/digits/version_{version}/predictions.csv").read_text()
    assert Path(entry.local_path).read_text() == ours
    rows = list(csv.DictReader(ours.splitlines()))
    facts = json.loads(made.metadata)
    assert facts["checkpoint"] == "last.ckpt"
    assert facts["inputs"] == len(rows) == 433
    assert facts["unknown"] == sum(row["known"] == "False" for row in rows)
