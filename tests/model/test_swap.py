"""What people give to `swap_head`, and what it leaves alone."""

import copy
import time

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet, learn_structure, swap_head
from brainet_pl._utils.parts import make_part
from brainet_pl.export.graph import export_program
from brainet_pl.network import MLP, Bayes, Ensemble, Laplace, Linear, MCDropout, Tree, TreeDropout, TreeEnsemble
from brainet_pl.network.base import train_head
from brainet_pl.scores import KNN, Generative, Verdict
from brainet_pl.tasks import Classification

QUIET = {"head": Tree(num_params=800), "progress": False}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.fixture
def inputs():
    return torch.randn(300, 6, generator=torch.Generator().manual_seed(1))


def test_a_tensor_an_array_a_dataset_and_a_loader_give_the_same_tree(inputs):
    labels = torch.zeros(len(inputs))
    tree = swap_head(network(), inputs, 3, **QUIET).head.ggt
    for data in (
        inputs.numpy(),
        inputs.numpy().astype(np.float64),
        TensorDataset(inputs),
        TensorDataset(inputs, labels),
        DataLoader(TensorDataset(inputs, labels), batch_size=50),
        list(inputs.split(70)),
        iter(inputs.split(70)),
    ):
        assert swap_head(network(), data, 3, **QUIET).head.ggt == tree


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_and_inputs_of_other_types(inputs, dtype):
    for model, x in (
        (network().to(dtype), inputs),
        (network(), inputs.to(dtype)),
        (network().to(dtype), inputs.to(dtype)),
    ):
        swapped = swap_head(model, x, 3, **QUIET)
        out = swapped(x[:5])
        assert out.dtype == torch.float32
        assert out.isfinite().all()
        assert swapped.probabilities(x[:5], passes=2).sum(dim=-1).allclose(torch.ones(2, 5))
    assert swapped.half()(inputs[:5]).dtype == torch.float32


@pytest.mark.parametrize("head", [Tree(num_params=800), Tree(num_params=800, draws=1), Ensemble(2, 800), Linear()])
def test_logits_for_any_training_code_and_a_loss_over_all_draws(inputs, head):
    swapped = swap_head(network(), inputs, 3, head=head, progress=False).train()
    labels = torch.arange(8) % 3
    if not isinstance(head, Ensemble):
        assert swapped(inputs[:8]).shape == (8, 3)
    torch.manual_seed(5)
    found = swapped.loss(inputs[:8], labels)
    torch.manual_seed(5)
    outputs = train_head(swapped.head, swapped.backbone(inputs[:8]), swapped.base_logits(inputs[:8]))
    outputs = outputs if outputs.dim() == 3 else [outputs]
    torch.testing.assert_close(found, torch.stack([nn.functional.cross_entropy(o, labels) for o in outputs]).mean())


