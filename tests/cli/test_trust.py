"""A checkpoint is data: hostile settings are refused before anything runs, damage is noticed, errors are one line."""

import ast
import collections.abc
import copy
import csv
import dataclasses
import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
import yaml

from brainet_pl import BRAINet, cli
from brainet_pl._utils.csv import write_rows
from brainet_pl._utils.digest import fingerprint
from brainet_pl._utils.framework import NAMESPACE
from brainet_pl._utils.parts import arguments, part_classes
from brainet_pl.callbacks import Evaluation, PredictionFile
from brainet_pl.cli import main, shipped, stored_config
from brainet_pl.cli.trust import FUNCTIONS, IN_PYTHON, OTHERS, SLOTS, Given, Untrusted, given_by, vet
from brainet_pl.storage.format import Checkpoint

ROOT = Path(__file__).parents[2]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"]
EVALUATION, CHECKPOINT = "brainet_pl.callbacks.Evaluation", f"{NAMESPACE}.callbacks.ModelCheckpoint"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The content of a checkpoint that the command line wrote."""
    folder = tmp_path_factory.mktemp("good")
    here = Path.cwd()
    os.chdir(folder)
    try:
        main([
            "fit", "--data=Digits", "--model.num_classes=8", "--model.head=Tree", "--model.head.num_params=2000",
            "--model.scores+=KNN", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1",
            "--model.lr_scheduler=torch.optim.lr_scheduler.StepLR", "--model.lr_scheduler.step_size=1",
            "--structure.threshold=0.2", f"--trainer.callbacks+={EVALUATION}",
            f"--trainer.callbacks+={CHECKPOINT}", "--trainer.callbacks.filename={epoch:02d}-{val/cls/NLL:.2f}",
            "--trainer.callbacks.monitor=val/cls/NLL", "--trainer.callbacks.save_last=true",
            "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs",
            "--trainer.max_epochs=1", "--trainer.limit_train_batches=2", *QUIET,
        ])  # fmt: skip
        (path,) = folder.glob("runs/**/last.ckpt")
        return path
    finally:
        os.chdir(here)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OWNED", str(tmp_path / "owned"))  # jsonargparse reads a configuration from within its folder
    return tmp_path


def edited(good, change, place="checkpoint"):
    """The good checkpoint with its settings changed, as an attacker would: without the digests that would tell.

    They stand in the file, which may be one of version 0.2.0 and hold all settings, or in the `config.yaml` of its run.
    """
    content = torch.load(good, weights_only=True)
    config = copy.deepcopy(stored_config(Checkpoint.read(good)))
    change(config)
    del content["brainet"]["digest"]
    path = Path("edited.ckpt")
    if place == "checkpoint":
        content["brainet_config"] = config
    else:
        path = Path("run/checkpoints/edited.ckpt")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parents[1] / "config.yaml").write_text(yaml.safe_dump(config))
    torch.save(content, path)
    torch.load(path, weights_only=True)
    return str(path)


# -- attacks ----------------------------------------------------------------------------------------------------------


def call(function="os.popen"):
    """Settings that make jsonargparse call a function of the standard library."""
    return {
        "class_path": "torch.fx.symbolic_trace",
        "init_args": {"root": function, "concrete_args": {"cmd": "touch $OWNED"}},
    }


def put(path, value):
    def change(config):
        *way, last = path
        for key in way:
            config = config[key]
        config[last] = value

    return change


def nested(levels):
    value = call()
    for _ in range(levels):
        value = {"more": [value]}
    return value


def endless():
    value = []
    value.append(value)
    return value


def wide():
    value = 1.5
    for _ in range(30):
        value = [value, "x", value]  # 2**30 values in a few hundred bytes
    return value


EVIL = [
    ("backbone", ["model", "backbone"], call()),
    ("backbone model", ["model", "backbone"], {"model": call()}),
    ("backbone options", ["model", "backbone"], {"model": "cifar_resnet20", "options": {"num_classes": call()}}),
    ("backbone options as text", ["model", "backbone"], {"model": "cifar_resnet20", "options": json.dumps(call())}),
    ("backbone as text", ["model", "backbone"], json.dumps(call())),
    ("backbone by name", ["model", "backbone"], "os:popen"),
    ("backbone from a hub", ["model", "backbone"], "timm/hf-hub:someone/model"),
    ("backbone of a file", ["model", "backbone"], "evil.yaml"),
    ("backbone that reads", ["model", "backbone"], {"model": "timm/vgg11", "options": {"checkpoint_path": "x"}}),
    ("head", ["model", "head"], call()),
    ("head by path", ["model", "head"], "antigravity.Tree"),
    ("head of a file", ["model", "head"], "evil.yaml"),
    ("in a head", ["model", "head", "init_args", "num_params"], call()),
    ("in a score", ["model", "scores", 0, "init_args", "k"], call()),
    ("score", ["model", "scores"], [call()]),
    ("scores as text", ["model", "scores"], json.dumps([call()])),
    ("task", ["model", "task"], call()),
    ("calibration", ["model", "calibration"], call()),
    ("metric", ["model", "metrics"], [call()]),
    (
        "function of a metric",
        ["model", "metrics"],
        [{"class_path": "brainet_pl.metrics.measures.BrierScore", "init_args": {"dist_sync_fn": "os.system"}}],
    ),
    ("passes", ["model", "passes"], call()),
    ("optimizer", ["model", "optimizer"], call()),
    ("optimizer by function", ["model", "optimizer"], "os.system"),
    ("in an optimizer", ["model", "optimizer", "init_args", "lr"], call()),
    ("import by an optimizer", ["model", "optimizer", "init_args", "lr"], "antigravity.x"),
    ("scheduler", ["model", "lr_scheduler"], call()),
    (
        "scheduler of a function",
        ["model", "lr_scheduler"],
        {"class_path": "torch.optim.lr_scheduler.LambdaLR", "init_args": {"lr_lambda": "os.system"}},
    ),
    ("data", ["data"], call()),
    ("in the data", ["data", "init_args", "batch_size"], call()),
    ("keywords of the data", ["data", "dict_kwargs"], {"x": call()}),
    ("data by path", ["data"], "antigravity.Data"),
    ("callback", ["trainer", "callbacks"], [call()]),
    ("in a callback", ["trainer", "callbacks", 0, "init_args", "image_shape"], call()),
    (
        "function by name",
        ["trainer", "callbacks"],
        [{"class_path": "pytorch_lightning.callbacks.LambdaCallback", "init_args": {"setup": "os.popen"}}],
    ),
    ("deep", ["trainer", "callbacks", 0, "init_args", "score"], nested(10)),
    ("very deep", ["trainer", "callbacks", 0, "init_args", "score"], nested(100)),
    ("endless", ["trainer", "callbacks", 0, "init_args", "image_shape"], endless()),
    ("too many", ["trainer", "callbacks", 0, "init_args", "image_shape"], wide()),
    ("tensor", ["model", "passes"], torch.zeros(3)),
    ("absolute score file", ["trainer", "callbacks", 0, "init_args", "score_file"], "/tmp/owned"),
    ("score file above", ["trainer", "callbacks", 0, "init_args", "score_file"], "../owned"),
    ("score file below", ["trainer", "callbacks", 0, "init_args", "score_file"], "a/owned"),
    ("checkpoints elsewhere", ["trainer", "callbacks", 1, "init_args", "dirpath"], "/tmp/owned"),
    ("checkpoints in the home", ["trainer", "callbacks", 1, "init_args", "dirpath"], "~/owned"),
    ("checkpoint name above", ["trainer", "callbacks", 1, "init_args", "filename"], "../{epoch}"),
    ("checkpoint name of a format", ["trainer", "callbacks", 1, "init_args", "filename"], ".{epoch:c}./x"),
    ("key", ["more"], call()),
    ("key of the model", ["model", "more"], call()),
    ("path of the parser", ["data", "init_args", "__path__"], "evil.yaml"),
]
EVIL_FIT = [
    ("logger", ["trainer", "logger"], [call()]),
    ("in a logger", ["trainer", "logger", "init_args", "prefix"], call()),
    ("logs elsewhere", ["trainer", "logger", "init_args", "save_dir"], "/tmp/owned"),
    ("logs at an address", ["trainer", "logger", "init_args", "name"], "local:///tmp/owned"),
    ("version above", ["trainer", "logger", "init_args", "version"], "../../owned"),
    (
        "another server",
        ["trainer", "logger"],
        {"class_path": "pytorch_lightning.loggers.WandbLogger", "init_args": {"settings": {"base_url": "http://x"}}},
    ),
    ("plugin", ["trainer", "plugins"], [call()]),
    ("plugin by path", ["trainer", "plugins"], ["antigravity.x"]),
    ("profiler", ["trainer", "profiler"], call()),
    ("strategy", ["trainer", "strategy"], call()),
    ("strategy by path", ["trainer", "strategy"], "antigravity.x"),
    ("accelerator", ["trainer", "accelerator"], call()),
    ("root", ["trainer", "default_root_dir"], "/tmp/owned"),
    ("root by a variable", ["trainer", "default_root_dir"], "$HOME"),
    ("cache", ["structure", "cache"], "../owned"),
    (
        "folder of features",
        ["trainer", "callbacks"],
        [{"class_path": "brainet_pl.callbacks.FeatureCache", "init_args": {"folder": "/tmp/owned"}}],
    ),
    ("test by path", ["structure", "test"], "antigravity.Test"),
    ("setting of the Trainer", ["trainer", "more"], call()),
]


PLACED = [(name, *rest, "checkpoint") for name, *rest in EVIL + EVIL_FIT]
PLACED += [
    (f"{name}, config.yaml", *rest, "run") for name, *rest in EVIL + EVIL_FIT if rest[0][0] in ("data", "trainer")
]


@pytest.mark.parametrize(("path", "value", "place"), [pytest.param(*rest, id=name) for name, *rest in PLACED])
def test_hostile_settings_are_refused_before_anything_runs(path, value, place, good, folder, monkeypatch):
    (folder / "evil.yaml").write_text(yaml.safe_dump({"class_path": "os.popen", "init_args": {"cmd": "touch $OWNED"}}))
    before = set(sys.modules)
    change = put(path, value)
    monkeypatch.setattr(cli, "BrainetCLI", lambda *_, **__: pytest.fail("reached jsonargparse"))
    refusal = (Untrusted, r"expected known classes and plain settings .*got .*--trust_checkpoint")
    if (
        place == "checkpoint" and path[-1] == "image_shape" and isinstance(value, list)
    ):  # the file itself is refused, whatever its settings
        refusal = (ValueError, "nested without end")
    with pytest.raises(refusal[0], match=refusal[1]):
        main(["fit", "--ckpt_path", edited(good, change, place)])
    assert not (folder / "owned").exists()
    assert not {name for name in set(sys.modules) - before if name.startswith(("antigravity", "toys"))}


@pytest.mark.parametrize("command", ["test", "validate", "predict"])
def test_every_command_refuses(command, good, folder):
    attacks = [(["model", "backbone"], "checkpoint"), (["data"], "checkpoint"), (["data"], "run")]
    for path, place in attacks:
        with pytest.raises(Untrusted, match=r"torch\.fx\.symbolic_trace"):
            main([command, "--ckpt_path", edited(good, put(path, call()), place), *QUIET])
    assert not (folder / "owned").exists()


@pytest.mark.parametrize("place", ["checkpoint", "run"])
def test_the_attack_is_real(place, good, folder, monkeypatch):
    """With trust, a file of the same kind runs what it names: the refusal above is what stops it."""
    (folder / "evil.py").write_text("import os\nopen(os.environ['OWNED'], 'w')\ndef run(*_, **__): pass\n")
    monkeypatch.syspath_prepend(str(folder))
    function = {"class_path": "pytorch_lightning.callbacks.LambdaCallback", "init_args": {"setup": "evil.run"}}
    file = edited(good, put(["trainer", "callbacks"], [function]), place)
    words = ["test", "--ckpt_path", file, "--trainer.logger=false"]
    with pytest.raises(Untrusted, match="LambdaCallback"):
        main([*words, *QUIET])
    assert not (folder / "owned").exists()
    main([*words, *QUIET, "--trust_checkpoint"])
    assert (folder / "owned").exists()
    sys.modules.pop("evil")


def test_the_model_is_that_of_the_checkpoint_whatever_the_run_says(good, folder):
    file = edited(good, put(["model", "backbone"], call()), "run")
    assert "backbone" in yaml.safe_load(Path("run/config.yaml").read_text())["model"]
    assert vet(stored_config(Checkpoint.read(file)))["model"]["backbone"] is None


def test_a_configuration_that_can_not_be_read_is_said(good, folder):
    file = edited(good, lambda config: None, "run")
    for text in ("[" * 100_000, "a: [", "\x00"):
        Path("run/config.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"expected the configuration of a run in .*config\.yaml, got \w+ when"):
            main(["test", "--ckpt_path", file, *QUIET])


def test_settings_of_a_model_saved_in_python_are_vetted_too(good, folder):
    content = torch.load(good, weights_only=True)
    del content["brainet_config"], content["brainet"]["digest"]
    content["hyper_parameters"]["backbone"] = call()
    torch.save(content, "edited.ckpt")
    with pytest.raises(Untrusted, match=r"as model\.backbone"):
        main(["test", "--ckpt_path", "edited.ckpt", "--data=Digits", *QUIET])


def test_function_that_makes_the_model_is_refused(good, folder):
    content = torch.load(good, weights_only=True)
    del content["brainet"]["digest"]
    content["hyper_parameters"]["_instantiator"] = "pytorch_lightning.cli.instantiate_module"
    torch.save(content, "edited.ckpt")
    with pytest.raises(ValueError, match="got a function that makes the model"):
        BRAINet.load_from_checkpoint("edited.ckpt")


@pytest.mark.parametrize("name", ["local:///{folder}/precious", "{dirpath}/../../../../precious", "s3://x/precious"])
def test_states_of_callbacks_do_not_delete_files_elsewhere(name, good, folder):
    (folder / "precious").mkdir()
    file = edited(good, lambda config: None, "run")
    content = torch.load(file, weights_only=True)
    (state,) = (state for state in content["callbacks"].values() if "best_model_path" in state)
    state["last_model_path"] = state["best_model_path"] = name.format(folder=folder, dirpath=state["dirpath"])
    torch.save(content, file)
    with pytest.raises(ValueError, match="expected checkpoints in the folder of the run"):
        main(["fit", "--ckpt_path", file, "--trainer.max_epochs=2", *QUIET])
    assert (folder / "precious").is_dir()


# -- what is still possible -------------------------------------------------------------------------------------------


def test_settings_of_an_honest_checkpoint_pass_unchanged(good):
    config = stored_config(Checkpoint.read(good))
    again = vet(config)
    assert again["structure"] == config["structure"]
    assert again["trainer"]["logger"] == config["trainer"]["logger"]
    assert again["trainer"]["callbacks"][1] == config["trainer"]["callbacks"][1]
    assert again["model"]["optimizer"] == config["model"]["optimizer"]
    assert again["model"]["scores"][0]["init_args"] == config["model"]["scores"][0]["init_args"]
    assert again["data"]["class_path"] == "brainet_pl.datamodules.digits.Digits"
    assert vet(again) == again


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_configuration_passes(name):
    config = yaml.safe_load(shipped()[name].read_text())
    config.pop("seed_everything")
    assert vet(vet(config)) == vet(config)


def test_resuming_and_testing_need_no_more_than_the_checkpoint(good, folder):
    resumed = main(["fit", "--ckpt_path", str(good), "--trainer.max_epochs=2", *QUIET])
    assert resumed.trainer.current_epoch == 2
    assert resumed.config["fit"]["weights_only"] is True
    tested = main(["test", "--ckpt_path", str(good), "--trainer.logger=false", *QUIET])
    assert "ood/held_out/knn/AUROC" in tested.trainer.callback_metrics


def test_other_lightning(good):
    spec = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/cls/NLL"}}
    (found,) = vet({"trainer": {"callbacks": [spec]}})["trainer"]["callbacks"]
    assert found["class_path"] == f"{NAMESPACE}.callbacks.EarlyStopping"


def test_short_names_are_those_of_the_table():
    specs = [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/cls/NLL"}}, {"class_path": "Evaluation"}]
    found = [spec["class_path"] for spec in vet({"trainer": {"callbacks": specs}})["trainer"]["callbacks"]]
    assert found == [f"{NAMESPACE}.callbacks.EarlyStopping", "brainet_pl.callbacks.evaluation.Evaluation"]
    for slot, name in (("callbacks", "LambdaCallback"), ("callbacks", "CSVLogger"), ("logger", "MLFlowLogger")):
        with pytest.raises(Untrusted):
            vet({"trainer": {slot: [{"class_path": name}]}})


TOY = '''
from torch import nn
from brainet_pl.datamodules import Digits

class Mine(Digits):
    """Digits.

    Args:
        more: anything.
    """

    def __init__(self, more: dict | None = None, batch_size: int = 64):
        super().__init__(batch_size=batch_size)
        self.more = more

class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(64, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.body(x))
'''


@pytest.fixture
def toy(folder, monkeypatch):
    (folder / "toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("toy", None)


def test_classes_that_the_user_names_again(good, toy):
    config = copy.deepcopy(stored_config(Checkpoint.read(good)))
    put(["data"], {"class_path": "toy.Mine", "init_args": {"more": {"a": [1, "b"]}, "batch_size": 32}})(config)
    checkpoint = edited(good, lambda stored: stored.update(config))
    words = ["validate", "--ckpt_path", checkpoint, "--trainer.logger=false", *QUIET]
    with pytest.raises(Untrusted, match=r"got 'toy\.Mine' as data: a checkpoint is data; give it yourself"):
        main(words)
    assert "toy" not in sys.modules
    named = main([*words, "--data=toy.Mine"])
    assert named.datamodule.batch_size == 32
    (toy / "mine.yaml").write_text("data: {class_path: toy.Mine}")
    assert main([*words, "--config", "mine.yaml"]).datamodule.more == {"a": [1, "b"]}
    assert type(main([*words, "--trust_checkpoint"]).datamodule).__name__ == "Mine"
    other = main([*words, "--data=Digits"])  # what the user replaces is not asked for at all
    assert type(other.datamodule).__name__ == "Digits"


def test_a_class_that_the_user_names_brings_no_others(good):
    given = Given(frozenset({"toy.Mine"}))
    for value in (call(), "os.system", json.dumps(call()), {"a": [call()]}, "class_path: os.popen"):
        with pytest.raises(Untrusted):
            vet({"data": {"class_path": "toy.Mine", "init_args": {"more": value}}}, given)
    fine = {"data": {"class_path": "toy.Mine", "init_args": {"more": "some.file with words", "x": [1, None, "a.csv"]}}}
    assert vet(fine, given) == fine


def test_the_name_of_the_file_gives_no_leave(folder):
    assert "os.system" not in given_by(["test", "--ckpt_path", "os.system"]).texts
    assert given_by(["fit", "--model.scores+", "[{class_path: a.B}]"]).texts >= {"a.B"}


def test_backbones_by_path_are_not_imported_in_python(good, toy):
    content = torch.load(good, weights_only=True)
    del content["brainet"]["digest"]
    (toy / "evil.py").write_text("import os\nopen(os.environ['OWNED'], 'w')\n")
    for name in ("evil:Body", "os:popen", "torch:load", "nowhere"):
        content["hyper_parameters"]["backbone"] = {"model": name, "options": {"cmd": "touch $OWNED"}}
        torch.save(content, "edited.ckpt")
        with pytest.raises(ValueError, match=r"nothing is imported because a file names it; .*backbone=module"):
            BRAINet.load_from_checkpoint("edited.ckpt")
    content["hyper_parameters"]["backbone"] = {"model": "cifar_resnet20", "weights": "elsewhere.pt"}
    torch.save(content, "edited.ckpt")
    with pytest.raises(ValueError, match="got the file of other weights"):
        BRAINet.load_from_checkpoint("edited.ckpt")
    assert not (toy / "owned").exists()


def test_a_backbone_whose_module_is_imported_comes_back(toy, quiet_trainer):
    from brainet_pl.datamodules import Digits

    model = BRAINet(8, backbone="toy:Body", head="Linear")
    trainer = quiet_trainer(toy, limit_train_batches=1, limit_val_batches=1)
    trainer.fit(model, datamodule=Digits())
    trainer.save_checkpoint("toy.ckpt")
    again = BRAINet.load_from_checkpoint("toy.ckpt")
    assert type(again.backbone.model).__name__ == "Body"
    module = sys.modules.pop("toy")
    with pytest.raises(ValueError, match="got 'toy:Body'"):
        BRAINet.load_from_checkpoint("toy.ckpt")
    BRAINet.load_from_checkpoint("toy.ckpt", backbone=module.Body())


def kinds(hint):
    """All types in a hint, down to those without parts."""
    parts = [part for part in typing.get_args(hint) if typing.get_origin(hint) is not typing.Literal]
    if dataclasses.is_dataclass(hint):  # settings in one dictionary
        parts = list(typing.get_type_hints(hint).values())
    if not parts:
        return {typing.get_origin(hint) or hint}
    return set().union(*(kinds(part) for part in parts))


def test_own_classes_take_nothing_but_data():
    """What `vet` relies on: none of their arguments is a class, a function or anything at all."""
    data = {bool, int, float, str, type(None), ..., typing.Literal}
    for base in (base for base in SLOTS.values() if base is not None):
        for cls in part_classes(base).values():
            if not cls.__module__.startswith("brainet_pl.") or cls.__module__ == "brainet_pl.cli.lightning_cli":
                continue
            if cls.__name__ in IN_PYTHON:
                continue  # refused, see below
            hints = typing.get_type_hints(cls.__init__)
            named = [a.name for a in arguments(cls) if a.name in hints and (cls.__name__, a.name) not in FUNCTIONS]
            taken = {name: kinds(hints[name]) for name in named}
            if cls.__name__ == "StructureLearning":
                del taken["test"]  # a class by its name, vetted
            assert all(found <= data for found in taken.values()), (cls, taken)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SwapHead", {"forward": "os.system"}),
        ("SwapHead", {"layer": "fc"}),
        ("Evaluation", {"logits": "os.system"}),
        ("Evaluation", {"unknown": {"far": {"class_path": "os.system"}}}),
    ],
)
def test_functions_of_callbacks_come_from_no_file(name, settings):
    for path in (name, f"brainet_pl.callbacks.{name}"):
        with pytest.raises(ValueError, match="expected known classes and plain settings in the checkpoint"):
            vet({"trainer": {"callbacks": [{"class_path": path, "init_args": settings}]}})
    kept = vet({"trainer": {"callbacks": [{"class_path": "Evaluation", "init_args": {"logits": None}}]}})
    assert kept["trainer"]["callbacks"][0]["init_args"] == {"logits": None}


def test_texts_of_the_table_are_no_classes():
    from datetime import timedelta
    from importlib import import_module

    for path, texts in ((path, texts) for table in OTHERS.values() for path, texts in table.items()):
        module, _, name = path.rpartition(".")
        cls = getattr(import_module(module), name)
        names = vars(typing) | vars(collections.abc) | {"Run": int, "RunDisabled": int}
        signature = typing.get_type_hints(cls.__init__, vars(sys.modules[cls.__module__]) | names)
        for text in texts.split():
            if text in signature and text != "theme":
                allowed = {bool, int, str, Path, timedelta, type(None), typing.Literal}
                assert kinds(signature[text]) <= allowed, (path, text)


# -- files that are written and read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/tmp/x.csv", "../x.csv", "a/x.csv", "..", "a\\x.csv", 3])
def test_names_of_files_have_no_folders(name):
    for make in (lambda: Evaluation(score_file=name), lambda: PredictionFile(name)):
        with pytest.raises(ValueError, match="name of a file without folders"):
            make()
    PredictionFile("")


def test_formulas_are_text_and_numbers_stay_numbers(folder):
    rows = [["=cmd|x", "+1", "-1", "@x", "\tx", "\rx", "a=b", ""], [-1, 2.5, None, -3.5, True, 0, float("-inf"), -0.0]]
    with open("x.csv", "w", newline="") as file:
        write_rows(file, rows)
    with open("x.csv", newline="") as file:
        texts, numbers = csv.reader(file)
    assert texts == ["'=cmd|x", "'+1", "'-1", "'@x", "'\tx", "'\rx", "a=b", ""]
    assert numbers == ["-1", "2.5", "", "-3.5", "True", "0", "-inf", "-0.0"]


def test_every_csv_file_is_written_by_the_one_helper():
    for path in [*ROOT.glob("brainet_pl/**/*.py"), *ROOT.glob("callbacks/*.py"), *ROOT.glob("datamodules/*.py")]:
        text = path.read_text()
        # predictions.py puts parts together that the helper wrote, runs.py rows of metrics.csv as Lightning wrote them.
        known = {"_utils/csv.py": (1, 0), "callbacks/predictions.py": (1, 0), "storage/runs.py": (0, 1)}
        allowed = known.get("/".join(path.parts[-2:]), (0, 0))
        assert (text.count("csv.writer("), text.count("DictWriter(")) == allowed, path


def test_every_load_is_of_weights_only():
    found = 0
    for path in [*ROOT.glob("brainet_pl/**/*.py"), *ROOT.glob("callbacks/*.py"), *ROOT.glob("datamodules/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("weights_only") == "True", f"{path}:{node.lineno}"
                found += 1
    assert found >= 2


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_no_flipped_bit_changes_a_model(count, good, folder):
    data = Path(good).read_bytes()
    before = torch.load(good, weights_only=True)
    generator = torch.Generator().manual_seed(count)
    refused = 0
    for place in torch.randint(len(data), (count,), generator=generator).tolist():
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        Path("damaged.ckpt").write_bytes(damaged)
        try:
            model = BRAINet.load_from_checkpoint("damaged.ckpt")
        except ValueError as error:
            refused += str(error).startswith("expected ")
            continue
        refused += fingerprint(dict(model.state_dict())) == fingerprint(dict(before["state_dict"]))
        assert dict(model.hparams) == before["hyper_parameters"]
    assert refused == count  # or was the same model: some bytes of the file mean nothing


def test_flipped_weights_are_refused_everywhere(good, folder):
    """A bit in the bytes of each tensor in turn."""
    before = torch.load(good, weights_only=True)
    data = Path(good).read_bytes()
    tried = 0
    for name, tensor in before["state_dict"].items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        place = data.find(raw)
        if len(raw) < 64 or data.count(raw) != 1:
            continue
        damaged = bytearray(data)
        damaged[place + len(raw) // 2] ^= 4
        Path("damaged.ckpt").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"got another state_dict: the file is damaged"):
            BRAINet.load_from_checkpoint("damaged.ckpt")
        tried += 1
        last = name
    assert tried > 3, last
    with pytest.raises(ValueError, match=r"got another state_dict: the file is damaged"):
        main(["test", "--ckpt_path", "damaged.ckpt", "--data=Digits", "--trainer.logger=false", *QUIET])


def test_changed_structures_and_settings_are_refused(good, folder):
    content = torch.load(good, weights_only=True)
    for change, part in (
        (lambda c: c["brainet"]["ggt"].update(num_rows=7), "brainet"),
        (lambda c: c["hyper_parameters"].update(passes=7), "hyper_parameters"),
        (lambda c: c["brainet_config"]["model"].update(passes=7), "brainet_config"),
        (lambda c: c.pop("state_dict"), "state_dict"),
    ):
        other = copy.deepcopy(content)
        change(other)
        torch.save(other, "other.ckpt")
        with pytest.raises(ValueError, match=f"got another {part}: the file is damaged"):
            BRAINet.load_from_checkpoint("other.ckpt")
    del content["brainet"]["digest"]  # as of one that a user changed
    torch.save(content, "changed.ckpt")
    BRAINet.load_from_checkpoint("changed.ckpt")


def test_fingerprints_see_names_types_shapes_and_bytes():
    base = {"a": torch.arange(4.0), "b": [1, "x", None, 2.5]}
    others = [
        {"c": torch.arange(4.0), "b": [1, "x", None, 2.5]},
        {"a": torch.arange(4.0).view(2, 2), "b": [1, "x", None, 2.5]},
        {"a": torch.arange(4.0).view(torch.int32), "b": [1, "x", None, 2.5]},
        {"a": torch.arange(4.0).flip(0), "b": [1, "x", None, 2.5]},
        {"a": torch.arange(4.0), "b": [1, "x", None, 2.6]},
        {"a": torch.arange(4.0), "b": [True, "x", None, 2.5]},
        {"a": torch.arange(4.0), "b": [1, "x", [None, 2.5]]},
    ]
    assert len({fingerprint(value) for value in [base, *others]}) == 8
    assert fingerprint(base) == fingerprint({"a": torch.arange(8.0)[::2] / 2, "b": (1, "x", None, 2.5)})
    fingerprint({"empty": torch.zeros(0), "none": torch.tensor(1.0), "half": torch.ones(2, dtype=torch.bfloat16)})


# -- the command line -------------------------------------------------------------------------------------------------


def brainet(*words, **settings):
    env = os.environ | {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "brainet_pl.cli", *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False, **settings)


def console(monkeypatch, capsys, *words):
    """What the console script says, without a process of its own, and its status."""
    monkeypatch.setattr(sys, "argv", ["brainet", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.console()
    return capsys.readouterr().err, end.value.code


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (
            ["test", "--ckpt_path", "typo.ckpt"],
            "ckpt_path to be a checkpoint file, best, last or hpc, got 'typo.ckpt'",
            2,
        ),
        (["test", "--ckpt_path=http://x/y.ckpt"], "got the address http://x/y.ckpt: download it", 2),
        (["fit", "--config", "digits", "--ckpt_path", "s3://x/y.ckpt"], "got the address", 2),
        (["fit", "--config", "url.yaml"], "got the address", 2),
        (["fit", "--config", "digits", "--weights_only=false"], "weights_only to be true", 2),
        (["fit", "--config", "imagenet"], "one of the shipped configurations (cifar10_resnet18, ", 2),
        (["test", "--ckpt_path", "broken.ckpt"], "the file is damaged or no checkpoint", 1),
        (["test", "--ckpt_path", "foreign.ckpt"], "expected a checkpoint of BRAINet", 1),
        (["fit", "--data=Digits", "--model.num_classes=8", "--structure.bins=-1"], "expected bins of at least 2", 2),
        (["report", "nowhere"], "expected the folder of a run", 2),
        (["report", "malformed"], "expected JSON in malformed/record.json", 1),
        (["report", "structure"], "expected a learned structure in structure/structure.json", 1),
    ],
)
def test_errors_are_one_line(words, message, code, folder, monkeypatch, capsys):
    (folder / "broken.ckpt").write_bytes(b"PK\x03\x04 nothing")
    torch.save({"state_dict": {}}, folder / "foreign.ckpt")
    (folder / "url.yaml").write_text("model: {num_classes: 8}\ndata: Digits\nckpt_path: http://x/y.ckpt\n")
    for name, file in {"malformed": "record.json", "structure": "structure.json"}.items():
        (folder / name).mkdir()
        (folder / name / "metrics.csv").write_text("step\n0\n")
        (folder / name / file).write_text("[" * 100_000)
    said, status = console(monkeypatch, capsys, *words)
    assert status == code, said
    lines = [line for line in said.splitlines() if "Seed set" not in line]
    assert len(lines) == 1, said
    assert lines[0].startswith("brainet: expected ")
    assert message in lines[0]


def test_debug_shows_the_traceback(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["brainet", "test", "--ckpt_path", "typo.ckpt", "--debug"])
    with pytest.raises(FileNotFoundError, match=r"typo\.ckpt"):
        cli.console()


def test_lines_of_an_error_hold_no_signs_for_the_terminal():
    assert cli.one_line(ValueError("expected a\n\x1b[2Jb\tc")) == "expected a [2Jb c"
    assert cli.one_line(KeyError("x")) == "KeyError: 'x'"
    assert cli.one_line(RuntimeError()) == "RuntimeError"


def test_a_process_ends_with_one_line_and_its_status(folder):
    done = brainet("test", "--ckpt_path", "typo.ckpt", cwd=folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("brainet: expected ckpt_path") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, "lightning"])
def test_interrupts_say_so(error, monkeypatch, capsys):
    def interrupted(words):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if error == "lightning":
                sys.exit(1)
            raise

    monkeypatch.setattr("brainet_pl.cli.commands.main", interrupted)
    said, code = console(monkeypatch, capsys, "fit")
    assert said == "brainet: interrupted\n"
    assert code == 130
