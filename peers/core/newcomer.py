"""Which head a newcomer goes to, which has no chain of its own to compare others with.

It goes to the run that most live peers are in. Where chains of that run part, to the side that a majority has signed,
else to the one that the Fork rule prefers. Of heads that follow each other, to the last that is backed (`num_backed`):
a member that made commits with strangers leads nobody there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from peers.core.chain import Chain, Fork, last_signed_at, num_shared, prefers_theirs
from peers.protocol.certificates import Certificate

Heads = dict[str, list[str]]
"""By announced head, the live peers that announce it."""


class Best(NamedTuple):
    certificate: Certificate
    supporters: set[str]
    """Those who stand at its head, or at one after it."""


def best_head(chain: Chain, heads: Heads, me: str, *, fetched: Certificate | None) -> Best | None:
    """Of the announced heads whose certificates have arrived. `fetched`: that of the state that is being fetched."""
    paths = {head: chain.path_back(head) for head in heads}
    # Paths that share a certificate go back to the same one. While a state is fetched, heads of which nothing is known
    # yet are taken for later ones of its run: else of two runs now the one would seem larger, now the other.
    fetched_run = next(iter(chain.path_back(fetched.head)), fetched).head if fetched is not None else ""
    runs: dict[str, list[str]] = {}
    for head, path in paths.items():
        runs.setdefault(path[0].head if path else fetched_run or head, []).append(head)

    def rank(first: str) -> tuple[int, bool, int, int, str]:
        num_holders = sum(len(heads[head]) for head in runs[first])
        plans = [paths[head][-1].plan for head in runs[first] if paths[head]]
        num_signers, epoch = max(((len(plan.signers), plan.epoch) for plan in plans), default=(0, 0))
        # A fetch that has begun is not given up for a run that is no larger.
        return num_holders, first == fetched_run, num_signers, epoch, first

    best: Sequence[Certificate] = ()
    for head in runs[max(runs, key=rank)]:
        best = _better_backed(best, paths[head])
    if not best:
        return None
    announced = [place for place, certificate in enumerate(best) if certificate.head in heads]
    end = num_backed(best, announced[0], heads, me)
    newest = max(place for place in announced if place < end)
    supporters = {p for place in announced if place >= newest for p in heads[best[place].head]}
    return Best(best[newest], supporters)


def _better_backed(path: Sequence[Certificate], other: Sequence[Certificate]) -> Sequence[Certificate]:
    """Of two paths that begin alike: the longer one if it continues the other, else the one of which a majority of the
    roster before it has signed its side, else the one that the Fork rule prefers."""
    shared = num_shared(path, other)
    ours, theirs = tuple(path[shared:]), tuple(other[shared:])
    if not ours or not theirs:
        return other if theirs else path
    ancestor = path[shared - 1]
    ours_has_it, theirs_has_it = has_majority(ancestor, ours), has_majority(ancestor, theirs)
    if ours_has_it != theirs_has_it:
        return other if theirs_has_it else path
    return other if prefers_theirs(Fork(ancestor, ours, theirs)) else path


def has_majority(ancestor: Certificate, path: Sequence[Certificate]) -> bool:
    """Whether a majority of the ancestor's roster has signed on this path that follows it."""
    roster = ancestor.plan.roster_set
    return 2 * len(roster.intersection(last_signed_at(path))) > len(roster)


def num_backed(
    path: Sequence[Certificate], start: int, holders: Mapping[str, Collection[str]], me: str
) -> int:
    """How many certificates of `path` are backed: those up to and with the one at `start`, and each after it as long as
    a majority of the roster that the one before it names has signed it or one that follows it, or at least as many of
    that roster as there are members, former ones too, at a head before it. `holders`: by head, who stands there. This
    peer counts as standing before it if it is on that roster and has not signed.
    """
    last_signed, members, behind = last_signed_at(path), set[str](), set[str]()
    for place, (before, _) in enumerate(pairwise(path), start=1):
        roster = before.plan.roster_set
        members |= roster
        behind.update(holders.get(before.head, ()))
        supporters = {peer_id for peer_id in roster if last_signed.get(peer_id, -1) >= place}
        # After the whole roster has gone nobody of it has signed: then former members do not count either.
        stayed = (members if supporters else roster).intersection(behind) | (roster & {me} - supporters)
        if place > start and 2 * len(supporters) <= len(roster) and len(supporters) < len(stayed):
            return place
    return len(path)
