"""What an observer tells programs: the swarm as one JSON object. `diloco status --json` prints it. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from peers.monitor.observations import LOST, SILENT, Event, Observation, Observations
from peers.monitor.phases import furthest_training, in_short, in_words, training_left_s
from peers.monitor.verdict import PeerFacts, SwarmFacts, is_still, verdict_of
from peers.protocol.records import NO_RANK
from peers.protocol.reports import MAX_POINTS, Figures, Phase, RoundEntry

MAX_SHOWN_ROUNDS = 20


def summary_of(
    run_id: str,
    observations: Observations,
    *,
    now: float,
    unix_now: float,
) -> dict[str, Any]:
    """The swarm by world rank; `epoch` is the highest of the peers that are there.

    docs/api.md names the fields that users may rely on. Values from peers are bounded and of the stated type, but may
    be lies.
    """
    shown = observations.shown()
    states = {peer_id: observations.state_of(peer_id, now) for peer_id in shown}
    in_order = _in_order(shown, states)
    holders = _holders(in_order, shown)
    by_rank = {rank: shown[peer_id] for rank, peer_id in holders.items()}
    there = [shown[i] for i in in_order if states[i] not in (LOST, SILENT)]
    ranked = [i for i in in_order if shown[i].announcement.world_rank != NO_RANK]
    facts = SwarmFacts(
        peers=[peer_facts(shown[i], states[i], now) for i in ranked],
        differs_at=_differs_at(by_rank.values()),
        withheld=_withheld(there, now) or (observations.withheld if not there else ""),
    )
    return {
        "run_id": run_id,
        "verdict": dataclasses.asdict(verdict_of(facts)),
        "epoch": max((peer.announcement.epoch for peer in there), default=0),
        "time": unix_now,
        "tokens_per_s": sum(peer.announcement.tokens_per_s for peer in there),
        "progress": _progress(there),
        "peers": [_peer(i, shown[i], states[i], now, unix_now) for i in in_order],
        "certificates": _certificates(shown.values()),
        "evaluations": evaluations_of(by_rank),
        "stragglers": stragglers_of(by_rank, {rank: states[peer_id] for rank, peer_id in holders.items()}),
        "rounds": rounds_of(by_rank),
        "events": _events(by_rank, observations.events),
    }


def holders_of(observations: Observations, *, now: float) -> dict[int, Observation]:
    """The peer of each world rank; if several claim a rank, one that is there."""
    shown = observations.shown()
    states = {peer_id: observations.state_of(peer_id, now) for peer_id in shown}
    return {rank: shown[peer_id] for rank, peer_id in _holders(_in_order(shown, states), shown).items()}


def _progress(peers: Sequence[Observation]) -> dict[str, Any]:
    """Progress of the run: the step of the peer that is furthest, of how many, and the time left."""
    furthest = max(peers, key=lambda peer: peer.announcement.step, default=None)
    step = furthest.announcement.step if furthest else 0
    end_step = max((peer.report.figures.end_step for peer in peers if peer.report), default=0)
    training = furthest_training(peer.report.phase for peer in peers if peer.report)
    if training is not None:
        left_s = training.left_s
    else:
        left_s = training_left_s(furthest.curve.points, step, end_step) if furthest else None
    return {"step": step, "end_step": end_step, "left_s": left_s}


def _withheld(there: Sequence[Observation], now: float) -> str:
    """Why none of these peers reports to this observer; empty if any does."""
    if any(peer.answers(now) for peer in there):
        return ""
    return next((peer.withheld for peer in there if peer.withheld), "")


def _in_order(shown: Mapping[str, Observation], states: Mapping[str, str]) -> list[str]:
    """Peer ids by world rank; of several with one rank, those that are there come first."""
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
        "committed_tokens": said.committed_tokens,
        "tokens_per_s": 0.0 if state in (LOST, SILENT) else said.tokens_per_s,
        "last_seen_s": max(0.0, unix_now - said.time),
        "maddrs": list(said.maddrs),
        "endpoints": list(said.endpoints),
        # As this peer says of its own streams, by the world rank of the other end.
        "paths": {str(rank): path for rank, path in said.paths},
        "path": path_in_a_word(path for _, path in said.paths),
        # None if the peer has not answered: announcements do not have these.
        **{name: getattr(figures, name) if figures else None for name in Figures.__struct_fields__},
        "standing": standing.known_step if standing else None,
        "leader": standing.leader if standing else None,
        "missing": list(standing.missing) if standing else [],
        "waits_for": standing.waits_for if standing else None,
        "phase": _phase(report.phase)
        if report and report.phase.name and state not in (LOST, SILENT)
        else None,
        "is_still": is_still(peer_facts(peer, state, now)),
        "troubles": list(report.troubles) if report else [],
        "rollout_peers": [msgspec.structs.asdict(one) for one in report.rollout_peers] if report else [],
    }


def _certificates(peers: Iterable[Observation]) -> dict[str, dict[str, Any]]:
    """By hash, the certificates that peers have shown, and that lead to the states which they announce."""
    shown = {one.head: one.plan for peer in peers if (one := peer.certified_state) is not None}
    return {
        head: {
            "signers": list(plan.signers),
            "roster": [{"peer_id": one.peer_id, "world_rank": one.world_rank} for one in plan.roster],
        }
        for head, plan in shown.items()
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {**msgspec.structs.asdict(phase), "short": in_short(phase), "text": in_words(phase)}


def path_in_a_word(paths: Iterable[str]) -> str:
    """One word if all of a peer's streams take the same kind of path, else how many take which; empty without any."""
    numbers = Counter(paths)
    if len(numbers) == 1:
        return next(iter(numbers))
    return ", ".join(f"{path} {number}" for path, number in numbers.most_common())


