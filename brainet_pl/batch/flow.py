"""The folder of an exported model as a model of MLflow: with a signature, an example, and flat tables as answers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brainet_pl.batch.predictor import BatchPredictor, columns_of_frame, frame_of_columns
from brainet_pl.serving.folder import EXAMPLE

PACKAGE = Path(__file__).parents[1]
CARRIED = (
    "_utils",
    "monitoring",
    "tables",
    "serving",
    "batch",
)  # the rooms that run an exported folder; none needs torch


def save_mlflow(folder: str | Path, path: str | Path) -> Path:
    """Write an exported folder as a model of MLflow, `mlflow.pyfunc.load_model(path)`, that needs no torch.

    Its `predict` takes a table of pandas and gives one, with a row each: the columns of `BatchPredictor`. A model of
    images takes a column `bytes` of image files, one that was fitted on a table its columns, any other a column of
    lists for each of its inputs. The signature says so, and `mlflow.pyfunc.spark_udf` reads it. Nothing is pickled. The
    source files that run it go along, so that no package is needed but numpy, onnxruntime, pandas, msgspec and, for
    images, Pillow.

    Args:
        folder: what `export_folder` wrote.
        path: a folder that is not there yet.
    """
    try:
        from mlflow import pyfunc
        from mlflow.models import ModelSignature
    except ImportError as error:
        raise ImportError(
            f"MLflow models need more packages ({error.name}): pip install 'brainet_pl[mlflow]'"
        ) from error
    predictor = BatchPredictor(folder)
    inputs, outputs = _input_schema(predictor), _output_schema(predictor)
    images = ["pillow"] if predictor.model.images is not None else []
    with tempfile.TemporaryDirectory() as scratch:
        code = Path(scratch) / PACKAGE.name
        for name in CARRIED:
            shutil.copytree(PACKAGE / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(PACKAGE / "__init__.py", code)
        pyfunc.save_model(
            str(path),
            loader_module=__name__,
            data_path=str(folder),
            code_paths=[str(code)],
            pip_requirements=["numpy", "onnxruntime", "pandas", "msgspec>=0.22", *images],
            signature=ModelSignature(inputs=inputs, outputs=outputs),
            input_example=_example(predictor),
        )
    return Path(path)


def _input_schema(predictor: BatchPredictor) -> Any:
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import Array

    model = predictor.model
    if model.features is not None:
        numbers = {feature.column for feature in model.features if feature.kind == "number"}
        kinds = {n: DataType.double if n in numbers else DataType.string for n in predictor.reads(())}
        optional = {feature.column: feature.fill is None for feature in model.features if feature.kind == "number"}
        return Schema([ColSpec(kind, name, required=optional.get(name, False)) for name, kind in kinds.items()])
    if model.images is not None:
        return Schema([ColSpec(DataType.binary, "bytes")])
    columns = []
    for one in model.inputs:
        kind: Any = DataType.double if one["dtype"].startswith("float") else DataType.long
        for _ in one["shape"][1:]:
            kind = Array(kind)
        columns.append(ColSpec(kind, one["name"]))
    return Schema(columns)


def _output_schema(predictor: BatchPredictor) -> Any:
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import Array

    kinds = {"int64": DataType.long, "int32": DataType.integer, "float32": DataType.float, "float64": DataType.double,
             "bool": DataType.boolean}  # fmt: skip
    columns = []
    for name, (kind, listed) in predictor.answer_types().items():
        plain = kinds.get(kind, DataType.string)
        columns.append(ColSpec(Array(plain) if listed else plain, name))
    return Schema(columns)


def _example(predictor: BatchPredictor) -> Any:
    """A table of one row, where the folder has one that a table can hold."""
    import pandas as pd

    model = predictor.model
    path = model.folder / EXAMPLE
    if model.features is not None or model.images is not None or not path.is_file():
        return None  # what an example of the graph was made of is not in the folder
    with np.load(path) as stored:
        return pd.DataFrame({one["name"]: [stored[one["name"]][0].tolist()] for one in model.inputs})


def _load_pyfunc(path: str) -> MlflowModel:
    """What MLflow calls with the folder that `save_mlflow` was given."""
    return MlflowModel(BatchPredictor(path))


class MlflowModel:
    """An exported model as MLflow wants it."""

    def __init__(self, predictor: BatchPredictor) -> None:
        self.predictor = predictor

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """A table of pandas → a table of answers."""
        return frame_of_columns(self.predictor(columns_of_frame(data)))
