"""Features on disk: extracted once for a backbone and its data, memory-mapped, and checked whenever they are used.

    <folder>/<name of the backbone>/<name of the data>/index.json, features.bin, targets.bin, …

Data whose samples and transforms can be told has a name (`identity.of_batches`) and is found by it. Of any other, every
batch is hashed as it streams by, which is cheap beside a backbone, and what was stored of the same inputs is taken in
place of another pass. Before anything stored is used, its bytes are compared with their digest, and a few inputs are
run and compared with what is stored of them: no name can tell all that a model's code depends on.

An entry is written to a folder of its own that gets its name at the end, whole. Two processes that extract the same
both write, and the second finds the first one's entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils import digest
from brainet_pl._utils.framework import rank_zero_info
from brainet_pl.backbones import batches as batching
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.taps import Taps
from brainet_pl.features import identity
from brainet_pl.features.extraction import Extracted, at_work, is_sized, pair, readings, readings_of

FORMAT = 1  # of an entry
INDEX = "index.json"
ORPHANED = 3600.0  # seconds without a write: an unfinished entry as old as that was left by a killed run
FEW = 8  # inputs that are run before stored features are believed
OTHERS = "the backbone gives other features for the same inputs"
TOLERANCE = 1e-3  # of their largest value: sums in another order differ by less, other weights or code by more


class NotStored(Exception):
    """Features can't be kept on disk; whoever wants them has to do without."""


class Entry(NamedTuple):
    """The features of a sequence of batches, memory-mapped: nothing is read before it is used.

    Attributes:
        folder: where they are.
        extracted: the features and targets of all N samples.
        marks: the digest of the inputs of each batch.
        sizes: the number of samples of each batch.
    """

    folder: Path
    extracted: Extracted
    marks: list[str]
    sizes: list[int]

    def parts(self) -> Iterator[Extracted]:
        """Gives what is stored, batch by batch."""
        first = 0
        for size in self.sizes:
            yield Extracted(self.extracted.readings[first : first + size], self.extracted.targets[first : first + size])
            first += size


def extract(
    store: str | os.PathLike[str],
    backbone: Any,
    batches: Iterable[Any],
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
    columns: Columns | None = None,
) -> Entry | None:
    """What a frozen `FeatureExtractor` gives for batches: from the disk, or extracted and stored. None of no sample.

    Args:
        store: the folder of all entries.
        backbone: the extractor; its layers are found with the first inputs.
        batches: (inputs, targets), in a fixed order.
        seed: at which the random generators stand.
        device: where the backbone runs; None is where it is.
        progress: show a progress bar.
        columns: the names of the parts of a batch.
    """
    name = identity.of_batches(batches, seed)
    stream = (part for part in (pair(batch, columns) for batch in batches) if batching.size(part[0]))
    first = next(stream, None)
    if first is None:
        return None
    with at_work(backbone, device) as there:

        def run_few(inputs: Any) -> BackboneOutput:
            few = batching.move(batching.rows(inputs, slice(0, FEW)), there)
            return readings_of(backbone, few).map(lambda tensor: tensor.float().cpu())

        backbone.trace(batching.move(batching.rows(first[0], slice(0, FEW)), there))
        shelf = Path(store) / _name_of(backbone, there)
        entry = None if name is None else load(shelf / name)
        if entry is not None:
            wrong = _difference(entry, *first, run_few)
            if wrong is None:
                _tell(entry, "from")
                return entry
            set_aside(entry.folder, wrong)
        known = _Known(shelf)
        now: dict[str, Any] = {}  # the batch that is read

        def stored_of(inputs: Any) -> BackboneOutput | None:
            return known.find(now["mark"], inputs, run_few)

        def watched() -> Iterator[Any]:
            for inputs, target in chain([first], stream):
                now.update(mark=mark_of(inputs), target=torch.as_tensor(target).cpu())
                yield inputs

        with Writer(shelf, _rows(batches)) as writer:
            total = len(batches) if is_sized(batches) else None  # type: ignore[arg-type]
            for part in readings(backbone, watched(), there, progress, stored_of, total):
                writer.append(part, **now)
            entry = writer.finish(name)
    _tell(entry, "in" if known.used < len(entry.sizes) else "from")
    return entry


