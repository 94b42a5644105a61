"""Run the notebooks of examples/notebooks in empty folders, and store what they print and draw.

    python benchmarks/notebooks.py                # all of them, some minutes on two cores
    python benchmarks/notebooks.py table terminal

Each notebook keeps what it was run with ("version / algorithm / layout / commit"). Its page on the site says so, and
says by itself when the library's structures or heads have changed since.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbclient
import nbformat
from common.store import ROOT, stamp
from PIL import Image

FOLDER = ROOT / "examples" / "notebooks"


def smaller(drawn: str) -> str:
    """A picture in base64, with 128 colours: charts look the same at a third of the size."""
    picture, written = Image.open(io.BytesIO(base64.b64decode(drawn))), io.BytesIO()
    picture.convert("RGB").quantize(128).save(written, "png", optimize=True)
    return min(drawn, base64.b64encode(written.getvalue()).decode(), key=len)


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
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
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
