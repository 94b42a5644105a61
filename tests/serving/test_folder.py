"""The folder of an exported model: its answers are the model's, in a process that has no torch too."""

import io
import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.datasets import make_friedman1
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder as TorchvisionFolder
from torchvision.transforms import InterpolationMode, v2

from brainet_pl import (
    BRAINet,
    BRAINetClassifier,
    BRAINetRegressor,
    ExportedModel,
    export_folder,
    load_swapped,
    swap_head,
)
from brainet_pl.backbones.loading import Backbone
from brainet_pl.cli import main
from brainet_pl.datamodules import ImageFolder, Table
from brainet_pl.export.folder import features_of_table
from brainet_pl.network import Linear
from brainet_pl.serving.images import ImageSteps, resized
from brainet_pl.serving.tables import Feature, encode_rows

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in "torch torchvision sklearn scipy pytorch_lightning lightning".split():
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refuse())
"""


def run_without_torch(code, *args):
    words = [sys.executable, "-c", WITHOUT_TORCH + code, *map(str, args)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def same(found, expected):
    """Equal but for rounding; of `known_p`, a rank that rounding moved is a step of 1/(n + 1)."""
    for name, values in found.items():
        if name == "features":
            continue
        other = expected[name].numpy() if isinstance(expected[name], torch.Tensor) else expected[name]
        if values.dtype.kind == "f":
            np.testing.assert_allclose(values, other, rtol=1e-4 if "probab" not in name else 0, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(values, other, err_msg=name)


def test_answers_are_the_models(served):
    model, folder, known = served
    exported = ExportedModel(folder)
    x = torch.cat([known[:60], torch.rand(40, 1, 8, 8)])
    with torch.no_grad():
        expected = model.predict_step(x, 0)
    outputs = exported.predict(x.numpy())
    assert set(outputs) >= {"class", "probabilities", "known_p", "known", "set", "energy", "mahalanobis", "joint"}
    same(outputs, expected)
    np.testing.assert_array_equal(outputs["features"], x.flatten(1).numpy())
    assert outputs["known"].any()
    assert not outputs["known"].all()
    answers = exported.as_answers(outputs)
    assert json.loads(json.dumps(answers)) == answers
    first = answers[0]
    assert first["class_name"] == str(int(expected["class"][0]))
    assert list(first["probabilities"]) == [str(i) for i in range(8)]
    assert first["set"] == [str(i) for i in expected["set"][0].nonzero().flatten().tolist()]
    assert set(first["scores"]) >= {"energy", "joint"}
    assert "features" not in first


def test_the_folder_says_what_is_in_it(served):
    folder = served.folder
    assert sorted(path.name for path in folder.iterdir()) == ["client.py", "example.npz", "model.json", "model.onnx"]
    about = json.loads((folder / "model.json").read_text())
    assert about["inputs"] == [{"name": "input", "dtype": "float32", "shape": [None, 1, 8, 8]}]
    roles = {one["name"]: one for one in about["outputs"]}
    assert roles["known_p"]["role"] == "answer"
    assert roles["joint"] == {
        "name": "joint", "role": "score", "unit": "nats", "higher": "more unlike the training data",
    }  # fmt: skip
    assert about["verdict"] == {"score": "joint", "level": 0.05}
    assert list(about["held_out"]) == ["joint", "energy", "answer", "features"]
    assert len(about["held_out"]["answer"]) == about["held_out"]["features"]["size"] == 152
    assert len([line for line in (folder / "client.py").read_text().splitlines() if line.strip()]) <= 20


def test_it_runs_without_torch(served, tmp_path):
    model, folder, known = served
    known = known[:50]
    np.save(tmp_path / "x.npy", known.numpy())
    code = """
