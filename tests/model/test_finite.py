"""NaN and infinity: noticed at the step where they begin, kept out of weights and checkpoints, and never `known`."""

import csv
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import Backbone, BRAINet, swap_head
from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.callbacks import Evaluation, PredictionFile
from brainet_pl.callbacks.checkpoints import LastCheckpoint
from brainet_pl.export.graph import export_onnx, export_program
from brainet_pl.metrics.passes import pass_sums
from brainet_pl.metrics.shift import class_sums
from brainet_pl.network import MLP, Linear
from brainet_pl.prediction.finite import first_bad_weight, nan_rows
from brainet_pl.sklearn import BRAINetClassifier
from brainet_pl.tasks import Classification, Regression

NAN = math.nan


def blobs(n=640, d=4, seed=0):
    """Three classes that are easily told apart."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return 3 * torch.eye(3, d)[y] + torch.randn(n, d, generator=generator), y


def loader(x, y, **settings):
    return DataLoader(TensorDataset(x, y), **{"batch_size": 32, **settings})


class NaNBatches(pl.Callback):
    """Puts NaN into the sample 5 of some batches of an epoch."""

    def __init__(self, batches=(3,), epoch=1, value=NAN):
        self.batches, self.epoch, self.value = batches, epoch, value

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == self.epoch and batch_idx in self.batches:
            batch[0][5, 1] = self.value


class Before(pl.Callback):
    """Keeps the state before the batch 3 of the epoch 1."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 3):
            self.state = {k: v.clone() for k, v in module.predictor.state_dict().items() if v.is_floating_point()}


def same(state, module):
    now = module.predictor.state_dict()
    return all(torch.equal(v, now[k]) for k, v in state.items())


def poison(model, name="head.layers.0.weight"):
    with torch.no_grad():
        dict(model.predictor.named_parameters())[name][0, 0] = NAN
    return model


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, quiet_trainer):
    """A model with a verdict, and its checkpoint."""
    folder = tmp_path_factory.mktemp("finite")
    pl.seed_everything(0, verbose=False)
    model = BRAINet(3, head=MLP(num_params=500), lr=0.01, scores=["KNN"])
    saved = ModelCheckpoint(folder)
    quiet_trainer(folder, saved, epochs=2).fit(model, loader(*blobs()), loader(*blobs(300, seed=1)))
    return saved.best_model_path


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_fit_stops_at_the_step_and_keeps_the_last_good_state(tmp_path, quiet_trainer, value):
    model, before = BRAINet(3, head=MLP(num_params=500), scores=[]), Before()
    saved, last = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1), LastCheckpoint(str(tmp_path))
    trainer = quiet_trainer(tmp_path, NaNBatches(value=value), before, saved, last, epochs=3)
    with pytest.raises(ValueError, match=r"finite loss, got nan in epoch 1, batch 3: .*inputs.* in 1 of 32 samples.*5"):
        trainer.fit(model, loader(*blobs()))
    assert trainer.global_step == 20 + 3
    assert same(before.state, model)  # statistics of batch norm too
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 24
    for file in files:
        assert first_bad_weight(BRAINet.load_from_checkpoint(file).predictor) is None


def test_batches_are_skipped_where_one_asks_for_it(tmp_path, quiet_trainer):
    clean = loader(*blobs())
    torch.manual_seed(0)
    model = BRAINet(3, head=MLP(num_params=500), on_nan="skip", lr=0.01)
    trainer = quiet_trainer(tmp_path, NaNBatches((3, 7)), epochs=3)
    with pytest.warns(
        UserWarning, match="skipped 2 of 20 batches of epoch 1, .* the first was batch 3.*inputs"
    ) as said:
        trainer.fit(model, clean, loader(*blobs(300, seed=1)))
    assert len([w for w in said if "skipped" in str(w.message)]) == 1
    assert first_bad_weight(model.predictor) is None
    assert trainer.callback_metrics["val/cls/Acc"] > 0.9
    assert math.isfinite(trainer.callback_metrics["train/loss"])


