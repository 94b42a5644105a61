"""`swap_head(model, train, held=held).fit()`: one call, never below the network, and what it refuses."""

import copy
import pickle
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from brainet_pl import load_swapped, swap_head
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.calibration.temperature import fit_temperature, scale
from brainet_pl.features.extraction import Extracted
from brainet_pl.fitting import blend as fitting_blend
from brainet_pl.fitting import train as fitting_train
from brainet_pl.fitting.blend import BOTH, HEAD, LINEAR, NETWORK, choose_blend
from brainet_pl.fitting.comparison import why_not_network
from brainet_pl.fitting.predictions import tempered_nll
from brainet_pl.fitting.samples import LEAST_TO_SPLIT, split_held_out, take_from_training
from brainet_pl.fitting.settle import answer_rows, settle
from brainet_pl.fitting.train import train_best
from brainet_pl.network import Bayes, Ensemble, Linear, Tree
from brainet_pl.network.base import HeadInputs, Outputs
from brainet_pl.network.training import MANY, TrainingSettings, fit_head, patience_for
from brainet_pl.scores import Generative
from brainet_pl.swap import fit as swap_fit
from brainet_pl.swap import model as swap_model
from brainet_pl.swap.data import InputScale, hash_rows, rows_not_twice
from brainet_pl.swap.model import most_features
from brainet_pl.tasks import Classification

QUIET = {"progress": False}
SMALL = {"head": Tree(num_params=800), "test": "gaussian", "progress": False}
SHORT = {"max_epochs": 15, "progress": False}


def rows(n, seed=0, classes=3):
    """Classes whose boundaries bend, in six columns."""
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * x[:, 1] + x[:, 2]).mul(1.5).add(classes / 2).clamp(0, classes - 0.01).long()


