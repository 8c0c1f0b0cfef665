"""Unix time by which pods end and deadlines pass."""

from __future__ import annotations

import time


class Clock:
    """The machine's clock, which may be set forward but not back: no pod lives longer because it was. It goes on while
    the machine sleeps.
    """

    def __init__(self) -> None:
        self._offset = time.time() - _since_boot()

    def __call__(self) -> float:
        return max(time.time(), self._offset + _since_boot())


def _since_boot() -> float:
    # Darwin's goes on in sleep under this name; the other one stops.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
