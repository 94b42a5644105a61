"""Every block of code on every page of docs/ runs as it stands; what can't is named here, with the reason."""

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from brainet_pl.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
KINDS = {"python", "py", "bash", "yaml"}
PYTHON = {
    f"{page}-{i}": code
    for page, text in PAGES.items()
    for i, code in enumerate(code for kind, code in BLOCK.findall(text) if kind == "python")
}
NEEDS = {
    "tutorials/text.md-0": "transformers",
    "howto/batches.md-0": "onnxruntime",
    "howto/export.md-0": "onnxruntime",
    "howto/production.md-0": "fastapi",
}  # of an extra
SHELL = {
    page: [line for kind, code in BLOCK.findall(text) if kind == "bash" for line in code.splitlines()]
    for page, text in PAGES.items()
}
SHELL = {page: lines for page, lines in SHELL.items() if lines}
WITHOUT_TRAINER = ("report", "compare", "export", "cache", "monitor", "serve", "labels", "rank")
# Not run here:
#   `pip install` and `make`: they change the environment; that the target exists is checked.
#   `py`, with `import lightning`, which needs a process of its own: tests/test_framework.py runs it; or with an engine,
#   which needs an environment of its own: tests/engines.
#   indented lines with a word in capitals, which stands for a file of the reader's: their options are checked.
INDENTED = {
    page: re.findall(r"^    (brainet .*?)(?: {2,}#.*)?$", BLOCK.sub("", text), re.M) for page, text in PAGES.items()
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")


def test_there_is_something_to_run_and_every_block_says_what_it_is():
    assert len(PYTHON) >= 24
    assert sum(map(len, SHELL.values())) >= 12
    for page, text in PAGES.items():
        assert {kind for kind, _ in BLOCK.findall(text)} <= KINDS, page
        assert text.count("```") == 2 * len(BLOCK.findall(text)), page
    assert [page for page, text in PAGES.items() if "```py\n" in text] == ["howto/batches.md", "howto/lightning.md"]


def some_slow(names, slow):
    """Parameters of a test, of which `slow` take more than a few seconds and show nothing that no other test shows."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


LONG = {
    "gallery/drift.md-0",
    "gallery/region.md-0",
    "howto/export.md-0",
    "howto/production.md-0",
    "howto/wandb.md-0",
    "tutorials/pretrained.md-0",
}


@pytest.mark.parametrize("name", some_slow(PYTHON, LONG))
def test_python_blocks(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    exec(compile(PYTHON[name], f"docs/{name}", "exec"), {"__name__": "guide"})


def test_the_tabular_example_takes_twenty_lines():
    assert len([line for line in PYTHON["tutorials/tabular.md-0"].splitlines() if line.strip()]) <= 20


def run(line):
    """One line of a shell, as far as it may be run here."""
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif words[0] != "pip":
        assert words[0] == "brainet", line
        main(words[1:] if words[1] in WITHOUT_TRAINER else [*words[1:], "--trainer.enable_progress_bar=false"])


@pytest.mark.parametrize(
    "page",
    some_slow(
        [page for page in SHELL if page != "howto/machines.md"], {"howto/export.md", "index.md", "howto/production.md"}
    ),
)
def test_shell_lines(page):
    if page == "tutorials/tabular.md":  # its table is written by the lines of Python above
        written, _ = PYTHON[f"{page}-0"].split("data = Table(")
        exec(compile(written, f"docs/{page}", "exec"), {})
        Path("new.csv").write_text("".join(Path("diabetes.csv").read_text().splitlines(keepends=True)[:9]))
    for line in SHELL[page]:
        run(line)
    if page == "tutorials/runs.md":
        assert Path("runs/digits/version_0/report.html").is_file()
    if page == "howto/compare.md":
        assert "Linear" in Path("comparison.md").read_text()
    if page == "tutorials/tabular.md":
        (predictions,) = Path("runs/table").rglob("predictions.csv")
        assert len(predictions.read_text().splitlines()) == 9


@pytest.mark.slow
def test_shell_lines_of_several_processes():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (line,) = SHELL["howto/machines.md"]
    words = [sys.executable, "-m", "brainet_pl.cli", *shlex.split(line)[1:]]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Path("runs/digits/version_0/checkpoints/last.ckpt").is_file()


def test_settings_in_yaml(capsys):
    blocks = [code for text in PAGES.values() for kind, code in BLOCK.findall(text) if kind == "yaml"]
    assert blocks
    for code in blocks:
        Path("given.yaml").write_text(code)
        with pytest.raises(SystemExit) as left:
            main(["fit", "--config", "digits", "--config", "given.yaml", "--print_config"])
        assert left.value.code == 0
        assert yaml.safe_load(capsys.readouterr().out)["model"]


def test_indented_commands_have_options_that_exist(capsys):
    found = [line for lines in INDENTED.values() for line in lines]
    assert len(found) >= 5
    assert sum(line.count("brainet ") for line in found) == len(found)
    texts = {}
    for line in found:
        words = shlex.split(line)[1:]
        if words[0] not in ("fit", "test", "predict"):
            continue  # `brainet cache` and `brainet export` have tests of their own
        shards = ["--format", "parquet"] if "parquet" in words else []  # another parser than Lightning's
        command = (words[0], *shards)
        if command not in texts:
            with pytest.raises(SystemExit):
                main([*command, "--help", "all"])
            texts[command] = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            top = ".".join(option.split(".")[:2]) if option.startswith("--model") else option.split(".")[0]
            assert top in texts[command], (line, option)


def test_benchmarks_that_are_named_exist_with_their_options():
    named = {line for text in PAGES.values() for line in re.findall(r"`python (benchmarks/[^`]+)`", text)}
    assert len(named) >= 15
    every = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))  # they share their options
    for line in named:
        file, *words = line.split()
        text = (ROOT / file).read_text()
        for word in words:
            if word.startswith("--"):
                assert f'"{word}"' in every, line
            elif word.isalpha() and word.islower():
                assert f'"{word}"' in text, line


def test_pictures_and_links_exist():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", BLOCK.sub("", text)):
            if target.endswith("changelog.md"):
                assert (ROOT / "CHANGELOG.md").exists()
            elif target.startswith("https://"):
                continue
            else:
                assert (DOCS / page).parent.joinpath(target).exists(), (page, target)


def test_every_page_is_in_the_navigation_of_the_site():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "examples/notebooks").glob("*.ipynb")}
    assert sorted(listed) == sorted({*PAGES, *notebooks, "reference/changelog.md"})  # made by docs/_hooks.py


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_number_stays_with_its_percent_sign(hooks):
    text = "5 % of `5 %`\n```python\nx = 5 % 2\n```\n7 %"
    assert hooks.together(text) == "5\u00a0% of `5 %`\n```python\nx = 5 % 2\n```\n7\u00a0%"


def test_links_to_notebooks_lead_to_their_pages_on_the_site(hooks):
    """And to the notebooks themselves in the repository (`test_pictures_and_links_exist`)."""
    links = "[a](../examples/notebooks/table.ipynb) [b](../../examples/notebooks/table.ipynb)"
    assert hooks.on_page_markdown(links) == "[a](notebooks/table.md) [b](../notebooks/table.md)"
    assert not any(re.search(r"\]\([./]*notebooks/", text) for text in PAGES.values())


def test_numbers_in_tables_of_the_site_stand_below_each_other(hooks):
    rows = "| `x` | **0.1** | -1.2 ± 0.3 | 5 |\n| 2 | – | +2 | 5 / 6 |\n"
    table = f"Text | not a table.\n\n| a | b | c | d |\n|---|---|---|---|\n{rows}"
    said = hooks.align_numbers(table + "\nMore.\n")
    assert "\n|---|---:|---:|---|\n" in said
    assert "-1.2\u00a0±\u00a00.3" in said
    assert said.replace("---:", "---").replace("\u00a0", " ") == table + "\nMore.\n"
    assert hooks.align_numbers(PAGES["benchmarks/defaults.md"]).count("---:") > 20


def test_names_of_the_reference_exist():
    text = "".join(text for page, text in PAGES.items() if "reference/" in page)
    names = re.findall(r"^::: ([\w.]+)$", text, re.M)
    assert len(names) > 30
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, attribute), name
    chosen = re.findall(r"^::: ([\w.]+)\n    options: \{.*?members: \[(\w[^\]]*)\]", text, re.M)
    assert len(chosen) >= 10
    for name, members in chosen:  # one that is gone would be left out of the page in silence
        module, _, attribute = name.rpartition(".")
        for member in members.split(", "):
            assert hasattr(getattr(importlib.import_module(module), attribute), member), (name, member)
    listed = {name.rpartition(".")[2] for name in names}
    for package in ("", ".callbacks", ".datamodules", ".scores", ".calibration", ".network", ".tasks", ".structure"):
        public = set(importlib.import_module(f"brainet_pl{package}").__all__) - {"__version__"}
        assert public <= listed, package


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mkdocstrings"), reason="needs the extra docs")
def test_the_site_is_built_and_asks_nothing_of_a_network(tmp_path):
    """Strictly: a link, an anchor or a name that leads nowhere ends the build; `--quiet` would end only errors."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:src="|<link[^>]* href=")https?://[^"]*', text), page
        for script in re.findall(r'<script src="([^"]+)"', text):
            assert page.name == "404.html" or (page.parent / script).is_file(), (page, script)
        assert "<p>from sklearn" not in text  # examples of docstrings are code, not quotations


def test_words_that_the_library_prints_are_in_the_glossary():
    words = {
        line.split("|")[1].strip() for line in PAGES["reference/glossary.md"].splitlines() if line.startswith("| ")
    }
    assert {"joint", "stage", "modularity", "combined", "surprise", "verdict"} <= words