def network(steps=0, classes=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x, y = rows(600, seed=7)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def halves(pair):
    """The rows that select and those that calibrate, of held-out rows (x, y)."""
    parts = split_held_out(Extracted(BackboneOutput(pair[0]), pair[1]))
    return [(part.features, part.targets) for part in parts]


@pytest.fixture(scope="module")
def honest():
    return swap_head(network(30), rows(600), held=rows(300, 1), **SMALL).fit(**SHORT)


# -- one call ---------------------------------------------------------------------------------------------------------


def test_one_call_gives_a_model_that_predicts_and_judges(honest):
    x, y = rows(300, 2)
    found = honest.predict(x)
    assert float((found["class"] == y).float().mean()) > 0.7
    assert {"known_p", "known", "probabilities", "generative"} <= set(found)
    assert 0.85 < float(found["known"].float().mean()) <= 1
    assert not honest.training
    assert honest.task.num_classes == 3  # counted
    assert {"swapped", "network", "linear"} == set(honest.comparison.nll)
    assert "better by" in str(honest.comparison)
    assert honest.comparison.samples == 150  # the other half has chosen
    assert honest.expected is not None


def test_the_line_after_a_fit_says_what_was_gained(caplog):
    with caplog.at_level("INFO"):
        model = swap_head(network(200), rows(600), **SMALL).fit(**SHORT)
    assert "held back 90 of 600 training samples: 45 choose the epoch and the blend, 45 others calibrate" in caplog.text
    assert str(model.comparison) in caplog.text
    assert re.search(r"where the time went: .*training [0-9.]+ s.*rest [0-9.]+ s", caplog.text)
    gain, error = model.comparison.gains["linear"]
    assert gain == pytest.approx(model.comparison.nll["linear"] - model.comparison.nll["swapped"])
    assert error > 0


def test_features_are_extracted_once():
    model = swap_head(network(), DataLoader(TensorDataset(*rows(400)), 50, shuffle=True), held=rows(200, 1), **SMALL)
    seen = []
    model.backbone.model[0].register_forward_hook(lambda layer, given, output: seen.append(len(given[0])))
    model.fit(**SHORT)
    assert 600 <= sum(seen) <= 610  # each sample once, and two to find layers


@pytest.mark.parametrize("head", [Linear(), Ensemble(2, 800), Bayes(800), Tree(800, skip="base_logits_or_linear")])
def test_any_head_is_trained_on_features(head):
    model = swap_head(network(200), rows(300), held=rows(200, 1), head=head, test="gaussian", **QUIET).fit(**SHORT)
    x, y = rows(300, 2)
    assert float(F.nll_loss(model.predict(x)["probabilities"].log(), y)) < 0.9


def test_loaders_datasets_and_tensors_give_the_same():
    found = [
        swap_head(network(), train, held=held, **SMALL).fit(**SHORT).predict(rows(9, 2)[0])["probabilities"]
        for train, held in (
            (rows(300), rows(200, 1)),
            (TensorDataset(*rows(300)), DataLoader(TensorDataset(*rows(200, 1)), 33, shuffle=True)),
            (DataLoader(TensorDataset(*rows(300)), 256, shuffle=True), TensorDataset(*rows(200, 1))),
        )
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_head_that_was_built_before_is_trained_further():
    train = TensorDataset(*rows(300))
    model = swap_head(network(), train, 3, **SMALL)
    tree = model.head.ggt
    assert model.fit(held=rows(200, 1), **SHORT).head.ggt is tree
    model.fit(train, rows(200, 1), **SHORT)
    with pytest.raises(ValueError, match="expected training data, got none: give inputs and labels"):
        swap_head(network(), tree, 3).fit()
    with pytest.raises(ValueError, match="expected a frozen backbone"):
        swap_head(network(), train, held=rows(200, 1), freeze=False, **SMALL).fit()
    with pytest.raises(ValueError, match="expected a model with a head, got one that was never fitted"):
        swap_head(network(), train, held=rows(200, 1)).predict(rows(2)[0])


def test_data_is_no_part_of_the_model():
    model = swap_head(network(), rows(300), held=rows(200, 1), **SMALL)
    assert copy.deepcopy(model)._given.train is model._given.train
    assert pickle.loads(pickle.dumps(model))._given.train is None
    assert model.fit(**SHORT)._given.train is None


def test_batches_with_names_of_their_own():
    x, y = rows(300)

    class Named(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return {"numbers": x[i], "age": torch.tensor(1.0), "kind": y[i]}

    columns = Columns(inputs="numbers", target="kind")
    found = swap_head(network(), Named(), held=rows(200, 1), columns=columns, **SMALL).fit(**SHORT)
    assert found.task.num_classes == 3
    assert swap_head(network(), Named(), 3, columns=columns, **SMALL).head.in_features == 8
    with pytest.raises(ValueError, match="name the target, columns"):
        swap_head(network(), Named(), held=rows(200, 1), **SMALL).fit(**SHORT)


def test_conformal_sets_where_asked_for():
    model = swap_head(network(200), rows(300), held=rows(300, 1), **SMALL).fit(conformal="Conformal", **SHORT)
    x, y = rows(500, 2)
    inside = model.predict(x)["set"].gather(1, y[:, None]).float().mean()
    assert 0.84 < float(inside) < 0.97


def test_sets_are_of_the_probabilities_that_a_user_gets(honest):
    """Those of a model that is far too sure, which a temperature mends."""
    model, (x, y) = copy.deepcopy(honest), rows(600, 5)
    model.attach((), "TemperatureScaling", "Conformal", None)
    model.blend.set(0.0, 30.0, 1e-9, model.task.linear(model.backbone(x), y))
    settle(model, answer_rows(model, Extracted(BackboneOutput(model.backbone(x).detach()), y)))
    assert float(model.calibration.tau) > 2
    held = model.predict(x)["set"].gather(1, y[:, None])
    assert float(held.float().mean()) == pytest.approx(0.9, abs=0.01)


def test_scores_where_asked_for():
    model = swap_head(network(200), rows(300), held=rows(300, 1), **SMALL).fit(
        scores=[Generative(normalize=False)], **SHORT
    )
    x = rows(300, 2)[0]
    assert float(model.predict(x)["known"].float().mean()) > 0.85
    with pytest.warns(UserWarning, match="on the scale of the training data"):
        assert not model.predict(x + 30)["known"].any()


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_twice_as_long_costs_nothing():
    train, held = rows(200), rows(200, 1)
    first, second = (
        swap_head(network(), train, held=held, **SMALL).fit(max_epochs=most, patience=3, progress=False)
        for most in (150, 300)
    )
    assert torch.equal(first.predict(held[0])["probabilities"], second.predict(held[0])["probabilities"])


def test_fit_head_slows_down_at_the_best_weights_and_ends():
    x, y = rows(64)

    def epochs(**settings):
        head = Linear().build(6, 3)
        common = {"max_epochs": 50, "patience": 3, "batch_size": 16, "learning_rate": 0.1}
        training = TrainingSettings(**common | settings)
        return fit_head(head, HeadInputs(x, y), training, F.cross_entropy, lambda: 1.0), head

    assert [epochs(rate_decays=count)[0] for count in (0, 1, 2)] == [4, 7, 10]
    torch.manual_seed(0)
    head = epochs()[1]
    torch.manual_seed(0)
    decayed = epochs(weight_decay=5.0)[1]
    assert sum(p.square().sum() for p in decayed.parameters()) < 0.8 * sum(p.square().sum() for p in head.parameters())

    seen = []
    head.register_forward_hook(lambda layer, given, output: seen.append(given[0]))
    training = TrainingSettings(max_epochs=20, patience=3, batch_size=16, learning_rate=0.1, input_dropout=0.25)
    fit_head(head, HeadInputs(x, y), training, F.cross_entropy)
    assert float((torch.cat(seen) == 0).float().mean()) == pytest.approx(0.25, abs=0.03)


def test_of_many_samples_a_candidate_far_behind_is_given_up_and_leaves_no_trace(monkeypatch):
    x, y = rows(MANY + 1000)
    data, select = HeadInputs(x, y), HeadInputs(*rows(300, 1))
    good = TrainingSettings(60, 10, 256, 0.02, rate_decays=1)
    hopeless = replace(good, input_dropout=0.1, learning_rate=1e-5)  # gains in each epoch, and too little
    heads = []
    original = fitting_train._nll
    monkeypatch.setattr(fitting_train, "_nll", lambda head, *rest: heads.append(head) or original(head, *rest))

    def trained(candidates, part):
        torch.manual_seed(0)
        heads.clear()
        head = Linear().build(6, 3)
        epochs = train_best(head, Classification(3), part, select, candidates, passes=1)
        return head, epochs, len(heads)

    both, epochs, validations = trained([hopeless, good], data)
    alone = trained([good], data)
    assert alone[1:] == (epochs, epochs)
    assert all(torch.equal(a, b) for a, b in zip(both.parameters(), alone[0].parameters(), strict=True))
    assert patience_for(10, MANY + 1000) == 8
    assert validations == epochs + 3 * 8

    few = trained([hopeless, good], HeadInputs(x[:1000], y[:1000]))
    assert few[2] > few[1] + 3 * 10, "of few samples each candidate trains until its own patience ends"


# -- never below what you had -----------------------------------------------------------------------------------------


def test_a_head_that_adds_nothing_leaves_the_network_with_a_temperature_to_the_bit():
    model, held = network(200), rows(300, 1)
    settings = {"max_epochs": 1, "learning_rate": 1e-9, "calibration": "TemperatureScaling", "progress": False}
    found = swap_head(model, rows(300), held=held, **SMALL).fit(**settings)
    assert found.blend.weights == NETWORK
    x = rows(100, 2)[0]
    with torch.no_grad():
        _, (inputs, labels) = halves(held)
        tau = found.calibration.tau
        torch.testing.assert_close(tau, fit_temperature(model(inputs).softmax(1), labels), rtol=1e-5, atol=0)
        assert torch.equal(found.predict(x)["probabilities"], scale(model(x).softmax(1), tau))
        torch.testing.assert_close(found(x).exp(), found.predict(x)["probabilities"])
    assert found.comparison.gains["network"] == (0.0, 0.0)


def test_a_better_head_joins_the_network_or_replaces_it(honest):
    x, y = rows(2000, 2)
    before = network(30)(x).detach()
    tau = fit_temperature(before.softmax(1), y)
    after = honest.predict(x)["probabilities"]
    assert honest.blend.weights.head > 0
    assert F.nll_loss(after.log(), y) < F.nll_loss(scale(before.softmax(1), tau).log(), y) - 0.02
    gain, error = honest.comparison.gains["network"]
    assert gain > error


@pytest.mark.parametrize(("gap", "counts"), [(0.0, False), (0.3, True)])
def test_a_head_counts_from_a_standard_error_on(honest, monkeypatch, gap, counts):
    """Noise that is better by chance, by less than a standard error, is not believed; a push to the truth is."""
    x, y = rows(200, 3)
    base = 2 * F.one_hot(y, 3).float() + torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(200, 3, generator=torch.Generator().manual_seed(7))
    outputs = noise + gap * 3 * F.one_hot(y, 3)
    mixed = tempered_nll(honest.task, (base + outputs / 8).softmax(1), y)
    gain = tempered_nll(honest.task, base.softmax(1), y) - mixed
    assert gain.mean() > 1e-3
    assert bool(gain.mean() > gain.std() / 200**0.5) == counts
    model = copy.deepcopy(honest)
    monkeypatch.setattr(fitting_blend, "predict_rows", lambda *_: Outputs(outputs.unsqueeze(0)))
    choose_blend(model, None, Extracted(BackboneOutput(x, base_logits=base), y))
    assert (model.blend.weights.head > 0) == counts


@pytest.mark.parametrize(("noise", "used"), [(3.0, LINEAR), (0.0, BOTH)])
def test_a_linear_layer_that_is_better_than_the_head_is_what_predicts(honest, monkeypatch, noise, used):
    """The head's noise is left out; a head that says the same as the layer stays beside it."""
    model, (x, y) = copy.deepcopy(honest), rows(300, 3)
    features = model.backbone(x).detach()
    layer = model.task.linear(features, y)
    outputs = layer.logits(features) + noise * torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(fitting_blend, "predict_rows", lambda *_: Outputs(outputs.unsqueeze(0)))
    choose_blend(model, layer, Extracted(BackboneOutput(features), y))
    assert model.blend.weights == used
    if used == LINEAR:
        with torch.no_grad():
            passes = model.passes(x)
            torch.testing.assert_close(passes.predicted, layer(features))
            torch.testing.assert_close(model(x).softmax(1), model.predict(x)["probabilities"])
        assert len(passes.outputs) == 1
        assert model.averages_one


def test_nothing_vouches_that_has_chosen():
    labels = torch.arange(301) % 3
    held = Extracted(BackboneOutput(torch.arange(301.0)[:, None]), labels)
    select, calibrate = split_held_out(held)
    one, other = (set(part.features.flatten().tolist()) for part in (select, calibrate))
    assert not one & other
    assert len(one | other) == 301
    counts = [torch.bincount(part.targets) for part in (select, calibrate)]
    assert int((counts[0] - counts[1]).abs().max()) <= 1


def test_a_convolution_and_other_class_counts_are_named(honest):
    samples = Extracted(BackboneOutput(torch.zeros(9, 6), base_logits=torch.zeros(9, 5)), torch.arange(9) % 3)
    assert why_not_network(honest, samples) == "it has 5 classes, the data 3"
    model = copy.deepcopy(honest)
    model.backbone.base_layer = nn.Conv2d(6, 3, 1)
    alone = Extracted(BackboneOutput(torch.zeros(9, 6)), torch.arange(9) % 3)
    assert "the removed layer is a convolution" in why_not_network(model, alone)


def test_a_network_of_other_classes_has_no_say():
    (x, y), held = rows(600), rows(300, 1)
    found = swap_head(network(200), (x, 2 - y), held=(held[0], 2 - held[1]), **SMALL).fit(**SHORT)
    assert not found.blend.active
    assert "network" not in found.comparison.nll
    assert "is not compared: its logits say no more of these classes than their shares do" in str(found.comparison)


# -- keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blend", [HEAD, (1.0, 0.5, 0.0), NETWORK, BOTH, LINEAR])
def test_a_file_holds_all_of_it_and_no_code(honest, blend, tmp_path):
    honest = copy.deepcopy(honest)
    features, labels = rows(300, 4)
    honest.blend.set(*blend, honest.task.linear(honest.backbone(features), labels))
    x = torch.cat([rows(50, 2)[0], 9 * rows(50, 3)[0]])
    honest.save(tmp_path / "model.pt")
    torch.load(tmp_path / "model.pt", weights_only=True)
    again = load_swapped(tmp_path / "model.pt", network())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = honest.predict(x), again.predict(x)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert again.blend.weights == blend
    assert str(again.expected) == str(honest.expected)
    again.save(tmp_path / "again.pt")
    assert load_swapped(tmp_path / "again.pt", network()).head.ggt == honest.head.ggt


def test_files_that_are_refused(honest, tmp_path):
    path = tmp_path / "model.pt"
    honest.save(path)
    with pytest.raises(FileNotFoundError, match="expected a swapped model"):
        load_swapped(tmp_path / "other.pt", network())
    with pytest.raises(ValueError, match="expected a network of the class Sequential, got Linear"):
        load_swapped(path, nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"expected a network like that of .*build it with the same arguments"):
        load_swapped(path, nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)))
    content = torch.load(path, weights_only=True)
    content["weights"]["head.output.bias"] += 1
    torch.save(content, tmp_path / "changed.pt")
    with pytest.raises(ValueError, match="expected a swapped model as it was saved"):
        load_swapped(tmp_path / "changed.pt", network())
    torch.save({"format": 1}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match=r"expected a swapped model in .*, a SwappedModel of format"):
        load_swapped(tmp_path / "foreign.pt", network())
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="when reading"):
        load_swapped(path, network())


