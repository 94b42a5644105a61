"""Features on disk: bit for bit those of a plain extraction, run once, and never those of something else."""

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import brainet_pl
from brainet_pl._utils import digest
from brainet_pl.backbones.loading import Backbone
from brainet_pl.backbones.taps import Taps
from brainet_pl.cli import cache as caches
from brainet_pl.datamodules.base import Samples
from brainet_pl.features import identity
from brainet_pl.features import store as feature_store
from brainet_pl.features.extraction import extract as plain_extract

HIDDEN = {0: 1.0}  # what the name of a model can't show


class Body(nn.Module):
    """A small convolutional network with a classification layer to remove."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x))).mean(dim=(2, 3)) * HIDDEN[0])


class Listed(Dataset):
    """Samples of a class that the store does not know, and so has to stream."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"pixel_values": self.x[i], "labels": self.y[i]}


def made(views=False):
    torch.manual_seed(0)
    backbone = Backbone(Body()).build()
    if views:
        backbone.add_view(Taps(("conv",), ("2x2",)))
        backbone.add_view(Taps(("norm",), ("mean_std",)))
    return backbone


def data(n=50):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, 1, 8, 8, generator=generator), torch.arange(n) % 3


def batches(kind=Samples, change=None, **settings):
    x, y = data()
    if change is not None:
        change(x, y)
    return DataLoader(kind(x, y), **({"batch_size": 8} | settings))


def watched(backbone):
    """The number of samples of every pass of the network from now on."""
    seen = []
    backbone.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    return seen


def same(one, other):
    pairs = [(one.targets, other.targets), *zip(*(_all(e.output) for e in (one, other)), strict=True)]
    assert list(one.output.more) == list(other.output.more)
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def _all(output):
    return [
        output.features,
        *output.more.values(),
        *([] if output.base_logits is None else [output.base_logits]),
    ]


def take(store, backbone=None, loader=None, quiet=True):
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("error")
        return feature_store.extract(store, backbone or made(), batches() if loader is None else loader, progress=False)


KINDS = pytest.mark.parametrize("kind", [Samples, Listed])


# -- the same, and once -----------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("views", [False, True])
def test_what_is_stored_is_what_a_plain_extraction_gives(tmp_path, kind, views):
    twin = plain_extract(made(views), batches(kind), progress=False)
    backbone = made(views)
    seen = watched(backbone)
    first = take(tmp_path, backbone, batches(kind))
    same(first.extracted, twin)
    assert seen == first.sizes == [8] * 6 + [2]  # every input once
    again = made(views)
    seen = watched(again)
    second = take(tmp_path, again, batches(kind))
    same(second.extracted, twin)
    assert seen == [feature_store.CHECKED]
    assert second.folder == first.folder
    parts = list(second.parts())
    assert torch.equal(torch.cat([part.features for part in parts]), twin.features)
    assert torch.equal(torch.cat([part.targets for part in parts]), twin.targets)
    assert os.listdir(first.folder.parent) == [first.folder.name]
    assert again.removed == backbone.removed  # the layer to remove was found without a pass over the data


def test_features_are_mapped_and_writing_to_them_leaves_the_files_alone(tmp_path):
    first = take(tmp_path)
    first.extracted.features.zero_()
    assert take(tmp_path).extracted.features.abs().sum() > 0


@KINDS
def test_other_inputs_labels_or_weights_are_extracted(tmp_path, kind):
    first = take(tmp_path, loader=batches(kind))

    def one_bit(x, y):
        x[20] = torch.nextafter(x[20], torch.tensor(2.0))

    def labels(x, y):
        y[3] = 2

    backbone = made()
    seen = watched(backbone)
    other = take(tmp_path, backbone, batches(kind, one_bit))
    same(other.extracted, plain_extract(made(), batches(kind, one_bit), progress=False))
    assert seen == [feature_store.CHECKED, 8]  # the batches that did not change are there already
    relabelled = take(tmp_path, loader=batches(kind, labels))
    assert torch.equal(relabelled.extracted.features, first.extracted.features)
    assert relabelled.extracted.targets[3] == 2
    assert first.extracted.targets[3] == 0
    backbone = made()
    backbone.model.conv.weight.data.mul_(1.01)
    seen = watched(backbone)
    trained = take(tmp_path, backbone, batches(kind))
    assert seen == first.sizes
    assert not torch.equal(trained.extracted.features, first.extracted.features)
    same(take(tmp_path, loader=batches(kind)).extracted, first.extracted)  # the first ones are still there


