"""A toy of each kind from outside the package, through `brainet fit` and `brainet test`; help and refusals of all."""

import inspect
import sys

import pytest
import torch
import wandb

from brainet_pl._utils.framework import pl
from brainet_pl._utils.parts import arguments, make_part, part_classes
from brainet_pl.calibration import Calibrator, Conformal
from brainet_pl.cli import BrainetCLI, main
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.measures import Measure
from brainet_pl.network import Head, HeadSettings
from brainet_pl.scores import Score
from brainet_pl.structure import IndependenceTest
from brainet_pl.tasks import Classification, Task

TOYS = '''
"""What a user would write: one class of each kind."""
import torch
from sklearn.datasets import load_iris
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl.calibration import Calibrator, Conformal
from brainet_pl.metrics.measures import Measure
from brainet_pl._utils.framework import pl
from brainet_pl.network import Head, HeadSettings, Outputs
from brainet_pl.scores import Score
from brainet_pl.structure.independence import PartialCorrelation


class ToyHead(Head):
    def __init__(self, d, out, noise):
        super().__init__()
        self.dense, self.noise = nn.Linear(d, out), noise

    def forward(self, x):
        return self.dense(x)

    def passes(self, x, count):
        return Outputs(torch.stack([self.dense(x) + self.noise * torch.randn(1) for _ in range(count)]))


class Noisy(HeadSettings):
    """A noisy linear head.

    Args:
        noise: of the logits.
    """

    def __init__(self, noise: float = 0.1):
        self.noise = noise

    def build(self, in_features, out_features, ggt=None):
        return ToyHead(in_features, out_features, self.noise)


class Length(Score):
    """The length of the features, relative to the mean of the training data."""

    units = {"length": "times the mean"}

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def fit(self, features, labels):
        self.mean = features.norm(dim=1).mean()

    def forward(self, passes):
        return {"length": passes.features.norm(dim=1) / self.mean}


class Shrink(Calibrator):
    """Half way to the uniform distribution."""

    def observe(self, predicted, target, scores):
        self.seen = set(scores)

    def finalize(self):
        assert "length" in self.seen
        return {"halved": torch.tensor(0.5)}

    def forward(self, predicted, scores):
        return 0.5 * predicted + 0.5 / predicted.shape[1]


class Second(Measure):
    """How often the label is among the two most probable classes."""

    title, unit, higher_is_better = "Top two", "share", True

    def __init__(self):
        super().__init__()
        self.add_state("hits", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, preds, target):
        self.hits = self.hits + (preds.topk(2).indices == target[:, None]).any(1).sum()
        self.count = self.count + len(target)

    def compute(self):
        return self.hits / self.count


class Strict(PartialCorrelation):
    """Twice as hard to convince."""

    name = "strict"
    default_threshold = 0.1


class Body(nn.Module):
    def __init__(self, width: int = 6):
        super().__init__()
        self.body, self.fc = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.fc(self.body(x).tanh())


class Iris(pl.LightningDataModule):
    """Flowers.

    Args:
        batch_size: of all loaders.
    """

    def __init__(self, batch_size: int = 30):
        super().__init__()
        self.batch_size = batch_size
        x, y = load_iris(return_X_y=True)
        self.data = torch.tensor(x).float(), torch.tensor(y)

    def _loader(self, scale=1.0):
        return DataLoader(TensorDataset(scale * self.data[0], self.data[1]), self.batch_size)

    train_dataloader = val_dataloader = predict_dataloader = _loader

    def test_dataloader(self):
        return {"test": self._loader(), "large": self._loader(9.0)}
'''

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"]


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """A folder with a module of toys that can be imported."""
    (tmp_path / "toys.py").write_text(TOYS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    yield tmp_path
    sys.modules.pop("toys", None)
    wandb.finish()


@pytest.mark.integration
def test_a_toy_of_each_kind_through_fit_and_test(toys):
    words = [
        "fit", "--model.num_classes=3", "--model.head=toys.Noisy", "--model.head.noise=0.2",
        "--model.scores+=toys.Length", "--model.scores+=KNN", "--model.scores.k=5",
        "--model.calibration=toys.Shrink", "--model.metrics+=toys.Second", "--model.backbone=toys:Body",
        "--data=toys.Iris", "--data.batch_size=25", "--trainer.max_epochs=3", "--model.lr=0.1",
        "--trainer.callbacks+=brainet_pl.callbacks.Evaluation",
        "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs", *QUIET,
    ]  # fmt: skip
    fitted = main(words)
    assert type(fitted.model.head).__name__ == "ToyHead"
    assert fitted.model.head.noise == 0.2
    assert fitted.trainer.callback_metrics["val/cal/halved"] == 0.5
    assert fitted.trainer.callback_metrics["val/cls/Second"] > 0.5
    (checkpoint,) = toys.glob("runs/**/*.ckpt")
    with pytest.raises(ValueError, match=r"got 'toys.*as model\..*--trust_checkpoint"):
        main(["test", "--ckpt_path", str(checkpoint), *QUIET])
    tested = main(["test", "--ckpt_path", str(checkpoint), "--trust_checkpoint", *QUIET]).trainer.callback_metrics
    assert tested["ood/large/length/AUROC"] > 0.95
    assert "ood/large/knn/AUROC" in tested
    assert tested["test/cls/Second"] > 0.5
    assert tested["test/scaled/cls/NLL"] != tested["test/cls/NLL"]
    assert tested["test/scaled/cls/Acc"] == tested["test/cls/Acc"]


def test_a_toy_independence_test(toys):
    words = ["fit", "--model.num_classes=3", "--structure.test=toys.Strict", "--data=toys.Iris", *QUIET]
    cli = main([*words, "--trainer.fast_dev_run=true"])
    assert cli.model.ggt.settings["test"] == "strict"
    assert cli.model.ggt.settings["threshold"] == 0.1


KINDS = {"head": HeadSettings, "scores": Score, "calibration": Calibrator, "conformal": Conformal, "task": Task}


@pytest.mark.parametrize("argument", KINDS)
def test_parts_name_the_known_ones(argument):
    kind = KINDS[argument]
    with pytest.raises(
        ValueError, match=f"expected {argument} to be one of .*got 'Typo'.*derived from {kind.__name__}"
    ):
        make_part(kind, "Typo", argument)
    with pytest.raises(ValueError, match="got 'int'"):
        make_part(kind, 3, argument)
    for name, cls in part_classes(kind).items():
        with pytest.raises(ValueError, match=f"expected settings of {cls.__name__}"):
            make_part(kind, {"class_path": name, "init_args": {"no_such_setting": 1}}, argument)


@pytest.mark.parametrize("kind", KINDS.values())
def test_parts_come_back_from_their_dictionary(kind):
    for name, cls in part_classes(kind).items():
        required = {p.name: 3 for p in arguments(cls) if p.default is p.empty}
        part = cls(**required)
        again = make_part(kind, part.to_dict(), "part")
        assert type(again) is cls
        assert again.settings() == part.settings(), name


def choices(kind):
    """(class, argument) of everything that has a fixed set of texts to choose from."""
    found = []
    for cls in part_classes(kind).values():
        hints = inspect.signature(cls, eval_str=True).parameters.values()
        found += [(cls, p.name) for p in hints if "Literal" in str(p.annotation)]
    return found


@pytest.mark.parametrize(("cls", "argument"), [c for kind in KINDS.values() for c in choices(kind)])
def test_every_constructor_refuses_a_misspelt_choice(cls, argument):
    required = {p.name: 3 for p in arguments(cls) if p.default is p.empty}
    with pytest.raises(ValueError, match=r"expected .* to be one of .*got 'typo'"):
        cls(**required | {argument: "typo"})


def test_abstract_parts_cannot_be_made():
    for kind in (Head, HeadSettings, Score, Calibrator, Task, IndependenceTest):
        with pytest.raises(TypeError):
            kind()


def test_few_constructors_have_more_than_ten_arguments():
    """BRAINet has 16. Every class above ten stands here with its number, which may only shrink."""
    most = {"BRAINet": 16, "Tree": 11, "Generative": 14, "StructureLearning": 16, "SwapHead": 12, "LabelledImages": 12}
    most |= {"Arrays": 14, "ImageFolder": 16, "ImageLists": 19, "Table": 18, "TorchvisionData": 12}
    kinds = (*KINDS.values(), pl.Callback, pl.LightningDataModule)
    classes = {cls for kind in kinds for cls in part_classes(kind).values() if cls.__module__.startswith("brainet_pl.")}
    found = {cls.__name__: len(arguments(cls)) for cls in (BRAINet, *classes)}
    assert {name: count for name, count in found.items() if count > 10} == most


def test_no_help_text_is_empty(monkeypatch):
    """Walks the parsers of all subcommands, and of every part that they know."""
    seen, empty = 0, []
    monkeypatch.setattr(BrainetCLI, "instantiate_classes", lambda self: None)
    monkeypatch.setattr(BrainetCLI, "_run_subcommand", lambda self, subcommand: None)
    cli = main(["fit", "--data=Digits", "--model.num_classes=8"])
    for name in ("fit", "validate", "test", "predict"):
        for action in cli._subcommand_parsers[name]._actions:
            if action.dest.startswith(("model.", "structure.", "predictions.")) and not action.dest.endswith("help"):
                seen += 1
                if not (action.help or "").strip():
                    empty.append(action.dest)
    assert seen >= 4 * 28  # 13 settings of the model, 14 of the structure, 1 of predictions
    assert not empty


@pytest.mark.parametrize("kind", [*KINDS.values(), Measure])
def test_every_setting_of_every_part_is_described(kind):
    from docstring_parser import parse

    for cls in (part for part in part_classes(kind).values() if part.__module__.startswith("brainet_pl.")):
        described = {p.arg_name: p.description for p in parse(inspect.getdoc(cls) or "").params}
        for argument in arguments(cls):
            if argument.name not in ("kwargs", *inspect.signature(torch.nn.Module).parameters):
                assert kind is Measure or (described.get(argument.name) or "").strip(), (
                    f"{cls.__name__}.{argument.name}"
                )


def test_a_task_of_its_own_settings():
    assert Classification(5, loss="confidence").to_dict() == {
        "class_path": "Classification",
        "init_args": {"num_classes": 5, "loss": "confidence", "label_smoothing": 0.0, "confidence_budget": 0.3},
    }
