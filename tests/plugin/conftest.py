"""One fitted and tested run, with all its files, for everything that only reads it."""

import pytest
import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger

from brainet_pl.callbacks import Dashboard, OODEvaluation, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.module import BRAINet


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The folder of a run that was fitted and tested, once for all tests."""
    folder = tmp_path_factory.mktemp("run")
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", logger=CSVLogger(str(folder), name="digits"), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder), log_every_n_steps=5,
        callbacks=[StructureLearning(threshold=0.1, progress=False), OODEvaluation(), Dashboard(4, image_shape=(8, 8))],
    )  # fmt: skip
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, num_params=8000, lr=0.01, temperature_scaling=True)
    trainer.fit(model, datamodule=Digits())
    trainer.test(model, datamodule=Digits(), verbose=False)
    return folder / "digits" / "version_0"
