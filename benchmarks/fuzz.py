"""Random inputs to every door of the package.

    python benchmarks/reliability.py fuzz            # docs/results/reliability.json, the entry "fuzz"
    python benchmarks/reliability.py fuzz --smoke    # shows in a few seconds that everything works

`fuzz` runs the random inputs of `tests/fuzz/cases.py` and counts how each case ended: in a right result, in an error
that says what was expected and what came, or in a finding, which is anything else.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.store import stamp, write_whole
from common.tables import markdown
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

FUZZ = Path(__file__).parents[1] / "tests" / "fuzz"
NAMES = {  # target of tests/fuzz/cases.py → what a reader of the table knows it by
    "structures": "`learn_structure`",
    "graphs": "`rai`",
    "trees": "`GGT.from_dict`, `GGT.from_json`",
    "parts": "settings of parts",
    "heads": "heads",
    "scores": "scores",
    "metrics": "metrics, curves, temperature",
    "tables": "`Table` (CSV files)",
    "swaps": "`swap_head`",
    "checkpoints": "checkpoints",
    "estimators": "files of estimators",
    "caches": "structure caches",
    "run_folders": "folders of runs",
    "containers": "bytes of checkpoints, estimators, hub folders",
    "exports": "exported folders, `model.json`",
    "records": "records of tests, `record.json`",
    "feature_stores": "stored features",
}
# What comes as a file of somebody else; a target of these is tried so many times as often.
FILES = ("caches", "checkpoints", "containers", "estimators", "exports", "feature_stores", "records", "run_folders")
MORE = 5


def fuzz(cases: int, first: int) -> dict[str, dict[str, int]]:
    """Target → how many of about `cases` cases, more of files, were right, refused, or findings (printed)."""
    sys.path.insert(0, str(FUZZ))
    import cases as doors

    logging.disable(logging.INFO)  # what a fit tells, thousands of times

    def count(name: str, target: Any) -> dict[str, int]:
        counts = {"right": 0, "refused": 0, "findings": 0}

        @seed(first)
        @settings(
            max_examples=cases * MORE if name in FILES else cases,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(st.data())
        def run(data: Any) -> None:
            try:
                counts[doors.outcome(target, data.draw)] += 1
            except doors.Finding as finding:
                counts["findings"] += 1
                print(f"{target.__name__}: {finding}", file=sys.stderr)

        run()
        print(name, counts, file=sys.stderr, flush=True)
        return counts

    return {name: count(name, target) for name, target in doors.TARGETS.items()}


def shown(found: dict[str, dict[str, int]]) -> str:
    """The table."""
    rows = [
        [NAMES[name], sum(c.values()), c["right"], c["refused"], c["findings"]] for name, c in sorted(found.items())
    ]
    total = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    header = ["input to", "cases", "right results", "clear errors", "findings"]
    return markdown(header, [*rows, ["**all**", *total]])


def main(argv: Sequence[str], out: Path) -> None:
    """Run all targets, print the table and write it beside the other results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="of each target")
    parser.add_argument("--seed", type=int, default=0, help="another one tries other inputs")
    parser.add_argument("--smoke", action="store_true", help="a few cases of each, to see that everything works")
    args = parser.parse_args(argv)
    found = fuzz(5 if args.smoke else args.cases, args.seed)
    results = json.loads(out.read_text()) if out.is_file() else {}
    results["fuzz"] = {"seed": args.seed, "targets": found}
    results.setdefault("measured", {})["fuzz"] = stamp()
    write_whole(out, json.dumps(results, indent=1, sort_keys=True) + "\n")
    print(shown(found))
