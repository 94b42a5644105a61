"""Build the package, install what was built, and do what a newcomer does first; `make release-check` runs it.

    python tests/release.py [--repository https://HOST/OWNER/NAME] [--pages https://HOST/PAGES] [--out dist]

With the address of the repository, which who publishes knows, links and pictures of README lead there from the page of
an index of packages, and the metadata has addresses; `make release` does this, and keeps what was built.

Builds sdist and wheel, checks metadata and README (`twine check`, where twine is installed), and installs each into an
environment of its own. That environment has nothing but the package: what it depends on is read from the environment
that runs this script, by a .pth file, so that torch is not downloaded twice. Then, in an empty folder and without this
tree on the path: the version, a fit with a test, the page, and all blocks of Python in README.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
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


def with_addresses(readme: str, repository: str, version: str) -> str:
    """README as a page of an index shows it: what it links and draws is in the repository, at this version's tag."""
    files = f"{repository.rstrip('/')}/blob/v{version}/"
    pictures = f"{repository.rstrip('/')}/raw/v{version}/"
    target = r"\]\((?!https?:|#)([^)]+\))"
    drawn = re.sub(rf"(!\[[^\]]*){target}", rf"\1]({pictures}\2", readme)
    return re.sub(target, rf"]({files}\1", drawn)


def with_urls(pyproject: str, repository: str, pages: str | None) -> str:
    """The settings of the package with the addresses of those who publish it."""
    repository = repository.rstrip("/")
    urls = {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
    }
    if pages:
        urls["Documentation"] = pages
    lines = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    return pyproject.replace("[project.urls]\n", f"[project.urls]\n{lines}")


def version_of_code() -> str:
    """What `brainet_pl.__version__` says, without an import."""
    code = (ROOT / "brainet_pl" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"', code, re.M)
    assert version is not None
    return version[1]


def copied(folder: Path, repository: str | None, pages: str | None) -> Path:
    """The files that git knows, in a folder of their own, with addresses where they are given."""
    tree = folder / "tree"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    if repository:
        readme, pyproject = tree / "README.md", tree / "pyproject.toml"
        text = with_addresses(readme.read_text(encoding="utf-8"), repository, version_of_code())
        readme.write_text(text, encoding="utf-8")
        pyproject.write_text(with_urls(pyproject.read_text(encoding="utf-8"), repository, pages), encoding="utf-8")
    else:
        print("no --repository: links of README lead nowhere on an index of packages; good enough for a check")
    return tree


def check_metadata(wheel: Path, sdist: Path, readme: str) -> None:
    """Name, version, license, README and the files that must be in both."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (place,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = Parser().parsestr(archive.read(place).decode())
    found = (said["Name"], said["Version"])
    assert found == ("brainet_pl", version_of_code()), found
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload().strip() == readme.strip()
    assert {"docs", "onnx", "serve", "text", "timm", "graphs", "hub"} <= set(said.get_all("Provides-Extra") or ())
    configs = {f"brainet_pl/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    wanted = configs | {"brainet_pl/py.typed", "brainet_pl/evaluation/report/style.css"}
    assert wanted <= set(names), wanted - set(names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"brainet_pl", f"brainet_pl-{version_of_code()}.dist-info"}, tops
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
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert blocks
    for number, block in enumerate(blocks, 1):
        print(f"  block {number} of README", flush=True)
        run(python, "-c", block, cwd=folder, MPLBACKEND="agg")


def main(words: list[str] | None = None) -> None:
    """Build, check, install, try."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", help="where the code is published")
    parser.add_argument("--pages", help="where the documentation is published")
    parser.add_argument("--out", type=Path, help="a folder for sdist and wheel, once all of this has passed")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        tree = copied(folder, asked.repository, asked.pages)
        print("building sdist and wheel", flush=True)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", tree, cwd=folder)
        (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
        check_metadata(wheel, sdist, (tree / "README.md").read_text(encoding="utf-8"))
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
        if asked.out:
            asked.out.mkdir(parents=True, exist_ok=True)
            for built in (wheel, sdist):
                print(f"{shutil.copy2(built, asked.out)} is ready: twine upload it")
    print("released files build, install and run")


if __name__ == "__main__":
    main()
