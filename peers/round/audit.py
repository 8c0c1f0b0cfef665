"""Who looks at whose sums, and what that proves: an owner that reduces its share falsely, but equally to all.

Nobody else has seen what an owner added up. So each member, in secret, picks shares of others with some probability
and names them with its vote, when every owner has sent its sums and can take nothing back. Before anything is committed
all members then send what they contributed to such a share once more, to everybody, and everybody reduces it again
(peers/round/audit_exchange.py).

What a member sends now it must have sent then: with its vote each says the digest of what it contributed to every
share, and each owner the digest of what it took from every member. Where the two agree, whoever sends something else
to those who look is the culprit; where they do not, one of the two is, and who is in such quarrels again and again is
left out.

The leader can keep nothing quiet: who asked for an audit and is sent a commit without one leaves that leader. It
decides by what it finds itself; who calls sums false that are not is left out too.

What it does not show. An owner's own contribution is what it says it is, within its announced norm, so it can bend its
share as far as it could have by contributing. With a lossy codec sums may differ by as much as the codec can lose and
carry over: for int4 more than the sum itself, so that flipped signs show and a share left out does not; with topk
nothing would show, and it is refused.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping

from peers.round.messages import Group, Vote


def demanded(group: Group, me: int, probability: float, chance: random.Random) -> tuple[int, ...]:
    """Whose sums this member wants looked at, such that each owner's are with this probability.

    By anybody: `probability` is what all other members' demands come to together.
    """
    others = [rank for rank in group.ranks if rank != me]
    if not probability or not others:
        return ()
    each = 1 - (1 - probability) ** (1 / len(others))
    return tuple(rank for rank in others if chance.random() < each)


def most_audited(probability: float, num_members: int) -> int:
    """How many shares of one attempt are looked at. Twice what is to be expected: nobody makes rounds cost what it
    likes by asking for more."""
    return min(num_members, 1 + math.ceil(2 * probability * num_members)) if probability else 0


def owners_to_audit(
    group: Group, wanted: Iterable[int], suspected: Iterable[int], probability: float
) -> tuple[int, ...]:
    """World ranks, ascending: those suspected, and of the others that were asked for as many as there is room for."""
    first = {rank for rank in suspected if rank in group.ranks}
    # In an order that nobody who asks can know before: the attempt's id.
    drawn = sorted(
        {rank for rank in wanted if rank in group.ranks} - first,
        key=lambda rank: hashlib.sha256(f"{group.attempt} {rank}".encode()).digest(),
    )
    most = most_audited(probability, len(group.ranks))
    return tuple(sorted([*sorted(first), *drawn][:most]))


def contradictions(group: Group, votes: Mapping[int, Vote], owners: Iterable[int]) -> set[tuple[int, int]]:
    """(member, owner): they do not agree on what the one has contributed to the other's share."""
    place = {rank: index for index, rank in enumerate(group.ranks)}
    found = set()
    for owner in owners:
        for member in group.ranks:
            sent = votes[member].sent[place[owner] : place[owner] + 1]
            received = votes[owner].received[place[member] : place[member] + 1]
            if not sent or sent != received:
                found.add((member, owner))
    return found
