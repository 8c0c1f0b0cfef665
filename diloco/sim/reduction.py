"""Simulated reductions: how the reduction of an attempt ends at each member; it may succeed at some and fail at others.

A reduction runs once all members of the plan have begun and can reach each other, and each member finishes at a time of
its own. A member that dies or aborts, or a link that is cut, makes it fail at the members that are not finished or
about to finish; each suspects what it can see itself. If bytes just stop (a frozen member, a link cut in one
direction), a member fails after the stall timeout. A member that fails makes the others fail, and tells them whom it
blames: to them that is hearsay, as in peers/reduce/all_reduce.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Literal, NamedTuple

from diloco.sim.clock import Clock
from diloco.sim.network import Network
from diloco.sim.values import Pieces
from peers.core import events
from peers.protocol.certificates import Plan

if TYPE_CHECKING:
    from diloco.sim.peer import VirtualPeer

OPEN_S = 4.0
"""The time in which all members have to begin."""
PROMPT_S = 1.5
"""The same if they have open streams from an earlier reduction."""
STALL_S = 5.0
"""The stall timeout."""
NOTICE_S = (0.0, 0.5)
"""How long the others take to notice that a member has failed."""
LAST_MOMENT_S = 0.05
"""A member this close to its end has received all bytes."""
SPREAD = 0.3
"""Members finish up to this share later than the first."""
LOOK_AGAIN_S = 0.2

Suspects = frozenset[str]


class Blame(NamedTuple):
    suspects: Suspects = frozenset()
    told_by: tuple[str, ...] = ()
    """If the suspects are hearsay: who named them, the first accuser first."""


@dataclass
class Part:
    """One member's part in an attempt."""

    member: VirtualPeer
    pieces: Pieces
    state: Literal["running", "done", "over"] = "running"
    ends_at: float = math.inf


@dataclass
class Attempt:
    plan: Plan
    parts: dict[str, Part] = field(default_factory=dict)
    is_flowing: bool = False

    def running(self) -> list[Part]:
        return [part for part in self.parts.values() if part.state == "running"]


