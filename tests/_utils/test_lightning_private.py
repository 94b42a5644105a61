"""Each private attribute of Lightning that the package uses, against both installed namespaces."""

import csv
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.optim import swa_utils
from torch.utils.data import DataLoader

from brainet_pl._utils import lightning_private as private
from brainet_pl._utils.framework import NEW, OLD

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[OLD, NEW])
def namespace(request):
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture
def make(namespace, tmp_path):
    """A model, a loader for it and a function that makes a Trainer."""
    pl, demos = import_module(namespace), import_module(f"{namespace}.demos.boring_classes")
    settings = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0, "default_root_dir": str(tmp_path)}
    settings |= {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}

    def trainer(*callbacks, **more):
        return pl.Trainer(**settings | {"callbacks": list(callbacks), "enable_model_summary": False} | more)

    return demos.BoringModel(), DataLoader(demos.RandomDataset(32, 8)), trainer


def during(namespace, hook, work):
    """A callback that does something in a hook."""
    base = import_module(f"{namespace}.callbacks").Callback
    return type("During", (base,), {hook: lambda self, trainer, *_: work(trainer)})()


def test_loops(namespace, make, tmp_path):
    model, loader, trainer = make
    found = []

    def look(made):
        found.extend([private.train_loaders(made), next(private.restart_training_data(made))])
        private.restart_training_data(made)  # so that the batch above is trained on too

    logger = import_module(f"{namespace}.loggers").CSVLogger(tmp_path)
    made = trainer(during(namespace, "on_train_start", look), logger=logger)
    assert private.data_given(made.fit_loop) is None
    assert private.train_loaders(made) is None
    made.fit(model, loader)
    (loaders, (batch, index, _)) = found
    assert loaders == [loader]
    assert (batch.shape, index) == ((1, 32), 0)
    assert private.data_given(made.fit_loop) is loader
    assert private.logged_step(made) == 2
    private.set_logged_step(made, 7)
    model.test_step = lambda batch, batch_idx: model.log("seen", 1.0)
    made.test(model, loader, verbose=False)
    assert private.data_given(made.test_loop) is loader
    source = private.loader_source(made.test_loop)
    assert (source.instance, source.name) == (loader, "test_dataloader")
    private.set_loader_source(made.test_loop, None)
    assert private.loader_source(made.test_loop) is None
    (row,) = csv.DictReader((Path(logger.log_dir) / "metrics.csv").open())
    assert (row["seen"], row["step"]) == ("1.0", "7")


def test_trainer_and_model(namespace, make, tmp_path):
    model, loader, trainer = make
    made = trainer()
    private.set_root_folder(made, str(tmp_path / "other"))
    assert made.default_root_dir == str(tmp_path / "other")
    assert private.trainer_of(model) is None
    made.fit(model, loader)
    assert private.trainer_of(model) is made
    private.set_hparams(model, {"a": [1]})
    assert dict(model.hparams) == dict(model.hparams_initial) == {"a": [1]}
    model.hparams["a"].append(2)
    assert model.hparams_initial["a"] == [1]
    assert private.compiler_context(model) is None
    import_module(f"{namespace}.utilities.compile").from_compiled(torch.compile(model, backend="eager"))
    assert callable(private.compiler_context(model)["dynamo_ctx"])


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "WeightAveraging"])
def test_averages(name, namespace, make):
    model, loader, trainer = make
    callbacks = import_module(f"{namespace}.callbacks")
    average = callbacks.StochasticWeightAveraging(0.1) if name.startswith("St") else callbacks.WeightAveraging()
    found = []
    trainer(average, during(namespace, "on_train_start", lambda t: found.append(private.average_model(average)))).fit(
        model, loader
    )
    assert isinstance(found[0], type(model))
    assert private.average_model(callbacks.Callback()) is None


@pytest.mark.parametrize("several", [False, True])
def test_averages_take_whole_numbers_as_they_are(several, namespace, make):
    """torch's exponential mean makes 62 of 63."""
    model, loader, trainer = make
    model.register_buffer("whole", torch.full((3,), 63, dtype=torch.uint8))
    decay = swa_utils.get_ema_multi_avg_fn(0.9) if several else swa_utils.get_ema_avg_fn(0.9)
    settings = {"multi_avg_fn" if several else "avg_fn": decay}
    average = import_module(f"{namespace}.callbacks").WeightAveraging(**settings)
    keep = during(namespace, "on_fit_start", lambda t: [private.keep_integers(t) for _ in range(2)])
    trainer(average, keep).fit(model, loader)
    assert private.average_model(average).whole.tolist() == [63] * 3


