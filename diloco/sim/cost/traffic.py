"""Activities in progress, which share links and CPUs until each is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diloco.sim.clock import Clock, Timer
from diloco.sim.cost.links import Resource, fair_rates

_NOTHING_LEFT = 1e-9
"""An activity is done when less than this fraction of its size is left."""


@dataclass(eq=False)
class Activity:
    """A transfer. `usage`: units of each resource per unit of the activity; `size`: total units."""

    usage: Mapping[Resource, float]
    size: float
    on_done: Callable[[], object]
    most: float = float("inf")
    """Upper limit of its rate in units per second."""
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
        self._advanced_at = 0.0
        self._timer: Timer | None = None

    def start(self, activity: Activity) -> None:
        self._advance()
        self._active.append(activity)
        self._assign_rates()

    def stop(self, activity: Activity) -> None:
        """Cancel an activity; no effect if it is already done."""
        if activity in self._active:
            self._advance()
            self._active.remove(activity)
            self._assign_rates()

    def _advance(self) -> None:
        """Update `left` of all activities for the time since the rates last changed."""
        seconds, self._advanced_at = self._clock.now - self._advanced_at, self._clock.now
        for activity in self._active:
            activity.left -= seconds * activity.rate

    def _assign_rates(self) -> None:
        """Compute all rates, and set the timer for the first activity to finish."""
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
        self._advance()
        done = [activity for activity in self._active if self._is_done(activity)]
        self._active = [a for a in self._active if a not in done]
        self._assign_rates()
        for activity in done:
            activity.on_done()

    def _is_done(self, activity: Activity) -> bool:
        if activity.left <= _NOTHING_LEFT * activity.size:
            return True
        # Late in a long run, the remaining time of a short activity may be below the clock's float resolution.
        now = self._clock.now
        return activity.rate > 0 and now + activity.left / activity.rate <= now
