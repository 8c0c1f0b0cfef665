"""What the threads of one reduction share: how far each is, whose turn it is to add, and why the reduction failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from peers.reduce.frames import Kind, Stopped, slice_s
from peers.reduce.plan import Chunk, ReducePlan
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
    blame: Blame


class Departed(Exception):
    """A member does not read any more; its abort says why."""


class _Adding:
    """How far the values of some members have been added to the same chunks, one member after the other."""

    def __init__(self, members: Sequence[int], num_chunks: int) -> None:
        self.members, self.num_chunks = members, num_chunks
        self.num_added = dict.fromkeys(members, 0)
        self.predecessor = dict(zip(members[1:], members, strict=False))
        self.successor = dict(pairwise(members))

    @property
    def num_finished(self) -> int:
        """How many chunks all members' values have been added to."""
        return self.num_added[self.members[-1]] if self.members else 0

    def slowest(self) -> int | None:
        """The first member of those that have sent least; None if nothing is missing."""
        added, member = min(((added, member) for member, added in self.num_added.items()), default=(0, 0))
        return member if self.members and added < self.num_chunks else None


class Progress:
    """Shared by all threads of one attempt. Members are identified by their index in the group, a chunk by its place in
    the order in which one member sends such chunks to another."""

    def __init__(self, plan: ReducePlan) -> None:
        me, neighbours = plan.me, plan.neighbours
        self._plan, self._slice_s = plan, slice_s(len(neighbours))
        piece = plan.chunks(plan.grid.column(me))
        self._position = {chunk: position for position, chunk in enumerate(piece)}
        """The place of each chunk of this peer's piece in the order in which its sources send and get them."""
        self._collected = _Adding(plan.sources, len(piece))
        self._summed = _Adding(plan.mates, plan.num_chunks(me))
        self._adding = {
            **dict.fromkeys(plan.sources, self._collected),
            **dict.fromkeys(plan.mates, self._summed),
        }
        """By member whose values this peer adds."""
        self.contributions = {other: plan.contributions(me, other) for other in neighbours}
        """By neighbour, the chunks that this peer sends it, in their order; `results` likewise."""
        self.results = {other: plan.results(me, other) for other in neighbours}
        self._lock = threading.Lock()
        # One condition per receiver: waking all of them for the turn of one costs more than the turn.
        self._turn_changed = {other: threading.Condition(self._lock) for other in neighbours}
        self._more_to_send = threading.Condition(self._lock)
        self._num_finished = dict.fromkeys(plan.grid.column(me), 0)
        """By member of this peer's column, how many chunks of its share are averaged, and known here."""
        self._num_encoded = dict.fromkeys(plan.mates, 0)
        self._num_sent_contributions = dict.fromkeys(neighbours, 0)
        self._num_sent_results = dict.fromkeys(neighbours, 0)
        self._waits_for: dict[int, Blame] = {}
        """By member, the third member that it says it waits for, as hearsay."""
        self._received_all: set[int] = set()
        self._departed: set[int] = set()
        self._stop_sending_at = float("inf")
        self.failure: Failure | None = None
        """The first failure; later ones are its consequences."""

    # Senders

    def next_frame(self, other: int, idle_timeout_s: float) -> tuple[Kind, int] | None:
        """The next frame to send, results first. Waits until there is one; after `idle_timeout_s` returns a sign of
        life. None: everything is sent, or the reduction has failed."""
        contributions, results = self.contributions[other], self.results[other]
        alive_at = time.monotonic() + idle_timeout_s
        with self._lock:
            while self.failure is None:
                if (result := self._num_sent_results[other]) < len(results):
                    chunk = results[result]
                    if chunk.number < self._num_finished[chunk.owner]:
                        return Kind.RESULT, result
                if (contribution := self._num_sent_contributions[other]) < len(contributions):
                    if other not in self._summed.num_added or self._is_collected(contributions[contribution]):
                        self._num_sent_contributions[other] += 1
                        return Kind.CONTRIBUTION, contribution
                elif result == len(results):
                    return None
                # Progress that this sender cannot use wakes it, too: that must not delay its sign of life.
                if not self._more_to_send.wait(alive_at - time.monotonic()):
                    return Kind.ALIVE, 0
        return None

    def _is_collected(self, chunk: Chunk) -> bool:
        """Whether all sources' contributions to this chunk of the piece have been added."""
        return self._position[chunk] < self._collected.num_finished

    def sum_encoded(self, mate: int, position: int) -> None:
        """This peer's sum for this chunk of the mate's share is encoded: its place may take the result."""
        with self._lock:
            self._num_encoded[mate] = position + 1

    def is_sum_encoded(self, mate: int, position: int) -> bool:
        with self._lock:
            return position < self._num_encoded[mate]

    def result_sent(self, other: int, position: int) -> bool:
        """Record that this result was sent to `other`. True for the last sender to do so."""
        chunk = self.results[other][position]
        plan = self._plan
        with self._lock:
            self._num_sent_results[other] = position + 1
            if any(self._num_sent_results[source] <= self._position[chunk] for source in plan.sources):
                return False
            mates = plan.mates if chunk.owner == plan.me else ()
            return all(self._num_sent_results[mate] > chunk.number for mate in mates)

    def must_stop_sending(self, other: int) -> bool:
        """Whether to interrupt the frame being sent. After a failure the frame is finished, so that the abort after it
        can be read, but not for longer than LAST_WORDS_S, and not if this peer has evidence against `other`."""
        failure = self.failure
        if failure is None:
            return False
        is_culprit = failure.blame == Blame(other)
        return is_culprit or time.monotonic() >= self._stop_sending_at

    def lost_while_sending(self, other: int) -> bool:
        """`other` does not read any more. True: its receiver thread has ended, so the caller must read its abort."""
        with self._lock:
            self._departed.add(other)
            self._turn_changed[other].notify_all()
            return other in self._received_all

    # Receivers

    def wait_for_turn(self, other: int, position: int) -> None:
        """Wait until the member before `other` has added this chunk; before the first mate this peer's own sum is due.
        Raises Stopped, Departed."""
        adding = self._adding[other]
        with self._lock:
            while not self._is_turn(adding, other, position):
                if self.failure is not None:
                    raise Stopped
                if other in self._departed:
                    raise Departed
                self._turn_changed[other].wait(self._slice_s)

    def _is_turn(self, adding: _Adding, other: int, position: int) -> bool:
        if (before := adding.predecessor.get(other)) is not None:
            return adding.num_added[before] > position
        return adding is self._collected or self._is_collected(Chunk(self._plan.me, position))

    def chunk_added(self, other: int, position: int) -> None:
        with self._lock:
            adding = self._adding[other]
            adding.num_added[other] = position + 1
            if other in adding.successor:
                self._turn_changed[adding.successor[other]].notify_all()
                return
            if adding is self._summed or not self._summed.members:
                self._num_finished[self._plan.me] = position + 1
            else:
                self._turn_changed[self._summed.members[0]].notify_all()
            self._more_to_send.notify_all()

    def result_received(self, mate: int, position: int) -> None:
        """A finished chunk of this mate's share, to be passed on, is here."""
        with self._lock:
            self._num_finished[mate] = position + 1
            self._more_to_send.notify_all()

    def everything_received(self, other: int) -> None:
        """Raises Departed if `other` had stopped reading before: then its receiver thread must read its abort."""
        with self._lock:
            self._received_all.add(other)
            if other in self._departed:
                raise Departed

    def says_it_waits(self, other: int, blame: Blame | None) -> None:
        """`other` says that it owes values because it waits for a third member; None: it does not wait any more."""
        with self._lock:
            if blame is not None and blame.culprit not in (None, other, self._plan.me):
                self._waits_for[other] = blame
            else:
                self._waits_for.pop(other, None)

    def waits_for_sums(self) -> bool:
        """Whether what this peer waits for are sums of its mates, which may wait for others themselves."""
        with self._lock:
            return self._collected.slowest() is None and self._summed.slowest() is not None

    # All

    def slowest(self) -> Blame:
        """The member to blame for the delay; None if it is more than one.

        If contributions are missing, the first source of those that have sent least; if sums are, the first such mate,
        or the member that it says it waits for. Else, if results are missing, the member that owes them, or the one
        that all who owe them say they wait for. Else the member that has not taken this peer's results.
        """
        with self._lock:
            return self._slowest()

    def _slowest(self) -> Blame:
        if (source := self._collected.slowest()) is not None:
            return Blame(source)
        if (mate := self._summed.slowest()) is not None:
            return self._for_waiting_on(mate)
        if owing := self._turn_changed.keys() - self._received_all:
            blamed = {self._for_waiting_on(other) for other in owing}
            culprits = {blame.culprit for blame in blamed}
            return min(blamed, key=lambda blame: blame.told_by) if len(culprits) == 1 else Blame(None)
        not_taking = [
            other for other, sent in self._num_sent_results.items() if sent < len(self.results[other])
        ]
        return Blame(not_taking[0] if len(not_taking) == 1 else None)

    def on_waiting_for(self, other: int) -> Blame:
        """The member to blame if this peer waits for `other`: that one, unless it says that it waits for a third."""
        with self._lock:
            return self._for_waiting_on(other)

    def _for_waiting_on(self, other: int) -> Blame:
        return self._waits_for.get(other, Blame(other))

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
                self.failure = Failure(reason, Blame(culprit, told_by))
            self._stop_sending_at = min(self._stop_sending_at, time.monotonic() + last_words_s)
            for turn_changed in self._turn_changed.values():
                turn_changed.notify_all()
            self._more_to_send.notify_all()
