"""Whole models as one graph: torch.export and ONNX at batch sizes that the graph was not made from."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from brainet_pl import BRAINet, swap_head
from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl._utils.search import places
from brainet_pl.backbones.loading import Backbone
from brainet_pl.calibration import Conformal, DensityScaling, IsotonicScaling, TemperatureScaling, VectorScaling
from brainet_pl.callbacks import StructureLearning
from brainet_pl.cli import main
from brainet_pl.datamodules import Digits
from brainet_pl.export.graph import INPUT, export_onnx, export_program
from brainet_pl.network import Ensemble, Linear, MCDropout, Tree
from brainet_pl.scores import KNN, Combined, Generative, Mahalanobis

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
BATCHES = (1, 4, 7)


def run(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = x if isinstance(x, dict) else {INPUT: x}
    found = session.run(None, {name: value.numpy() for name, value in given.items()})
    return dict(zip([output.name for output in session.get_outputs()], map(torch.as_tensor, found), strict=True))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, quiet_trainer):
    folder = tmp_path_factory.mktemp("fitted")
    keep = ModelCheckpoint(folder, filename="model")
    pl.seed_everything(0, verbose=False)
    body = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 20))
    model = BRAINet(8, backbone=Backbone(body, head_layer=""), head=Tree(num_params=4000), passes=9, lr=0.01)
    learn = StructureLearning(threshold=0.05, progress=False)
    quiet_trainer(folder, learn, keep).fit(model, datamodule=Digits())
    return model.eval(), keep.best_model_path


def test_the_exact_average_of_all_sub_networks_is_in_the_graph(fitted, tmp_path):
    model, _ = fitted
    assert 1 < model.head.ggt.num_subnetworks <= model.passes
    program, inputs, outputs = export_program(model)
    names = export_onnx(model, tmp_path / "model.onnx")
    assert inputs == (INPUT,)
    assert names == outputs
    graph = program.module()
    for size in BATCHES:
        x = torch.rand(size, 64)
        with torch.no_grad():
            expected = model.predict_step(x, 0)
            exported = dict(zip(outputs, graph(x), strict=True))
        assert set(outputs) == set(expected) >= {"class", "probabilities", "mutual_information", "energy"}
        written = run(tmp_path / "model.onnx", x)
        for name in outputs:
            torch.testing.assert_close(exported[name], expected[name], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(written[name], expected[name], rtol=1e-4, atol=1e-5)


def test_fewer_passes_than_sub_networks_are_drawn_once(fitted):
    model, _ = fitted
    few = model.head.ggt.num_subnetworks - 1
    program, _, outputs = export_program(model, passes=few, seed=3)
    x = torch.rand(5, 64)
    with torch.no_grad():
        found = dict(zip(outputs, program.module()(x), strict=True))
        model.head.hold(model.head.ggt.sample(few, model.head.temperature, 3))
        expected = model.predictor.predict(x, few)
        program, *_ = export_program(model, passes=few, seed=7)  # what is held stays
        held = dict(zip(outputs, program.module()(x), strict=True))
        model.head.hold(None)
    for answer in (found, held):
        torch.testing.assert_close(answer["probabilities"], expected["probabilities"], rtol=1e-4, atol=1e-5)


FITTED = {
    "scores and verdict": (
        Tree(num_params=2000),
        [Generative(), KNN(), Mahalanobis(), Combined()],
        TemperatureScaling(),
    ),
    "tables and sets": (Linear(), [Generative(kind="discrete", threshold=0.1)], IsotonicScaling()),
    "by density": (Tree(num_params=2000), [Generative()], DensityScaling()),
    "ensemble": (Ensemble(num_params=4000), [KNN()], VectorScaling()),
    "every score": (Linear(), "all", TemperatureScaling()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTED)
def test_what_was_fitted_is_in_the_graph(name, tmp_path, quiet_trainer):
    """Scores, verdict, calibration and sets of classes, as onnxruntime gives them for batches of any size."""
    head, scores, calibration = FITTED[name]
    pl.seed_everything(0, verbose=False)
    whole = name == "every score"  # some read the network's own classification layer
    body = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), *([nn.Linear(12, 8)] if whole else []))
    sets = Conformal() if name == "tables and sets" else None
    model = BRAINet(
        8,
        Backbone(body, layers=None) if whole else Backbone(body, head_layer=""),
        head,
        passes=5,
        lr=0.01,
        scores=scores,
        calibration=calibration,
        conformal=sets,
    )
    trainer = quiet_trainer(tmp_path, StructureLearning(threshold=0.05, progress=False))
    data = Digits()
    trainer.fit(model, datamodule=data)
    model.eval()
    names = export_onnx(model, tmp_path / "model.onnx", seed=2)
    wanted = {score.name_in_model(unit) for score in model.scores for unit in score.units}
    assert {"class", "probabilities", "known", "known_p", "energy", *wanted} <= set(names)
    assert ("set" in names) == (sets is not None)
    known = torch.cat([x for x, *_ in data.val_dataloader()])
    for size in BATCHES:
        x = torch.cat([known[: size - size // 2], 30 * torch.randn(size // 2, 64)])
        with torch.no_grad():
            expected = model.predict_step(x, 0)
        found = run(tmp_path / "model.onnx", x)
        assert set(found) == set(names)
        for key, values in found.items():
            assert values.shape == expected[key].shape
            if values.is_floating_point():
                torch.testing.assert_close(values, expected[key].to(values.dtype), rtol=2e-3, atol=2e-3)
            else:
                assert torch.equal(values, expected[key]), key
        if size == BATCHES[-1]:
            assert expected["known"].any()
            assert not expected["known"].all()  # half of them is noise of thirty deviations


def test_a_search_is_the_same_in_a_graph():
    class Search(nn.Module):
        def forward(self, rising, x):
            return places(rising, x)

    rising = torch.randn(3, 6).sort(dim=1).values
    x = torch.cat([rising[:, :2], torch.randn(3, 5), torch.tensor([[float("nan"), torch.inf, -torch.inf]] * 3)], dim=1)
    graph = torch.export.export(Search(), (rising, x)).module()
    assert "searchsorted" not in graph.code
    assert torch.equal(graph(rising, x), places(rising, x))
    for row, values, found in zip(rising, x, places(rising, x), strict=True):
        assert found.tolist() == [6 if value.isnan() else int((row < value).sum()) for value in values]


def test_a_model_is_left_as_it_was(fitted, tmp_path):
    model, _ = fitted
    model.train()
    before = model.passes
    export_program(model, passes=3)
    assert model.training
    assert model.passes == before
    assert model.head.held is None
    model.eval()


@pytest.mark.slow
def test_a_swapped_head(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    swapped = swap_head(model, torch.randn(200, 6), 3, head=Tree(2000), test="gaussian", progress=False).eval()
    export_onnx(swapped, tmp_path / "swapped.onnx", passes=6)
    for size in BATCHES:
        x = torch.randn(size, 6)
        mean = swapped.predict(x, 6)["probabilities"]
        found = run(tmp_path / "swapped.onnx", x)
        torch.testing.assert_close(found["probabilities"], mean, rtol=1e-4, atol=1e-5)
        assert found["class"].tolist() == mean.argmax(dim=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("calibration", ["DensityScaling", "TemperatureScaling"])
def test_a_swapped_head_that_was_calibrated(tmp_path, calibration):
    """Its graph gives what `answer` gives: calibrated probabilities, every score, and whether an input is known."""
    torch.manual_seed(0)
    centres, y = 3 * torch.randn(3, 6), torch.randint(3, (600,))
    x = centres[y] + torch.randn(600, 6)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    swapped = swap_head(model, x[:300], 3, head=Tree(2000), test="gaussian", progress=False)
    rate = torch.optim.Adam(swapped.head.parameters(), 0.01)
    for _ in range(60):
        rate.zero_grad()
        swapped.loss(x[:300], y[:300]).backward()
        rate.step()
    swapped.eval()
    train, held = (x[:300], y[:300]), (x[300:], y[300:])
    swapped.calibrate(train, held, calibration=calibration, scores=["KNN"], progress=False)
    names = export_onnx(swapped, tmp_path / "swapped.onnx", passes=6)
    program, _, others = export_program(swapped, passes=6)
    assert names == others
    assert {"class", "probabilities", "known", "known_p", "knn", "energy"} <= set(names)
    graph = program.module()
    for size in BATCHES:
        some = torch.randint(3, (size - size // 2,))
        given = torch.cat([centres[some] + torch.randn(len(some), 6), 50 + 9 * torch.randn(size // 2, 6)])
        expected = swapped.predict(given, 6)
        written, exported = run(tmp_path / "swapped.onnx", given), dict(zip(others, graph(given), strict=True))
        for name in names:
            for found in (written, exported):
                if found[name].is_floating_point():
                    torch.testing.assert_close(found[name], expected[name].to(found[name]), rtol=1e-3, atol=1e-3)
                else:
                    assert torch.equal(found[name], expected[name]), name
    assert expected["known"].any()
    assert not expected["known"][-3:].any()


class Two(nn.Module):
    """A model of two inputs by name."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(5, 4), nn.Linear(7, 6)

    def forward(self, word, number):
        return self.layer(torch.cat([self.embed(word), number], dim=1))


