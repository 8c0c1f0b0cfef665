"""The certificates that this peer knows, the chain that it is on, and the two tests that other chains have to pass.

Eligibility (`adoptable_prefix`): how much of another chain has enough signatures behind it to be adopted at all.

Preference (`prefers_theirs`), the Fork rule, a fork choice by votes. Where two chains part, every peer counts once, for
the chain on which it signed last (`last_votes`), if it is here, and is on the roster that the chains share or was taken
in since, on either chain (`_taken_in`). The chain with more of them wins. On a tie, all members of the shared roster
count, also those that are gone; on another tie, the chain whose first certificate after the split has the smaller hash
wins. Tokens and length do not count. Peers that are gone do not count at first, since those that come together later
have not all heard them, and some may never have existed. Of three chains, each may win over the next.

The chain that a peer is on by its announced head does not count either: signatures are the same for everybody, but what
a peer announces, and what others remember of where it was, is not. One liar, or one restart, could keep two sides apart
for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from peers.protocol.certificates import Certificate
from peers.protocol.limits import MAX_CERTIFICATES_BYTES

MAX_OWN = 256
"""Certificates of its own chain that a peer keeps. A peer that was away for longer rejoins as a newcomer."""
RECENT_COMMITS = 16
"""How many of the newest commits `Chain.is_faultless` covers."""
MAX_FORMER_MEMBERS = 4096
_NO_VOTE = (-1, -1)
MAX_OTHERS = 1024
MAX_OTHERS_BYTES = 32 << 20
"""Certificates of other chains that a peer keeps; beyond these limits the oldest are dropped."""


@dataclass(frozen=True)
class Fork:
    """Two sequences of certificates that follow one ancestor: this peer's (`ours`) and another one (`theirs`).

    `ours` is empty where this peer is merely behind, `theirs` where it would roll back to the ancestor.
    """

    ancestor: Certificate
    ours: tuple[Certificate, ...]
    theirs: tuple[Certificate, ...]


class Chain:
    """Certificates are added only after their signatures were verified."""

    def __init__(self) -> None:
        self._own: dict[str, Certificate] = {}
        self._others: dict[str, Certificate] = {}
        self._others_bytes = 0
        self.head = ""
        self.former_members: dict[str, None] = {}
        """Peers that were ever on its rosters, even before the oldest certificate kept; a set in order of time."""
        self.is_faultless = True
        """Each of the last RECENT_COMMITS commits succeeded at the first attempt, signed by every member that stayed on
        the roster, and this peer holds all of them, or all since the genesis."""

    @property
    def newest(self) -> Certificate:
        """The certificate of the head."""
        return self._own[self.head]

    @property
    def epoch(self) -> int:
        return self.newest.plan.epoch if self.head else 0

    @property
    def head_before(self) -> str:
        """The head before the oldest known certificate of this peer's chain; empty if that one is the genesis, or if no
        more certificates are kept."""
        oldest = next(iter(self._own.values()), None)
        return "" if oldest is None or oldest.is_genesis or len(self._own) >= MAX_OWN else oldest.plan.parent

    @property
    def genesis(self) -> str:
        """Head of the genesis of this peer's chain; empty if the chain is not known from its genesis on."""
        oldest = next(iter(self._own.values()), None)
        return oldest.head if oldest is not None and oldest.is_genesis else ""

    def met(self, roster: Collection[str]) -> None:
        """Record these peers as members of this chain, or of the run whose state it started from."""
        self.former_members |= dict.fromkeys(roster)
        while len(self.former_members) > MAX_FORMER_MEMBERS:
            del self.former_members[next(iter(self.former_members))]

    def get(self, head: str) -> Certificate | None:
        return self._own.get(head) or self._others.get(head)

    def is_on_own_chain(self, head: str) -> bool:
        """Whether this head is on this peer's chain, its newest included."""
        return head in self._own

    def add(self, certificate: Certificate) -> None:
        head = certificate.head
        if head in self._own or head in self._others:
            return
        self._others[head] = certificate
        self._others_bytes += certificate.num_bytes
        self._learn_past()
        while len(self._others) > MAX_OTHERS or self._others_bytes > MAX_OTHERS_BYTES:
            self.forget(next(iter(self._others)))

    def forget(self, head: str) -> None:
        """Drop a certificate of another chain."""
        if (certificate := self._others.pop(head, None)) is not None:
            self._others_bytes -= certificate.num_bytes

    def _learn_past(self) -> None:
        """Move known certificates that lead up to the oldest of this peer's own chain from `_others` to its front."""
        past: list[Certificate] = []
        head = self.head_before
        while (certificate := self._others.get(head)) is not None and len(self._own) + len(past) < MAX_OWN:
            past.append(certificate)
            self.forget(head)
            head = "" if certificate.is_genesis else certificate.plan.parent
        if past:
            self._own = {certificate.head: certificate for certificate in reversed(past)} | self._own

    def genesis_of(self, founder: str) -> Certificate | None:
        """A genesis that this founder has signed, and that is not on this peer's chain."""
        return next((c for c in self._others.values() if c.is_genesis and founder in c.plan.signers), None)

    def knows_a_run(self) -> bool:
        """Whether any certificate is known, of any chain."""
        return bool(self._own or self._others)

    def knows_commits(self) -> bool:
        """Whether any certificate of another chain, other than a genesis, is known."""
        return any(not certificate.is_genesis for certificate in self._others.values())

    def recent_heads(self, count: int) -> frozenset[str]:
        """The last `count` heads of this peer's chain before the newest."""
        return frozenset(list(self._own)[-1 - count : -1])

    def path_back(self, head: str) -> list[Certificate]:
        """The known certificates that lead to `head`, oldest first, without those of this peer's chain."""
        path: list[Certificate] = []
        while head not in self._own and (certificate := self._others.get(head)) is not None:
            path.append(certificate)
            head = certificate.plan.parent
            if certificate.is_genesis:
                break
        return path[::-1]

    def fork_to(self, head: str) -> Fork | None:
        """Where the chain of `head` parts from this peer's chain; None if no common ancestor is known.

        If `head` is on this peer's chain, `theirs` is empty.
        """
        theirs = self.path_back(head)
        ancestor = self._own.get(theirs[0].plan.parent if theirs else head)
        if ancestor is None:
            return None
        own_heads = list(self._own)
        ours = own_heads[own_heads.index(ancestor.head) + 1 :]
        return Fork(ancestor, tuple(self._own[own_head] for own_head in ours), tuple(theirs))

    def leading_to(self, head: str, have: str, most: int) -> list[Certificate]:
        """Up to `most` certificates that end in `head`, oldest first, none of them older than the one after `have`."""
        path: list[Certificate] = []
        num_bytes = 0
        while len(path) < most and head != have and (certificate := self.get(head)) is not None:
            num_bytes += certificate.num_bytes
            if path and num_bytes > MAX_CERTIFICATES_BYTES:
                break
            path.append(certificate)
            head = certificate.plan.parent
        return path[::-1]

    def follows(self, head: str, earlier: str) -> bool:
        """Whether `head` is known to be a descendant of `earlier`, on any chain."""
        for _ in range(MAX_OWN):
            certificate = self.get(head)
            if certificate is None or certificate.is_genesis:
                return False
            head = certificate.plan.parent
            if head == earlier:
                return True
        return False

    def move_to(self, path: Sequence[Certificate]) -> None:
        """Make the end of `path` the head. Own certificates that `path` does not follow become another chain's."""
        parent, removed = path[0].plan.parent, list[Certificate]()
        is_linked = parent in self._own
        while self._own and not (is_linked and self.head == parent):
            last = self._own.pop(self.head if is_linked else next(reversed(self._own)))
            removed.append(last)
            self.head = last.plan.parent
        for certificate in path:
            self.forget(certificate.head)
            self._own[certificate.head] = certificate
            self.met(certificate.plan.roster_set)
        self.head = path[-1].head
        for certificate in reversed(removed):
            self.add(certificate)
        while len(self._own) > MAX_OWN:
            del self._own[next(iter(self._own))]
        self.is_faultless = _are_faultless(list(self._own.values())[-1 - RECENT_COMMITS :])

    def num_absent(self, peer_id: str) -> int:
        """How many of the newest commits in a row this peer did not contribute to."""
        count = 0
        for certificate in reversed(self._own.values()):
            if certificate.is_genesis or peer_id in certificate.plan.signer_set:
                break
            count += 1
        return count


