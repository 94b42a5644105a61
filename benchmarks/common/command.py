"""The command line of every experiment of the paper."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from common.store import RESULTS


def arguments(doc: str | None, *, seeds: int = 5, epochs: int = 20) -> argparse.ArgumentParser:
    """A parser with the options that all experiments have, and their defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--cache", type=Path, help="folder for extracted features; DIR/cache if not given")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--epochs", type=int, default=epochs)
    add_out(parser)
    return parser


def add_out(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark: where results go, and a small run that only shows that everything works."""
    parser.add_argument("--out", type=Path, help="folder for JSON and figures; docs/results if not given")
    parser.add_argument(
        "--smoke", action="store_true", help="a short run on synthetic data, with results in a temporary folder"
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of an experiment; a smoke run has one seed, one epoch and no data."""
    args = parser.parse_args(argv)
    args.out = results_folder(args)
    if args.smoke:
        args.seeds, args.epochs, args.data = 1, 1, None
        torch.set_num_threads(1)  # faster for small tensors, above all on a machine that has other things to do
    elif args.data is None:
        parser.error("expected the folder with the data sets, got none: give --data DIR, or try --smoke")
    return args


def results_folder(args: argparse.Namespace) -> Path:
    """Where results go: what was asked for, else docs/results, or a temporary folder for a smoke run."""
    if args.out is not None:
        return Path(args.out)
    return Path(tempfile.mkdtemp(prefix="smoke-")) if args.smoke else RESULTS
