"""Features on disk: extracted once for a backbone and its data, memory-mapped, and checked whenever they are used.

    <folder>/<name of the backbone>/<name of the data>/index.json, features.bin, targets.bin, …

Data whose samples and transforms are known has a name (`identity.of_batches`) and is found by it. Of other data, every
batch is hashed while it is read, which is cheap beside a backbone, and features of the same inputs are taken from the
disk. Before stored features are used, their bytes are compared with their digest, and a few inputs are run and compared
with what is stored of them, because the name of a model does not tell its code.

An entry is written to a temporary folder that is renamed when it is complete. Where two processes extract the same
features, both write, and the second takes the entry of the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils import digest
from brainet_pl._utils.framework import rank_zero_info
from brainet_pl._utils.shared import warn_if_shared
from brainet_pl._utils.texts import Texts
from brainet_pl._utils.warn import warn
from brainet_pl.backbones import batches as batching
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.taps import Taps
from brainet_pl.features import identity
from brainet_pl.features.extraction import Extracted, inference, inputs_and_target, is_sized, run_backbone, run_batches
from brainet_pl.features.index import FORMAT, INDEX, map_array, read_index

ORPHANED = 3600.0  # seconds without a write after which an unfinished entry counts as left by a killed run
CHECKED = 8  # inputs that are run and compared before stored features are used
OTHER_FEATURES = "the backbone gives other features for the same inputs"
TOLERANCE = 1e-3  # of their largest value: sums in another order differ by less, other weights or code by more


class NotStored(Exception):
    """Features can't be kept on disk."""


class Entry(NamedTuple):
    """The stored features of a sequence of batches, memory-mapped.

    Attributes:
        folder: the folder of the files.
        extracted: the features and targets of all N samples.
        digests: the digest of the inputs of each batch.
        sizes: the number of samples of each batch.
    """

    folder: Path
    extracted: Extracted
    digests: list[str]
    sizes: list[int]

    def parts(self) -> Iterator[Extracted]:
        """Yields the features and targets of each batch."""
        first = 0
        for size in self.sizes:
            yield Extracted(self.extracted.output[first : first + size], self.extracted.targets[first : first + size])
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
    """The output of a frozen `FeatureExtractor` for batches, loaded or extracted and stored; None without samples.

    Args:
        store: the folder of all entries.
        backbone: the extractor; its layers are traced with the first inputs.
        batches: (inputs, targets), in a fixed order.
        seed: the seed of the random generators.
        device: where the backbone runs; None is where it is.
        progress: show a progress bar.
        columns: the names of the parts of a batch.
    """
    warn_if_shared(store, "features")
    name = identity.of_batches(batches, seed)
    stream = (part for part in (inputs_and_target(batch, columns) for batch in batches) if batching.size(part[0]))
    first = next(stream, None)
    if first is None:
        return None
    with inference(backbone, device) as there:

        def run_first(inputs: Any) -> BackboneOutput:
            few = batching.move(batching.rows(inputs, slice(0, CHECKED)), there)
            return run_backbone(backbone, few).map(lambda tensor: tensor.float().cpu())

        backbone.trace(batching.move(batching.rows(first[0], slice(0, CHECKED)), there))
        backbone_folder = Path(store) / _name_of(backbone, there)
        entry = None if name is None else load(backbone_folder / name)
        if entry is not None:
            mismatch = _mismatch(entry, *first, run_first)
            if mismatch is None:
                _log_use(entry, "from")
                return entry
            mark_bad(entry.folder, mismatch)
        stored = _StoredBatches(backbone_folder)
        current: dict[str, Any] = {}  # the batch that is run

        def find(inputs: Any) -> BackboneOutput | None:
            return stored.find(current["inputs_digest"], inputs, run_first)

        def all_inputs() -> Iterator[Any]:
            for inputs, target in chain([first], stream):
                current.update(inputs_digest=digest_of(inputs), target=torch.as_tensor(target).cpu())
                yield inputs

        with Writer(backbone_folder, _rows(batches)) as writer:
            total = len(batches) if is_sized(batches) else None  # type: ignore[arg-type]
            for output in run_batches(backbone, all_inputs(), there, progress, find, total):
                writer.append(output, **current)
            entry = writer.finish(name)
    _log_use(entry, "in" if stored.used < len(entry.sizes) else "from")
    return entry


