"""An exported model over many machines: a function of batches for Ray and Spark, and shards of Parquet files.

Imports `serving` and what lies below it, and never torch. pyarrow, Ray, PySpark and MLflow are extras.
"""

from brainet_pl.batch.predictor import BatchPredictor

__all__ = ["BatchPredictor"]
