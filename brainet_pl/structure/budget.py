"""How much a search may still do, in tests and in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Counts the tests of a run and says when it has had enough of them, or of time."""

    max_tests: int | None = None
    max_seconds: float | None = None
    on_tests: Callable[[int], object] = lambda count: None
    tests: int = 0
    start: float = field(default_factory=time.monotonic)

    def count(self, tests: int) -> None:
        """Adds so many tests to those made, and tells whoever listens."""
        self.tests += tests
        self.on_tests(tests)

    @property
    def spent(self) -> bool:
        """No further test should be started."""
        if self.max_tests is not None and self.tests >= self.max_tests:
            return True
        return self.max_seconds is not None and time.monotonic() - self.start >= self.max_seconds
