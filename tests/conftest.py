"""Shared by all tests: small data and random graphs, a Trainer that keeps quiet, and one run with all its files.

Everything is made here and never downloaded. Tests find `offline`, which reads runs of W&B.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from brainet_pl._utils.framework import CSVLogger, ModelCheckpoint, pl
from brainet_pl.calibration import TemperatureScaling
from brainet_pl.callbacks import Evaluation, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Tree

sys.path.insert(0, str(Path(__file__).parent))


# Files and tests that work with whole models: they train, export, serve, or start processes of their own.
WHOLE_FILES = {
    "test_cli.py", "test_compose.py", "test_estimators.py", "test_examples.py", "test_exhaustion.py", "test_export.py",
    "test_folder.py", "test_fuzz.py", "test_pretrained.py", "test_resume.py", "test_runs.py", "test_samples.py",
    "test_serve.py", "test_shares.py", "test_smoke.py", "test_swap_fit.py", "test_wandb.py",
}  # fmt: skip
WHOLE_TESTS = {
    "test_a_mix_is_explained",
    "test_a_thousand_classes",
    "test_python_blocks",
    "test_shell_lines",
    "test_the_configuration_measures_what_openood_does",
    "test_the_package_is_imported_piece_by_piece",
    "test_twenty_lines_with_lightning",
    "test_two_processes_may_extract_the_same_at_once",
}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Mark as `integration` what works with a whole model; whoever asks for a Trainer trains one."""
    for item in items:
        trains = "quiet_trainer" in item._fixtureinfo.argnames
        if trains or item.path.name in WHOLE_FILES or item.originalname in WHOLE_TESTS:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def random_dag():
    """A function (seed, d, p) -> boolean (d, d) adjacency of a DAG with edge probability p."""

    def make(seed, d, p):
        rng = np.random.default_rng(seed)
        order = rng.permutation(d)
        return np.triu(rng.random((d, d)) < p, 1)[np.ix_(order, order)]

    return make


@pytest.fixture(scope="session")
def features():
    """(400, 10) continuous features with shared causes, zero-inflated like those behind a ReLU."""
    rng = np.random.default_rng(7)
    causes = rng.normal(size=(400, 4))
    mixing = rng.normal(size=(4, 10)) * (rng.random((4, 10)) < 0.5)
    return np.maximum(causes @ mixing + 0.4 * rng.normal(size=(400, 10)), 0)


@pytest.fixture(scope="session")
def quiet_trainer():
    """A function (folder, *callbacks, epochs=1, **settings) -> Trainer on the CPU that prints and logs nothing.

    It writes checkpoints only where a ModelCheckpoint is among the callbacks, and logs only to a logger it is given.
    """

    def quiet(folder, *callbacks, epochs=1, **settings):
        return pl.Trainer(
            **{
                "max_epochs": epochs,
                "accelerator": "cpu",
                "default_root_dir": str(folder),
                "logger": False,
                "callbacks": list(callbacks),
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
                **settings,
            }
        )

    return quiet


@pytest.fixture(scope="session")
def run(tmp_path_factory, quiet_trainer):
    """The folder of a run that was fitted and tested, once for all tests, with all its files; nobody writes into it."""
    folder = tmp_path_factory.mktemp("run")
    trainer = quiet_trainer(
        folder,
        StructureLearning(threshold=0.1, progress=False),
        Evaluation(most_uncertain=4, image_shape=(8, 8)),
        epochs=3,
        logger=CSVLogger(str(folder), name="digits"),
        log_every_n_steps=5,
    )
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=Tree(num_params=8000), calibration=TemperatureScaling(), lr=0.01)
    trainer.fit(model, datamodule=Digits())
    trainer.test(model, datamodule=Digits(), verbose=False)
    return folder / "digits" / "version_0"


@pytest.fixture
def image_lists():
    """A function that fills a folder with images and lists in the layout of OpenOOD's benchmark of CIFAR-10."""
    known = {"train_cifar10": 60, "val_cifar10": 20, "test_cifar10": 20, "test_cifar10c": 20}
    unknown = ("cifar100", "tin", "mnist", "svhn", "texture", "places365")

    def write(root):
        lists = root / "benchmark_imglist" / "cifar10"
        lists.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for name, count in (known | {f"test_{name}": 12 for name in unknown}).items():
            lines = []
            for i in range(count):
                path = root / "images_classic" / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(0, 256 - 20 * (i % 10), (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels // (2 if name not in known else 1)).save(path)
                lines.append(f"{name}/{i}.png {i % 10 if name in known else -1}")
            (lists / f"{name}.txt").write_text("\n".join(lines) + "\n")
        return root

    return write
