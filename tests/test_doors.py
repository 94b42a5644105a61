"""Every promise behind every door: a row is a promise, a column is a way to a fitted model.

A new promise is one test of `promises`, a new door one function of `DOORS`. Each door is fitted once, as a user would
with its defaults, to the same task of overlapping classes, which a model that is not calibrated is too
sure of.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import (
    BRAINet,
    BRAINetClassifier,
    BRAINetRegressor,
    ExportedModel,
    TextEncoder,
    calibrate_layer,
    explain_layer,
    export_folder,
    find_label_issues,
    load_pixels,
    load_swapped,
    predict_layer,
    rank_for_labelling,
    restore_layers,
    risk_control,
    swap_head,
    swap_layer,
    swap_pixels,
)
from brainet_pl._utils.framework import pl
from brainet_pl.calibration import Conformal, DensityScaling
from brainet_pl.callbacks import StructureLearning, SwapHead
from brainet_pl.metrics.curves import calibration_error, calibration_sums
from brainet_pl.metrics.multilabel import LabelCalibrationError, share_found
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.tasks import MultiLabel

COLUMNS, CLASSES = 6, 4
FRESH = 2000  # known samples that no fit saw
LEVELS = (0.05, 0.1, 0.25, 0.5)
RISK = 0.15  # share of wrong answers that is promised


def rows(count, seed):
    """Samples of four classes that overlap."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % CLASSES
    x = torch.randn(count, COLUMNS, generator=draw) + 2 * F.one_hot(y, COLUMNS)
    x[:, 4] = x[:, 0] + 0.5 * x[:, 4]
    return x, y


TRAIN, HELD, TEST = rows(400, 1), rows(400, 2), rows(FRESH, 3)


