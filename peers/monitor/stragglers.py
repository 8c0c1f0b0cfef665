"""Which peers a swarm's rounds wait for, and why, from what leaders and late peers report. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peers.monitor.observations import LOST, SILENT, Observation
from peers.monitor.phases import training_left_s


@dataclass(frozen=True)
class Straggler:
    """A peer that a round waits for."""

    world_rank: int
    leader: int
    """Who waits for it: the leader of the attempt, or, if the leader itself is late, a peer that is ready."""
    reason: str
    """For people."""


def stragglers_of(peers: Mapping[int, Observation], states: Mapping[int, str]) -> list[Straggler]:
    """By world rank. `states` are the peers' states as shown, LOST and SILENT among them."""
    found: dict[int, Straggler] = {}
    tellers = [rank for rank in sorted(peers) if states[rank] not in (LOST, SILENT)]
    for teller in tellers:
        report = peers[teller].report
        if report is None:
            continue
        standing = report.standing
        # The lead rotates, also to peers that are late and so cannot report.
        if standing.leader != teller and standing.leader not in standing.missing:
            continue
        for rank in standing.missing:
            if rank != teller and (rank not in found or standing.leader == teller):
                reason = _reason(peers.get(rank), states.get(rank, LOST), standing.step)
                found[rank] = Straggler(rank, teller, reason)
    return [found[rank] for rank in sorted(found)]


def _reason(peer: Observation | None, state: str, step: str) -> str:
    if peer is None or state == LOST:
        return "it is lost"
    if state == SILENT:
        return "it does not answer"
    if step in ("voted", "reducing"):
        return "it has not voted yet" + _doing(peer)
    if state == "training":
        return _trains(peer)
    if state in ("joining", "waiting"):
        return "it is joining" + _doing(peer)
    return "it has not come to this round yet" + _doing(peer)


def _doing(peer: Observation) -> str:
    waits_for = peer.report.standing.waits_for if peer.report else ""
    return f": waits for {waits_for}" if waits_for else ""


def _trains(peer: Observation) -> str:
    steps = peer.report.figures.steps_per_epoch if peer.report else 0
    done = peer.announcement.local_step
    if not steps:
        return f"it still trains, at step {done} of its epoch"
    # By the pace of its last steps.
    left_s = training_left_s(peer.curve.points[-8:], done, steps) or 0.0
    left = f", about {left_s:.0f} s to go" if left_s >= 1 else ""
    return f"it still trains, at step {done} of {steps}{left}"
