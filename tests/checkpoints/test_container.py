"""The container of what rebuilds a model: a file that was changed in any place is read as it says, or refused in one
sentence. The attacker signs what was changed, so that the digest is no help."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from brainet_pl import BRAINet, load_swapped, swap_head
from brainet_pl._utils.digest import fingerprint
from brainet_pl.network import Tree
from brainet_pl.sklearn import BRAINetClassifier
from brainet_pl.storage.format import HPARAMS, STORED
from brainet_pl.structure import learn_structure

VALUES = [None, True, 0, -1, 7, 10**12, 0.5, float("nan"), "", "x", "os.system", [], [1], ["x"], {}, {"x": 1}]
ROWS = np.random.default_rng(0).normal(size=(60, 4)).cumsum(axis=1)
LABELS = (ROWS[:, 3] > 0).astype(int)


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def checkpoint(folder):
    model = BRAINet(2, head=Tree(num_params=300), scores=["KNN", "Combined"])
    model.set_structure(learn_structure(ROWS, test="gaussian", threshold=0.05, progress=False))
    content = {"state_dict": model.state_dict(), HPARAMS: dict(model.hparams), "pytorch-lightning_version": "2.6.0"}
    model.on_save_checkpoint(content)
    del content[STORED]["digest"]
    return content


def swapped(folder):
    data = torch.utils.data.TensorDataset(torch.tensor(ROWS, dtype=torch.float32), torch.tensor(LABELS))
    model = swap_head(network(), data, num_classes=2, head=Tree(num_params=300), progress=False)
    model.class_names = ("a", "b")
    model.save(folder / "a.pt")
    return torch.load(folder / "a.pt", weights_only=True)


def estimator(folder):
    BRAINetClassifier(max_epochs=1, members=1).fit(ROWS, LABELS).save(folder / "a.pt")
    return torch.load(folder / "a.pt", weights_only=True)


KINDS = {
    "checkpoint": (checkpoint, BRAINet.load_from_checkpoint, (STORED, HPARAMS)),
    "swapped": (swapped, lambda path: load_swapped(path, network()), None),
    "estimator": (estimator, BRAINetClassifier.load, None),
}


def places(value, path=()):
    """The path of every value in dictionaries and lists; of a long list, its first values."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    return {kind: make(tmp_path_factory.mktemp(kind)) for kind, (make, *_) in KINDS.items()}


def refusal(load, path):
    """What is said of a file that is refused; one that is read says nothing unexpected."""
    try:
        load(path)
    except ValueError as error:
        return str(error)
    return "expected "


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_file_is_refused_in_one_sentence(kind, contents, tmp_path, data):
    _, load, parts = KINDS[kind]
    content = copy.deepcopy(contents[kind])
    tried = [place for place in places(content) if place[0] != "digest" and (parts is None or place[0] in parts)]
    *path, last = data.draw(st.sampled_from(tried))
    inside = content
    for key in path:
        inside = inside[key]
    change = data.draw(st.sampled_from(["delete", "add", "replace", "replace"]))
    if change == "delete":
        del inside[last]
    elif change == "add" and isinstance(inside, dict):
        inside["more"] = 1
    else:
        inside[last] = data.draw(st.sampled_from(VALUES))
    if "digest" in content:
        content["digest"] = fingerprint({key: value for key, value in content.items() if key != "digest"})
    torch.save(content, tmp_path / "changed.pt")
    assert refusal(load, tmp_path / "changed.pt").startswith("expected ")


def test_every_field_of_a_file_is_needed(contents, tmp_path):
    """The oracle of the schema: what a writer writes, a reader wants, field by field."""
    for key in contents["swapped"]:
        content = {name: value for name, value in contents["swapped"].items() if name != key}
        if key != "digest":
            content["digest"] = fingerprint({name: value for name, value in content.items() if name != "digest"})
        torch.save(content, tmp_path / "less.pt")
        with pytest.raises(ValueError, match="expected a swapped model"):
            load_swapped(tmp_path / "less.pt", network())
