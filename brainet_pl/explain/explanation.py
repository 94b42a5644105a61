"""What is said of why: a prediction, the verdict's parts, maps, columns and resembling samples, and a sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from brainet_pl.explain.columns import ColumnParts
from brainet_pl.explain.words import listed, mostly, percentile, place_name, stage_name, strongest_place
from brainet_pl.prediction.prediction import Prediction
from brainet_pl.scores.cells import PlaceMap
from brainet_pl.scores.known import Resembled

FAINT, STRONG = 2.0, 8.0  # nats of a pixel's relief: two and four standard deviations, between which colour rises
LEAST_SMOOTHED = 6  # pixels of a side, from which on a place is named by the mean of its surroundings
CLEAREST = 0.65  # share of the colour that covers a picture where it is strangest
YELLOW, RED = (255.0, 214.0, 0.0), (214.0, 0.0, 32.0)


@dataclass(frozen=True)
class Explanation:
    """Why B inputs look known or unknown.

    Attributes:
        prediction: what `predict` says of them.
        score: the score that the verdict goes by; None without held-out data.
        reference: (n,) that score of held-out samples, rising.
        shares: score → (B,) what it adds to the verdict's score; these add up to it.
        columns: which columns are strange; None where the verdict reads none.
        places: where an image is strange; None where no stage of a network gives maps.
        ends: the values of `places.surprise` from which on, and up to which, a picture is coloured.
        resembled: the nearest known samples; None where none were kept.
        missing: why there is no map, or no columns, in words.
    """

    prediction: Prediction
    score: str | None
    reference: Tensor
    shares: Mapping[str, Tensor]
    columns: ColumnParts | None = None
    places: PlaceMap | None = None
    ends: tuple[float, float] = (FAINT, STRONG)
    resembled: Resembled | None = None
    missing: Sequence[str] = field(default=())

    def __len__(self) -> int:
        return len(next(iter(self.prediction.values())))

    @property
    def sentences(self) -> list[str]:
        """One sentence on each input."""
        return self.describe()

    def describe(self, shape: Sequence[int] | None = None) -> list[str]:
        """One sentence on each input.

        Args:
            shape: (H, W) or (C, H, W) of images that are read as columns: then places are named in place of columns.
        """
        pixels = self._pixels(shape) if self.places is None else None
        return [self._sentence(row, None if pixels is None else pixels[row]) for row in range(len(self))]

    def _sentence(self, row: int, pixels: Tensor | None = None) -> str:
        if self.score is None:
            return listed(["nothing was held out to compare with, so that no verdict was given", *self.missing])
        what = "images" if self.places is not None else "samples" if self.columns is None else "rows"
        said = [percentile(float(self.prediction[self.score][row]), self.reference, f"calibration {what}")]
        said.append(mostly({name: float(values[row]) for name, values in self.shares.items()}))
        if pixels is not None and bool((pixels > FAINT).any()):
            side = 3 if min(pixels.shape) >= LEAST_SMOOTHED else 1
            near = F.avg_pool2d(pixels[None, None].float(), side, 1, side // 2, count_include_pad=False)[0, 0]
            said.append(f"strangest {place_name(*strongest_place(near))}")
        elif pixels is not None:
            said.append("no place of it stands out")
        elif self.places is not None:
            said.append(self._place(self.places, row))
        elif self.columns is not None:
            said += self.columns.because(row, 1)
        return listed([*said, *self.missing])

    @staticmethod
    def _place(places: PlaceMap, row: int) -> str:
        share = 1 - float(places.anywhere_p[row])
        where = place_name(*strongest_place(places.surprise[row]))
        stages = places.stages[row]
        seen = stage_name(int(stages.argmax()), len(stages))
        if share < 0.5:
            return "no place of it stands out"
        return f"strangest {where}, in {seen}, more so than any place of {share:.0%} of known images".replace("%", " %")

    def because(self, row: int, most: int = 3) -> list[str]:
        """At most so many reasons for the verdict on one input, the strongest first; [] where there is none to tell."""
        if self.columns is not None:
            return self.columns.because(row, most)
        return [] if self.places is None else [self._place(self.places, row)]

    def intensity(self, shape: Sequence[int] | None = None) -> Tensor | None:
        """How strange each place is, from 0, usual, to 1, (B, H, W); None where there is no map.

        Args:
            shape: (H, W) or (C, H, W) of images that are read as columns.
        """
        low, high = self.ends
        if self.places is not None:
            return ((self.places.surprise - low) / max(high - low, 1e-6)).clamp(0, 1).nan_to_num(nan=1.0)
        pixels = self._pixels(shape)
        if pixels is None:
            return None
        return ((pixels - FAINT) / (STRONG - FAINT)).clamp(0, 1).nan_to_num(nan=1.0)

    def _pixels(self, shape: Sequence[int] | None) -> Tensor | None:
        """The relief of each pixel (B, H, W) of images that are read as columns; None where inputs are no such images.

        It is that of a pixel alone, and summed over channels.
        """
        if self.columns is None or shape is None or int(np.prod(shape)) != self.columns.relief.shape[1]:
            return None
        pixels: Tensor = self.columns.relief.view(len(self), *shape)
        return pixels.sum(dim=1) if len(shape) == 3 else pixels

    def overlay(self, images: Any, shape: Sequence[int] | None = None) -> list[NDArray[np.uint8]] | None:
        """Pictures (H, W, 3) of the inputs with what is strange in yellow to red; None where there is no map.

        Args:
            images: the inputs: (B, C, H, W), or (B, d) with the shape of an image. Each is stretched from its own least
                to its largest value, because how it was normalised is not known.
            shape: (H, W) or (C, H, W) of images that are read as columns.
        """
        heat = self.intensity(shape)
        if heat is None:
            return None
        x = torch.as_tensor(images).float().cpu()
        x = x.view(len(x), *shape) if shape is not None and x.dim() == 2 else x
        x = x[:, None] if x.dim() == 3 else x
        return [overlaid(picture, place) for picture, place in zip(x, heat.float().cpu(), strict=True)]

    def to_dict(self) -> list[dict[str, Any]]:
        """A dictionary of plain values for each input, for JSON."""
        found: list[dict[str, Any]] = []
        for row in range(len(self)):
            said: dict[str, Any] = {"sentence": self._sentence(row), "because": self.because(row)}
            if self.resembled is not None:
                said["resembles"] = self.resembled.numbers[row].tolist()
            if self.places is not None:
                said["map"] = [[round(value, 3) for value in line] for line in self.places.surprise[row].tolist()]
                said["anywhere_p"] = float(self.places.anywhere_p[row])
            found.append(said)
        return found

    @staticmethod
    def concat(parts: Sequence[Explanation]) -> Explanation:
        """Explanations of several batches as one."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        shares = {name: torch.cat([part.shares[name] for part in parts]) for name in first.shares}
        columns = places = resembled = None
        if first.columns is not None:
            tables = [part.columns[1:] for part in parts if part.columns is not None]
            columns = ColumnParts(first.columns.units, *map(torch.cat, zip(*tables, strict=True)))
        if first.places is not None:
            places = PlaceMap(*map(torch.cat, zip(*(part.places for part in parts if part.places), strict=True)))
        if first.resembled is not None:
            nearest = [part.resembled for part in parts if part.resembled is not None]
            resembled = Resembled(*map(torch.cat, zip(*nearest, strict=True)))
        answer = Prediction.concat([part.prediction for part in parts])
        return Explanation(
            answer, first.score, first.reference, shares, columns, places, first.ends, resembled, first.missing
        )


def overlaid(image: Tensor, heat: Tensor) -> NDArray[np.uint8]:
    """An image (C, H, W) and how strange its places are, (h, w) from 0 to 1 → a picture (H, W, 3)."""
    image = image if len(image) == 3 else image.mean(dim=0, keepdim=True).expand(3, -1, -1)
    image = image.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    low, high = image.min(), image.max()
    picture = 255 * (image - low) / (high - low).clamp_min(1e-12)
    size = picture.shape[1:]
    wide = F.interpolate(heat[None, None], size=size, mode="bilinear")[0] if heat.shape != size else heat[None]
    yellow, red = (torch.tensor(colour).view(3, 1, 1) for colour in (YELLOW, RED))
    colour = yellow + (red - yellow) * wide
    share = CLEAREST * wide.sqrt()
    mixed = (1 - share) * picture + share * colour
    return np.asarray(mixed.round().to(torch.uint8).permute(1, 2, 0).numpy())
