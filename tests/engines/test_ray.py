"""Ray Data: two workers, a ragged last batch, a killed worker; each row once, with the answer of one process."""

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("onnx")
import pyarrow.dataset as ds
import ray
from marked import Marked, kill_one

from brainet_pl.batch import BatchPredictor
from brainet_pl.serving import ExportedModel

NAMES = [f"x{j}" for j in range(20)]


def start(tries=3):
    """Ray waits 30 seconds for its own processes, which a busy machine may need longer for."""
    for left in reversed(range(tries)):
        try:
            ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
            return
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise


@pytest.fixture(scope="module")
def cluster():
    """Four logical processors whatever the machine has: two are held by the workers, the others read."""
    start()
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def table_of(dataset):
    parts = [part for part in dataset.iter_batches(batch_size=None) if len(part["id"])]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["id"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def check(found, expected):
    np.testing.assert_array_equal(found["id"], np.arange(len(expected["joint"])))  # each row once
    for name in ("class", "known", "known_p", "energy", "joint"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    np.testing.assert_array_equal(np.stack(found["probabilities"]), expected["probabilities"])
    assert set(found["error"]) == {""}


def test_two_workers_and_one_that_is_killed(cluster, plain, rows, tmp_path):
    table, x = rows
    settings = {"folder": str(plain), "marks": str(tmp_path), "columns": NAMES, "keep": ["id"]}
    blocks = ray.data.read_parquet(str(table)).repartition(12)  # a small table would be one block, for one worker
    dataset = blocks.map_batches(Marked, fn_constructor_kwargs=settings, batch_size=128, concurrency=2)
    killed = kill_one(tmp_path)
    found = table_of(dataset)
    assert killed
    workers = {int(path.name) for path in tmp_path.iterdir()}
    assert len(workers) >= 3  # two, and the one that took the place of the killed one
    check(found, ExportedModel(plain).predict(x))


def test_images_as_ray_reads_them(cluster, tmp_path, guide):
    from PIL import Image
    from tiny_folder import write_tiny

    steps = {"resize": 8, "crop": 8, "mean": [0.5], "std": [0.25], "interpolation": "bilinear", "channels": 3}
    folder = write_tiny(tmp_path / "model", shape=(3, 8, 8), images=steps)
    (tmp_path / "images").mkdir()
    for i in range(6):
        pixels = np.random.default_rng(i).integers(0, 256, (9 + i, 12, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    paths = sorted((tmp_path / "images").iterdir())
    expected = ExportedModel(folder).predict_images([path.read_bytes() for path in paths])["joint"]
    settings = {"folder": str(folder), "keep": ["path"]}
    dataset = ray.data.read_images(str(tmp_path / "images"), include_paths=True)
    answers = dataset.map_batches(BatchPredictor, fn_constructor_kwargs=settings, batch_size=4, concurrency=1)
    found = {row["path"]: row["joint"] for row in answers.take_all()}
    np.testing.assert_array_equal([found[str(path)] for path in paths], expected)

    code = guide("import ray").replace("ray.init(num_cpus=4)\n", "")
    for name in ("images/", "model", "answers"):  # workers have another folder
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', repr(str(tmp_path / name)))
    exec(compile(code, "batches.md", "exec"), {})
    table = ds.dataset(tmp_path / "answers").to_table().to_pydict()
    found = dict(zip(table["path"], table["joint"], strict=True))
    np.testing.assert_array_equal([found[str(path)] for path in paths], expected)
