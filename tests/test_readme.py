"""Every code block of the README and of the guides in docs/ runs as it stands."""

import importlib
import re
from pathlib import Path

import pytest

from brainet_pl.cli import main

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
PYTHON = [code for language, code in BLOCKS if language == "python"]
GUIDES = {
    f"{path.stem}-{i}": code
    for path in sorted((ROOT / "docs").glob("*.md"))
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
}
SHELL = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")


def test_there_is_something_to_run():
    assert len(PYTHON) == 4
    assert sum(line.startswith("brainet") for line in SHELL) == 5


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks(code):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("name", GUIDES)
def test_python_blocks_of_guides(name):
    exec(compile(GUIDES[name], f"docs/{name}", "exec"), {"__name__": "guide"})


def test_the_tabular_example_takes_twenty_lines():
    lines = [line for line in GUIDES["tabular-0"].splitlines() if line.strip()]
    assert len(lines) <= 20


def test_shell_lines():
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    for line in SHELL:
        words = line.split("#")[0].split()
        if words[0] == "make":
            assert words[1] in targets
        else:
            assert words[0] == "brainet"
            main(
                words[1:] if words[1] in ("report", "compare") else [*words[1:], "--trainer.enable_progress_bar=false"]
            )


def test_shell_lines_of_the_guide_of_runs():
    text = (ROOT / "docs" / "runs.md").read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    assert len(lines) == 5
    for line in lines:
        words = line.split()[1:]
        main(words if words[0] in ("report", "compare") else [*words, "--trainer.enable_progress_bar=false"])
    assert (ROOT / "docs").is_dir()
    assert Path("runs/digits/version_0/report.html").is_file()
    assert "Linear" in Path("comparison.md").read_text()


def test_pictures_and_links_exist():
    text = (ROOT / "README.md").read_text()
    for guide in (ROOT / "docs").glob("*.md"):
        text += guide.read_text().replace("](", "](docs/")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target


def test_every_guide_is_in_the_navigation_of_the_site():
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages | {f"notebooks/{path.stem}.md" for path in (ROOT / "examples/notebooks").glob("*.ipynb")}


def test_names_of_the_reference_exist():
    names = re.findall(r"^::: ([\w.]+)$", "".join(p.read_text() for p in (ROOT / "docs/api").glob("*.md")), re.M)
    assert len(names) > 30
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, attribute), name