def _name_of(backbone: Any, device: torch.device) -> str:
    try:
        return identity.of_model(backbone, device)
    except Exception as error:  # a model may hold anything, and a fit must not end because it has no name
        raise NotStored(f"expected a backbone that can be named, got {type(error).__name__}: {error}") from error


def digest_of(inputs: Any) -> str:
    """The digest of a batch of inputs: types, shapes and bytes of its tensors, and their names where they have some."""
    if isinstance(inputs, Texts):
        return digest.fingerprint(list(inputs))
    for value in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
        if not isinstance(value, Tensor):
            raise NotStored(f"expected inputs of tensors alone, got {type(value).__name__}")
    return digest.fingerprint(dict(inputs) if isinstance(inputs, Mapping) else inputs)


def _rows(batches: Any) -> int:
    """The number of samples, or 0 where it is unknown."""
    with contextlib.suppress(TypeError, AttributeError, NotImplementedError):
        return len(batches.dataset)
    return 0


def _log_use(entry: Entry, where: str) -> None:
    count = f"{len(entry.extracted.targets):,}"
    rank_zero_info(f"features of {count} samples {where} {entry.folder} ({shown_size(size_of(entry.folder))})")


def _mismatch(entry: Entry, inputs: Any, target: Any, run: Callable[[Any], BackboneOutput]) -> str | None:
    """How an entry differs from what the backbone and the data give now; None if it does not."""
    size = batching.size(inputs)
    stored, now = next(entry.parts()), torch.as_tensor(target).cpu()
    same = (size, now.dtype) == (len(stored.targets), stored.targets.dtype) and torch.equal(now, stored.targets)
    if not same or digest_of(inputs) != entry.digests[0]:
        return "the data gives other samples under the same name"
    return None if outputs_close(run(inputs), stored.output[:CHECKED]) else OTHER_FEATURES


