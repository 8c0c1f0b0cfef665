"""The certificates that this peer knows, the chain that it is on, and the rule which of two chains counts.

Which chain (rule 3 of the design). Where two chains part, every member of the roster they share counts once, for the
chain on which it signed last (by epoch, then attempt). The chain with more members wins, then the one whose first
certificate after the split has the smaller hash. Not tokens, not length, not who says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peers.protocol.certificates import Certificate
from peers.protocol.limits import MAX_CERTIFICATES_BYTES

MAX_OWN = 256
"""Certificates of its own chain that a peer keeps: who was away for longer is a newcomer."""
MAX_OTHERS = 1024
MAX_OTHERS_BYTES = 32 << 20
"""Certificates of other chains, of which the oldest give way."""


@dataclass(frozen=True)
class Fork:
    """Two ways from one certificate."""

    ancestor: Certificate
    ours: tuple[Certificate, ...]
    theirs: tuple[Certificate, ...]


class Chain:
    """Certificates come in verified: each is signed by all whom it names."""

    def __init__(self) -> None:
        self._own: dict[str, Certificate] = {}
        self._others: dict[str, Certificate] = {}
        self._others_bytes = 0
        self.head = ""

    @property
    def newest(self) -> Certificate:
        """That of the head."""
        return self._own[self.head]

    @property
    def epoch(self) -> int:
        return self.newest.plan.epoch if self.head else 0

    def get(self, head: str) -> Certificate | None:
        return self._own.get(head) or self._others.get(head)

    def is_on_own_chain(self, head: str) -> bool:
        """This peer's chain leads over this head, or to it."""
        return head in self._own

    def add(self, certificate: Certificate) -> None:
        head = certificate.head
        if head in self._own or head in self._others:
            return
        self._others[head] = certificate
        self._others_bytes += certificate.num_bytes
        while len(self._others) > MAX_OTHERS or self._others_bytes > MAX_OTHERS_BYTES:
            self.forget(next(iter(self._others)))

    def forget(self, head: str) -> None:
        """A certificate of another chain."""
        if (certificate := self._others.pop(head, None)) is not None:
            self._others_bytes -= certificate.num_bytes

    def genesis_of(self, founder: str) -> Certificate | None:
        """One that this founder has signed, where this peer has not begun from any."""
        return next((c for c in self._others.values() if c.is_genesis and founder in c.plan.signers), None)

    def knows_commits(self) -> bool:
        """Whether any certificate of another chain is here but geneses."""
        return any(not certificate.is_genesis for certificate in self._others.values())

    def recent_heads(self, count: int) -> frozenset[str]:
        """The last so many heads of the own chain before this one."""
        return frozenset(list(self._own)[-1 - count : -1])

    def path_back(self, head: str) -> list[Certificate]:
        """What is known of the way to `head`, oldest first, down to where it meets the own chain (exclusive)."""
        path: list[Certificate] = []
        while head not in self._own and (certificate := self._others.get(head)) is not None:
            path.append(certificate)
            head = certificate.plan.parent
            if certificate.is_genesis:
                break
        return path[::-1]

    def fork_to(self, head: str) -> Fork | None:
        """How the way to `head` parts from this peer's own; None where their common past is not known.

        Where `head` lies on the own way, theirs is empty.
        """
        theirs = self.path_back(head)
        ancestor = self._own.get(theirs[0].plan.parent if theirs else head)
        if ancestor is None:
            return None
        own = list(self._own)
        ours = own[own.index(ancestor.head) + 1 :]
        return Fork(ancestor, tuple(self._own[head] for head in ours), tuple(theirs))

    def leading_to(self, head: str, have: str, most: int) -> list[Certificate]:
        """Up to `most` certificates that end in `head`, oldest first, not back beyond `have`."""
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
        """Whether this head is known to come after the earlier one, on whichever chain."""
        for _ in range(MAX_OWN):
            certificate = self.get(head)
            if certificate is None or certificate.is_genesis:
                return False
            head = certificate.plan.parent
            if head == earlier:
                return True
        return False

    def move_to(self, path: Sequence[Certificate]) -> None:
        """Make the end of `path` the head. What of the own chain is not on the way becomes another chain's."""
        parent, left = path[0].plan.parent, list[Certificate]()
        is_linked = parent in self._own
        while self._own and not (is_linked and self.head == parent):
            last = self._own.pop(self.head if is_linked else next(reversed(self._own)))
            left.append(last)
            self.head = last.plan.parent
        for certificate in path:
            self.forget(certificate.head)
            self._own[certificate.head] = certificate
        self.head = path[-1].head
        for certificate in reversed(left):
            self.add(certificate)
        while len(self._own) > MAX_OWN:
            del self._own[next(iter(self._own))]

    def num_absent(self, peer_id: str) -> int:
        """Commits in a row, up to the head, that this peer is not in."""
        count = 0
        for certificate in reversed(self._own.values()):
            if certificate.is_genesis or peer_id in certificate.plan.signer_set:
                break
            count += 1
        return count


