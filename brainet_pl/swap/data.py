"""Data as people give it to `swap_head`: batches, labels that are checked, inputs that are known again."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from brainet_pl._utils import checks
from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.texts import Texts, are_texts
from brainet_pl._utils.warn import warn
from brainet_pl.backbones.batches import Columns, rows, size
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import bounded, inputs_and_target, inputs_of, unshuffled
from brainet_pl.tasks import Classification, MultiLabel, Task

BATCH = 256  # inputs at a time while features are extracted
MOST_CLASSES = 10**7
MOST_REPEATED = 0.01  # share of held-out samples that may be in the training data by chance; they are left out
FAR = 1.0, 3.0  # deviations from training inputs that are far: for many samples, and more of them for a single one
Classes = int | MultiLabel | None  # number of classes, where it is known; or the task of several labels
CLIP = 10.0  # deviations of one channel that count at the most


# -- batches ----------------------------------------------------------------------------------------------------------


def labelled_batches(data: Any, name: str) -> Iterable[Any]:
    """Inputs and labels as a user gives them, in batches."""
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=BATCH)
    if is_labelled_pair(data):
        x, y = _inputs_of_pair(data[0]), _labels_of_pair(data[1], name)
        if len(x) != len(y):
            raise ValueError(f"expected as many labels as inputs in {name}, got {len(y)} for {len(x)}: give both alike")
        pairs: Dataset[Any] = LabelledTexts(x, y) if isinstance(x, Texts) else TensorDataset(x, y)
        return DataLoader(pairs, batch_size=BATCH)
    if isinstance(data, Iterable) and not isinstance(data, str | Mapping | Tensor | np.ndarray):
        return data
    raise ValueError(
        f"expected {name} to be inputs and labels, a pair of tensors, a dataset or a loader of both, got "
        f"{checks.shown(data)}: scores and calibration learn from samples whose class is known"
    )


class LabelledTexts(Dataset[tuple[str, Tensor]]):
    """Texts (N,) and their labels (N, …)."""

    def __init__(self, texts: Texts, labels: Tensor) -> None:
        self.texts, self.labels = texts, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[str, Tensor]:
        return self.texts[i], self.labels[i]


def is_labelled_pair(data: Any) -> bool:
    """Whether data are all inputs and all labels, and not two batches."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    inputs, labels = data
    if not (isinstance(inputs, Tensor | np.ndarray) or are_texts(inputs)):
        return False
    return isinstance(labels, Tensor | np.ndarray) or _are_labels(labels)


def are_classes(labels: Any) -> bool:
    """Whether the second of two things is one whole number for each sample, and no second batch of inputs."""
    return not isinstance(labels, Tensor) or (labels.dim() == 1 and not labels.is_floating_point())


def _are_labels(labels: Any) -> bool:
    return isinstance(labels, list | tuple) and all(isinstance(one, str | int | np.integer) for one in labels)


def _inputs_of_pair(inputs: Any) -> Tensor | Texts:
    if are_texts(inputs):
        return Texts(inputs)
    return _as_tensor(inputs) if isinstance(inputs, np.ndarray) else inputs


def _labels_of_pair(labels: Any, name: str) -> Tensor:
    """Labels as a tensor; text is refused, because its order would be ours to choose."""
    if isinstance(labels, Tensor):
        return labels
    array = np.asarray(labels)
    if array.dtype.kind not in "fiub":
        raise ValueError(
            f"expected labels of {name} to be numbers from 0, got text such as {str(array.flat[0])!r}: number "
            "the classes, names, labels = numpy.unique(labels, return_inverse=True)"
        )
    return torch.from_numpy(np.ascontiguousarray(array))


def input_batches(data: Any, max_rows: int | None) -> Iterable[Any]:
    """What a user gives as data, in batches; of a stream of unknown length at most `max_rows` rows."""
    if is_labelled_pair(data) and are_classes(data[1]):
        return labelled_batches(data, "data")
    if are_texts(data):
        texts = Texts(data)
        return [texts[first : first + BATCH] for first in range(0, len(texts), BATCH)]
    if isinstance(data, np.ndarray):
        data = _as_tensor(data)
    if isinstance(data, Tensor):
        if not data.dim():
            raise ValueError("expected inputs of shape (samples, …), got a single number: give one row a sample")
        return data.split(BATCH)  # type: ignore[no-untyped-call, no-any-return]
    if isinstance(data, Dataset):
        return bounded(DataLoader(data, batch_size=BATCH), max_rows)
    if _is_mapping_of_tensors(data):
        return [rows(data, slice(first, first + BATCH)) for first in range(0, size(data), BATCH)]
    if not isinstance(data, Iterable) or isinstance(data, str | Mapping):
        raise ValueError(
            f"expected data to be a tensor, an array, a dataset, a loader or a learned tree, got "
            f"{checks.shown(data)}: give the inputs that the model was trained on"
        )
    return bounded(data, max_rows)