def _name_of(backbone: Any, device: torch.device) -> str:
    try:
        return identity.of_model(backbone, device)
    except Exception as error:  # a model may hold anything; a fit must not end because it can't be told
        raise NotStored(f"expected a backbone whose code can be told, got {type(error).__name__}: {error}") from error


def mark_of(inputs: Any) -> str:
    """The digest of a batch of inputs: types, shapes and bytes of its tensors, and their names where they have some."""
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    strange = [type(value).__name__ for value in tensors if not isinstance(value, Tensor)]
    if strange:  # its bytes could not be told from those of another
        raise NotStored(f"expected inputs of tensors alone, got {strange[0]}")
    return digest.fingerprint(dict(inputs) if isinstance(inputs, Mapping) else inputs)


def _rows(batches: Any) -> int:
    """How many samples will come, at least; 0 where nobody knows."""
    with contextlib.suppress(TypeError, AttributeError, NotImplementedError):
        return len(batches.dataset)
    return 0


def _tell(entry: Entry, where: str) -> None:
    count = f"{len(entry.extracted.targets):,}"
    rank_zero_info(f"features of {count} samples {where} {entry.folder} ({shown_size(size_of(entry.folder))})")


def _difference(entry: Entry, inputs: Any, target: Any, run: Callable[[Any], BackboneOutput]) -> str | None:
    """What tells an entry from what the backbone and the data give now; None if nothing does."""
    size = batching.size(inputs)
    stored = next(entry.parts())
    same = size == len(stored.targets) and torch.equal(torch.as_tensor(target).cpu(), stored.targets)
    if not same or mark_of(inputs) != entry.marks[0]:
        return "the data gives other samples under the same name"
    return None if alike(run(inputs), stored.readings[:FEW]) else OTHERS


