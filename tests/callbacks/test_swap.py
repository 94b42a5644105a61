"""Modules that know nothing of brainet_pl, with a callback more in their Trainer."""

import copy
import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foreign_modules import GAN, LitClassifier, TwoTasks, foreign, images, loaders, run, swap
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import restore_layers, swap_layer
from brainet_pl._utils.framework import CSVLogger, pl
from brainet_pl.backbones.batches import Columns
from brainet_pl.callbacks import Evaluation, LastCheckpoint, StructureLearning
from brainet_pl.network import MLP, Ensemble, Tree
from brainet_pl.network.base import train_head
from brainet_pl.swap.every_branch import every_branch
from brainet_pl.swap.layer import SwappedLayer, stored_layers, swapped_layers

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "foreign_modules.py"


def state_equal(one, other):
    a, b = one.state_dict(), other.state_dict()
    assert list(a) == list(b)
    for key in a:
        assert torch.equal(a[key], b[key]), key


class Killed(Exception):
    pass


class Kill(pl.Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == self.epoch and batch_idx == 2:
            raise Killed


def test_fit_stop_resume_test_and_report(tmp_path, quiet_trainer):
    name = "lightning"
    make, (train, held), callback, given = foreign(name)
    pl.seed_everything(3, verbose=False)
    whole = make()
    begin = copy.deepcopy(whole.state_dict())
    logger = CSVLogger(str(tmp_path), name="run")
    trainer = quiet_trainer(tmp_path, callback, Evaluation(figures=False, **given), epochs=3, logger=logger)
    trainer.fit(whole, train, held)
    results = trainer.test(whole, held, verbose=False)[0]
    assert results["ood/noise/entropy/AUROC"] >= 0
    assert results["test/cls/Acc"] > 0.3
    page = (Path(logger.log_dir) / "report.html").read_text()
    record = json.loads((Path(logger.log_dir) / "record.json").read_text())
    assert "noise" in page
    assert record["model"]["head"] == "Tree"

    pl.seed_everything(3, verbose=False)
    killed = make()
    killed.load_state_dict(begin)
    keep = LastCheckpoint(str(tmp_path / "kept"))
    trainer, data = quiet_trainer(tmp_path, copy.deepcopy(callback), keep, Kill(2), epochs=3), foreign(name)[1]
    with pytest.raises(Killed):
        trainer.fit(killed, *data)
    pl.seed_everything(11, verbose=False)  # another process knows nothing of the first
    resumed = make()
    fresh = foreign(name)
    trainer = quiet_trainer(tmp_path, fresh[2], LastCheckpoint(str(tmp_path / "more")), epochs=3)
    trainer.fit(resumed, *fresh[1], ckpt_path=str(tmp_path / "kept" / "last.ckpt"))
    state_equal(whole, resumed)

    tested = make()
    trainer = quiet_trainer(tmp_path, foreign(name)[2], Evaluation(figures=False, report=False, **given))
    again = trainer.test(tested, held, ckpt_path=str(tmp_path / "more" / "last.ckpt"), verbose=False)[0]
    state_equal(whole, tested)
    assert again["test/cls/NLL"] == pytest.approx(results["test/cls/NLL"], rel=1e-6)
    elsewhere = restore_layers(make(), torch.load(tmp_path / "more" / "last.ckpt", weights_only=True))
    state_equal(whole, elsewhere)


# -- processes that are killed -----------------------------------------------------------------------------------------


def command(folder, *words, **environment):
    """Run `foreign_modules.py`; its exit code."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *words], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["lightning"], {"BRAINET_LIGHTNING": "pytorch_lightning"}),
        (["lightning"], {"BRAINET_LIGHTNING": "lightning"}),
        (["torchvision"], {}),
        (["tasks"], {}),
        (["texts"], {}),
        (["gan"], {}),
        (["torchvision", "ema"], {}),
        (["torchvision", "swa"], {}),
        (["lightning", "rate"], {}),
        (["lightning", "compiled"], {}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "".join(value.values()),
)
def test_after_a_kill_the_same_command_ends_with_the_weights_of_a_fit_that_nobody_killed(words, environment, tmp_path):
    if words[0] == "texts":
        pytest.importorskip("transformers")
    assert command(tmp_path / "whole", *words, **environment) == 0
    assert command(tmp_path / "killed", *words, **environment, KILL="yes") == -signal.SIGKILL
    assert not (tmp_path / "killed" / "end.pt").exists()
    assert command(tmp_path / "killed", *words, **environment, SEED="11") == 0  # by itself it would learn another tree
    whole, again = (torch.load(tmp_path / name / "end.pt", weights_only=True) for name in ("whole", "killed"))
    assert list(whole) == list(again)
    for key in whole:
        assert torch.equal(whole[key], again[key]), key
    results, others = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "killed"))
    assert others == pytest.approx(results, rel=1e-6, nan_ok=True)
    assert results["test/cls/Acc"] > 0.3 or "ema" in words  # means of so few steps are near the weights at the start
    assert "ood/noise/knn/AUROC" in results
    for name in ("whole", "killed"):
        assert "noise" in (tmp_path / name / "run" / "version_0" / "report.html").read_text()


def test_a_user_adds_ten_lines_at_the_most():
    assert len(inspect.getsource(run).splitlines()) <= 10


# -- what the module's own loss trains --------------------------------------------------------------------------------


def draws(scale=4.0):
    g = torch.Generator().manual_seed(0)
    return (scale * torch.randn(3, 50, 7, generator=g)).requires_grad_(), torch.randint(7, (50,), generator=g)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_a_plain_cross_entropy_trains_every_draw(scale, reduction):
    outputs, y = draws(scale)
    seen = torch.zeros(2)
    F.cross_entropy(every_branch(outputs, seen), y, reduction=reduction).mul(8).backward()  # times 8: a scaler's factor
    found, outputs.grad = outputs.grad, None
    sum(F.cross_entropy(one, y, reduction=reduction) / 3 for one in outputs).mul(8).backward()
    rows = outputs.grad.abs().amax(dim=(0, 2)) > 1e-6  # where one draw is sure, its gradient says nothing of the others
    told = found.abs().amax(dim=(0, 2)) > 0
    assert seen.tolist() == [1, 0]
    assert told[rows].float().mean() > 0.95
    assert torch.allclose(found[:, told], outputs.grad[:, told], rtol=1e-3, atol=1e-7)


def test_samples_that_the_loss_ignores_train_nothing():
    outputs, y = draws(1.0)
    y[::5] = -100
    F.cross_entropy(every_branch(outputs), y).backward()
    assert not outputs.grad[:, ::5].any()
    assert outputs.grad[:, 1::5].abs().amin(dim=2).bool().all()


def focal(logits, y):
    p = logits.softmax(1).gather(1, y[:, None])
    return ((1 - p) ** 2 * -p.log()).mean()


OTHERS = {
    "smoothed": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "weighted": lambda z, y: F.cross_entropy(z, y, weight=torch.arange(1.0, 8.0)),
    "focal": focal,
    "mse": lambda z, y: F.mse_loss(z, F.one_hot(y, 7).float()),
    "and more": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_loss_trains_the_draw_that_it_saw(name):
    outputs, y = draws(1.0)
    seen = torch.zeros(2)
    chosen = every_branch(outputs, seen)
    chosen.retain_grad()
    OTHERS[name](chosen, y).backward()
    assert seen.tolist() == [0, 1]
    assert torch.equal(outputs.grad.sum(dim=0), chosen.grad)
    assert (outputs.grad.abs().amax(dim=2) > 0).sum(dim=0).eq(1).all()


def test_the_layer_trains_like_the_models_own_loss():
    """The slow twin: the head's own outputs of all draws, and the mean of their cross-entropies."""
    x, y = images()
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 12), nn.ReLU(), nn.Linear(12, 4))
    torch.manual_seed(0)
    layer = swap_layer(model, (x, y), "3", head=Tree(num_params=2000), progress=False, threshold=0.1)
    torch.nn.init.normal_(layer.head.output.weight)
    torch.manual_seed(1)
    F.cross_entropy(model(x), y).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(1)
    outputs = train_head(layer.head, model[:3](x), None)
    layer.predictor.task.loss(outputs, y).backward()
    for name, p in model.named_parameters():
        assert torch.allclose(found[name], p.grad, rtol=1e-3, atol=1e-6), name


