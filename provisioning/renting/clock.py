"""The clock for rental ends and deadlines."""

from __future__ import annotations

import time


class Clock:
    """Unix time. It does not go back if the machine's clock is set back, so that no pod is rented for longer.

    It goes on while the machine sleeps.
    """

    def __init__(self) -> None:
        self._offset = time.time() - _since_boot()

    def __call__(self) -> float:
        return max(time.time(), self._offset + _since_boot())


def _since_boot() -> float:
    # On Linux, CLOCK_MONOTONIC stops while the machine sleeps. macOS has no CLOCK_BOOTTIME, and needs none.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
