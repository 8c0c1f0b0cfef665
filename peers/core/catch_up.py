"""Whose state to take: newer commits on this peer's chain, a chain that counts for more, the state before commits that
no majority has signed, or any chain for a newcomer.

Targets are heads that live peers announce. Certificates that lead to them are asked for, then judged (chain.py), then
the state is fetched; nothing is adopted before its certificates are here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from peers.core.chain import Chain, Fork, adoptable_prefix, prefers_theirs
from peers.core.effects import Fetch, Send, Tell
from peers.core.health import Swarm
from peers.core.plans import fault_of_successor, is_quorum
from peers.core.settings import Settings
from peers.core.timing import Timing
from peers.core.turn import Turn
from peers.protocol.certificates import Certificate
from peers.protocol.limits import MAX_CERTIFICATES
from peers.protocol.messages import Ask, Certificates

MAX_DONORS = 8
MAX_ASKED = 64
"""Heads that one peer was asked for and whose answer is still awaited."""
MAX_SOUND = 4096

Heads = dict[str, list[str]]
"""Announced heads, and the live peers that announce them."""


@dataclass
class CatchUp:
    """Of one peer."""

    me: str
    settings: Settings
    chain: Chain
    swarm: Swarm
    timing: Timing
    target: Certificate | None = None
    """Whose state is being fetched."""
    genesis: str = ""
    """Of the run that this peer is in."""
    path: tuple[Certificate, ...] = ()
    """To it, from this peer's chain where that is known."""
    _asked: dict[str, dict[str, float]] = field(default_factory=dict)
    """By peer, when it was last asked for which heads."""
    _unknown: set[tuple[str, str]] = field(default_factory=set)
    """Who has answered that it does not know which head."""
    _sound: dict[str, bool] = field(default_factory=dict)
    """Whether a certificate can follow its parent."""
    _failed: tuple[str, float] = "", 0.0
    """The head that was fetched in vain last, and until when it is not fetched again."""
    _since: float | None = None
    """When the first of the heads was heard that are announced now."""
    _back_since: float | None = None
    """Since when it would go back to an earlier head."""

    @property
    def is_checking(self) -> bool:
        """What is fetched is the state of this peer's own head, to compare it with the others'."""
        return self.target is not None and self.target.head == self.chain.head

    def on_ask(self, turn: Turn, sender: str, ask: Ask) -> None:
        known = self.chain.leading_to(ask.head, ask.have, MAX_CERTIFICATES)
        turn.do(Send(sender, Certificates(head=ask.head, certificates=tuple(known))))

    def has_asked(self, peer_id: str, head: str) -> bool:
        return head in self._asked.get(peer_id, ())

    def on_unknown(self, peer_id: str, head: str) -> None:
        """A peer that was asked does not know what leads to this head."""
        if self.has_asked(peer_id, head):
            self._unknown.add((peer_id, head))

    def advance(self, turn: Turn, *, can_fetch: bool, has_worker: bool) -> bool:
        """Ask for what is missing, and fetch the state that counts. True if a fetch began."""
        heads = self._announced()
        for head, holders in heads.items():
            self._ask_for_the_way(turn, head, holders)
        if not heads:
            self._since = None
        elif self._since is None:
            self._since = turn.now
        if not can_fetch:
            return False
        path = self._best(turn, heads, has_worker)
        # Donors that had gone on say so by announcing the next head, which is fetched at once.
        if not path or (path[-1].head == self._failed[0] and not turn.passed(self._failed[1])):
            return False
        if self.target is not None and (
            path[-1].head == self.target.head or self.chain.follows(path[-1].head, self.target.head)
        ):
            # A target on the way to somewhere further is fetched first: commits are repeated after it.
            return False
        self.fetch(turn, path, self._donors(path[-1]))
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
        self._failed = self.target.head, turn.now + self.timing.reaction_s
        self.target, self.path = None, ()

    def end(self) -> None:
        """The fetch that ran, if there was one, has brought its state, or is not needed any more."""
        self.target, self.path = None, ()

    def target_outweighs(self, certificate: Certificate) -> bool:
        """Whether what is being fetched, if anything is, does not come after this commit on the own head, and counts
        for more by rule 3."""
        if self.target is None or any(certificate.head == other.head for other in self.path):
            return False
        parts_here = self.path[0].plan.parent == self.chain.head
        return not parts_here or prefers_theirs(Fork(self.chain.newest, (certificate,), self.path))

    def head_moved(self) -> None:
        self._asked.clear()
        self._unknown.clear()

    def _announced(self) -> Heads:
        """Heads that this peer is not past."""
        heads: Heads = defaultdict(list)
        own = self.chain.head
        for peer_id, status in self.swarm.live():
            if status.head and status.head != own and not self.chain.is_on_own_chain(status.head):
                heads[status.head].append(peer_id)
        return heads

    def _donors(self, target: Certificate) -> list[str]:
        """Holders of the state: those who have spoilt least first, then those of its roster."""
        roster = {member.peer_id for member in target.plan.roster}
        holders = [p for p, status in self.swarm.live() if status.head == target.head]
        return sorted(holders, key=lambda p: (self.swarm.strikes(p), p not in roster, p))

    def _ask_for_the_way(self, turn: Turn, head: str, holders: Sequence[str]) -> None:
        path = self.chain.path_back(head)
        wanted = path[0].plan.parent if path else head
        if path and (path[0].is_genesis or self.chain.is_on_own_chain(wanted)):
            return
        if path and not self.chain.head:
            # A newcomer has no past in common with anybody.
            return
        for peer_id in holders:
            asked = self._asked.setdefault(peer_id, {})
            if (peer_id, wanted) in self._unknown:
                continue
            if turn.passed(asked.get(wanted, -math.inf) + self.timing.reaction_s):
                asked.pop(wanted, None)
                asked[wanted] = turn.now
                if len(asked) > MAX_ASKED:
                    del asked[next(iter(asked))]
                turn.do(Send(peer_id, Ask(head=wanted, have=self.chain.head)))
                turn.passed(turn.now + self.timing.reaction_s)

    # Which of them

    def _best(self, turn: Turn, heads: Heads, has_worker: bool) -> tuple[Certificate, ...]:
        if not self.chain.head:
            return self._for_newcomer(turn, heads)
        best: tuple[Certificate, ...] = ()
        for head in sorted(heads):
            path = self._acceptable_way(turn, head, heads, has_worker)
            if path and path[-1].head in heads and (not best or _prefers_path(self.chain, path, best)):
                best = path
        return best or self._way_back(turn)

    def _way_back(self, turn: Turn) -> tuple[Certificate, ...]:
        """To where most of a roster stand, if what this peer has gone on to from there binds nobody; once that has been
        so for long enough that all have said where they stand now."""
        own = self.chain.head
        heads = {s.head for _, s in self.swarm.live() if s.head != own and self.chain.is_on_own_chain(s.head)}
        back = [fork for head in heads if (fork := self.chain.fork_to(head)) is not None]
        found = [fork.ancestor for fork in back if self._binds_nobody(fork.ancestor, fork.ours)]
        if not found:
            self._back_since = None
            return ()
        self._back_since = turn.now if self._back_since is None else self._back_since
        if not turn.passed(self._back_since + self.timing.reaction_s):
            return ()
        return (min(found, key=lambda certificate: certificate.plan.epoch),)

    def _binds_nobody(self, certificate: Certificate, after: Sequence[Certificate]) -> bool:
        """Most of a roster stand where it was given out, and most have not signed what came after: they will not follow
        (rule 3), and without the others may be too few to commit."""
        signers = {peer_id for commit in after for peer_id in commit.plan.signers}
        standing = {p for p, status in self.swarm.live() if status.head == certificate.head}
        if self.chain.head == certificate.head:
            standing.add(self.me)
        return is_quorum(standing, certificate, 0.5) and not is_quorum(signers, certificate, 0.5)

    def _acceptable_way(
        self, turn: Turn, head: str, heads: Heads, has_worker: bool
    ) -> tuple[Certificate, ...]:
        fork = self.chain.fork_to(head)
        # A run founded anew, if only from a checkpoint of this one, has no past in common with it.
        if fork is None or (fork.theirs and fork.theirs[0].is_genesis):
            return self._way_of_the_lost(turn, head, heads)

        part = adoptable_prefix(
            fork,
            me=self.me,
            has_worker=has_worker,
            may_object=lambda peer_id, certificate: self._may_object(turn, peer_id, certificate),
            is_off_head=lambda peer_id, at: at != self.chain.head or self.swarm.is_off_head(peer_id, turn),
            is_gone=self.swarm.is_gone,
            is_sound=self._is_sound,
        )
        if not part or (fork.ours and not prefers_theirs(Fork(fork.ancestor, fork.ours, part))):
            return ()
        return () if self._binds_nobody(fork.ancestor, part) else part

    def _may_object(self, turn: Turn, peer_id: str, certificate: Certificate) -> bool:
        """It may be heard, spoils no rounds, and stands at the head before this certificate, or has gone on from there
        another way."""
        at, head = certificate.plan.parent, self._head_of(peer_id)
        if at == self.chain.head:
            return self._stands_here(turn, peer_id) and not self._leads_to(head, certificate.head)
        return head == at and self._may_be_heard(peer_id)

    def _stands_here(self, turn: Turn, peer_id: str) -> bool:
        """On this peer's chain, at its head or beyond it: now, or soon."""
        is_beyond = self.chain.follows(self._head_of(peer_id), self.chain.head)
        return self._may_be_heard(peer_id) and (is_beyond or not self.swarm.is_off_head(peer_id, turn))

    def _may_be_heard(self, peer_id: str) -> bool:
        is_left_out = self.swarm.is_left_out(peer_id, self.chain.newest.plan.epoch)
        return not (is_left_out or self.swarm.is_gone(peer_id))

    def _head_of(self, peer_id: str) -> str:
        status = self.swarm.status(peer_id)
        return status.head if status is not None else ""

    def _leads_to(self, head: str, earlier: str) -> bool:
        return head == earlier or self.chain.follows(head, earlier)

    def _is_sound(self, certificate: Certificate, before: Certificate) -> bool:
        key = certificate.head
        if key not in self._sound:
            if len(self._sound) > MAX_SOUND:
                self._sound.clear()
            self._sound[key] = not fault_of_successor(certificate, before, self.settings)
        return self._sound[key]

    def _way_of_the_lost(self, turn: Turn, head: str, heads: Heads) -> tuple[Certificate, ...]:
        """A common past is not known any more, to nobody who announces it. Then what the roster here shows counts, this
        peer included; and where nobody of it is left, whatever others show, as for a newcomer."""
        path = self.chain.path_back(head)
        holders = {p for certificate in path for p in heads.get(certificate.head, ())}
        if not path or not (path[0].is_genesis or self._is_unknown_to(holders, path[0].plan.parent)):
            return ()
        roster = {member.peer_id for member in self.chain.newest.plan.roster} - {self.me}
        gone_over = roster & holders
        objectors = {p for p in roster - holders if self._stands_here(turn, p)}
        if gone_over:
            lead = len(gone_over) - 1 - len(objectors)
            # Those who have begun anew decide in the same way, where neither side has more.
            wins = lead > 0 or (lead == 0 and (not path[0].is_genesis or path[0].head < self.genesis))
            may_go = all(self.swarm.is_off_head(p, turn) for p in gone_over)
            return tuple(path[-1:]) if may_go and wins else ()
        if any(not self.swarm.is_gone(p) for p in roster):
            return ()
        # Two that have begun apart, and each alone: by the hash of what they began from.
        theirs = path[0].head if path[0].is_genesis else min(map(self.swarm.genesis, holders))
        return tuple(path[-1:]) if len(holders) > 1 or "" < theirs < self.genesis else ()

    def _is_unknown_to(self, holders: set[str], head: str) -> bool:
        return bool(holders) and all((p, head) in self._unknown for p in holders)

    def run_of_most(self, turn: Turn) -> Certificate | None:
        """For a newcomer: the newest of the run that most of those who are here show, once it is certified."""
        path = self._for_newcomer(turn, self._announced())
        return path[-1] if path else None

    def _for_newcomer(self, turn: Turn, heads: Heads) -> tuple[Certificate, ...]:
        """The chain that most of those who answer are on, once it is certified, and on it the head that most are at; of
        equals what more have signed, then the newest. So no single peer leads a newcomer back to an old head, and none
        that speaks first leads it anywhere: the others have their time to speak, unless most of the roster have."""
        if not heads or self._since is None:
            return ()

        def supporters_of(head: str) -> set[str]:
            return {p for other in heads if self._is_on(other, head) for p in heads[other]}

        def rank(head: str) -> tuple[int, int, int, int, str]:
            supporters = supporters_of(head)
            certificate = self.chain.get(head)
            plan = certificate.plan if certificate else None
            num_signers, epoch = (len(plan.signers), plan.epoch) if plan else (0, 0)
            return -len(supporters), -len(heads[head]), -num_signers, -epoch, head

        best = min(heads, key=rank)
        certificate, has_waited = self.chain.get(best), turn.passed(self._since + self.timing.reaction_s)
        if certificate is None:
            return ()
        supporters = supporters_of(best)
        is_agreed = len(supporters) > 1 and is_quorum(supporters, certificate, 0.5)
        return (certificate,) if has_waited or (is_agreed and not self.swarm.has_unheard()) else ()

    def _is_on(self, head: str, other: str) -> bool:
        """Both are of one chain."""
        return self._leads_to(head, other) or self._leads_to(other, head)


def _prefers_path(chain: Chain, path: Sequence[Certificate], other: Sequence[Certificate]) -> bool:
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