def test_a_state_loads_into_a_model_of_the_same_tree():
    x, y = rows(200)
    model = swap_head(network(), x, 3, **SMALL).eval()
    model(x[:4])
    again = swap_head(network(), model.head.ggt, 3, head=Tree(num_params=800)).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x[:9]), model(x[:9]))
    assert torch.equal(again.base_logits(x[:9]), model.base_logits(x[:9]))
    model.calibrate((x, y), rows(200, 1), progress=False)
    with pytest.raises(ValueError, match=r"save\(path\) and load_swapped"):
        swap_head(network(), model.head.ggt, 3, head=Tree(num_params=800)).load_state_dict(model.state_dict())


def test_the_page_and_the_graph(honest, tmp_path):
    found = honest.report(tmp_path / "page.html", rows(300, 2), {"far away": 5 + rows(100, 3)[0]})
    assert "<title>page –" in (tmp_path / "page.html").read_text()
    page = (tmp_path / "page.html").read_text()
    assert "far away" in page
    gain = f"NLL {honest.comparison.nll['swapped']:.3g} and {honest.comparison.nll['linear']:.3g}"
    assert f"a linear layer on the same features: {gain}" in page  # what a fit found stands on the page
    assert str(honest.expected)[1:].split(";")[0] in page
    assert re.search(rf"<dt>NLL</dt><dd><b>{found['test/scaled/cls/NLL']:.4f}</b>", page)  # of what `predict` says
    x, y = rows(300, 2)
    expected = F.nll_loss(honest.predict(x)["probabilities"].log(), y)
    assert found["test/scaled/cls/NLL"] == pytest.approx(float(expected), rel=1e-4)
    pytest.importorskip("onnxscript")
    assert "known" in honest.export(tmp_path / "model.onnx")


