"""Simulated time: events in order of their times; events of the same time in the order in which they were scheduled."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Event = Callable[[], object]


class Timer:
    """One scheduled event."""

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        self.event: Event | None = event

    def cancel(self) -> None:
        """Cancel the event. May be repeated, and has no effect after the event."""
        self.event = None


class Clock:
    """`now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def after(self, seconds: float, event: Event) -> Timer:
        return self.at(self.now + max(0.0, seconds), event)

    def at(self, when: float, event: Event) -> Timer:
        """`when` in the past means now."""
        timer = Timer(event)
        heapq.heappush(self._events, (max(when, self.now), next(self._order), timer))
        return timer

    def run(self, is_over: Callable[[], bool], *, until: float) -> bool:
        """Run events until `is_over`, and return True; False if no event is left before `until`."""
        while not is_over():
            if not self._events or self._events[0][0] > until:
                return False
            self.now, _, timer = heapq.heappop(self._events)
            if timer.event is not None:
                event, timer.event = timer.event, None
                event()
        return True

    def advance(self, until: float) -> None:
        """Run all events up to this time, and move the clock to it."""
        self.run(lambda: False, until=until)
        self.now = max(self.now, until)
