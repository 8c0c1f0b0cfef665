"""How fast a peer trains, where in their epoch the others are by now, and where one that comes later enters it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from peers.membership import View, trainers_of
from peers.records import Announcement

LEAST_LEFT = 0.05
"""Of an epoch: less is not worth beginning to train for."""
_MOST_STEPS = 1e9
_WEIGHT = 0.5
"""Of the newest measurement."""

Ages = Mapping[int, float]
"""World rank -> seconds since what its announcement says was so."""


@dataclass
class Pace:
    """One peer's, by what its worker tells now and then. Times in seconds of any one clock."""

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


def progress_of_others(
    view: View, lineage: str, me: int, steps_per_epoch: int, ages: Ages | None = None
) -> int:
    """The local step a peer enters a running epoch at: the others' median, at least one step before the end.

    Without `ages` announcements count as they stand. Rounded up: who is early waits alone, for who is late all do.
    """
    return max(0, min(_median_step(view, lineage, me, ages or {}), steps_per_epoch - 1))


def entry_with_work(
    view: View, lineage: str, me: int, steps_per_epoch: int, ages: Ages, *, has_time_budget: bool
) -> int | None:
    """The local step at which a peer that brings work of an earlier epoch goes on training, to be done with the others.

    None where too little of the epoch is left, or nobody knows: then its work joins the round as it is.
    """
    others = [rank for rank in trainers_of(view, lineage) if rank != me]
    if not others:
        return None
    entry = _median_step(view, lineage, me, ages)
    if not has_time_budget:
        paces = [view[rank].step_s for rank in others if view[rank].step_s]
        own = view[me].step_s if me in view else 0.0
        if not paces or not own:
            return None
        left_s = (steps_per_epoch - entry) * statistics.median_low(paces)
        entry = max(entry, steps_per_epoch - int(left_s / own))
    return entry if steps_per_epoch - entry >= max(1.0, LEAST_LEFT * steps_per_epoch) else None


def _median_step(view: View, lineage: str, me: int, ages: Ages) -> int:
    steps = [_local_step(view[r], ages.get(r, 0.0)) for r in trainers_of(view, lineage) if r != me]
    return math.ceil(statistics.median_low(steps)) if steps else 0


def _local_step(peer: Announcement, age_s: float) -> float:
    goes_on = peer.state == "training" and peer.step_s > 0
    # Whatever it announces: no more than a number that can be counted to.
    return peer.local_step + (min(age_s / peer.step_s, _MOST_STEPS) if goes_on else 0.0)