# -- bad input --------------------------------------------------------------------------------------------------------


def lazily(x, y):
    """A loader whose labels nobody sees before it is read."""
    return list(zip(x.split(50), y.split(50), strict=True))


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (lambda y: y + 1, 3, r"labels of train: expected labels from 0 to 2, got 1 to 3: set num_classes"),
        (lambda y: y, 2, "labels of train: expected labels from 0 to 1, got 0 to 2"),
        (lambda y: y - 1, None, "expected labels of train to be 0 or more, got -1"),
        (lambda y: y + 0.5, None, "expected class labels to be whole numbers"),
        (lambda y: F.one_hot(y), None, "expected one class label for each sample"),
    ],
)
@pytest.mark.parametrize("form", [tuple, lambda pair: lazily(*pair)])
def test_wrong_labels_are_refused_before_any_work(labels, classes, message, form):
    x, y = rows(300)
    model = swap_head(network(), form((x, labels(y))), classes, held=rows(200, 1), **SMALL)
    model.backbone.model[0].register_forward_hook(lambda *_: pytest.fail("the backbone ran"))
    with pytest.raises(ValueError, match=message):
        model.fit(**SHORT)


def test_wrong_labels_are_noticed_at_their_batch():
    x, y = rows(300)
    y[120] = 3
    model = swap_head(network(), lazily(x, y), 3, held=rows(200, 1), **SMALL)
    seen = []
    model.backbone.model[0].register_forward_hook(lambda layer, given, output: seen.append(len(given[0])))
    with pytest.raises(ValueError, match="labels of train: expected labels from 0 to 2, got 0 to 3"):
        model.fit(**SHORT)
    assert sum(seen) <= 102 + 4  # two batches, and a few to find layers
    with pytest.raises(ValueError, match="labels of held: expected labels from 0 to 2"):
        swap_head(network(), rows(300), held=[*lazily(*rows(100, 1)), (x[:50], y[:50] + 3)], **SMALL).fit(**SHORT)


