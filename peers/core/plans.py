"""What the plan of a commit must be. The leader makes it; every member recomputes it and compares.

Roster: contributors that are not on it are added, with the world rank that they claim if that is free, else the lowest
free one. Members are removed with their last commit, if they left, or if they are gone and missed `ABSENT_COMMITS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from peers.core.settings import Settings
from peers.protocol.aggregation import LEAST_ROBUST_GROUP
from peers.protocol.certificates import Certificate, Contributor, Member, Plan, Work
from peers.protocol.limits import MAX_COUNT
from peers.protocol.messages import Status

ABSENT_COMMITS = 3
"""A member that is gone and has missed this many commits in a row is removed from the roster by the next one."""
SPARE_BLOCKS = 64
"""Data blocks that a plan may hand out beyond those that a member can account for: for newcomers it has not met."""
MAX_CLAIMED_RANK = 1023
"""A peer that claims a higher world rank is given another: an epoch hands out one data block per rank up to the
highest."""


@dataclass(frozen=True)
class Entry:
    """One peer's work, and the world rank it claims (-1: none)."""

    claimed_rank: int
    work: Work


def plan_of(
    parent: Certificate,
    attempt: int,
    entries: Mapping[str, Entry],
    *,
    off: Collection[str],
    data_width: int,
    settings: Settings,
) -> Plan:
    """The plan by which these peers commit. `off`: roster members to remove, besides those whose last commit it is.
    `data_width`: data blocks that the epoch hands out, at least one for every rank in the plan."""
    before, epoch = parent.plan, parent.plan.epoch + 1
    ranks = _ranks_of(before.roster, entries)
    order = sorted(entries, key=lambda peer_id: ranks[peer_id])
    works = [entries[peer_id].work for peer_id in order]
    lengths_before = None
    if len(works) < LEAST_ROBUST_GROUP <= len(before.roster):
        lengths = settings.aggregation.lengths_in(before, settings.num_fragments)
        lengths_before = [lengths.get(peer_id, 0.0) for peer_id in order]
    weights = settings.aggregation.weights_of(
        works, epoch, settings.num_fragments, lengths_before=lengths_before
    )
    kept = {
        peer_id
        for peer_id in ranks
        if peer_id not in off and not (peer_id in entries and entries[peer_id].work.last)
    }
    members = kept or set(ranks)
    tokens = sum(work.tokens for work in works) // settings.num_fragments
    return Plan(
        manifest=settings.manifest,
        parent=parent.head,
        epoch=epoch,
        fragment=settings.fragment_of(before.epoch),
        attempt=attempt,
        contributors=tuple(
            Contributor(peer_id=peer_id, world_rank=ranks[peer_id], work=work, weight=weight)
            for peer_id, work, weight in zip(order, works, weights, strict=True)
        ),
        roster=tuple(
            Member(peer_id=peer_id, world_rank=ranks[peer_id])
            for peer_id in sorted(members, key=lambda peer_id: ranks[peer_id])
        ),
        data_base=data_base_after(before, max(data_width, 1 + max(ranks.values())), settings),
        tokens=min(MAX_COUNT, before.tokens + tokens),
    )


def data_base_after(before: Plan, num_blocks: int, settings: Settings) -> int:
    """The first sample that is left for later epochs if the one after `before` hands out so many blocks."""
    return min(MAX_COUNT, before.data_base + num_blocks * settings.samples_per_block)


def _ranks_of(roster: Sequence[Member], entries: Mapping[str, Entry]) -> dict[str, int]:
    ranks = {member.peer_id: member.world_rank for member in roster}
    taken = set(ranks.values())
    for peer_id in sorted(entries.keys() - ranks.keys()):
        claimed = entries[peer_id].claimed_rank
        rank = claimed if is_free(claimed, taken) else lowest_free(taken)
        ranks[peer_id] = rank
        taken.add(rank)
    return ranks