def _as_tensor(array: NDArray[Any]) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise ValueError(f"expected an array of numbers, got {array.dtype}: encode what is text first")
    return torch.from_numpy(np.ascontiguousarray(array))


def _is_mapping_of_tensors(data: Any) -> bool:
    return isinstance(data, Mapping) and len(data) > 0 and all(isinstance(part, Tensor) for part in data.values())


def check_first_labels(loader: Iterable[Any], classes: Classes, columns: Columns | None, name: str) -> Any:
    """Refuse wrong labels before any work: all of them where they are at hand, else those of the first batch.

    Gives the inputs of that batch.
    """
    if isinstance(loader, Iterator):
        raise ValueError(
            f"expected {name} to be a loader that can be read more than once, got {type(loader).__name__}: give a "
            "DataLoader, a dataset, or tensors (x, y)"
        )
    data = getattr(loader, "dataset", None)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2 and _collates_plainly(loader):
        check_labels(data.tensors[1], classes, name)
        if name != "held":
            task_of(data.tensors[1], classes)
    _check_names(data, classes, name)
    for batch in unshuffled(loader):
        inputs, target = inputs_and_target(batch, columns)
        check_labels(torch.as_tensor(target), classes, name)
        return inputs
    raise ValueError(f"expected samples in {name}, got an empty loader: check the data")


def _check_names(data: Any, classes: Classes, name: str) -> None:
    """Refuse a data set that names another number of classes."""
    names: Any = getattr(data, "classes", None)
    num_classes = classes.num_labels if isinstance(classes, MultiLabel) else classes
    if num_classes is not None and checks.are_texts(names) and len(names) != num_classes:
        raise ValueError(
            f"expected num_classes={num_classes} to be the classes of {name}, got {len(names)} "
            f"({', '.join(names[:5])}{', …' if len(names) > 5 else ''}): leave num_classes out, or correct it"
        )


def _collates_plainly(loader: Any) -> bool:
    return getattr(loader, "collate_fn", None) is default_collate


# -- labels -----------------------------------------------------------------------------------------------------------


def check_labels(labels: Tensor, classes: Classes, name: str) -> None:
    """Refuse labels (B,) that are no classes, or beyond those that there are; or a matrix of several labels (B, L)."""
    if classes is None and labels.dim() == 1 and len(labels) and float(labels.min()) < 0:
        raise ValueError(
            f"expected labels of {name} to be 0 or more, got {float(labels.min()):g}: number the classes from 0, and "
            "leave samples without a class out"
        )
    try:
        first_task(classes).check(labels)
    except ValueError as error:
        raise ValueError(f"labels of {name}: {error}") from error


def first_task(classes: Classes) -> Task:
    """The task that labels are checked by before all of them are known."""
    return classes if isinstance(classes, MultiLabel) else Classification(classes or MOST_CLASSES)


def task_of(labels: Tensor, classes: Classes) -> Classification | MultiLabel:
    """The task of all training labels, (N,) or (N, L)."""
    if isinstance(classes, MultiLabel):
        classes.prepare(labels)
        return classes
    return Classification(count_classes(labels, classes))


def count_classes(labels: Tensor, num_classes: int | None) -> int:
    """The number of classes of training labels (N,), or `num_classes` where it was given."""
    classes = torch.unique(labels.long())
    if len(classes) < 2:
        raise ValueError(
            f"expected training samples of at least two classes, got {len(labels):,} of class {int(classes[0])} alone: "
            "give samples of the others too"
        )
    total = int(classes[-1]) + 1 if num_classes is None else num_classes
    missing = sorted(set(range(total)) - set(classes.tolist()))
    if missing:
        listed = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        raise ValueError(
            f"expected training samples of every class from 0 to {total - 1}, got none of {listed}: number the classes "
            "from 0 without gaps, give samples of each, or correct num_classes"
        )
    return total


def rows_not_twice(hashes: list[bytes]) -> Tensor:
    """Which samples (N,) occur once: one that is repeated would be trained on and held out."""
    times = Counter(hashes)
    return torch.tensor([times[one] == 1 for one in hashes], dtype=torch.bool)


