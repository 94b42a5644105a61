"""What broken machines and strange inputs do to the package.

    python benchmarks/reliability.py fuzz    # random inputs to every door
    python benchmarks/reliability.py kills   # kill -9 at chosen and random moments, then the same command again
    python benchmarks/reliability.py doors   # signals, full disks and read-only folders at every door that writes

Each command prints what it found and updates its section of docs/results/reliability.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

import doors
import fuzz
import kills

OUT = Path(__file__).parents[1] / "docs" / "results" / "reliability.json"
COMMANDS = {"doors": doors.main, "fuzz": fuzz.main, "kills": kills.main}


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in COMMANDS:
        sys.exit(f"expected one of {', '.join(COMMANDS)}, got {' '.join(sys.argv[1:]) or 'nothing'}\n\n{__doc__}")
    COMMANDS[sys.argv[1]](sys.argv[2:], OUT)
