"""How fast a peer trains, by what its worker tells now and then."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

_KEPT = 5
"""Measurements, of which the middle one counts: one pause, or a machine that slept, says nothing about the rest."""


@dataclass
class Pace:
    """Of one peer. Times in seconds of any one clock."""

    local_step: int = 0
    _at: float = 0.0
    _measured: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def step_s(self) -> float:
        """0: not known."""
        return statistics.median_low(self._measured) if self._measured else 0.0

    def entered(self, local_step: int, now: float) -> None:
        """An epoch goes on from here, after a pause."""
        self.local_step, self._at = local_step, now

    def reached(self, local_step: int, now: float) -> None:
        if local_step > self.local_step:
            self._measured.append((now - self._at) / (local_step - self.local_step))
        self.local_step, self._at = local_step, now

    def local_step_at(self, now: float, steps_per_epoch: int) -> int:
        """Where it is by now, if it has gone on; it has not said so if that is an epoch's end."""
        if not self.step_s or not steps_per_epoch:
            return self.local_step
        by_now = self.local_step + int((now - self._at) / self.step_s)
        return max(self.local_step, min(by_now, steps_per_epoch - 1))