def outputs_close(one: BackboneOutput, other: BackboneOutput) -> bool:
    """Whether two outputs for the same samples agree but for rounding."""
    ours, theirs = _tensors(one), _tensors(other)
    if {k: v.shape for k, v in ours.items()} != {k: v.shape for k, v in theirs.items()}:
        return False
    pairs = [(value, theirs[name]) for name, value in ours.items()]
    return all(bool((a - b).abs().max() <= TOLERANCE * b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def _tensors(output: BackboneOutput) -> dict[str, Tensor]:
    more = {f"more_{i}": values for i, values in enumerate(output.more.values())}
    logits = {} if output.base_logits is None else {"base_logits": output.base_logits}
    return {"features": output.features, **more, **logits}


class _StoredBatches:
    """The batches of all entries of a backbone, by the digest of their inputs."""

    def __init__(self, backbone_folder: Path) -> None:
        self.used = 0
        self._places: dict[str, tuple[Path, int]] = {}
        self._entries: dict[Path, list[Extracted]] = {}
        for folder in entries(backbone_folder):
            with contextlib.suppress(OSError, ValueError, RecursionError):  # `load` will say what is wrong
                for i, inputs_digest in enumerate(read_index(folder)["digests"]):
                    self._places.setdefault(inputs_digest, (folder, i))

    def find(self, inputs_digest: str, inputs: Any, run: Callable[[Any], BackboneOutput]) -> BackboneOutput | None:
        """The stored output for a batch; None if there is none, or if it is not what the backbone gives."""
        if inputs_digest not in self._places:
            return None
        folder, i = self._places[inputs_digest]
        if folder not in self._entries:
            entry = load(folder)
            if entry is not None and not outputs_close(run(inputs), list(entry.parts())[i].output[:CHECKED]):
                mark_bad(folder, OTHER_FEATURES)
                entry = None
            if entry is None:
                self._places = {key: place for key, place in self._places.items() if place[0] != folder}
                return None
            self._entries[folder] = list(entry.parts())
        self.used += 1
        return self._entries[folder][i].output


# -- writing ----------------------------------------------------------------------------------------------------------


class Writer:
    """Writes an entry batch by batch; without `finish` it is deleted.

    Args:
        backbone_folder: the folder of the backbone's entries.
        rows: expected number of samples, to see at once whether the disk has room for them; 0 if unknown.
    """

    def __init__(self, backbone_folder: Path, rows: int = 0) -> None:
        self._backbone_folder, self._rows = backbone_folder, rows
        self._folder = backbone_folder / f".{uuid.uuid4().hex}.tmp"
        self._files: dict[str, IO[bytes]] = {}
        self._arrays: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, Any] = {}
        self._inputs_digests: list[str] = []
        self._sizes: list[int] = []
        self._taps: list[Taps] = []

    def __enter__(self) -> Writer:
        with _disk_errors():
            self._folder.mkdir(parents=True)
            _delete_orphans(self._backbone_folder)
        return self

    def __exit__(self, *error: Any) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def append(self, output: BackboneOutput, inputs_digest: str, target: Tensor) -> None:
        """Add the output and the targets of a batch."""
        tensors = {**_tensors(output), "targets": target}
        with _disk_errors():
            if not self._sizes:
                self._begin(tensors, len(output))
                self._taps = list(output.more)
            for name, tensor in tensors.items():
                self._add(name, tensor)
        self._inputs_digests.append(inputs_digest)
        self._sizes.append(len(output))

    def _begin(self, tensors: dict[str, Tensor], rows: int) -> None:
        needed = sum(t.numel() * t.element_size() for t in tensors.values()) // rows * self._rows
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise NotStored(
                f"expected room for {shown_size(needed)} in {self._backbone_folder}, got {shown_size(free)}"
            )
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
        """Name the entry, by default by a digest of its batches; if another process was faster, give its entry."""
        arrays = {key: {**array, "sha256": self._digests[key].hexdigest()} for key, array in self._arrays.items()}
        taps = [[list(taps.layers), list(taps.pools)] for taps in self._taps]
        content = {"format": FORMAT, "arrays": arrays, "taps": taps, "sizes": self._sizes}
        content["digests"] = self._inputs_digests
        name = name or digest.fingerprint([self._inputs_digests, arrays["targets"]["sha256"]])[:32]
        content["name"] = f"{self._backbone_folder.name}/{name}"
        with _disk_errors():
            there = load(self._backbone_folder / name)
            if there is not None:
                return there
            for file in self._files.values():
                file.close()  # no fsync: should the power fail, the digest of the bytes shows it
            index = json.dumps({"content": content, "digest": digest.fingerprint(content)})
            (self._folder / INDEX).write_text(index, encoding="utf-8")
            for _ in range(3):
                with contextlib.suppress(OSError):  # the folder exists
                    os.rename(self._folder, self._backbone_folder / name)
                entry = load(self._backbone_folder / name)
                if entry is not None:
                    return entry
        raise NotStored(f"expected to write {self._backbone_folder / name}, but it could not be read afterwards")


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn an error of the file system into `NotStored`, after which a fit goes on without the store."""
    try:
        yield
    except OSError as error:
        raise NotStored(str(error)) from error


# -- reading ----------------------------------------------------------------------------------------------------------


def entries(backbone_folder: Path) -> list[Path]:
    """The folders of all complete entries of one backbone."""
    return sorted(
        path.parent for path in backbone_folder.glob(f"*/{INDEX}") if path.parent.suffix not in (".tmp", ".bad")
    )


def load(folder: Path) -> Entry | None:
    """The entry in a folder, or None if there is none; a damaged or outdated one is renamed, with a warning."""
    if not folder.is_dir():
        return None
    try:
        content = read_index(folder)
        tensors = {name: map_array(folder, f"{name}.bin", array) for name, array in content["arrays"].items()}
        with contextlib.suppress(OSError):  # the time of the last use, for `clear`
            os.utime(folder / INDEX)
    except (OSError, ValueError, RuntimeError) as error:
        mark_bad(folder, str(error))
        return None
    taps = [Taps(tuple(layers), tuple(pools)) for layers, pools in content["taps"]]
    more = {one: tensors[f"more_{i}"] for i, one in enumerate(taps)}
    output = BackboneOutput(tensors["features"], more, tensors.get("base_logits"))
    return Entry(folder, Extracted(output, tensors["targets"]), content["digests"], content["sizes"])


def mark_bad(folder: Path, why: str) -> None:
    """Rename an entry that can't be used to `….bad`, in place of an earlier one of that name, with a warning."""
    bad = folder.with_name(f"{folder.name}.bad")
    if not folder.is_dir():
        return  # another process deleted it
    with contextlib.suppress(OSError):  # another process was faster, or the folder is read-only
        shutil.rmtree(bad, ignore_errors=True)
        os.replace(folder, bad)
    warn(f"renamed {folder} to {bad.name}, and features are extracted again: {why}")


# -- what is there ----------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """What one folder of the store holds.

    Attributes:
        folder: the folder of an entry, which may be damaged, outdated or left by a killed run.
        bytes: size on disk.
        samples: number of samples, or None if the entry is not complete.
        features: number of features for the head, or None if the entry is not complete.
        used: time of the last use, in seconds since 1970.
    """

    folder: Path
    bytes: int
    samples: int | None
    features: int | None
    used: float


def list_stored(store: str | os.PathLike[str]) -> list[Stored]:
    """All entries of the store, the most recently used first; other files in the folder are ignored."""
    found = []
    for folder in (path for path in Path(store).glob("*/*/") if not path.is_symlink() | path.parent.is_symlink()):
        unfinished = folder.name.startswith(".") and folder.suffix == ".tmp"
        if not _is_name(folder.parent.name, 16) or not (unfinished or _is_name(folder.name.removesuffix(".bad"), 32)):
            continue
        with contextlib.suppress(OSError):  # another process was faster
            samples = features = None
            if not unfinished and folder.suffix != ".bad":
                with contextlib.suppress(ValueError, RecursionError):
                    samples, features = read_index(folder)["arrays"]["features"]["shape"]
            found.append(Stored(folder, size_of(folder), samples, features, _last_write(folder)))
    return sorted(found, key=lambda one: -one.used)


def clear(store: str | os.PathLike[str], unused_days: float = 0.0) -> list[Stored]:
    """Delete entries of the store, and give what was deleted; a running fit keeps the files that it has opened.

    Args:
        store: the folder of all entries.
        unused_days: delete only entries that were not used for this many days. What is being written always stays.
    """
    now, deleted = time.time(), []
    for one in list_stored(store):
        writing = one.folder.suffix == ".tmp" and now - one.used < ORPHANED
        if not writing and now - one.used >= unused_days * 86400:
            shutil.rmtree(one.folder)
            deleted.append(one)
            with contextlib.suppress(OSError):  # other entries remain
                one.folder.parent.rmdir()
    return deleted


def _delete_orphans(backbone_folder: Path) -> None:
    """Delete unfinished entries of killed processes."""
    for orphan in backbone_folder.glob(".*.tmp"):
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
    """A size in bytes as text.

    >>> shown_size(12_800_000)
    '12.8 MB'
    """
    power = next((i for i in range(1, 5) if size < 1000**i), 5) - 1
    unit = ("bytes", "kB", "MB", "GB", "TB")[power]
    return f"{size / 1000**power:.{1 if power else 0}f} {unit}"
