"""Build the package, install what was built, and do what a newcomer does first; `make release-check` runs it.

    python tests/release.py

Builds sdist and wheel, checks metadata and README (`twine check`, where twine is installed), and installs each into an
environment of its own. That environment has nothing but the package: what it depends on is read from the environment
that runs this script, by a .pth file, so that torch is not downloaded twice. Then, in an empty folder and without this
tree on the path: the version, a fit with a test, the page, and the first block of Python in README.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = (
    "--version",
    "fit --config digits --trainer.max_epochs 2 --trainer.enable_progress_bar=false --test",
    "report runs/digits/version_0",
)


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command without this tree on the path; gives what it printed, or ends with it."""
    around = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(w) for w in words], cwd=cwd, env=around | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, words))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def check_metadata(wheel: Path, sdist: Path) -> None:
    """Name, version, license, README and the files that must be in both."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (place,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = Parser().parsestr(archive.read(place).decode())
    code = (ROOT / "brainet_pl" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"', code, re.M)
    assert version is not None
    assert (said["Name"], said["Version"]) == ("brainet_pl", version[1]), (said["Name"], said["Version"])
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert {"docs", "onnx", "serve", "text", "timm", "graphs", "hub"} <= set(said.get_all("Provides-Extra") or ())
    configs = {f"brainet_pl/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    wanted = configs | {"brainet_pl/py.typed", "brainet_pl/evaluation/report/style.css"}
    assert wanted <= set(names), wanted - set(names)
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "brainet_pl/__init__.py"} <= inside


def check_links() -> None:
    """Files that the texts at the top of the tree name exist; tests/test_docs.py looks at the pages."""
    for page in (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")):
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)) | set(re.findall(r"\b(docs/[\w/]+\.md)\b", text))
        lost = sorted(target for target in named if not (ROOT / target).exists())
        assert not lost, (page.name, lost)


def try_out(built: Path, folder: Path) -> None:
    """Install one file, and do what README says first."""
    run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    python = next(p for p in (folder / "env/bin/python", folder / "env/Scripts/python.exe") if p.exists())
    (site,) = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).split("\n")[:1]
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # the setuptools that Python 3.11 and older put into a new environment can't read this pyproject.toml
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", cwd=folder)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", built, cwd=folder)
    place = run(python, "-c", "import brainet_pl; print(brainet_pl.__file__)", cwd=folder).strip()
    assert Path(place).is_relative_to(folder / "env"), place
    command = python.with_name(f"brainet{python.suffix}")
    for line in COMMANDS:
        print(f"  brainet {line}", flush=True)
        run(command, *line.split(), cwd=folder, WANDB_MODE="disabled")
    assert (folder / "runs/digits/version_0/report.html").is_file()
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert block is not None
    print("  the first block of README", flush=True)
    run(python, "-c", block[1], cwd=folder)


def main() -> None:
    """Build, check, install, try."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        print("building sdist and wheel", flush=True)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ROOT, cwd=folder)
        (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
        check_metadata(wheel, sdist)
        check_links()
        ours = {"PYTHONPATH": os.pathsep.join(sys.path)}  # wherever twine was found
        if importlib.util.find_spec("twine"):
            print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=folder, **ours).strip())
        else:
            print("twine is not installed: its check of the metadata was left out")
        for built in (wheel, sdist):
            print(f"installing {built.name}", flush=True)
            place = folder / built.suffix.strip(".")
            place.mkdir()
            try_out(built, place)
    print("released files build, install and run")


if __name__ == "__main__":
    main()
