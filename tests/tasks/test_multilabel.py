"""Several labels at once: losses and metrics beside scikit-learn, temperatures beside a search, and a whole fit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet, ExportedModel, export_folder
from brainet_pl._utils.framework import pl
from brainet_pl.calibration import Conformal, LabelScaling
from brainet_pl.calibration.temperature import PRIOR
from brainet_pl.callbacks import StructureLearning
from brainet_pl.metrics.multilabel import multilabel_measures, share_found
from brainet_pl.swap.every_branch import every_branch
from brainet_pl.tasks import MultiLabel
from brainet_pl.tasks.multilabel import log_odds

LABELS = 3


def some(count, seed=0, unknown=0.2):
    """Probabilities (N, 3) and targets with unknown labels."""
    draw = torch.Generator().manual_seed(seed)
    probs = torch.rand(count, LABELS, generator=draw)
    target = (torch.rand(count, LABELS, generator=draw) < probs).float()
    target[torch.rand(count, LABELS, generator=draw) < unknown] = torch.nan
    return probs, target


def measured(probs, target, batch=50):
    found = {}
    for measure in multilabel_measures(LABELS):
        for first in range(0, len(probs), batch):
            measure.update(probs[first : first + batch], target[first : first + batch])
        found[measure.key] = float(measure.compute())
    return found


def test_metrics_are_those_of_scikit_learn():
    probs, target = some(400)
    found, p, y = measured(probs, target), probs.double().numpy(), target.numpy()
    known = ~np.isnan(y)
    assert found["ml/NLL"] == pytest.approx(log_loss(y[known], p[known]), abs=1e-6)
    assert found["ml/Brier"] == pytest.approx(brier_score_loss(y[known], p[known]), abs=1e-6)
    assert found["ml/Acc"] == pytest.approx(np.mean((p[known] >= 0.5) == y[known]), abs=1e-6)
    columns = [(y[known[:, i], i], p[known[:, i], i]) for i in range(LABELS)]
    aps = [average_precision_score(*column) for column in columns]
    assert found["ml/mAP"] == pytest.approx(np.mean(aps), abs=1e-5)
    assert found["ml/AUROC"] == pytest.approx(np.mean([roc_auc_score(*column) for column in columns]), abs=1e-5)

    def naive_error(truth, said, bins=15):
        places = np.minimum((said * bins).astype(int), bins - 1)
        gaps = [abs(truth[places == b].sum() - said[places == b].sum()) for b in range(bins)]
        return sum(gaps) / len(said)

    assert found["ml/ECE"] == pytest.approx(naive_error(y[known], p[known]), abs=1e-5)
    assert found["ml/ECE_by_label"] == pytest.approx(np.mean([naive_error(*column) for column in columns]), abs=1e-5)


def test_labels_that_nobody_or_everybody_has_are_left_out_of_rankings():
    probs, target = some(100)
    target[:, 0], target[:, 1] = 0.0, torch.nan
    rows = ~target[:, 2].isnan()
    expected = roc_auc_score(target[rows, 2].numpy(), probs[rows, 2].numpy())
    assert measured(probs, target)["ml/AUROC"] == pytest.approx(expected, abs=1e-5)
    assert math.isnan(measured(probs, torch.zeros_like(target))["ml/mAP"])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), members=st.integers(1, 3), weighted=st.booleans())
def test_the_loss_is_the_mean_over_known_labels(seed, members, weighted):
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(members, 8, LABELS, generator=draw)
    target = some(8, seed)[1]
    weights = torch.rand(8, generator=draw) if weighted else None
    total = count = 0.0
    for member in range(members):
        for row in range(8):
            for label in range(LABELS):
                y = float(target[row, label])
                if math.isnan(y):
                    continue
                p = 1 / (1 + math.exp(-float(outputs[member, row, label])))
                weight = 1.0 if weights is None else float(weights[row])
                total -= weight * math.log(p if y else 1 - p)
                count += weight
    expected = total / count if count else 0.0
    assert float(MultiLabel(LABELS).loss(outputs, target, weights)) == pytest.approx(expected, abs=1e-4)


def test_unknown_labels_change_nothing():
    task = MultiLabel(LABELS)
    outputs = torch.randn(4, LABELS, requires_grad=True)
    target = torch.tensor([[1.0, 0, torch.nan]] * 4)
    task.loss(outputs, target).backward()
    assert outputs.grad[:, 2].eq(0).all()
    assert outputs.grad[:, :2].ne(0).all()
    assert task.nll(outputs.sigmoid(), torch.full((4, LABELS), torch.nan)).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.tensor([0, 1]), r"for each of 3 labels, \(B, 3\), got targets of shape \(2,\)"),
        (torch.zeros(2, 4), "num_labels to the number of columns"),
        (torch.tensor([[0.0, 2.0, 1.0]]), "0, 1 or NaN for every label, got 2"),
    ],
)
def test_what_are_no_labels_is_refused(target, message):
    with pytest.raises(ValueError, match=message):
        MultiLabel(LABELS).check(target)


def test_thresholds_are_one_or_one_a_label():
    final = torch.tensor([[0.4, 0.4, 0.4]])
    assert MultiLabel(3, 0.3).predict(None, final)["labels"].tolist() == [[True, True, True]]
    assert MultiLabel(3, [0.5, 0.3, 0.9]).predict(None, final)["labels"].tolist() == [[False, True, False]]
    with pytest.raises(ValueError, match="one for each of 3 labels, got 2"):
        MultiLabel(3, [0.5, 0.3])


def test_temperatures_are_those_of_a_search():
    probs, target = some(300, unknown=0.3)
    sharp = (log_odds(probs) * 2).sigmoid()  # too sure by a factor of two

    def best(odds, y):
        def loss(u):
            scaled = 1 / (1 + np.exp(-odds / np.exp(u)))
            return log_loss(y, scaled, normalize=False) + 0.5 * (u / PRIOR) ** 2

        return math.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-6}).x)

    odds, known = log_odds(sharp).double().numpy(), ~target.isnan().numpy()
    shared = best(odds[known], target.numpy()[known])
    calibrator = LabelScaling()
    calibrator.check(MultiLabel(LABELS))
    assert not calibrator.changes_predictions
    calibrator.observe(sharp, target, {})
    assert float(calibrator.finalize()["temperature"]) == pytest.approx(shared, rel=1e-3)
    for label in range(LABELS):
        rows = known[:, label]
        own = shared * best(odds[rows, label] / shared, target.numpy()[rows, label])
        assert float(calibrator.tau[label]) == pytest.approx(own, rel=1e-3)
    assert measured(calibrator(sharp, {}), target)["ml/ECE"] < measured(sharp, target)["ml/ECE"] / 2


def test_a_label_that_nobody_knows_keeps_the_temperature_of_all():
    probs, target = some(200)
    target[:, 1] = torch.nan
    calibrator = LabelScaling()
    calibrator.check(MultiLabel(LABELS))
    calibrator.observe((log_odds(probs) * 2).sigmoid(), target, {})
    shared = calibrator.finalize()["temperature"]
    assert float(calibrator.tau[1]) == pytest.approx(float(shared), rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 25), level=st.sampled_from([0.5, 0.8, 0.9]))
def test_sets_of_labels_have_the_limit_of_a_search(seed, count, level):
    """The smallest sets whose mean share of missed labels, of count + 1 samples, is at most 1 - level."""
    probs, target = some(count, seed)
    probs = (probs * 8).round() / 8  # ties
    sets = Conformal("fnr", level).fit(probs, target)
    having = (target == 1).any(dim=1)
    best = math.inf
    for limit in sorted(set((-probs[target == 1]).tolist()), reverse=True):
        missed = sum(
            1 - float(share_found(-p[None] <= limit, y[None]))
            for p, y in zip(probs[having], target[having], strict=True)
        )
        if missed + 1 <= (int(having.sum()) + 1) * (1 - level) + 1e-9:
            best = limit
    assert float(sets.limits) == pytest.approx(best)


def test_sets_of_labels_find_the_promised_share_of_new_ones():
    shares = []
    for seed in range(200):
        probs, target = some(140, seed)
        found = Conformal("fnr", 0.8).fit(probs[:40], target[:40])(probs[40:])["set"]
        shares.append(float(share_found(found, target[40:]).nanmean()))
    assert 0.79 < np.mean(shares) < 0.83


def test_labels_that_nobody_has_are_named():
    target = torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 0, torch.nan]])
    with pytest.warns(UserWarning, match=r"of 3 training samples has the labels 1, 2 \(from 0\)"):
        MultiLabel(LABELS).prepare(target)
    with pytest.raises(ValueError, match="with and without a label, got 3 of which all have the same"):
        MultiLabel(LABELS).prepare(torch.ones(3, LABELS))


def test_a_binary_cross_entropy_on_one_draw_trains_all():
    """As the mean of the losses of all draws would; labels that the loss leaves out have no part in it."""
    outputs = (3 * torch.randn(4, 20, LABELS)).requires_grad_()
    target = some(20, 3)[1]
    known = ~target.isnan()
    losses = [F.binary_cross_entropy_with_logits(one[known], target[known]) for one in outputs]
    (expected,) = torch.autograd.grad(torch.stack(losses).mean(), outputs)
    seen = torch.zeros(2)
    F.binary_cross_entropy_with_logits(every_branch(outputs, seen, "binary")[known], target[known]).backward()
    torch.testing.assert_close(outputs.grad, expected, rtol=1e-4, atol=1e-6)
    assert seen.tolist() == [1, 0]
    weighted = F.binary_cross_entropy_with_logits(
        every_branch(outputs, seen, "binary")[known], target[known], torch.rand(int(known.sum()))
    )
    weighted.backward()  # no plain one: the draws that were chosen learn alone
    assert seen.tolist() == [1, 1]


def rows(count, seed):
    """Three labels of six columns; the second is rare, the third follows the first."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw)
    logits = torch.stack([2 * x[:, 0] + x[:, 1], 2 * x[:, 2] - 3, x[:, 0] - x[:, 3]], dim=1)
    target = (torch.rand(count, LABELS, generator=draw) < logits.sigmoid()).float()
    return x, target, logits.sigmoid()


