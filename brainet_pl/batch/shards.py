"""A folder of Parquet files, one a shard, that processes of many machines write without a word to each other.

A shard is written under a hidden name and renamed when it is whole; then a file about it, with its digest, goes to
`_shards`. Readers of such folders pass over names of both kinds. A job that is started again goes on with the shards
that nothing is said about. Whoever sees the last shard finished writes `_manifest.json`: the same whoever it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from brainet_pl._utils.atomic import atomic_write
from brainet_pl.batch.sources import Columns, Piece, Source

FORMAT = 1
PLAN, MANIFEST, SHARDS = "_plan.json", "_manifest.json", "_shards"
GROUP = 65_536  # rows that are held until they are written together
CHUNK = 1 << 20  # bytes that are hashed at a time

Work = Callable[[Columns], Columns]


@dataclass(frozen=True)
class Shard:
    """What is known of a finished shard.

    Attributes:
        file: its name.
        rows: how many it has.
        errors: rows that could not be read.
        unknown: rows that the model does not know, those with an error included.
        bytes: its size.
        sha256: its digest.
    """

    file: str
    rows: int
    errors: int
    unknown: int
    bytes: int
    sha256: str


def write_shards(
    source: Source, work: Work, folder: str | Path, shards: int, *, part: tuple[int, int] = (0, 1), batch: int = 1024,
    facts: Mapping[str, Any],
) -> list[Shard]:  # fmt: skip
    """Write what `work` makes of the source's batches, one file a shard; finished shards are left as they are.

    Args:
        source: the data.
        work: columns of a batch → columns of as many rows.
        folder: of the files, the same for all processes.
        shards: the number of files.
        part: (k, n) writes every n-th shard, beginning with the k-th: one of n processes.
        batch: rows that are worked on at a time.
        facts: what the work depends on, such as the digest of its model; a folder of other facts is refused.

    Returns:
        The shards that are finished, whoever wrote them.
    """
    place = Path(folder)
    pieces = source.split(shards)
    _agree(place, {"format": FORMAT, "shards": shards, **source.facts(), **facts})
    for i in range(part[0], shards, part[1]):
        if _finished(place, i, shards) is None:
            _write(source, pieces[i], work, place, _name(i, shards), batch)
    finished = [shard for i in range(shards) if (shard := _described(place, i, shards)) is not None]
    if len(finished) == shards:
        _write_json(place / MANIFEST, {**_read_json(place / PLAN), **_total(finished), "parts": finished})
    return finished


def read_manifest(folder: str | Path, verify: bool = True) -> dict[str, Any]:
    """The manifest of a finished folder, its files compared with it.

    Args:
        folder: what `write_shards` wrote.
        verify: also compare the digests, for which all files are read.
    """
    place = Path(folder)
    if not (place / MANIFEST).is_file():
        raise FileNotFoundError(f"expected a finished folder of shards, found no {place / MANIFEST}: finish it first")
    manifest = _read_json(place / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"expected format {FORMAT} in {place / MANIFEST}, got {manifest.get('format')}: write it again"
        )
    for one in manifest["parts"]:
        file = place / one["file"]
        if not file.is_file() or file.stat().st_size != one["bytes"] or (verify and digest(file) != one["sha256"]):
            raise ValueError(f"expected {file} as the manifest describes it, got another or none: write it again")
    return manifest


def digest(path: Path) -> str:
    """The SHA-256 of a file that need not fit into memory."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _name(shard: int, shards: int) -> str:
    return f"part-{shard:05d}-of-{shards:05d}.parquet"


def _agree(place: Path, plan: dict[str, Any]) -> None:
    """Write the plan, or see that the folder has the same one."""
    path, wanted = place / PLAN, json.loads(json.dumps(plan))
    if not path.is_file():
        others = [one.name for one in place.iterdir() if one.suffix == ".parquet"] if place.is_dir() else []
        if others:
            raise ValueError(f"expected an empty folder or one with a plan, got {place} with {others[0]}: name another")
        _write_json(path, wanted)
    written = _read_json(path)
    different = [name for name in {**wanted, **written} if wanted.get(name) != written.get(name)]
    if different:
        raise ValueError(
            f"expected the same work as in {path} to go on with it, got other {', '.join(sorted(different))}: name "
            "another folder, or repeat the former command"
        )


def _described(place: Path, shard: int, shards: int) -> Shard | None:
    path = place / SHARDS / f"{shard:05d}.json"
    return Shard(**_read_json(path)) if path.is_file() and (place / _name(shard, shards)).is_file() else None


def _finished(place: Path, shard: int, shards: int) -> Shard | None:
    """A shard that is there and is what was written."""
    described = _described(place, shard, shards)
    return described if described is not None and digest(place / described.file) == described.sha256 else None


def _write(source: Source, pieces: Sequence[Piece], work: Work, place: Path, name: str, batch: int) -> None:
    """One shard: the file first, and then the line that says that it is finished."""
    counts = {"rows": 0, "errors": 0, "unknown": 0}

    def answers() -> Iterable[Columns]:
        for columns in source.read(pieces, batch):
            found = work(columns)
            counts["rows"] += len(next(iter(found.values())))
            counts["errors"] += int((found["error"] != "").sum()) if "error" in found else 0
            counts["unknown"] += int((~found["known"]).sum()) if "known" in found else 0
            yield found

    with atomic_write(place / name) as temporary:
        write_parquet(temporary, answers(), source.types)
        described = Shard(name, **counts, bytes=temporary.stat().st_size, sha256=digest(temporary))
    _write_json(place / SHARDS / f"{int(name[5:10]):05d}.json", asdict(described))


def write_parquet(path: Path, batches: Iterable[Columns], types: Mapping[str, Any]) -> None:
    """Columns of batches to one file, so many rows at a time; `types` are Arrow's, of columns that have one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, waiting, rows = None, [], 0
    try:
        for columns in batches:
            waiting.append(_table(columns, types))
            rows += waiting[-1].num_rows
            if writer is None:
                schema = waiting[0].schema
                texts = [field.name for field in schema if pa.types.is_string(field.type)]
                writer = pq.ParquetWriter(path, schema, use_dictionary=texts)  # few numbers of an answer are equal
            if rows >= GROUP:
                writer.write_table(pa.concat_tables(waiting))
                waiting, rows = [], 0
        if writer is not None:
            writer.write_table(pa.concat_tables(waiting) if waiting else writer.schema.empty_table())
    finally:
        if writer is not None:
            writer.close()


def _table(columns: Columns, types: Mapping[str, Any]) -> Any:
    """Columns as Arrow has them, (B, n) as lists of n; those of the input as they were there."""
    import pyarrow as pa

    arrays = {}
    for name, values in columns.items():
        if values.ndim == 2:
            flat = pa.array(np.ascontiguousarray(values).reshape(-1))
            arrays[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        else:
            texts = pa.string() if values.dtype == object else None
            cells = values.tolist() if values.dtype == object else values
            arrays[name] = pa.array(cells, types.get(name, texts))
    return pa.table(arrays)


def _total(shards: Sequence[Shard]) -> dict[str, int]:
    return {name: sum(getattr(shard, name) for shard in shards) for name in ("rows", "errors", "unknown", "bytes")}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, default=asdict, indent=1), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, got {error}: begin with an empty folder") from error
    return found