def is_free(claimed: int, taken: Collection[int]) -> bool:
    """Whether a peer may have this world rank."""
    return 0 <= claimed <= MAX_CLAIMED_RANK and claimed not in taken


def lowest_free(taken: Collection[int]) -> int:
    return next(rank for rank in range(len(taken) + 1) if rank not in taken)


def claim_of(me: str, roster: Mapping[str, int], live: Iterable[tuple[str, Status]]) -> int:
    """The world rank that a peer without one claims: one that is free, as far as it can see.

    Other peers without a rank are about to claim one too: the free ranks go to them in the order of their peer ids.
    """
    claimed = {peer_id: status.world_rank for peer_id, status in live if peer_id not in roster}
    num_before_me = sum(rank < 0 and peer_id < me for peer_id, rank in claimed.items())
    taken = {*roster.values(), *claimed.values()}
    free = (rank for rank in range(MAX_CLAIMED_RANK) if rank not in taken)
    return next(islice(free, num_before_me, None), MAX_CLAIMED_RANK)


def fault_in(
    plan: Plan,
    parent: Certificate,
    *,
    off_allowed: Collection[str],
    data_width: int,
    settings: Settings,
) -> str:
    """Why a member declines this plan; empty: it is acceptable.

    `off_allowed`: the members that this peer would remove itself. `data_width`: the blocks that it would hand out. A
    newcomer's world rank may be any free one: a newcomer can claim a different rank towards each member.
    """
    before = parent.plan.roster_set
    peer_ids = [contributor.peer_id for contributor in plan.contributors]
    if not peer_ids or len(set(peer_ids)) != len(peer_ids):
        return "a group without members, or with one of them twice"
    if len(peer_ids) < settings.aggregation.least_group:
        return f"a group of {len(peer_ids)}; {settings.aggregation.rule} needs {settings.aggregation.least_group}"
    entries = {c.peer_id: Entry(c.world_rank, c.work) for c in plan.contributors}
    if any(entry.work.based_on > parent.plan.epoch for entry in entries.values()):
        return "work of an epoch that is yet to come"
    leaving = {peer_id for peer_id, entry in entries.items() if entry.work.last}
    everybody = before | set(peer_ids)
    # If nobody is left after this commit, its plan keeps everybody: a roster is never empty.
    remaining = set() if leaving and plan.roster_set == everybody else plan.roster_set
    off = everybody - remaining - leaving
    if not off <= set(off_allowed):
        return f"to remove members that are not gone: {', '.join(sorted(off - set(off_allowed)))}"
    # Rounded up for the last block before MAX_COUNT; any other part of a block makes the plan differ from `wanted`.
    width = -(-(plan.data_base - parent.plan.data_base) // settings.samples_per_block)
    most = 2 * data_width + SPARE_BLOCKS
    if width > most:
        return f"to hand out {width} blocks of data, where at most {most} are allowed"
    wanted = plan_of(parent, plan.attempt, entries, off=off, data_width=width, settings=settings)
    if wanted != plan:
        return "weights, ranks, a roster or counts that do not follow from these contributions"
    return ""


def is_quorum(present: Collection[str], parent: Certificate, quorum: float) -> bool:
    """Whether more than this share of the parent's roster is present."""
    roster = parent.plan.roster_set
    return len(roster.intersection(present)) > quorum * len(roster)


def fault_of_successor(certificate: Certificate, parent: Certificate, settings: Settings) -> str:
    """Why a certificate cannot follow `parent` by the rules, whoever has signed it; empty: it can."""
    plan = certificate.plan
    everybody = parent.plan.roster_set | {contributor.peer_id for contributor in plan.contributors}
    if plan.parent != parent.head or certificate.is_genesis:
        return "does not follow it"
    return fault_in(
        plan,
        parent,
        off_allowed=everybody,
        data_width=MAX_CLAIMED_RANK,
        settings=settings,
    )