def network():
    """A trained network, which would move buffers and draw, were it not in evaluation mode."""
    torch.manual_seed(0)
    body = [nn.Linear(COLUMNS, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)]
    made = nn.Sequential(*body, nn.Linear(16, CLASSES))
    optimizer = torch.optim.Adam(made.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(made(TRAIN[0]), TRAIN[1]).backward()
        optimizer.step()
    return made


def loaders():
    return [DataLoader(TensorDataset(*part), batch_size=50) for part in (TRAIN, HELD)]


# -- doors ------------------------------------------------------------------------------------------------------------


class Door(NamedTuple):
    """A fitted model and how a user gets answers from it.

    Attributes:
        predict: inputs (B, d) → answers by name, NumPy arrays or tensors.
        module: what has modes and buffers; None where there is no torch.
        forward: inputs → logarithm of probabilities; None where a door has none.
        again: a folder → `predict` of the model that was written there and read; None where a door writes no file.
        export: a folder → `predict` of the exported model; None where that is the door.
        predictor: what answers inside; None where there is no torch.
        explain: inputs → why they look known or unknown; None where there is no torch.
        told: what was logged of the comparison with other heads; None where a door makes none.
        takes_nan: whether NaN is a missing number for it, which it fills.
    """

    predict: Callable[[Tensor], Mapping[str, Any]]
    module: nn.Module | None = None
    forward: Callable[[Tensor], Tensor] | None = None
    again: Callable[[Path], Callable[[Tensor], Mapping[str, Any]]] | None = None
    export: Callable[[Path], Callable[[Tensor], Mapping[str, Any]]] | None = None
    predictor: Predictor | None = None
    told: str | None = None
    explain: Callable[[Tensor], Any] | None = None
    takes_nan: bool = False


def trainer_of(folder, *callbacks, epochs):
    pl.seed_everything(0, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(
        max_epochs=epochs, callbacks=list(callbacks), default_root_dir=folder, enable_checkpointing=False, **quiet
    )


def runs(exported, prepare=lambda x: x):
    """`predict` of the folder of an exported model."""
    return lambda x: {name: torch.as_tensor(v) for name, v in exported.predict(prepare(x).numpy()).items()}


def brainet_in_a_trainer(folder):
    model = BRAINet(CLASSES, backbone=network(), scores=["Generative"], lr=0.01)  # as in the configurations
    trainer = trainer_of(folder, StructureLearning(progress=False), epochs=15)
    trainer.fit(model, *loaders())
    risk_control(model, RISK)

    def again(place):
        trainer.save_checkpoint(place / "model.ckpt")
        return BRAINet.load_from_checkpoint(place / "model.ckpt", backbone=network()).predict

    def export(place):
        return runs(ExportedModel(export_folder(model, place / "model", TEST[0][:4])))

    return Door(model.predict, model, model, again, export, model.predictor, explain=model.explain)


def swapped_in_one_call(folder):
    lines = []
    with pytest.MonkeyPatch.context() as patch:  # not by a logger: other tests may have switched it off
        patch.setattr("brainet_pl.swap.fit.rank_zero_info", lines.append)
        model = swap_head(network(), TRAIN, held=HELD, progress=False).fit(max_epochs=15, progress=False)
    risk_control(model, RISK)

    def again(place):
        model.save(place / "model.pt")
        return load_swapped(place / "model.pt", network()).predict

    def export(place):
        return runs(ExportedModel(export_folder(model, place / "model")))

    return Door(model.predict, model, model, again, export, model, "\n".join(lines), model.explain)


class Foreign(pl.LightningModule):
    """A module that knows nothing of this package."""

    def __init__(self):
        super().__init__()
        self.model = network()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def layer_door(model, make):
    """A model with a swapped layer, however it came there."""
    risk_control(model, RISK)

    def again(place):
        torch.save(model.state_dict(), place / "model.pt")
        restored = restore_layers(make(), torch.load(place / "model.pt", weights_only=True))
        return lambda x: predict_layer(restored, x)

    (layer,) = [part for part in model.modules() if type(part).__name__ == "SwappedLayer"]
    return Door(
        lambda x: predict_layer(model, x),
        model,
        model,
        again,
        predictor=layer.predictor,
        explain=lambda x: explain_layer(model, x),
    )


def swap_head_in_a_foreign_module(folder):
    model = Foreign()
    trainer_of(folder, SwapHead("model.4"), epochs=15).fit(model, *loaders())
    return layer_door(model, Foreign)


def swapped_layer_in_a_loop(folder):
    model = network()
    swap_layer(model, TRAIN, "4", progress=False)
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(15):
        for x, y in loaders()[0]:
            optimizer.zero_grad()
            F.cross_entropy(model.train()(x), y).backward()
            optimizer.step()
    calibrate_layer(model, TRAIN, HELD, progress=False)
    model.train()  # as after a loop of one's own
    return layer_door(model, network)


def pixels_of(x):
    """Samples (N, d) as the pixels of one image."""
    return x.t()[None, :, None]


def samples_of(maps):
    """Maps of one row of pixels, of any of which `pixels_of` made samples, as samples again."""
    return maps[0, :, 0].t() if maps.dim() == 4 else maps[0, 0]


def pixel_network():
    """`network()`, for each pixel of an image by itself."""
    flat, made = network(), []
    for layer in flat:
        if isinstance(layer, nn.Linear):
            made.append(nn.Conv2d(layer.in_features, layer.out_features, 1))
            made[-1].load_state_dict({"weight": layer.weight[:, :, None, None], "bias": layer.bias})
        elif isinstance(layer, nn.BatchNorm1d):
            made.append(nn.BatchNorm2d(layer.num_features))
            made[-1].load_state_dict(layer.state_dict())
        else:
            made.append(layer)
    return nn.Sequential(*made)


def a_head_for_every_pixel(folder):
    train, held = ((x.reshape(40, 2, 5, COLUMNS).movedim(-1, 1), y.reshape(40, 2, 5)) for x, y in (TRAIN, HELD))
    model = swap_pixels(pixel_network(), train, held=held, progress=False).fit(max_epochs=15, progress=False)
    risk_control(model.rows, RISK)

    def answers(model, x):
        return {name: samples_of(maps) for name, maps in model.predict(pixels_of(x)).items()}

    def again(place):
        model.save(place / "model.pt")
        read = load_pixels(place / "model.pt", pixel_network())
        return lambda x: answers(read, x)

    return Door(
        lambda x: answers(model, x),
        model,
        lambda x: samples_of(model(pixels_of(x))),
        again,
        predictor=model.rows,
        explain=lambda x: model.rows.explain(model.maps(pixels_of(x))[0, :, 0].t()),
    )


def estimator_door(model, answers):
    """A fitted estimator; `answers` names what it is asked: name → method."""

    def predict(estimator, x):
        return {name: torch.as_tensor(getattr(estimator, method)(x.numpy())) for name, method in answers.items()}

    def again(place):
        model.save(place / "model.pt")
        read = type(model).load(place / "model.pt")
        return lambda x: predict(read, x)

    def export(place):
        return runs(ExportedModel(model.export(place / "model")), lambda x: x.float())

    network_ = model.network_
    return Door(
        lambda x: predict(model, x),
        network_,
        None,
        again,
        export,
        network_,
        explain=lambda x: model.explain(x.numpy()),
        takes_nan=True,
    )


def classifier(folder):
    x, y = (torch.cat(parts).numpy() for parts in zip(TRAIN, HELD, strict=True))
    model = BRAINetClassifier(random_state=0, max_epochs=40, members=2).fit(x, y)
    risk_control(model, RISK)
    answers = {
        "class": "predict",
        "probabilities": "predict_proba",
        "known_p": "known_p",
        "answered": "predict_answered",
    }
    return estimator_door(model, answers)


def regressor(folder):
    x = torch.cat([TRAIN[0], HELD[0]])
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(4))
    y = (x[:, 0] - x[:, 1].abs() + 0.3 * noise).numpy()
    model = BRAINetRegressor(random_state=0, max_epochs=30, members=2).fit(x.numpy(), y)
    return estimator_door(model, {"mean": "predict", "known_p": "known_p"})


def exported_folder(folder):
    model = swap_head(network(), TRAIN, held=HELD, progress=False).fit(max_epochs=15, progress=False)
    risk_control(model, RISK)
    return Door(runs(ExportedModel(export_folder(model, folder / "model"))))


DOORS = {
    "BRAINet": brainet_in_a_trainer,
    "swap_head": swapped_in_one_call,
    "SwapHead": swap_head_in_a_foreign_module,
    "swap_layer": swapped_layer_in_a_loop,
    "BRAINetClassifier": classifier,
    "BRAINetRegressor": regressor,
    "exported folder": exported_folder,
    "swap_pixels": a_head_for_every_pixel,
}
TORCH = [name for name in DOORS if name != "exported folder"]
LIGHTNING_OR_LAYER = ["BRAINet", "swap_head", "SwapHead", "swap_layer"]
FADES = ["BRAINet", "swap_head", "SwapHead", "swap_layer", "swap_pixels"]
CLASSIFIES = [name for name in DOORS if name != "BRAINetRegressor"]


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    """Each door, fitted when it is first asked for."""
    fitted = {}

    def open_door(name):
        if name == "exported folder":
            pytest.importorskip("onnxruntime")
            pytest.importorskip("onnxscript")
        if name not in fitted:
            fitted[name] = DOORS[name](tmp_path_factory.mktemp("door"))
        return fitted[name]

    return open_door


def promised(names):
    """A promise of these doors."""
    return pytest.mark.parametrize("name", names)


def numbers(answer):
    return {key: torch.as_tensor(value).detach() for key, value in answer.items()}


def same(found, expected, **close):
    found, expected = numbers(found), numbers(expected)
    assert set(found) >= set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, equal_nan=True, check_dtype=False, msg=lambda m, k=key: f"{k}: {m}", **close
        )


