"""Which head a newcomer goes to. It has no chain of its own to compare others with.

It goes to the run that most live peers are in. Where chains of that run part, to the side that a majority has signed
and most of it has not left, else to the one that the Fork rule prefers. Of heads that follow each other, to the last
that is backed (`num_backed`), so that a member that made commits with strangers alone cannot lead newcomers to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from peers.core.chain import Chain, Fork, last_signed_at, last_votes, num_shared, prefers_theirs
from peers.protocol.certificates import Certificate

Heads = dict[str, list[str]]
"""By announced head, the live peers that announce it."""


class Best(NamedTuple):
    certificate: Certificate
    supporters: set[str]
    """The peers at its head, or at a head that follows it."""


def best_head(chain: Chain, heads: Heads, me: str, *, fetched: Certificate | None) -> Best | None:
    """The best announced head whose certificates have arrived. `fetched`: certificate of the state being fetched."""
    return best_in(runs(chain, heads, fetched)[0], chain, heads, me)


def runs(chain: Chain, heads: Heads, fetched: Certificate | None = None) -> list[Heads]:
    """The announced heads by run, the largest run first."""
    paths = {head: chain.path_back(head) for head in heads}
    # Paths that share a certificate begin with the same one. While a state is fetched, heads without known certificates
    # count for its run: otherwise two runs that commit in turn would take turns in seeming larger.
    fetched_run = next(iter(chain.path_back(fetched.head)), fetched).head if fetched is not None else ""
    found: dict[str, list[str]] = {}
    for head, path in paths.items():
        found.setdefault(path[0].head if path else fetched_run or head, []).append(head)

    def rank(first: str) -> tuple[int, bool, int, int, str]:
        num_holders = sum(len(heads[head]) for head in found[first])
        plans = [paths[head][-1].plan for head in found[first] if paths[head]]
        num_signers, epoch = max(((len(plan.signers), plan.epoch) for plan in plans), default=(0, 0))
        # A fetch that has begun is not given up for a run that is no larger.
        return num_holders, first == fetched_run, num_signers, epoch, first

    return [{head: heads[head] for head in found[first]} for first in sorted(found, key=rank, reverse=True)]


def best_in(run: Heads, chain: Chain, heads: Heads, me: str) -> Best | None:
    """The best head of one run; None if none of its certificates has arrived. `heads`: the heads of all runs."""
    best: Sequence[Certificate] = ()
    live = {me, *(peer_id for holders in heads.values() for peer_id in holders)}
    for head in run:
        best = _better_backed(best, chain.path_back(head), live)
    if not best:
        return None
    announced = [place for place, certificate in enumerate(best) if certificate.head in run]
    end = num_backed(best, announced[0], run, me)
    newest = max(place for place in announced if place < end)
    supporters = {p for place in announced if place >= newest for p in run[best[place].head]}
    return Best(best[newest], supporters)


def _better_backed(
    path: Sequence[Certificate], other: Sequence[Certificate], live: Collection[str]
) -> Sequence[Certificate]:
    """The better of two paths that begin alike: the longer one if it continues the other, else the one whose side a
    majority of the last common roster has signed, else the one that the Fork rule prefers."""
    shared = num_shared(path, other)
    ours, theirs = tuple(path[shared:]), tuple(other[shared:])
    if not ours or not theirs:
        return other if theirs else path
    ancestor = path[shared - 1]
    ours_has_it, theirs_has_it = (
        has_majority(Fork(ancestor, one, two), live) for one, two in ((ours, theirs), (theirs, ours))
    )
    if ours_has_it != theirs_has_it:
        return other if theirs_has_it else path
    return other if prefers_theirs(Fork(ancestor, ours, theirs), live.__contains__) else path


def has_majority(fork: Fork, live: Collection[str]) -> bool:
    """Whether a majority of the common roster, as far as it is live, has signed on our side, and no more than half of
    those have signed on theirs later. One peer alone is none: it may be all that is left of an old roster."""
    roster = fork.ancestor.plan.roster_set.intersection(live)
    ours, theirs = last_votes(fork.ours), last_votes(fork.theirs)
    supporters = roster & ours.keys()
    num_left = sum(theirs.get(peer_id, ours[peer_id]) > ours[peer_id] for peer_id in supporters)
    return 2 * len(supporters) > len(roster) and len(supporters) > 1 and 2 * num_left <= len(supporters)


def num_backed(
    path: Sequence[Certificate], start: int, holders: Mapping[str, Collection[str]], me: str
) -> int:
    """How many certificates of `path` are backed: all up to place `start`, then each one as long as enough members of
    its parent's roster have signed it or one that follows it. Enough is a majority, or at least as many as the members,
    former ones too, that are at a head before it. This peer counts among the latter if it is on that roster and has not
    signed. `holders`: by head, the peers that are there.
    """
    last_signed, members, behind = last_signed_at(path), set[str](), set[str]()
    for place, (before, _) in enumerate(pairwise(path), start=1):
        roster = before.plan.roster_set
        members |= roster
        behind.update(holders.get(before.head, ()))
        supporters = {peer_id for peer_id in roster if last_signed.get(peer_id, -1) >= place}
        # If no member of the roster has signed, the whole roster may be gone: then former members do not count either.
        stayed = (members if supporters else roster).intersection(behind) | (roster & {me} - supporters)
        if place > start and 2 * len(supporters) <= len(roster) and len(supporters) < len(stayed):
            return place
    return len(path)
