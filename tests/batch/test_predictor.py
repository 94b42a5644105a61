"""`BatchPredictor`: the answers of `ExportedModel.predict` to the last bit in any batch; bad rows; pickling."""

import io
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from brainet_pl.batch import BatchPredictor
from brainet_pl.serving import ExportedModel
from brainet_pl.serving.folder import provider_names
from brainet_pl.serving.tables import Feature, encode_columns, encode_rows

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from tiny_folder import numbers, write_tiny

ROOT = Path(__file__).parents[2]
FEATURES = [
    Feature("age", fill=40.0, center=30.0, scale=10.0),
    Feature("age", "missing"),
    Feature("plan", "category", "basic"),
    Feature("since", "date", scale=365.0),
]
IMAGES = {"resize": 8, "crop": 8, "mean": [0.5], "std": [0.25], "interpolation": "bilinear", "channels": 3}


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Twenty numbers, and a hidden layer, so that rounding shows."""
    return write_tiny(tmp_path_factory.mktemp("plain") / "model", hidden=64)


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    features = [feature.to_dict() for feature in FEATURES]
    return write_tiny(tmp_path_factory.mktemp("table") / "model", shape=(4,), features=features)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("pictures") / "model", shape=(3, 8, 8), images=IMAGES)


def picture(seed=0, kind="PNG"):
    made = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 10, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(made, kind)
    return made.getvalue(), pixels


def joined(parts):
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 499), unique=True, max_size=8))
def test_rows_get_the_same_answer_in_any_batch(plain, cuts):
    x, predictor = numbers(500), BatchPredictor(plain)
    expected = ExportedModel(plain).predict(x)
    found = joined([predictor({"input": part}) for part in np.split(x, sorted(cuts))])
    assert list(found) == [
        "class", "class_name", "probabilities", "set", "known_p", "known", "energy", "joint", "error"
    ]  # fmt: skip
    for name in ("class", "probabilities", "known_p", "known", "energy", "joint"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    assert found["set"].tolist() == [" ".join(map(str, np.flatnonzero(row))) for row in expected["set"]]
    assert found["class_name"].tolist() == [["cat", "dog", "owl"][c] for c in expected["class"]]
    assert set(found["error"]) == {""}


def test_columns_are_stacked_and_kept_and_chosen(plain):
    x = numbers(5)
    names = [f"x{i}" for i in range(20)]
    batch = {name: x[:, i] for i, name in enumerate(names)} | {"key": np.array(list("abcde"), dtype=object)}
    predictor = BatchPredictor(plain, columns=names, keep=["key"], scores=["joint"], class_columns=True)
    found = predictor(batch)
    assert list(found) == [
        "key", "class", "class_name", "probabilities_cat", "probabilities_dog", "probabilities_owl", "set", "known_p",
        "known", "joint", "error",
    ]  # fmt: skip
    np.testing.assert_array_equal(found["joint"], ExportedModel(plain).predict(x)["joint"])
    listed = np.empty(5, dtype=object)
    listed[:] = [row.tolist() for row in x]  # lists, as tables of Parquet have them
    assert_same(BatchPredictor(plain, columns="v")({"v": listed}), BatchPredictor(plain)({"input": x}))


def test_a_bad_row_has_an_error_and_the_others_their_answers(plain):
    x = numbers(6)
    cells = np.empty(6, dtype=object)
    cells[:] = [row.tolist() for row in x]
    cells[1], cells[4] = [1.0, 2.0], ["many"] * 20
    predictor = BatchPredictor(plain)
    found = predictor({"input": cells})
    assert [bool(text) for text in found["error"]] == [False, True, False, False, True, False]
    assert "(B, 20), got (1, 2)" in found["error"][1]
    for row in (1, 4):
        assert not found["known"][row]
        assert (found["class"][row], found["class_name"][row], found["set"][row]) == (-1, "", "0 1 2")
        assert np.isnan(found["probabilities"][row]).all()
        assert found["known_p"][row] == 0
    good = [0, 2, 3, 5]
    assert_same({n: v[good] for n, v in found.items()}, predictor({"input": x[good]}))
    every = predictor({"input": cells[[1, 4]]})
    assert not every["known"].any()
    assert every["probabilities"].dtype == np.float32
    files = np.array([f"{letter}.parquet" for letter in "abcdef"], dtype=object)
    with pytest.raises(ValueError, match=r"row 1 of the batch, file b.parquet: expected input of the shape"):
        BatchPredictor(plain, on_error="raise")({"input": cells, "file": files})


def test_an_empty_batch_has_the_same_columns(plain, table):
    predictor = BatchPredictor(plain)
    empty, some = predictor({"input": np.empty((0, 20), np.float32)}), predictor({"input": numbers(3)})
    assert {n: (v.dtype, v.shape[1:]) for n, v in empty.items()} == {n: (v.dtype, v.shape[1:]) for n, v in some.items()}
    assert len(empty["class"]) == 0


def test_rows_of_a_table(table):
    batch = {
        "age": np.array([20.0, np.nan, 61.5, np.inf, 33.0]),
        "plan": np.array(["basic", "pro", None, "basic", "pro"], dtype=object),
        "since": np.array(["2024-01-31", "2020-02-02", "1999-12-31", "2001-01-01", "soon"], dtype=object),
    }
    found = BatchPredictor(table)(batch)
    rows = [dict(zip(batch, cells, strict=True)) for cells in zip(*(v.tolist() for v in batch.values()), strict=True)]
    expected = ExportedModel(table).predict_rows(rows[:3])
    np.testing.assert_array_equal(found["joint"][:3], expected["joint"])
    assert found["error"][:3].tolist() == [""] * 3
    assert "finite number in column 'age'" in found["error"][3]
    assert "expected a date such as 2024-12-31, got 'soon'" in found["error"][4]
    with pytest.raises(ValueError, match="expected the columns age, plan, since, got age: add 'plan'"):
        BatchPredictor(table)({"age": batch["age"]})


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e9, 1e9) | st.just(float("nan")), min_size=1, max_size=20))
def test_numbers_are_encoded_as_their_texts_are(values):
    features = FEATURES[:2]
    fast = encode_columns(features, {"age": np.array(values)})
    np.testing.assert_array_equal(fast, encode_rows(features, [{"age": value} for value in values]))


def test_images_as_bytes_paths_and_pixels(pictures, tmp_path):
    files, pixels = zip(*(picture(seed) for seed in range(4)), strict=True)
    paths = [tmp_path / f"{i}.png" for i in range(4)]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(file)
    model = ExportedModel(pictures)
    expected = model.predict_images(files)
    predictor = BatchPredictor(pictures)
    columns = {"bytes": files, "path": [str(path) for path in paths], "image": pixels}
    for name, cells in columns.items():
        column = np.empty(4, dtype=object)
        column[:] = list(cells)
        np.testing.assert_array_equal(predictor({name: column})["joint"], expected["joint"], err_msg=name)
    np.testing.assert_array_equal(predictor({"image": np.stack(pixels)})["joint"], expected["joint"])
    prepared = np.stack([model.images(file) for file in files])  # a network's own input, prepared elsewhere
    np.testing.assert_array_equal(predictor({"input": prepared})["joint"], expected["joint"])


def test_a_corrupt_image_is_a_row_with_an_error_or_ends_the_work_with_its_name(pictures, tmp_path):
    good, _ = picture()
    for name, content in {"good": good, "cut": good[:60], "text": b"no image"}.items():
        (tmp_path / name).write_bytes(content)
    paths = np.array([str(tmp_path / name) for name in ("good", "cut", "text", "gone")], dtype=object)
    found = BatchPredictor(pictures, keep=["path"])({"path": paths})
    assert [bool(text) for text in found["error"]] == [False, True, True, True]
    assert "No such file" in found["error"][3]
    assert not found["known"][1:].any()
    with pytest.raises(ValueError, match=rf"row 1 of the batch, path {tmp_path}/cut: expected an image"):
        BatchPredictor(pictures, on_error="raise")({"path": paths})


def test_it_is_pickled_by_its_settings_and_loads_once(plain):
    predictor = BatchPredictor(plain, scores=["energy"])
    expected = predictor({"input": numbers(4)})
    assert predictor.model is predictor.model
    sent = pickle.dumps(predictor)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert "model" not in again.__dict__
    assert_same(again({"input": numbers(4)}), expected)


def test_what_is_wrong_is_said(plain, tmp_path):
    with pytest.raises(ValueError, match="got CUDA: install the package that has them"):
        BatchPredictor(plain, providers=("CUDA", "CPU"))({"input": numbers(2)})
    assert provider_names(("cuda", "CPUExecutionProvider"), ["CUDAExecutionProvider", "CPUExecutionProvider"]) == [
        "CUDAExecutionProvider", "CPUExecutionProvider"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"scores of the model \(energy, joint\), got knn"):
        BatchPredictor(plain, scores=["knn"])({"input": numbers(2)})
    with pytest.raises(ValueError, match="to keep, got no 'id'"):
        BatchPredictor(plain, keep=["id"])({"input": numbers(2)})
    with pytest.raises(ValueError, match="columns of one length"):
        BatchPredictor(plain)({"input": numbers(2), "id": np.arange(3)})
    with pytest.raises(ValueError, match="got 'class': rename it"):
        BatchPredictor(plain, keep=["class"])({"input": numbers(2), "class": np.arange(2)})
    with pytest.raises(FileNotFoundError, match="expected the folder of an exported model"):
        BatchPredictor(tmp_path / "gone")({"input": numbers(2)})
    with pytest.raises(ValueError, match="expected on_error"):
        BatchPredictor(plain, on_error="ignore")
    other = write_tiny(tmp_path / "other", format=99)
    with pytest.raises(ValueError, match=r"expected format 1 in .*, got 99: export the model again"):
        BatchPredictor(other)({"input": numbers(2)})


def test_nothing_of_it_imports_torch(plain):
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in "torch torchvision sklearn scipy pytorch_lightning lightning".split():
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Refuse())
import numpy as np, brainet_pl
print(brainet_pl.BatchPredictor(sys.argv[1])({"input": np.ones((3, 20))})["class"].tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(plain)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("[")


@pytest.mark.integration
def test_a_tree_answers_to_the_last_bit_whatever_the_batches(tmp_path, quiet_trainer):
    from brainet_pl import BRAINet, export_folder
    from brainet_pl._utils.framework import pl
    from brainet_pl.callbacks import StructureLearning
    from brainet_pl.datamodules import Digits
    from brainet_pl.network import Tree

    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=Tree(num_params=4000), passes=8, lr=0.01)
    quiet_trainer(tmp_path, StructureLearning(threshold=0.2)).fit(model, datamodule=Digits())
    folder = export_folder(model.eval(), tmp_path / "model")
    x = np.random.default_rng(0).random((301, 64)).astype(np.float32)
    exported, predictor = ExportedModel(folder, 1), BatchPredictor(folder)
    expected = exported.predict(x)
    for size in (1, 2, 7, 64, 300, 301):  # the last batch is ragged, of 300 a single row
        found = joined([predictor({"input": x[i : i + size]}) for i in range(0, 301, size)])
        for name in set(expected) & set(found) - {"set"}:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{name} of {size}")
    alone = [exported.predict(x[i : i + 1])["energy"][0] for i in range(301)]
    assert (alone != expected["energy"]).any()  # why a lone row is given company
