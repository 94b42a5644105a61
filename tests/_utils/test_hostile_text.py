"""Names from files of others in tables: they stay names in a spreadsheet, in Markdown and in LaTeX."""

import csv
import io
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from brainet_pl._utils.csv import write_rows
from brainet_pl.evaluation.compare.tables import latex_text, markdown_text

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "marked"),
    [
        ("=1+1", "'=1+1"),
        ("dog;=cmd|' /C calc'!A0", "dog;'=cmd|' /C calc'!A0"),
        ('dog; "=1+1', "dog; \"'=1+1"),
        ("dog\t@SUM(1)", "dog\t'@SUM(1)"),
        ("dog; cat", "dog; cat"),
        ("a-b", "a-b"),
    ],
)
def test_what_a_spreadsheet_would_compute_is_marked(name, marked):
    file = io.StringIO()
    write_rows(file, [[name, -1.5]])
    ((cell, number),) = csv.reader(io.StringIO(file.getvalue()))
    assert (cell, number) == (marked, "-1.5")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a|b", "a\\|b"),
        ("[x](javascript:alert(1))", "\\[x\\](javascript:alert(1))"),
        ("<script>", "&lt;script&gt;"),
        ("a\n\n# b", "a  # b"),
        ("*b* _i_ `c` num_params", "\\*b\\* \\_i\\_ \\`c\\` num_params"),
        ("a\\|b", "a\\\\\\|b"),
    ],
)
def test_markdown(name, shown):
    assert markdown_text(name) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (r"\input{/etc/passwd}", r"\textbackslash{}input\{/etc/passwd\}"),
        ("50 % & $x$ #1 a_b", r"50 \% \& \$x\$ \#1 a\_b"),
        ("~^", r"\textasciitilde{}\textasciicircum{}"),
        ("a\n\nb", "a  b"),
        ("1 ± 2", r"1 $\pm$ 2"),
    ],
)
def test_latex(name, shown):
    assert latex_text(name) == shown


FULL = """
    import resource, signal, sys, io
    import torch
    from pathlib import Path
    from brainet_pl._utils.atomic import atomic_write
    from brainet_pl.callbacks.checkpoints import WholeCheckpointIO
    from brainet_pl.cli import export
    program = torch.export.export(torch.nn.Linear(64, 64), (torch.zeros(2, 64),))
    export.load = export.find_ckpt_path = lambda *_, **__: None
    export.export_program = lambda *_, **__: (program, None, ["y"])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    folder = Path(sys.argv[1])

    def text(path):
        with atomic_write(path) as temporary:
            temporary.write_text("x" * 5000)

    def tensors(path):
        WholeCheckpointIO().save_checkpoint({"x": torch.zeros(5000)}, path)

    def exported(path):
        export.main(["--ckpt_path", "x", "--out", str(path)])

    for name, write in {"text.json": text, "model.ckpt": tensors, "model.pt2": exported}.items():
        try:
            write(folder / name)
        except OSError as error:
            print(name, error.filename == str(folder / name), error.strerror)
    print(sorted(path.name for path in folder.iterdir()))
"""


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path)], capture_output=True, text=True, cwd=ROOT,
        timeout=120, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    names = ("text.json", "model.ckpt", "model.pt2")
    assert done.stdout.splitlines() == [f"{name} True File too large" for name in names] + ["[]"]