def prefers_theirs(fork: Fork) -> bool:
    """Rule 3: whether the members of the shared roster count for their chain rather than for ours."""
    num_ours = num_theirs = 0
    for member in fork.ancestor.plan.roster:
        ours, theirs = (_signed_last(side, member.peer_id) for side in (fork.ours, fork.theirs))
        # Equal: it signed on neither, or two certificates of one head and attempt, which is proof of fault.
        num_ours += ours > theirs
        num_theirs += theirs > ours
    if num_ours != num_theirs:
        return num_theirs > num_ours
    return bool(fork.ours) and fork.theirs[0].head < fork.ours[0].head


def _signed_last(side: Sequence[Certificate], peer_id: str) -> tuple[int, int]:
    return max(
        ((c.plan.epoch, c.plan.attempt) for c in side if peer_id in c.plan.signers),
        default=(-1, -1),
    )


def adoptable_prefix(
    fork: Fork,
    *,
    me: str,
    has_worker: bool,
    may_object: Callable[[str, Certificate], bool],
    is_off_head: Callable[[str, str], bool],
    is_gone: Callable[[str], bool],
    is_sound: Callable[[Certificate, Certificate], bool],
) -> tuple[Certificate, ...]:
    """As much of their way, from its beginning, as may be adopted.

    A certificate must be signed by a majority of the roster before it. Fewer will do where no fewer have signed it than
    could object to it (`may_object`; this peer itself, if it has a worker), and where this peer has
    signed it, or its signers have not been on that head for so long (`is_off_head`) that this peer might go on without
    them. Where all of that roster `is_gone`, those who held its state may have gone on; so may they where this peer did
    so itself, and nobody of that roster stands there any more. `is_sound`: whether a certificate can follow another,
    whoever has signed it.
    """
    accepted: list[Certificate] = []
    before = fork.ancestor
    for certificate in fork.theirs:
        roster = {member.peer_id for member in before.plan.roster}
        plan_signers = set(certificate.plan.signers)
        signers = roster & plan_signers
        objectors = {p for p in roster - signers - {me} if may_object(p, certificate)}
        if has_worker and me in roster - signers and before is fork.ancestor and not fork.ours:
            objectors.add(me)
        is_majority = 2 * len(signers) > len(roster)
        is_due = me in plan_signers or all(is_off_head(p, before.head) for p in signers or plan_signers)
        may_go_on = len(signers) >= len(objectors) and is_due
        # Those who held its state may go on without all of its roster; of two who did so apart, one gives way.
        are_all_gone = all(map(is_gone, roster)) or (bool(fork.ours) and not objectors)
        is_heirs = before is fork.ancestor and me not in roster and are_all_gone
        if not (is_majority or (may_go_on and (signers or is_heirs))) or not is_sound(certificate, before):
            break
        accepted.append(certificate)
        before = certificate
    return tuple(accepted)
