"""Folders of sharded checkpoints: read as the file of one process, and never run."""

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from brainet_pl._utils.tensor_file import Oversized
from brainet_pl.storage.sharded import is_checkpoint, numbered, read_whole


def trained():
    """A model of which one parameter gets no gradient, in groups of another order than its own."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({n: torch.nn.Linear(3, 3) for n in ("first", "second", "unused")})
    groups = [{"params": list(model[n].parameters()), "lr": lr} for n, lr in (("second", 0.1), ("first", 0.2))]
    optimizer = torch.optim.Adam([*groups, {"params": list(model["unused"].parameters())}])
    for _ in range(2):
        model["second"](model["first"](torch.randn(4, 3))).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path):
    model, optimizer = trained()
    states = {"state_dict": model.state_dict(), "optimizer_0": get_optimizer_state_dict(model, optimizer)}
    save(states, checkpoint_id=str(tmp_path / "last.ckpt"), no_dist=True)
    torch.save({"epoch": 3}, tmp_path / "last.ckpt" / "meta.pt")
    return tmp_path / "last.ckpt"


def test_a_folder_is_read_as_the_file_of_one_process(folder):
    model, optimizer = trained()
    content = read_whole(folder)
    assert content["epoch"] == 3
    torch.testing.assert_close(content["state_dict"], dict(model.state_dict()), rtol=0, atol=0)
    (state,) = content["optimizer_states"]
    torch.testing.assert_close(state["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    other = torch.optim.Adam(copy.deepcopy(optimizer.param_groups))
    other.load_state_dict(state)  # and an optimizer takes it
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.2, 0.001]


def test_states_are_numbered_within_groups_whatever_they_were_called():
    groups = [{"params": [6, 7]}, {"params": [0]}]  # as Lightning writes them: places among all parameters
    state = numbered({"state": {0: "c", 7: "b"}, "param_groups": groups})
    assert state == {"state": {2: "c", 1: "b"}, "param_groups": [{"params": [0, 1]}, {"params": [2]}]}
    assert groups[0]["params"] == [6, 7]


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def test_a_description_that_runs_code_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attack = pickle.dumps(Attack())
    pickle.loads(attack)
    assert Path("attacked").exists()  # the attack is real
    Path("attacked").unlink()
    (folder / ".metadata").write_bytes(attack)
    with pytest.raises(ValueError, match=r"expected the description of a checkpoint in .metadata, got \w+.system"):
        read_whole(folder)
    assert not Path("attacked").exists()


def rewrite(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_description_of_more_than_the_files_hold_is_refused(folder):
    def grow(metadata):
        metadata.state_dict_metadata["state_dict.first.weight"].size = torch.Size([10**6, 10**6])

    rewrite(folder, grow)
    with pytest.raises(Oversized, match="expected tensors of at most"):
        read_whole(folder)


def test_shares_elsewhere_are_refused(folder, tmp_path):
    def move(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = f"../{info.relative_path}"

    for file in folder.glob("*.distcp"):
        file.rename(tmp_path / file.name)
    rewrite(folder, move)
    with pytest.raises(ValueError, match="got files elsewhere"):
        read_whole(folder)


def test_what_a_checkpoint_is(folder, tmp_path):
    assert is_checkpoint(folder)
    assert is_checkpoint(folder / "meta.pt")
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "none")