class Reductions:
    """All attempts. A member takes part in one at a time. `reduce_s`: shortest and longest duration."""

    def __init__(
        self, clock: Clock, rng: random.Random, network: Network, reduce_s: tuple[float, float]
    ) -> None:
        self.reduce_s = reduce_s
        self._clock, self._rng, self._network = clock, rng, network
        self._attempts: dict[str, Attempt] = {}
        self._joined: set[frozenset[str]] = set()
        """Pairs with open streams; a failed reduction closes those of its members."""
        self._of_member: dict[str, Attempt] = {}

    def begin(self, member: VirtualPeer, plan: Plan, pieces: Pieces, timeout_s: float) -> None:
        """Start this member's part; its `reduced` or ReduceFailed follows, unless `end` is called before."""
        self.end(member.peer_id, "began another")
        attempt = self._attempts.setdefault(plan.digest, Attempt(plan))
        part = Part(member, pieces)
        attempt.parts[member.peer_id] = part
        self._of_member[member.peer_id] = attempt
        are_joined = self._joined.issuperset(_pairs(plan.signers))
        open_s = min(PROMPT_S if are_joined else OPEN_S, timeout_s)
        self._clock.after(open_s, lambda: self._give_up_opening(attempt, part))
        self._clock.after(timeout_s, lambda: self._time_out(attempt, part))
        if gone := frozenset(
            p for p in plan.signers if p in attempt.parts and attempt.parts[p].state == "over"
        ):
            self._fail_soon(attempt, part, Blame(gone))
        self._try_to_flow(attempt)

    def end(self, peer_id: str, why: str = "cancelled") -> None:
        """End this member's part: it has died, or cancelled."""
        attempt = self._of_member.pop(peer_id, None)
        if attempt is not None and (part := attempt.parts[peer_id]).state == "running":
            part.state = "over"
            self._joined -= _pairs(attempt.plan.signers)
            self._break_for_others(attempt, peer_id)

    def links_changed(self) -> None:
        """Links were cut or healed."""
        for attempt in list(self._of_member.values()):
            if not attempt.is_flowing:
                self._try_to_flow(attempt)
                continue
            for part in attempt.running():
                if broken := self._unlinked_to(attempt, part):
                    self._stall(attempt, part, broken)

    def frozen(self, peer_id: str) -> None:
        """This member sends nothing until it thaws."""
        attempt = self._of_member.get(peer_id)
        if attempt is None or not attempt.is_flowing:
            return
        frozen = attempt.parts[peer_id]

        def look() -> None:
            if frozen.member.is_frozen and frozen.state == "running":
                for part in attempt.running():
                    if part is not frozen:
                        self._fail(attempt, part, "stalled", Blame(frozenset({peer_id})))

        self._clock.after(STALL_S, look)

    # Progress

    def _try_to_flow(self, attempt: Attempt) -> None:
        signers = attempt.plan.signers
        if attempt.is_flowing or any(p not in attempt.parts for p in signers):
            return
        if any(attempt.parts[p].state != "running" for p in signers):
            return
        if any(self._unlinked_to(attempt, part) for part in attempt.parts.values()):
            return
        attempt.is_flowing = True
        slowest = max(part.member.slowness for part in attempt.parts.values())
        takes_s = self._rng.uniform(*self.reduce_s) * slowest
        for part in attempt.parts.values():
            part.ends_at = self._clock.now + takes_s * self._rng.uniform(1.0, 1.0 + SPREAD)
            self._finish_at(attempt, part)

    def _finish_at(self, attempt: Attempt, part: Part) -> None:
        def finish() -> None:
            if part.state != "running" or math.isinf(part.ends_at):
                return
            if any(other.member.is_frozen for other in attempt.running()):
                part.ends_at = max(part.ends_at, self._clock.now + LOOK_AGAIN_S)
            if part.ends_at > self._clock.now:
                self._finish_at(attempt, part)
                return
            part.state = "done"
            self._joined |= _pairs(attempt.plan.signers)
            self._forget(attempt, part)
            pieces = {peer_id: other.pieces for peer_id, other in attempt.parts.items()}
            part.member.reduced(attempt.plan, pieces)

        self._clock.at(part.ends_at, finish)

    def _break_for_others(self, attempt: Attempt, gone: str, why: Blame | None = None) -> None:
        """Members that have not finished fail soon. Each suspects the member that is gone or, at random, the members
        that this one blamed."""
        for part in attempt.running():
            if part.ends_at > self._clock.now + LAST_MOMENT_S:
                blame = Blame(frozenset({gone}))
                if why is not None and why.suspects and self._rng.random() < 0.5:
                    blame = _hearsay(part.member.peer_id, gone, why)
                self._fail_soon(attempt, part, blame)

    def _stall(self, attempt: Attempt, part: Part, broken: Suspects) -> None:
        """A link cut in both directions breaks its streams at once; cut in one, bytes just stop."""
        if part.ends_at <= self._clock.now + LAST_MOMENT_S:
            return
        me = part.member.peer_id
        is_silent = all(self._network.carries(me, p) or self._network.carries(p, me) for p in broken)

        def look() -> None:
            if self._unlinked_to(attempt, part) & broken:
                self._fail(attempt, part, "stalled", Blame(broken))

        if is_silent:
            part.ends_at = max(part.ends_at, self._clock.now + STALL_S + LOOK_AGAIN_S)
            self._clock.after(STALL_S, look)
        else:
            self._fail_soon(attempt, part, Blame(broken))

    def _give_up_opening(self, attempt: Attempt, part: Part) -> None:
        if not attempt.is_flowing:
            self._fail(attempt, part, "not all began in time", self._unheard_by(attempt, part))

    def _time_out(self, attempt: Attempt, part: Part) -> None:
        blame = self._unheard_by(attempt, part)
        self._fail(
            attempt, part, "too slow", blame if blame.suspects else Blame(self._slower_than(attempt, part))
        )

    def _fail_soon(self, attempt: Attempt, part: Part, blame: Blame) -> None:
        after_s = self._rng.uniform(*NOTICE_S)
        # Cancel the scheduled success, which might come before the failure.
        part.ends_at = math.inf
        self._clock.after(after_s, lambda: self._fail(attempt, part, "a stream broke", blame))

    def _fail(self, attempt: Attempt, part: Part, reason: str, blame: Blame) -> None:
        peer_id = part.member.peer_id
        if part.state != "running" or attempt.parts.get(peer_id) is not part:
            return
        part.state = "over"
        self._joined -= _pairs(attempt.plan.signers)
        self._forget(attempt, part)
        suspects, told_by = blame
        part.member.post(events.ReduceFailed(attempt.plan.digest, reason, suspects, frozenset(told_by)))
        self._break_for_others(attempt, peer_id, blame)

    def _forget(self, attempt: Attempt, part: Part) -> None:
        if self._of_member.get(part.member.peer_id) is attempt:
            del self._of_member[part.member.peer_id]

    # Who is to blame, as one member sees it

    def _unlinked_to(self, attempt: Attempt, part: Part) -> Suspects:
        me = part.member.peer_id
        return frozenset(p for p in attempt.plan.signers if p != me and not self._network.is_linked(me, p))

    def _unheard_by(self, attempt: Attempt, part: Part) -> Blame:
        """Members that have not begun, are unreachable or frozen; else one that another member says it waits for."""
        missing = frozenset(p for p in attempt.plan.signers if p not in attempt.parts)
        frozen = frozenset(p for p, other in attempt.parts.items() if other.member.is_frozen)
        if own := (missing | frozen | self._unlinked_to(attempt, part)) - {part.member.peer_id}:
            return Blame(own)
        cut = sorted(
            (p, teller) for teller, other in attempt.parts.items() for p in self._unlinked_to(attempt, other)
        )
        if not cut:
            return Blame()
        culprit, teller = self._rng.choice(cut)
        return Blame(frozenset({culprit}), (teller,))

    def _slower_than(self, attempt: Attempt, part: Part) -> Suspects:
        """The slowest member, if it is slower than this one."""
        slowest = max((other.member for other in attempt.parts.values()), key=lambda member: member.slowness)
        return frozenset({slowest.peer_id}) if slowest.slowness > part.member.slowness else frozenset()


def _hearsay(me: str, teller: str, why: Blame) -> Blame:
    """The blame of the member `me` once `teller`, which gives up, has told it whom to blame. If only `me` is named, it
    blames the first accuser."""
    told_by = tuple(p for p in (*why.told_by[:1], teller) if p != me)
    if others := why.suspects - {me}:
        return Blame(others, told_by)
    return Blame(frozenset(told_by[:1]), told_by[1:])


def _pairs(peer_ids: Iterable[str]) -> set[frozenset[str]]:
    return set(map(frozenset, combinations(peer_ids, 2)))