def test_a_search_for_the_learning_rate_is_known(namespace, make):
    model, loader, trainer = make
    seen = []
    model.on_train_batch_start = lambda *_: seen.append(private.finds_learning_rate(model.trainer))
    model.lr = 0.1
    fits = trainer(max_epochs=3)
    tuner = import_module(f"{namespace}.tuner").Tuner(fits)
    tuner.lr_find(model, loader, num_training=3, update_attr=False)
    assert seen
    assert all(seen)
    seen.clear()
    fits.fit(model, loader)
    assert seen
    assert not any(seen)


def test_a_checkpoint_is_saved_now_and_once_a_step(namespace, make, tmp_path):
    model, loader, trainer = make
    keep = import_module(f"{namespace}.callbacks").ModelCheckpoint(tmp_path / "kept", every_n_train_steps=100)
    counts = []

    def save(made):
        private.save_now(keep, made)
        counts.append([path.name for path in (tmp_path / "kept").iterdir()])
        (tmp_path / "kept" / counts[-1][0]).unlink()
        private.save_now(keep, made)
        counts.append(list((tmp_path / "kept").iterdir()))

    again = during(namespace, "on_train_batch_end", lambda t: save(t) if t.global_step == 1 else None)
    trainer(again, keep, enable_checkpointing=True).fit(model, loader)
    assert counts == [["epoch=0-step=1.ckpt"], []]


@pytest.mark.parametrize("name", ["CSVLogger", "TensorBoardLogger"])
def test_local_loggers(name, namespace, tmp_path):
    def make():
        return getattr(import_module(f"{namespace}.loggers"), name)(tmp_path, name="a")

    logger = make()
    assert private.version_of(logger) is private.experiment_of(logger) is None
    (tmp_path / "a" / "version_2").mkdir(parents=True)
    assert private.next_version(logger) == 3
    private.set_version(logger, 5)
    assert private.version_of(logger) == logger.version == 5
    assert logger.experiment is private.experiment_of(logger)
    private.set_experiment(logger, writer := object())
    assert logger.experiment is writer
    moved = make()
    private.set_folder(moved, str(tmp_path / "other"), "b", 4)
    assert Path(moved.log_dir) == tmp_path / "other" / "b" / "version_4"


def test_wandb(namespace, tmp_path):
    logger = import_module(f"{namespace}.loggers").WandbLogger(offline=True, project="p", save_dir=tmp_path)
    assert private.experiment_of(logger) is None
    assert private.wandb_arguments(logger)["project"] == "p"
    private.set_wandb_run(logger, "abc")
    private.set_wandb_folder(logger, "elsewhere")
    assert (logger.version, logger.save_dir) == ("abc", "elsewhere")
    assert {name: private.wandb_arguments(logger)[name] for name in ("id", "dir")} == {"id": "abc", "dir": "elsewhere"}
    assert not private.logs_models(logger)
    assert private.logs_models(type(logger)(offline=False, log_model=True))


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("cli:LightningCLI", ["_prepare_subcommand_parser", "_parse_ckpt_path"]),
        ("loggers.csv_logs:ExperimentWriter", ["_check_log_dir_exists", "_rewrite_with_new_header"]),
        ("utilities.model_helpers:", ["_check_mixed_imports"]),
        ("utilities.compile:", ["_check_mixed_imports"]),
    ],
)
def test_private_methods_that_the_package_replaces_are_there(place, names, namespace):
    module, _, cls = place.partition(":")
    owner = import_module(f"{namespace}.{module}")
    assert set(names) <= set(dir(getattr(owner, cls) if cls else owner))


def test_no_other_file_uses_them():
    names = r"\b(_data_source|_combined_loader|_data_fetcher|_batches_that_stepped|_default_root_dir|_wandb_init|"
    names += r"_average_model|_log_model|_get_next_version|_experiment|_save_topk_checkpoint|_monitor_candidates)\b"
    files = [path for room in ("brainet_pl", "callbacks", "datamodules") for path in ROOT.glob(f"{room}/**/*.py")]
    found = {path.name for path in files if re.search(names, path.read_text())}
    assert found == {"lightning_private.py"}
