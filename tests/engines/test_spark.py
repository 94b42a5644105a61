"""Spark and MLflow: two workers, a killed one, flat tables; a model of MLflow where nothing of this package is."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("mlflow.pyfunc")
pytest.importorskip("onnx")
import pandas as pd
from marked import Marked, kill_one
from pyspark.sql import SparkSession

from brainet_pl.batch import BatchPredictor
from brainet_pl.batch.flow import save_mlflow
from brainet_pl.batch.spark import answer_schema, predict_frame
from brainet_pl.serving import ExportedModel
from brainet_pl.serving.tables import Feature

NAMES = [f"x{j}" for j in range(20)]


@pytest.fixture(scope="module")
def spark():
    """Two workers; a task is tried four times, where Spark on one machine would try once."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false", "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "128", "spark.sql.shuffle.partitions": "2",
        "spark.sql.files.maxPartitionBytes": "400000", "spark.sql.files.openCostInBytes": "0",
    }  # fmt: skip
    builder = SparkSession.builder.master("local[2,4]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


def check(found, expected):
    found = found.sort_values("id", kind="stable")
    np.testing.assert_array_equal(found["id"], np.arange(len(expected["joint"])))  # each row once
    for name in ("class", "known", "known_p", "energy", "joint"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    np.testing.assert_array_equal(np.stack(found["probabilities"]), expected["probabilities"])
    assert set(found["error"]) == {""}


def test_two_workers_and_one_that_is_killed(spark, plain, rows, tmp_path):
    table, x = rows
    predictor = Marked(plain, str(tmp_path), columns=NAMES, keep=["id"])
    killed = kill_one(tmp_path)
    found = predict_frame(spark.read.parquet(str(table)), predictor).toPandas()
    assert killed
    assert len(list(tmp_path.iterdir())) >= 2
    check(found, ExportedModel(plain).predict(x))
    with pytest.raises(ValueError, match="expected the column 'x0', got a"):
        predict_frame(spark.createDataFrame(pd.DataFrame({"a": [1]})), predictor)


def test_predict_batch_udf(spark, plain, rows):
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.functions import array
    from pyspark.sql.types import StructType

    table, x = rows
    predictor = BatchPredictor(plain)
    names = ("class", "known_p", "probabilities")

    def load():
        def predict(inputs):
            found = predictor({"input": inputs})
            return {name: found[name] for name in names}

        return predict

    schema = StructType([answer_schema(predictor)[name] for name in names])
    ask = predict_batch_udf(load, return_type=schema, batch_size=512, input_tensor_shapes=[[20]])
    answers = spark.read.parquet(str(table)).select("id", ask(array(*NAMES)).alias("a")).select("id", "a.*")
    found, expected = answers.toPandas().sort_values("id"), ExportedModel(plain).predict(x)
    assert found["id"].tolist() == list(range(len(x)))
    for name in names:
        np.testing.assert_array_equal(np.stack(found[name]), expected[name], err_msg=name)


def test_a_model_of_mlflow_in_spark_and_without_this_package(spark, plain, rows, tmp_path):
    from mlflow import pyfunc
    from pyspark.sql.functions import array, struct

    table, x = rows
    expected = ExportedModel(plain).predict(x)
    place = save_mlflow(plain, tmp_path / "flow")
    assert not list(place.rglob("*.pkl"))
    needed = (place / "requirements.txt").read_text()
    assert "torch" not in needed
    assert "brainet" not in needed
    described = pyfunc.load_model(str(place)).metadata
    assert described.signature.outputs.input_names()[:3] == ["class", "class_name", "probabilities"]
    assert described.saved_input_example_info is not None
    ask = pyfunc.spark_udf(spark, str(place), env_manager="local")
    frame = spark.read.parquet(str(table))
    answers = frame.select("id", ask(struct(array(*NAMES).alias("input"))).alias("a")).select("id", "a.*")
    check(answers.toPandas(), expected)
    code = """
import importlib.util, json, sys
assert importlib.util.find_spec("brainet_pl") is None
import pandas as pd
from mlflow import pyfunc
frame = pyfunc.load_model(sys.argv[1]).predict(pd.DataFrame({"input": json.loads(sys.stdin.read())}))
assert "torch" not in sys.modules
print(frame.to_json())
"""
    around = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = subprocess.run([sys.executable, "-c", code, str(place)], input=json.dumps(x[:5].tolist()),
                           env=around, cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert alone.returncode == 0, alone.stderr[-3000:]
    found = pd.DataFrame(json.loads(alone.stdout.splitlines()[-1]))
    np.testing.assert_allclose(found["joint"], expected["joint"][:5], rtol=1e-6)


def test_images_and_tables_have_signatures(tmp_path):
    from mlflow import pyfunc
    from PIL import Image
    from tiny_folder import write_tiny

    steps = {"resize": 8, "crop": 8, "mean": [0.5], "std": [0.25], "interpolation": "bilinear", "channels": 3}
    folder = write_tiny(tmp_path / "images", shape=(3, 8, 8), images=steps)
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(tmp_path / "a.png")
    file = (tmp_path / "a.png").read_bytes()
    model = pyfunc.load_model(str(save_mlflow(folder, tmp_path / "image_flow")))
    found = model.predict(pd.DataFrame({"bytes": [file, file[:30]]}))
    assert found["joint"][0] == ExportedModel(folder).predict_images([file, file])["joint"][0]
    assert "expected an image" in found["error"][1]

    features = [Feature("age", fill=40.0), Feature("plan", "category", "pro"), Feature("age", "missing")]
    folder = write_tiny(tmp_path / "table", shape=(3,), features=[one.to_dict() for one in features])
    model = pyfunc.load_model(str(save_mlflow(folder, tmp_path / "table_flow")))
    found = model.predict(pd.DataFrame({"age": [1.0, None], "plan": ["pro", None]}))
    expected = ExportedModel(folder).predict_rows([{"age": 1.0, "plan": "pro"}, {"age": None, "plan": None}])
    np.testing.assert_array_equal(found["joint"], expected["joint"])


def test_the_guide(spark, tmp_path, guide):
    from tiny_folder import write_tiny

    features = [Feature("age", fill=40.0), Feature("plan", "category", "pro")]
    folder = write_tiny(tmp_path / "model", shape=(2,), features=[one.to_dict() for one in features])
    table = pd.DataFrame({"id": range(5), "age": [1.0, 2.0, None, 4.0, 5.0], "plan": ["pro", "no", "pro", None, "x"]})
    table.to_parquet(tmp_path / "table.parquet")
    code = guide("from pyspark.sql")  # Spark's folder is the one that it was started in
    for name in ("table.parquet", "model", "answers"):
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', repr(str(tmp_path / name)))
    exec(compile(code, "batches.md", "exec"), {})
    found = pd.read_parquet(tmp_path / "answers").sort_values("id")
    rows = [
        {"age": None if np.isnan(age) else age, "plan": plan}
        for age, plan in zip(table["age"], table["plan"], strict=True)
    ]
    expected = ExportedModel(folder).predict_rows(rows)
    np.testing.assert_array_equal(found["joint"], expected["joint"])
