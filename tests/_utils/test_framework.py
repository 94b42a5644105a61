import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from brainet_pl import BRAINet
from brainet_pl._utils.framework import NAMESPACE, NEW, OLD, OTHER, SETTING, choose, is_csv, is_wandb, pl, translated
from brainet_pl.cli import main
from brainet_pl.network import Linear

ROOT = Path(__file__).parents[2]
pytest.importorskip(OTHER, reason=f"{OTHER} is not installed")


def python(folder, script, namespace=None):
    """Run a script in a process of its own, in a namespace or as it finds one by itself."""
    chosen = {} if namespace is None else {SETTING: namespace}
    apart = (SETTING, "WANDB_SERVICE")  # with the latter it would share the runs of this process
    env = {name: value for name, value in os.environ.items() if name not in apart} | chosen
    found = subprocess.run([sys.executable, "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


# -- which one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forced", "loaded", "there", "expected"),
    [
        (None, [], [OLD, "lightning"], OLD),
        (None, [], ["lightning"], NEW),
        (None, [], [OLD], OLD),
        (None, ["lightning", NEW], [OLD, "lightning"], NEW),
        (None, [OLD], [OLD, "lightning"], OLD),
        (None, [OLD, "lightning", NEW], [OLD, "lightning"], OLD),
        ("", [NEW], [OLD, "lightning"], NEW),
        ("lightning", [OLD], [OLD, "lightning"], NEW),
        (NEW, [OLD], [OLD, "lightning"], NEW),
        (OLD, [NEW], [OLD, "lightning"], OLD),
    ],
)
def test_the_namespace_is_the_users(forced, loaded, there, expected):
    assert choose(forced, loaded, lambda name: name in there) == expected


def test_a_wrong_setting_is_said():
    with pytest.raises(
        ValueError, match="expected BRAINET_LIGHTNING to be pytorch_lightning or lightning, got 'torch'"
    ):
        choose("torch", [], lambda name: True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "expected"),
    [("", OLD), ("import lightning as L", NEW), ("import lightning.pytorch", NEW), ("import pytorch_lightning", OLD)],
)
def test_only_one_of_them_is_imported(tmp_path, before, expected):
    script = "import sys, brainet_pl.cli\nfrom brainet_pl._utils.framework import *\n"
    script += "print(NAMESPACE, pl.__name__, OTHER in sys.modules)"
    assert python(tmp_path, f"{before}\n{script}").split() == [expected, expected, "False"]


def test_paths_of_classes_are_translated():
    text = "a: pytorch_lightning.cli.X\nb: lightning.pytorch.loggers.Y\nc: my.lightning.pytorch.Z\nd: lightning.pytorch"
    assert translated(text, NEW) == text.replace("pytorch_lightning.", "lightning.pytorch.")
    assert translated(text, OLD).splitlines()[1:] == [
        "b: pytorch_lightning.loggers.Y", "c: my.lightning.pytorch.Z", "d: lightning.pytorch",
    ]  # fmt: skip


def test_loggers_are_known_by_name(tmp_path):
    for namespace in (OLD, NEW):
        loggers = __import__(f"{namespace}.loggers", fromlist=["loggers"])
        assert is_csv(loggers.CSVLogger(tmp_path))
        assert is_wandb(loggers.WandbLogger(offline=True, save_dir=tmp_path))
        assert not is_csv(loggers.TensorBoardLogger(tmp_path))


# -- mixes ------------------------------------------------------------------------------------------------------------

MIXES = """
import warnings; warnings.simplefilter("ignore")
import brainet_pl
import lightning as L, pytorch_lightning as pl, torch
from brainet_pl.datamodules import Digits
from brainet_pl._utils.framework import NEW, pl as ours
from brainet_pl.network import Linear

other = pl if ours.__name__ == NEW else L
quiet = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
class Data(other.LightningDataModule):
    def train_dataloader(self):
        return Digits().train_dataloader()
class Watch(other.Callback):
    def on_fit_start(self, trainer, module): ...
def model():
    return brainet_pl.BRAINet(8, head=Linear())
for name, mix in {
    "trainer": lambda: other.Trainer(**quiet).fit(model(), Digits()),
    "compiled": lambda: other.Trainer(**quiet).fit(torch.compile(model()), Digits()),
    "callback": lambda: ours.Trainer(callbacks=[Watch()], **quiet).fit(model(), Digits()),
    "datamodule": lambda: ours.Trainer(**quiet).fit(model(), datamodule=Data()),
    "positional": lambda: ours.Trainer(**quiet).fit(model(), Data()),
}.items():
    try:
        mix()
    except TypeError as error:
        print(f"{name}: {error}")
    else:
        print(f"{name}: nothing")
"""