def evaluations_of(peers: Mapping[int, Observation]) -> list[dict[str, Any]]:
    """Held-out losses by step; the peer that evaluates changes."""
    found = {
        one.step: one.loss
        for _, peer in sorted(peers.items())
        for one in peer.evaluations
        if one.loss is not None
    }
    return [{"step": step, "loss": loss} for step, loss in sorted(found.items())][-MAX_POINTS:]


def rounds_of(peers: Mapping[int, Observation]) -> list[dict[str, Any]]:
    """The last epochs that peers remember, in order, each with every peer's figures."""
    ranks = {peer.announcement.peer_id: rank for rank, peer in peers.items()}
    by_epoch: dict[int, dict[int, RoundEntry]] = {}
    for rank, peer in sorted(peers.items()):
        for entry in peer.rounds:
            by_epoch.setdefault(entry.epoch, {})[rank] = entry
    last = sorted(by_epoch.items())[-MAX_SHOWN_ROUNDS:]
    return [_round(epoch, entries, ranks) for epoch, entries in last]


def _differs_at(peers: Iterable[Observation]) -> int | None:
    """The first epoch since which peers report different anchors of one epoch; None after a fork that has healed."""
    told: dict[int, list[str]] = {}
    for entry in (entry for peer in peers for entry in peer.rounds):
        told.setdefault(entry.epoch, []).append(entry.anchor_digest)
    found = None
    for epoch, digests in sorted(told.items(), reverse=True):
        if len(set(digests)) > 1:
            found = epoch
        elif len(digests) > 1:
            break
    return found


def _with_ranks(text: str, ranks: Mapping[str, int]) -> str:
    """A reason, with peer ids replaced by world ranks."""
    for peer_id, rank in ranks.items():
        text = text.replace(peer_id, f"peer {rank}")
    return text


def _round(epoch: int, entries: Mapping[int, RoundEntry], ranks: Mapping[str, int]) -> dict[str, Any]:
    """Under "peers" only contributors have figures, if any report: a peer that came too late took part in no round."""
    digests = {entry.anchor_digest for entry in entries.values()}
    inside = {rank: entry for rank, entry in entries.items() if rank in entry.contributors}
    return {
        "epoch": epoch,
        "fragment": next(iter(entries.values())).fragment,
        "time": max(entry.time for entry in entries.values()),
        "contributors": sorted({rank for entry in entries.values() for rank in entry.contributors}),
        "agrees": len(digests) == 1,
        "num_failures": max(entry.num_failures for entry in entries.values()),
        "failures": list(
            dict.fromkeys(_with_ranks(why, ranks) for entry in entries.values() for why in entry.failures)
        ),
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
            for rank, entry in (inside or entries).items()
        ],
    }


