"""What people use beside a model: each with a fit, and where it shows, with what it did."""

import math
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from brainet_pl import BRAINet
from brainet_pl._utils.framework import CSVLogger, pl
from brainet_pl.callbacks import StructureLearning
from brainet_pl.cli import BrainetCLI
from brainet_pl.datamodules import Digits
from brainet_pl.network import MLP, Tree

callbacks, tuner = pl.callbacks, import_module(f"{pl.__name__}.tuner")


def make(head=None, **settings):
    pl.seed_everything(0, verbose=False)
    return BRAINet(8, head=head or Tree(num_params=4000), passes=3, **settings)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("composes")  # one folder, so that the structure is learned once


@pytest.fixture
def trainer(root, quiet_trainer):
    def build(*more, **settings):
        return quiet_trainer(root, *more, StructureLearning(threshold=0.1, progress=False), **settings)

    return build


def test_lr_find_sets_the_rate_that_trains(trainer):
    model, data, fits = make(), Digits(), trainer()
    found = tuner.Tuner(fits).lr_find(model, datamodule=data, num_training=20).suggestion()
    assert model.lr == model.hparams["lr"] == found != 1e-3
    fits.fit(model, datamodule=data)
    assert fits.optimizers[0].param_groups[0]["lr"] == found


def test_lr_find_may_go_on_until_the_loss_is_nan(trainer):
    model = make()
    to_the_end = {"max_lr": 1e36, "num_training": 20, "early_stop_threshold": None, "update_attr": False}
    found = tuner.Tuner(trainer(epochs=3)).lr_find(model, datamodule=Digits(), **to_the_end)
    assert not all(math.isfinite(loss) for loss in found.results["loss"])
    assert all(p.isfinite().all() for p in model.parameters())  # as they were before


@pytest.mark.slow
def test_batch_size_finder(trainer):
    data = Digits(batch_size=16)
    found = tuner.Tuner(trainer()).scale_batch_size(make(), datamodule=data, max_trials=2, steps_per_trial=1)
    assert found == data.batch_size


def test_accumulation_and_clipping(trainer):
    class Norms(pl.Callback):
        norms = ()

        def on_before_optimizer_step(self, trainer, module, optimizer):
            grads = [p.grad.norm() for p in module.head.parameters() if p.grad is not None]
            self.norms = (*self.norms, float(torch.stack(grads).norm()))

        def on_before_zero_grad(self, trainer, module, optimizer):
            if self.norms:  # what the step before left: after clipping
                self.last = float(torch.stack([p.grad.norm() for p in module.head.parameters()]).norm())

    observe, plain = Norms(), trainer()
    plain.fit(make(), datamodule=Digits())
    fits = trainer(observe, accumulate_grad_batches=4, gradient_clip_val=1e-3)
    fits.fit(make(), datamodule=Digits())
    assert len(observe.norms) == fits.global_step == -(-plain.global_step // 4)
    assert min(observe.norms) > 1e-2
    assert observe.last == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("head", [Tree(4000), MLP(4000)], ids=["Tree", "MLP"])
@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_averaged_weights_are_those_of_the_head(trainer, name, head):
    """Its copy of the model must have the head, wherever the callback stands in the list."""
    kind = getattr(callbacks, name, None) or pytest.skip(f"this Lightning has no {name}")
    made = kind(1e-3, swa_epoch_start=1) if name.startswith("Stochastic") else kind()
    model, fits = make(head), trainer(made, epochs=3)
    fits.fit(model, datamodule=Digits())
    average = made._average_model
    assert [p.shape for p in average.parameters()] == [p.shape for p in model.parameters()]
    if name.startswith("Stochastic"):
        assert int(made.n_averaged) >= 2
        torch.testing.assert_close(list(average.parameters()), list(model.parameters()))


def test_callbacks_that_watch(trainer, root):
    logger = CSVLogger(root, name="watch")
    stop = callbacks.EarlyStopping("val/cls/NLL", min_delta=100.0, patience=1)
    fits = trainer(stop, callbacks.LearningRateMonitor(), logger=logger, epochs=9, log_every_n_steps=1)
    fits.fit(make(), datamodule=Digits())
    assert fits.current_epoch == 2
    rates = [row.get("lr-Adam") for row in map(dict, _rows(f"{logger.log_dir}/metrics.csv"))]
    assert "0.001" in rates


def _rows(path):
    import csv

    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("inference_mode", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_fit_may_follow_a_test(trainer, inference_mode):
    model, fits = make(), trainer(inference_mode=inference_mode, enable_model_summary=True)
    fits.fit(model, datamodule=Digits())
    fits.test(model, datamodule=Digits(), verbose=False)
    fits.fit_loop.max_epochs = 2
    fits.fit(model, datamodule=Digits())
    assert fits.current_epoch == 2


def test_prediction_writers(trainer, root):
    class Writer(callbacks.BasePredictionWriter):
        seen = ()

        def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
            self.seen = (*self.seen, (len(indices), len(prediction["class"])))

    model, data, writer = make(), Digits(), Writer("batch")
    fits = trainer(writer)
    fits.fit(model, datamodule=data)
    fits.predict(model, datamodule=data, return_predictions=False)
    assert sum(n for n, _ in writer.seen) > 100
    assert all(n == predicted for n, predicted in writer.seen)


def test_a_subclass_of_the_command_line(root, monkeypatch):
    monkeypatch.chdir(root)

    class Mine(BrainetCLI):
        def add_arguments_to_parser(self, parser):
            super().add_arguments_to_parser(parser)
            parser.add_argument("--mine", default=3)
            parser.link_arguments("data.init_args.batch_size", "model.passes")

    words = ["fit", "--data=Digits", "--model.num_classes=8", "--data.batch_size=7", "--trainer.fast_dev_run=1"]
    words += ["--structure.threshold=0.1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    cli = Mine(BRAINet, pl.LightningDataModule, subclass_mode_data=True, auto_configure_optimizers=False, args=words)
    assert cli.config["fit"]["mine"] == 3
    assert cli.model.passes == 7


@pytest.mark.slow
def test_bf16(trainer):
    """Products in 16 bits crash some processors, so one is tried in a process of its own first."""
    probe = "import torch; a = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True); (a @ a).sum().backward()"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode:
        pytest.skip("this processor has no product in bfloat16")
    model, fits = make(lr=0.01), trainer(precision="bf16-mixed", epochs=3)
    fits.fit(model, datamodule=Digits())
    (metrics, *_) = fits.test(model, datamodule=Digits(), verbose=False)
    assert metrics["test/cls/Acc"] > 0.5
    assert all(p.dtype is torch.float32 for p in model.parameters())
