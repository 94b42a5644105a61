"""Fingerprints against a twin that feeds one value at a time: files that were written earlier keep theirs."""

import hashlib
from collections import OrderedDict
from enum import IntEnum

import numpy as np
import pytest
import torch

from brainet_pl._utils.digest import fingerprint
from brainet_pl._utils.parts import primitive


class Level(IntEnum):
    LOW = 1


def one_at_a_time(value):
    """What is hashed, in the order of the values."""
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)};".encode() + value.numpy().tobytes()
    if isinstance(value, dict):
        parts = [one_at_a_time(part) for item in value.items() for part in item]
        return f"dictionary {len(value)};".encode() + b"".join(parts)
    if isinstance(value, list | tuple):
        return f"list {len(value)};".encode() + b"".join(map(one_at_a_time, value))
    name = type(value).__name__
    plain = value is None or isinstance(value, bool | int | float | str | bytes)
    return (f"{name} {value!r};" if plain else f"{name};").encode()


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1, -2, 3],
        (1, 2.5, "a;b", b"\0", None, True, float("nan")),
        [1, [2, [3.0, ()]], {"a": [1, 2], "b": "text"}],
        [1, np.float64(0.1), np.int64(3)],
        [Level.LOW, 1],
        [1, torch.arange(3), object],
        OrderedDict(weights=torch.ones(2, 3), rows=[[i, i + 1] for i in range(50)]),
    ],
)
def test_lists_are_hashed_as_their_values_one_at_a_time(value):
    assert fingerprint(value) == hashlib.sha256(one_at_a_time(value)).hexdigest()


def test_values_that_look_alike_differ():
    alike = [[1], [1.0], [True], ["1"], [b"1"], [[1]], [1, 1], (1, [])]
    assert len({fingerprint(value) for value in alike}) == len(alike)


def test_plain_lists_are_copied_and_others_made_plain():
    given = {"a": (1, "b", None), "c": [np.float64(0.5), (np.int64(2), torch.tensor(3))], "d": [1, 2]}
    found = primitive(given)
    assert found == {"a": [1, "b", None], "c": [0.5, [2, 3]], "d": [1, 2]}
    assert [type(item) for item in found["c"]] == [float, list]
    assert found["d"] is not given["d"]
