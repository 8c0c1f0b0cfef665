"""Ground truth of a simulation: all states and certificates that exist, and which peer could not hear which."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.sim.values import State
from peers.protocol.certificates import Certificate

if TYPE_CHECKING:
    from diloco.sim.peer import VirtualPeer

HEARD_AGAIN_S = 1.0
"""Two outages closer together than this count as one: between them perhaps no message was sent."""

Pair = tuple[str, str]
"""(listener, speaker)."""


class Outages:
    """When one peer could not hear another. An outage may have several overlapping causes, and ends with the last."""

    def __init__(self) -> None:
        self._causes: Counter[Pair] = Counter()
        self._since: dict[Pair, float] = {}
        self._past: dict[Pair, list[tuple[float, float]]] = defaultdict(list)

    def begin(self, pairs: Iterable[Pair], now: float) -> None:
        for pair in pairs:
            if not self._causes[pair]:
                past = self._past[pair]
                is_same = bool(past) and now - past[-1][1] < HEARD_AGAIN_S
                self._since[pair] = past.pop()[0] if is_same else now
            self._causes[pair] += 1

    def end(self, pairs: Iterable[Pair], now: float) -> None:
        for pair in pairs:
            self._causes[pair] -= 1
            if not self._causes[pair]:
                self._past[pair].append((self._since.pop(pair), now))

    def since(self, listener: str, speaker: str, ended_at: float) -> float:
        """Since when the listener had not heard the speaker in the first outage that had not ended before `ended_at`;
        infinite: there was none."""
        pair = (listener, speaker)
        lasting = self._since.get(pair, math.inf)
        return next((begin for begin, end in self._past[pair] if end >= ended_at), lasting)

    def longest_s(self, listener: str, speaker: str, since: float, now: float) -> float:
        """The longest outage that had not ended before `since`; 0: there was none."""
        pair = (listener, speaker)
        lasted = [end - begin for begin, end in self._past[pair] if end >= since]
        if pair in self._since:
            lasted.append(now - self._since[pair])
        return max(lasted, default=0.0)


@dataclass(frozen=True)
class Split:
    """Where two chains part: the states of each after the last one that they share."""

    ancestor: State | None
    """None: they were founded apart."""
    ours: tuple[State, ...]
    theirs: tuple[State, ...]


def split_between(ours: State, theirs: State) -> Split:
    mine, other = _back_from(ours), _back_from(theirs)
    shared = {state.head for state in mine} & {state.head for state in other}
    ancestor = next((state for state in mine if state.head in shared), None)
    return Split(
        ancestor,
        tuple(state for state in reversed(mine) if state.head not in shared),
        tuple(state for state in reversed(other) if state.head not in shared),
    )


def _back_from(state: State | None) -> list[State]:
    """The states of its run, back to the genesis."""
    chain = []
    while state is not None:
        chain.append(state)
        is_first = state.certificate is None or state.certificate.is_genesis
        state = None if is_first else state.parent
    return chain


@dataclass
class Truth:
    outages: Outages = field(default_factory=Outages)
    states: dict[str, State] = field(default_factory=dict)
    """By head: every state that a peer has ever held."""
    certificates: dict[str, Certificate] = field(default_factory=dict)
    held_by_honest: set[str] = field(default_factory=set)
    held_since: dict[str, float] = field(default_factory=dict)
    """By peer id: since when it has held its head."""
    head_of: dict[str, str] = field(default_factory=dict)
    """By peer id: the head it holds."""
    _on_head: dict[Pair, tuple[float, float]] = field(default_factory=dict)
    """By (peer id, head): from when to when the peer last held this head."""
    left_until: dict[str, float] = field(default_factory=dict)
    """For peers that announced that they leave: when they came back; infinite: not yet."""
    idle_until: dict[str, float] = field(default_factory=dict)
    """For peers that lost their worker: when they got another; infinite: not yet."""
    _took_part: dict[Pair, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By (peer id, head): from when to when the peer was not fetching a state since it last came to this head."""
    contradictions: list[str] = field(default_factory=list)
    """Heads under which two peers have different values."""
    may_count_twice: set[int] = field(default_factory=set)
    """Pieces: a liar may hand its work over twice, and an honest peer may take work to another side of a fork whose
    commit it has not seen."""

    def knows(self, certificates: Iterable[Certificate]) -> None:
        for certificate in certificates:
            self.certificates.setdefault(certificate.head, certificate)

    def holds(self, peer: VirtualPeer, state: State, now: float) -> State:
        """This peer holds this state from now on. Returns the object that all holders of the state share."""
        known = self.states.setdefault(state.head, state)
        if (known.anchor, known.momentum, known.pieces) != (state.anchor, state.momentum, state.pieces):
            self.contradictions.append(state.head)
        self.drops(peer.peer_id, now)
        self.head_of[peer.peer_id] = state.head
        self._on_head[peer.peer_id, state.head] = (now, math.inf)
        self._took_part[peer.peer_id, state.head] = []
        self.takes_part(peer.peer_id, now)
        self.held_since[peer.peer_id] = now
        if peer.is_honest:
            self.held_by_honest.add(state.head)
        return known

    def drops(self, peer_id: str, now: float) -> None:
        """This peer does not hold its head any more: it has moved to another, or has died."""
        self.pauses(peer_id, now)
        if (head := self.head_of.pop(peer_id, None)) is not None:
            began, _ = self._on_head[peer_id, head]
            self._on_head[peer_id, head] = (began, now)

    def pauses(self, peer_id: str, now: float) -> None:
        """This peer does not take part in rounds: it begins to fetch a state, or drops its head."""
        spans = self._took_part[peer_id, self.head_of.get(peer_id, "")]
        if spans and math.isinf(spans[-1][1]):
            spans[-1] = (spans[-1][0], now)

    def takes_part(self, peer_id: str, now: float) -> None:
        """This peer takes part in rounds on its head: it has come to it, or its fetch has ended."""
        self.pauses(peer_id, now)
        if (head := self.head_of.get(peer_id)) is not None:
            self._took_part[peer_id, head].append((now, math.inf))

    def took_part(self, peer_id: str, head: str, since: float, until: float) -> bool:
        """Whether this peer took part in rounds on this head from `until` or earlier, and still at `since`."""
        return any(began <= until and ended >= since for began, ended in self._took_part[peer_id, head])

    def was_on_head(self, peer_id: str, head: str, since: float, until: float) -> bool:
        """Whether this peer reached this head by `until`, and did not leave it before `since`."""
        began, ended = self._on_head.get((peer_id, head), (math.inf, math.inf))
        return began <= until and ended >= since

    def roster_after(self, head: str) -> frozenset[str]:
        return frozenset(member.peer_id for member in self.certificates[head].plan.roster)

    def fork_rule_allows(self, split: Split, is_heard: Callable[[str], bool]) -> bool:
        """Whether the Fork rule allows to move to their side: at least as many peers count for it as for ours.
        `is_heard`: whether the peer that moves must have heard this one lately. Others may be here for it or not: of
        those, the ones that count for their side count, the ones that count for ours do not.

        Independent of chain.prefers_theirs, and counted over all certificates that exist: an invariant must not share a
        bug with the code that it checks. How ties are broken is not checked.
        """
        assert split.ancestor is not None
        lead, roster = 0, self.roster_after(split.ancestor.head)
        taken_in = self._taken_in(split.ours, split.theirs, roster, lambda _: True)
        taken_in |= self._taken_in(split.theirs, split.ours, roster, is_heard)
        for peer_id in roster | taken_in:
            ours, theirs = self._signed_last(split.ours, peer_id), self._signed_last(split.theirs, peer_id)
            lead += (theirs > ours) - (ours > theirs and is_heard(peer_id))
        return lead >= 0

    def _taken_in(
        self,
        side: Sequence[State],
        other: Sequence[State],
        roster: frozenset[str],
        contests: Callable[[str], bool],
    ) -> frozenset[str]:
        """The members of the rosters on this side, as long as more than half of each has signed the next commit, or
        no fewer than those of the rest that have signed on the other side and may contest it."""
        found = frozenset[str]()
        for state in side:
            signed = roster.intersection(self.certificates[state.head].plan.signers)
            rest = [p for p in roster - signed if contests(p) and self._signed_last(other, p) > (-1, -1)]
            if 2 * len(signed) <= len(roster) and len(rest) > len(signed):
                break
            roster = self.roster_after(state.head)
            found |= roster
        return found

    def _signed_last(self, side: Sequence[State], peer_id: str) -> tuple[int, int]:
        plans = [self.certificates[state.head].plan for state in side]
        signed = (
            (c.work.moves, plan.attempt) for plan in plans for c in plan.contributors if c.peer_id == peer_id
        )
        return max(signed, default=(-1, -1))
