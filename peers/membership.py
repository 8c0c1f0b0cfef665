"""Who is in the swarm, as one peer sees it, and the decisions that follow from that view alone.

Everything here is a pure function of a view: the newest status of every peer this one has a live channel to.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Collection, Mapping

from peers.records import Announcement

View = Mapping[int, Announcement]
"""World rank -> newest status, of live peers only, this peer itself included."""

TRAINING_STATES = frozenset({"training", "averaging"})
"""States of a peer that counts for what the swarm has reached."""
EXPECTED_STATES = TRAINING_STATES | {"waiting"}
"""States of a peer that rounds on its lineage wait for: one that holds it and waits is about to train on it."""
MAX_DONORS = 8
"""More do not make a download quicker, and where many peers have to catch up each would ask all others."""


def after_commit(view: View, members: Collection[int], before: str, mine: Announcement) -> View:
    """The view with the last commit's members where that commit has brought them, whatever they have said since.

    Their own word may still be under way, and until then they must not be taken for peers of another lineage: whoever
    is quick would go on alone.
    """
    moved = {
        rank: dataclasses.replace(
            peer,
            lineage=mine.lineage,
            epoch=mine.epoch,
            committed_tokens=mine.committed_tokens,
            anchor_digest=mine.anchor_digest,
            led_by=mine.led_by,
        )
        for rank, peer in view.items()
        if rank in members and peer.lineage == before
    }
    return {**view, **moved}


def trainers_of(view: View, lineage: str) -> list[int]:
    """World ranks, ascending, that train on this lineage: those a round of it waits for."""
    return sorted(r for r, peer in view.items() if peer.state in EXPECTED_STATES and peer.lineage == lineage)


def is_lesser_side(here: Collection[int], lost: Collection[int]) -> bool:
    """Whether those who still hear each other are fewer than those lost (of halves, the one without the lowest rank).

    Most likely it is their own connections that broke then, and the others go on without them.
    """
    if len(here) != len(lost):
        return len(here) < len(lost)
    return bool(lost) and min(lost) < min(here)


def leader_of(view: View, lineage: str, ballot: int) -> int | None:
    """The ballot-th live trainer, wrapping; None where nobody trains."""
    trainers = trainers_of(view, lineage)
    return trainers[ballot % len(trainers)] if trainers else None


def led_by_most(view: View, lineage: str, me: int) -> int | None:
    """Whom most of the others that train on this lineage have followed to it, if that one is in the view."""
    followed = Counter(view[rank].led_by for rank in trainers_of(view, lineage) if rank != me)
    leader, count = max(followed.items(), key=lambda item: item[1], default=(-1, 0))
    return leader if leader in view and 2 * count > followed.total() else None


def preference(peer: Announcement) -> tuple[int, list[int]]:
    """Orders states: more committed tokens first, then the smaller lineage digest. Larger is better."""
    return peer.committed_tokens, [-ord(c) for c in peer.lineage]


def best_of(view: View) -> Announcement | None:
    """The trainer whose state all others should hold."""
    trainers = [peer for peer in view.values() if peer.state in TRAINING_STATES]
    return max(trainers, key=lambda peer: (preference(peer), -peer.world_rank), default=None)


def ahead_of(view: View, me: int) -> Announcement | None:
    """A peer whose state this one must adopt: it has missed a commit, or is on the losing side of a fork.

    Also one that leaves: after the run's last commit all others do, and nobody may make another one on its own.
    """
    holders = (peer for peer in view.values() if peer.state in TRAINING_STATES | {"leaving"})
    best = max(holders, key=lambda peer: (preference(peer), -peer.world_rank), default=None)
    mine = view.get(me)
    if best is None or mine is None or best.lineage == mine.lineage or preference(best) <= preference(mine):
        return None
    return best


def donors_of(view: View, lineage: str, me: int) -> list[str]:
    """Peer ids that hold the state of this lineage: a few, drawn anew by each who asks and for each lineage."""
    holders = {r: p.peer_id for r, p in view.items() if r != me and p.lineage == lineage and p.anchor_digest}
    drawn = sorted(holders, key=lambda r: hashlib.sha256(f"{me} {lineage} {r}".encode()).digest())
    return [holders[r] for r in sorted(drawn[:MAX_DONORS])]


def data_width_of(view: View, members: tuple[int, ...]) -> int:
    """Data blocks the running epoch has handed out: one for every world rank that may have trained in it."""
    return 1 + max((*members, *view.keys()))
