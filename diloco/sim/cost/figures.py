"""What came out of a simulated run."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

ASSUMPTIONS = (
    "Links are full duplex, join peers to a core that is never the limit, and carry their rate all the time; "
    "TCP fills them to 95 %, loses nothing, and connections that stay open need no slow start.",
    "All peers reach each other directly; nobody forwards for others.",
    "A peer's paces do not change with what else its processors do: training is not slowed by a round.",
    "All streams of a reduction progress alike, and all members are done with it at the same time.",
    "A peer that is lost falls silent, as a machine does that is taken away; others notice by their timeouts.",
    "All peers are there at the beginning; one that returns has a checkpoint of its last state.",
    "Statuses and heartbeats, signatures, the DHT, checkpoints and evaluation cost nothing.",
)


@dataclass
class Parts:
    """How long the parts of one peer's round took, in seconds, by the names that metrics.jsonl has for them."""

    propose_s: float = 0.0
    wait_s: float = 0.0
    connect_s: float = 0.0
    reduce_s: float = 0.0
    preview_s: float = 0.0
    vote_s: float = 0.0
    apply_s: float = 0.0
    round_s: float = 0.0
    blocked_s: float = 0.0


@dataclass
class EpochOfPeer:
    """One peer's part in one commit."""

    epoch: int
    rank: int
    at: float
    """When its worker had merged the commit."""
    num_members: int
    train_s: float
    """Of the work that this commit took in."""
    steps: int
    sent_bytes: int
    head: str
    """That it led to."""
    parts: Parts


@dataclass
class Losses:
    """What failures did."""

    peers_lost: int = 0
    returns: int = 0
    failed_attempts: int = 0
    """Of rounds, which were then repeated."""
    caught_up: int = 0
    """Times that a peer had missed a commit and fetched the state after it."""
    join_s: list[float] = field(default_factory=list)
    """From a peer's return until it trained."""
    downloaded_bytes: float = 0.0
    lost_train_s: float = 0.0
    """Training that no commit took in, and none will."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians where nothing else is said; times in seconds."""

    num_peers: int
    num_epochs: int
    elapsed_s: float
    utilisation: float
    """Of all peers' time, what went into training that the swarm's state now holds."""
    epoch_s: float
    """From one commit to the next."""
    train_s: float
    """Of a peer in an epoch."""
    parts: Parts
    """Of the slowest peer of each epoch."""
    members: float
    """Of a commit, on average."""
    sent_bytes: float
    """By a peer in an epoch."""
    sent_bytes_in_all: float
    """In the whole time, failed attempts aside."""
    tokens_per_s: float
    """Of the swarm, committed."""
    cost: float
    cost_per_billion_tokens: float
    losses: Losses
    join_s: float
    """0: nobody has returned."""

    def plain(self) -> dict[str, object]:
        """For JSON."""
        plain = dataclasses.asdict(self)
        plain["losses"] = {k: v for k, v in plain["losses"].items() if k != "join_s"}
        return plain


def figures_of(
    records: Sequence[EpochOfPeer],
    losses: Losses,
    *,
    num_peers: int,
    tokens_per_step: int,
    price_per_hour: float,
) -> Figures:
    """Of all epochs after the first; `price_per_hour` is that of all peers together. Needs two epochs."""
    by_epoch: dict[int, list[EpochOfPeer]] = defaultdict(list)
    for record in records:
        by_epoch[record.epoch].append(record)
    ends = {epoch: max(r.at for r in of) for epoch, of in sorted(by_epoch.items())}
    first, *later = ends
    counted = [by_epoch[epoch] for epoch in later]
    flat = [record for of in counted for record in of]
    elapsed_s = ends[later[-1]] - ends[first]
    times = [ends[b] - ends[a] for a, b in zip([first, *later], later, strict=False)]
    tokens = tokens_per_step * sum(record.steps for record in flat)
    cost = price_per_hour * elapsed_s / 3600
    return Figures(
        num_peers=num_peers,
        num_epochs=len(later),
        elapsed_s=elapsed_s,
        utilisation=sum(record.train_s for record in flat) / (num_peers * elapsed_s),
        epoch_s=statistics.median(times),
        train_s=statistics.median(record.train_s for record in flat),
        parts=_usual_parts(counted),
        members=statistics.fmean(len(of) for of in counted),
        sent_bytes=statistics.median(record.sent_bytes for record in flat),
        sent_bytes_in_all=sum(record.sent_bytes for record in flat) + losses.downloaded_bytes,
        tokens_per_s=tokens / elapsed_s,
        cost=cost,
        cost_per_billion_tokens=1e9 * cost / tokens if tokens else 0.0,
        losses=losses,
        join_s=statistics.median(losses.join_s) if losses.join_s else 0.0,
    )


def _usual_parts(epochs: Sequence[Sequence[EpochOfPeer]]) -> Parts:
    names = [item.name for item in dataclasses.fields(Parts)]
    return Parts(
        **{
            name: statistics.median(max(getattr(r.parts, name) for r in of) for of in epochs)
            for name in names
        }
    )
