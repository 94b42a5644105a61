"""`brainet serve`: an exported model over HTTP, on this machine alone unless it is told otherwise."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from brainet_pl._utils.checks import UsageError
from brainet_pl.cli.words import best_of_run
from brainet_pl.serving.folder import ABOUT, ExportedModel

LOOPBACK = "127.0.0.1"


def main(args: Sequence[str]) -> None:
    """`brainet serve FOLDER|CHECKPOINT`."""
    parser = argparse.ArgumentParser(
        "brainet serve",
        description="Serve an exported model over HTTP: POST /predict and /predict/images; GET /health, /model, /drift "
        "and /metrics. There is no encryption and no password: put a proxy in front of it before others reach it.",
    )
    parser.add_argument("model", help="a folder that `brainet export` wrote, a checkpoint, or the folder of a run")
    parser.add_argument("--host", default=LOOPBACK, help="the address to listen on; 127.0.0.1 is this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="8000; 0 takes a free one")
    parser.add_argument(
        "--allow_host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name beside localhost that requests to this machine may use, as a proxy passes it on; may be repeated",
    )
    parser.add_argument("--max_megabytes", type=float, default=20.0, help="of the body of a request; 20")
    parser.add_argument("--max_batch", type=int, default=256, help="samples in a request; 256")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds until a request is answered; 30")
    parser.add_argument("--max_waiting", type=int, default=64, help="requests that wait at a time; 64")
    parser.add_argument("--max_connections", type=int, default=1000, help="connections that are open at a time; 1000")
    parser.add_argument("--threads", type=int, default=1, help="threads that run the model; 1")
    parser.add_argument("--alpha", type=float, default=0.05, help="the probability of a false drift alarm; 0.05")
    parser.add_argument(
        "--model.backbone", dest="backbone", help="of a checkpoint: the class of a backbone of your own, as in export"
    )
    parser.add_argument("--trust_checkpoint", action="store_true", help="import the backbone that the checkpoint names")
    words = parser.parse_args(args)
    more = (["--model.backbone", words.backbone] if words.backbone else []) + (
        ["--trust_checkpoint"] if words.trust_checkpoint else []
    )
    try:
        from brainet_pl.serving.app import make_app
        from brainet_pl.serving.limits import Limits
        from brainet_pl.serving.server import run
    except ImportError as error:
        raise ImportError(f"serving needs more packages ({error.name}): pip install 'brainet_pl[serve]'") from error
    limits = Limits(words.max_megabytes, words.max_batch, words.timeout, words.max_waiting, words.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = find_folder(Path(words.model), Path(scratch), more)
        app = make_app(ExportedModel(folder, words.threads), limits, words.alpha, words.allow_host)
        run(app, words.host, words.port, limits, words.max_connections)


def find_folder(given: Path, scratch: Path, more: Sequence[str] = ()) -> Path:
    """The folder of an exported model; a checkpoint, or the best one of a run, is exported first."""
    if (given / ABOUT).is_file():
        return given
    best = given if given.is_file() else best_of_run(given)
    if best is None:
        raise UsageError(
            f"expected the folder of an exported model, of a run, or a checkpoint, got {given}, which is none: check "
            "the path, or export the model first"
        )
    from brainet_pl.cli import export

    export.main(["--ckpt_path", str(best), "--out", str(scratch / "model"), *more])
    return scratch / "model"
