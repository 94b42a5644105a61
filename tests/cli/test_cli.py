"""The console script: every shipped configuration on stand-in data, a lone checkpoint, and a real offline W&B run."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb
import yaml
from offline import files_of, read_wandb
from PIL import Image

import brainet_pl
from brainet_pl import configs
from brainet_pl.cli import config_path, main, shipped, without_wandb
from brainet_pl.datamodules import vision
from brainet_pl.structure import GGT

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield tmp_path
    wandb.finish()


class FewImages:
    """What torchvision's classes give, with a few random images."""

    def __init__(self, root, download=False, train=True):
        rng = np.random.default_rng(train)
        self.data = rng.integers(0, 256, size=(64, *self.shape), dtype=np.uint8)
        self.targets = rng.integers(0, 10, 64)


def write_uci(folder, rows, columns, splits=1):
    """A UCI set in its published layout, of noise."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", rng.normal(size=(rows, columns + 1)))
    np.savetxt(folder / "index_features.txt", np.arange(columns))
    np.savetxt(folder / "index_target.txt", [columns])
    for split in range(splits):
        order = rng.permutation(rows)
        np.savetxt(folder / f"index_train_{split}.txt", order[: rows * 9 // 10])
        np.savetxt(folder / f"index_test_{split}.txt", order[rows * 9 // 10 :])


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_configuration_runs(name, folder, monkeypatch, image_lists):
    extra = []
    if name == "cifar10_resnet20":
        rng = np.random.default_rng(0)
        for split in ("train", "test"):
            np.savez(
                folder / f"{split}.npz",
                x=rng.integers(0, 256, (64, 32, 32, 3), dtype=np.uint8),
                y=rng.integers(0, 10, 64),
            )
        extra = ["--data.train=train.npz", "--data.test=test.npz"]
    if name == "imagefolder":
        rng = np.random.default_rng(0)
        for i in range(40):
            path = folder / "images" / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(path)
        extra = ["--data.root=images", "--data.size=32"]
    if name == "openood_cifar10":
        extra = [f"--data.root={image_lists(folder)}", "--model.scores=[Generative]"]
    if name == "uci":
        write_uci(folder / "uci" / "concrete", rows=120, columns=8)
        extra = ["--data.root=uci"]
    if name == "table":
        rng = np.random.default_rng(0)
        rows = [
            f"{a:.3f},{b:.3f},{c},{a + b:.3f}" for a, b, c in zip(*rng.normal(size=(2, 100)), "xy" * 50, strict=True)
        ]
        (folder / "table.csv").write_text("\n".join(["a,b,c,target", *rows]))
        extra = ["--data.file=table.csv"]
    for key, shape in {"mnist": (28, 28), "fashion_mnist": (28, 28), "cifar10": (32, 32, 3)}.items():
        made = type("Made", (FewImages,), {"shape": shape})
        monkeypatch.setitem(vision.TABLE, key, vision.TABLE[key]._replace(source=made))
    if name != "digits":
        extra.append("--data.batch_size=16")
    # Few rows of noise give large trees or none: a threshold that keeps one or two sets
    cli = main(["fit", "--config", name, "--trainer.fast_dev_run=true", "--structure.threshold=0.5", *extra, *QUIET])
    assert cli.model.ggt is not None
    cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)


def test_fit_then_test_with_nothing_but_the_checkpoint(folder):
    main(["fit", "--config", "digits", "--trainer.max_epochs=2", *QUIET])
    run = folder / "runs" / "digits" / "version_0"
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert (run / "checkpoints" / "structure.json").is_file()
    assert (run / "figures" / "structure_tree.png").stat().st_size > 10_000
    assert (run / "config.yaml").is_file()
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    columns = set(rows[0])
    assert {"val/cls/Acc", "val/cls/NLL", "val/cal/ECE", "structure/subnetworks", "structure/perplexity"} <= columns
    cli = main(["test", "--ckpt_path", str(checkpoint), "--trainer.logger=false", *QUIET])
    assert cli.trainer.callback_metrics["test/cls/Acc"] > 0.3
    assert cli.trainer.callback_metrics["ood/held_out/entropy/AUROC"] > 0.3  # the callbacks come with the checkpoint
    assert (run / "record.json").is_file()
    assert cli.model.ggt is not None
    swept = main(["test", "--ckpt_path", str(checkpoint), "--model.passes=3", "--trainer.logger=false", *QUIET])
    assert swept.model.passes == 3  # the command line wins over the checkpoint
    resumed = main(["fit", "--ckpt_path", str(checkpoint), "--trainer.max_epochs=3", *QUIET])
    assert resumed.trainer.current_epoch == 3
    assert resumed.config["fit"]["structure"]["threshold"] == "auto"
    main(["validate", f"--ckpt_path={checkpoint}", "--trainer.logger=false", *QUIET])
    predicted = main(["predict", "--ckpt_path", str(checkpoint), "--trainer.logger=false", *QUIET])
    assert not predicted.trainer.predict_loop.return_predictions  # the file has them; memory need not
    rows = list(csv.DictReader((run / "predictions.csv").open()))
    assert len(rows) == 433
    assert sum(float(rows[0][f"probabilities_{c}"]) for c in range(8)) == pytest.approx(1, abs=1e-4)
    torch.load(checkpoint, weights_only=True)


FIT_AND_TEST = """
import sys
from brainet_pl.cli import lightning
cli = lightning(["fit", "--config", "digits", "--trainer.max_epochs=2", *sys.argv[1:]])
cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
"""


def test_a_real_offline_run_holds_metrics_figures_tables_and_configuration(folder):
    # In a process of its own, as a user would: W&B's service keeps the folder in which it was first started.
    env = {k: v for k, v in os.environ.items() if "WANDB" not in k} | {"WANDB_MODE": "offline"}
    env["PYTHONPATH"] = str(Path(brainet_pl.__file__).parents[1])  # this tree, wherever another one is installed
    command = [sys.executable, "-c", FIT_AND_TEST, "--model.calibration=TemperatureScaling", *QUIET]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    check_offline_run(folder)


def check_offline_run(folder):
    (path,) = files_of(folder)
    run = read_wandb(path)
    about = run.config["run"]
    assert (about.display_name, about.run_group, about.job_type) == ("digits-Tree-0", "digits", "fit")
    assert list(about.tags) == ["Tree", "Classification"]
    for key in ("train/loss", "val/cls/Acc", "val/cls/NLL", "val/cls/Brier", "val/cal/ECE", "val/cal/aECE"):
        assert run.history[key], key
    rows = list(csv.DictReader((folder / "runs/digits/version_0/metrics.csv").open()))
    logged = [float(row["val/cls/NLL"]) for row in rows if row["val/cls/NLL"]]
    assert run.history["val/cls/NLL"] == pytest.approx(logged)
    assert run.history["structure/unique_structures"][0] >= 1
    assert len(run.history["ood/held_out/entropy/AUROC"]) == 1
    # charts in which runs are compared, as the data of one that W&B draws; the others as pictures
    visual = run.config["_wandb"]["visualize"]
    record = json.loads((folder / "runs/digits/version_0/record.json").read_text())
    assert set(visual) == {"test/reliability", "test/risk_coverage"}
    for chart in record["charts"]:
        name, panel = chart["name"], chart["panels"][0]
        if name not in visual:
            assert run.history[f"{name}/_type"] == ["images/separated"], name
            continue
        assert visual[name]["panel_config"]["panelDefId"] == "wandb/area-under-curve/v0", name
        (path,) = run.history[f"{name}_table/path"]
        table = json.loads((run.files / path).read_text())
        assert table["columns"] == ["class", "x", "y"]
        for series in (series for series in panel["series"] if series["kind"] == "line"):
            points = [[x, y] for label, x, y in table["data"] if label == series["name"]]
            assert points == [list(point) for point in zip(series["x"], series["y"], strict=True)], name
    assert run.history["test/confusion/_type"] == ["images/separated"]
    assert len([a for a in run.artifacts if a.type == "run_table"]) == 7  # two charts and five tables
    # the tree as a picture that is there, once more with the test
    assert run.history["structure/tree/_type"] == ["images/separated"] * 2
    for (picture,) in run.history["structure/tree/filenames"]:
        assert (run.files / picture).read_bytes()[:4] == b"\x89PNG"
    # every table, with its rows, and the thumbnails as pictures
    for name, n_rows in {"test/most_uncertain": 16, "test/classes": 8, "ood/table": 10}.items():
        assert run.history[f"{name}/_type"] == ["table-file"], name
        (path,) = run.history[f"{name}/path"]
        table = json.loads((run.files / path).read_text())
        assert len(table["data"]) == n_rows
        saved = csv.DictReader((folder / "runs/digits/version_0/tables" / f"{name.replace('/', '_')}.csv").open())
        assert table["columns"] == saved.fieldnames
        assert [str(row[0]) for row in table["data"]] == [row[saved.fieldnames[0]] for row in saved]
    (table,) = [a for a in run.artifacts if a.type == "run_table" and "most_uncertain" in a.name]
    pictures = [entry.local_path for entry in table.manifest.contents if entry.path.endswith(".png")]
    assert len(pictures) == 16  # wait for `wandb sync` where W&B stages artifacts
    assert all(Path(path).read_bytes()[:4] == b"\x89PNG" for path in pictures)
    assert run.config["structure"]["threshold"] == "auto"
    assert run.config["model"]["num_classes"] == 8
    best = {"val/cls/NLL": "min", "val/cal/ECE": "min", "test/cls/Brier": "min", "val/cls/Acc": "max"}
    best |= {"ood/held_out/joint/AUROC": "max", "ood/held_out/joint/FPR95": "min"}
    best |= {"ood/held_out/energy/AUROC": "none"}
    assert {name: run.summaries.get(name) for name in best} == best
    single = {name for name in run.history if name.startswith(("test/cls", "test/cal", "test/sc", "ood/"))}
    single = {name for name in single if name.count("/") != 4 and isinstance(run.history[name][0], float)}
    assert single <= run.hidden  # no panel with one point
    assert len(single) > 50
    assert "val/cls/NLL" not in run.hidden
    assert run.config["samples"] == {"test": 433, "held_out": 354}
    (path,) = run.history["test/scores/path"]
    scores = json.loads((run.files / path).read_text())
    assert len(scores["data"]) == 433 + 354
    assert {"set", "sample", "predicted", "label", "entropy"} <= set(scores["columns"])
    for name in ("train/lr", "train/cls/Acc", "train/cal/ECE"):
        assert len(run.history[name]) == 2, name  # an epoch each
    (evaluation,) = [artifact for artifact in run.artifacts if artifact.type == "evaluation"]
    files = sorted(entry.path for entry in evaluation.manifest.contents)
    assert files == ["record.json", "report.html", "scores.csv"]
    assert json.loads(evaluation.metadata)["test/cls/Acc"] == pytest.approx(run.history["test/cls/Acc"][0])
    models = [artifact for artifact in run.artifacts if artifact.type == "model"]
    assert [sorted(model.aliases) for model in models] == [["best", "last", "latest"]]  # the last epoch is the best
    (structure,) = [artifact for artifact in run.artifacts if artifact.type == "structure"]
    assert [entry.path for entry in structure.manifest.contents] == ["structure.json"]
    stored = json.loads((folder / "runs/digits/version_0/structure.json").read_text())
    assert json.loads(structure.metadata)["fingerprint"] == GGT.from_dict(stored).fingerprint


def test_every_shipped_configuration_is_evaluated():
    for path in shipped().values():
        used = [c["class_path"].rpartition(".")[2] for c in yaml.safe_load(path.read_text())["trainer"]["callbacks"]]
        assert "Evaluation" in used, path.name


def test_the_sweep_asks_for_settings_that_exist(folder):
    assert "sweep" not in shipped()
    with pytest.raises(FileNotFoundError, match="expected a file or one of"):
        config_path("sweep")
    sweep = yaml.safe_load((Path(configs.__path__[0]) / "sweep.yaml").read_text())
    assert sweep["command"][0] == "brainet"
    head = "model.head.init_args"
    names = {"structure.s", "structure.threshold", f"{head}.temperature", f"{head}.num_params"}
    assert set(sweep["parameters"]) == names
    # one combination, as `wandb agent` would fill it in; all ends of the ranges must parse
    for end in ("min", "max"):
        chosen = {
            name: range_["values"][0 if end == "min" else -1] if "values" in range_ else range_[end]
            for name, range_ in sweep["parameters"].items()
        }
        args = [f"--{name}={value}" for name, value in chosen.items()]
        words = [part for word in sweep["command"][1:] for part in (args if word == "${args}" else [word])]
        cli = main([*words, "--trainer.fast_dev_run=true", *QUIET])
        fit = cli.config["fit"]
        assert {name: fit[name] for name in chosen} == chosen
        assert cli.model.head.temperature == chosen[f"{head}.temperature"]
        assert fit["trainer"]["logger"][-1]["init_args"]["offline"] is False
    metrics = cli.trainer.callback_metrics
    assert sweep["metric"]["name"] in metrics
    assert not cli.model.val_metrics[sweep["metric"]["name"]].higher_is_better


def test_wandb_can_be_disabled(folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    cli = main(["fit", "--config", "digits", "--trainer.max_epochs=1", *QUIET])
    assert [type(logger).__name__ for logger in cli.trainer.loggers] == ["CSVLogger"]
    assert not files_of(folder)  # of an offline run, which the configuration asks for
    rows = list(csv.DictReader((folder / "runs/digits/version_0/metrics.csv").open()))
    assert any(row["val/cls/NLL"] for row in rows)


def test_wandb_that_is_not_installed_is_left_out(monkeypatch):
    text, cloud = ({"class_path": f"pytorch_lightning.loggers.{name}"} for name in ("CSVLogger", "WandbLogger"))
    assert without_wandb([text, cloud]) == [text, cloud]
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert without_wandb([text, cloud]) == [text]
    assert [without_wandb(other) for other in (None, False, cloud)] == [None, False, cloud]  # asked for by itself


def test_help_is_readable(capsys):
    for words in (["--help"], ["fit", "--help", "all"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--structure.threshold" in shown
    assert "--model.head" in shown
    listed = [line.split()[0] for line in shown.splitlines() if line.startswith("    ") and line.strip()]
    assert listed[:4] == ["fit", "afterwards", "validate", "test"]
    assert {"predict", "report", "compare", "export", "cache"} <= set(listed)


LIGHT = """
import sys
from brainet_pl.cli import console
try:
    console()
