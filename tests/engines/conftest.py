"""Tests in an environment without torch: `make test-engines`. The model is a tiny graph that is written here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
os.environ["PYTHONPATH"] = f"{TESTS.parent}{os.pathsep}{TESTS}"  # workers of Ray and Spark import what the tests do
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is told to anybody


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """The folder of a model of twenty numbers."""
    from tiny_folder import write_tiny

    return write_tiny(tmp_path_factory.mktemp("plain") / "model", hidden=64)


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """10,007 rows in three Parquet files, and the numbers in them (N, 20)."""
    pa = pytest.importorskip("pyarrow")
    import numpy as np
    import pyarrow.parquet as pq
    from tiny_folder import numbers

    folder, x = tmp_path_factory.mktemp("rows") / "table", numbers(10_007)
    folder.mkdir()
    for i, chosen in enumerate(np.array_split(np.arange(len(x)), 3)):
        columns = {f"x{j}": x[chosen, j] for j in range(20)} | {"id": chosen}
        pq.write_table(pa.table(columns), folder / f"{i}.parquet", row_group_size=1000)
    return folder, x


@pytest.fixture
def brainet():
    """A function (*words) -> the process of that command."""
    started = []

    def begin(*words):
        command = [sys.executable, "-m", "brainet_pl.cli", *map(str, words)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def guide():
    """A function (word) -> the block of docs/howto/batches.md that begins with its import."""
    text = (TESTS.parent / "docs/howto/batches.md").read_text(encoding="utf-8")

    def find(word):
        (block,) = [code for code in re.findall(r"```py\n(.*?)```", text, re.S) if code.startswith(word)]
        return block

    return find
