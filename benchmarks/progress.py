"""One line for each thing done, and about how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping


class Progress:
    """Judges the time left by what was planned for each thing that is still to do, and how well plans have held."""

    def __init__(self, plan: Mapping[str, float], now: Callable[[], float] = time.monotonic) -> None:
        """`plan`: seconds for each thing by its name, as far as one can tell."""
        self._left, self._now = dict(plan), now
        self._planned_s = 0.0
        self._began = now()

    def done(self, name: str, said: str = "") -> None:
        """Say so on stderr; what is not in the plan is only said."""
        self._planned_s += self._left.pop(name, 0.0)
        print(f"{name}{f': {said}' if said else ''}{self._outlook()}", file=sys.stderr, flush=True)

    def left_s(self) -> float:
        """Seconds until all is done."""
        slower = (self._now() - self._began) / self._planned_s if self._planned_s else 1.0
        return slower * sum(self._left.values())

    def _outlook(self) -> str:
        if not self._left:
            return ""
        left_s = self.left_s()
        return f" ({left_s:.0f} s left)" if left_s < 90 else f" ({left_s / 60:.0f} min left)"