import numpy as np
from brainet_pl.serving import ExportedModel
model = ExportedModel(sys.argv[1])
outputs = model.predict(np.load(sys.argv[2]))
state = model.monitor().update(model.signals(outputs))
assert state.inputs == 50 and not state.alarm, state
np.savez(sys.argv[3], **outputs)
assert "torch" not in sys.modules
"""
    run_without_torch(code, folder, tmp_path / "x.npy", tmp_path / "found.npz")
    with torch.no_grad():
        same(dict(np.load(tmp_path / "found.npz")), model.predict_step(known, 0))
    said = run_without_torch("import runpy\nrunpy.run_path(sys.argv[1], run_name='__main__')", folder / "client.py")
    assert "probabilities [[" in said


@pytest.mark.slow
def test_a_folder_is_replaced_and_nothing_else_is(served, tmp_path):
    model = served.model
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"expected a new folder, or one of .*thesis\.txt"):
        export_folder(model, tmp_path / "mine")
    export_folder(model, tmp_path / "again", passes=15)
    export_folder(model, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "mine"]
    about = json.loads((tmp_path / "again" / "model.json").read_text())
    assert list(about["held_out"]) == ["joint", "energy"]  # scores that the model keeps
    (tmp_path / "again" / "model.onnx").write_bytes(b"another")
    with pytest.raises(ValueError, match=r"expected the graph that .* belongs to"):
        ExportedModel(tmp_path / "again")
    (tmp_path / "again" / "model.json").write_text("{}")
    with pytest.raises(ValueError, match="expected format 1"):
        ExportedModel(tmp_path / "again")
    with pytest.raises(FileNotFoundError, match="expected the folder of an exported model"):
        ExportedModel(tmp_path)


def test_numbers_beyond_32_bits_have_no_class_and_are_unknown(served, recwarn):
    found = ExportedModel(served.folder).predict(np.full((1, 1, 8, 8), 1e300))
    assert (found["class"][0], bool(found["known"][0])) == (-1, False)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((2, 64)), r"expected input of the shape \(B, 1, 8, 8\), got \(2, 64\)"),
        (np.zeros((0, 1, 8, 8)), "expected at least one sample"),
        ([["a"] * 64], "expected numbers of the shape"),
        ([[1.0], [1.0, 2.0]], "expected numbers of the shape"),
        ({"other": [[0.0] * 64]}, "expected the input input, got other"),
        ({"input": np.zeros((1, 1, 8, 8)), "mask": [1]}, "expected the inputs input, got mask too: leave it out"),
    ],
)
def test_bad_inputs_are_told(served, given, message):
    with pytest.raises(ValueError, match=message):
        ExportedModel(served.folder).predict(given)


# -- images -----------------------------------------------------------------------------------------------------------


def picture(seed, width, height, mode="RGB"):
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize((width, height))
    noise = rng.integers(-9, 10, (height, width, 3))
    return Image.fromarray((np.asarray(small).astype(int) + noise).clip(0, 255).astype(np.uint8)).convert(mode)


@pytest.mark.parametrize("how", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("size", [(97, 60), (40, 130), (33, 33), (20, 25)])
def test_pixels_are_to_the_bit_those_of_torchvision(how, size):
    image = picture(0, *size)
    tensor = v2.functional.pil_to_tensor(image)
    for side in (16, 33, 48):
        expected = v2.Resize(side, InterpolationMode(how), antialias=True)(tensor).numpy()
        np.testing.assert_array_equal(resized(np.asarray(image).transpose(2, 0, 1), side, how), expected)
        steps = ImageSteps(side, side + 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25), how)
        file = io.BytesIO()
        image.save(file, "PNG")
        chain = v2.Compose([
            v2.Resize(side, InterpolationMode(how), antialias=True), v2.CenterCrop(side + 3),
            v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.25]),
        ])  # fmt: skip
        np.testing.assert_allclose(steps(file.getvalue()), chain(tensor).numpy(), rtol=0, atol=1e-6)


def test_images_from_file_to_answer(tmp_path, quiet_trainer):
    for kind in ("cat", "dog"):
        for part, count in (("train", 20), ("val", 10), ("test", 8)):
            (tmp_path / part / kind).mkdir(parents=True)
            for i in range(count):
                mode = "L" if i == 0 else "RGB"
                picture(hash((part, i)) % 1000 + 500 * (kind == "dog"), 30 + i, 41, mode).save(
                    tmp_path / part / kind / f"{i}.jpg"
                )
    body = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    model = BRAINet(2, backbone=Backbone(body, head_layer=""), head=Linear())
    data = ImageFolder(str(tmp_path), size=24, mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3), batch_size=8)
    trainer = quiet_trainer(tmp_path)
    trainer.fit(model, datamodule=data)
    steps = ImageSteps(24, 24, (0.5, 0.5, 0.5), (0.3, 0.3, 0.3))
    exported = ExportedModel(export_folder(model.eval(), tmp_path / "model", images=steps))
    assert exported.class_names == ["cat", "dog"]
    expected = trainer.predict(model, datamodule=data)
    files = [(tmp_path / file).read_bytes() for file in data.predict_set.files]
    found = exported.predict_images(files)
    probabilities = torch.cat([part["probabilities"] for part in expected]).numpy()
    np.testing.assert_allclose(found["probabilities"], probabilities, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found["known"], torch.cat([part["known"] for part in expected]).numpy())
    for bad in (b"", b"no image", files[0][:300]):
        with pytest.raises(ValueError, match="got bytes that can't be read as one"):
            exported.predict_images([bad])
    with pytest.raises(ValueError, match="exported without a way to prepare rows"):
        exported.predict_rows([{"a": 1}])


@pytest.mark.integration
def test_a_swapped_model_brings_the_names_and_the_preparation_of_the_data_that_it_was_fitted_on(tmp_path):
    for kind in ("cat", "dog"):
        (tmp_path / "train" / kind).mkdir(parents=True)
        for i in range(80):
            picture(i + 500 * (kind == "dog"), 30 + i % 7, 41).save(tmp_path / "train" / kind / f"{i}.png")
    augmented, plain = (
        transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.3] * 3)])
        for steps in ([transforms.RandomResizedCrop(24)], [transforms.Resize(28), transforms.CenterCrop(24)])
    )
    drawn, files = (TorchvisionFolder(tmp_path / "train", transform=how) for how in (augmented, plain))
    train, held = Subset(drawn, [i for i in range(160) if i % 4]), DataLoader(Subset(files, range(0, 160, 4)), 16)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 2))
    honest = swap_head(body.eval(), train, held=held, head=Linear(), progress=False)
    honest.fit(max_epochs=2, copies=0, progress=False)
    honest.save(tmp_path / "honest.pt")
    again = load_swapped(tmp_path / "honest.pt", body)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "expected inputs on the scale")  # of inputs that the export makes up
        exported = ExportedModel(export_folder(again, tmp_path / "model"))
    assert exported.class_names == ["cat", "dog"]
    found = exported.predict_images([Path(path).read_bytes() for path, _ in files.samples[:8]])
    expected = honest.predict(torch.stack([files[i][0] for i in range(8)]))["probabilities"]
    np.testing.assert_allclose(found["probabilities"], expected, rtol=0, atol=0.01)  # Pillow rounds in another way
    with pytest.raises(ValueError, match="which does something else, or draws: give ImageSteps"):
        export_folder(honest, tmp_path / "refused", images=augmented)
    exported.images = None
    with pytest.raises(ValueError, match="export it again with one, export_folder"):
        exported.predict_images([b""])


CONFIG = """
seed_everything: 0
model:
  num_classes: 2
  backbone: {model: "body_of_pictures:Body", head_layer: "", layers: null}
  head: {class_path: Linear}
  scores: [{class_path: Mahalanobis}]
  conformal: {level: 0.1}
