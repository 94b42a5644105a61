import csv
import json

import pytest
import torch
from torch import nn

from brainet_pl import BRAINet
from brainet_pl._utils.framework import CSVLogger
from brainet_pl.backbones.loading import Backbone
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.callbacks import Evaluation, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.evaluation.report import write_report
from brainet_pl.network import Linear, MCDropout, Tree
from brainet_pl.prediction.costs import measure


def build(head, d=36):
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten())  # 8×8 → 4×6×6
    model = BRAINet(8, backbone=Backbone(body, head_layer=""), head=head, passes=7).eval()
    model.predictor.build_head(model.head_settings, 4 * d)
    return model


def test_operations_are_those_of_the_layers():
    costs = measure(build(Linear()).predictor, torch.rand(5, 1, 8, 8))
    assert (costs.samples, costs.passes) == (5, 1)
    assert costs.backbone.flops == 2 * 4 * 9 * 36  # a product and a sum for each weight, at each place
    assert costs.backbone.parameters == 4 * 9 + 4
    assert costs.head.flops == costs.one_pass.flops == 2 * 144 * 8
    assert costs.head.parameters == 144 * 8 + 8
    assert min(costs.backbone.seconds, costs.head.seconds, costs.one_pass.seconds) > 0


def test_passes_of_the_head_alone_are_repeated():
    model = build(MCDropout(num_params=4000))
    costs = measure(model.predictor, torch.rand(5, 1, 8, 8))
    assert costs.passes == 7
    assert costs.head.flops == 7 * costs.one_pass.flops
    kept = measure(model.predictor, BackboneOutput(torch.rand(5, 144)))
    assert kept.backbone is None
    assert kept.head.flops == costs.head.flops
    assert "backbone" not in kept.line()


def test_a_model_without_a_head_is_told():
    with pytest.raises(ValueError, match="expected a model with a head, got one that was never fitted"):
        measure(BRAINet(3).predictor, torch.rand(2, 4))


def test_a_test_leaves_them_in_the_record_and_the_report(tmp_path, quiet_trainer):
    logger = CSVLogger(tmp_path, name="run")
    learn = StructureLearning(threshold=0.1, progress=False)
    trainer = quiet_trainer(tmp_path, learn, Evaluation(figures=False), logger=logger)
    model = BRAINet(8, head=Tree(4000), passes=5)
    trainer.fit(model, datamodule=Digits())
    trainer.test(model, datamodule=Digits(), verbose=False)
    found = json.loads((tmp_path / "run/version_0/record.json").read_text())["model"]
    assert found["costs"]["passes"] == 4  # all of four sub-networks
    assert found["costs"]["head"]["parameters"] == model.head.num_params
    assert found["costs"]["backbone"] is None  # pixels are the features
    assert found["costs"]["one_pass"]["flops"] <= found["costs"]["head"]["flops"] <= 5 * 2 * model.head.num_params
    assert found["cost"].startswith("head ")
    page = write_report(tmp_path / "run/version_0").read_text()
    assert "What a prediction costs" in page
    assert "head, one pass" in page
    with (tmp_path / "run/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {key: float(v) for row in rows for key, v in row.items() if v and key.startswith("cost/")}
    costs = found["costs"]
    assert logged == {
        "cost/samples": costs["samples"],
        "cost/passes": 4,
        "cost/head/parameters": model.head.num_params,
        "cost/head/flops": costs["head"]["flops"],
        "cost/head/ms": pytest.approx(1000 * costs["head"]["seconds"]),
        "cost/one_pass/flops": costs["one_pass"]["flops"],
        "cost/one_pass/ms": pytest.approx(1000 * costs["one_pass"]["seconds"]),
    }
