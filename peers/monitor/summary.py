"""What an observer tells programs: the swarm as one JSON object. `diloco status --json` prints it. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from peers.monitor.observations import LOST, SILENT, Event, Observation, Observations
from peers.monitor.stragglers import stragglers_of
from peers.protocol.records import NO_RANK
from peers.protocol.reports import Figures, RoundEntry

MAX_SHOWN_ROUNDS = 20


def summary_of(
    run_id: str,
    observations: Observations,
    *,
    now: float,
    unix_now: float,
    num_rounds: int = MAX_SHOWN_ROUNDS,
) -> dict[str, Any]:
    """The swarm by world rank; `epoch` is the highest of those that are there.

    Contract: README.md names what stays. Everything in it that a peer has said is bounded and of the stated type, and
    may still be a lie.
    """
    shown = observations.shown()
    states = {peer_id: observations.state_of(peer_id, now) for peer_id in shown}
    in_order = _in_order(shown, states)
    holders = _holders(in_order, shown)
    by_rank = {rank: shown[peer_id] for rank, peer_id in holders.items()}
    late = stragglers_of(by_rank, {rank: states[peer_id] for rank, peer_id in holders.items()})
    there = [shown[i].announcement for i in in_order if states[i] not in (LOST, SILENT)]
    return {
        "run_id": run_id,
        "epoch": max((peer.epoch for peer in there), default=0),
        "time": unix_now,
        "tokens_per_s": sum(peer.tokens_per_s for peer in there),
        "peers": [_peer(i, shown[i], states[i], now, unix_now) for i in in_order],
        "stragglers": [dataclasses.asdict(straggler) for straggler in late],
        "rounds": rounds_of(by_rank)[-num_rounds:] if num_rounds else [],
        "events": _events(by_rank, observations.events),
    }


def holders_of(observations: Observations, *, now: float) -> dict[int, Observation]:
    """By world rank; of several peers that claim one, one that is there."""
    shown = observations.shown()
    states = {peer_id: observations.state_of(peer_id, now) for peer_id in shown}
    return {rank: shown[peer_id] for rank, peer_id in _holders(_in_order(shown, states), shown).items()}


def _in_order(shown: Mapping[str, Observation], states: Mapping[str, str]) -> list[str]:
    """Of world ranks, and of one rank those first who are there."""
    return sorted(shown, key=lambda i: (shown[i].announcement.world_rank, states[i] in (LOST, SILENT), i))


def _holders(in_order: Iterable[str], shown: Mapping[str, Observation]) -> dict[int, str]:
    holders: dict[int, str] = {}
    for peer_id in in_order:
        holders.setdefault(shown[peer_id].announcement.world_rank, peer_id)
    holders.pop(NO_RANK, None)
    return holders


def _peer(peer_id: str, peer: Observation, state: str, now: float, unix_now: float) -> dict[str, Any]:
    said, report = peer.announcement, peer.report
    figures = report.figures if report else None
    standing = report.standing if report else None
    certificate = peer.certified_state
    return {
        "peer_id": peer_id,
        "world_rank": said.world_rank,
        "state": state,
        "answers": peer.answers(now),
        "epoch": said.epoch,
        "step": said.step,
        "local_step": said.local_step,
        "anchor_digest": said.anchor_digest,
        "head": said.head,
        # Of the certificate with that hash, which the observer has checked; empty where the peer has not shown it.
        "signers": list(certificate.plan.signers) if certificate else [],
        "roster": [
            {"peer_id": member.peer_id, "world_rank": member.world_rank}
            for member in (certificate.plan.roster if certificate else ())
        ],
        "committed_tokens": said.committed_tokens,
        "tokens_per_s": 0.0 if state in (LOST, SILENT) else said.tokens_per_s,
        "last_seen_s": max(0.0, unix_now - said.time),
        "maddrs": list(said.maddrs),
        "endpoints": list(said.endpoints),
        # As this peer says of its own streams, by the world rank of the other end.
        "paths": {str(rank): path for rank, path in said.paths},
        "path": path_in_a_word(path for _, path in said.paths),
        # None where the peer has not answered: the announcement does not have them.
        **{name: getattr(figures, name) if figures else None for name in Figures.__struct_fields__},
        "standing": standing.known_step if standing else None,
        "leader": standing.leader if standing else None,
        "missing": list(standing.missing) if standing else [],
        "waits_for": standing.waits_for if standing else None,
    }


def path_in_a_word(paths: Iterable[str]) -> str:
    """One word where all of a peer's streams go the same way, else how many go which; nothing for none."""
    numbers = Counter(paths)
    if len(numbers) == 1:
        return next(iter(numbers))
    return ", ".join(f"{path} {number}" for path, number in numbers.most_common())


def rounds_of(peers: Mapping[int, Observation]) -> list[dict[str, Any]]:
    """The epochs that peers remember, in their order, each with what every peer tells of it."""
    by_epoch: dict[int, dict[int, RoundEntry]] = {}
    for rank, peer in sorted(peers.items()):
        for entry in peer.rounds:
            by_epoch.setdefault(entry.epoch, {})[rank] = entry
    return [_round(epoch, entries) for epoch, entries in sorted(by_epoch.items())]


def _round(epoch: int, entries: Mapping[int, RoundEntry]) -> dict[str, Any]:
    digests = {entry.anchor_digest for entry in entries.values()}
    return {
        "epoch": epoch,
        "fragment": next(iter(entries.values())).fragment,
        "time": max(entry.time for entry in entries.values()),
        "contributors": sorted({rank for entry in entries.values() for rank in entry.contributors}),
        "agrees": len(digests) == 1,
        "num_failures": max(entry.num_failures for entry in entries.values()),
        "failures": list(dict.fromkeys(why for entry in entries.values() for why in entry.failures)),
        "peers": [
            {
                "world_rank": rank,
                "time": entry.time,
                "anchor_digest": entry.anchor_digest,
                "sent_bytes": entry.sent_bytes,
                "received_bytes": entry.received_bytes,
                "num_failures": entry.num_failures,
                "round_s": entry.round_s,
                **msgspec.structs.asdict(entry.parts),
            }
            for rank, entry in entries.items()
        ],
    }


def _events(peers: Mapping[int, Observation], seen: Iterable[Event]) -> list[dict[str, Any]]:
    """What the observer has seen itself and what peers tell, oldest first."""
    own: list[dict[str, Any]] = [
        {"time": e.time, "world_rank": e.world_rank, "what": e.what, "said_by": None} for e in seen
    ]
    told: list[dict[str, Any]] = [
        {"time": incident.time, "world_rank": rank, "what": incident.text, "said_by": rank}
        for rank, peer in peers.items()
        for incident in peer.incidents
    ]
    return sorted(own + told, key=lambda event: float(event["time"]))[-50:]