data:
  class_path: brainet_pl.datamodules.ImageFolder
  init_args: {root: pictures, size: 24, mean: [0.5, 0.5, 0.5], std: [0.3, 0.3, 0.3]}
trainer:
  max_epochs: 2
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: CSVLogger, init_args: {save_dir: runs, name: pictures}}
  callbacks: [{class_path: brainet_pl.callbacks.LastCheckpoint}]
"""
BODY = """
from torch import nn

class Body(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
"""


@pytest.mark.slow
def test_the_command_line_knows_the_images_of_its_run(tmp_path, monkeypatch):
    """Fit, predict and export by commands: from the same files, in all modes and sizes, come the same answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "body_of_pictures.py").write_text(BODY)
    (tmp_path / "pictures.yaml").write_text(CONFIG)
    for kind in ("cat", "dog"):
        for part, count in (("train", 30), ("val", 40), ("test", 12)):
            (tmp_path / "pictures" / part / kind).mkdir(parents=True)
            for i in range(count):
                mode, end = ("L", "png") if i % 5 == 0 else ("RGB", "jpg")
                image = picture(i + 100 * len(part) + 1000 * (kind == "dog"), 20 + i, 41 - i % 9, mode)
                image.save(tmp_path / "pictures" / part / kind / f"{i}.{end}")
    main(["fit", "--config", "pictures.yaml"])
    run = tmp_path / "runs" / "pictures" / "version_0"
    path = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    main(["predict", *path, "--trust_checkpoint"])
    del sys.modules["body_of_pictures"]
    with pytest.raises(ValueError, match=r"add --model.backbone body_of_pictures:Body, or --trust_checkpoint"):
        main(["export", *path, "--out", "made"])
    main(["export", *path, "--out", "made", "--model.backbone", "body_of_pictures:Body", "--held", "val"])
    exported = ExportedModel("made")
    assert exported.images == ImageSteps(24, 24, [0.5] * 3, [0.3] * 3)
    assert list(exported.about["held_out"]) == ["joint", "energy", "answer", "features"]
    assert exported.about["held_out"]["features"]["size"] == 80
    said = pd.read_csv(run / "predictions.csv")
    found = exported.predict_images([(tmp_path / "pictures" / file).read_bytes() for file in said["file"]])
    columns = [f"probabilities_{name}" for name in exported.class_names]
    np.testing.assert_allclose(found["probabilities"], said[columns], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["known_p"], said["known_p"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found["known"], said["known"])
    sets = [" ".join(map(str, np.flatnonzero(one))) for one in found["set"]]
    assert sets == [" ".join(str(one).split()) for one in said["set"]]
    with pytest.raises(ValueError, match="expected a folder"):
        main(["export", *path, "--out", "made.onnx", "--held", "val"])


# -- tables -----------------------------------------------------------------------------------------------------------


def frame(n=160, seed=0):
    rng = np.random.default_rng(seed)
    kind = rng.choice(["red", "green", "blue"], n)
    x = rng.normal(size=n) + (kind == "red")
    table = pd.DataFrame({
        "size": np.where(rng.random(n) < 0.1, np.nan, 100 * x),
        "colour": kind,
        "price": [f"{1000 + 50 * v:,.1f}" for v in x],
        "day": [f"2024-01-{1 + i % 28:02d}" for i in range(n)],
    })  # fmt: skip
    return table, np.where(x + 0.3 * rng.normal(size=n) > 0.3, "yes", "no")


@pytest.mark.slow
def test_a_classifier_with_its_encoders(tmp_path):
    x, y = frame()
    model = BRAINetClassifier(random_state=0, max_epochs=5, members=2).fit(x, y)
    new, _ = frame(40, seed=1)
    new.loc[0, "colour"] = "violet"  # never seen
    exported = ExportedModel(model.export(tmp_path / "model", held=frame(60, seed=2)[0]))
    rows = json.loads(new.to_json(orient="records"))
    assert any(row["size"] is None for row in rows)
    found = exported.predict_rows(rows)
    np.testing.assert_allclose(found["probabilities"], model.predict_proba(new), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["known_p"], model.known_p(new), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found["set"], model.predict_set(new))
    assert [one["class_name"] for one in exported.as_answers(found)] == model.predict(new).tolist()
    assert list(exported.about["held_out"]) == ["joint", "energy", "answer", "features"]
    with pytest.raises(ValueError, match="got no day in row 0"):
        exported.predict_rows([{"size": 1, "colour": "red", "price": "1"}])
    with pytest.raises(ValueError, match="expected a finite number in column 'price'"):
        exported.predict_rows([{"size": 1, "colour": "red", "price": "cheap", "day": "2024-01-01"}])


@pytest.mark.slow
def test_a_regressor_of_numbers(tmp_path):
    x, y = make_friedman1(200, random_state=0)
    x = 1e4 + 50 * x
    model = BRAINetRegressor(random_state=0, max_epochs=5, members=2).fit(x[:150], y[:150])
    exported = ExportedModel(model.export(tmp_path / "model"))
    found = exported.predict_rows(x[150:].tolist())
    mean, std = model.predict(x[150:], return_std=True)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["std"], std, rtol=1e-5, atol=1e-5)
    interval = model.predict_interval(x[150:])
    np.testing.assert_allclose(np.stack([found["lower"], found["upper"]], axis=1), interval, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found["known_p"], model.known_p(x[150:]), atol=1e-5)


