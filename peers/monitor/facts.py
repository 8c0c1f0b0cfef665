"""Turns an observer's data into the facts that a verdict is based on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peers.monitor.observations import Observation, Observations
from peers.monitor.phases import in_words
from peers.monitor.verdict import PeerFacts, SwarmFacts
from peers.protocol.records import NO_RANK
from peers.protocol.reports import RoundEntry

_LAST_ROUNDS = 9
"""How many recent rounds are used for shares of time."""


def swarm_facts(
    observations: Observations, states: Mapping[str, str], *, now: float, differs_at: int | None
) -> SwarmFacts:
    """`states` are those shown, by peer id."""
    shown = observations.shown()
    return SwarmFacts(
        peers=[
            peer_facts(shown[peer_id], state, now)
            for peer_id, state in states.items()
            if shown[peer_id].announcement.world_rank != NO_RANK
        ],
        differs_at=differs_at,
    )


def peer_facts(peer: Observation, state: str, now: float) -> PeerFacts:
    said, report = peer.announcement, peer.report
    if report is None:
        return PeerFacts(world_rank=said.world_rank, state=state, doing=state, gone_s=_gone_s(peer, now))
    figures, rounds = report.figures, list(peer.rounds)[-_LAST_ROUNDS:]
    hidden = figures.overlaps
    return PeerFacts(
        world_rank=said.world_rank,
        state=state,
        doing=report.phase.name or state,
        in_words=in_words(report.phase) if report.phase.name else state,
        gone_s=_gone_s(peer, now),
        for_s=report.phase.for_s,
        idle_s=report.phase.idle_s,
        step=said.step,
        step_s=figures.step_s,
        losses=[(point.step, point.loss) for point in peer.curve.points if point.loss is not None],
        round_share=0.0 if hidden else share_of([entry.round_s for entry in rounds], rounds),
        wait_share=0.0 if hidden else share_of([entry.parts.wait_s for entry in rounds], rounds),
        num_rounds=figures.num_rounds,
        bytes_per_s=figures.upload_bytes_per_s,
        round_bytes=rounds[-1].sent_bytes if rounds else 0.0,
        compression=figures.compression,
        clock_ahead_s=peer.clock_ahead_s,
        troubles=report.troubles,
        num_failures=sum(entry.num_failures for entry in rounds),
        failure=next((entry.failures[-1] for entry in reversed(rounds) if entry.failures), ""),
    )


def share_of(seconds: Sequence[float], rounds: Sequence[RoundEntry]) -> float:
    """Of the time between the first of these rounds' ends and the last one's; 0: too few to tell."""
    took_s = rounds[-1].time - rounds[0].time if len(rounds) > 2 else 0.0
    return min(1.0, sum(seconds[1:]) / took_s) if took_s > 0 else 0.0


def _gone_s(peer: Observation, now: float) -> float | None:
    return None if peer.lost_at is None else max(0.0, now - peer.lost_at)