@KINDS
def test_batches_of_another_size_are_other_batches(tmp_path, kind):
    """Features depend in their last bits on which samples share a batch."""
    take(tmp_path, loader=batches(kind))
    backbone = made()
    seen = watched(backbone)
    found = take(tmp_path, backbone, batches(kind, batch_size=10))
    assert seen == [10] * 5
    same(found.extracted, plain_extract(made(), batches(kind, batch_size=10), progress=False))


def test_shares_of_processes_are_found_by_one_process(tmp_path):
    for rank in range(2):
        rows = [list(range(i, min(i + 8, 50))) for i in range(8 * rank, 50, 16)]
        take(tmp_path, loader=DataLoader(batches().dataset, batch_sampler=rows))
    backbone = made()
    seen = watched(backbone)
    same(take(tmp_path, backbone).extracted, plain_extract(made(), batches(), progress=False))
    assert seen == [feature_store.CHECKED] * 2  # one look at each share


def test_nothing_in_nothing_out(tmp_path):
    assert take(tmp_path, loader=[]) is None


def test_inputs_that_are_no_tensors_are_not_stored(tmp_path):
    with pytest.raises(feature_store.NotStored, match="expected inputs of tensors alone, got list"):
        feature_store.digest_of({"text": ["a"]})


# -- what no name shows -----------------------------------------------------------------------------------------------


@KINDS
def test_a_model_that_changed_behind_its_name_is_found_out(tmp_path, kind, monkeypatch):
    take(tmp_path, loader=batches(kind))
    monkeypatch.setitem(HIDDEN, 0, 1.01)
    with pytest.warns(UserWarning, match="extracted again: the backbone gives other features for the same inputs"):
        found = take(tmp_path, loader=batches(kind), quiet=False)
    same(found.extracted, plain_extract(made(), batches(kind), progress=False))
    same(take(tmp_path, loader=batches(kind)).extracted, found.extracted)


SOURCE = """
import torch
from torch import nn
SCALE = {scale}
def helper(x):
    return x * SCALE
class Made(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 6)
        self.last = nn.Linear(6, 3)
    def features(self, x):
        return {expression}
    def forward(self, x):
        return self.last(self.features(x))
"""
HELPED = "helper(self.fc(x.flatten(1)))"


def compiled(scale, expression):
    """A backbone whose class is always called `made.Made`."""
    space = {"__name__": "made"}
    exec(SOURCE.format(scale=scale, expression=expression), space)
    torch.manual_seed(0)
    return Backbone(space["Made"]()).build()


@KINDS
@pytest.mark.parametrize("changed", [(2.0, HELPED), (1.0, f"{HELPED} + 1"), (1.0, "self.fc(x.flatten(1)).relu()")])
def test_code_that_changed_in_a_class_of_the_same_name_is_found_out(tmp_path, kind, changed):
    first = take(tmp_path, compiled(1.0, HELPED), batches(kind))
    assert take(tmp_path, compiled(1.0, HELPED), batches(kind)).folder == first.folder
    with pytest.warns(UserWarning, match="extracted again: the backbone gives other features for the same inputs"):
        found = take(tmp_path, compiled(*changed), batches(kind), quiet=False)
    assert found.folder == first.folder
    same(found.extracted, plain_extract(compiled(*changed), batches(kind), progress=False))
    same(take(tmp_path, compiled(*changed), batches(kind)).extracted, found.extracted)


def test_data_that_changed_behind_its_name_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "_plain", identity._plain | {Listed})  # it is not
    monkeypatch.setattr(Listed, "__getitem__", lambda self, i: (self.x[i] + HIDDEN[0], self.y[i]))
    take(tmp_path, loader=batches(Listed))
    monkeypatch.setattr(Listed, "__getitem__", lambda self, i: (self.x[i] - HIDDEN[0], self.y[i]))
    with pytest.warns(UserWarning, match="extracted again: the data gives other samples under the same name"):
        found = take(tmp_path, loader=batches(Listed), quiet=False)
    same(found.extracted, plain_extract(made(), batches(Listed), progress=False))


