"""What is promised to users: top-level folders in one namespace, and dependencies that are declared."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import brainet_pl

ROOT = Path(__file__).parents[1]
DISTRIBUTION = {
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}  # where it is not called like what is imported
OPTIONAL = {"timm", "pandas", "onnx", "onnxscript", "onnxruntime"}  # for a kind of backbone, logger or file
SERVER = {"fastapi", "starlette", "uvicorn", "prometheus-client", "h11"}  # of `brainet serve`, in these files alone
SERVED = ["brainet_pl/serving/app.py", "brainet_pl/serving/server.py"]
OPTIONAL |= SERVER | {"safetensors", "networkx", "pgmpy", "huggingface-hub", "mlflow-skinny", "pyarrow", "pyspark"}
OPTIONAL |= {"tokenizers", "transformers"}
UNSEEN = {"jsonargparse"}  # needed by LightningCLI, which does not depend on it
ENGINES = ("benchmarks", "timm", "text", "ray", "spark", "mlflow", "parquet")  # extras of tests that skip without them
INSTEAD = {"lightning"}  # of pytorch-lightning, where the user has imported it; see brainet_pl._utils.framework


def imported(folders, everywhere=True):
    """Distributions that the folders import, in functions too or else on import only."""
    names = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree) if everywhere else tree.body:
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    names -= {"brainet_pl", *sys.stdlib_module_names}
    return {DISTRIBUTION.get(name, name.replace("_", "-")) for name in names}


def distributions(requirements):
    return {re.match(r"[\w.-]+", requirement).group().lower() for requirement in requirements}


def test_what_is_imported_is_declared_and_the_other_way_round():
    tomllib = pytest.importorskip("tomllib", reason="in the standard library since Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = distributions(project["dependencies"])
    package = ("brainet_pl", "callbacks", "datamodules")
    assert imported(package) - OPTIONAL - INSTEAD == declared - UNSEEN
    assert imported(package, everywhere=False) & OPTIONAL <= SERVER
    at_once = [
        path
        for path in (ROOT / "brainet_pl").rglob("*.py")
        if re.search(r"^(from|import) fastapi", path.read_text(), re.M)
    ]
    assert sorted(at_once) == [ROOT / path for path in SERVED]
    extras = [project["optional-dependencies"][name] for name in ENGINES]
    behind_a_skip = set().union(*map(distributions, extras)) | {"pandas", "mlflow"}  # of mlflow-skinny
    known = declared | distributions(project["optional-dependencies"]["dev"]) | behind_a_skip
    own = {path.stem.replace("_", "-") for path in (ROOT / "tests").rglob("*.py")}  # tests share files by their names
    own.add("common")  # of the benchmarks
    assert imported(["tests"]) - own <= known


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


def test_the_package_is_imported_piece_by_piece():
    heavy = "{'pytorch_lightning', 'lightning', 'torchvision', 'torchmetrics', 'matplotlib', 'sklearn', 'wandb'}"
    code = (
        "import sys, brainet_pl; assert 'torch' not in sys.modules; brainet_pl.rai; brainet_pl.BRAINetHead; "
        f"assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules); "
        "assert set(brainet_pl.__all__) == set(dir(brainet_pl)); [getattr(brainet_pl, n) for n in dir(brainet_pl)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (  # torchvision and matplotlib come with Lightning's torchmetrics
        "import sys, pytorch_lightning; known = set(sys.modules); "
        "import brainet_pl.lightning.module, brainet_pl.swap.model; "
        "found = {'sklearn', 'wandb', 'pandas', 'timm', 'transformers', 'onnx'} & (set(sys.modules) - known); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'BRAINnet'"):
        _ = brainet_pl.BRAINnet


def test_the_version_stands_in_one_place_and_the_others_agree():
    version = brainet_pl.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_versions_of_ci_are_of_all_dependencies_and_allowed():
    tomllib = pytest.importorskip("tomllib", reason="in the standard library since Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / ".github" / "constraints.txt").read_text().split()
    pinned = dict(line.split("==") for line in lines)
    for line in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        needed = Requirement(line)
        name = needed.name.lower().replace("_", "-")
        assert name in pinned, f"{name} is new: make lock"
        assert needed.specifier.contains(pinned[name], prereleases=True), (line, pinned[name])


def test_a_release_leads_to_its_repository():
    spec = importlib.util.spec_from_file_location("release", ROOT / "tests" / "release.py")
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    text = "![a](docs/a.png) [b](docs/b.md#c) [d](https://x.org) [![e](e.png)](f.md) [g](#h)"
    assert release.with_addresses(text, "https://x.org/o/n/", "1.0") == (
        "![a](https://x.org/o/n/raw/v1.0/docs/a.png) [b](https://x.org/o/n/blob/v1.0/docs/b.md#c) [d](https://x.org) "
        "[![e](https://x.org/o/n/raw/v1.0/e.png)](https://x.org/o/n/blob/v1.0/f.md) [g](#h)"
    )
    tomllib = pytest.importorskip("tomllib", reason="in the standard library since Python 3.11")
    settings = release.with_urls((ROOT / "pyproject.toml").read_text(), "https://x.org/o/n", "https://o.x.org")
    urls = tomllib.loads(settings)["project"]["urls"]
    assert urls["Repository"] == "https://x.org/o/n"
    assert urls["Documentation"] == "https://o.x.org"
    assert len(urls) == 5


@pytest.mark.slow
def test_the_wheel_holds_what_it_should_and_runs_alone(tmp_path):
    """Built from what .dockerignore lets through, so that an image can be; installed into an empty folder that comes
    first on the path; the dependencies are those of this environment.
    """
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    clone, sent = tmp_path / "clone", tmp_path / "sent"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    sent.mkdir()
    for name in re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M):
        (clone / name).rename(sent / name)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(sent)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"brainet_pl-{brainet_pl.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"brainet_pl", f"brainet_pl-{brainet_pl.__version__}.dist-info"}
    assert not [name for name in names if "test" in name.split("/")[1] and not name.endswith(("table.py", "test.py"))]
    for needed in ("py.typed", "configs/digits.yaml", "evaluation/report/page.html.j2", "callbacks/structure.py"):
        assert f"brainet_pl/{needed}" in names
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    work = tmp_path / "work"
    work.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import brainet_pl; from brainet_pl.cli import main; "
        f"assert brainet_pl.__file__.startswith({str(site)!r}), brainet_pl.__file__; "
        "main(['fit', '--config', 'digits', '--trainer.fast_dev_run', 'true'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=work, env=environment)
