"""Small files that ask for much: each is refused in seconds, by a process that may take three gigabytes."""

import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from brainet_pl import BRAINet
from brainet_pl._utils.bounded_yaml import TooManyValues, load_yaml
from brainet_pl._utils.digest import fingerprint
from brainet_pl._utils.framework import ModelCheckpoint
from brainet_pl._utils.stored import FORMAT
from brainet_pl._utils.tensor_file import check_content, read_tensors
from brainet_pl.cli.trust import Untrusted, vet
from brainet_pl.datamodules import Digits
from brainet_pl.network import Linear
from brainet_pl.sklearn import BRAINetClassifier
from brainet_pl.storage.format import DIGEST, add_digests
from brainet_pl.structure import GGT

ROOT = Path(__file__).parents[2]
BYTES, SECONDS = 3 * 2**30, 60
LOAD = "from brainet_pl import BRAINet; BRAINet.load_from_checkpoint({path!r})"
EXPORT = "from brainet_pl.cli import main; main(['export', '--ckpt_path', {path!r}, '--out', {path!r} + '.pt2'])"
ESTIMATOR = "from brainet_pl.sklearn import BRAINetClassifier; BRAINetClassifier.load({path!r})"
TREE = "from pathlib import Path; from brainet_pl.structure import GGT; GGT.from_json(Path({path!r}).read_text())"
COMPARE = "from brainet_pl.cli import main; main(['compare', {path!r}, '--out', {path!r} + '/c.html'])"


def limited(code, path):
    """What a program prints as its error, with limits of memory and time; None if it ends well."""
    head = f"import resource\nresource.setrlimit(resource.RLIMIT_DATA, ({BYTES}, {BYTES}))\n"
    script = head + textwrap.dedent(code).format(path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(Path(path).parent)},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr[-500:]
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, quiet_trainer):
    """A function head -> the content of a checkpoint."""

    def make(head):
        folder = tmp_path_factory.mktemp("small")
        saving = ModelCheckpoint(str(folder), "a")
        model = BRAINet(8, head=head)
        quiet_trainer(folder, saving, limit_train_batches=1, limit_val_batches=1).fit(model, datamodule=Digits())
        return torch.load(saving.best_model_path, weights_only=True)

    return make


@pytest.fixture(scope="module")
def linear(checkpoint):
    return checkpoint(Linear())


def save(content, path):
    """Write a checkpoint with fitting digests, as an attacker would."""
    content["brainet"].pop(DIGEST, None)
    try:
        add_digests(content)
    except (RuntimeError, MemoryError):
        content["brainet"].pop(DIGEST, None)
    torch.save(content, path)
    assert path.stat().st_size < 2e6
    return path


def fresh(linear):
    return {**linear, "brainet": dict(linear["brainet"]), "hyper_parameters": dict(linear["hyper_parameters"]),
            "state_dict": dict(linear["state_dict"])}  # fmt: skip


HEADS = {
    "parameters": {"class_path": "MLP", "init_args": {"num_params": 800_000_000}},
    "ensemble": {"class_path": "Ensemble", "init_args": {"num_params": 800_000_000, "members": 1000}},
}


@pytest.mark.parametrize("head", HEADS)
def test_a_budget_beyond_the_weights(linear, head, tmp_path):
    content = fresh(linear)
    content["hyper_parameters"]["head"] = HEADS[head]
    error = limited(LOAD, save(content, tmp_path / "a.ckpt"))
    assert "expected settings that fit the weights in the file, num_params of at most" in error


def test_more_features_than_weights(linear, tmp_path):
    content = fresh(linear)
    content["brainet"]["in_features"] = 100_000_000
    assert "in_features of at most" in limited(LOAD, save(content, tmp_path / "a.ckpt"))


def test_a_head_that_is_large_by_its_product(linear, tmp_path):
    content = fresh(linear)
    content["brainet"]["in_features"] = 900_000
    content["hyper_parameters"]["task"] = {"class_path": "Classification", "init_args": {"num_classes": 900_000}}
    assert "the size of the head of at most" in limited(LOAD, save(content, tmp_path / "a.ckpt"))


def test_more_classes_than_weights(linear, tmp_path):
    content = fresh(linear)
    content["hyper_parameters"]["num_classes"] = 500_000_000
    assert "num_classes of at most" in limited(LOAD, save(content, tmp_path / "a.ckpt"))


def test_an_input_of_gigabytes(linear, tmp_path):
    for shape in ([2**29], [2**13, 2**13]):
        content = fresh(linear)
        backbone = dict(content["brainet"]["backbone"])
        content["brainet"]["backbone"] = backbone
        backbone["takes"] = {"": {"shape": shape, "dtype": "float32"}}
        error = limited(EXPORT, save(content, tmp_path / "a.ckpt"))
        assert "takes" in error or "inputs of at most" in error


def test_a_compressed_file(linear, tmp_path):
    content = fresh(linear)
    content["state_dict"]["predictor.head.more"] = torch.zeros(2**26)
    whole, packed = tmp_path / "whole.ckpt", tmp_path / "packed.ckpt"
    torch.save(content, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    whole.unlink()
    assert packed.stat().st_size < 2e6
    assert "packed into" in limited(LOAD, packed)
    with pytest.raises(ValueError, match="packed into"):
        read_tensors(packed)


def test_a_tensor_larger_than_its_memory(linear, tmp_path):
    content = fresh(linear)
    content["state_dict"]["predictor.head.more"] = torch.zeros(1).expand(2**30)
    content["brainet"][DIGEST] = {"state_dict": "0" * 64}
    torch.save(content, tmp_path / "a.ckpt")
    assert "expected tensors as large as their memory" in limited(LOAD, tmp_path / "a.ckpt")


def test_tensors_that_share_memory_too_often():
    one = torch.zeros(1000)
    check_content({"tied": [one, one, one[:5]]})
    with pytest.raises(ValueError, match="expected tensors of about"):
        check_content([one] * 20)


def test_lists_of_lists_without_end():
    value = [1.0]
    for _ in range(40):
        value = [value, value]
    with pytest.raises(ValueError, match="nested without end"):
        check_content(value)


def test_no_other_layout():
    with pytest.raises(ValueError, match="expected dense tensors"):
        check_content([torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (2**40,))])