def test_a_loss_that_is_no_plain_cross_entropy_is_said_once(tmp_path, quiet_trainer):
    class Smoothed(LitClassifier):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.1)

    trainer = quiet_trainer(tmp_path, swap(), epochs=2)
    with pytest.warns(
        UserWarning, match="'l2' is no plain cross-entropy in .* steps: in these a sample trains the one"
    ) as all_:
        trainer.fit(Smoothed(), *loaders())
    assert len([w for w in all_ if "no plain" in str(w.message)]) == 1


# -- what the module gets ---------------------------------------------------------------------------------------------


def test_evaluation_gives_the_logarithm_of_the_averaged_probabilities(tmp_path, quiet_trainer):
    model = LitClassifier()
    quiet_trainer(tmp_path, swap(calibration=None), epochs=2).fit(model, *loaders())
    layer, (x, _) = model.eval().l2, images()
    features = torch.relu(model.l1(x.flatten(1)))
    every, weights = layer.head.enumerate(features)
    expected = torch.einsum("tbc,t->bc", every.softmax(2), weights.to(every.dtype))
    assert isinstance(layer, SwappedLayer)
    assert torch.allclose(model(x).exp(), expected, atol=1e-6)
    assert torch.allclose(model(x).exp().sum(1), torch.ones(240), atol=1e-5)


