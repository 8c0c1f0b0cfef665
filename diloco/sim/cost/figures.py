"""The results of a simulated run."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ASSUMPTIONS = (
    "Links are full duplex, connect peers to a core that is never the bottleneck, and always run at full "
    "rate; TCP fills them to 95 %, loses nothing, and connections that stay open need no slow start.",
    "All peers reach each other directly, without relays.",
    "The CPU time of a part of a round does not depend on other load: training is not slowed by a round.",
    "All streams of a reduction progress at the same rate, and all members finish it at the same time.",
    "A lost peer falls silent, like a machine that is switched off. Others notice it by their timeouts; among more "
    "than 32 peers, its neighbours do, and tell the others at once.",
    "All peers are there at the beginning; one that returns has a checkpoint of its last state.",
    "Statuses and heartbeats, signatures, the DHT, checkpoints and evaluation cost nothing.",
)


@dataclass
class Parts:
    """Durations of the parts of one peer's round in seconds, named as in metrics.jsonl."""

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
    """One peer's part in one commit, from when its worker has handed over a fragment."""

    rank: int
    steps: int
    train_s: float
    """Training time of the peer's work in this commit."""
    num_bytes: float
    """fp32 size of the fragment."""
    since: float
    grouped_at: float | None = None
    voted_at: float = 0.0
    sent_bytes: int = 0
    parts: Parts = field(default_factory=Parts)
    epoch: int = 0
    head: str = ""
    """The head after this commit."""
    at: float = 0.0
    """The time at which the peer's worker had merged the commit."""


@dataclass(frozen=True)
class InHand:
    """Training time of all peers that is in no earlier commit, at the time when the first peer has applied a commit."""

    at: float
    train_s: float


@dataclass
class Losses:
    """Consequences of failures."""

    peers_lost: int = 0
    returns: int = 0
    failed_attempts: int = 0
    """Failed attempts of rounds, which were then repeated."""
    caught_up: int = 0
    """How often a peer that had missed a commit downloaded the state after it."""
    join_s: list[float] = field(default_factory=list)
    """Times from a peer's return until it trains."""
    downloaded_bytes: float = 0.0
    lost_train_s: float = 0.0
    """Training time whose work is in no commit."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians, unless stated otherwise; times in seconds."""

    num_peers: int
    num_epochs: int
    elapsed_s: float
    utilisation: float
    """Fraction of all peers' time that was spent on training whose work is not lost."""
    epoch_s: float
    """Time from one commit to the next."""
    train_s: float
    """Training time of a peer per epoch."""
    parts: Parts
    """Median over epochs of the slowest peer's parts."""
    gathering_s: float
    """Time from when the last contributor is ready until all have the plan."""
    members: float
    """Mean number of members of a commit."""
    sent_bytes: float
    """Bytes sent by a peer per epoch."""
    sent_bytes_in_all: float
    """Bytes sent by all peers in the whole time, without failed attempts."""
    tokens_per_s: float
    """Committed tokens per second of the whole swarm."""
    cost: float
    cost_per_billion_tokens: float
    losses: Losses
    join_s: float
    """Time from a peer's return until it trains; 0 if no peer has returned."""

    def plain(self) -> dict[str, object]:
        """The figures as a dict for JSON."""
        plain = dataclasses.asdict(self)
        plain["losses"] = {k: v for k, v in plain["losses"].items() if k != "join_s"}
        return plain


def figures_of(
    records: Sequence[EpochOfPeer],
    losses: Losses,
    *,
    num_peers: int,
    num_uncounted: int,
    tokens_per_step: int,
    price_per_hour: float,
    in_hand: Mapping[int, InHand],
) -> Figures:
    """The figures over all epochs after the first `num_uncounted`; at least one has to follow. `price_per_hour` is of
    all peers; `in_hand` is by epoch."""
    by_epoch: dict[int, list[EpochOfPeer]] = defaultdict(list)
    for record in records:
        by_epoch[record.epoch].append(record)
    ends = {epoch: max(r.at for r in of) for epoch, of in sorted(by_epoch.items())}
    first, *later = list(ends)[num_uncounted - 1 :]
    counted = [by_epoch[epoch] for epoch in later]
    flat = [record for of in counted for record in of]
    elapsed_s = ends[later[-1]] - ends[first]
    times = [ends[b] - ends[a] for a, b in zip([first, *later], later, strict=False)]
    tokens = tokens_per_step * sum(record.steps for record in flat)
    cost = price_per_hour * elapsed_s / 3600
    began, ended = in_hand[first], in_hand[later[-1]]
    # The work in a commit was trained before it, some of it even before the previous commit.
    committed_s = sum(record.train_s for epoch in [first, *later[:-1]] for record in by_epoch[epoch])
    trained_s = committed_s + ended.train_s - began.train_s
    return Figures(
        num_peers=num_peers,
        num_epochs=len(later),
        elapsed_s=elapsed_s,
        utilisation=trained_s / (num_peers * (ended.at - began.at)),
        epoch_s=statistics.median(times),
        train_s=statistics.median(record.train_s for record in flat),
        parts=_usual_parts(counted),
        gathering_s=statistics.median(map(_gathering_s, counted)),
        members=statistics.fmean(len(of) for of in counted),
        sent_bytes=statistics.median(record.sent_bytes for record in flat),
        sent_bytes_in_all=sum(record.sent_bytes for record in flat) + losses.downloaded_bytes,
        tokens_per_s=tokens / elapsed_s,
        cost=cost,
        cost_per_billion_tokens=1e9 * cost / tokens if tokens else 0.0,
        losses=losses,
        join_s=statistics.median(losses.join_s) if losses.join_s else 0.0,
    )


def _gathering_s(epoch: Sequence[EpochOfPeer]) -> float:
    return max(r.grouped_at or r.since for r in epoch) - max(r.since + r.parts.propose_s for r in epoch)


def _usual_parts(epochs: Sequence[Sequence[EpochOfPeer]]) -> Parts:
    names = [item.name for item in dataclasses.fields(Parts)]
    return Parts(
        **{
            name: statistics.median(max(getattr(r.parts, name) for r in of) for of in epochs)
            for name in names
        }
    )
