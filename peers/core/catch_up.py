"""Which state to fetch from other peers: newer commits on this peer's chain, a chain that wins by the Fork rule, an
earlier head to roll back to, or, for a newcomer, any chain.

Targets are heads that live peers announce. This peer requests the certificates that lead to a target, checks them
(chain.py), and then fetches the state. No state is adopted before its certificates have arrived.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peers.core.chain import Chain, Fork, adoptable_prefix, num_shared, prefers_theirs
from peers.core.effects import Fetch, Send, Tell
from peers.core.health import Swarm
from peers.core.newcomer import Best, Heads, best_head, best_in, runs
from peers.core.plans import fault_of_successor, is_quorum
from peers.core.settings import Settings
from peers.core.timing import SLOWEST_LINK, Timing
from peers.core.turn import Turn
from peers.protocol.certificates import Certificate, certificate_bytes
from peers.protocol.limits import MAX_CERTIFICATES
from peers.protocol.messages import Ask, Certificates

MAX_DONORS = 8
MAX_PREFERENCE = 64.0
"""A donor is preferred by its bandwidth up to so many times SLOWEST_LINK: it can claim any."""
ANSWERS_BYTES = 1 << 20
"""Bytes of certificates to request at a time: among few peers from all holders, among hundreds from LEAST_ASKED."""
LEAST_ASKED = 4
MAX_ASKED = 64
"""Requests for certificates that are remembered per peer."""
MAX_SOUND = 4096


@dataclass
class CatchUp:
    me: str
    settings: Settings
    chain: Chain
    swarm: Swarm
    timing: Timing
    target: Certificate | None = None
    """The certificate of the state that is being fetched; None: no fetch is running."""
    path: tuple[Certificate, ...] = ()
    """The certificates up to the target; the first follows this peer's chain, if that link is known."""
    _asked: dict[str, dict[str, float]] = field(default_factory=dict)
    """By peer and head, when the peer was last asked for the certificates up to that head; infinite: it has answered
    that it does not know this head."""
    _sound: dict[str, bool] = field(default_factory=dict)
    """By head, whether its certificate can follow its parent by the rules."""
    _failed: tuple[str, float] = "", 0.0
    """The head whose fetch failed last, and until when it is not fetched again."""
    _heads_since: float | None = None
    """Since when other peers have announced heads that are not on this peer's chain; None: nobody does."""
    _rollback_since: float | None = None
    """Since when the conditions for a rollback have held."""

    @property
    def is_checking(self) -> bool:
        """Whether the fetch is of this peer's own head, because its own copy of the state may be damaged."""
        return self.target is not None and self.target.head == self.chain.head

    def on_ask(self, turn: Turn, sender: str, ask: Ask) -> None:
        known = self.chain.leading_to(ask.head, ask.have, MAX_CERTIFICATES)
        turn.do(Send(sender, Certificates(head=ask.head, certificates=tuple(known))))

    def has_asked(self, peer_id: str, head: str) -> bool:
        return head in self._asked.get(peer_id, ())

    def on_unknown(self, peer_id: str, head: str) -> None:
        """A peer that was asked does not know this head."""
        if self.has_asked(peer_id, head):
            self._asked[peer_id][head] = math.inf

    def advance(self, turn: Turn, *, can_fetch: bool, has_worker: bool, voting_on: int) -> bool:
        """Request missing certificates, and fetch the best state that may be adopted. True if a fetch began.

        `voting_on`: the attempt on this peer's head that it has signed and whose end it awaits; -1: none.
        """
        heads = self._announced()
        for head, holders in heads.items():
            self._ask_for_path(turn, head, holders)
        if not heads:
            self._heads_since = None
        elif self._heads_since is None:
            self._heads_since = turn.now
        if not can_fetch:
            return False
        path = self._best_path(turn, heads, has_worker)
        if len(path) == 1 and path[0].plan.parent == self.chain.head and path[0].plan.attempt < voting_on:
            # The attempt that this peer voted on is later: if it succeeds too, it wins, with the same work.
            return False
        # The pause after a failure is for one head only: donors that have moved on announce the next head.
        if not path or (path[-1].head == self._failed[0] and not turn.passed(self._failed[1])):
            return False
        if self.target is not None and (
            path[-1].head == self.target.head
            or self.chain.follows(path[-1].head, self.target.head)
            or (self.chain.head and not any(map(self._is_on_own_run, (self.path, path))))
        ):
            # Finish the fetch of a target that is an ancestor of the new one: later commits are replayed on top of it.
            # Of two other runs, finish the fetch that began first: they commit in turn, so each in turn looks better.
            return False
        self.fetch(turn, path)
        return True

    def fetch(self, turn: Turn, path: Sequence[Certificate]) -> None:
        self.target, self.path = path[-1], tuple(path)
        turn.do(
            Fetch(self.path, tuple(self._donors(self.target)), self.timing.fetch_timeout_s),
            Tell("fetch", f"fetching the state of epoch {self.target.plan.epoch}"),
        )

    def on_failed(self, turn: Turn, suspects: frozenset[str]) -> None:
        """The running fetch has failed."""
        if self.target is None:
            return
        for peer_id in suspects:
            if self.swarm.is_live(peer_id):
                self.swarm.strike(peer_id, self.target.plan.epoch, 0.5)
        self._failed = self.target.head, turn.now + self.timing.reaction_s
        self.target, self.path = None, ()

    def end(self) -> None:
        """The running fetch, if any, has succeeded or is not needed any more."""
        self.target, self.path = None, ()

    def target_outweighs(self, certificate: Certificate) -> bool:
        """Whether the fetch target wins over this commit on this peer's head: the path to the target does not contain
        the commit, and parts from this peer's chain earlier (then it was preferred before) or wins by the Fork rule."""
        if self.target is None or any(certificate.head == other.head for other in self.path):
            return False
        forks_at_own_head = self.path[0].plan.parent == self.chain.head
        return not forks_at_own_head or self._prefers_theirs(
            Fork(self.chain.newest, (certificate,), self.path)
        )

    def head_moved(self) -> None:
        self._asked.clear()

    def _is_on_own_run(self, path: Sequence[Certificate]) -> bool:
        """Whether this path begins on this peer's chain, or follows it."""
        first, is_own = path[0], self.chain.is_on_own_chain
        return is_own(first.head) or (not first.is_genesis and is_own(first.plan.parent))

    def _announced(self) -> Heads:
        """The heads of live peers that are not on this peer's chain."""
        own, chain = self.chain.head, self.chain
        heads = (
            head for head in self.swarm.heads if head and head != own and not chain.is_on_own_chain(head)
        )
        return {head: list(self.swarm.live_at(head)) for head in heads}

    def _donors(self, target: Certificate) -> Sequence[str]:
        """Peers that hold the target's state: those with the fewest strikes first, then members of its roster.

        Among equals, each peer that fetches draws a few of its own, with chances in proportion to their bandwidths
        (Efraimidis and Spirakis, 2006): so links share the load of all downloads as they can bear it. At later heads it
        draws nearly the same again: only these have kept the commits since (reduce/commit_log.py).
        """
        roster = target.plan.roster_set
        measured = {c.peer_id: c.work.bandwidth for c in target.plan.contributors}

        def place(peer_id: str) -> tuple[float, bool, float, str]:
            chance = (1 + int.from_bytes(self._drawn("donor", peer_id)[:6], "big")) / 2**48
            preference = min(max(1.0, measured.get(peer_id, 0.0) / SLOWEST_LINK), MAX_PREFERENCE)
            # By powers of two, since measurements vary.
            place = -math.log(chance) / 2 ** round(math.log2(preference))
            return self.swarm.strikes(peer_id), peer_id not in roster, place, peer_id

        return sorted(self.swarm.live_at(target.head), key=place)[:MAX_DONORS]

    def _drawn(self, purpose: str, peer_id: str) -> bytes:
        """A hash that differs for each peer that asks, for each purpose and each peer that is asked."""
        return hashlib.sha256(f"{self.me} {purpose} {peer_id}".encode()).digest()

    def _ask_for_path(self, turn: Turn, head: str, holders: Sequence[str]) -> None:
        path = self.chain.path_back(head)
        wanted = path[0].plan.parent if path else head
        if path and (self.chain.is_on_own_chain(wanted) or not self.chain.head):
            # A newcomer has no chain that the path could lead back to.
            return
        if path and path[0].is_genesis:
            # The chains may have parted before the oldest certificate that this peer holds of its own chain.
            wanted = self.chain.head_before
            if not wanted:
                return
        asked_at = {
            peer_id: self._asked.get(peer_id, {}).get(wanted, -math.inf)
            for peer_id in holders
            if not self._is_unknown_to(peer_id, wanted)
        }
        due = [peer_id for peer_id, at in asked_at.items() if turn.passed(at + self.timing.reaction_s)]
        num_members = len(self.swarm.roster) or len(holders)
        most = max(LEAST_ASKED, ANSWERS_BYTES // certificate_bytes(num_members, num_members))
        for peer_id in self._first_of(due, asked_at, wanted, room=most - (len(asked_at) - len(due))):
            asked = self._asked.setdefault(peer_id, {})
            asked.pop(wanted, None)
            asked[wanted] = turn.now
            if len(asked) > MAX_ASKED:
                del asked[next(iter(asked))]
            turn.do(Send(peer_id, Ask(head=wanted, have=self.chain.head)))
            turn.passed(turn.now + self.timing.reaction_s)

    def _first_of(
        self, due: Sequence[str], asked_at: Mapping[str, float], wanted: str, *, room: int
    ) -> Sequence[str]:
        """Up to `room` peers: least recently asked first, then roster members, then in an order of this peer's own."""
        if len(due) <= room:
            return due

        def place(peer_id: str) -> tuple[float, bool, bytes]:
            return asked_at[peer_id], peer_id not in self.swarm.roster, self._drawn(wanted, peer_id)

        return sorted(due, key=place)[:room] if room > 0 else ()

    # Which state is best

    def _best_path(self, turn: Turn, heads: Heads, has_worker: bool) -> tuple[Certificate, ...]:
        if not self.chain.head:
            return self._newcomer_path(turn, heads)
        best: tuple[Certificate, ...] = ()
        forks = {head: self._fork_in_own_run(head) for head in sorted(heads)}
        for fork in filter(None, forks.values()):
            path = self._adoptable_path(turn, fork, has_worker)
            if path and path[-1].head in heads and (not best or self._prefers_path(path, best)):
                best = path
        others = {head: heads[head] for head, fork in forks.items() if fork is None}
        return best or self._path_to_another_run(turn, others) or self._rollback_path(turn)

    def _rollback_path(self, turn: Turn) -> tuple[Certificate, ...]:
        """The path back to the earliest head of this peer's chain at which a majority stayed (`_majority_stayed_at`),
        once that has held for long enough that every peer has announced its current head."""
        own = self.chain.head
        heads = [head for head in self.swarm.heads if head != own and self.chain.is_on_own_chain(head)]
        back = [fork for head in heads if (fork := self.chain.fork_to(head)) is not None]
        found = [fork.ancestor for fork in back if self._majority_stayed_at(fork.ancestor, fork.ours)]
        if not found:
            self._rollback_since = None
            return ()
        self._rollback_since = turn.now if self._rollback_since is None else self._rollback_since
        if not turn.passed(self._rollback_since + self.timing.reaction_s):
            return ()
        return (min(found, key=lambda certificate: certificate.plan.epoch),)

    def _majority_stayed_at(self, certificate: Certificate, after: Sequence[Certificate]) -> bool:
        """Whether a majority of this certificate's roster is at its head, and no majority of it has signed the commits
        `after` it.

        That majority will not adopt the commits, by this same test in `_adoptable_path`, and without their signers it
        may be too small to commit. So the signers roll back to this head.
        """
        signers = {peer_id for commit in after for peer_id in commit.plan.signers}
        stayed = set(self.swarm.live_at(certificate.head))
        if self.chain.head == certificate.head:
            stayed.add(self.me)
        return is_quorum(stayed, certificate, 0.5) and not is_quorum(signers, certificate, 0.5)

    def _adoptable_path(self, turn: Turn, fork: Fork, has_worker: bool) -> tuple[Certificate, ...]:
        part = adoptable_prefix(
            fork,
            me=self.me,
            has_worker=has_worker,
            was_heard=lambda peer_id: peer_id == self.me or self.swarm.was_heard(peer_id),
            may_object=lambda peer_id, certificate: self._may_object(turn, peer_id, certificate),
            is_off_head=lambda peer_id, at: at != self.chain.head or self.swarm.is_off_head(peer_id, turn),
            is_gone=self.swarm.is_gone,
            is_sound=self._is_sound,
        )
        if not part or (fork.ours and not self._prefers_theirs(Fork(fork.ancestor, fork.ours, part))):
            return ()
        return () if self._majority_stayed_at(fork.ancestor, part) else part

    def _may_object(self, turn: Turn, peer_id: str, certificate: Certificate) -> bool:
        """Whether `peer_id` is neither gone nor left out for strikes, and is at the certificate's parent or, if that is
        this peer's head, on another chain from there. Who has signed the parent is there, even if its status has yet to
        come."""
        parent, head = certificate.plan.parent, self._head_of(peer_id)
        if parent == self.chain.head:
            return self._is_at_or_past_own_head(turn, peer_id) and not self._is_or_follows(
                head, certificate.head
            )
        before = self.chain.get(parent)
        has_signed = before is not None and peer_id in before.plan.signer_set
        is_there = head == parent or (has_signed and self.chain.follows(parent, head))
        return is_there and self._is_heard_and_trusted(peer_id)

    def _is_at_or_past_own_head(self, turn: Turn, peer_id: str) -> bool:
        """Whether `peer_id` is at this peer's head or a descendant of it, or was until recently and may be again."""
        is_beyond = self.chain.follows(self._head_of(peer_id), self.chain.head)
        return self._is_heard_and_trusted(peer_id) and (
            is_beyond or not self.swarm.is_off_head(peer_id, turn)
        )

    def _is_heard_and_trusted(self, peer_id: str) -> bool:
        is_left_out = self.swarm.is_left_out(peer_id, self.chain.newest.plan.epoch)
        return not (is_left_out or self.swarm.is_gone(peer_id))

    def _head_of(self, peer_id: str) -> str:
        status = self.swarm.status(peer_id)
        return status.head if status is not None else ""

    def _is_or_follows(self, head: str, earlier: str) -> bool:
        return head == earlier or self.chain.follows(head, earlier)

    def _is_sound(self, certificate: Certificate, before: Certificate) -> bool:
        key = certificate.head
        if key not in self._sound:
            if len(self._sound) > MAX_SOUND:
                self._sound.clear()
            self._sound[key] = not fault_of_successor(certificate, before, self.settings)
        return self._sound[key]

    def _fork_in_own_run(self, head: str) -> Fork | None:
        """Where the chain of `head` parts from this peer's chain; None if they have no known common past. A run that
        was founded anew has none with this one, even if it started from this one's checkpoint."""
        fork = self.chain.fork_to(head)
        return None if fork is None or (fork.theirs and fork.theirs[0].is_genesis) else fork

    def _path_to_another_run(self, turn: Turn, heads: Heads) -> tuple[Certificate, ...]:
        """The path to the head that a newcomer would go to (newcomer.py) in the largest other run that this peer's run
        gives way to. `heads`: those that have no known common ancestor with this peer's chain."""
        # A newcomer's own chain begins with its first head, but it may know older ones.
        known = {
            head: holders
            for head, holders in heads.items()
            if self.chain.get(head) is not None and not self.chain.follows(self.chain.head, head)
        }
        for run in runs(self.chain, known):
            best = best_in(run, self.chain, known, self.me)
            if best is not None and self._gives_way_to(turn, run, best):
                return (best.certificate,)
        return ()

    def _gives_way_to(self, turn: Turn, run: Heads, best: Best) -> bool:
        """Whether this peer leaves its run for another one, with which it has no known past in common.

        Members of this peer's roster decide: those that are in the other run against those still here, this peer
        included. On a tie it goes if the other genesis is unknown or its own run gives way. If no member went there and
        all others are gone, it goes if its own run gives way and either has no commits or a former member is there:
        commits are not given up to strangers. A run gives way to two members of the other one that are there together,
        since they would not come here. Else, alike on both sides, a run without commits gives way, then one whose
        genesis is known, then the greater genesis hash, then the greater head; but a founder with followers stays.
        """
        own, target = self.chain.newest, best.certificate
        first = self.chain.path_back(target.head)[0]
        holders = {peer_id for peers in run.values() for peer_id in peers}
        if not first.is_genesis and not all(self._is_unknown_to(p, first.plan.parent) for p in holders):
            return False
        roster = own.plan.roster_set - {self.me}
        switched = roster & holders
        theirs = first.head if first.is_genesis else ""
        place = target.is_genesis, theirs, target.head
        own_place = own.is_genesis, self.chain.genesis, own.head
        # Peers that followed a founder to its genesis become members only with its first commit.
        is_founder = own.is_genesis and self.me in own.plan.roster_set
        is_followed = is_founder and not (holders | roster).issuperset(self.swarm.live_at(own.head))
        gives_way = len(holders & target.plan.roster_set) > 1 or (place < own_place and not is_followed)
        if switched:
            objectors = {p for p in roster - holders if self._is_at_or_past_own_head(turn, p)}
            lead = len(switched) - 1 - len(objectors)
            wins = lead > 0 or (lead == 0 and (not first.is_genesis or gives_way))
            return wins and all(self.swarm.is_off_head(p, turn) for p in switched)
        is_known = not self.chain.former_members.keys().isdisjoint(best.supporters)
        wins = gives_way and (own.is_genesis or is_known)
        return wins and all(map(self.swarm.is_gone, roster))

    def _is_unknown_to(self, peer_id: str, head: str) -> bool:
        """Whether this peer has answered that it does not know this head."""
        return self._asked.get(peer_id, {}).get(head) == math.inf

    def newest_of_largest_run(self, turn: Turn) -> Certificate | None:
        """For a newcomer: the newest certificate of the chain that most live peers are on, once it has arrived."""
        path = self._newcomer_path(turn, self._announced())
        return path[-1] if path else None

    def _newcomer_path(self, turn: Turn, heads: Heads) -> tuple[Certificate, ...]:
        """The path to the head that a newcomer goes to (newcomer.py). Empty until other peers have had time to answer,
        unless a majority of the roster supports that head: the first peer to answer must not decide alone."""
        if not heads or self._heads_since is None:
            return ()
        has_waited = turn.passed(self._heads_since + self.timing.reaction_s)
        best = best_head(self.chain, heads, self.me, fetched=self.target)
        if best is None:
            return ()
        is_agreed = len(best.supporters) > 1 and is_quorum(best.supporters, best.certificate, 0.5)
        return (best.certificate,) if has_waited or (is_agreed and not self.swarm.has_unheard()) else ()

    def _prefers_path(self, path: Sequence[Certificate], other: Sequence[Certificate]) -> bool:
        """Whether `path` is the better of two that may both be adopted: the longer one if it continues the other, else
        the one that the Fork rule prefers; without a common ancestor the one with the later epoch."""
        shared = num_shared(path, other)
        have_same_start = path[0].plan.parent == other[0].plan.parent
        if shared in (len(other), len(path)) and have_same_start:
            return len(path) > len(other)
        ancestor = path[shared - 1] if shared else self.chain.get(path[0].plan.parent)
        if ancestor is None or (not shared and not have_same_start):
            return path[-1].plan.epoch > other[-1].plan.epoch
        return self._prefers_theirs(Fork(ancestor, tuple(other[shared:]), tuple(path[shared:])))

    def _prefers_theirs(self, fork: Fork) -> bool:
        return prefers_theirs(fork, lambda peer_id: peer_id == self.me or self.swarm.is_here(peer_id))
