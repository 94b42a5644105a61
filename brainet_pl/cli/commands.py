"""`brainet`: which command runs what, and how an error is shown.

A command is imported when it is called for: help, `report` and `compare` do not wait for torch and Lightning.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from brainet_pl import __version__
from brainet_pl._utils.checks import UsageError
from brainet_pl.cli import predict
from brainet_pl.cli.words import ALL, HELP, check_words, nearest, short_help

if TYPE_CHECKING:
    from brainet_pl.cli.lightning_cli import BrainetCLI

ABOUT = "Calibrated heads whose wiring is learned from the data."
HINTS = (
    "`brainet COMMAND --help` lists its settings. All take --debug, which shows the whole traceback of an error. With "
    "--ckpt_path, settings come from the checkpoint and its run's config.yaml; classes in them that are not of "
    "brainet_pl have to be named again, or need --trust_checkpoint for files whose maker you know."
)
LIGHTNING = {
    "fit": "learn the structure and train; --test tests the best checkpoint afterwards",
    "validate": "evaluate a checkpoint on validation data",
    "test": "evaluate a checkpoint: metrics, figures and a page",
    "predict": "write what a checkpoint predicts to a file; an exported model, to shards (--format parquet)",
}
OWN = {
    "report": "write one self-contained HTML page of a run",
    "compare": "write a page and tables of several runs",
    "export": "write the model of a checkpoint as a folder, or as one graph: ONNX or torch.export",
    "extract": "write features of a backbone for many images to shards",
    "serve": "serve an exported model over HTTP",
    "monitor": "watch predictions for a change of the inputs, without labels",
    "labels": "find labels of a run's training data that look wrong",
    "rank": "choose which samples to label next",
    "cache": "list or delete features that FeatureCache keeps on disk",
}
HOMES = {
    "report": "evaluation.report",
    "compare": "evaluation.compare",
    "export": "cli.export",
    "extract": "cli.extract",
    "serve": "cli.serve",
    "monitor": "cli.monitor",
    "labels": "cli.labels",
    "rank": "cli.rank",
    "cache": "cli.cache",
}
DEBUG = "--debug"


def main(args: Sequence[str] | None = None) -> BrainetCLI | None:
    """The console script: some commands read files of runs, everything else is Lightning's."""
    words = list(sys.argv[1:] if args is None else args)
    command = words[0] if words else ""
    if command in OWN:
        import_module(f"brainet_pl.{HOMES[command]}").main(words[1:])
        return None
    if command == "predict" and predict.wanted(words):
        predict.main(words[1:])
        return None
    if command in LIGHTNING and _wants_short_help(words[1:]):
        print(short_help(command, LIGHTNING[command]))
        sys.exit(0)  # as argparse does
    if command in LIGHTNING or (command.startswith("-") and set(words) & set(LIGHTNING) and not _asks(words)):
        check_words(words)
        if words[-2:-1] and words[-2] in HELP and words[-1] == ALL:
            words = words[:-1]
        from brainet_pl.cli.lightning_cli import lightning

        return lightning(words)
    if not words:
        parser().print_help(sys.stderr)
        sys.exit(2)
    if not _asks(words):
        known = (*LIGHTNING, *OWN)
        raise UsageError(f"expected a command ({', '.join(known)}), got {command!r}{nearest(command, known)}")
    parser().parse_args(words[:1])
    return None


def _asks(words: Sequence[str]) -> bool:
    """Whether nothing is wanted but help or the version."""
    return words[0] in ("-h", "--help", "--version")


def _wants_short_help(words: Sequence[str]) -> bool:
    """Whether help is asked for, and not all of it: `--help all`."""
    asked = next((i for i, word in enumerate(words) if word in HELP), None)
    return asked is not None and words[asked + 1 : asked + 2] != [ALL]


def parser() -> argparse.ArgumentParser:
    """All commands with a line each; each command parses its own settings."""
    made = argparse.ArgumentParser("brainet", description=ABOUT, epilog=HINTS)
    made.add_argument("--version", action="version", version=f"brainet {__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, summary in (LIGHTNING | OWN).items():
        commands.add_parser(name, help=summary)
    return made


def console() -> None:
    """Entry point: an error becomes one line. The exit status is 2 where the command or a name in it is wrong, so that
    nothing was begun; 1 where the work fails; 130 after Ctrl-C.

    Nothing is returned: a console script's result would become its exit status.
    """
    words = [word for word in sys.argv[1:] if word != DEBUG]
    if DEBUG not in sys.argv:
        warnings.showwarning = _OneLine()
    try:
        main(words)
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning ends a fit so, with the status of an error
            sys.exit(_interrupted())
        raise
    except Exception as error:
        if DEBUG in sys.argv:
            raise
        wrong = isinstance(error, UsageError)
        print(f"brainet: {one_line(error)}{'' if wrong else f' ({DEBUG} shows where)'}", file=sys.stderr)
        sys.exit(2 if wrong else 1)


class _OneLine:
    """A warning in a line, each once: neither the file it comes from nor the line of code."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, message: Warning | str, *rest: Any, **more: Any) -> None:
        text = _printable(str(message))
        if text not in self.said:
            self.said.add(text)
            print(f"warning: {text}", file=sys.stderr)


def one_line(error: Exception) -> str:
    """The message of an error without line breaks and other signs that steer a terminal; its kind, if not ours."""
    shown = _printable(str(error))
    ours = shown.startswith("expected") or isinstance(error, UsageError)
    return shown if ours else f"{type(error).__name__}: {shown}".rstrip(": ")


def _printable(text: str) -> str:
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _interrupted() -> int:
    print("brainet: interrupted", file=sys.stderr)
    return 130  # as shells have it: 128 and the number of the signal


if __name__ == "__main__":
    console()
