"""How far a peer's worker is, between its reports."""

from __future__ import annotations

from dataclasses import dataclass

from peers.core.epoch_time import nominal_step_s


@dataclass
class Pace:
    """The pace of one peer. Times are in seconds of any one clock."""

    local_step: int = 0
    """Nominal (core/schedule.py), when the worker last said so."""
    step_s: float = 0.0
    """Seconds per step; 0 while that is not known."""
    _epoch_s: float = 0.0
    """How long the epoch may last; 0: as long as its steps take."""
    _at: float = 0.0

    def entered(self, local_step: int, epoch_s: float, now: float) -> None:
        """The worker trains in a new epoch from here."""
        self.local_step, self._epoch_s, self._at = local_step, epoch_s, now

    def reached(self, local_step: int, step_s: float, now: float) -> None:
        self.local_step, self.step_s, self._at = local_step, step_s, now

    def local_step_at(self, now: float, steps_per_epoch: int) -> int:
        """The step that the worker has reached if it has kept its pace. It would have reported an epoch's end."""
        if not self.step_s or not steps_per_epoch:
            return self.local_step
        step_s = nominal_step_s(self.step_s, steps_per_epoch, self._epoch_s)
        by_now = self.local_step + int((now - self._at) / step_s)
        return max(self.local_step, min(by_now, steps_per_epoch - 1))
