"""What a simulated peer holds and brings: states by their names, without their weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.simulation.figures import Parts
from diloco.simulation.worker import Work
from peers.records import Announcement
from peers.round.messages import Proposal


@dataclass(frozen=True)
class State:
    """An outer state, by what tells it from others."""

    epoch: int = 0
    lineage: str = "0"
    tokens: int = 0
    parent: str = ""


@dataclass
class Piece:
    """A fragment that the worker has handed over, and how its round goes."""

    work: Work
    fragment: int
    since: float
    proposal: Proposal
    attempt: str = ""
    """Whose result this peer holds."""
    grouped_at: float | None = None
    reduced_at: float = 0.0
    voted_at: float = 0.0
    parts: Parts = field(default_factory=Parts)
    sent_bytes: int = 0


def announcement_of(rank: int, incarnation: int, state: State, standing: str) -> Announcement:
    return Announcement(
        peer_id=f"peer{rank}",
        run_id="simulated",
        world_rank=rank,
        incarnation=incarnation,
        state=standing,  # type: ignore[arg-type]
        epoch=state.epoch,
        lineage=state.lineage,
        step=0,
        local_step=0,
        committed_tokens=state.tokens,
        tokens_per_s=0.0,
        anchor_digest=state.lineage,
        manifest_digest="simulated",
        maddrs=(),
        time=0.0,
    )


class Names:
    """Short names in place of digests: the same for the same parts, and never the same for others.

    Rounds compare lineages letter by letter, of all peers with all others, so length costs time.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], str] = {}

    def of(self, *parts: str) -> str:
        return self._names.setdefault(parts, f"{len(self._names) + 1:x}")