def test_a_table_in_sixteen_bits_gives_a_tree(inputs):
    for dtype in (torch.bfloat16, torch.float16):
        x = inputs.to(dtype)
        assert learn_structure(x, progress=False) == learn_structure(x.float(), progress=False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.empty(0, 6), "expected training data .* got no sample"),
        (torch.tensor(1.0), "got a single number: give one row a sample"),
        (np.array([["a"] * 6]), "expected an array of numbers, got <U1"),
        (
            [torch.randn(4, 6), torch.randn(4, 5)],
            r"got a batch of shape \(4, 5\) .* of one shape, as in training, \(N, 6\)",
        ),
        ([torch.randn(6), torch.randn(6)], "inputs that Sequential takes, got a batch of shape"),
        ([], "got no sample"),
        (5, "expected data to be a tensor, an array, a dataset, a loader or a learned tree, got 5"),
        ({"x": "images"}, "expected data to be a tensor"),
        ("images", "expected data to be a tensor"),
        ([["a"]], "expected tensors, got texts, which Sequential does not read"),
        (torch.randn(5, 4), r"inputs that Sequential takes, got a batch of shape \(5, 4\) and torch.float32, at which"),
        (torch.zeros(5, 6, dtype=torch.long), "got a batch of shape .* torch.int64"),
        (torch.zeros(5, 6, dtype=torch.complex64), "in real numbers, got .*complex64"),
    ],
)
def test_what_is_no_data_is_said_so(data, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        swap_head(network(), data, 3, **QUIET)


def test_batches_of_other_shapes_are_told():
    model = nn.Sequential(nn.Flatten())
    with pytest.raises(ValueError, match="same number of features, got 6 and then 5: bring all inputs to one shape"):
        swap_head(model, [torch.randn(4, 6), torch.randn(4, 5)], 3, head_layer="", **QUIET)


@pytest.mark.parametrize("classes", [0, -1, 2.5, "3", None, True])
def test_the_number_of_classes_is_checked(inputs, classes):
    with pytest.raises(ValueError, match="expected num_classes"):
        swap_head(network(), inputs, classes, **QUIET)


@pytest.mark.parametrize("freeze", [True, False])
def test_the_users_model_is_left_alone(inputs, freeze):
    model = network().train()
    model[0].weight.requires_grad_(False)
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    modes, flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    swapped = swap_head(model, inputs, 3, freeze=freeze, **QUIET)
    swapped.train()(inputs[:8]).sum().backward()
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert isinstance(model[4], nn.Linear)
    assert not any(m._forward_hooks for m in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not {id(p) for p in model.parameters()} & {id(p) for p in swapped.parameters()}


def test_numpy_integers_are_settings_everywhere(inputs):
    n = np.int64
    parts = [
        Tree(num_params=n(8000), min_width=n(2)),
        MLP(num_params=n(900), hidden=n(2)),
        MCDropout(num_params=n(900), hidden=n(1), rate=np.float32(0.25)),
        Bayes(num_params=n(900), hidden=n(1)),
        Laplace(prior_precision=np.float32(0.5)),
        Ensemble(members=n(2), num_params=n(900), hidden=n(1)),
        TreeEnsemble(members=n(2), num_params=n(900), min_width=n(1)),
        TreeDropout(num_params=n(900), min_width=n(1)),
        KNN(k=n(3), max_rows=n(100), seed=n(1)),
        Generative(s=n(1), max_order=n(1), bins=n(4), max_parents=n(1), seed=n(2), prior=np.float64(3)),
        Classification(n(3), label_smoothing=np.float32(0.5)),
    ]
    for part in parts:
        for name, value in part.settings().items():
            assert not isinstance(value, np.generic), f"{part} {name}"
            assert type(value) in (int, float, str, bool, type(None))
        base = next(c for c in type(part).__mro__ if c.__name__ in ("HeadSettings", "Score", "Task"))
        assert make_part(base, part.to_dict(), "x").to_dict() == part.to_dict()
    swapped = swap_head(network(), inputs, n(3), head=Tree(num_params=n(800)), s=n(2), bins=n(3), progress=False)
    assert swapped.probabilities(inputs[:4], passes=n(3)).shape == (3, 4, 3)
    model = BRAINet(num_classes=n(3), head=Linear(), passes=n(4), lr=np.float32(0.5))
    assert type(model.passes) is int
    assert dict(model.hparams)["task"]["init_args"]["num_classes"] == 3


def test_class_labels_are_whole_numbers_in_range():
    task = Classification(3)
    assert task.check(torch.tensor([0.0, 2.0])).tolist() == [0, 2]
    assert task.check(torch.tensor([True, False])).tolist() == [1, 0]
    for bad, message in (
        (torch.tensor([0.0, 0.7]), r"to be whole numbers, got 0\.7: number the classes"),
        (torch.tensor([0.0, float("nan")]), "whole numbers, got nan"),
        (torch.tensor([0.0, float("inf")]), "whole numbers, got inf"),
        (torch.tensor([0, 3]), "labels from 0 to 2, got 0 to 3"),
        (torch.tensor([-1, 1]), "got -1 to 1"),
        (torch.tensor([[1, 0, 0]]), r"one class label for each sample, \(B,\), got targets of shape \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            task.check(bad)
    for measure in task.measures():
        with pytest.raises(ValueError, match="expected labels from 0 to 2, got 0 to 3"):
            measure.update(torch.full((2, 3), 1 / 3), torch.tensor([0, 3]))
        with pytest.raises(ValueError, match=r"expected probabilities \(B, C\) and labels \(B,\), got"):
            measure.update(torch.full((2, 3), 1 / 3), torch.tensor([0]))


def test_a_head_that_nobody_chose_is_as_large_as_its_tree_needs():
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    data = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
    assert swap_head(model, data, 3, progress=False).head.num_params == pytest.approx(16_000, rel=0.02)
    chosen = swap_head(model, data, 3, head=Tree(num_params=2_000), progress=False)
    assert chosen.head.num_params == pytest.approx(2_000, rel=0.02)  # what somebody chose stays


def test_a_swapped_model_starts_at_the_answers_of_the_model(inputs):
    model = network().eval()
    base_logits = Tree(skip="base_logits_or_linear")
    swapped = swap_head(model, inputs, 3, head=base_logits, progress=False).eval()
    assert swapped.head.adds_base_logits
    with torch.no_grad():
        torch.testing.assert_close(swapped(inputs[:9]), model(inputs[:9]).log_softmax(1))
        torch.testing.assert_close(swapped.probabilities(inputs[:9], 3), model(inputs[:9]).softmax(1).expand(3, -1, -1))
        torch.testing.assert_close(swapped.base_logits(inputs[:9]), model(inputs[:9]))
    for other in ({"head": Tree()}, {"head": Tree(skip="linear")}, {"head": base_logits, "num_classes": 4}):
        assert not swap_head(model, inputs, **{"num_classes": 3, "progress": False} | other).head.adds_base_logits
    swapped.train().loss(inputs[:9], torch.arange(9) % 3).backward()
    assert swapped.head.output.weight.grad.any()
    assert all(p.grad is None for p in swapped.backbone.parameters())


def test_a_swapped_model_is_settled_on_data(inputs):
    swapped = swap_head(network(), inputs[:200], 3, **QUIET)
    labels = torch.arange(300) % 3
    state = copy.deepcopy(swapped.backbone.state_dict())
    train, few, held = ((inputs[rows], labels[rows]) for rows in (slice(200), slice(200, 220), slice(200, 300)))
    with_few = swapped.calibrate(train, few, progress=False)
    assert swapped.head.layers.mixed or not len(swapped.head.layers.mixed_mean)
    assert with_few["head/temperature"] == swapped.head.ggt.auto_temperature
    assert swapped.calibrate(train, held, progress=False)["head/temperature"] == swapped.head.temperature
    assert all(torch.equal(v, state[k]) for k, v in swapped.backbone.state_dict().items())
    linear = swap_head(network(), inputs, 3, head=Linear()).calibrate(train, held, progress=False)
    assert not any(name.startswith("head/") for name in linear)


@pytest.mark.slow
def test_the_wide_head_of_vgg_is_swapped_in_time():
    """4,096 features, more than rows: it returns, and soon."""
    torch.manual_seed(0)
    model = torchvision.models.vgg11(num_classes=10)
    start = time.monotonic()
    with pytest.warns(UserWarning, match="more rows than columns, got 300 rows of 4,096"):
        swapped = swap_head(model, torch.randn(300, 3, 32, 32), 10, progress=False)
    assert time.monotonic() - start < 300
    assert swapped.head.ggt.num_variables == 4096
    assert swapped.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 10)


# -- how sure it may be -----------------------------------------------------------------------------------------------


def pictures(n, seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=draw)
    return 0.5 * torch.rand(n, 3, 8, 8, generator=draw) + 0.5 * nn.functional.one_hot(y, 3)[:, :, None, None], y


@pytest.fixture(scope="module")
def judged():
    """A small network of maps with its head swapped, trained and calibrated."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    train, held = pictures(400), pictures(300, seed=1)
    first = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(40):
        first.zero_grad()
        nn.functional.cross_entropy(net(train[0]), train[1]).backward()
        first.step()
    model = swap_head(net, train[0], 3, head=Linear(), progress=False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        model.train().loss(*train).backward()
        optimizer.step()
    assert "known" not in model.eval().predict(held[0][:2])  # nothing to compare with yet
    before = {name: value.clone() for name, value in model.head.state_dict().items()}
    settled = model.calibrate(train, DataLoader(TensorDataset(*held), batch_size=70), progress=False)
    assert {"temperature", "fading", "cost"} <= set(settled)
    assert all(torch.equal(value, before[name]) for name, value in model.head.state_dict().items())
    return model


def test_a_swapped_model_tells_what_it_knows(judged):
    x, y = pictures(400, seed=2)
    found = judged.predict(x)
    assert torch.equal(found["class"], judged.probabilities(x).mean(dim=0).argmax(dim=1))  # the answer never changes
    assert float((found["class"] == y).float().mean()) > 0.9
    assert float((~found["known"]).float().mean()) < 0.05 + 3 * (0.05 * 0.95 / 300 + 0.05 * 0.95 / 400) ** 0.5
    odd = torch.cat([1 - x[:50], torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(0))])
    strange = judged.predict(odd)
    assert not strange["known"].any()
    assert strange["probabilities"].max(dim=1).values.mean() < found["probabilities"].max(dim=1).values.mean() - 0.3
    nan = judged.predict(torch.full((2, 3, 8, 8), torch.nan))
    assert not nan["known"].any()
    assert nan["known_p"].tolist() == [0, 0]


def test_what_it_learned_is_in_a_copy_and_in_an_exported_program(judged):
    x = torch.cat([pictures(5, seed=3)[0], torch.randn(4, 3, 8, 8)])
    expected = judged.predict(x)
    torch.testing.assert_close(copy.deepcopy(judged).predict(x)["known_p"], expected["known_p"])
    program, _, names = export_program(judged, x)
    found = dict(zip(names, program.module()(x), strict=True))
    torch.testing.assert_close(found["probabilities"], expected["probabilities"])
    torch.testing.assert_close(found["known_p"], expected["known_p"])


def test_calibrating_by_other_parts(judged):
    model, train, held = copy.deepcopy(judged), pictures(100), pictures(100, seed=1)
    with pytest.warns(UserWarning, match="expected at least 200 validation samples"):
        model.calibrate(train, held, calibration="TemperatureScaling", scores=[KNN()], verdict=Verdict("knn", 0.1))
    found = model.predict(held[0])
    assert "knn" in found
    assert 0.8 < float(found["known"].float().mean()) < 1
    for wrong in (torch.rand(4, 3, 8, 8), "data", (torch.rand(4, 3, 8, 8), torch.zeros(3))):
        with pytest.raises(ValueError, match=r"expected .*train"):
            model.calibrate(wrong, held, progress=False)
    with pytest.raises(ValueError, match="expected score of the verdict to be one of"):
        model.calibrate(train, held, verdict=Verdict("knn"), progress=False)


def test_passes_of_a_swapped_model_stand_for_the_weights_of_its_structures():
    """A head with few structures gives each once, with a weight; the mean of many passes is the weighted mean."""
    torch.manual_seed(0)
    x = torch.randn(200, 6).cumsum(1)
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(6, 3))
    swapped = swap_head(model, x, 3, head=Tree(num_params=800, temperature=30.0), progress=False).eval()
    with torch.no_grad():
        swapped.head.output.weight.normal_(std=30.0)  # structures that disagree
        logits, weights = swapped.head.enumerate(swapped.read(x[:5]).features)
        probabilities = swapped.probabilities(x[:5], passes=1000)
    assert probabilities.shape == (1000, 5, 3)
    assert weights.max() > 1.2 / len(weights)  # a plain mean of the structures would be another
    expected = torch.tensordot(weights, logits.softmax(-1), dims=1)
    torch.testing.assert_close(probabilities.mean(0), expected, atol=2e-3, rtol=0)
