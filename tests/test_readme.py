"""Every code block of the README runs as it stands; tests/test_docs.py does the same for docs/."""

import re
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot as plt

import brainet_pl
from brainet_pl.cli import main

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("MPLBACKEND", "agg")


def test_the_version_on_top_is_that_of_the_package():
    assert f'"unknown".** {brainet_pl.__version__} · ' in (ROOT / "README.md").read_text(encoding="utf-8")


def test_there_is_something_to_run():
    assert len(PYTHON) == 2
    assert sum(line.startswith("brainet") for line in SHELL) == 1


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks(code):
    names = {"__name__": "readme"}
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), names)
    if "asked" in names:
        check_first_page(names)


def check_first_page(names):
    """What is said below the first block: sure of what is no digit before, and not after; and a picture is written."""
    model, honest, asked = names["model"], names["honest"], names["asked"]
    digits, left_out, photograph = asked.values()
    assert model(photograph).softmax(1).amax(1).mean() > 0.7
    assert honest.predict(photograph)["probabilities"].amax(1).mean() < 0.3
    assert honest.predict(digits)["probabilities"].amax(1).mean() > 0.95
    assert honest.predict(photograph)["known"].float().mean() < 0.05
    assert honest.predict(left_out)["known"].float().mean() < 0.3
    assert honest.predict(digits)["known"].float().mean() > 0.88
    assert Path("answers.png").stat().st_size > 10_000
    plt.close("all")


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


def test_pictures_and_links_exist():
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"\]\(([^)#\s]+)(?:#([\w-]+))?\)", text)
    assert any(anchor for _, anchor in found)
    for target, anchor in found:
        assert (ROOT / target).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings], anchor