except SystemExit as end:
    print("status", end.code)
print("loaded", *sorted({"torch", "pytorch_lightning", "lightning", "matplotlib", "wandb"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--help"], 0, "usage: brainet"),
        (["--version"], 0, f"brainet {brainet_pl.__version__}"),
        (["report", "--help"], 0, "usage: brainet report"),
        (["compare", "--help"], 0, "usage: brainet compare"),
        ([], 2, "usage: brainet"),
        (["fti"], 2, "got 'fti': did you mean 'fit'?"),
    ],
)
def test_what_needs_no_torch_starts_without_it(words, status, said):
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", LIGHT, *words], env=env, capture_output=True, text=True, check=True)
    assert said in done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == [f"status {status}", "loaded"]


def test_unknown_configuration_lists_the_known_ones():
    with pytest.raises(FileNotFoundError, match="imagefolder, mnist, openood_cifar10, table, uci"):
        config_path("imagenet")


def test_a_csv_file_says_itself_what_is_predicted(folder):
    """Classes and numbers from the same configuration, without a further setting."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    answers = {
        "kind": np.where(x[:, 0] + 0.3 * x[:, 1] > 0, "good", "bad"),
        "price": x[:, 0] * 10 + rng.normal(size=120),
    }
    for target, values in answers.items():
        rows = [",".join([*map(str, row), str(value)]) for row, value in zip(x, values, strict=True)]
        (folder / f"{target}.csv").write_text("\n".join([f"a,b,c,{target}", *rows]))
        given = [f"--data.file={target}.csv", f"--data.target={target}", "--trainer.max_epochs=2"]
        main(["fit", "--config", "table", *given, *QUIET])
    kind, price = sorted((folder / "runs/table").glob("version_*/metrics.csv"))
    assert "val/cls/NLL" in kind.read_text().splitlines()[0]
    assert "val/reg/NLL" in price.read_text().splitlines()[0]
    main(["predict", "--ckpt_path", str(kind.parent / "checkpoints/last.ckpt"), *QUIET])
    (predictions,) = folder.rglob("predictions.csv")
    assert {row["class_name"] for row in csv.DictReader(predictions.open())} <= {"good", "bad"}
    with pytest.raises(
        ValueError, match=r"expected the target to be a column of kind.csv \(a, b, c, kind\), got 'nope'"
    ):
        main(["fit", "--config", "table", "--data.file=kind.csv", "--data.target=nope", *QUIET])
