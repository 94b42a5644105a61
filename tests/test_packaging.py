"""The layout promised to users: top-level folders, one namespace."""

from importlib import resources
from pathlib import Path

import pytest

import brainet_pl

ROOT = Path(__file__).parents[1]


def test_listed_packages_are_the_folders_on_disk():
    tomllib = pytest.importorskip("tomllib", reason="in the standard library since Python 3.11")
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    inside = {p.parent for p in (ROOT / "brainet_pl").rglob("__init__.py")}
    found = {".".join(p.relative_to(ROOT).parts) for p in inside}
    for name in ("callbacks", "datamodules", "configs"):
        assert (ROOT / name / "__init__.py").exists()
        assert (ROOT / "brainet_pl" / name).resolve() == (ROOT / name).resolve()
        found.add(f"brainet_pl.{name}")
    assert listed == found


def test_types_are_shipped():
    assert resources.files(brainet_pl).joinpath("py.typed").is_file()
