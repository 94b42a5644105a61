"""Names of classes and of their settings, read from source files: nothing is imported, so torch is not waited for.

What can't be told from the text alone, such as a class of another package or one that takes `**kwargs`, is None: the
parser of settings says it later.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
TRAINER = {"pytorch_lightning": "trainer/trainer.py", "lightning": "pytorch/trainer/trainer.py"}


@cache
def classes(folder: str) -> dict[str, ast.ClassDef]:
    """The classes at the top of the files of a folder of this package, by name."""
    return {name: made for path in sorted((PACKAGE / folder).glob("*.py")) for name, made in _classes_in(path).items()}


@cache
def _classes_in(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def parts(folder: str, base: str) -> list[str]:
    """The classes that a user can name: derived from `base`, public and not abstract.

    >>> parts("calibration", "Calibrator")[:2]
    ['DensityScaling', 'DirichletScaling']
    """
    known = classes(folder)

    def derives(name: str) -> bool:
        return name == base or (name in known and any(derives(one) for one in _bases(known[name])))

    return sorted(n for n in known if n in _public(folder) and n != base and derives(n) and not _abstract(known, n))


def _public(folder: str) -> list[str]:
    """The names in `__all__` of a folder."""
    tree = ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
    listed = (node.value for node in tree.body if isinstance(node, ast.Assign) and _assigned(node) == ["__all__"])
    return [str(name) for value in listed for name in ast.literal_eval(value)]


def settings(folder: str, name: str) -> list[str] | None:
    """The arguments of a class of this package; None where its text does not tell.

    >>> settings("network", "MCDropout")
    ['rate', 'num_params', 'hidden', 'norm']
    """
    known = classes(folder)
    if name not in known:
        return None
    made = _method(known[name], "__init__")
    if made is not None:
        return _arguments(made)
    inherited = [found for one in _bases(known[name]) if (found := settings(folder, one)) is not None]
    return inherited[0] if inherited else None


def trainer_settings() -> list[str] | None:
    """The arguments of Lightning's Trainer; None where its file is not where it is known to be."""
    for package, place in TRAINER.items():
        spec = importlib.util.find_spec(package)  # finds the folder of a package, and does not run it
        path = Path((spec.submodule_search_locations or [""])[0] if spec else "") / place
        made = _classes_in(path).get("Trainer") if path.is_file() else None
        init = made and _method(made, "__init__")
        if init:
            return _arguments(init)
    return None


def can_be_found(module: str) -> bool:
    """Whether there is a package or module of the first of these names, in the working folder or installed."""
    top = module.partition(".")[0]
    here = Path.cwd() / top
    if top in sys.modules or here.is_dir() or here.with_name(f"{top}.py").is_file():
        return True
    return importlib.util.find_spec(top) is not None


def _bases(made: ast.ClassDef) -> list[str]:
    return [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in made.bases]


def _method(made: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _arguments(made: ast.FunctionDef) -> list[str] | None:
    if made.args.kwarg is not None:
        return None
    return [one.arg for one in (*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs) if one.arg != "self"]


def _abstract(known: dict[str, ast.ClassDef], name: str) -> bool:
    """Whether an abstract method of the class or of its bases has no body in it."""
    line, todo = [], [name]
    while todo:
        one = todo.pop(0)
        if one in known and one not in line:
            line.append(one)
            todo += _bases(known[one])
    methods = {}
    for one in line:  # the class first
        for node in known[one].body:
            names = [node.name] if isinstance(node, ast.FunctionDef) else _assigned(node)
            methods.update({n: node for n in names if n not in methods})
    return any(isinstance(node, ast.FunctionDef) and _is_abstract(node) for node in methods.values())


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _is_abstract(node: ast.FunctionDef) -> bool:
    return any(getattr(one, "id", getattr(one, "attr", "")) == "abstractmethod" for one in node.decorator_list)
