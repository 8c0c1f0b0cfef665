"""Estimates how fast a peer trains, from what its worker reports from time to time."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

_KEPT = 5
"""How many measurements the median is taken of, so that a single pause does not change it."""


@dataclass
class Pace:
    """The pace of one peer. Times are in seconds of any one clock."""

    local_step: int = 0
    _at: float = 0.0
    _measured: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def step_s(self) -> float:
        """Seconds per step; 0 while that is not known."""
        return statistics.median_low(self._measured) if self._measured else 0.0

    def entered(self, local_step: int, now: float) -> None:
        """The worker trains from here, after a pause that does not count."""
        self.local_step, self._at = local_step, now

    def reached(self, local_step: int, now: float) -> None:
        if local_step > self.local_step:
            self._measured.append((now - self._at) / (local_step - self.local_step))
        self.local_step, self._at = local_step, now

    def local_step_at(self, now: float, steps_per_epoch: int) -> int:
        """The step that the worker has reached if it has kept its pace. It would have reported an epoch's end."""
        if not self.step_s or not steps_per_epoch:
            return self.local_step
        by_now = self.local_step + int((now - self._at) / self.step_s)
        return max(self.local_step, min(by_now, steps_per_epoch - 1))