def alike(one: BackboneOutput, other: BackboneOutput) -> bool:
    """Whether two readings of the same samples agree but for rounding."""
    tensors = [_tensors(one), _tensors(other)]
    if {k: v.shape for k, v in tensors[0].items()} != {k: v.shape for k, v in tensors[1].items()}:
        return False
    pairs = [(value, tensors[1][name]) for name, value in tensors[0].items()]
    return all(bool((a - b).abs().max() <= TOLERANCE * b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def _tensors(part: BackboneOutput) -> dict[str, Tensor]:
    more = {f"more_{i}": values for i, values in enumerate(part.more.values())}
    return {"features": part.features, **more, **({} if part.base_logits is None else {"own": part.base_logits})}


class _Known:
    """Batches that were stored under any name, by the digest of their inputs."""

    def __init__(self, shelf: Path) -> None:
        self.used = 0
        self._places: dict[str, tuple[Path, int]] = {}
        self._entries: dict[Path, list[Extracted]] = {}
        for folder in entries(shelf):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # `load` will tell what is wrong
                for i, mark in enumerate(_content(folder)["marks"]):
                    self._places.setdefault(mark, (folder, i))

    def find(self, mark: str, inputs: Any, run: Callable[[Any], BackboneOutput]) -> BackboneOutput | None:
        """What is stored of a batch with this digest; None if nothing is, or what is does not hold."""
        if mark not in self._places:
            return None
        folder, i = self._places[mark]
        if folder not in self._entries:
            entry = load(folder)
            if entry is not None and not alike(run(inputs), list(entry.parts())[i].readings[:FEW]):
                set_aside(folder, OTHERS)
                entry = None
            if entry is None:
                self._places = {mark: place for mark, place in self._places.items() if place[0] != folder}
                return None
            self._entries[folder] = list(entry.parts())
        self.used += 1
        return self._entries[folder][i].readings


# -- writing ----------------------------------------------------------------------------------------------------------


class Writer:
    """Writes an entry batch by batch; without `finish` nothing is left of it.

    Args:
        shelf: the folder of the backbone's entries.
        rows: samples that will come, to see at once whether there is room for them; 0 if unknown.
    """

    def __init__(self, shelf: Path, rows: int = 0) -> None:
        self._shelf, self._rows = shelf, rows
        self._folder = shelf / f".{uuid.uuid4().hex}.tmp"
        self._files: dict[str, IO[bytes]] = {}
        self._arrays: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, Any] = {}
        self._marks: list[str] = []
        self._sizes: list[int] = []
        self._taps: list[Taps] = []

    def __enter__(self) -> Writer:
        with _stored():
            self._folder.mkdir(parents=True)
            clean(self._shelf)
        return self

    def __exit__(self, *error: Any) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def append(self, part: BackboneOutput, mark: str, target: Tensor) -> None:
        """Add a batch: what was read of it, the digest of its inputs, its targets."""
        tensors = {**_tensors(part), "targets": target}
        with _stored():
            if not self._marks:
                self._begin(tensors, len(part))
                self._taps = list(part.more)
            for name, tensor in tensors.items():
                self._add(name, tensor)
        self._marks.append(mark)
        self._sizes.append(len(part))

    def _begin(self, tensors: dict[str, Tensor], rows: int) -> None:
        needed = sum(t.numel() * t.element_size() for t in tensors.values()) // rows * self._rows
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise NotStored(f"expected room for {shown_size(needed)} in {self._shelf}, got {shown_size(free)}")
        for name, tensor in tensors.items():
            self._files[name] = (self._folder / f"{name}.bin").open("wb")
            self._digests[name] = hashlib.sha256()
            self._arrays[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [0, *tensor.shape[1:]]}

    def _add(self, name: str, tensor: Tensor) -> None:
        array = self._arrays.get(name, {"dtype": "", "shape": []})
        if str(tensor.dtype) != f"torch.{array['dtype']}" or list(tensor.shape[1:]) != array["shape"][1:]:
            raise NotStored(f"expected {name} of one type and shape in all batches, got {tensor.dtype} and others")
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._files[name].write(data)
        self._digests[name].update(data)
        array["shape"][0] += len(tensor)

    def finish(self, name: str | None = None) -> Entry:
        """Give the entry its name; None is a digest of its batches. If another process was faster, its entry counts."""
        arrays = {key: {**array, "sha256": self._digests[key].hexdigest()} for key, array in self._arrays.items()}
        taps = [[list(taps.layers), list(taps.pools)] for taps in self._taps]
        content = {"format": FORMAT, "arrays": arrays, "taps": taps, "marks": self._marks, "sizes": self._sizes}
        name = name or digest.fingerprint([self._marks, arrays["targets"]["sha256"]])[:32]
        with _stored():
            there = load(self._shelf / name)
            if there is not None:
                return there
            for file in self._files.values():
                file.close()  # no fsync: should the power fail, the digest tells
            index = json.dumps({"content": content, "digest": digest.fingerprint(content)})
            (self._folder / INDEX).write_text(index, encoding="utf-8")
            for _ in range(3):
                with contextlib.suppress(OSError):  # there is such a folder
                    os.rename(self._folder, self._shelf / name)
                entry = load(self._shelf / name)
                if entry is not None:
                    return entry
        raise NotStored(f"expected to write {self._shelf / name}, but it could not be read afterwards")


@contextlib.contextmanager
def _stored() -> Iterator[None]:
    """Turn an error of the file system into one that a fit can go on from."""
    try:
        yield
    except OSError as error:
        raise NotStored(str(error)) from error


# -- reading ----------------------------------------------------------------------------------------------------------


def entries(shelf: Path) -> list[Path]:
    """The folders of whole entries of one backbone."""
    return sorted(path.parent for path in shelf.glob(f"*/{INDEX}") if path.parent.suffix not in (".tmp", ".bad"))


def load(folder: Path) -> Entry | None:
    """The entry in a folder, or None if there is none; a damaged one is set aside with a warning."""
    if not folder.is_dir():
        return None
    try:
        content = _content(folder)
        tensors = {name: _mapped(folder / f"{name}.bin", array) for name, array in content["arrays"].items()}
        with contextlib.suppress(OSError):  # when it was last used, for those who clear
            os.utime(folder / INDEX)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        set_aside(folder, str(error))
        return None
    taps = [Taps(tuple(layers), tuple(pools)) for layers, pools in content["taps"]]
    more = {one: tensors[f"more_{i}"] for i, one in enumerate(taps)}
    read = BackboneOutput(tensors["features"], more, tensors.get("own"))
    return Entry(folder, Extracted(read, tensors["targets"]), content["marks"], content["sizes"])


def _content(folder: Path) -> dict[str, Any]:
    """What the index says, checked against its own digest."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    content: dict[str, Any] = index["content"]
    if digest.fingerprint(content) != index["digest"]:
        raise ValueError(f"expected {INDEX} as it was written, got another")
    if content["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {content['format']} of another version")
    return content


def _mapped(path: Path, array: dict[str, Any]) -> Tensor:
    """The array in a file, mapped; changes to it stay in memory."""
    dtype, shape = getattr(torch, array["dtype"]), torch.Size(array["shape"])
    if path.stat().st_size != shape.numel() * dtype.itemsize:
        raise ValueError(f"expected {shape.numel() * dtype.itemsize} bytes in {path.name}, got {path.stat().st_size}")
    flat = torch.from_file(str(path), shared=False, size=shape.numel(), dtype=dtype)
    if hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest() != array["sha256"]:
        raise ValueError(f"expected {path.name} as it was written, got another")
    return flat.reshape(shape)


def set_aside(folder: Path, why: str) -> None:
    """Rename an entry that can't be used to `….bad`, with a warning; a later one takes the place of an earlier one."""
    aside = folder.with_name(f"{folder.name}.bad")
    if not folder.is_dir():
        return  # somebody cleared it meanwhile
    with contextlib.suppress(OSError):  # another process was faster, or the folder can only be read
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    warnings.warn(f"set {folder} aside as {aside.name}, and features are extracted again: {why}", stacklevel=2)


# -- what is there ----------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """What one folder of the store holds.

    Attributes:
        folder: of the entry, or of what a killed run or a damage left.
        bytes: on the disk.
        samples: in it, or None where it is no whole entry.
        features: for the head, or None likewise.
        used: when it was last used, in seconds since 1970.
    """

    folder: Path
    bytes: int
    samples: int | None
    features: int | None
    used: float


def stored(store: str | os.PathLike[str]) -> list[Stored]:
    """All that the store holds, the latest used first; nothing else that may lie in the folder."""
    found = []
    for folder in Path(store).glob("*/*/"):
        unfinished = folder.name.startswith(".") and folder.suffix == ".tmp"
        if not _is_name(folder.parent.name, 16) or not (unfinished or _is_name(folder.name.removesuffix(".bad"), 32)):
            continue
        with contextlib.suppress(OSError):  # another process was faster
            samples = features = None
            if not unfinished and folder.suffix != ".bad":
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    samples, features = _content(folder)["arrays"]["features"]["shape"]
            found.append(Stored(folder, size_of(folder), samples, features, _last_write(folder)))
    return sorted(found, key=lambda one: -one.used)


def clear(store: str | os.PathLike[str], unused_days: float = 0.0) -> list[Stored]:
    """Delete what the store holds, and give what was deleted; runs that use it keep what they have opened.

    Args:
        store: the folder.
        unused_days: only what was not used for so many days. What another process is writing stays in any case.
    """
    now, gone = time.time(), []
    for one in stored(store):
        writing = one.folder.suffix == ".tmp" and now - one.used < ORPHANED
        if not writing and now - one.used >= unused_days * 86400:
            shutil.rmtree(one.folder)
            gone.append(one)
            with contextlib.suppress(OSError):  # other entries are left
                one.folder.parent.rmdir()
    return gone


def clean(shelf: Path) -> None:
    """Delete what killed processes left of entries."""
    for orphan in shelf.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - _last_write(orphan) >= ORPHANED:
                shutil.rmtree(orphan, ignore_errors=True)


def _is_name(text: str, digits: int) -> bool:
    return len(text) == digits and set(text) <= set("0123456789abcdef")


def _last_write(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.iterdir()), default=folder.stat().st_mtime)


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def shown_size(size: float) -> str:
    """Bytes as one would say them.

    >>> shown_size(12_800_000)
    '12.8 MB'
    """
    power = next((i for i in range(1, 5) if size < 1000**i), 5) - 1
    unit = ("bytes", "kB", "MB", "GB", "TB")[power]
    return f"{size / 1000**power:.{1 if power else 0}f} {unit}"