def test_rows_of_a_csv_file(tmp_path):
    table, y = frame()
    table.drop(columns=["price", "day"]).assign(target=y).to_csv(tmp_path / "rows.csv", index=False)
    data = Table(str(tmp_path / "rows.csv"), "target")
    data.setup("fit")
    rows = pd.read_csv(tmp_path / "rows.csv", dtype=str, keep_default_na=False).to_dict("records")
    places = data.test_set.told["row"]
    found = encode_rows(features_of_table(data), [rows[i - 2] for i in places])
    np.testing.assert_allclose(found, data.test_set.x.numpy(), rtol=1e-6, atol=1e-6)


def test_cells():
    assert Feature("a", separators=",").of(["1,234.5", 7]).tolist() == [1234.5, 7.0]
    assert Feature("a", separators=".", decimal=",").of(["1.234,5"]).tolist() == [1234.5]
    assert Feature("a", "date").of(["1970-01-03"]).tolist() == [2.0]
    assert Feature("a", "date").of(["1970-01-03T12:00", "1970-01-03 12:00:00.000"]).tolist() == [2.5, 2.5]
    for bad in ("now", "today", "-1", "2024", "20240-01-01", 1704067200000, "2024-13-01", "2024-1-1", "١٩٧٠-٠١-٠٣"):
        with pytest.raises(ValueError, match=r"expected a date such as 2024-12-31, got"):
            Feature("a", "date").of([bad])
    assert Feature("a", "missing").of([None, float("nan"), "n/a", 0]).tolist() == [1.0, 1.0, 1.0, 0.0]
    assert Feature("a", "category", "missing").of([None, "x"]).tolist() == [1.0, 0.0]
    assert Feature("a", fill=5.0, center=1.0, scale=2.0).of([None, 3]).tolist() == [2.0, 1.0]
    for bad in (["1e999"], [[1]], [None], ["x"]):
        with pytest.raises(ValueError, match="expected a"):
            Feature("a").of(bad)