# -- promises ---------------------------------------------------------------------------------------------------------


@promised(CLASSIFIES)
def test_probabilities_are_calibrated_by_default(doors, name):
    door, (x, y) = doors(name), TEST
    probs = numbers(door.predict(x))["probabilities"].double()
    confidence, right = probs.max(1).values, (probs.argmax(1) == y).double()
    assert float(right.mean()) > 0.6
    assert abs(float(confidence.mean() - right.mean())) < 0.05
    assert float(calibration_error(calibration_sums(confidence, right))) < 0.06
    if door.predictor is not None:
        assert door.predictor.calibrates


@promised(FADES)
def test_confidence_fades_on_strange_samples_by_default(doors, name):
    """The price on known samples is in the test above."""
    predictor = doors(name).predictor
    assert isinstance(predictor.calibration, DensityScaling)
    assert predictor.scores.verdict_score(predictor.scores.reference.names, predictor.verdict) is not None
    assert "generative" in predictor.scores.units


@promised(CLASSIFIES)
def test_scores_are_of_the_answer_that_is_given(doors, name):
    found = numbers(doors(name).predict(TEST[0][:200]))
    if "one_minus_max_p" not in found:
        pytest.skip("an estimator gives no scores")
    expected = 1 - found["probabilities"].amax(dim=1)
    torch.testing.assert_close(found["one_minus_max_p"], expected, rtol=1e-4, atol=1e-5, check_dtype=False)


