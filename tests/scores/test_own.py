"""The network's own logits: as a baseline of a test and as scores, against the plain network."""

import json

import pytest
import torch
from torch import nn

from brainet_pl import Backbone, BRAINet
from brainet_pl.callbacks import Evaluation, FeatureCache
from brainet_pl.datamodules import Digits
from brainet_pl.network import Linear
from brainet_pl.scores import KNN, Own


def network(classes=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, classes)).eval()


def evaluate(folder, trainer_of, backbone, *callbacks):
    model = BRAINet(8, backbone, Linear(), scores=[Own(), KNN(k=5)])
    trainer = trainer_of(folder, Evaluation(figures=False), *callbacks)
    data = Digits()
    trainer.fit(model, datamodule=data)
    (found, *_) = trainer.test(model, datamodule=data, verbose=False)
    return model, data, found


def batch_of(data):
    return torch.cat([x for x, _ in data.test_dataloader()["test"]]), torch.cat(
        [y for _, y in data.test_dataloader()["test"]]
    )


@pytest.mark.parametrize("settings", [{}, {"layers": ["1", "2"]}])
def test_the_network_is_a_baseline_of_its_new_head(tmp_path, quiet_trainer, settings):
    net = network()
    model, data, found = evaluate(tmp_path, quiet_trainer, Backbone(net, **settings), FeatureCache(progress=False))
    x, y = batch_of(data)
    with torch.no_grad():
        logits = net(x)
    assert found["test/own/cls/NLL"] == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-5)
    assert found["test/own/cls/Acc"] == pytest.approx((logits.argmax(1) == y).float().mean().item())
    assert found["test/own/cls/NLL"] != found["test/cls/NLL"]
    (record,) = tmp_path.rglob("record.json")
    assert "test/own/cls/NLL" in {entry["key"] for entry in json.loads(record.read_text())["metrics"]}
    answer = model.eval().predict_step([x], 0)
    torch.testing.assert_close(answer["own_energy"], -logits.logsumexp(1))
    torch.testing.assert_close(answer["own_one_minus_max_p"], 1 - logits.softmax(1).amax(1))
    assert "ood/held_out/own_energy/AUROC" in found


def test_a_network_of_other_classes_gives_scores_but_is_no_baseline(tmp_path, quiet_trainer):
    _, _, found = evaluate(tmp_path, quiet_trainer, Backbone(network(classes=5)))
    assert not any(name.startswith("test/own/") for name in found)
    assert "ood/held_out/own_one_minus_max_p/AUROC" in found


def test_a_network_that_trains_is_no_baseline(tmp_path, quiet_trainer):
    _, _, found = evaluate(tmp_path, quiet_trainer, Backbone(network(), freeze=False))
    assert not any(name.startswith("test/own/") for name in found)


def test_without_a_layer_of_its_own_there_is_no_score(tmp_path, quiet_trainer):
    body = Backbone(network()[:3], head_layer="")
    with pytest.raises(ValueError, match=r"expected the logits of the network's own .* got a backbone without one"):
        evaluate(tmp_path, quiet_trainer, body)
