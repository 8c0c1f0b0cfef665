"""How fast a peer trains, by what its worker tells now and then."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.5
"""Of the newest measurement."""


@dataclass
class Pace:
    """Of one peer. Times in seconds of any one clock."""

    local_step: int = 0
    step_s: float = 0.0
    """0: not known."""
    _at: float = 0.0

    def entered(self, local_step: int, now: float) -> None:
        """An epoch goes on from here, after a pause."""
        self.local_step, self._at = local_step, now

    def reached(self, local_step: int, now: float) -> None:
        if local_step > self.local_step:
            measured = (now - self._at) / (local_step - self.local_step)
            self.step_s += (_WEIGHT if self.step_s else 1.0) * (measured - self.step_s)
        self.local_step, self._at = local_step, now

    def local_step_at(self, now: float, steps_per_epoch: int) -> int:
        """Where it is by now, if it has gone on; it has not said so if that is an epoch's end."""
        if not self.step_s or not steps_per_epoch:
            return self.local_step
        by_now = self.local_step + int((now - self._at) / self.step_s)
        return max(self.local_step, min(by_now, steps_per_epoch - 1))
