"""Print the least versions that pyproject.toml allows, as constraints for pip: `make test-min` installs exactly them."""

import re
from pathlib import Path

text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
(listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, flags=re.DOTALL | re.MULTILINE)
for name, version in re.findall(r'^    "([\w-]+)(?:\[\w+\])?>=([\d.]+)"', listed, flags=re.MULTILINE):
    print(f"{name}=={version}")
