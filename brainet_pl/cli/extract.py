"""`brainet extract`: features of a backbone to shards of Parquet files, which `learn_structure` reads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from brainet_pl._utils.checks import UsageError
from brainet_pl.backbones.loading import Backbone, find_preset
from brainet_pl.batch.features import FeatureWriter
from brainet_pl.batch.shards import digest, write_shards
from brainet_pl.batch.sources import open_source
from brainet_pl.cli.predict import add_sharing, part_of, summary
from brainet_pl.serving.images import ImageSteps


def main(args: Sequence[str]) -> None:
    """`brainet extract --backbone NAME --input DATA --out DIR --shards N`."""
    parser = argparse.ArgumentParser(
        "brainet extract",
        description="Write the features that a backbone gives for images, in tar files or a folder, to a folder of "
        "Parquet files, one a shard. brainet_pl.batch.features.FeatureShards reads them.",
    )
    parser.add_argument("--backbone", required=True, help="torchvision/NAME, timm/NAME or package.module:Class")
    parser.add_argument("--weights", help="a file, or the name of published weights, such as DEFAULT")
    parser.add_argument("--layers", help="layers that are read, such as layer3 or stages; the last one without")
    parser.add_argument("--side", type=int, help="pixels of an image's side; without, as the published weights expect")
    parser.add_argument("--channels", type=int, choices=(1, 3), default=3, help="with --side: 3 is colour; 3")
    add_sharing(parser)
    words = parser.parse_args(args)
    part = part_of(words)
    source = open_source(words.input)
    if source.key != ("file",):
        raise ValueError(
            f"expected images to extract features of, got tables in {words.input}: learn from them at once"
        )
    settings = Backbone(words.backbone, words.weights, layers=words.layers)
    steps = _preparation(words)
    extractor = settings.build()
    example = torch.zeros(2, steps.channels, steps.crop, steps.crop)
    with torch.inference_mode():
        width = extractor(example).shape[1]  # the first inputs also find the layer to remove
    writer = FeatureWriter(extractor, steps, width)
    weights = words.weights
    if weights is not None and Path(weights).is_file():
        weights = digest(Path(weights))
    facts = {"backbone": words.backbone, "weights": weights, "layers": words.layers, "images": steps.to_dict()}
    found = write_shards(source, writer, words.out, words.shards, part=part, batch=words.batch_size, facts=facts)
    print(summary(words, found))


def _preparation(words: argparse.Namespace) -> ImageSteps:
    """How images become inputs: as was asked for, or as the published weights expect them."""
    if words.side is not None:
        return ImageSteps((words.side, words.side), words.side, channels=words.channels)
    preset = find_preset(words.backbone, words.weights)
    if preset is None:
        raise UsageError(
            f"expected --side for {words.backbone}, which does not say how images are prepared: name their side in "
            "pixels; values are then between 0 and 1"
        )
    return ImageSteps(**preset.to_dict())
