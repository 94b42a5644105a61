"""What is predicted or extracted, in pieces that can be read alone: tables of Parquet, tar files, folders of images."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # of images


class Piece(NamedTuple):
    """Rows of a file: from `start` until before `stop`; of a whole tar file, `stop` is None."""

    file: int
    start: int
    stop: int | None


class Source(Protocol):
    """Data that is cut into pieces, each of which is read alone.

    Attributes:
        files: paths, in the order of their rows.
        key: columns that say which row an answer belongs to.
        types: Arrow's types of columns, where they are known.
    """

    files: Sequence[Path]
    key: tuple[str, ...]
    types: dict[str, Any]

    def split(self, shards: int) -> list[list[Piece]]:
        """The pieces of each shard, in order: each row is in one of them."""

    def read(self, pieces: Sequence[Piece], size: int) -> Iterator[Columns]:
        """Batches of at most `size` rows; without rows, one empty batch."""

    def facts(self) -> dict[str, Any]:
        """What tells these data from others, as plain values."""


class ParquetTables:
    """Rows of Parquet files; `row` is their number, through all files.

    Args:
        files: the files, in the order of their rows.
        columns: those that are read; None is all.
    """

    key: tuple[str, ...] = ("row",)

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        import pyarrow.parquet as pq

        self.files = files
        described = [pq.read_metadata(file) for file in files]
        schemas = [one.schema.to_arrow_schema() for one in described]
        for file, schema in zip(files, schemas, strict=True):
            if not schema.equals(schemas[0]):
                raise ValueError(f"expected the same columns in all files, got others in {file}: predict them apart")
        missing = [name for name in columns or () if name not in schemas[0].names]
        if missing:
            raise ValueError(f"expected the column {missing[0]!r} in {files[0]}, got {', '.join(schemas[0].names)}")
        self.names = list(schemas[0].names)
        self.types = dict(zip(self.names, schemas[0].types, strict=True))
        self.columns = None if columns is None else list(dict.fromkeys(columns))
        self.ends = np.cumsum([0, *(one.num_rows for one in described)])

    def split(self, shards: int) -> list[list[Piece]]:
        """As many rows in each shard, up to one."""
        total = int(self.ends[-1])
        return [self._between(i * total // shards, (i + 1) * total // shards) for i in range(shards)]

    def _between(self, start: int, stop: int) -> list[Piece]:
        pieces = []
        for i, (first, last) in enumerate(zip(self.ends[:-1].tolist(), self.ends[1:].tolist(), strict=True)):
            if max(start, first) < min(stop, last):
                pieces.append(Piece(i, max(start, first) - first, min(stop, last) - first))
        return pieces

    def read(self, pieces: Sequence[Piece], size: int) -> Iterator[Columns]:
        """Batches of rows; row groups outside of the pieces are not read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not pieces:
            names = self.names if self.columns is None else self.columns
            empty = {name: pa.array([], self.types[name]) for name in names}
            yield {**_arrays(pa.record_batch(empty)), "row": np.empty(0, dtype=np.int64)}
        for piece in pieces:
            file = pq.ParquetFile(self.files[piece.file])
            groups, place = _groups(file, piece)
            for record in file.iter_batches(size, row_groups=groups, columns=self.columns, use_threads=False):
                start, stop = max(piece.start - place, 0), min(_end(piece) - place, record.num_rows)
                if start < stop:
                    rows = np.arange(place + start, place + stop) + self.ends[piece.file]
                    yield {**_arrays(record.slice(start, stop - start)), "row": rows}
                place += record.num_rows

    def facts(self) -> dict[str, Any]:
        """Files and their rows."""
        counts = np.diff(self.ends).tolist()
        return {"files": [[file.name, rows] for file, rows in zip(self.files, counts, strict=True)]}


