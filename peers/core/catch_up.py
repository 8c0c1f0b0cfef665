"""Whose state to take: newer commits on this peer's chain, a chain that counts for more, or any chain for a newcomer.

Targets are heads that live peers announce. Certificates that lead to them are asked for, then judged (chain.py), then
the state is fetched; nothing is adopted before its certificates are here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from peers.core.chain import KEPT, Chain, Fork, acceptable_part, prefers_theirs
from peers.core.effects import CancelFetch, Fetch, Send, Tell
from peers.core.health import Swarm
from peers.core.timing import Timing
from peers.core.turn import Turn
from peers.protocol.certificates import Certificate
from peers.protocol.limits import MAX_CERTIFICATES
from peers.protocol.messages import Ask, Certificates

MAX_DONORS = 8
MAX_UNKNOWN = 1024


@dataclass
class CatchUp:
    """Of one peer."""

    me: str
    chain: Chain
    swarm: Swarm
    timing: Timing
    target: Certificate | None = None
    """Whose state is being fetched."""
    path: tuple[Certificate, ...] = ()
    """To it, from this peer's chain where that is known."""
    _asked: dict[tuple[str, str], float] = field(default_factory=dict)
    _unknown: dict[str, None] = field(default_factory=dict)
    """Heads whose past nobody could tell."""
    _not_before: float = 0.0
    _since: float | None = None

    def on_ask(self, turn: Turn, sender: str, ask: Ask) -> None:
        known = self.chain.leading_to(ask.head, ask.have, MAX_CERTIFICATES)
        turn.do(Send(sender, Certificates(head=ask.head, certificates=tuple(known))))

    def on_unknown(self, head: str) -> None:
        """A peer answered that it does not know what leads to this head."""
        if self.chain.get(head) is None and len(self._unknown) < MAX_UNKNOWN:
            self._unknown[head] = None

    def advance(self, turn: Turn, *, can_fetch: bool, has_worker: bool) -> bool:
        """Ask for what is missing, and fetch the state that counts. True if a fetch began or ended."""
        heads = self._announced()
        for head, holders in heads.items():
            self._ask_for_the_way(turn, head, holders)
        if not can_fetch or not turn.passed(self._not_before):
            return False
        path = self._best(turn, heads, has_worker)
        if self.target is not None and (not path or path[-1].head == self.target.head):
            return False
        if not path or (self.target is not None and not self._is_past(path)):
            return False
        self.fetch(turn, path, heads.get(path[-1].head, ()))
        return True

    def fetch(self, turn: Turn, path: Sequence[Certificate], donors: Sequence[str]) -> None:
        self.target, self.path = path[-1], tuple(path)
        turn.do(
            Fetch(self.path, tuple(donors[:MAX_DONORS]), self.timing.fetch_timeout_s),
            Tell("fetch", f"fetching the state of epoch {self.target.plan.epoch}"),
        )

    def on_failed(self, turn: Turn, suspects: frozenset[str]) -> None:
        """The fetch that ran has brought nothing."""
        if self.target is None:
            return
        for peer_id in suspects:
            if self.swarm.is_live(peer_id):
                self.swarm.strike(peer_id, self.target.plan.epoch, 0.5)
        self.target, self.path = None, ()
        self._not_before = turn.now + self.timing.reaction_s

    def end(self, turn: Turn, *, cancel: bool) -> None:
        if cancel and self.target is not None:
            turn.do(CancelFetch())
        self.target, self.path = None, ()

    def _is_past(self, path: Sequence[Certificate]) -> bool:
        """Where the target is on the way to somewhere further, it is fetched first: commits are repeated after it."""
        assert self.target is not None
        return self.target.head not in {certificate.head for certificate in path}

    def _announced(self) -> dict[str, list[str]]:
        """Heads that this peer is not past, and who holds their states."""
        heads: dict[str, list[str]] = defaultdict(list)
        for peer_id, status in self.swarm.live():
            if status.head and not self.chain.has_passed(status.head):
                heads[status.head].append(peer_id)
        return heads

    def _ask_for_the_way(self, turn: Turn, head: str, holders: Sequence[str]) -> None:
        path = self.chain.path_back(head)
        if not path:
            wanted = head
        elif path[0].is_genesis or self.chain.has_passed(path[0].plan.parent):
            return
        elif not self.chain.head and len(path) > 1:
            # A newcomer has no past in common with anybody.
            return
        else:
            wanted = path[0].plan.parent
        if wanted in self._unknown and path:
            return
        for peer_id in holders:
            key = (peer_id, wanted)
            if turn.passed(self._asked.get(key, float("-inf")) + self.timing.reaction_s):
                self._asked[key] = turn.now
                turn.do(Send(peer_id, Ask(head=wanted, have=self.chain.head)))
                turn.passed(turn.now + self.timing.reaction_s)
        if len(self._asked) > 4 * MAX_UNKNOWN:
            self._asked.clear()

    def _best(self, turn: Turn, heads: dict[str, list[str]], has_worker: bool) -> tuple[Certificate, ...]:
        if not self.chain.head:
            return self._for_newcomer(turn, heads)
        best: tuple[Certificate, ...] = ()
        for head in sorted(heads):
            path = self._acceptable_way(turn, head, heads, has_worker)
            if path and path[-1].head in heads and (not best or _counts_for_more(self.chain, path, best)):
                best = path
        return best

    def _acceptable_way(
        self, turn: Turn, head: str, heads: dict[str, list[str]], has_worker: bool
    ) -> tuple[Certificate, ...]:
        fork = self.chain.fork_to(head)
        if fork is None:
            return self._way_of_the_lost(head, heads)
        part = acceptable_part(
            fork,
            me=self.me if has_worker else None,
            may_object=lambda peer_id, at: (
                not (
                    self.swarm.is_gone(peer_id)
                    or self._is_past_head(peer_id, at)
                    or (at == self.chain.head and self.swarm.has_gone_on(peer_id, turn))
                )
            ),
        )
        if not part or (fork.ours and not prefers_theirs(Fork(fork.ancestor, fork.ours, part))):
            return ()
        return part

    def _is_past_head(self, peer_id: str, head: str) -> bool:
        """Whether what this peer announces is known to follow on this head."""
        status = self.swarm.status(peer_id)
        at = status.head if status is not None else ""
        for _ in range(KEPT):
            certificate = self.chain.get(at)
            if certificate is None or certificate.is_genesis:
                return False
            at = certificate.plan.parent
            if at == head:
                return True
        return False

    def _way_of_the_lost(self, head: str, heads: dict[str, list[str]]) -> tuple[Certificate, ...]:
        """A common past is not known any more: what more peers show counts, this one included."""
        path = self.chain.path_back(head)
        if not path or not (path[0].is_genesis or path[0].plan.parent in self._unknown):
            return ()
        theirs = {p for certificate in path for p in heads.get(certificate.head, ())}
        ours = [p for p, status in self.swarm.live() if status.head and self.chain.has_passed(status.head)]
        if len(theirs) < 1 + len(ours):
            return ()
        return tuple(path[-1:])

    def _for_newcomer(self, turn: Turn, heads: dict[str, list[str]]) -> tuple[Certificate, ...]:
        """What most of those who answer show; among equals the later epoch, then the smaller hash."""
        if not heads:
            self._since = None
            return ()
        self._since = turn.now if self._since is None else self._since
        if not turn.passed(self._since + self.timing.reaction_s):
            return ()
        ranked = []
        for head in heads:
            path = self.chain.path_back(head)
            if path:
                supporters = {p for certificate in path for p in heads.get(certificate.head, ())}
                ranked.append((-len(supporters), -path[-1].plan.epoch, head, tuple(path[-1:])))
        return min(ranked)[3] if ranked else ()


def _counts_for_more(chain: Chain, path: Sequence[Certificate], other: Sequence[Certificate]) -> bool:
    """Of two ways that may both be adopted: the longer where one leads on from the other, else rule 3 between them."""
    mine = [certificate.head for certificate in other]
    theirs = [certificate.head for certificate in path]
    shared = 0
    while shared < min(len(mine), len(theirs)) and mine[shared] == theirs[shared]:
        shared += 1
    if shared in (len(mine), len(theirs)) and path[0].plan.parent == other[0].plan.parent:
        return len(theirs) > len(mine)
    ancestor = path[shared - 1] if shared else chain.get(path[0].plan.parent)
    if ancestor is None or (not shared and path[0].plan.parent != other[0].plan.parent):
        return path[-1].plan.epoch > other[-1].plan.epoch
    return prefers_theirs(Fork(ancestor, tuple(other[shared:]), tuple(path[shared:])))
