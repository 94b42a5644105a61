"""`brainet rank`: which of the samples that a run would predict are worth a label, as a table and a page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from brainet_pl.cli.export import load
from brainet_pl.cli.labels import add_image_shape, own_data, pictures_of
from brainet_pl.cli.words import find_ckpt_path
from brainet_pl.decisions import rank_for_labelling
from brainet_pl.decisions.page import write_pages


def main(args: Sequence[str]) -> None:
    """`brainet rank --ckpt_path FILE --k N --out FOLDER`."""
    parser = argparse.ArgumentParser(
        "brainet rank",
        description="Choose the samples that `brainet predict` would predict whose labels are worth most: those that "
        "the model is unsure of, each unlike the others: rank.csv, rank.html and rank.png.",
    )
    parser.add_argument("--ckpt_path", required=True, help="the checkpoint")
    parser.add_argument("--out", default="rank", help="the folder to write to; rank")
    parser.add_argument("--k", type=int, default=100, help="how many samples; 100")
    add_image_shape(parser)
    words = parser.parse_args(args)
    words.ckpt_path = find_ckpt_path(words.ckpt_path)
    model, data = load(words.ckpt_path), own_data(words.ckpt_path)
    data.setup("predict")
    loader = data.predict_dataloader()
    chosen = rank_for_labelling(model, loader, words.k)
    files = getattr(loader.dataset, "files", None)
    rows = []
    for place, number in enumerate(chosen.tolist()):
        rows.append({"place": place + 1, "sample": number} | ({} if files is None else {"file": str(files[number])}))
    sentence = f"label these {len(rows):,} samples next, the first ones first"
    page = write_pages(Path(words.out), "rank", sentence, rows, pictures_of(loader, words.image_shape), len(rows))
    print(f"{sentence}: {', '.join(map(str, chosen[:10].tolist()))}, …\npage: {page}")