# -- inputs that come back --------------------------------------------------------------------------------------------


class DataLog:
    """Sees the batches of a data set while features are extracted: checks labels, and remembers what inputs look like.

    Args:
        name: of the data set, for messages.
        classes: number of classes, None where labels tell it, or the task of several labels.

    Attributes:
        hashes: a hash of the inputs of each sample.
        sums: number of samples, and sums and sums of squares of `sample_moments`; None before the first batch.
    """

    def __init__(self, name: str, classes: Classes) -> None:
        self.name, self.classes = name, classes
        self.hashes: list[bytes] = []
        self.sums: tuple[int, Tensor, Tensor] | None = None

    def __call__(self, inputs: Any, target: Tensor) -> None:
        """See a batch."""
        check_labels(target, self.classes, self.name)
        self.hashes += hash_rows(inputs)
        moments = sample_moments(inputs)
        if moments is not None:
            count, first, second = self.sums or (0, 0.0, 0.0)
            self.sums = count + len(moments), first + moments.sum(dim=0), second + moments.square().sum(dim=0)


def hash_rows(inputs: Any) -> list[bytes]:
    """A hash of each sample of inputs, a tensor, a dictionary of tensors, texts, or features."""
    if isinstance(inputs, Texts):
        return [hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest() for text in inputs]
    if isinstance(inputs, BackboneOutput):
        inputs = inputs.features
    named = dict(sorted(inputs.items())) if isinstance(inputs, Mapping) else {"": inputs}
    tables = [_bytes_of_rows(tensor) for tensor in named.values() if isinstance(tensor, Tensor)]
    hashes = []
    for row in range(size(inputs)):
        content = b"".join(table[row].tobytes() for table in tables)
        hashes.append(hashlib.blake2b(content, digest_size=16).digest())
    return hashes


def _bytes_of_rows(tensor: Tensor) -> NDArray[Any]:
    """The content of each sample of a tensor (B, …), one row for each."""
    if tensor.dim() == 1:
        return tensor.cpu()[:, None].contiguous().numpy()
    return tensor.detach().cpu().contiguous().flatten(1).view(torch.uint8).contiguous().numpy()


def is_augmented(loader: Any, columns: Columns | None = None) -> bool:
    """Whether the samples of a loader are drawn anew each time that they are read: some are read twice to see."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.collate_fn is None:
        return False
    few = range(min(8, len(loader.dataset)))  # type: ignore[arg-type]

    def read(seed: int) -> list[bytes]:
        with isolated_rng(seed):
            return hash_rows(inputs_of(loader.collate_fn([loader.dataset[i] for i in few]), columns))

    return read(0) != read(1)


def refuse_same_samples(train: Any, held: Any) -> None:
    """Refuse loaders of the same samples of one data set, augmented or not, before any work."""
    (one, mine), (other, theirs) = _samples_of(train), _samples_of(held)
    if one is None or one is not other:
        return
    common = len(set(mine) & set(theirs))
    if common:
        _refuse_overlap(common, len(theirs))


def _samples_of(loader: Any) -> tuple[Any, Sequence[int]]:
    """The data set behind a loader, and the numbers of the samples of it that are read."""
    data = getattr(loader, "dataset", None)
    chosen = _chosen(loader, len(data)) if hasattr(data, "__len__") else None  # type: ignore[arg-type]
    if chosen is None:
        return None, ()
    while isinstance(data, Subset):
        places = _as_numbers(data.indices, len(data.dataset))  # type: ignore[arg-type]
        chosen, data = [places[i] for i in chosen], data.dataset
    return data, chosen


def _chosen(loader: Any, total: int) -> list[int] | None:
    """The numbers of the samples that a loader reads, of so many; None where its batch sampler does not say."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if isinstance(batch_sampler, list | tuple):
        sampler = [place for batch in batch_sampler for place in batch]
    elif batch_sampler is not None:
        sampler = getattr(batch_sampler, "sampler", None)
        if sampler is None:
            return None
    indices = sampler if isinstance(sampler, list | tuple) else getattr(sampler, "indices", None)
    return list(range(total)) if indices is None else _as_numbers(indices, total)


def _as_numbers(indices: Any, total: int) -> list[int]:
    """Places among so many samples as whole numbers: elements of a tensor are equal, but no equal members of a set."""
    return [int(place) % total for place in indices]


