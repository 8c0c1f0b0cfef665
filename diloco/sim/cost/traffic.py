"""Bytes under way: activities that share links and processors, each until it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diloco.sim.clock import Clock, Timer
from diloco.sim.cost.links import Resource, fair_rates

_NOTHING_LEFT = 1e-9
"""Of an activity's size."""


@dataclass(eq=False)
class Activity:
    """`usage`: units of each resource per unit of the activity; `size`: how many units there are to do."""

    usage: Mapping[Resource, float]
    size: float
    on_done: Callable[[], object]
    most: float = float("inf")
    """Units per second that it does at most, however free the links are."""
    left: float = field(init=False)
    rate: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.left = self.size
        self.usage = {name: units for name, units in self.usage.items() if units > 0}


class Traffic:
    """All activities of a swarm. `capacity` is in units per second."""

    def __init__(self, clock: Clock, capacity: Mapping[Resource, float]) -> None:
        self._clock, self._capacity = clock, capacity
        self._active: list[Activity] = []
        self._counted_at = 0.0
        self._timer: Timer | None = None

    def start(self, activity: Activity) -> None:
        self._count()
        self._active.append(activity)
        self._share()

    def stop(self, activity: Activity) -> None:
        """Break it off. One that is over is left as it is."""
        if activity in self._active:
            self._count()
            self._active.remove(activity)
            self._share()

    def _count(self) -> None:
        """Book what has been done since the rates last changed."""
        seconds, self._counted_at = self._clock.now - self._counted_at, self._clock.now
        for activity in self._active:
            activity.left -= seconds * activity.rate

    def _share(self) -> None:
        """Give everybody its rate, and come back when the first is done."""
        if self._timer is not None:
            self._timer.cancel()
        rates = fair_rates(
            [activity.usage for activity in self._active],
            self._capacity,
            [activity.most for activity in self._active],
        )
        first = float("inf")
        for activity, rate in zip(self._active, rates, strict=True):
            activity.rate = rate
            if self._is_done(activity):
                first = 0.0
            elif rate > 0:
                first = min(first, activity.left / rate)
        self._timer = self._clock.after(first, self._finish) if first < float("inf") else None

    def _finish(self) -> None:
        self._timer = None
        self._count()
        done = [activity for activity in self._active if self._is_done(activity)]
        self._active = [a for a in self._active if a not in done]
        self._share()
        for activity in done:
            activity.on_done()

    def _is_done(self, activity: Activity) -> bool:
        if activity.left <= _NOTHING_LEFT * activity.size:
            return True
        # Late in a long run the clock is too coarse for what is left of a short one: it would never come.
        now = self._clock.now
        return activity.rate > 0 and now + activity.left / activity.rate <= now