def test_a_mix_is_explained(tmp_path):
    said = dict(line.split(": ", 1) for line in python(tmp_path, MIXES, NAMESPACE).splitlines() if ": " in line)
    assert set(said) == {"trainer", "compiled", "callback", "datamodule", "positional"}
    for name in ("trainer", "compiled"):
        assert f"got a Trainer of {OTHER} and a BRAINet of {NAMESPACE}: brainet_pl took {NAMESPACE}" in said[name]
        assert f"import {OTHER} before brainet_pl, or set BRAINET_LIGHTNING={OTHER.split('.')[0]} in" in said[name]
    for name in ("callback", "datamodule", "positional"):
        thing = "Watch" if name == "callback" else "Data"
        assert f"got a Trainer of {NAMESPACE} and a {thing} of {OTHER}: import both from {NAMESPACE}" in said[name]


# -- one run, two namespaces ------------------------------------------------------------------------------------------

FIT = """
import torch
from brainet_pl.cli import main
cli = main(["fit", "--config", "digits", "--trainer.max_epochs=2", "--trainer.enable_progress_bar=false", *{more}])
torch.manual_seed(0)
torch.save(cli.model.eval()(torch.linspace(0, 1, 4 * 64).reshape(4, 64)), "seen.pt")
"""


@pytest.mark.slow
def test_a_checkpoint_of_one_is_gone_on_with_in_the_other(tmp_path, monkeypatch):
    # A class of this namespace in the user's own file, and on the command line, where the other one is used.
    monitor = f"{NAMESPACE}.callbacks.LearningRateMonitor"
    (tmp_path / "mine.yaml").write_text(f"trainer:\n  callbacks+:\n    - class_path: {monitor}")
    more = ["--config", "mine.yaml", f"--trainer.callbacks+={NAMESPACE}.callbacks.ModelSummary"]
    python(tmp_path, FIT.format(more=more), OTHER)
    (file,) = tmp_path.glob("runs/digits/version_0/checkpoints/last.ckpt")
    stored = (file.parents[1] / "config.yaml").read_text()  # where the Trainer's classes stand
    assert stored.count(f"{OTHER}.") >= 5
    assert f"{NAMESPACE}." not in stored

    monkeypatch.chdir(tmp_path)
    model = BRAINet.load_from_checkpoint(file).eval()
    torch.manual_seed(0)
    assert torch.equal(model(torch.linspace(0, 1, 4 * 64).reshape(4, 64)), torch.load("seen.pt"))
    quiet = "--trainer.enable_progress_bar=false"
    resumed = main(["fit", "--ckpt_path", str(file), "--trainer.max_epochs=3", quiet])
    assert resumed.trainer.current_epoch == 3
    assert {type(c).__name__ for c in resumed.trainer.callbacks} >= {
        "ModelSummary",
        "LearningRateMonitor",
        "ModelCheckpoint",
    }
    tested = main(["test", "--ckpt_path", str(file), "--trainer.logger=false", quiet])
    assert "ood/held_out/generative/AUROC" in tested.trainer.callback_metrics


def test_the_module_is_of_the_namespace():
    assert isinstance(BRAINet(3, head=Linear()), pl.LightningModule)
    assert pl.__name__ == NAMESPACE


def test_twenty_lines_with_lightning(tmp_path):
    """The script of docs/howto/lightning.md, in a process where nothing says which namespace but its imports."""
    (script,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "howto" / "lightning.md").read_text(), re.S)
    assert len([line for line in script.splitlines() if line.strip()]) <= 20
    assert (ROOT / "examples" / "lightning_namespace.py").read_text().endswith(script)
    said = python(tmp_path, script).splitlines()[-1].split()
    assert said[0] == "True"
    assert float(said[1]) > 0.9
    assert (tmp_path / "runs/digits/version_0/record.json").is_file()


# -- the suite under the other namespace ------------------------------------------------------------------------------

# A test of each kind; `make test-all` runs all of them.
SAMPLE = (
    "tests/callbacks/test_swap.py::test_fit_stop_resume_test_and_report",
    "tests/callbacks/test_logging.py",
    "tests/model/test_fit_scores.py::test_a_checkpoint_brings_scores_that_the_model_was_not_given",
    "tests/datamodules/test_datamodules.py::test_lightning_takes_loaders_by_name",
    "tests/model/test_lightning.py::test_resume_continues_without_learning_again",
    "tests/model/test_lightning.py::test_frozen_backbone_does_not_move_and_features_are_cached",
    "tests/cli/test_trust.py::test_short_names_are_those_of_the_table",
)


@pytest.mark.slow
@pytest.mark.skipif(bool(os.environ.get(SETTING)), reason="this is the run under a chosen namespace")
def test_a_sample_of_the_suite_under_the_other_namespace():
    words = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "-p", "no:cacheprovider", *SAMPLE]
    found = subprocess.run(words, cwd=ROOT, env=os.environ | {SETTING: OTHER}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", found.stdout)[0]) >= 10