def test_a_skipped_batch_changes_nothing(tmp_path, quiet_trainer):
    class Same(Before):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (1, 3):
                assert same(self.state, module)
                self.looked = True

    look = Same()
    trainer = quiet_trainer(tmp_path, NaNBatches(), look, epochs=2)
    with pytest.warns(UserWarning, match="skipped 1 of 20 batches"):
        trainer.fit(BRAINet(3, head=MLP(num_params=500), scores=[], on_nan="skip"), loader(*blobs()))
    assert look.looked


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_weight_that_is_not_finite_ends_any_fit_and_is_named(tmp_path, quiet_trainer, on_nan):
    class Spoil(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                poison(module)

    trainer = quiet_trainer(tmp_path, Spoil())
    with pytest.raises(ValueError, match=r"epoch 0, batch 2: the weight head\.layers\.0\.weight.*gradient_clip_val"):
        trainer.fit(BRAINet(3, head=MLP(num_params=500), on_nan=on_nan), loader(*blobs()))


def test_features_and_outputs_are_named(tmp_path, quiet_trainer):
    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x - x.min())  # log 0

    x, y = blobs()
    with pytest.raises(ValueError, match=r"batch 0: features .*precision"):
        quiet_trainer(tmp_path).fit(BRAINet(3, backbone=Backbone(Log(), head_layer=""), head=Linear()), loader(x, y))


def test_settings_and_processes():
    with pytest.raises(ValueError, match="on_nan"):
        BRAINet(3, on_nan="ignore")
    model = BRAINet(3, head=Linear(), on_nan="skip")
    assert model.hparams["on_nan"] == "skip"
    with pytest.raises(ValueError, match="one process for on_nan='skip', got 2"):
        model.guard.check_processes(2)


def test_no_checkpoint_of_weights_that_are_not_finite_is_written(tmp_path, quiet_trainer):
    class SpoilLast(pl.Callback):
        """As a gradient that is not finite would, in the last step of an epoch."""

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (1, 19):
                poison(module)

    saved = ModelCheckpoint(tmp_path, save_last=True)
    trainer = quiet_trainer(tmp_path, SpoilLast(), saved, LastCheckpoint(str(tmp_path / "last")), epochs=2)
    with pytest.raises(ValueError, match=r"head\.layers\.0\.weight.*no checkpoint"):
        trainer.fit(BRAINet(3, head=MLP(num_params=500)), loader(*blobs()))
    files = sorted(tmp_path.rglob("*.ckpt"))
    assert files
    for file in files:
        assert first_bad_weight(BRAINet.load_from_checkpoint(file).predictor) is None


def test_a_backbone_that_swallows_nan_does_not_make_an_input_known(tmp_path, quiet_trainer):
    class Swallow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x.nan_to_num())

    model = BRAINet(3, backbone=Backbone(Swallow(), head_layer=""), head=Linear())
    quiet_trainer(tmp_path).fit(model, loader(*blobs()), loader(*blobs(300, seed=1)))
    x = blobs(6)[0]
    x[2, 0] = NAN
    answer = model.eval().predict_step(x, 0)
    assert answer["probabilities"].isfinite().all()
    assert answer["known_p"][2] == 0
    assert not answer["known"][2]
    assert answer["known_p"][[0, 1, 3, 4, 5]].gt(0).all()
    graph = export_program(model, blobs(3)[0])
    exported = dict(zip(graph.outputs, graph.program.module()(x), strict=True))
    assert exported["known_p"][2] == 0
    assert not exported["known"][2]


def test_nan_rows_of_any_inputs():
    x = torch.zeros(3, 2, 2)
    x[1, 0, 1] = NAN
    assert nan_rows(x, 3).tolist() == [False, True, False]
    assert nan_rows({"a": torch.ones(3, dtype=torch.long), "b": x[:, 0, 1]}, 3).tolist() == [False, True, False]
    assert nan_rows(BackboneOutput(x[:, 0]), 3).tolist() == [False, True, False]
    assert nan_rows(torch.ones(3, dtype=torch.long), 3).tolist() == [False] * 3
    assert nan_rows(torch.zeros(0, 2), 0).tolist() == []


def test_a_swapped_model(fitted):
    torch.manual_seed(0)
    x, y = blobs(600)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = swap_head(net, x, 3, head=Linear(), progress=False)
    model.eval().calibrate((x, y), (x, y), calibration="TemperatureScaling", progress=False)
    x = x[:4].clone()
    x[1] = NAN
    answer = model.predict(x)
    assert answer["class"].tolist()[1] == -1
    assert answer["known_p"][1] == 0
    assert not answer["known"][1]
    with torch.no_grad():
        next(model.head.parameters())[0, 0] = NAN
    answer = model.predict(x)
    assert answer["class"].tolist() == [-1] * 4
    assert not answer["known"].any()