def test_inputs_by_name(tmp_path):
    model = BRAINet(3, backbone=Backbone(Two(), head_layer=""), head=Tree(2000))
    x = {"word": torch.randint(5, (200,)), "number": torch.randn(200, 3)}
    with torch.no_grad():
        features = model.backbone(x)
    from brainet_pl import learn_structure

    model.set_structure(learn_structure(features.numpy(), test="gaussian", progress=False))
    model.eval()
    program, inputs, outputs = export_program(model, x)
    assert inputs == ("word", "number")
    with torch.no_grad():
        found = dict(zip(outputs, program.module()(x["word"][:5], x["number"][:5]), strict=True))
        torch.testing.assert_close(
            found["probabilities"], model.predict_step({k: v[:5] for k, v in x.items()}, 0)["probabilities"]
        )


def test_the_command_line_needs_nothing_but_the_checkpoint(quiet_trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    keep = ModelCheckpoint(tmp_path, filename="model")
    learn = StructureLearning(threshold=0.1, progress=False)
    model = BRAINet(8, head=Tree(num_params=4000))
    quiet_trainer(tmp_path, learn, keep).fit(model, datamodule=Digits())
    main(["export", "--ckpt_path", "model.ckpt", "--out", "deep/model.onnx"])
    said = capsys.readouterr()
    assert said.out.startswith("deep/model.onnx: class, probabilities, known_p, known, one_minus_max_p")
    assert said.err == ""
    found = run(tmp_path / "deep" / "model.onnx", torch.rand(5, 64))
    np.testing.assert_allclose(found["probabilities"].sum(dim=1), 1.0, atol=1e-5)
    main(["export", "--ckpt_path", "model.ckpt", "--out", "model.pt2"])
    assert torch.export.load("model.pt2").module()(torch.rand(2, 64))[1].shape == (2, 8)


BODY = """
from torch import nn

class Body(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 12), nn.ReLU())
"""


def test_a_backbone_of_the_users_own_on_the_command_line(quiet_trainer, tmp_path, monkeypatch, capsys):
    """Nothing is imported because a file names it: the user names it again, or trusts the file."""
    (tmp_path / "body_of_mine.py").write_text(BODY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    keep = ModelCheckpoint(tmp_path, filename="model")
    model = BRAINet(8, backbone=Backbone("body_of_mine:Body", head_layer="", layers=None), head=Linear())
    quiet_trainer(tmp_path, keep).fit(model, datamodule=Digits())
    del sys.modules["body_of_mine"]
    words = ["export", "--ckpt_path", "model.ckpt", "--out", "made"]
    with pytest.raises(ValueError, match="nothing is imported because a file names it"):
        main(words)
    main([*words, "--trust_checkpoint"])
    assert capsys.readouterr().out.startswith("made: class, probabilities, known_p, known")
    main([*words, "--model.backbone", "body_of_mine:Body"])
    x = torch.rand(3, 64)
    with torch.no_grad():
        expected = model.eval().predict_step(x, 0)["probabilities"]
    torch.testing.assert_close(run(tmp_path / "made" / "model.onnx", x)["probabilities"], expected, rtol=0, atol=1e-5)


def test_what_cant_be_meant_is_said(fitted, tmp_path):
    model, _ = fitted
    with pytest.raises(ValueError, match=r"expected a file that ends in \.onnx, got .*model\.pb"):
        export_onnx(model, tmp_path / "model.pb")
    with pytest.raises(ValueError, match=r"expected --out to be a folder, or to end in \.onnx or \.pt2"):
        main(["export", "--ckpt_path", "x.ckpt", "--out", "model.h5"])
    with pytest.raises(ValueError, match="expected a model with a head, got one that was never fitted"):
        export_program(BRAINet(3))
    fresh = BRAINet(3, head=MCDropout())
    fresh.predictor.build_head(fresh.head_settings, 5)
    with pytest.raises(ValueError, match="expected example inputs, because this model has not seen any"):
        export_program(fresh)
    with pytest.raises(RuntimeError, match=r"expected the graph to give the model's .* for a batch of 1, got another"):
        export_program(fresh, torch.rand(3, 5))  # its masks are others each time
    assert not list(tmp_path.iterdir())
