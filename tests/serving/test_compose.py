"""The example with docker-compose, in parts: its files are read, and its commands run here without docker."""

import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

pytest.importorskip("fastapi")
ROOT = Path(__file__).parents[2]
HERE = ROOT / "examples" / "serving"
# What the image has not: everything that only training needs.
WITHOUT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ImportError(f"{{name}} is not here")

sys.meta_path.insert(0, Refuse())
sys.argv = {words}
from brainet_pl.cli import console
console()
"""


def dockerfile():
    """Instruction → its words, of the last one of each kind; all that pip installs under RUN."""
    text = re.sub(r"\\\n", " ", (HERE / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: words for name, words in lines if name != "RUN"} | {
        "RUN": " ".join(words for name, words in lines if name == "RUN")
    }


def installed():
    """Packages that the image gets beside ours."""
    words = shlex.split(dockerfile()["RUN"].replace("&&", "\n"))
    return {re.split("[<>=]", word)[0] for word in words if not word.startswith("-")} & {
        "numpy", "pillow", "onnxruntime", "fastapi", "uvicorn", "prometheus-client"
    }  # fmt: skip


def test_the_image_has_what_the_extra_serve_asks_for():
    tomllib = pytest.importorskip("tomllib", reason="in the standard library since Python 3.11")
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    asked = {re.split("[<>=]", one)[0] for one in extra}
    assert asked | {"numpy", "pillow"} == installed()
    assert {one for one in extra if ">" in one} <= set(shlex.split(dockerfile()["RUN"]))


def test_the_command_of_the_service_runs_without_what_trains(served, tmp_path):
    """The words of the compose file, with another folder, address and port; then its health check and its rules."""
    service = yaml.safe_load((HERE / "docker-compose.yml").read_text())["services"]["model"]
    begin = yaml.safe_load(dockerfile()["ENTRYPOINT"])
    assert yaml.safe_load(dockerfile()["CMD"])[:5] == service["command"][:5]
    change = {"/model": str(served.folder), "0.0.0.0": "127.0.0.1", "8000": "0"}
    words = [change.get(word, word) for word in [*begin, *service["command"]]]
    absent = ["torch", "torchvision", "sklearn", "scipy", "pytorch_lightning", "lightning", "matplotlib"]
    absent += ["pandas", "wandb", "jsonargparse", "tqdm", "onnx", "onnxscript", "torchmetrics", "yaml"]
    code = WITHOUT.format(absent=absent, words=words)
    server = subprocess.Popen(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        said = server.stderr.readline()
        assert "serving on http://127.0.0.1:" in said, said + server.stderr.read()[-2000:]
        address = said.split()[-1]
        check = [word.replace("http://127.0.0.1:8000", address) for word in service["healthcheck"]["test"]]
        assert check[:2] == ["CMD", "python"]
        subprocess.run([sys.executable, *check[2:]], check=True, timeout=30)
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0
    kinds = set(re.findall(r"^# TYPE (brainet_\w+)", metrics, re.M))
    rules = yaml.safe_load((HERE / "rules.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        for name in re.findall(r"brainet_\w+", rule["expr"]):
            assert name.removesuffix("_bucket") in kinds, name


def test_prometheus_asks_the_service():
    services = yaml.safe_load((HERE / "docker-compose.yml").read_text())["services"]
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services
    assert port == dockerfile()["EXPOSE"] == services[host]["command"][4]
    mounted = [volume.split(":")[0] for volume in services["prometheus"]["volumes"]]
    assert all((HERE / path).is_file() for path in mounted)
    assert config["rule_files"] == ["rules.yml"]