@pytest.mark.parametrize(
    "head", [MLP(num_params=2000), Ensemble(num_params=4000), Tree(num_params=4000, skip="base_logits_or_linear")]
)
def test_any_head_takes_the_place(head, tmp_path, quiet_trainer):
    model = LitClassifier()
    quiet_trainer(tmp_path, epochs=2).fit(model, *loaders())  # so that its own layer says something
    own = model.l2
    quiet_trainer(tmp_path, swap(head=head), epochs=1).fit(model, *loaders())
    assert (model.l2.base_layer is own) == isinstance(head, Tree)
    again = restore_layers(LitClassifier(), model.state_dict())
    x, _ = images()
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_calibration_and_verdict_learn_from_the_validations_of_the_fit(tmp_path, quiet_trainer):
    settings = {"calibration": "TemperatureScaling", "scores": ["KNN"], "conformal": "Conformal"}
    noise = Evaluation(figures=False, unknown={"noise": 9 * torch.randn(60, 3, 8, 8)})
    model, trainer = LitClassifier(), quiet_trainer(tmp_path, swap(**settings), noise, epochs=3)
    trainer.fit(model, *loaders())
    predictor = model.l2.predictor
    assert predictor.calibrates
    assert float(trainer.callback_metrics["val/cal/temperature"]) != 1
    results = trainer.test(model, loaders()[1], verbose=False)[0]
    assert results["test_loss"] == pytest.approx(
        results["test/scaled/cls/NLL"], rel=1e-4
    )  # what the module's code sees
    assert results["test_loss"] != pytest.approx(results["test/cls/NLL"], rel=1e-4)
    assert results["ood/noise/knn/AUROC"] > 0.8
    assert results["verdict/noise/Unknown"] > results["verdict/test/Unknown"]
    again = restore_layers(LitClassifier(), model.state_dict())
    x, _ = images()
    assert torch.equal(again.eval()(x), model.eval()(x))


# -- what composes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_callbacks_that_average_weights(average, tmp_path, quiet_trainer):
    make = getattr(pl.callbacks, average)
    made = make() if average == "EMAWeightAveraging" else make(swa_lrs=1e-2, swa_epoch_start=1)
    model, keep = LitClassifier(), LastCheckpoint(str(tmp_path))
    quiet_trainer(tmp_path, swap(calibration="TemperatureScaling"), made, keep, epochs=3).fit(model, *loaders())
    tested = LitClassifier()
    trainer = quiet_trainer(tmp_path, swap(), Evaluation(figures=False, report=False))
    assert (
        trainer.test(tested, loaders()[1], ckpt_path=str(tmp_path / "last.ckpt"), verbose=False)[0]["test/cls/Acc"]
        > 0.3
    )
    before = quiet_trainer(tmp_path, make() if average == "EMAWeightAveraging" else make(swa_lrs=1e-2), swap())
    with pytest.raises(ValueError, match=f"SwapHead before {average}.*put SwapHead first"):
        before.fit(LitClassifier(), *loaders())


