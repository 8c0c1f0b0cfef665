"""How a round's leader judges what members say: whose bits differ, whom to leave out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from peers.round.messages import Group, Vote


def disputes(group: Group, votes: Mapping[int, Vote]) -> set[tuple[int, int]]:
    """(voter, owner): the voter has got other bytes of the owner's share than most, or says so."""
    found = set()
    for index, owner in enumerate(group.ranks):
        digests = {rank: votes[rank].shares[index : index + 1] for rank in sorted(votes)}
        usual, _ = Counter(digests.values()).most_common(1)[0]
        found |= {(voter, owner) for voter, digest in digests.items() if digest != usual}
    return found


def dissenters(group: Group, votes: Mapping[int, Vote]) -> set[int]:
    """World ranks whose bits differ, and who must fetch the state of the others.

    An owner that sent different bytes to different members is named by the digests of its share; a voter that names
    several owners names itself. Where all shares are equal the fault lies in a member's own anchor or momentum: the
    minority, and of two members the higher rank.
    """
    outcomes = Counter((vote.shares, vote.anchor, vote.momentum) for vote in votes.values())
    if len(outcomes) == 1:
        return set()
    named = disputes(group, votes)
    if named and len(group.ranks) > 2:
        loud = {voter for voter, times in Counter(voter for voter, _ in named).items() if times > 1}
        return loud or {owner for _, owner in named}
    first = min(votes)
    agreed = max(
        outcomes,
        key=lambda o: (outcomes[o], o == (votes[first].shares, votes[first].anchor, votes[first].momentum)),
    )
    return {rank for rank, vote in votes.items() if (vote.shares, vote.anchor, vote.momentum) != agreed}


class Blame:
    """Whom to leave out after failures that no death explains, where accusers may be the culprits themselves."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._involved: Counter[int] = Counter()
        self._accused: Counter[int] = Counter()

    def failed(self, accuser: int, suspects: Iterable[int], told_by: Iterable[int] = ()) -> None:
        """One member could not do its part, and says whose fault that was, if it knows; or has been told by others,
        who are part of it then."""
        others = set(suspects) - {accuser}
        self._accused.update(others)
        others |= set(told_by) - {accuser}
        # What this peer has seen itself does not speak against it, however often it has to say so.
        self._involved.update(others if accuser == self._me and others else {accuser, *others})

    def guilty(self, ranks: Iterable[int]) -> set[int]:
        """At most one: whoever was part of the most failures, from the second on.

        Of two that were in the same ones the accused goes first, since it mostly is at fault. An accuser that lies
        goes next: so it costs the others one member at most. Rather anybody than this peer.
        """
        often = [rank for rank in ranks if self._involved[rank] > 1]
        if not often:
            return set()
        return {max(often, key=lambda r: (self._involved[r], r != self._me, self._accused[r]))}