def _events(peers: Mapping[int, Observation], seen: Iterable[Event]) -> list[dict[str, Any]]:
    """What the observer has seen itself and what peers tell, oldest first."""
    own: list[dict[str, Any]] = [
        {"time": e.time, "world_rank": e.world_rank, "what": e.what, "said_by": None} for e in seen
    ]
    ranks = {peer.announcement.peer_id: rank for rank, peer in peers.items()}
    told: list[dict[str, Any]] = [
        {
            "time": incident.time,
            "world_rank": rank,
            "what": _with_ranks(incident.text, ranks),
            "said_by": rank,
        }
        for rank, peer in peers.items()
        for incident in peer.incidents
    ]
    return sorted(own + told, key=lambda event: float(event["time"]))[-50:]


_LAST_ROUNDS = 9
"""How many recent rounds are used for shares of time."""


def peer_facts(peer: Observation, state: str, now: float) -> PeerFacts:
    said, report = peer.announcement, peer.report
    if report is None:
        return PeerFacts(world_rank=said.world_rank, state=state, doing=state, gone_s=_gone_s(peer, now))
    figures, rounds = report.figures, list(peer.rounds)[-_LAST_ROUNDS:]
    blocked = [_blocked(entry, figures) for entry in rounds]
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
        round_share=share_of([round_s for round_s, _ in blocked], rounds),
        wait_share=share_of([wait_s for _, wait_s in blocked], rounds),
        num_rounds=figures.num_rounds,
        bytes_per_s=figures.upload_bytes_per_s,
        round_bytes=rounds[-1].sent_bytes if rounds else 0.0,
        compression=figures.compression,
        overlaps=0 < figures.steps_per_epoch <= figures.overlap_steps,
        clock_ahead_s=peer.clock_ahead_s,
        troubles=report.troubles,
        num_failures=sum(entry.num_failures for entry in rounds),
        failure=next((entry.failures[-1] for entry in reversed(rounds) if entry.failures), ""),
    )


def _blocked(entry: RoundEntry, figures: Figures) -> tuple[float, float]:
    """Seconds for which training stood still for this round, and for the peers that came late to it.

    The steps of overlap are trained first, in the wait for the group and then in the round. If it is not known how long
    they take, nothing is counted.
    """
    hidden_s = figures.overlap_steps * figures.step_s
    if figures.overlaps and not hidden_s:
        return 0.0, 0.0
    blocked_s = max(0.0, entry.parts.wait_s + entry.round_s - hidden_s)
    round_s = min(entry.round_s, blocked_s)
    return round_s, blocked_s - round_s


def share_of(seconds: Sequence[float], rounds: Sequence[RoundEntry]) -> float:
    """The share of these seconds in the time from the first round's end to the last one's; 0: too few to tell."""
    took_s = rounds[-1].time - rounds[0].time if len(rounds) > 2 else 0.0
    return min(1.0, sum(seconds[1:]) / took_s) if took_s > 0 else 0.0


def _gone_s(peer: Observation, now: float) -> float | None:
    return None if peer.lost_at is None else max(0.0, now - peer.lost_at)


def stragglers_of(peers: Mapping[int, Observation], states: Mapping[int, str]) -> list[dict[str, Any]]:
    """The peers that a round waits for, by world rank, and why, for people. `states` are the peers' states as shown.

    `leader` is who waits: the leader of the attempt or, if it is late itself, a peer that is ready.
    """
    found: dict[int, dict[str, Any]] = {}
    tellers = [rank for rank in sorted(peers) if states[rank] not in (LOST, SILENT)]
    for teller in tellers:
        report = peers[teller].report
        if report is None:
            continue
        standing = report.standing
        # If the leader itself is late, it does not report whom it waits for: then reports of other peers count.
        if standing.leader != teller and standing.leader not in standing.missing:
            continue
        for rank in standing.missing:
            if rank != teller and (rank not in found or standing.leader == teller):
                reason = _reason(peers.get(rank), states.get(rank, LOST), standing.step)
                found[rank] = {"world_rank": rank, "leader": teller, "reason": reason}
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
