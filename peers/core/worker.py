"""What a peer knows of its worker: where it trains, on what its weights are based, and what it has handed over."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from peers.protocol.certificates import Work
from peers.protocol.messages import Status

LEAST_LEFT_STEPS = 1
"""Of an epoch, for a peer that enters it late."""


@dataclass
class Worker:
    """By fragment it is known since which epoch the work on it is not in any commit."""

    state: Literal["none", "waits", "trains", "ready"] = "none"
    base: str = ""
    """The head whose anchor its weights are based on."""
    epoch: int = -1
    """The one that it was told to train in."""
    work: Work | None = None
    """Handed over, and not yet answered."""
    local_step: int = 0
    step_s: float = 0.0
    ready_at: float = 0.0
    """When it handed over its work."""
    is_ahead: bool = False
    """It trains on meanwhile."""
    voted_heads: set[str] = field(default_factory=set)
    """Heads of the commits with the work in hand that this peer has voted for."""
    _is_gone: bool = False
    """The worker that has handed over the work has ended."""
    _next_waits: bool = False
    """And the one after it waits to begin."""
    _began: int = 0
    _based_on: dict[int, int] = field(default_factory=dict)

    @property
    def is_training(self) -> bool:
        return self.state == "trains"

    @property
    def has_lost_work(self) -> bool:
        """Nobody is there any more to go on from the work in hand."""
        return self.work is not None and self._is_gone

    def arrive(self) -> None:
        """A worker asks where to begin."""
        if self.state == "ready":
            self._is_gone = self._next_waits = True
        else:
            self.state = "waits"

    def end(self) -> None:
        if self.state == "ready":
            self._is_gone, self._next_waits = True, False
        else:
            self.state = "none"

    def begin(self, head: str, epoch: int, local_step: int) -> None:
        """From an anchor, with nothing that is not in it."""
        self.base, self._began, self._based_on = head, epoch, {}
        self.resume(epoch, local_step)

    def hand_over(self, work: Work, fragment: int, now: float) -> None:
        self.voted_heads.clear()
        self.ready_at = now
        self.work = replace(work, based_on=self._based_on.get(fragment, self._began))
        self.state = "ready"

    def was_committed(self, fragment: int, epoch: int) -> None:
        """Its work on this fragment is in the commit that led to this epoch."""
        self._based_on[fragment] = epoch

    def roll_back_to(self, epoch: int) -> None:
        """Its commits after this epoch were of a fork that lost."""
        self._began = min(self._began, epoch)
        if self.work is not None:
            self.work = replace(self.work, based_on=min(self.work.based_on, epoch))
        self._based_on = {fragment: min(at, epoch) for fragment, at in self._based_on.items()}

    def resume(self, epoch: int, local_step: int) -> None:
        """It has been answered."""
        self.state = "waits" if self._next_waits else "none" if self._is_gone else "trains"
        self.work, self.is_ahead, self._is_gone, self._next_waits = None, False, False, False
        self.epoch, self.local_step = epoch, local_step


def entry_step(others: Iterable[tuple[Status, float]], steps_per_epoch: int, own_step_s: float) -> int:
    """The local step at which a peer that comes late enters the others' epoch, to be done when they are.

    `others`: those who train on the same head, with the age of their statuses in seconds.
    """
    steps: list[float] = []
    paces: list[float] = []
    for status, age_s in others:
        goes_on = status.phase == "training" and status.step_s > 0
        step = status.local_step + (age_s / status.step_s if goes_on else 0.0)
        steps.append(min(step, float(steps_per_epoch)) if status.phase == "training" else steps_per_epoch)
        if status.step_s > 0:
            paces.append(status.step_s)
    if not steps:
        return 0
    entry = math.ceil(statistics.median_low(steps))
    if paces and own_step_s > 0:
        left_s = (steps_per_epoch - entry) * statistics.median_low(paces)
        entry = max(entry, steps_per_epoch - int(left_s / own_step_s))
    return max(0, min(entry, steps_per_epoch - LEAST_LEFT_STEPS))
