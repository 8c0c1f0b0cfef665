"""What a peer knows of its worker: its epoch, the anchor its weights are based on, and the work it has handed over."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec.structs import replace

from peers.protocol.certificates import Work
from peers.protocol.messages import Status


class Progress(NamedTuple):
    """How far a worker has come in its epoch."""

    local_step: int
    step_s: float
    """0: not known."""
    at: float
    """When it said so."""

    def done_at(self, local_step: int) -> float:
        """When it will have come to this local step; infinite if its speed is not known."""
        return self.at + (local_step - self.local_step) * self.step_s if self.step_s else math.inf


@dataclass
class Worker:
    """The state machine of one peer's worker, over restarts of the worker process.

    States: none (no worker), waits (it has asked where to begin), trains, ready (it has handed over its work), finished
    (its last work is committed; if it fails afterwards, its successor waits like any other).
    """

    moves: int
    """How often its peer has moved to another head (`Work.moves`)."""
    state: Literal["none", "waits", "trains", "ready", "finished"] = "none"
    base: str = ""
    """The head whose anchor its weights are based on."""
    epoch: int = -1
    """The epoch that it was told to train in."""
    work: Work | None = None
    """Handed over, and not yet answered."""
    local_step: int = 0
    step_s: float = 0.0
    told_at: float = 0.0
    """When it reported its local step."""
    ready_at: float = 0.0
    """When it handed over its work."""
    is_ahead: bool = False
    """It trains in the next epoch while its work waits for a commit."""
    voted_heads: set[str] = field(default_factory=set)
    """Heads of the commits that contain the work in hand and that this peer has voted for."""
    _is_gone: bool = False
    """The process that handed over the work has ended."""
    _next_waits: bool = False
    """The process that handed over the work has ended, and its successor has asked where to begin."""
    _began: int = 0
    """The epoch in which it began from an anchor."""
    _based_on: dict[int, int] = field(default_factory=dict)
    """By fragment, the epoch of the last commit that contains this worker's work on that fragment."""

    @property
    def is_training(self) -> bool:
        return self.state == "trains"

    @property
    def progress(self) -> Progress | None:
        """None: it does not train."""
        return Progress(self.local_step, self.step_s, self.told_at) if self.is_training else None

    def tell(self, local_step: int, step_s: float, now: float) -> None:
        """It reports its local step, and how long its steps take."""
        self.local_step, self.step_s, self.told_at = local_step, step_s, now

    @property
    def has_lost_work(self) -> bool:
        """The process that handed over the work has ended: if the work is not committed, it is lost."""
        return self.work is not None and self._is_gone

    def arrive(self) -> None:
        """A worker process asks where to begin."""
        if self.state == "ready":
            self._is_gone = self._next_waits = True
        else:
            self.state = "waits"

    def end(self) -> None:
        if self.state == "ready":
            self._is_gone, self._next_waits = True, False
        elif self.state != "finished":
            self.state = "none"

    def begin(self, head: str, epoch: int, local_step: int) -> None:
        """It begins from an anchor, without uncommitted work."""
        self.base, self._began, self._based_on = head, epoch, {}
        self.resume(epoch, local_step)

    def hand_over(self, work: Work, fragment: int, now: float) -> None:
        self.voted_heads.clear()
        self.ready_at = now
        self.work = replace(work, based_on=self._based_on.get(fragment, self._began), moves=self.moves)
        self.state = "ready"

    def head_moved(self) -> None:
        """Its peer has moved to another head."""
        self.moves += 1
        if self.work is not None:
            self.work = replace(self.work, moves=self.moves)

    def was_committed(self, fragment: int, epoch: int) -> None:
        """Its work on this fragment is in the commit of this epoch."""
        self._based_on[fragment] = epoch

    def roll_back_to(self, epoch: int) -> None:
        """Its commits after this epoch were on a fork that lost: its work is based on this epoch at the latest."""
        self._began = min(self._began, epoch)
        if self.work is not None:
            self.work = replace(self.work, based_on=min(self.work.based_on, epoch))
        self._based_on = {fragment: min(at, epoch) for fragment, at in self._based_on.items()}

    def resume(self, epoch: int, local_step: int, *, is_finished: bool = False) -> None:
        """It was answered, and trains in this epoch from this local step on, unless this was its last work."""
        here: Literal["trains", "finished"] = "finished" if is_finished else "trains"
        self.state = "waits" if self._next_waits else "none" if self._is_gone else here
        self.work, self.is_ahead, self._is_gone, self._next_waits = None, False, False, False
        self.epoch, self.local_step = epoch, local_step


class Other(NamedTuple):
    """A peer that trains on the same head."""

    status: Status
    age_s: float
    """How old its status is."""
    step_s: float
    """The time of one nominal local step; 0: not known."""


def entry_step(others: Iterable[Other], steps_per_epoch: int, own_step_s: float, *, least_left: int) -> int:
    """The local step at which a peer that joins late enters the others' epoch, so that it finishes with them.

    `own_step_s`: the time in which its nominal local step advances by one; 0: not known. `least_left`: the steps that
    it trains at least; with 0, a peer that cannot finish another step in time hands over what it has.
    """
    steps: list[float] = []
    paces: list[float] = []
    for status, age_s, step_s in others:
        goes_on = status.phase == "training" and step_s > 0
        step = status.local_step + (age_s / step_s if goes_on else 0.0)
        steps.append(min(step, float(steps_per_epoch)) if status.phase == "training" else steps_per_epoch)
        if step_s > 0:
            paces.append(step_s)
    if not steps:
        return 0
    entry = math.ceil(statistics.median_low(steps))
    if paces and own_step_s > 0:
        left_s = (steps_per_epoch - entry) * statistics.median_low(paces)
        entry = max(entry, steps_per_epoch - int(left_s / own_step_s))
    return max(0, min(entry, steps_per_epoch - least_left))