def test_the_rate_finder_leaves_the_head_as_it_was(tmp_path, quiet_trainer):
    model = LitClassifier()
    trainer = quiet_trainer(tmp_path, swap())
    pl.tuner.Tuner(trainer).lr_find(model, *loaders(), num_training=20)
    layer = model.l2
    assert isinstance(layer, SwappedLayer)
    trainer.fit(model, *loaders())
    assert model.l2 is layer


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["module", "part"])
def test_compiled(compiled, tmp_path, quiet_trainer):
    torch._dynamo.reset()  # as in a process of its own: torch stops compiling after a few variants of a function

    class Inside(LitClassifier):
        def __init__(self):
            super().__init__()
            self.body = torch.compile(
                nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 4)), backend="eager"
            )

        def forward(self, x):
            return self.body(x)

    model = LitClassifier() if compiled == "module" else Inside()
    given = torch.compile(model, backend="aot_eager") if compiled == "module" else model
    callback = swap() if compiled == "module" else swap("body.3")
    trainer = quiet_trainer(
        tmp_path, callback, Evaluation(figures=False, report=False), LastCheckpoint(str(tmp_path)), epochs=2
    )
    trainer.fit(given, *loaders())
    results = trainer.test(given, loaders()[1], verbose=False)[0]
    assert results["test/cls/Acc"] > 0.4
    assert not [name for name in model.state_dict() if name.startswith("_orig_mod")]
    again = restore_layers(type(model)(), torch.load(tmp_path / "last.ckpt", weights_only=True))
    x, _ = images()
    assert torch.allclose(again.eval()(x), model.eval()(x), atol=1e-5)


def test_a_frozen_network_is_extracted_once_and_stays(tmp_path, quiet_trainer):
    class Frozen(LitClassifier):
        runs = 0

        def __init__(self):
            super().__init__()
            self.l1.requires_grad_(False)
            self.l1.register_forward_hook(self.count)

        def count(self, *_):
            Frozen.runs += 1

    model = Frozen()
    before = model.l1.weight.clone()
    trainer = quiet_trainer(tmp_path, swap(scores=["KNN"]), epochs=3, num_sanity_val_steps=0)
    trainer.fit(model, *loaders())
    assert torch.equal(model.l1.weight, before)
    # The layer is found, features are extracted, 3 epochs of 5 and 5 batches, a validation sample.
    assert Frozen.runs == 1 + 5 + 3 * 10 + 5


def test_two_heads_of_one_module(tmp_path, quiet_trainer):
    columns = {name: Columns(inputs="pixels", target=name) for name in ("color", "shape")}
    both = [swap(f"heads.{name}", columns=columns[name]) for name in columns]
    model = TwoTasks()
    quiet_trainer(tmp_path, *both, LastCheckpoint(str(tmp_path)), epochs=2).fit(model, *loaders(named=True))
    assert list(swapped_layers(model)) == ["heads.color", "heads.shape"]
    color = Evaluation(figures=False, report=False, columns=columns["color"], logits=lambda m, x: m(x)["color"])
    tested = TwoTasks()
    trainer = quiet_trainer(tmp_path, *(swap(f"heads.{name}", columns=columns[name]) for name in columns), color)
    results = trainer.test(tested, loaders(named=True)[1], ckpt_path=str(tmp_path / "last.ckpt"), verbose=False)[0]
    state_equal(model, tested)
    assert results["test/cls/Acc"] > 0.4


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"GAN to take the inputs of a batch, got RuntimeError .* forward=lambda"),
        ({"layer": "discriminator.3"}, "one logit for each class at 'discriminator.3', got 1 output: .* discriminator"),
        ({"layer": "generator.0", "forward": lambda m, x: m.discriminator(x)}, "reach the layer 'generator.0' of GAN"),
    ],
)
def test_a_gan_is_refused_with_a_reason(settings, message, tmp_path, quiet_trainer):
    with pytest.raises(ValueError, match=message):
        quiet_trainer(tmp_path, swap(**settings)).fit(GAN(), loaders()[0])


class Sequences(LitClassifier):
    def forward(self, x):
        return self.l2(torch.relu(self.l1(x.flatten(1))).unsqueeze(1)).squeeze(1)


class Early(LitClassifier):
    def __init__(self):
        super().__init__()
        self.kept = list(self.parameters())

    def configure_optimizers(self):
        return torch.optim.Adam(self.kept)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (LitClassifier, {"layer": "fc"}, r"path of a layer of the model \(dense: l1, l2\), got 'fc'"),
        (LitClassifier, {"num_classes": 7}, "num_classes=7 to be the outputs of 'l2', got 4"),
        (LitClassifier, {"head": "Bayes"}, "a cross-entropy alone trains, got Bayes"),
        (Sequences, {"layer": "l2"}, r"one row of features for each sample, .* got inputs of shape \(\d+, 1, 16\)"),
        (Early, {}, "an optimizer that trains the new head at 'l2', got none"),
    ],
)
def test_what_is_refused(make, settings, message, tmp_path, quiet_trainer):
    with pytest.raises(ValueError, match=message):
        quiet_trainer(tmp_path, swap(**settings)).fit(make(), *loaders())