# -- damage -----------------------------------------------------------------------------------------------------------


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def outdated(folder):
    """Turn an entry into one of the format before, whose own digest is right."""
    content = json.loads((folder / "index.json").read_text())["content"] | {"format": feature_store.FORMAT - 1}
    (folder / "index.json").write_text(json.dumps({"content": content, "digest": digest.fingerprint(content)}))


DAMAGE = {
    "a bit of a feature": lambda folder: flip(folder / "features.bin"),
    "a bit of a label": lambda folder: flip(folder / "targets.bin"),
    "a bit of the index": lambda folder: flip(folder / "index.json"),
    "a short file": lambda folder: os.truncate(folder / "features.bin", 100),
    "an empty index": lambda folder: (folder / "index.json").write_text(""),
    "no index": lambda folder: (folder / "index.json").unlink(),
    "no features": lambda folder: (folder / "features.bin").unlink(),
    "an older format": outdated,
    "another index": lambda folder: (folder / "index.json").write_text('{"content": [], "digest": 1}'),
}


@KINDS
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_renamed_and_extracted_again(tmp_path, kind, damage):
    first = take(tmp_path, loader=batches(kind))
    wanted = plain_extract(made(), batches(kind), progress=False)
    damage(first.folder)
    with pytest.warns(
        UserWarning,
        match=rf"renamed .*{first.folder.name} to {first.folder.name}.bad, and features are extracted again",
    ):
        found = take(tmp_path, loader=batches(kind), quiet=False)
    same(found.extracted, wanted)
    same(take(tmp_path, loader=batches(kind)).extracted, wanted)
    assert sorted(os.listdir(first.folder.parent)) == [first.folder.name, f"{first.folder.name}.bad"]


def test_a_full_or_forbidden_disk_is_said(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 100))
        with pytest.raises(feature_store.NotStored, match=r"expected room for 2.2 kB in .*, got 100 bytes"):
            take(tmp_path)
    assert not list(tmp_path.glob("*/*"))
    (tmp_path / "file").write_text("")
    with pytest.raises(feature_store.NotStored):
        take(tmp_path / "file")


def test_a_failed_or_killed_extraction_leaves_nothing(tmp_path):
    class Broken(Samples):
        def __getitem__(self, i):
            return super().__getitem__(i) if i < 30 else 1 / 0

    with pytest.raises(ZeroDivisionError):
        take(tmp_path, loader=batches(Broken))
    (shelf,) = tmp_path.iterdir()
    assert not list(shelf.iterdir())
    old, young = shelf / ".0.tmp", shelf / ".1.tmp"
    for folder in (old, young):
        folder.mkdir()
        (folder / "features.bin").write_bytes(b"123")
    long_ago = time.time() - 2 * feature_store.ORPHANED
    os.utime(old / "features.bin", (long_ago, long_ago))
    take(tmp_path)
    assert not old.exists()
    assert young.exists()  # another process may be at it


SCRIPT = """
import sys, time
from pathlib import Path
import runpy
space = runpy.run_path(sys.argv[1])
store, me, other = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
(store / f"{me}.ready").write_text("")
while not (store / f"{other}.ready").exists():
    time.sleep(0.001)
for kind in ("Samples", "Listed"):
    loader = space["batches"](space[kind])
    entry = space["take"](store / kind, loader=loader)
    space["same"](entry.extracted, space["plain_extract"](space["made"](), loader, progress=False))
"""