def rows_not_repeated(seen: list[bytes], held: list[bytes]) -> Tensor:
    """Which held-out samples (N,) are not in the training data; an error where more are than chance explains."""
    known = set(seen)
    fresh = torch.tensor([one not in known for one in held], dtype=torch.bool)
    repeated = int((~fresh).sum())
    if repeated > MOST_REPEATED * len(held):
        _refuse_overlap(repeated, len(held))
    if repeated:
        warn(
            f"{repeated} of {len(held):,} held-out samples are in the training data too, and were left out of the "
            "held-out set"
        )
    return fresh


def _refuse_overlap(common: int, total: int) -> None:
    raise ValueError(
        f"expected held-out samples that are not in the training data, got {common:,} of {total:,} that are: what was "
        "learned by heart would pass for certain; split the data first, or leave held out, and 15 % of the training "
        "samples are held back"
    )


# -- the scale of inputs ----------------------------------------------------------------------------------------------


def sample_moments(inputs: Any) -> Tensor | None:
    """Inputs → (B, P, C) of finite samples: the mean, and of images and sequences the deviation too, of each channel.

    None where there are none to speak of: token numbers, several tensors, or features.
    """
    if isinstance(inputs, Mapping):
        inputs = _only_real_tensor(inputs)
    if not isinstance(inputs, Tensor) or inputs.dim() < 2 or inputs.is_complex():
        return None
    if inputs.dim() == 2:
        if not inputs.is_floating_point():
            return None
        moments = inputs.detach().cpu().double()[:, None]
    else:
        values = inputs.detach().flatten(2).float()
        moments = torch.stack([values.mean(dim=2), values.std(dim=2, correction=0)], dim=1).cpu().double()
    return moments[moments.flatten(1).isfinite().all(dim=1)]


def _only_real_tensor(inputs: Mapping[str, Any]) -> Tensor | None:
    """The one tensor of numbers with a decimal point, where there is one."""
    real = [
        part for part in inputs.values() if isinstance(part, Tensor) and part.is_floating_point() and part.dim() > 1
    ]
    return real[0] if len(real) == 1 else None


class InputScale(DataSizedBuffers):
    """Mean and deviation of what `sample_moments` gives for the training inputs, to notice inputs on another scale."""

    may_be_missing: ClassVar[bool] = True
    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.empty(0))
        self.register_buffer("deviation", torch.empty(0))
        self._warned = False

    def set(self, log: DataLog) -> None:
        """Take the inputs that a log has seen as those of training."""
        if log.sums is None or not log.sums[0]:
            return
        count, first, second = log.sums
        mean, square = first / count, second / count
        least = 1e-2 * square.mean().sqrt()  # a channel that hardly varies says nothing of a scale
        deviation = (square - mean.square()).clamp_min(0).sqrt().clamp_min(least).clamp_min(1e-12)
        self.mean, self.deviation = mean.float().to(self.mean.device), deviation.float().to(self.mean.device)
        self._warned = False

    def is_far(self, mean: Tensor, count: int) -> bool:
        """Whether the mean (P, C) of `sample_moments` over so many samples is far from that of training."""
        if not count or mean.shape != self.mean.shape:
            return False
        gap = (mean - self.mean.cpu()).abs() / self.deviation.cpu()
        return bool(gap.clamp_max(CLIP).mean(dim=1).max() > FAR[0] + FAR[1] / count**0.5)

    def warn_if_far(self, inputs: Any) -> None:
        """Warn once of inputs that were scaled in another way than those of training."""
        if not self._warned and len(self.mean):
            moments = sample_moments(inputs)
            if moments is not None and len(moments):
                self.warn_if_mean_is_far(moments.mean(dim=0), len(moments), "inputs")

    def warn_if_mean_is_far(self, mean: Tensor, count: int, name: str) -> None:
        """Warn once of the mean of `sample_moments` over so many samples, where it is far from that of training."""
        if self._warned or not self.is_far(mean, count):
            return
        self._warned = True
        got, usual = mean.mean(dim=1), self.mean.mean(dim=1)
        names = ["mean", "deviation"][: len(usual)]
        shown = ", ".join(f"{n} {g:.3g} (training {u:.3g})" for n, g, u in zip(names, got, usual, strict=True))
        warn(
            f"expected {name} on the scale of the training data, got {shown}: prepare them as in training, such as "
            "pixels from 0 to 1 or 255, normalised or not; if they are, they are unlike all training data, and "
            "`known` says so"
        )
