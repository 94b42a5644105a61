"""Print the versions of all that `pip install .[dev]` brought here, as constraints for pip; `make lock` stores them.

One job of CI installs just them, so that a red run there is ours, while the others take the newest of everything.
Libraries of the graphics processor are left out: torch names theirs exactly.
"""

from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import tomllib
from packaging.requirements import Requirement

GPU = ("nvidia-", "cuda-", "triton")


def closure(lines: list[str]) -> set[tuple[str, str]]:
    """Name and version of everything that requirements need here, one of another included."""
    found: dict[str, str] = {}
    waiting, seen = [(line, "") for line in lines], set()
    while waiting:
        line, extra = waiting.pop()
        needed = Requirement(line)
        if (line, extra) in seen or (needed.marker and not needed.marker.evaluate({"extra": extra})):
            continue
        seen.add((line, extra))
        try:
            found[needed.name.lower().replace("_", "-")] = version(needed.name).partition("+")[0]
        except PackageNotFoundError as error:
            raise SystemExit(f"expected {needed} to be installed here: pip install '.[dev]'") from error
        waiting += [(below, one) for below in requires(needed.name) or () for one in ("", *needed.extras)]
    return set(found.items())


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed_here = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for package, number in sorted(closure(needed_here)):
        if not package.startswith(GPU):
            print(f"{package}=={number}")
