"""The head is settled before every validation of a fit, on data alone, and the checkpoint carries it."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import Backbone, BRAINet
from brainet_pl._utils.framework import Callback, ModelCheckpoint, pl
from brainet_pl.callbacks import StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.validation import FEW_FOR_BOTH
from brainet_pl.network import BRAINetHead, Linear, Tree
from brainet_pl.network.finalization import FACTORS


def structure():
    return StructureLearning(s=2, threshold=0.1, progress=False)  # nodes below the root branch too


class Calls(Callback):
    """What `finalize` was given, and what metrics were logged."""

    def __init__(self, monkeypatch):
        self.given, finalize = [], BRAINetHead.finalize

        def watched(head, seen, held, nll, passes=15):
            self.given.append((seen, held))
            return finalize(head, seen, held, nll, passes)

        monkeypatch.setattr(BRAINetHead, "finalize", watched)


def test_a_fit_settles_the_head_and_its_checkpoint_carries_it(tmp_path, quiet_trainer, monkeypatch):
    pl.seed_everything(0, verbose=False)
    calls = Calls(monkeypatch)
    model, checkpoint = BRAINet(8, head=Tree(num_params=4000), lr=0.01), ModelCheckpoint(tmp_path, save_last=True)
    trainer = quiet_trainer(tmp_path, structure(), checkpoint, epochs=3)
    trainer.fit(model, datamodule=Digits())
    assert len(calls.given) == 3  # not at the sanity check
    (seen, held) = calls.given[-1]
    assert seen.x.shape[1] == held.x.shape[1] == 64
    assert len(held.x) == len(held.target) >= 100
    assert not {tuple(row) for row in held.x.tolist()} & {tuple(row) for row in seen.x.tolist()}
    logged = trainer.callback_metrics["val/head/temperature"]
    assert logged == pytest.approx(model.head.temperature)
    assert any(model.head.temperature == model.ggt.auto_temperature * factor for factor in FACTORS)
    assert model.head.layers.mixed
    again = BRAINet.load_from_checkpoint(tmp_path / "last.ckpt").eval()
    assert again.head.temperature == model.head.temperature
    x = torch.rand(7, 64)
    with torch.no_grad():
        torch.testing.assert_close(again.head(x), model.eval().head(x))
    quiet_trainer(tmp_path).validate(model, datamodule=Digits(), verbose=False)
    assert len(calls.given) == 3  # a validation alone may be of any data


def test_settled_on_the_weights_of_now(tmp_path, quiet_trainer):
    """The statistics are those of the weights that the checkpoint has, not of an epoch before."""
    model = BRAINet(8, head=Tree(num_params=4000, temperature=50.0), lr=0.01)
    quiet_trainer(tmp_path, structure(), epochs=2).fit(model, datamodule=Digits())
    head = model.eval().head
    assert head.temperature == 50.0
    before = head.layers.mixed_mean.clone()
    assert before.any()
    data = Digits()
    data.setup("fit")
    x = torch.stack([torch.as_tensor(sample[0]) for sample in data.train_set]).float()
    head.layers.set_mixed_statistics(x)
    torch.testing.assert_close(head.layers.mixed_mean, before, rtol=0.05, atol=0.05)


def test_too_little_to_choose_by_is_told(tmp_path, quiet_trainer):
    x, y = torch.randn(160, 6), torch.arange(160) % 2
    train, few = (DataLoader(TensorDataset(x[rows], y[rows]), 20) for rows in (slice(0, 100), slice(100, 160)))
    for loaders, count in (((train, few), "60"), ((train,), "0")):
        model = BRAINet(2, head=Tree(num_params=500))
        with pytest.warns(UserWarning, match=f"at least 100 validation samples to choose the .* got {count}: it is"):
            quiet_trainer(tmp_path, structure()).fit(model, *loaders)
        assert model.head.temperature == model.ggt.auto_temperature
        assert model.head.layers.mixed or not len(model.head.layers.mixed_mean)
    for head in (Tree(num_params=500, temperature=2.0), Linear()):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*temperature of the posterior")
            quiet_trainer(tmp_path, structure()).fit(BRAINet(2, head=head), train, few)


@pytest.mark.parametrize("freeze", [True, False])
def test_features_of_a_frozen_backbone_are_looked_at_once(tmp_path, quiet_trainer, freeze):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 10), nn.ReLU())
    x, y = torch.randn(300, 6), torch.arange(300) % 2
    train, val = (DataLoader(TensorDataset(x[rows], y[rows]), 50) for rows in (slice(0, 150), slice(150, 300)))
    model = BRAINet(2, backbone=Backbone(body, head_layer="", freeze=freeze), head=Tree(num_params=800))
    seen = []
    model.backbone.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    quiet_trainer(tmp_path, structure(), epochs=4, num_sanity_val_steps=0).fit(model, train, val)
    looked = sum(seen) - 4 * 300  # beside training and validation
    assert looked <= (2 if freeze else 11) * 150 + 10  # for the structure, at each of four validations, at the end


def labelled(count, seed):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long()), 50)


def test_the_first_validation_set_selects_and_the_second_calibrates(tmp_path, quiet_trainer, monkeypatch):
    calls = Calls(monkeypatch)
    model = BRAINet(2, head=Tree(num_params=500), conformal="Conformal", lr=0.01)
    select, calibrate = labelled(120, 1), labelled(70, 2)
    quiet_trainer(tmp_path, structure(), epochs=2).fit(model, labelled(200, 0), [select, calibrate])
    assert torch.equal(calls.given[-1][1].x, select.dataset.tensors[0])
    assert int(model.conformal.samples) == 70
    again = BRAINet(2, head=Tree(num_params=500), conformal="Conformal", lr=0.01)
    quiet_trainer(tmp_path, structure(), epochs=1).fit(again, labelled(200, 0), calibrate)
    assert int(again.conformal.samples) == 70  # a single set does both


@pytest.mark.parametrize(("sets", "warns"), [((150,), True), ((150, 150), False), ((FEW_FOR_BOTH,), False)])
def test_a_small_set_of_both_roles_is_told(tmp_path, quiet_trainer, sets, warns):
    checkpoint = ModelCheckpoint(tmp_path, monitor="val/cls/NLL")
    model = BRAINet(2, head=Tree(num_params=500))
    loaders = [labelled(count, seed + 1) for seed, count in enumerate(sets)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(tmp_path, structure(), checkpoint).fit(model, labelled(200, 0), loaders)
    told = [str(one.message) for one in caught if "chose the epoch and then calibrated it" in str(one.message)]
    assert len(told) == warns
