"""Probabilities of samples by heads that were not trained on them: the labels of the others judge each label."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from brainet_pl._utils.rng import isolated_rng
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.calibration.temperature import fit_temperature, scale
from brainet_pl.decisions.doors import predictor_behind, read_features, settings_behind
from brainet_pl.features.extraction import Extracted
from brainet_pl.features.ridge import deal_folds
from brainet_pl.fitting.predictions import predict_rows
from brainet_pl.fitting.samples import enough_to_choose, rows_of
from brainet_pl.fitting.settle import Settling
from brainet_pl.fitting.train import train
from brainet_pl.network import HeadSettings, Linear
from brainet_pl.network.base import HeadInputs
from brainet_pl.network.training import TrainingSettings
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.structure import GGT

FOLDS = 5
SELECT = 7  # one of so many parts of the other folds ends the training
LEAST = 2  # samples of a class, of which one is trained on
TRAINING = TrainingSettings(100, 6, None, 2e-3, weight_decay=1.0, input_dropout=0.2)


class OutOfFold(NamedTuple):
    """What is said of samples by what was not trained on them.

    Attributes:
        probabilities: (N, C).
        labels: (N,).
    """

    probabilities: NDArray[np.float64]
    labels: NDArray[np.int64]


def out_of_fold(model: Any, data: Any = None, progress: bool = True) -> OutOfFold:
    """Judge each labelled sample by the others: by five heads of the model's kind, each without a fifth of them.

    The backbone stays as it is: one that was trained on these very labels has learned wrong ones too. Each head is
    averaged with a linear layer on the same features, both at their best temperature. An estimator has held every row
    back once in its `fit`: nothing is trained.

    Args:
        model: behind any door.
        data: inputs and labels, a pair of tensors, a dataset or a loader that does not shuffle; of an estimator None.
        progress: show progress bars.
    """
    predictor = predictor_behind(model)
    if hasattr(model, "network_"):
        return _of_estimator(predictor, data)
    if data is None:
        raise ValueError("expected inputs and labels to judge, got None: give a pair, a dataset or a loader")
    with torch.enable_grad():
        return _of_heads(predictor, settings_behind(model), read_features(model, data, progress))


def _of_estimator(predictor: Any, data: Any) -> OutOfFold:
    """What the members of each fold of an estimator said of the rows that they held back, in the order of `fit`."""
    rows: Tensor | None = getattr(predictor, "held_rows", None)
    if rows is None or len(rows) < LEAST or data is not None:
        raise ValueError(
            "expected an estimator that was fitted here, with several members, and no data, got "
            f"{'data' if data is not None else 'another'}: call find_label_issues(model.fit(X, y))"
        )
    order = rows.argsort()
    if int(rows.max()) + 1 != len(rows):
        raise ValueError(
            f"expected every row of fit to be held back once, got {len(rows)} of {int(rows.max()) + 1} or more: fit "
            "with members=5, and with two rows of each class at the least"
        )
    return OutOfFold(predictor.held_predicted[order].double().numpy(), predictor.held_target[order].numpy())


def _of_heads(like: Predictor, settings: HeadSettings, samples: Extracted) -> OutOfFold:
    labels = like.task.check(samples.targets.cpu()).long()
    counts = torch.bincount(labels)
    few = int(((counts > 0) & (counts < LEAST)).sum())
    if len(torch.unique(labels)) < 2 or few:
        raise ValueError(
            f"expected two classes with {LEAST} samples each at the least, got {len(torch.unique(labels))} classes, "
            f"{few} of them with one sample: give more labelled samples"
        )
    features = samples.output.features.float().cpu()
    plain = Extracted(BackboneOutput(features), labels)
    found = torch.empty(len(labels), like.task.out_features, dtype=torch.double)
    every = torch.arange(len(labels))
    for held in deal_folds(labels):
        others = every[~torch.isin(every, held)]
        parts = deal_folds(labels[others], count=SELECT)
        select, rest = others[parts[0]], others[torch.cat(parts[1:])]
        roles = (rows_of(plain, rest), rows_of(plain, select), rows_of(plain, held))
        by_each = [_predicted(like, kind, roles) for kind in (settings, Linear())]
        found[held] = torch.stack(by_each).mean(dim=0)
    return OutOfFold(found.numpy(), labels.numpy())


def _predicted(like: Predictor, settings: HeadSettings, roles: tuple[Extracted, Extracted, Extracted]) -> Tensor:
    """Probabilities (H, C) of held samples by a new head that is trained on the first samples, ended by the second."""
    learn, select, held = roles
    task = like.task
    predictor = Predictor(FeatureExtractor(nn.Identity()), task, num_passes=like.num_passes)
    tree: GGT | None = like.ggt if settings.needs_tree else None
    with isolated_rng(0):
        predictor.build_head(settings, learn.features.shape[1], tree)
        head = predictor.require_head()
        inputs = [HeadInputs(part.features, part.targets) for part in (learn, select)]
        train(head, task, inputs[0], inputs[1], TRAINING, passes=predictor.num_passes)
        Settling(predictor).choose(learn, enough_to_choose(select))
        averaged = []
        for part in (select, held):
            outputs = predict_rows(predictor, part)
            averaged.append(task.predictive(outputs.values, outputs.weights).double())
    return scale(averaged[1], fit_temperature(averaged[0], select.targets))