def test_classes_that_are_missing():
    x, y = rows(300)
    with pytest.raises(ValueError, match="at least two classes, got 300 of class 0 alone"):
        swap_head(network(), (x, 0 * y), held=rows(200, 1), **SMALL).fit(**SHORT)
    with pytest.raises(ValueError, match="of every class from 0 to 4, got none of 1, 3: number the classes"):
        swap_head(network(), (x, 2 * y), held=rows(200, 1), **SMALL).fit(**SHORT)
    with pytest.raises(ValueError, match="of every class from 0 to 4, got none of 3, 4"):
        swap_head(network(), (x, y), 5, held=rows(200, 1), **SMALL).fit(**SHORT)


def test_a_pair_with_a_number_of_classes_is_checked_as_any_other_data():
    x, y = rows(300)
    with pytest.raises(ValueError, match="expected training samples of every class from 0 to 4, got none of 3, 4"):
        swap_head(network(), (x, y), 5, **SMALL)
    model = swap_head(network(), (x, y), 3, layers=None, **SMALL).fit(**SHORT)
    assert model.predict(x[:4])["probabilities"].shape == (4, 3)


@pytest.mark.parametrize("held", [True, False])
def test_samples_with_nan_are_left_out_and_named(held):
    (x, y), other = rows(400), rows(200, seed=1)
    x[3, 0], x[50], other[0][7, 1] = torch.nan, torch.inf, torch.nan
    model = swap_head(network(), (x, y), held=other if held else None, layers=None, **SMALL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(**SHORT)
    said = [str(one.message) for one in caught if "left out" in str(one.message)]
    expected = ["left out 1 of 200 held-out samples, row 7"] if held else []
    assert len(said) == len(expected) + 1
    for line, start in zip(said, [*expected, "left out 2 of 400 training samples, rows 3, 50"], strict=True):
        assert line.startswith(start)
    found = model.predict(x[:60])
    assert found["probabilities"][[0, 1, 2, 4]].isfinite().all()
    assert not found["known"][3]


def test_a_fit_without_any_finite_sample_is_refused():
    x, y = rows(200)
    with pytest.raises(ValueError, match="finite features of training samples, got NaN or infinity in all 200"):
        swap_head(network(), (x * torch.nan, y), layers=None, **SMALL).fit(**SHORT)


def test_class_counts_and_text_are_told_before_any_work():
    """No input is run through the network, which would stop here."""
    (x, y), broken = rows(300), nn.Sequential(nn.Linear(99, 3))
    data = TensorDataset(x, y)
    data.classes = ["cat", "dog", "hat"]
    with pytest.raises(ValueError, match=r"expected num_classes=5 to be the classes of train, got 3 \(cat, dog, hat\)"):
        swap_head(broken, DataLoader(data, 50, collate_fn=lambda rows: default_collate(rows)), 5, held=data).fit()
    for labels in ([data.classes[i] for i in y], np.array(data.classes)[y]):
        with pytest.raises(ValueError, match="expected labels of train to be numbers from 0, got text such as '"):
            swap_head(broken, (x, labels))


def test_arrays_are_taken_as_tensors_are():
    (x, y), held = rows(300), rows(200, 1)
    plain = swap_head(network(), (x, y), held=held, **SMALL).fit(**SHORT)
    for labels in (y.numpy(), y.tolist()):
        found = swap_head(network(), (x.numpy(), labels), held=held, **SMALL).fit(**SHORT)
        assert torch.equal(found.predict(x)["probabilities"], plain.predict(x)["probabilities"])


def test_layers_have_at_most_half_as_many_features_as_there_are_samples():
    data = TensorDataset(torch.zeros(960, 3), torch.zeros(960))
    for given in (data, data.tensors, DataLoader(data, 10)):
        assert most_features(given) == 480
    assert most_features((torch.zeros(9, 3), torch.zeros(9))) == 64
    assert most_features([(torch.zeros(9, 3), torch.zeros(9))] * 2) == 2048
    assert most_features(iter([])) == most_features((torch.zeros(9000, 3), torch.zeros(9000))) == 2048


def test_held_out_samples_that_were_trained_on_are_refused():
    (x, y), (a, b) = rows(300), rows(200, 1)
    message = "expected held-out samples that are not in the training data, got {} of 200 that are"
    for count in (200, 10):
        held = torch.cat([x[:count], a[count:]]), torch.cat([y[:count], b[count:]])
        with pytest.raises(ValueError, match=message.format(count)):
            swap_head(network(), (x, y), held=held, **SMALL).fit(**SHORT)
    held = torch.cat([x[:1], a]), torch.cat([y[:1], b])
    with pytest.warns(UserWarning, match="1 of 201 held-out samples are in the training data too, and were left out"):
        assert swap_head(network(), (x, y), held=held, **SMALL).fit(**SHORT).comparison.samples == 100  # a half


def test_held_out_samples_of_the_same_data_set_are_refused_before_any_work():
    class Augmented(Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, i):
            return torch.randn(6), i % 3

    data = Augmented()
    model = swap_head(network(), Subset(data, range(300)), held=Subset(data, range(250, 400)), **SMALL)
    model.backbone.model[0].register_forward_hook(lambda *_: pytest.fail("the backbone ran"))
    with pytest.raises(ValueError, match="got 50 of 150 that are"):
        model.fit(**SHORT)


def test_few_held_out_samples():
    with pytest.raises(ValueError, match="at least 20 held-out samples, got 3: so few can't tell how sure"):
        swap_head(network(), rows(300), held=rows(3, 1), **SMALL).fit(**SHORT)
    with pytest.raises(ValueError, match=r"expected at least 20 held-out samples, got 1[0-9]"):
        swap_head(network(), rows(100), **SMALL).fit(**SHORT)
    few = swap_head(network(), rows(300), held=rows(30, 1), **SMALL).fit(**SHORT)
    assert few.comparison.samples == 30  # all calibrate, and training samples select
    with pytest.warns(UserWarning, match="probabilities and verdict go by 40 held-out samples"):
        swap_head(network(), rows(300), held=rows(40, 1), **SMALL).fit(**SHORT)


def test_what_can_be_read_once_is_refused():
    with pytest.raises(ValueError, match="expected train to be a loader that can be read more than once"):
        swap_head(network(), iter(lazily(*rows(300))), held=rows(200, 1), **SMALL).fit(**SHORT)
    with pytest.raises(ValueError, match="expected samples in held, got an empty loader"):
        swap_head(network(), rows(300), held=[], **SMALL).fit(**SHORT)
    with pytest.raises(ValueError, match="expected num_classes for inputs without labels"):
        swap_head(network(), rows(300)[0])


def images(n, seed=0):
    y = rows(n, seed)[1]
    draw = torch.Generator().manual_seed(seed)
    return (torch.rand(n, 3, 8, 8, generator=draw) + 0.5 * F.one_hot(y, 3)[:, :, None, None]) / 1.5, y


def test_a_network_without_stages_has_a_density_of_its_features():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.one, self.two = nn.Conv2d(3, 6, 3), nn.Linear(192, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.two(self.one(x.flatten(1)).relu())

    torch.manual_seed(0)
    model = Flat()
    found = swap_head(model, images(300), held=images(200, 1), **SMALL).fit(**SHORT)
    assert any(isinstance(score, Generative) for score in found.scores)
    assert {"generative", "known"} <= set(found.predict(images(4, 2)[0]))


def test_inputs_on_another_scale_are_warned_of_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))

    def normal(pair):
        return (pair[0] - 0.5) / 0.2, pair[1]

    settings = {"head": Linear(), "progress": False, "layers": None}
    found = swap_head(model, normal(images(300)), held=normal(images(400, 1)), **settings).fit(**SHORT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (1, 2, 50):
            found.predict(normal(images(count, 2))[0])
    with pytest.warns(UserWarning, match="expected inputs on the scale of the training data, got mean"):
        found.predict(images(2, 2)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.predict(images(2, 2)[0])
    with pytest.warns(UserWarning, match="expected held-out inputs on the scale of the training data"):
        swap_head(model, normal(images(300)), held=images(200, 1), **settings).fit(**SHORT)


def test_token_numbers_have_no_scale():
    scale_of = InputScale()
    scale_of.warn_if_far(torch.randint(9, (3, 5)))
    scale_of.warn_if_far({"input_ids": torch.randint(9, (3, 5)), "attention_mask": torch.ones(3, 5).long()})
    assert not len(scale_of.mean)


@pytest.mark.parametrize("given", [0, LEAST_TO_SPLIT - 1, LEAST_TO_SPLIT])
def test_the_same_share_of_each_class_is_taken_and_repeated_samples_stay(given):
    labels = torch.tensor([0] * 200 + [1] * 40 + [2] * 100)
    hashes = [bytes([i % 256, i // 256]) for i in range(340)]
    hashes[300:340] = [b"same"] * 40
    held, select = taken = take_from_training(labels, rows_not_twice(hashes), given)
    assert torch.bincount(labels[held]).tolist() == ([] if given else [30, 6, 9])
    share = [30, 6, 9] if given == LEAST_TO_SPLIT - 1 else []
    assert torch.bincount(labels[select]).tolist() == share
    assert not set(held.tolist()) & set(select.tolist())
    assert not (taken.all >= 300).any()


def test_hashes_are_of_rows():
    x = torch.randn(4, 3)
    x[3] = x[0]
    found = hash_rows(x)
    assert found[0] == found[3] != found[1]
    assert hash_rows({"b": x, "a": torch.arange(4)})[0] != hash_rows({"b": x, "a": torch.arange(4)})[3]


def test_of_several_dropouts_that_is_kept_which_predicts_held_out_samples_best(monkeypatch):
    monkeypatch.setattr(Classification, "linear", lambda *_: None)  # it would help the bad one

    def fit(rate):
        found = swap_head(network(), rows(400), held=rows(200, 1), **SMALL).fit(input_dropout=rate, **SHORT)
        return found.comparison.nll["swapped"], found.predict(rows(20, 3)[0])["probabilities"]

    (good, answer), (bad, _) = fit(0.0), fit(0.95)
    assert good < bad - 0.02
    monkeypatch.setattr(swap_model, "DROPOUTS", (0.0, 0.95))
    torch.testing.assert_close(fit("auto"), (good, answer))  # the first starts from the same random numbers
    monkeypatch.setattr(swap_model, "DROPOUTS", (0.95, 0.0))
    assert fit("auto")[0] < bad - 0.02


class Noisy(Dataset):
    """Rows that are augmented: another noise each time that one is read."""

    def __init__(self, x, y):
        self.x, self.y, self.reads = x, y, []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.reads.append(int(i))
        return self.x[i] + 0.1 * torch.randn(6), int(self.y[i])


def watch_training(monkeypatch, trained):
    original = swap_fit.train_best

    def train(head, task, data, *rest, **more):
        trained.append(data)
        return original(head, task, data, *rest, **more)

    monkeypatch.setattr(swap_fit, "train_best", train)


@pytest.mark.parametrize(("copies", "expected"), [("auto", 3), (0, 1), (1, 2)])
def test_augmented_samples_are_read_several_times_and_held_back_ones_are_not_trained_on(copies, expected, monkeypatch):
    trained = []
    watch_training(monkeypatch, trained)
    data = Noisy(*rows(400))
    swap_head(network(), data, **SMALL).fit(copies=copies, **SHORT)
    (seen,) = trained
    share, rest = divmod(len(seen.target), expected)
    assert (rest, share) == (0, 340)  # 15 % are held back, in all copies
    parts = seen.x.view(expected, share, -1)
    assert torch.equal(seen.target, seen.target[:share].repeat(expected))
    if expected > 1:
        assert not torch.equal(parts[0], parts[1])
        gap = (parts[0] - parts[1]).square().mean()  # of the same rows
        assert float(gap) < 0.2 * float((parts[0] - parts[0].roll(1, 0)).square().mean())


def test_a_set_that_is_not_augmented_is_read_once(monkeypatch):
    trained = []
    watch_training(monkeypatch, trained)
    swap_head(network(), rows(200), held=rows(100, 1), **SMALL).fit(**SHORT)
    assert len(trained[0].target) == 200
    with pytest.raises(ValueError, match="copies"):
        swap_head(network(), rows(200), held=rows(100, 1), **SMALL).fit(copies=-1, **SHORT)