def test_two_processes_may_extract_the_same_at_once(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning:brainet_pl", "-c", SCRIPT, __file__, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
    running = [subprocess.Popen([*command, *names], **pipes) for names in ("ab", "ba")]
    for process in running:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said[-2000:]
    for kind in ("Samples", "Listed"):
        (entry,) = (tmp_path / kind).glob("*/*")
        assert feature_store.load(entry) is not None


# -- brainet cache ----------------------------------------------------------------------------------------------------


def test_listing_and_clearing_touch_nothing_else(tmp_path, capsys):
    entry = take(tmp_path)
    other = take(tmp_path, loader=batches(Listed))
    with pytest.warns(UserWarning, match="renamed"):
        feature_store.mark_bad(other.folder, "a test")
    mine = [tmp_path / "notes.txt", tmp_path / "0123456789abcdef" / "notes" / "mine.bin", tmp_path / "data" / "a" / "b"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    caches.main(["--folder", str(tmp_path)])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"2 tables in {tmp_path}, ")
    assert sum("50 samples × 6 features" in line for line in lines) == 1
    assert sum("damaged or outdated" in line for line in lines) == 1
    caches.main(["clear", "--folder", str(tmp_path), "--unused", "1"])
    assert "deleted 0 tables" in capsys.readouterr().out
    kept = entry.extracted.features.clone()
    caches.main(["clear", "--folder", str(tmp_path)])
    assert "deleted 2 tables" in capsys.readouterr().out
    assert not entry.folder.parent.exists()
    assert torch.equal(entry.extracted.features, kept)  # who has them open keeps them
    assert all(path.read_text() == "mine" for path in mine)
    caches.main(["--folder", str(tmp_path / "nowhere")])
    assert "there is no such folder" in capsys.readouterr().out


def test_what_another_process_writes_is_not_cleared(tmp_path):
    take(tmp_path)
    (shelf,) = tmp_path.iterdir()
    with feature_store.Writer(shelf) as writer:
        feature_store.clear(tmp_path)
        assert writer._folder.is_dir()


def test_when_it_was_used_is_known(tmp_path):
    entry = take(tmp_path)
    long_ago = time.time() - 10 * 86400
    for path in entry.folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert [one.folder for one in feature_store.list_stored(tmp_path)] == [entry.folder]
    take(tmp_path)
    assert feature_store.clear(tmp_path, unused_days=5) == []
    for path in entry.folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert len(feature_store.clear(tmp_path, unused_days=5)) == 1


# -- stores that others write to --------------------------------------------------------------------------------------


def rewritten(folder, change):
    """Change the content of an index, and its digest with it."""
    content = json.loads((folder / "index.json").read_text())["content"]
    change(content)
    index = {"content": content, "digest": digest.fingerprint(content)}
    (folder / "index.json").write_text(json.dumps(index))


MALFORMED = {
    "no sizes": lambda c: c.update(sizes=[]),
    "sizes of text": lambda c: c.update(sizes=["8"] * 7),
    "other sizes": lambda c: c.update(sizes=[50]),
    "fewer digests": lambda c: c.update(digests=c["digests"][:1]),
    "digests that are none": lambda c: c.update(digests=None),
    "no arrays": lambda c: c.update(arrays=[]),
    "no targets": lambda c: c["arrays"].pop("targets"),
    "a file elsewhere": lambda c: c["arrays"].update({"../x": c["arrays"]["features"]}),
    "no type": lambda c: c["arrays"]["features"].update(dtype="load"),
    "no shape": lambda c: c["arrays"]["features"].update(shape=None),
    "a shape below zero": lambda c: c["arrays"]["features"].update(shape=[50, -6]),
    "one dimension": lambda c: c["arrays"]["features"].update(shape=[300]),
    "taps that are none": lambda c: c.update(taps=[3]),
    "a tap without values": lambda c: c.update(taps=[[["conv"], ["mean"]]]),
    "another name": lambda c: c.update(name="0/1"),
    "no name": lambda c: c.pop("name"),
    "no format": lambda c: c.pop("format"),
}


@KINDS
@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_entry_is_renamed_and_extracted_again(tmp_path, kind, change):
    first = take(tmp_path, loader=batches(kind))
    rewritten(first.folder, change)
    with pytest.warns(UserWarning, match="and features are extracted again: expected"):
        found = take(tmp_path, loader=batches(kind), quiet=False)
    same(found.extracted, plain_extract(made(), batches(kind), progress=False))


def test_other_targets_are_told_by_their_digest(tmp_path):
    first = take(tmp_path)
    targets = first.folder / "targets.bin"
    targets.write_bytes(targets.read_bytes()[:-8] + b"\x01" * 8)
    with pytest.warns(UserWarning, match="expected targets.bin as it was written"):
        take(tmp_path, quiet=False)


def test_linked_files_are_no_features(tmp_path):
    first = take(tmp_path / "store")
    (first.folder / "features.bin").rename(tmp_path / "elsewhere.bin")
    (first.folder / "features.bin").symlink_to(tmp_path / "elsewhere.bin")
    with pytest.warns(UserWarning, match=r"expected the file features.bin, found none"):
        take(tmp_path / "store", quiet=False)
    assert (tmp_path / "elsewhere.bin").is_file()
