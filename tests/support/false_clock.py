"""A peer whose clock is wrong, as far as others see it: in what it tells of itself."""

from __future__ import annotations

import time
from types import SimpleNamespace

from peers.daemon import daemon


def clock_off(seconds: float) -> None:
    """From now on, what this process announces is of another time."""
    names = {name: getattr(time, name) for name in ("monotonic", "time_ns")}
    daemon.time = SimpleNamespace(**names, time=lambda: time.time() + seconds)  # type: ignore[attr-defined]
