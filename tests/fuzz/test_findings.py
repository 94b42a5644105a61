"""What fuzzing found, one line each: it was an obscure error, a hang or a silent wrong number, and is a clear error."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from brainet_pl import BRAINet, learn_structure, rai
from brainet_pl._utils.parts import make_part
from brainet_pl.backbones.loading import Backbone
from brainet_pl.calibration.temperature import fit_temperature
from brainet_pl.datamodules import Table
from brainet_pl.metrics.curves import adaptive_calibration_error, calibration_sums, risk_coverage
from brainet_pl.metrics.measures import NegativeLogLikelihood, RiskAtCoverage, SquaredError
from brainet_pl.network import MLP, Ensemble, HeadSettings, LinearHead, MLPHead, Tree, TreeDropout, TreeEnsemble
from brainet_pl.scores import KNN, Combined, Generative, Mahalanobis, TreeDensity
from brainet_pl.scores.fitting import fit_score
from brainet_pl.structure import GGT, DSeparation, Leaf
from brainet_pl.tasks import Classification
from brainet_pl.tasks.classification import check_class_names

LEAF = GGT(Leaf((0, 1), ((), ()), 0.0), 2)
CYCLE = np.array([[0, 1], [1, 0]])
TWO = torch.eye(4)[:, :2]
NAN = float("nan")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rai(3, test=DSeparation(np.eye(2, k=1))), r"number of variables of the test object, 2, .* got 3"),
        (lambda: DSeparation(np.zeros((2, 3))), r"square matrix \(d, d\) of true and false, got \(2, 3\)"),
        (lambda: DSeparation(CYCLE), r"without cycles, got one among variables \[0, 1\]"),
        (lambda: learn_structure(np.zeros((4, 2)), s=10**6), "expected s of at least 1 and at most 1000, got 1000000"),
        (lambda: GGT.from_json("[" * 100_000), "expected a GGT in JSON, got text that is none"),
        (lambda: GGT.from_json(None), "expected a GGT in JSON, got text that is none"),
        (lambda: GGT.from_json(json.dumps(LEAF.to_dict() | {"settings": {"a": NAN}})), "settings that JSON can hold"),
        (lambda: make_part(HeadSettings, {"class_path": "MLP", "init_args": 3}, "head"), "init_args of head .* got 3"),
        (lambda: Tree(num_params=2**70), "num_params of at least 1 and at most 1000000000, got"),
        (lambda: MLP(hidden=10**6), "hidden of at least 1 and at most 100, got"),
        (lambda: Ensemble(members=10**6), "members of at least 1 and at most 1000, got"),
        (lambda: LinearHead(2**70, 3), "in_features of at least 1 and at most"),
        (lambda: MLPHead(2, 3, 100)(torch.zeros(3, 5)), r"shape \(batch, 2\) in real numbers, got \(3, 5\)"),
        (lambda: fit_score(KNN(), torch.zeros(4), torch.zeros(4).long()), r"features \(N, d\) and as many labels"),
        (lambda: fit_score(KNN(), TWO, torch.zeros(3).long()), r"got \(4, 2\) of torch.float32 and \(3,\)"),
        (lambda: fit_score(Mahalanobis(), TWO, torch.full((4,), -1)), "from 0 on as labels, got -1 to -1"),
        (lambda: fit_score(Mahalanobis(), TWO, torch.full((4,), 0.5)), "whole numbers from 0 on as labels, got 0.5"),
        (lambda: TreeDensity(LEAF, 2).fit(TWO, torch.full((4,), 2)), "from 0 to 1 as labels, got 2 to 2"),
        (lambda: Generative(kind="discrete", bins=200, max_parents=5), r"at most 1,048,576 cells .* got 64,000,000"),
        (lambda: Generative(threshold=float("inf")), "threshold to be a finite number, got inf"),
        (lambda: KNN(seed=-1), "expected seed of at least 0 and at most"),
        (lambda: risk_coverage(torch.tensor([0.1, NAN]), torch.zeros(2)), "with 1 NaN"),
        (lambda: adaptive_calibration_error(torch.empty(0), torch.empty(0)), r"without NaN, got \(0,\)"),
        (
            lambda: calibration_sums(torch.zeros(3), torch.zeros(2)),
            r"one hit for each confidence, got \(2,\) for \(3,\)",
        ),
        (
            lambda: fit_temperature(torch.tensor([[NAN, 1.0]]), torch.tensor([0])),
            "all of them finite, got 1 with 1 NaN",
        ),
        (lambda: fit_temperature(torch.tensor([[0.5, 0.5]]), torch.tensor([2])), "labels from 0 to 1, got 2 to 2"),
        (lambda: NegativeLogLikelihood().update(torch.ones(2, 2).long(), torch.zeros(2).long()), "of torch.int64"),
        (lambda: SquaredError().update(torch.zeros(3), torch.zeros(3)), r"means and variances \(B, 2\)"),
        (lambda: Table("x.csv", "a", val_fraction=None), "val_fraction between 0 and 1, got None"),
        (lambda: Table("x.csv", "a", batch_size="8"), "batch_size to be a whole number, got '8'"),
        (lambda: Table("x.csv", "a", encoding=3), "expected encoding to be one that Python knows, got 3"),
        (lambda: Table("x.csv", "a", delimiter=None), "delimiter to be one character, got None"),
        (lambda: Table("x.csv", "a", drop=True), "drop to be a list of columns, got True"),
        (lambda: Table("x.csv", "a", max_categories="x"), "max_categories to be a whole number, got 'x'"),
        (lambda: Backbone(nn.Linear(2, 2), head_layer="").build()(torch.zeros(3, 5)), "inputs that Linear takes, got"),
        (lambda: Backbone(nn.Linear(2, 2), head_layer=3), "head_layer to be the path of a layer, '' or None, got 3"),
    ],
)
def test_findings_are_clear_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({6: ("1", "1e100")}, "mean fits into 32 bits, got 1 that do not, .* column 'b', row"),
        ({7: ("1", "1e308")}, "squares fit into 64 bits in column 'b', got 1e308"),
        ({7: ("1e300", "1")}, "expected targets that fit into 32 bits in 'a', got 1e300"),
    ],
)
def test_cells_that_32_bits_do_not_hold_are_refused(tmp_path, cells, message):
    rows = [cells.get(i, (str(i % 5), str(i % 3))) for i in range(30)]
    (tmp_path / "t.csv").write_text("a,b\n" + "\n".join(",".join(row) for row in rows))
    with pytest.raises(ValueError, match=message):
        Table(str(tmp_path / "t.csv"), "a", task="regression").setup("fit")


def test_ranked_measures_of_nan_are_nan_and_labels_may_be_bools():
    measure = RiskAtCoverage(0.5)
    assert measure.compute().isnan()
    measure.update(torch.tensor([[NAN, NAN], [0.5, 0.5]]), torch.tensor([0, 1]))
    assert measure.compute().isnan()
    nll = NegativeLogLikelihood()
    nll.update(torch.tensor([[0.5, 0.5]]), torch.tensor([True]))
    assert nll.compute().item() == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize(
    "change", [{"in_features": "4"}, {"ggt": 3}, {"backbone": {"name": 1}}, {"backbone": []}, {"more": 1}]
)
def test_a_changed_entry_of_a_checkpoint_is_refused(change):
    model = BRAINet(3, head="Linear")
    model.predictor.build_head(model.head_settings, 4)
    checkpoint = {"hyper_parameters": dict(model.hparams), "state_dict": model.state_dict()}
    model.on_save_checkpoint(checkpoint)
    del checkpoint["brainet"]["digest"]
    model.on_load_checkpoint(checkpoint)
    checkpoint["brainet"] |= change
    with pytest.raises(
        ValueError,
        match=f"expected the entry 'brainet' of the checkpoint as brainet_pl writes it, .*{next(iter(change))}",
    ):
        model.on_load_checkpoint(checkpoint)


@pytest.mark.parametrize("value", [1, False, "energy", [], [1]])
def test_names_that_are_no_list_of_texts_are_refused(value):
    with pytest.raises(ValueError, match="expected of to be a list of names"):
        Combined(of=value)
    if value != []:  # nobody named them
        with pytest.raises(ValueError, match="expected class_names to be a list of texts"):
            check_class_names(value, Classification(2))


@pytest.mark.parametrize("settings", [Ensemble(), TreeEnsemble(), TreeDropout()])
def test_a_head_for_no_number_of_outputs_is_refused(settings):
    with pytest.raises((TypeError, ValueError), match="expected out_features"):
        settings.build(2, None, LEAF)
