"""A tree that is learned again while the backbone trains: weights, optimizer, checkpoints, resumed fits."""

import re

import pytest
import torch
from torch import nn

from brainet_pl import Backbone, BRAINet
from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import LastCheckpoint, StructureLearning
from brainet_pl.datamodules import Digits, Table
from brainet_pl.evaluation.report import write_report
from brainet_pl.network import Linear, Tree, TreeEnsemble
from brainet_pl.scores import Generative
from brainet_pl.structure import GGT


def body():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 8))


class Watch(pl.Callback):
    """Notes the tree of every epoch, after the callbacks before it."""

    def __init__(self):
        self.trees, self.states = [], []

    def on_train_epoch_start(self, trainer, model):
        self.trees.append(model.ggt.fingerprint)
        self.states.append(len(trainer.optimizers[0].state))


def fit(folder, quiet_trainer, every=2, epochs=4, resume=None, seed=0, head=None, **settings):
    pl.seed_everything(seed, verbose=False)
    scores = [Generative(progress=False)]
    model = BRAINet(
        8,
        Backbone(body(), freeze=False, lr=0.05),
        Tree(num_params=3000) if head is None else head,
        scores=scores,
        lr=0.02,
    )
    observe = Watch()
    learn = StructureLearning(threshold=0.1, progress=False, cache="", every=every)
    trainer = quiet_trainer(folder, learn, observe, LastCheckpoint(str(folder)), epochs=epochs, **settings)
    trainer.fit(model, datamodule=Digits(batch_size=256), ckpt_path=resume)
    return trainer, model, observe


def test_the_tree_is_learned_again_and_resuming_repeats_it(tmp_path, quiet_trainer):
    trainer, model, observe = fit(tmp_path / "whole", quiet_trainer)
    assert observe.trees[0] == observe.trees[1] != observe.trees[2] == observe.trees[3]
    held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert held == [*model.head.parameters(), *model.backbone.trainable_parameters()]
    trained = len(list(model.backbone.trainable_parameters()))
    assert trained <= observe.states[2] <= observe.states[1]  # what is remembered of the backbone stays
    stored = torch.load(tmp_path / "whole" / "last.ckpt", weights_only=True)
    assert GGT.from_dict(stored["brainet"]["ggt"]).fingerprint == model.ggt.fingerprint
    again = BRAINet.load_from_checkpoint(tmp_path / "whole" / "last.ckpt", backbone=Backbone(body(), freeze=False))
    assert again.ggt.fingerprint == model.ggt.fingerprint
    for stop in (2, 3):  # right before the tree is learned again, and after it
        fit(tmp_path / str(stop), quiet_trainer, epochs=stop)
        resumed, other, _ = fit(tmp_path / str(stop), quiet_trainer, resume=tmp_path / str(stop) / "last.ckpt", seed=99)
        for name, value in model.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
        states = [t.optimizers[0].state_dict()["state"] for t in (trainer, resumed)]
        for number, state in states[0].items():
            assert all(torch.equal(value, states[1][number][name]) for name, value in state.items())


def test_without_every_the_first_tree_stays(tmp_path, quiet_trainer):
    _, _, observe = fit(tmp_path, quiet_trainer, every=None, epochs=3)
    assert len(set(observe.trees)) == 1


def test_a_frozen_backbone_has_nothing_to_learn_again(tmp_path, quiet_trainer):
    model = BRAINet(8, Backbone(body()), Tree(num_params=3000))
    trainer = quiet_trainer(tmp_path, StructureLearning(every=2, cache="", progress=False))
    with pytest.raises(ValueError, match=r"expected a backbone that trains .* every 2 epochs, got a frozen one"):
        trainer.fit(model, datamodule=Digits())


def test_settings_of_every():
    with pytest.raises(ValueError, match="expected every of at least 1, got 0"):
        StructureLearning(every=0)
    with pytest.raises(ValueError, match="expected file or every, got both"):
        StructureLearning(every=1, file="structure.json")


def test_heads_without_a_tree_are_left_alone(tmp_path, quiet_trainer):

    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, Backbone(body(), freeze=False), Linear())
    trainer = quiet_trainer(tmp_path, StructureLearning(every=1, cache="", progress=False), epochs=2)
    trainer.fit(model, datamodule=Digits(batch_size=256))
    assert model.ggt is None


def test_several_processes_are_refused(quiet_trainer, tmp_path):
    class Two:
        world_size = 2

    model = BRAINet(8, Backbone(body(), freeze=False), Tree(num_params=3000))
    with pytest.raises(RuntimeError, match="expected one process to learn the tree again every 1 epochs, got 2"):
        StructureLearning(every=1).setup(Two(), model, "fit")


@pytest.mark.parametrize("head", [Tree(num_params=2000), TreeEnsemble(num_params=2000)])
def test_columns_of_a_table_keep_their_names(tmp_path, quiet_trainer, head):
    """In the tree, in its file, and in the page of the run."""
    torch.manual_seed(0)
    x = torch.randn(300, 2).repeat_interleave(2, dim=1) + 0.3 * torch.randn(300, 4)
    rows = [f"{a},{b},{c},{d},{a + c}" for a, b, c, d in x.tolist()]
    (tmp_path / "table.csv").write_text("\n".join(["wide,high,old,worn,price", *rows]))
    data = Table(str(tmp_path / "table.csv"), "price", task="regression")
    model = BRAINet(task="Regression", head=head)
    learn = StructureLearning(test="gaussian", threshold=0.1, progress=False, cache="")
    quiet_trainer(tmp_path, learn).fit(model, datamodule=data)
    assert model.ggt.names == ("wide", "high", "old", "worn")
    stored = GGT.from_json((tmp_path / "structure.json").read_text())
    assert stored.names == model.ggt.names
    (tmp_path / "config.yaml").touch()
    page = write_report(tmp_path).read_text()
    sets = [part.split(", ") for part in re.findall(r'class="text loose">(.*?)</td>', page)]
    leaves = model.ggt.leaves(model.ggt.map())
    assert sets == [[model.ggt.names[v] for v in leaf.variables] for leaf in leaves]
    assert sorted(name for part in sets for name in part) == ["high", "old", "wide", "worn"]


def test_a_cache_that_can_not_be_written_does_not_end_a_fit(tmp_path, quiet_trainer):
    (tmp_path / "file").touch()
    learn = StructureLearning(threshold=0.2, progress=False, cache=str(tmp_path / "file" / "cache"))
    model = BRAINet(8, head=Tree(num_params=2000))
    with pytest.warns(UserWarning, match=r"the learned structure is not kept for other runs.* can't be written"):
        quiet_trainer(tmp_path, learn, limit_train_batches=1).fit(model, datamodule=Digits())
    assert model.ggt is not None
