"""Columns of tables: what their cells mean, and how they become numbers.

One reader for data frames, CSV files, estimators, graphs and exported models; numpy alone.
"""

from brainet_pl.tables.column import Column, Encoded
from brainet_pl.tables.frame import encode_frame, is_frame, read_frame
from brainet_pl.tables.read import MOST_CATEGORIES, read_column

__all__ = ["MOST_CATEGORIES", "Column", "Encoded", "encode_frame", "is_frame", "read_column", "read_frame"]
