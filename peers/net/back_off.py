"""Back-off after failures: wait before trying again, longer each time. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BackOff:
    """The wait is `first_s` at first, and doubles with each failure up to `longest_s`."""

    first_s: float
    longest_s: float
    until: float = -float("inf")
    _next_s: float = 0.0

    def is_over(self, now: float) -> bool:
        return now >= self.until

    def failed(self, now: float) -> None:
        if not self.is_over(now):
            # A second report of the same failure.
            return
        wait_s = self._next_s or self.first_s
        self.until, self._next_s = now + wait_s, min(2 * wait_s, self.longest_s)

    def succeeded(self) -> None:
        """It worked: forget the failures."""
        self.until, self._next_s = -float("inf"), 0.0
