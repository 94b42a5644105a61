"""Every code block of the README runs as it stands; tests/test_docs.py does the same for docs/."""

import re
from pathlib import Path

import pytest
import torch

from brainet_pl.cli import main

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")


def test_there_is_something_to_run():
    assert len(PYTHON) == 2
    assert sum(line.startswith("brainet") for line in SHELL) == 1


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks(code):
    names = {"__name__": "readme"}
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), names)
    if "photograph" in names:
        check_first_sentence(names)


def check_first_sentence(names):
    """The network is sure of what is no digit; the swapped one is not, and is as sure of digits as before."""
    model, honest = names["model"], names["honest"]
    known, unknown = names["x"][1400:], names["photograph"]
    assert model(unknown).softmax(1).amax(1).mean() > 0.7
    digits, pieces = honest.predict(known), honest.predict(unknown)
    assert pieces["probabilities"].amax(1).mean() < 0.3
    assert digits["probabilities"].amax(1).mean() > 0.95
    assert pieces["known"].float().mean() < 0.05
    assert digits["known"].float().mean() > 0.9


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