def test_a_regression(tmp_path, quiet_trainer):
    x, y = blobs()
    model = BRAINet(task=Regression(), head=Linear())
    quiet_trainer(tmp_path).fit(model, loader(x, y.float()), loader(x, y.float()))
    x = x[:3].clone()
    x[0, 0] = NAN
    answer = model.eval().predict_step(x, 0)
    assert answer["mean"].isnan().tolist() == [True, False, False]
    assert answer["known_p"][0] == 0
    assert not answer["known"][0]


def test_files_and_records_count_them(fitted, tmp_path, quiet_trainer):
    model = BRAINet.load_from_checkpoint(fitted)
    model.class_names = ("a", "b", "c")
    x, y = blobs(300, seed=1)
    x[[7, 40]] = NAN
    with pytest.warns(UserWarning, match="2 of 300 inputs have NaN in their inputs or predictions"):
        quiet_trainer(tmp_path, PredictionFile()).predict(model, loader(x, y))
    rows = list(csv.DictReader(next(tmp_path.rglob("predictions.csv")).open()))
    assert [(row["class"], row["class_name"], row["known"]) for row in rows if row["sample"] in ("7", "40")] == [
        ("-1", "", "False")
    ] * 2
    assert sum(row["class"] == "-1" for row in rows) == 2
    with pytest.warns(UserWarning, match="because of NaN in test"):
        quiet_trainer(tmp_path, Evaluation()).test(model, loader(x, y), verbose=False)
    record = json.loads(next(tmp_path.rglob("record.json")).read_text())
    assert record["sets"][0]["unknown"] >= 2


def test_a_prediction_of_nan_is_no_hit():
    probabilities, target = torch.tensor([[NAN, NAN], [0.9, 0.1]]), torch.tensor([0, 0])
    answers = Classification(2).answers(probabilities, target)
    assert answers["predicted"].tolist() == [-1, 0]
    assert answers["wrong"].tolist() == [1, 0]
    assert class_sums(probabilities, target)["Acc"] == 1
    assert pass_sums(probabilities[None], target).wrong.tolist() == [1]
    for measure in Classification(2).measures():
        if measure.key == "cls/Acc":
            measure.update(probabilities, target)
            assert measure.compute() == 0.5


def test_loading_warns_and_exports_refuse(fitted, tmp_path):
    model = BRAINet.load_from_checkpoint(fitted)
    poison(model)
    for export in (export_program, lambda m: export_onnx(m, tmp_path / "model.onnx")):
        with pytest.raises(ValueError, match=r"head\.layers\.0\.weight.*finite|finite.*head\.layers\.0\.weight"):
            export(model)
    assert not list(tmp_path.iterdir())
    stored = torch.load(fitted, weights_only=True)
    stored["state_dict"]["predictor.head.layers.0.weight"][0, 0] = NAN
    stored["brainet"].pop("digest", None)
    torch.save(stored, tmp_path / "bad.ckpt")
    with pytest.warns(UserWarning, match=r"the weight head\.layers\.0\.weight"):
        BRAINet.load_from_checkpoint(tmp_path / "bad.ckpt")


def test_estimators_take_nan_as_missing_and_refuse_infinity():
    x, y = blobs(120)
    x = x.numpy()
    spoiled = x.copy()
    spoiled[3, 0] = NAN
    estimator = BRAINetClassifier(max_epochs=1, members=1)
    assert np.isfinite(estimator.fit(spoiled, y.numpy()).predict_proba(spoiled)).all()
    spoiled[3, 0] = np.inf
    with pytest.raises(ValueError, match="infinity"):
        estimator.predict(spoiled)
    with pytest.raises(ValueError, match="infinity"):
        estimator.fit(spoiled, y.numpy())


DDP = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from brainet_pl import BRAINet
from brainet_pl._utils.framework import pl

if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = torch.randn(640, 4), torch.arange(640) % 3
    x[300] = float("nan")
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    ddp = dict(accelerator="cpu", devices=2, strategy="ddp_spawn")
    trainer = pl.Trainer(max_epochs=2, default_root_dir=sys.argv[1], **ddp, **quiet)
    trainer.fit(BRAINet(3, head="MLP", on_nan=sys.argv[2]), DataLoader(TensorDataset(x, y), batch_size=16))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("on_nan", "error"), [("stop", "expected a finite loss"), ("skip", "expected one process")])
def test_all_processes_stop(tmp_path, on_nan, error):
    script = tmp_path / "script.py"
    script.write_text(DDP)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), on_nan], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert error in done.stderr
