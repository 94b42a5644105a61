"""Several labels at once: each of L labels is there or not, on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl import uncertainty
from brainet_pl._utils import checks
from brainet_pl._utils.precision import wide
from brainet_pl._utils.warn import warn
from brainet_pl.metrics.measures import Measure
from brainet_pl.metrics.multilabel import binary_nll, mean_of_known, multilabel_measures
from brainet_pl.tasks.base import Task
from brainet_pl.tasks.passes import Passes

THRESHOLD = 0.5  # probability from which on a label is said to be there
MOST_LABELS = 10**6


class MultiLabel(Task):
    """L labels, each of which may be there or not, from L logits.

    Targets are (B, L) with 1 for a label that is there, 0 for one that is not, and NaN where nobody looked: these count
    in no loss, no metric and no calibration. The mean over the known labels of a sample is its loss and its NLL.

    Args:
        num_labels: Number of labels L.
        thresholds: Probability from which on a label is said to be there: one number, or one for each label.
    """

    has_names: ClassVar[bool] = True
    group: ClassVar[str] = "ml"
    units: ClassVar[Mapping[str, str]] = {
        "joint_energy": "",
        "entropy": "nats",
        "expected_entropy": "nats",
        "mutual_information": "nats",
    }
    limits: Tensor

    def __init__(self, num_labels: int, thresholds: float | list[float] = THRESHOLD) -> None:
        super().__init__()
        self.num_labels = self.out_features = checks.whole("num_labels", num_labels, 1, MOST_LABELS)
        self.thresholds = thresholds
        limits = thresholds if isinstance(thresholds, list) else [thresholds] * num_labels
        if len(limits) != num_labels:
            raise ValueError(
                f"expected one threshold, or one for each of {num_labels} labels, got {len(limits)}: give as many as "
                "there are labels"
            )
        for limit in limits:
            checks.share("thresholds", limit)
        self.register_buffer("limits", torch.tensor([float(limit) for limit in limits]), persistent=False)

    @property
    def needs_targets(self) -> bool:
        """Whether somebody has each label, and somebody has not, is to be seen before a fit."""
        return True

    def prepare(self, targets: Tensor) -> None:
        """Say which labels (N, L) can't be learned, because nobody has them or everybody; refuse where none can."""
        known = ~targets.isnan()
        having = (targets == 1).sum(dim=0)
        odd = (having == 0) | (having == known.sum(dim=0))
        numbers = ", ".join(map(str, odd.nonzero()[:5, 0].tolist())) + (", …" if odd.sum() > 5 else "")
        if bool(odd.all()):
            raise ValueError(
                f"expected samples with and without a label, got {len(targets):,} of which all have the same: give "
                "samples of both kinds for at least one label"
            )
        if bool(odd.any()):
            warn(
                f"nobody, or everybody, of {len(targets):,} training samples has the labels {numbers} (from 0): what "
                "is said of them is no more than that; give samples of both kinds, or leave these labels out"
            )

    def check(self, target: Tensor) -> Tensor:
        """Targets (B, L) of zeros, ones and NaN, as numbers."""
        if target.dim() != 2 or target.shape[1] != self.num_labels:
            raise ValueError(
                f"expected a column of zeros and ones for each of {self.num_labels} labels, (B, {self.num_labels}), "
                f"got targets of shape {tuple(target.shape)}: give a row of zeros and ones for each sample, NaN where "
                "a label is not known, or set num_labels to the number of columns"
            )
        y = target if target.is_floating_point() else target.float()
        odd = ~((y == 0) | (y == 1) | y.isnan())
        if bool(odd.any()):
            raise ValueError(
                f"expected targets of 0, 1 or NaN for every label, got {y[odd][0].item():g}: write 1 for a label that "
                "is there, and NaN where nobody looked"
            )
        return y

    def base_fits(self, count: int) -> bool:
        """As many logits as labels."""
        return count == self.num_labels

    def base_helps(self, base_logits: Tensor, target: Tensor) -> bool:
        """Whether logits (N, L) are of these labels: their NLL is less than that of the labels' shares."""
        shares = target.nanmean(dim=0).nan_to_num(nan=0.5).expand_as(target).double()
        usual = mean_of_known(binary_nll(shares, target), target)
        return bool(mean_of_known(binary_nll(base_logits.double().sigmoid(), target), target) < usual)

    def base_outputs(self, base_logits: Tensor) -> Tensor:
        """Logits (B, L) of the network's own layer, as they are."""
        if not self.base_fits(base_logits.shape[1]):
            raise ValueError(
                f"expected {self.num_labels} base logits of the network, got {base_logits.shape[1]}: use "
                "skip='linear' for a network of other labels"
            )
        return base_logits

    def base_predicted(self, base_logits: Tensor) -> Tensor | None:
        """Probabilities (B, L) of the network's own layer, where it has as many labels."""
        return base_logits.float().sigmoid() if base_logits.shape[1] == self.num_labels else None

    def loss(self, outputs: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Binary cross-entropy, the mean over known labels, of samples that count by `weights` (B,) where given.

        (M, B, L) is the mean over members: every branch learns every label.
        """
        known = ~target.isnan()
        each = F.binary_cross_entropy_with_logits(
            outputs, target.nan_to_num(nan=0.0).to(outputs.dtype).expand_as(outputs), reduction="none"
        )
        counts = known.to(each.dtype) if weights is None else known * weights.to(each.dtype)[:, None]
        members = len(outputs) if outputs.dim() == 3 else 1
        return (each * counts).sum() / (members * counts.sum()).clamp_min(torch.finfo(each.dtype).tiny)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Logits (T, B, L) → probabilities (T, B, L) that each label is there."""
        return wide(outputs).sigmoid()

    def predictive(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """Averages the probabilities of all passes, (B, L), before any scaling."""
        return uncertainty.predictive(self.probabilities(outputs), weights)

    def as_outputs(self, final: Tensor) -> Tensor:
        """Probabilities (B, L) as logits, whose sigmoid they are."""
        return log_odds(final)

    def nll(self, predicted: Tensor, target: Tensor) -> Tensor:
        """The mean of -log p over the known labels of each sample; 0 where none is known."""
        known = ~target.isnan()
        return binary_nll(predicted, target).sum(dim=1) / known.sum(dim=1).clamp_min(1)

    def measures(self) -> list[Measure]:
        """NLL, Brier score and calibration error over all labels and label by label, mAP, AUROC, right labels."""
        return multilabel_measures(self.num_labels)

    def scores(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """The joint energy of Wang et al. (2021), and entropies, which add up over labels."""
        probs, logits = self.probabilities(outputs), wide(outputs)
        total = entropy_of_labels(uncertainty.predictive(probs, weights))
        expected = uncertainty.predictive(entropy_of_labels(probs), weights)
        mean = uncertainty.predictive(logits, weights)
        energies = mean.clamp_min(0) + (-mean.abs()).exp().log1p()  # softplus, which ONNX lacks in 64 bits
        return {
            "joint_energy": -energies.sum(dim=-1),
            "entropy": total,
            "expected_entropy": expected,
            "mutual_information": (total - expected).clamp_min(0.0),
        }

    def scores_of_answer(self, final: Tensor, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entropies of the calibrated probabilities (B, L), split as those before calibration were."""
        total = entropy_of_labels(final)
        disagreed = (scores["mutual_information"] / scores["entropy"]).nan_to_num(nan=0.0).clamp(0.0, 1.0)
        return {
            "entropy": total,
            "expected_entropy": total * (1.0 - disagreed),
            "mutual_information": total * disagreed,
        }

    def predict(self, passes: Passes, final: Tensor) -> dict[str, Tensor]:
        """Gives `labels` (B, L), whether each is there, and `probabilities` (B, L) of a final prediction."""
        return {"labels": final >= self.limits.to(final), "probabilities": final}

    def answers(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Of each sample: how many labels are said to be there, the mean confidence, and the share that is wrong."""
        known = ~target.isnan()
        said = predicted >= self.limits.to(predicted)
        wrong = known & (said != (target == 1))
        count = known.sum(dim=1).clamp_min(1)
        confidence = torch.where(known, torch.maximum(predicted, 1 - predicted), 0.0).sum(dim=1) / count
        return {"labels_said": said.sum(dim=1), "confidence": confidence, "wrong": wrong.sum(dim=1) / count}


def log_odds(probabilities: Tensor) -> Tensor:
    """log p - log(1 - p), finite for probabilities of 0 and 1.

    >>> log_odds(torch.tensor([0.5, 0.8])).round(decimals=3)
    tensor([0.0000, 1.3860])
    """
    least = torch.finfo(torch.float32).eps
    return probabilities.clamp(least, 1 - least).logit()


def entropy_of_labels(probabilities: Tensor) -> Tensor:
    """Probabilities (…, L) of independent labels → (…) the sum of their entropies, in nats.

    >>> entropy_of_labels(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([1.3863, 0.0000])
    """
    return uncertainty.entropy(torch.cat([probabilities, 1 - probabilities], dim=-1))
