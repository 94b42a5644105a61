"""Measures of maps: sums over the pixels of one image at a time, so that no more than an image is in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from brainet_pl.metrics.curves import calibration_error, calibration_sums, separation

DETECTS = ("entropy", "one_minus_max_p", "mutual_information", "energy", "generative", "joint", "unlike")


class PixelSums:
    """What images have shown so far of the quality of answers.

    Args:
        num_classes: number of classes C.
        ignore_index: the value of void pixels in masks.
        unknown: values of pixels of objects that the model has no class for; without any, detection is not measured.
        kept: pixels of an image, drawn evenly, whose scores count in the measures of detection.

    Attributes:
        confusion: (C, C) counts of pixels by class and predicted class.
    """

    def __init__(self, num_classes: int, ignore_index: int, unknown: Sequence[int] = (), kept: int = 5000) -> None:
        self.num_classes, self.ignore_index, self.unknown, self.kept = num_classes, ignore_index, unknown, kept
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self._bins: Tensor | float = 0.0
        self._nll = 0.0
        self._scores: dict[str, list[Tensor]] = {}
        self._odd: list[Tensor] = []

    def update(self, answer: Mapping[str, Tensor], mask: Tensor, odd: Tensor) -> None:
        """Add the pixels of one image.

        Args:
            answer: maps by name: `probabilities` (C, H, W), `class` and scores (H, W).
            mask: (H, W) classes, and `ignore_index` for void pixels.
            odd: (H, W) whether a pixel is of an unknown object; in `mask` it is void.
        """
        known = mask != self.ignore_index
        target = mask[known]
        probs = answer["probabilities"].movedim(0, -1)[known].double()
        confidence, label = probs.max(dim=1)
        pairs = target * self.num_classes + label
        counts = torch.bincount(pairs, minlength=self.num_classes**2)
        self.confusion += counts.view(self.num_classes, self.num_classes)
        self._nll -= float(probs.gather(1, target[:, None]).clamp_min(1e-12).log().sum())
        self._bins = self._bins + calibration_sums(confidence, label == target)
        if self.unknown:
            self._keep(answer, known, odd)

    def _keep(self, answer: Mapping[str, Tensor], known: Tensor, odd: Tensor) -> None:
        """Keep the scores of some pixels that are known or unknown, and not void."""
        places = (known | odd).flatten().nonzero()[:, 0]
        drawn = torch.randperm(len(places), generator=torch.Generator().manual_seed(len(self._odd)))[: self.kept]
        chosen = places[drawn]
        self._odd.append(odd.flatten()[chosen])
        values = {name: maps for name, maps in answer.items() if name in DETECTS}
        if "known_p" in answer:
            values["unlike"] = 1 - answer["known_p"]
        for name, maps in values.items():
            self._scores.setdefault(name, []).append(maps.flatten()[chosen].float())

    @property
    def iou(self) -> Tensor:
        """Intersection over union of each class (C,); NaN of a class that is neither there nor predicted."""
        counts = self.confusion.double()
        both = counts.diag()
        return both / (counts.sum(dim=0) + counts.sum(dim=1) - both)

    def compute(self) -> dict[str, float]:
        """The measures by name; shares from 0 to 1, NLL in nats a pixel.

        `mIoU` is the mean over classes that are there or predicted; `<score>/AUROC` and `<score>/FPR95` say how well
        unknown pixels are told from known ones by a score, and `unlike` is 1 - `known_p`.
        """
        total = int(self.confusion.sum())
        if not total:
            raise ValueError(
                f"expected labelled pixels to measure by, got none but void ({self.ignore_index}): check the masks"
            )
        assert isinstance(self._bins, Tensor)
        found = {
            "mIoU": float(self.iou.nanmean()),
            "accuracy": float(self.confusion.diag().sum() / total),
            "NLL": self._nll / total,
            "ECE": float(calibration_error(self._bins)),
            "pixels": float(total),
        }
        odd = torch.cat(self._odd) if self._odd else torch.empty(0, dtype=torch.bool)
        if self.unknown and not (odd.any() and (~odd).any()):
            raise ValueError(
                f"expected pixels of the unknown objects {list(self.unknown)} beside others in the masks, got "
                f"{int(odd.sum())} of {len(odd)}: name the values that they have in the masks"
            )
        for name, parts in self._scores.items():
            values = torch.cat(parts)
            there = values.isfinite()
            measured = separation(values[there & ~odd], values[there & odd])
            found |= {f"{name}/AUROC": measured["AUROC"], f"{name}/FPR95": measured["FPR95"]}
        return found
