"""What has really happened in a simulation: the states and certificates there are, and who could not hear whom."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from diloco.sim.values import State
from peers.protocol.certificates import Certificate

HEARD_AGAIN_S = 1.0
"""In a shorter time between two outages perhaps nothing was said."""

Pair = tuple[str, str]
"""Who listens, and to whom."""


class Outages:
    """When a peer could not hear another.

    Causes overlap, and follow on each other: an outage lasts until none of them has come back soon.
    """

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

    def longest_s(self, listener: str, speaker: str, since: float, now: float) -> float:
        """The longest outage that had not ended by `since`; 0: there was none."""
        pair = (listener, speaker)
        lasted = [end - begin for begin, end in self._past[pair] if end >= since]
        if pair in self._since:
            lasted.append(now - self._since[pair])
        return max(lasted, default=0.0)


class Holder(Protocol):
    @property
    def peer_id(self) -> str: ...

    @property
    def is_honest(self) -> bool: ...


@dataclass(frozen=True)
class Split:
    """Where two chains part: what each has after the state that they share."""

    ancestor: State | None
    """None: they have begun apart."""
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
    chain = []
    while state is not None:
        chain.append(state)
        state = state.parent
    return chain


@dataclass
class Truth:
    outages: Outages = field(default_factory=Outages)
    states: dict[str, State] = field(default_factory=dict)
    """By head: all that anybody has held."""
    certificates: dict[str, Certificate] = field(default_factory=dict)
    held_by_honest: set[str] = field(default_factory=set)
    held_since: dict[str, float] = field(default_factory=dict)
    """By peer id: since when it holds its head."""
    head_of: dict[str, str] = field(default_factory=dict)
    """By peer id: the head it holds."""
    _on_head: dict[Pair, tuple[float, float]] = field(default_factory=dict)
    """From when to when a peer (the first of the pair) last held a head."""
    left_until: dict[str, float] = field(default_factory=dict)
    """Of peers that have said that they leave: when they came back; infinite: not yet."""
    idle_until: dict[str, float] = field(default_factory=dict)
    """Of peers that have lost their worker: when they got another; infinite: not yet."""
    contradictions: list[str] = field(default_factory=list)
    """Heads under which two peers have different values."""

    def knows(self, certificates: Iterable[Certificate]) -> None:
        for certificate in certificates:
            self.certificates.setdefault(certificate.head, certificate)

    def holds(self, peer: Holder, state: State, now: float) -> State:
        """This peer has this state from now on; returned as the one that all who hold it share."""
        known = self.states.setdefault(state.head, state)
        if (known.anchor, known.momentum, known.pieces) != (state.anchor, state.momentum, state.pieces):
            self.contradictions.append(state.head)
        self.drops(peer.peer_id, now)
        self.head_of[peer.peer_id] = state.head
        self._on_head[peer.peer_id, state.head] = (now, math.inf)
        self.held_since[peer.peer_id] = now
        if peer.is_honest:
            self.held_by_honest.add(state.head)
        return known

    def drops(self, peer_id: str, now: float) -> None:
        """This peer holds its head no more: it goes on, or it has died."""
        if (head := self.head_of.pop(peer_id, None)) is not None:
            began, _ = self._on_head[peer_id, head]
            self._on_head[peer_id, head] = (began, now)

    def was_on_head(self, peer_id: str, head: str, since: float, until: float) -> bool:
        """Whether this peer has come to this head by `until`, and not left it before `since`."""
        began, ended = self._on_head.get((peer_id, head), (math.inf, math.inf))
        return began <= until and ended >= since

    def roster_after(self, head: str) -> frozenset[str]:
        return frozenset(member.peer_id for member in self.certificates[head].plan.roster)

    def fork_rule_allows(self, split: Split) -> bool:
        """Rule 3, of all certificates there are: whether their side wins, or neither does by its members."""
        assert split.ancestor is not None
        votes = 0
        for peer_id in self.roster_after(split.ancestor.head):
            ours, theirs = self._signed_last(split.ours, peer_id), self._signed_last(split.theirs, peer_id)
            votes += (theirs > ours) - (ours > theirs)
        return votes >= 0

    def _signed_last(self, side: Sequence[State], peer_id: str) -> tuple[int, int]:
        plans = [self.certificates[state.head].plan for state in side]
        return max(((p.epoch, p.attempt) for p in plans if peer_id in p.signers), default=(-1, -1))