def test_a_tree_of_a_billion_variables(tmp_path):
    leaf = {"variables": [0], "parents": [[]], "score": 0.0}
    tree = {"format": FORMAT, "num_variables": 10**9, "num_rows": 1, "settings": {}, "nodes": [leaf]}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    assert "expected all variables from 0 to 999999999" in limited(TREE, tmp_path / "tree.json")


def chain(depth):
    nodes = [{"variables": list(range(depth - i)), "branches": [[2 * i + 1, 2 * i + 2]]} for i in range(depth - 1)]
    flat = []
    for i, node in enumerate(nodes):
        flat += [node, {"variables": [depth - 1 - i], "parents": [[]], "score": 0.0}]
    flat.append({"variables": [0], "parents": [[]], "score": 0.0})
    return {"format": FORMAT, "num_variables": depth, "num_rows": 1, "settings": {}, "nodes": flat}


def test_a_tree_that_is_too_deep():
    assert GGT.from_dict(chain(50)).num_subnetworks == 1
    with pytest.raises(ValueError, match="expected at most 100 levels in the tree, got 1499"):
        GGT.from_dict(chain(1500))


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))


@pytest.mark.parametrize("text", [BOMB, MERGES, "a: &a [*a]"])
def test_references_to_references(text, tmp_path):
    assert len(text) < 2000
    with pytest.raises(TooManyValues, match="got references"):
        load_yaml(text)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(text)
    assert "got references" in limited(COMPARE, tmp_path / "run")


def test_usual_yaml_is_read_as_ever():
    text = "a: &x {b: [1, 2.5, null, 'c']}\nd: *x\ne: {<<: *x, f: 2}\n"
    assert load_yaml(text) == yaml.safe_load(text)
    assert load_yaml("") is None
    for wrong in ("a: [", "a: 1\n--- \nb: 2", "!!python/object:os.system {}", "[" * 3000):
        with pytest.raises(ValueError, match="expected YAML"):
            load_yaml(wrong)


@pytest.mark.parametrize(
    "config",
    [
        {"data": {"class_path": "Digits", "init_args": {"num_workers": 10**6}}},
        {"trainer": {"devices": 40}},
        {"trainer": {"devices": "40"}},
        {"trainer": {"devices": list(range(40))}},
    ],
)
def test_processes_without_number(config):
    with pytest.raises(Untrusted, match="expected known classes and plain settings"):
        vet(config)


def test_a_few_processes_are_fine():
    assert vet({"trainer": {"devices": 4}})["trainer"]["devices"] == 4
    assert vet({"trainer": {"devices": "auto"}})["trainer"]["devices"] == "auto"
    data = vet({"data": {"class_path": "Digits", "init_args": {"num_workers": 8}}})["data"]
    assert data["init_args"]["num_workers"] == 8


# -- estimators -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def estimator(tmp_path_factory):
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0)).cumsum(1).numpy()
    path = tmp_path_factory.mktemp("estimator") / "a.pt"
    BRAINetClassifier(max_epochs=1).fit(x, (x[:, 3] > 0).astype(int)).save(path)
    return path


def resave(estimator, path, change, digest=True):
    content = torch.load(estimator, weights_only=True)
    change(content)
    if digest:
        content["digest"] = fingerprint({key: value for key, value in content.items() if key != "digest"})
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["settings"].update(num_params=800_000_000),
        lambda c: c.update(classes_dtype="<U500000000"),
        lambda c: c["network"].update(shapes=[4, 10**9, 2]),
        lambda c: c["network"].update(shapes=[10**9, 20, 2]),
    ],
)
def test_an_estimator_that_asks_for_gigabytes(estimator, tmp_path, change):
    error = limited(ESTIMATOR, resave(estimator, tmp_path / "b.pt", change))
    assert error.partition(": ")[2].startswith("expected")


def test_a_changed_estimator_is_refused(estimator, tmp_path):
    def flip(content):
        tensors = (value for key, value in content["weights"].items() if key.startswith("head."))
        weight = next(tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel())
        weight.view(-1)[0] += 1e-3

    BRAINetClassifier.load(estimator)
    with pytest.raises(ValueError, match="expected an estimator as it was saved"):
        BRAINetClassifier.load(resave(estimator, tmp_path / "b.pt", flip, digest=False))
    with pytest.raises(ValueError, match="expected an estimator as it was saved"):
        BRAINetClassifier.load(resave(estimator, tmp_path / "b.pt", lambda c: c.pop("digest"), digest=False))


def test_every_missing_key_of_an_estimator_is_a_clear_error(estimator, tmp_path):
    for key in torch.load(estimator, weights_only=True):
        path = resave(estimator, tmp_path / "b.pt", lambda content, key=key: content.pop(key), digest=key != "digest")
        with pytest.raises(ValueError, match=r"expected .*(take another copy|load it with its own class)"):
            BRAINetClassifier.load(path)