def test_a_fit_predicts_labels_by_name_and_is_calibrated(tmp_path):
    x, target, _ = rows(900, 1)
    target[torch.rand(target.shape, generator=torch.Generator().manual_seed(2)) < 0.1] = torch.nan
    train = DataLoader(TensorDataset(x[:600], target[:600]), batch_size=50, shuffle=True)
    held = DataLoader(TensorDataset(x[600:], target[600:]), batch_size=50)
    model = BRAINet(task=MultiLabel(LABELS), scores=["Generative"], lr=0.01)
    pl.seed_everything(0, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    learning = StructureLearning(progress=False, cache="")
    trainer = pl.Trainer(
        max_epochs=15, callbacks=[learning], default_root_dir=tmp_path, enable_checkpointing=False, **quiet
    )
    trainer.fit(model, train, held)
    new, truth, chance = rows(2000, 3)
    answer = model.predict(new)
    best = measured(chance, truth)["ml/NLL"]
    found = measured(answer["probabilities"], truth)
    assert found["ml/NLL"] < best + 0.06
    assert found["ml/ECE"] < 0.05
    assert answer["labels"].shape == (2000, LABELS)
    torch.testing.assert_close(model(new).sigmoid(), answer["probabilities"], rtol=1e-4, atol=1e-5)
    assert 0.9 < float(answer["known"].float().mean()) < 0.99
    assert float(model.predict(new[:200] + 20)["known"].float().mean()) < 0.1
    assert model.scores.verdict_score(model.scores.reference.names, model.verdict) == "joint"
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    again = BRAINet.load_from_checkpoint(tmp_path / "model.ckpt")
    torch.testing.assert_close(again.predict(new[:50])["probabilities"], answer["probabilities"][:50])
    assert trainer.test(model, DataLoader(TensorDataset(new, truth), batch_size=50), verbose=False)


@pytest.mark.integration
def test_an_exported_model_says_the_same(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x, target, _ = rows(300, 1)
    data = DataLoader(TensorDataset(x, target), batch_size=50)
    model = BRAINet(task=MultiLabel(LABELS), head="MLP", scores=["KNN"], lr=0.01)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    pl.Trainer(max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=False, **quiet).fit(model, data, data)
    exported = ExportedModel(export_folder(model, tmp_path / "model", x[:4]))
    expected, found = model.predict(x[:20]), exported.predict(x[:20].numpy())
    for name in ("probabilities", "labels", "known_p"):
        torch.testing.assert_close(
            torch.as_tensor(found[name]), expected[name], rtol=1e-3, atol=1e-4, check_dtype=False
        )
