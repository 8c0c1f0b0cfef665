"""What the threads of one reduction share: how far each is, whose turn it is to add, and why the reduction failed."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import NamedTuple

from peers.reduce.frames import NOBODY, Kind, Stopped, slice_s
from peers.reduce.plan import ReducePlan
from peers.timing import OFTEN_S

LAST_WORDS_S = 2 * OFTEN_S
"""How long a failed reduction may take to send its aborts."""


class Blame(NamedTuple):
    culprit: int | None
    """Index of the member at fault; None: not known."""
    told_by: tuple[int, ...] = ()
    """For hearsay: the first accuser, then the member that passed it on. Empty: own evidence."""


class Failure(NamedTuple):
    reason: str
    culprit: int | None
    told_by: tuple[int, ...]
    """As in Blame."""


class Departed(Exception):
    """A member does not read any more; its abort says why."""


class Progress:
    """Shared by all threads of one attempt. Members are identified by their index in the group."""

    def __init__(self, plan: ReducePlan) -> None:
        others = plan.others
        self._slice_s = slice_s(len(others))
        self._num_mine = plan.num_chunks(plan.me)
        self._num_theirs = {other: plan.num_chunks(other) for other in others}
        self._predecessor = dict(zip(others[1:], others, strict=False))
        self._successor = dict(pairwise(others))
        self._last = others[-1] if others else None
        self._lock = threading.Lock()
        # One condition per receiver: waking all of them for the turn of one costs more than the turn.
        self._turn_changed = {other: threading.Condition(self._lock) for other in others}
        self._result_finished = threading.Condition(self._lock)
        self._num_added = dict.fromkeys(others, 0)
        self._num_finished = 0
        self._num_sent_contributions = dict.fromkeys(others, 0)
        self._num_sent_results = dict.fromkeys(others, 0)
        self._waits_for: dict[int, int] = {}
        """By member, the third member that it says it waits for."""
        self._received_all: set[int] = set()
        self._departed: set[int] = set()
        self._stop_sending_at = float("inf")
        self.failure: Failure | None = None
        """The first failure; later ones are its consequences."""

    # Senders

    def next_frame(self, other: int, idle_timeout_s: float) -> tuple[Kind, int] | None:
        """The next frame to send, results first. Waits for one; after `idle_timeout_s` that is a sign of life with the
        member that this peer waits for. None: everything is sent, or the reduction has failed."""
        with self._lock:
            while self.failure is None:
                if (result := self._num_sent_results[other]) < self._num_finished:
                    return Kind.RESULT, result
                if (contribution := self._num_sent_contributions[other]) < self._num_theirs[other]:
                    self._num_sent_contributions[other] += 1
                    return Kind.CONTRIBUTION, contribution
                if result == self._num_mine:
                    return None
                if not self._result_finished.wait(idle_timeout_s):
                    culprit = self._slowest().culprit
                    return Kind.ALIVE, NOBODY if culprit is None else culprit
        return None

    def result_sent(self, other: int, index: int) -> bool:
        """Record that this chunk's result was sent to `other`. True for the last sender to do so."""
        with self._lock:
            self._num_sent_results[other] = index + 1
            senders = self._num_sent_results.values()
            return min(senders) == index + 1

    def must_stop_sending(self, other: int) -> bool:
        """Whether to interrupt the frame that is being sent. After a failure it is normally finished, so that the abort
        after it can be read, but not for longer than LAST_WORDS_S, and not for a culprit by own evidence."""
        failure = self.failure
        if failure is None:
            return False
        is_culprit = failure.culprit == other and not failure.told_by
        return is_culprit or time.monotonic() >= self._stop_sending_at

    def lost_while_sending(self, other: int) -> bool:
        """`other` does not read any more. True: its receiver thread has ended, so the caller must read its abort."""
        with self._lock:
            self._departed.add(other)
            self._turn_changed[other].notify_all()
            return other in self._received_all

    # Receivers

    def wait_for_turn(self, other: int, index: int) -> None:
        """Wait until the member before `other` has added this chunk. Raises Stopped, Departed."""
        with self._lock:
            while other in self._predecessor and self._num_added[self._predecessor[other]] <= index:
                if self.failure is not None:
                    raise Stopped
                if other in self._departed:
                    raise Departed
                self._turn_changed[other].wait(self._slice_s)

    def chunk_added(self, other: int, index: int) -> None:
        with self._lock:
            self._num_added[other] = index + 1
            if other in self._successor:
                self._turn_changed[self._successor[other]].notify_all()
            if other == self._last:
                self._num_finished = index + 1
                self._result_finished.notify_all()

    def everything_received(self, other: int) -> None:
        """Raises Departed if `other` had stopped reading before: then its receiver thread must read its abort."""
        with self._lock:
            self._received_all.add(other)
            if other in self._departed:
                raise Departed

    def says_it_waits(self, other: int, third: int) -> None:
        """`other` says that it owes results because it waits for a third member; NOBODY: it does not wait any more."""
        with self._lock:
            if third in self._num_added and third != other:
                self._waits_for[other] = third
            else:
                self._waits_for.pop(other, None)

    # All

    def slowest(self) -> Blame:
        """The member to blame for the delay; None if it is more than one.

        If contributions are missing, the first member of those that have contributed least. Else, if results are
        missing, the one that owes them, or the one that all who owe them say they wait for. Else the one that has not
        taken this peer's results.
        """
        with self._lock:
            return self._slowest()

    def _slowest(self) -> Blame:
        added, other = min(((added, other) for other, added in self._num_added.items()), default=(0, 0))
        if self._num_added and added < self._num_mine:
            return Blame(other)
        if owing := self._num_added.keys() - self._received_all:
            blamed = {self._for_waiting_on(other) for other in owing}
            culprits = {blame.culprit for blame in blamed}
            return min(blamed, key=lambda blame: blame.told_by) if len(culprits) == 1 else Blame(None)
        not_taking = [other for other, sent in self._num_sent_results.items() if sent < self._num_mine]
        return Blame(not_taking[0] if len(not_taking) == 1 else None)

    def on_waiting_for(self, other: int) -> Blame:
        """The member to blame if this peer waits for `other`: that one, unless it says that it waits for a third."""
        with self._lock:
            return self._for_waiting_on(other)

    def _for_waiting_on(self, other: int) -> Blame:
        third = self._waits_for.get(other)
        return Blame(other) if third is None else Blame(third, (other,))

    def has_failed(self) -> bool:
        return self.failure is not None

    def fail(
        self,
        reason: str,
        culprit: int | None,
        told_by: tuple[int, ...] = (),
        *,
        last_words_s: float = LAST_WORDS_S,
    ) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = Failure(reason, culprit, told_by)
            self._stop_sending_at = min(self._stop_sending_at, time.monotonic() + last_words_s)
            for turn_changed in self._turn_changed.values():
                turn_changed.notify_all()
            self._result_finished.notify_all()