def prefers_theirs(fork: Fork, is_here: Callable[[str], bool]) -> bool:
    """The Fork rule: whether their chain wins over ours. `is_here`: whether a peer has been heard, and is not gone.

    Without those taken in since, a peer that once had the roster to itself could rewrite all that came later.
    diloco/sim/truth.py has the rule a second time, for the invariants. Its consequences: docs/how-it-works.md,
    security.md.
    """
    our_votes, their_votes = last_votes(fork.ours), last_votes(fork.theirs)
    shared = fork.ancestor.plan.roster_set
    taken_in = _taken_in(fork.ancestor, fork.ours, set(filter(is_here, their_votes)))
    taken_in |= _taken_in(fork.ancestor, fork.theirs, set(filter(is_here, our_votes)))
    for voters in filter(is_here, shared | taken_in), shared:
        lead = 0
        for peer_id in voters:
            ours, theirs = our_votes.get(peer_id, _NO_VOTE), their_votes.get(peer_id, _NO_VOTE)
            # A member counts for neither side if it signed on neither, or if both its last votes are alike, which those
            # of an honest peer never are.
            lead += (theirs > ours) - (ours > theirs)
        if lead:
            return lead > 0
    return fork.theirs[0].head < fork.ours[0].head


def _taken_in(
    ancestor: Certificate, side: Sequence[Certificate], signed_elsewhere: Collection[str]
) -> set[str]:
    """The peers on the rosters of this side's certificates, up to the first one that no majority of the roster before
    it has signed, and that fewer members of it have signed than have not but are here and have signed something on the
    other side (`signed_elsewhere`). One member that signs a made-up chain later cannot undo what another one did when
    it was all that was left."""
    found = set[str]()
    for before, certificate in pairwise((ancestor, *side)):
        roster = before.plan.roster_set
        signers = roster & certificate.plan.signer_set
        if 2 * len(signers) <= len(roster) and len((roster - signers).intersection(signed_elsewhere)) > len(
            signers
        ):
            break
        found |= certificate.plan.roster_set
    return found


