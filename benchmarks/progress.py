"""Prints a line for each completed part of a benchmark, with the estimated time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping


class Progress:
    """Estimates the time left from planned durations, corrected by how the completed parts compare with their plan."""

    def __init__(self, plan: Mapping[str, float], now: Callable[[], float] = time.monotonic) -> None:
        """`plan`: estimated seconds of each part, by name."""
        self._left, self._now = dict(plan), now
        self._planned_s = 0.0
        self._began = now()

    def done(self, name: str, said: str = "") -> None:
        """Print that a part is done to stderr. Parts that are not in the plan do not affect the estimate."""
        self._planned_s += self._left.pop(name, 0.0)
        print(f"{name}{f': {said}' if said else ''}{self._outlook()}", file=sys.stderr, flush=True)

    def left_s(self) -> float:
        """Estimated seconds until all parts are done."""
        slower = (self._now() - self._began) / self._planned_s if self._planned_s else 1.0
        return slower * sum(self._left.values())

    def _outlook(self) -> str:
        if not self._left:
            return ""
        left_s = self.left_s()
        return f" ({left_s:.0f} s left)" if left_s < 90 else f" ({left_s / 60:.0f} min left)"
