"""Wrong words of a command: told in a line with the nearest names, before torch is loaded where that can be."""

import os
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import brainet_pl
from brainet_pl._utils.parts import part_classes
from brainet_pl.cli import commands, main, words
from brainet_pl.network import HeadSettings

ROOT = Path(brainet_pl.__file__).parents[1]
LIGHT = """
import sys
from brainet_pl.cli.commands import console
try:
    console()
except SystemExit as end:
    print("status", end.code, *sorted({"torch", "pytorch_lightning", "lightning"} & set(sys.modules)))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return tmp_path


def said(monkeypatch, capsys, *given):
    monkeypatch.setattr(sys, "argv", ["brainet", *given])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the console changes it
    with pytest.raises(SystemExit) as end:
        commands.console()
    return capsys.readouterr(), end.value.code


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["fit", "--config", "digitz"], "got 'digitz': did you mean 'digits'?"),
        (["fit"], "expected data, got none: try `brainet fit --config digits`; shipped configurations are cifar10_"),
        (["test", "--ckpt_path=typo.ckpt"], "got 'typo.ckpt', and there is no such file"),
        (["test"], "try `brainet test --ckpt_path FILE`"),
        (["fitt"], "got 'fitt': did you mean 'fit'?"),
        (["--config=digits"], "expected a command (fit, validate, test"),
    ],
)
def test_names_are_checked_before_torch_is_loaded(given, message):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LIGHT, *given], env=env, capture_output=True, text=True, check=True)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == "status 2\n"


def test_the_help_names_all_heads():
    public = import_module("brainet_pl.network").__all__
    assert list(words.HEADS) == sorted(set(part_classes(HeadSettings)) & set(public) - {"HeadSettings"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model.head=Treee"], "MCDropout, MLP, Tree, "),
        (["--model.head=Treee"], "got 'Treee': did you mean 'Tree'?"),
        (
            ["--model.head.num_param=3"],
            "setting of Tree (num_params, min_width, activation, norm, dropout, sampling, draws, temperature, "
            "inference, fields, skip) for model.head, got 'num_param': did you mean 'num_params'?",
        ),
        (["--model.head=MLP", "--model.head.init_args.draws=3"], "setting of MLP (num_params, "),
        (["--data.heldout=[1]"], "for data, got 'heldout': did you mean 'held_out'?"),
        (["--model.lrr=3"], "got '--model.lrr': did you mean '--model.lr'"),
        (["--trainer.epochs=3"], " or '--trainer.max_epochs'?"),
        (["--structure.tset=cmi"], "did you mean '--structure.test'"),
        (["--data=Digitz"], "UCI, or package.Class of your own, got 'Digitz': did you mean 'Digits'?"),
        (["--data=nothere.Data"], "got 'nothere.Data': there is no module 'nothere' in "),
        (["--model.backbone=nothere:Net"], "got 'nothere:Net': there is no module 'nothere' in "),
        (["--model.calibration=Temperature"], "did you mean 'TemperatureScaling'?"),
        (["--model.scores+=Generativ"], "got 'Generativ': did you mean 'Generative'?"),
        (["--lr=3"], "expected a setting that there is, got '--lr'"),
        (["--structure.test=x"], "expected test to be one of cmi, fisher_z, g2, gaussian or a subclass"),
        (["--data.val_fraction=3"], "expected a val_fraction between 0 and 1, got 3.0: give the share"),
        (
            ["--model.scores=Generative"],
            "model.scores to be a list, got Generative: --model.scores+=Generative",
        ),
        (["--trainer.max_epochs=three"], "expected trainer.max_epochs to be int, got three"),
        (["--model.head.num_params=abc"], "expected model.head.num_params to be int"),
        (["--config={here}/own.yaml"], "there is no module 'nothere' in {here} or among the installed packages"),
        (["--model.backbone=mine:Net"], "expected a class or a function of mine as the backbone, got 'Net'"),
    ],
)
def test_wrong_settings_are_one_line_without_the_usage(given, message, folder, monkeypatch, capsys):
    (folder / "mine.py").write_text("import torch\n")
    (folder / "own.yaml").write_text("data: nothere.Data\n")
    given = [word.format(here=folder) for word in given]
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    shown, status = said(monkeypatch, capsys, "fit", "--config=digits", *given)
    sys.modules.pop("mine", None)
    lines = [line for line in shown.err.splitlines() if "Seed set" not in line]
    assert len(lines) == 1, shown.err
    assert message.format(here=folder) in lines[0]
    assert status == 2


def test_a_class_in_the_working_folder_can_be_imported(folder, monkeypatch, capsys):
    """It ends in the class, which says so."""
    (folder / "nearby.py").write_text("def make():\n    raise ValueError('expected to be called')\n")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    shown, status = said(monkeypatch, capsys, "fit", "--config=digits", "--model.backbone=nearby:make")
    sys.modules.pop("nearby", None)
    assert "expected to be called" in shown.err
    assert status == 2


def test_help_is_a_screen_and_names_shipped_configurations(capsys):
    with pytest.raises(SystemExit) as end:
        main(["fit", "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert len(shown.splitlines()) < 40
    assert "Scikit-learn's digits, embedded" in shown
    assert all(name in shown for name in (*words.shipped(), *words.HEADS))


def test_a_fit_that_fails_early_leaves_no_folder(folder, monkeypatch, capsys):
    given = ["--model.num_classes=3", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    shown, status = said(monkeypatch, capsys, "fit", "--config=digits", *given)
    assert "expected 3 different names of classes, as num_classes says, got 8" in shown.err
    assert status == 1
    assert not list(folder.glob("runs/digits/version_*"))


def test_warnings_are_one_line_and_said_once(monkeypatch, capsys):
    def work(given):
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("too\n  few samples", stacklevel=2)
        raise ValueError("expected an end")

    monkeypatch.setattr(commands, "main", work)
    shown, status = said(monkeypatch, capsys, "fit")
    assert shown.err == "warning: too few samples\nbrainet: expected an end (--debug shows where)\n"
    assert status == 1


def test_the_folder_of_a_run_is_its_best_checkpoint(folder):
    run = folder / "runs" / "a"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(words.UsageError, match="no run with checkpoints"):
        words.find_ckpt_path(str(run))
    last, best = run / "checkpoints" / "last.ckpt", run / "checkpoints" / "epoch=3.ckpt"
    last.touch()
    assert words.find_ckpt_path(str(run)) == str(last)
    best.touch()
    assert words.find_ckpt_path(str(run)) == str(best)
    assert words.find_ckpt_path(str(run), last=True) == str(last)  # a fit goes on
    (run / "checkpoints" / "epoch=4.ckpt").touch()
    with pytest.raises(words.UsageError, match=r"expected one checkpoint beside last\.ckpt"):
        words.find_ckpt_path(str(run))