@promised(LIGHTNING_OR_LAYER)
def test_arrays_and_loaders_are_predicted_as_tensors_are(doors, name):
    door, (x, y) = doors(name), TEST
    expected = door.predict(x[:500])
    same(door.predict(x[:500].numpy()), expected, rtol=1e-4, atol=1e-5)
    same(door.predict(DataLoader(TensorDataset(x[:500], y[:500]), 70)), expected, rtol=1e-4, atol=1e-5)


@promised([*LIGHTNING_OR_LAYER, "swap_pixels"])
def test_softmax_of_forward_is_what_predict_says(doors, name):
    door, x = doors(name), TEST[0][:50]
    door.module.eval()  # a foreign module's own forward has the mode that it is in
    with torch.no_grad():
        probs = door.forward(x).softmax(dim=1)
    torch.testing.assert_close(probs, door.predict(x)["probabilities"])


@promised(TORCH)
@pytest.mark.parametrize("training", [True, False])
def test_answers_are_given_in_evaluation_mode_and_leave_no_trace(doors, name, training):
    door, x = doors(name), TEST[0][:50]
    door.module.eval()
    expected = door.predict(x)
    door.module.train(training)
    modes = {key: part.training for key, part in door.module.named_modules()}
    state = {key: value.clone() for key, value in door.module.state_dict().items() if isinstance(value, Tensor)}
    random = torch.get_rng_state()
    same(door.predict(x), expected, rtol=0, atol=0)
    assert {key: part.training for key, part in door.module.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in door.module.state_dict().items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, state[key], rtol=0, atol=0, equal_nan=True, msg=key)


@promised(DOORS)
def test_known_p_is_uniform_on_known_samples(doors, name):
    found = numbers(doors(name).predict(TEST[0]))["known_p"].double()
    samples = 1 / FRESH + 1 / (len(HELD[1]) if "BRAINetC" not in name else 2 * len(HELD[1]))
    for level in LEVELS:
        share = float((found <= level).double().mean())
        assert abs(share - level) < 3.5 * math.sqrt(level * (1 - level) * samples), level


@promised(TORCH)
def test_a_model_that_was_saved_and_read_says_the_same(doors, name, tmp_path):
    door, x = doors(name), torch.cat([TEST[0][:30], TEST[0][:10] + 9])
    same(door.again(tmp_path)(x), door.predict(x), rtol=0, atol=0)


