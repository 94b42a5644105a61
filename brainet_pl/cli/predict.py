"""`brainet predict FOLDER --format parquet`: an exported model over tables, tar files or images, to shards."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from brainet_pl._utils.checks import UsageError
from brainet_pl.batch.predictor import BatchPredictor
from brainet_pl.batch.shards import Shard, write_shards
from brainet_pl.batch.sources import ParquetTables, open_source

PARQUET = "parquet"


def wanted(words: Sequence[str]) -> bool:
    """Whether a command asks for shards: `--format parquet`; csv is what Lightning's `predict` writes."""
    given = [word for i, word in enumerate(words) if word.startswith("--format=") or words[i - 1 : i] == ["--format"]]
    return any(word.rpartition("=")[2] == PARQUET for word in given)


def main(args: Sequence[str]) -> None:
    """`brainet predict FOLDER --format parquet --input DATA --out DIR --shards N`."""
    parser = argparse.ArgumentParser(
        "brainet predict",
        description="Predict tables of Parquet, tar files or a folder of images with an exported model, to a folder of "
        "Parquet files, one a shard. Several processes share the work by --part. A command that is repeated after it "
        "was killed goes on with the shards that are not finished.",
    )
    parser.add_argument("model", help="a folder that `brainet export` wrote")
    parser.add_argument(
        "--format", choices=(PARQUET,), required=True, help="parquet; without it, a CSV of a checkpoint"
    )
    add_sharing(parser)
    parser.add_argument("--columns", help="columns with the input, with commas; found by their names without")
    parser.add_argument("--keep", default="", help="columns of the input that the answers have too, with commas")
    parser.add_argument("--scores", help="scores that are written, with commas; all without")
    parser.add_argument("--class_columns", action="store_true", help="a column of probabilities for each class")
    parser.add_argument(
        "--on_error", choices=("row", "raise"), default="row", help="what a row that can't be read does"
    )
    parser.add_argument("--providers", default="CPU", help="of onnxruntime, with commas: CUDA,CPU; CPU")
    parser.add_argument("--threads", type=int, help="of onnxruntime; its own choice")
    words = parser.parse_args(args)
    part = part_of(words)
    columns = None if words.columns is None else words.columns.split(",")
    predictor = BatchPredictor(
        words.model,
        columns=columns[0] if columns is not None and len(columns) == 1 else columns,
        scores=None if words.scores is None else words.scores.split(","),
        class_columns=words.class_columns,
        on_error=words.on_error,
        providers=words.providers.split(","),
        threads=words.threads,
    )
    _run(predictor, words, [name for name in words.keep.split(",") if name], part)


def _run(predictor: BatchPredictor, words: argparse.Namespace, keep: Sequence[str], part: tuple[int, int]) -> None:
    source = open_source(words.input)
    predictor.keep = (*source.key, *keep)
    if isinstance(source, ParquetTables):
        source = open_source(words.input, [*predictor.reads(source.names), *keep])
    facts = {"model": predictor.model.about["sha256"], "settings": predictor.answer_settings()}
    found = write_shards(source, predictor, words.out, words.shards, part=part, batch=words.batch_size, facts=facts)
    print(summary(words, found))


def add_sharing(parser: argparse.ArgumentParser) -> None:
    """The words of all commands that write shards."""
    parser.add_argument("--input", required=True, help="a .parquet or .tar file, a folder of such, or one of images")
    parser.add_argument("--out", required=True, help="the folder of the shards")
    parser.add_argument("--shards", type=int, required=True, help="the number of files")
    parser.add_argument("--part", default="0/1", help="K/N is the K-th of N processes, from 0; 0/1")
    parser.add_argument("--batch_size", type=int, default=1024, help="rows that are predicted at a time; 1024")


def part_of(words: argparse.Namespace) -> tuple[int, int]:
    """Which of how many processes this is; refuses numbers that can't be, and a machine without pyarrow."""
    if words.shards < 1 or words.batch_size < 1:
        raise UsageError(f"expected at least 1 shard and 1 row, got {words.shards} and {words.batch_size}")
    found = re.fullmatch(r"(\d+)/(\d+)", words.part)
    if found is None or int(found[1]) >= int(found[2]):
        raise UsageError(f"expected --part as K/N with K from 0 to N - 1, such as 0/4, got {words.part!r}")
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(f"shards need more packages ({error.name}): pip install 'brainet_pl[parquet]'") from error
    return int(found[1]), int(found[2])


def summary(words: argparse.Namespace, found: Sequence[Shard]) -> str:
    """What is finished, whoever wrote it."""
    rows, errors, unknown = (sum(getattr(one, name) for one in found) for name in ("rows", "errors", "unknown"))
    finished = f"{len(found)} of {words.shards} shards finished"
    looks = f", {unknown:,} look unknown" if unknown else ""
    return f"{words.out}: {finished}, {rows:,} rows{looks}, {errors:,} can't be read"