class TarFiles:
    """Images in tar files, as WebDataset writes them: `bytes`, and `file`, which is the tar's name and the member's.

    A tar has no index, so a shard is one or several whole ones.
    """

    key: tuple[str, ...] = ("file",)

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.types: dict[str, Any] = {}

    def split(self, shards: int) -> list[list[Piece]]:
        """Whole files, as many in each shard, up to one."""
        if shards > len(self.files):
            raise ValueError(f"expected at most {len(self.files)} shards of {len(self.files)} tar files, got {shards}")
        count = len(self.files)
        bounds = [(i * count // shards, (i + 1) * count // shards) for i in range(shards)]
        return [[Piece(i, 0, None) for i in range(start, stop)] for start, stop in bounds]

    def read(self, pieces: Sequence[Piece], size: int) -> Iterator[Columns]:
        """Batches of images, in the order of their tar files; a file is read once, from front to back."""
        names: list[str] = []
        contents: list[bytes] = []
        for piece in pieces:
            path = self.files[piece.file]
            for name, content in _members(path):
                names.append(f"{path.name}/{name}")
                contents.append(content)
                if len(names) == size:
                    yield {"bytes": objects(contents), "file": objects(names)}
                    names, contents = [], []
        yield {"bytes": objects(contents), "file": objects(names)}

    def facts(self) -> dict[str, Any]:
        """Files and their sizes."""
        return {"files": [[file.name, file.stat().st_size] for file in self.files]}


class ImageFiles:
    """Images in a folder and the folders in it: `path`, and `file`, which is the path within the folder."""

    key: tuple[str, ...] = ("file",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.types: dict[str, Any] = {}
        self.files: Sequence[Path] = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not self.files:
            raise FileNotFoundError(f"expected Parquet, tar or image files in {folder}, found none: check the path")

    def split(self, shards: int) -> list[list[Piece]]:
        """As many files in each shard, up to one."""
        count = len(self.files)
        return [[Piece(0, i * count // shards, (i + 1) * count // shards)] for i in range(shards)]

    def read(self, pieces: Sequence[Piece], size: int) -> Iterator[Columns]:
        """Batches of paths: whoever prepares images opens them."""
        for piece in pieces:
            for start in range(piece.start, max(_end(piece), piece.start + 1), size):
                paths = self.files[start : min(start + size, _end(piece))]
                inside = [path.relative_to(self.folder).as_posix() for path in paths]
                yield {"path": objects([str(path) for path in paths]), "file": objects(inside)}

    def facts(self) -> dict[str, Any]:
        """The number of files; names are in the answers."""
        return {"files": [[self.folder.name, len(self.files)]]}


def open_source(place: str | Path, columns: Sequence[str] | None = None) -> Source:
    """A file of Parquet or tar, a folder of such, or a folder of images.

    Args:
        place: the file or folder; hidden files, and those that begin with "_", are left out.
        columns: those of tables that are read; None is all.
    """
    path = Path(place)
    files = [path] if path.is_file() else sorted(one for one in path.glob("*") if one.name[0] not in "._")
    tables, tars = ([one for one in files if one.suffix == suffix] for suffix in (".parquet", ".tar"))
    if tables and tars:
        raise ValueError(f"expected Parquet or tar files in {path}, got both: predict them apart")
    if tables:
        return ParquetTables(tables, columns)
    if tars:
        return TarFiles(tars)
    if not path.is_dir():
        raise FileNotFoundError(f"expected a .parquet or .tar file, or a folder, got {path}: check the path")
    return ImageFiles(path)


def objects(values: Sequence[Any]) -> NDArray[Any]:
    """An array of Python objects, whatever they are."""
    made = np.empty(len(values), dtype=object)
    made[:] = list(values)
    return made


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the images in a tar file."""
    try:
        with tarfile.open(path, "r|") as archive:
            for member in archive:
                if member.isfile() and member.name.lower().endswith(SUFFIXES):
                    opened = archive.extractfile(member)
                    yield member.name, b"" if opened is None else opened.read()
    except tarfile.ReadError as error:
        raise ValueError(f"expected a whole tar file at {path}, got one that can't be read: {error}") from error


def _groups(file: Any, piece: Piece) -> tuple[list[int], int]:
    """The row groups of a file that a piece is in, and the number of their first row."""
    counts = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    ends = np.cumsum([0, *counts])
    inside = [i for i in range(len(counts)) if ends[i] < _end(piece) and ends[i + 1] > piece.start]
    return inside, int(ends[inside[0]]) if inside else 0


def _end(piece: Piece) -> int:
    assert piece.stop is not None
    return piece.stop


def _arrays(record: Any) -> Columns:
    """Columns of a batch of Arrow as numpy has them; lists of one length become rows (B, n)."""
    import pyarrow as pa

    found: Columns = {}
    for name, column in zip(record.schema.names, record.columns, strict=True):
        if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
            found[name] = _lists(column)
        elif column.null_count and not pa.types.is_floating(column.type):
            found[name] = objects(column.to_pylist())  # numpy would make numbers with a point of whole ones
        elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            found[name] = objects(column.to_pylist())
        else:
            found[name] = column.to_numpy(zero_copy_only=False)
    return found


def _lists(column: Any) -> NDArray[Any]:
    values = column.flatten()
    lengths = column.value_lengths().to_numpy(zero_copy_only=False) if not column.null_count else np.array([-1, -2])
    if len(column) and (lengths == lengths[0]).all() and not values.null_count and values.type.num_fields == 0:
        rows: NDArray[Any] = values.to_numpy(zero_copy_only=False).reshape(len(column), int(lengths[0]))
        return rows
    return objects(column.to_pylist())
