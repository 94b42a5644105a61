"""Run the notebooks of examples/notebooks in empty folders, and store what they print and draw.

    python benchmarks/notebooks.py                # all of them, some minutes on two cores
    python benchmarks/notebooks.py table terminal

Each notebook keeps what it was run with ("version / algorithm / layout / commit"). Its page on the site says so, and
says by itself when the library's structures or heads have changed since.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbclient
import nbformat
from common.store import ROOT, stamp

FOLDER = ROOT / "examples" / "notebooks"


def run(path: Path) -> None:
    """Run one notebook from top to bottom, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    notebook.metadata["measured"] = stamp()
    nbformat.write(notebook, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(names)}; all if not given")
    args = parser.parse_args(argv)
    wrong = sorted(set(args.names) - set(names))
    if wrong:
        parser.error(
            f"expected notebooks of {FOLDER.relative_to(ROOT)}, got {', '.join(wrong)}: give {', '.join(names)}"
        )
    os.environ["PYTHONPATH"] = str(ROOT)
    for name in args.names or names:
        run(FOLDER / f"{name}.ipynb")
        print(f"{name}: run and stored", flush=True)


if __name__ == "__main__":
    main()