def test_a_module_that_was_never_fitted_is_not_tested(tmp_path, quiet_trainer):
    with pytest.raises(ValueError, match="whose head was swapped by a fit, got one that was not: fit it first"):
        quiet_trainer(tmp_path, swap()).test(LitClassifier(), loaders()[1], verbose=False)


def test_the_structure_callback_tells_a_module_that_it_does_not_know_what_to_do(tmp_path, quiet_trainer):
    with pytest.raises(TypeError, match=r"expected a BRAINet, got LitClassifier.*SwapHead\('path"):
        quiet_trainer(tmp_path, StructureLearning()).fit(LitClassifier(), *loaders())


def test_a_hostile_description_is_refused():
    x, y = images()
    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 12), nn.ReLU(), nn.Linear(12, 4))  # noqa: E731
    model = make()
    swap_layer(model, (x, y), "3", head=Tree(num_params=2000), progress=False, threshold=0.1)
    state = model.state_dict()
    ((name, content),) = stored_layers(state).items()

    def changed(**more):
        text = json.dumps(content | more).encode()
        return state | {f"{name}._extra_state": torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    huge = {"class_path": "Tree", "init_args": {"num_params": 10**9}}
    for more in (
        {"head": huge},
        {"in_features": 10**9},
        {"head": "os.system"},
        {"ggt": {}},
        {"format": 9},
        {"passes": "x"},
    ):
        with pytest.raises(ValueError, match="expected"):
            restore_layers(make(), changed(**more))
    restore_layers(make(), changed())


# -- Evaluation on any module -----------------------------------------------------------------------------------------


class OnlyPredict(LitClassifier):
    forward = pl.LightningModule.forward

    def test_step(self, batch, batch_idx):
        pass

    def predict_step(self, batch, batch_idx):
        return {"logits": self.l2(torch.relu(self.l1(batch[0].flatten(1)))), "other": batch[0]}


class Probabilities(LitClassifier):
    def forward(self, x):
        return super().forward(x).softmax(1)

    def test_step(self, batch, batch_idx):
        pass


def test_logits_come_from_forward_prediction_or_a_function(tmp_path, quiet_trainer):
    torch.manual_seed(0)
    noise = {"noise": DataLoader(TensorDataset(torch.randn(30, 3, 8, 8)), batch_size=16)}
    plain = LitClassifier()
    modules = {"forward": plain, "predict": OnlyPredict(), "probabilities": Probabilities(), "function": GAN()}
    found = {}
    for name, module in modules.items():
        if name == "function":
            module.test_step = lambda batch, batch_idx: None
            logits = lambda _, x: plain(x)  # noqa: E731
        else:
            module.load_state_dict(plain.state_dict())
            logits = None
        trainer = quiet_trainer(tmp_path / name, Evaluation(figures=name == "forward", unknown=noise, logits=logits))
        results = trainer.test(module, loaders()[1], verbose=False)[0]
        found[name] = {key: value for key, value in results.items() if key.startswith(("test/", "ood/"))}
    x, y = images()
    assert found["forward"]["test/cls/NLL"] == pytest.approx(F.cross_entropy(plain(x[120:]), y[120:]).item(), rel=1e-5)
    keys = [key for key in found["forward"] if "energy" not in key and "max_logit" not in key]
    for name in ("predict", "function"):
        assert found[name] == pytest.approx(found["forward"], rel=1e-5, abs=1e-6)
    assert {k: found["probabilities"][k] for k in keys} == pytest.approx(
        {k: found["forward"][k] for k in keys}, abs=1e-4
    )


def test_what_gives_no_logits_is_an_error_with_the_recipe(tmp_path, quiet_trainer):
    module = GAN()
    module.test_step = lambda batch, batch_idx: None
    module.forward = lambda x: x.mean()
    with pytest.raises(ValueError, match=r"expected logits \(B, C\).*Evaluation\(logits=lambda module, inputs"):
        quiet_trainer(tmp_path, Evaluation()).test(module, loaders()[1], verbose=False)


# -- without a Trainer ------------------------------------------------------------------------------------------------


def test_a_loop_of_ones_own(tmp_path):
    x, y = images()
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 12), nn.ReLU(), nn.Linear(12, 4))  # noqa: E731
    model = make()
    swap_layer(model, (x[:160], y[:160]), head=Tree(num_params=4000), progress=False, threshold=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model.train()(x[:160]), y[:160]).backward()
        optimizer.step()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = restore_layers(make(), torch.load(tmp_path / "model.pt", weights_only=True)).eval()
    assert torch.equal(again(x), model.eval()(x))
    assert (again(x[160:]).argmax(1) == y[160:]).float().mean() > 0.5