def last_votes(side: Sequence[Certificate]) -> dict[str, tuple[int, int]]:
    """By signer, when it signed this side last: (moves, attempt). An honest peer's only grow; a faulty one may order
    its own signatures as it likes. An epoch would not do: who gives up a longer chain signs at earlier epochs from then
    on."""
    votes: dict[str, tuple[int, int]] = {}
    for certificate in side:
        for contributor in certificate.plan.contributors:
            vote = contributor.work.moves, certificate.plan.attempt
            votes[contributor.peer_id] = max(votes.get(contributor.peer_id, _NO_VOTE), vote)
    return votes


def adoptable_prefix(
    fork: Fork,
    *,
    me: str,
    has_worker: bool,
    was_heard: Callable[[str], bool],
    may_object: Callable[[str, Certificate], bool],
    is_off_head: Callable[[str, str], bool],
    is_gone: Callable[[str], bool],
    is_sound: Callable[[Certificate, Certificate], bool],
) -> tuple[Certificate, ...]:
    """The longest prefix of `fork.theirs` that this peer may adopt.

    Each certificate must follow its parent by the rules, whoever signed it (`is_sound`), and a majority of the parent's
    roster must have signed it or a certificate that follows it. That is no majority if two or more members object, and
    more than those of the signers that were ever heard (`was_heard`): who has a roster to itself can put made-up peers
    on it. A minority is enough if

    - no more members object than have signed this very certificate and were ever heard. Members object that have not
      signed, are neither gone nor left out, and are still at the parent or on another chain from there (`may_object`),
      and this peer, if it is such a member and has a worker;
    - this peer has signed it, or its signers have been off the parent's head for so long (`is_off_head`) that this peer
      could have committed without them;
    - at least one member, of this roster or of the last common one, has signed it or a certificate that follows it,
      which the Fork rule counts as well. None is needed if the whole roster is gone (`is_gone`) and this peer was not
      in it: then peers outside the roster may continue from its state. It also counts as gone if this peer continued
      from there, too (`ours`), and no member objects: one of the two continuations has to give way.
    """
    accepted: list[Certificate] = []
    before = fork.ancestor
    last_signed = last_signed_at(fork.theirs)
    for place, certificate in enumerate(fork.theirs):
        roster = before.plan.roster_set
        all_signers = certificate.plan.signer_set
        signers = roster & all_signers
        objectors = {p for p in roster - signers - {me} if may_object(p, certificate)}
        if has_worker and me in roster - signers and before is fork.ancestor and not fork.ours:
            objectors.add(me)
        supporters = {p for p in roster if last_signed.get(p, -1) >= place}
        is_made_up = len(objectors) > max(1, sum(map(was_heard, supporters)))
        is_majority = 2 * len(supporters) > len(roster) and not is_made_up
        makers = signers or supporters or all_signers
        is_due = me in all_signers or all(is_off_head(peer_id, before.head) for peer_id in makers)
        gives_way = before is fork.ancestor and bool(fork.ours) and not objectors
        is_succession = me not in roster and (gives_way or all(map(is_gone, roster)))
        is_backed = sum(map(was_heard, signers)) >= len(objectors)
        is_spoken_for = any(last_signed.get(p, -1) >= place for p in roster | fork.ancestor.plan.roster_set)
        is_minority_enough = is_backed and is_due and (is_spoken_for or is_succession)
        if not (is_majority or is_minority_enough) or not is_sound(certificate, before):
            break
        accepted.append(certificate)
        before = certificate
    return tuple(accepted)


def last_signed_at(path: Sequence[Certificate]) -> dict[str, int]:
    """By signer, the place on the path of the last certificate that it has signed."""
    return {peer_id: place for place, commit in enumerate(path) for peer_id in commit.plan.signers}


def num_shared(path: Sequence[Certificate], other: Sequence[Certificate]) -> int:
    """How many certificates the two paths have in common at their beginning."""
    pairs = zip(path, other, strict=False)
    return next((n for n, (one, two) in enumerate(pairs) if one.head != two.head), min(len(path), len(other)))


def _are_faultless(recent: Sequence[Certificate]) -> bool:
    was_there = len(recent) > RECENT_COMMITS or recent[0].is_genesis
    return was_there and all(
        commit.plan.attempt == 0 and parent.plan.roster_set & commit.plan.roster_set <= commit.plan.signer_set
        for parent, commit in pairwise(recent)
    )
