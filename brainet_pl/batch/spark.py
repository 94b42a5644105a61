"""An exported model on tables of Spark: `predict_frame`, and the types of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from brainet_pl.batch.predictor import BatchPredictor, columns_of_frame, frame_of_columns


def predict_frame(frame: Any, predictor: BatchPredictor) -> Any:
    """A DataFrame of Spark → one with the kept columns and the answers, a row each.

    Each worker loads the model once. The number of rows in a batch is Spark's, `spark.sql.execution.arrow.
    maxRecordsPerBatch`: 10,000, which is too many for images.

    Args:
        frame: with the columns that the predictor reads and keeps.
        predictor: is sent to the workers, as settings.
    """
    from pyspark.sql.types import StructType

    names = predictor.reads(frame.columns)
    missing = [name for name in (*names, *predictor.keep) if name not in frame.columns]
    if missing:
        raise ValueError(f"expected the column {missing[0]!r}, got {', '.join(frame.columns)}: add it to the table")
    kept = StructType([frame.schema[name] for name in predictor.keep])
    schema = StructType([*kept.fields, *answer_schema(predictor).fields])

    def predict(parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            yield frame_of_columns(predictor(columns_of_frame(part)))

    return frame.select(*dict.fromkeys((*predictor.keep, *names))).mapInPandas(predict, schema)


def answer_schema(predictor: BatchPredictor) -> Any:
    """The columns of an answer, but for those that are kept, as Spark has types: a `StructType`."""
    from pyspark.sql.types import StructType

    kinds = {"int64": "bigint", "int32": "int", "float32": "float", "float64": "double", "bool": "boolean"}
    texts = []
    for name, (kind, listed) in predictor.answer_types().items():
        plain = kinds.get(kind, "string")
        texts.append(f"`{name}` {f'array<{plain}>' if listed else plain}")
    return StructType.fromDDL(", ".join(texts))