@pytest.mark.integration
@promised(["BRAINet", "BRAINetClassifier", "BRAINetRegressor"])
def test_an_exported_model_says_the_same(doors, name, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    door, x = doors(name), torch.cat([TEST[0][:30], TEST[0][:10] + 9])
    same(door.export(tmp_path)(x), door.predict(x), rtol=1e-3, atol=1e-4)


@promised([name for name in TORCH if name != "swap_pixels"])
def test_a_verdict_has_a_reason_whose_parts_add_up(doors, name):
    door, x = doors(name), torch.cat([TEST[0][:30], TEST[0][:10] + 9])
    found, expected = door.explain(x), numbers(door.predict(x))
    torch.testing.assert_close(found.prediction["known_p"], expected["known_p"], check_dtype=False)
    torch.testing.assert_close(sum(found.shares.values()), found.prediction[found.score], check_dtype=False)
    least = 1 / (len(found.reference) + 1)
    for sentence, p in zip(found.sentences, found.prediction["known_p"].tolist(), strict=True):
        assert sentence.startswith("Stranger than all ") == (p < 1.5 * least), (sentence, p)
    assert found.resembled.numbers.shape == (40, 3)
    if found.columns is not None:
        parts = found.columns.parts.sum(dim=1)
        torch.testing.assert_close(parts, found.prediction["generative"], check_dtype=False, rtol=1e-4, atol=1e-4)
    assert (found.columns is None) == (name in [*LIGHTNING_OR_LAYER, "swap_pixels"])  # there a network is between


def test_the_exported_folder_says_what_the_model_says(doors):
    x = torch.cat([TEST[0][:30], TEST[0][:10] + 9])
    same(doors("exported folder").predict(x), doors("swap_head").predict(x), rtol=1e-3, atol=1e-4)


@promised(DOORS)
def test_nan_is_never_known_and_touches_no_other_sample(doors, name):
    door, x = doors(name), TEST[0][:6].clone()
    if door.takes_nan:
        pytest.skip("NaN is a missing number, which is filled")
    expected = numbers(door.predict(x))
    x[2, 0] = math.nan
    found = numbers(door.predict(x))
    assert float(found["known_p"][2]) == 0
    assert not bool(found["known"][2])
    assert int(found["class"][2]) == -1
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(found["known_p"][others], expected["known_p"][others])
    torch.testing.assert_close(found["probabilities"][others], expected["probabilities"][others])


@promised(DOORS)
def test_an_answer_does_not_depend_on_its_batch(doors, name):
    door, x = doors(name), TEST[0][:12]
    whole = numbers(door.predict(x))
    reverse = {key: value.flip(0) for key, value in numbers(door.predict(x.flip(0))).items()}
    single = [numbers(door.predict(x[i : i + 1])) for i in range(len(x))]
    same(reverse, whole, rtol=1e-4, atol=1e-5)
    same({key: torch.cat([one[key] for one in single]) for key in whole}, whole, rtol=1e-4, atol=1e-5)


@promised(CLASSIFIES)
def test_at_most_the_promised_share_of_answers_is_wrong(doors, name):
    """Calibration data are kept by every door, so the promise needs nothing but the model; it is saved and exported."""
    x, y = TEST
    found = numbers(doors(name).predict(x))
    answered, wrong = found["answered"], (found["class"] != y).double()
    assert 0.3 < float(answered.double().mean()) < 1
    noise = 2 * math.sqrt(RISK / float(answered.sum()))
    assert float(wrong[answered].mean()) < RISK + noise < float(wrong.mean())
    if "known" in found:
        assert not bool((answered & ~found["known"]).any())


@promised(LIGHTNING_OR_LAYER)
def test_what_to_label_next_is_in_doubt_and_never_there_twice(doors, name):
    door, x = doors(name), TEST[0][:200]
    chosen = torch.as_tensor(rank_for_labelling(door.module, torch.cat([x, x]), 10)) % len(x)
    assert len(chosen.unique()) == 10
    confidence = numbers(door.predict(x))["probabilities"].amax(dim=1)
    assert float(confidence[chosen].mean()) < float(confidence.median())


@pytest.mark.integration
@promised(["BRAINet", "SwapHead"])  # the others: tests/decisions
def test_flipped_labels_look_worst(doors, name):
    x, y = TRAIN
    flipped = torch.arange(len(y)) % 20 == 0
    found = find_label_issues(doors(name).module, (x, torch.where(flipped, (y + 1) % CLASSES, y)), progress=False)
    quality = torch.as_tensor(found.quality)
    above = (quality[~flipped][:, None] > quality[flipped]).double()
    assert float(above.mean()) > 0.85


@promised(["swap_head"])
def test_the_comparison_with_other_heads_is_told(doors, name):
    assert "the network's own layer" in doors(name).told
    assert "linear layer on the same features" in doors(name).told


# -- several labels ---------------------------------------------------------------------------------------------------

LABELS, LEVEL = 3, 0.8


def label_rows(count, seed):
    """Three labels of six columns, the second rare; a tenth is not known. Gives also how probable each is."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, COLUMNS, generator=draw)
    chances = torch.stack([2 * x[:, 0] + x[:, 1], 2 * x[:, 2] - 2, x[:, 0] - x[:, 3]], dim=1).sigmoid()
    y = (torch.rand(count, LABELS, generator=draw) < chances).float()
    return x, y.masked_fill(torch.rand(count, LABELS, generator=draw) < 0.1, math.nan), chances


def known_loss(logits, y):
    known = ~y.isnan()
    return F.binary_cross_entropy_with_logits(logits[known], y[known])


def label_network():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(COLUMNS, 16), nn.ReLU(), nn.Linear(16, LABELS))
    x, y, _ = label_rows(600, 1)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        known_loss(made(x), y).backward()
        optimizer.step()
    return made


class ForeignLabels(Foreign):
    def __init__(self):
        super().__init__()
        self.model = label_network()

    def training_step(self, batch, batch_idx):
        return known_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", known_loss(self(batch[0]), batch[1]))


def label_door(name, folder):
    """A fitted model of several labels: what predicts, and what predicts from its file, or from its state."""
    train, held = label_rows(600, 1)[:2], label_rows(400, 2)[:2]
    parts = [DataLoader(TensorDataset(*part), batch_size=50) for part in (train, held)]
    sets = {"conformal": Conformal(level=LEVEL)}
    if name == "BRAINet":
        model = BRAINet(task=MultiLabel(LABELS), backbone=label_network(), scores=["Generative"], lr=0.01, **sets)
        trainer = trainer_of(folder, StructureLearning(progress=False), epochs=10)
        trainer.fit(model, *parts)
        trainer.save_checkpoint(folder / "model.ckpt")
        return model, BRAINet.load_from_checkpoint(folder / "model.ckpt", backbone=label_network()).predict, model
    if name == "swap_head":
        model = swap_head(label_network(), train, held=held, task="MultiLabel", progress=False)
        model.fit(max_epochs=20, progress=False, **sets).save(folder / "model.pt")
        return model, load_swapped(folder / "model.pt", label_network()).predict, model
    if name == "SwapHead":
        model = ForeignLabels()
        swapping = SwapHead("model.2", task="MultiLabel", conformal=Conformal(level=LEVEL))
        trainer_of(folder, swapping, epochs=10).fit(model, *parts)
        restored = restore_layers(ForeignLabels(), model.state_dict())
    else:
        model = label_network()
        swap_layer(model, train, "2", task="MultiLabel", progress=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(10):
            for x, y in parts[0]:
                optimizer.zero_grad()
                known_loss(model.train()(x), y).backward()
                optimizer.step()
        calibrate_layer(model, train, held, progress=False)
        restored = restore_layers(label_network(), model.state_dict())
    (layer,) = [part for part in model.modules() if type(part).__name__ == "SwappedLayer"]
    assert int(layer.seen[1]) == 0  # a plain binary cross-entropy trains every branch, also where labels are not known
    return model, lambda x: predict_layer(restored, x), lambda x: model.eval()(x)


@promised(LIGHTNING_OR_LAYER)
def test_several_labels_are_learned_calibrated_and_kept(name, tmp_path):
    torch.manual_seed(0)
    model, again, forward = label_door(name, tmp_path)
    x, y, chances = label_rows(FRESH, 3)
    found = predict_layer(model, x) if "layer" in name or name == "SwapHead" else model.predict(x)
    best = MultiLabel(LABELS).nll(chances, y).mean()
    assert float(MultiLabel(LABELS).nll(found["probabilities"], y).mean() - best) < 0.08
    error = LabelCalibrationError(LABELS)
    error.update(found["probabilities"], y)
    assert float(error.compute()) < 0.05
    assert torch.equal(found["labels"], found["probabilities"] >= 0.5)
    assert 0.9 < float(found["known"].float().mean()) < 0.99
    if "set" in found:
        assert LEVEL - 0.03 < float(share_found(found["set"], y).nanmean()) < LEVEL + 0.05
    with torch.no_grad():
        torch.testing.assert_close(forward(x[:50]).sigmoid(), found["probabilities"][:50], rtol=1e-4, atol=1e-5)
    same(again(x), found, rtol=0, atol=0)


# -- sentences --------------------------------------------------------------------------------------------------------


def text_doors(folder):
    """Name → a door that takes sentences, and a second one from its file."""
    from tiny_texts import Bag, sentences, tiny_steps

    def encoder():
        torch.manual_seed(0)
        return TextEncoder(Bag(), tiny_steps())

    train, held = sentences(240, 1), sentences(120, 2)
    parts = [DataLoader(list(zip(*part, strict=True)), batch_size=40) for part in (train, held)]
    model = BRAINet(3, backbone=encoder(), scores=["Generative"], lr=0.01)
    trainer = trainer_of(folder, StructureLearning(progress=False), epochs=10)
    trainer.fit(model, *parts)
    trainer.save_checkpoint(folder / "model.ckpt")
    again = BRAINet.load_from_checkpoint(folder / "model.ckpt", backbone=encoder())
    swapped = swap_head(encoder(), train, held=held, progress=False).fit(max_epochs=10, progress=False)
    swapped.save(folder / "model.pt")
    read = load_swapped(folder / "model.pt", encoder())
    return {"BRAINet": (model, again), "swap_head": (swapped, read)}


@pytest.fixture(scope="module")
def sentence_doors(tmp_path_factory):
    pytest.importorskip("tokenizers")
    return text_doors(tmp_path_factory.mktemp("texts"))


@promised(["BRAINet", "swap_head"])
def test_sentences_are_answered_as_they_are(sentence_doors, name):
    from tiny_texts import sentences

    model, again = sentence_doors[name]
    x, y = sentences(300, 3)
    found = model.predict(x)
    assert float((found["class"] == y).double().mean()) > 0.65
    assert float(found["known"].double().mean()) > 0.8
    same(again.predict(x), found, rtol=0, atol=0)
    single = [numbers(model.predict(one)) for one in x[:5]]
    first = {key: value[:5] for key, value in numbers(found).items()}
    same({key: torch.cat([one[key] for one in single]) for key in first}, first, rtol=1e-4, atol=1e-5)


@pytest.mark.integration
@promised(["BRAINet", "swap_head"])
def test_an_exported_model_and_its_server_take_sentences(sentence_doors, name, tmp_path):
    for package in ("onnxruntime", "onnxscript", "fastapi", "httpx"):
        pytest.importorskip(package)
    from fastapi.testclient import TestClient
    from tiny_texts import sentences

    from brainet_pl.serving.app import make_app

    model, _ = sentence_doors[name]
    x, _ = sentences(50, 3)
    exported = ExportedModel(export_folder(model, tmp_path / "model"))
    expected = model.predict(x)
    same({key: torch.as_tensor(value) for key, value in exported.predict(x).items()}, expected, rtol=1e-3, atol=1e-4)
    with TestClient(make_app(exported)) as client:
        asked = client.post("/predict", json={"texts": [x[0], "rain " * 10_000]})
        answers = asked.json()["answers"]
        assert [one["cut"] for one in answers] == [False, True]
        assert answers[0]["class"] == int(expected["class"][0])
        refused = client.post("/predict", json={"texts": ["the rain", ""]})
        assert (refused.status_code, "at least one word" in refused.json()["detail"]) == (422, True)
