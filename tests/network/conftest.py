"""Tests of heads find `naive`, the tree that is written straight from the paper."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
