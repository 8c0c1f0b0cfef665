"""What the records of a run say: who trained when, who was lost, who disagrees, and the facts for the verdict. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diloco.launch.history import NUM_STEPS
from diloco.options.flags import TrainConfig
from diloco.rl.signal_watch import lasting_problems
from diloco.train.metrics_file import Record
from peers.core.schedule import AS_LONG_AS_THE_ROUND
from peers.monitor.verdict import PeerFacts, SwarmFacts

RecordsOf = Mapping[str, Sequence[Record]]

_NOTICEABLE_S = 5.0


def facts_of(config: TrainConfig, records_of: RecordsOf) -> SwarmFacts:
    """`records_of` holds each peer's records in the order of writing; peers are in the order of world ranks."""
    finished = [_has_finished(records) for records in records_of.values()]
    peers = [
        replace(
            _facts(_world_rank(records, default=place), records, config),
            # If no peer has finished, all were stopped together and none counts as lost.
            state="lost" if any(finished) and not finished[place] else "training",
        )
        for place, records in enumerate(records_of.values())
        if records
    ]
    # A peer's own report has the records of no other peer; its last epoch tells how many there were.
    epochs = [record for own in records_of.values() for record in own if record.get("kind") == "epoch"]
    return SwarmFacts(
        peers=peers,
        num_peers=int(epochs[-1].get("num_peers") or 0) if epochs else 0,
        differs_at=next(iter(disagreements(records_of)), None),
    )


@dataclass(frozen=True)
class Session:
    """The records of a peer from a start of its process to its end or loss."""

    began_at: float
    ended_at: float
    steps: Sequence[Record]
    has_finished: bool


def sessions_of(records: Sequence[Record]) -> list[Session]:
    """Split one peer's records at its starts. Times are Unix seconds; steps without a loss are left out."""
    parts: list[list[Record]] = [[]]
    for record in records:
        if record.get("event") == "start":
            parts.append([])
        parts[-1].append(record)
    return [
        Session(
            *span_of(part),
            [record for record in part if record.get("kind") == "step" and record.get("loss") is not None],
            _has_finished(part),
        )
        for part in parts
        if any("time" in record for record in part)
    ]


def absences(sessions: Sequence[Session], ended_at: float) -> list[tuple[float, float]]:
    """Intervals (from, to) in which a peer was lost; the last one ends with the run if the peer did not come back."""
    found = [(before.ended_at, after.began_at) for before, after in itertools.pairwise(sessions)]
    if sessions and not sessions[-1].has_finished and ended_at - sessions[-1].ended_at > _NOTICEABLE_S:
        found.append((sessions[-1].ended_at, ended_at))
    return found


def span_of(records: Sequence[Record]) -> tuple[float, float]:
    """Unix seconds of the first and the last record."""
    times = [float(record["time"]) for record in records if "time" in record]
    return min(times, default=0.0), max(times, default=0.0)


def num_steps(records: Sequence[Record]) -> int:
    return sum(int(record.get(NUM_STEPS, 1)) for record in records if record.get("kind") == "step")


def rewards_by_step(records: Sequence[Record]) -> list[tuple[int, float]]:
    """(step, mean reward over all peers), in the order of steps."""
    found: dict[int, list[float]] = {}
    for record in records:
        if record.get("kind") == "step" and record.get("reward") is not None:
            found.setdefault(int(record["step"]), []).append(float(record["reward"]))
    return [(step, sum(values) / len(values)) for step, values in sorted(found.items())]


def disagreements(records_of: RecordsOf) -> dict[int, dict[str, str]]:
    """Epoch -> peer -> anchor digest, for epochs in which peers recorded different digests."""
    digests: dict[int, dict[str, str]] = {}
    for peer, records in records_of.items():
        for record in records:
            if record.get("kind") == "epoch":
                digests.setdefault(record["epoch"], {})[peer] = str(record.get("anchor_digest"))
    return {epoch: by for epoch, by in sorted(digests.items()) if len(set(by.values())) > 1}


def waited_s(record: Record) -> float:
    """Seconds of an epoch in which training waited for the slowest peer rather than for the round."""
    beyond_s = float(record["blocked_s"]) - float(record.get("round_s") or 0.0)
    return max(0.0, min(beyond_s, float(record.get("wait_s") or 0.0)))


def _world_rank(records: Sequence[Record], default: int) -> int:
    """The rank of the last start; a run without a swarm has none."""
    ranks = [record.get("world_rank") for record in records if record.get("event") == "start"]
    return default if not ranks or ranks[-1] is None else int(ranks[-1])


def _has_finished(records: Sequence[Record]) -> bool:
    return any(record.get("event") == "finished" for record in records)


def _facts(rank: int, records: Sequence[Record], config: TrainConfig) -> PeerFacts:
    steps = [record for record in records if record.get("kind") == "step"]
    epochs = [record for record in records if record.get("kind") == "epoch" and "blocked_s" in record]
    began_at, ended_at = span_of(records)
    took_s = ended_at - began_at
    waited = sum(waited_s(record) for record in epochs)
    blocked = sum(float(record["blocked_s"]) for record in epochs)
    # The loss of GRPO does not measure progress.
    rewards = _points(steps, "reward")
    sent = [
        float(r["sent_bytes"]) / r["reduce_s"] for r in epochs if r.get("sent_bytes") and r.get("reduce_s")
    ]
    return PeerFacts(
        world_rank=rank,
        step=max((int(record["step"]) for record in steps), default=0),
        step_s=_step_s(steps, config.total_batch_size * config.seq_length),
        losses=_points(steps, "loss") if not rewards else (),
        rewards=rewards,
        not_learning=list(lasting_problems(steps).values()),
        round_share=(blocked - waited) / took_s if took_s > 0 else 0.0,
        wait_share=waited / took_s if took_s > 0 else 0.0,
        bytes_per_s=statistics.median(sent) if sent else 0.0,
        round_bytes=float(epochs[-1].get("sent_bytes") or 0.0) if epochs else 0.0,
        compression=config.hv.compression,
        # With this setting, training goes on during every round.
        overlaps=config.hv.overlap_steps == AS_LONG_AS_THE_ROUND,
        troubles=[*_not_finite(steps), *_not_saved(records)],
    )


def _points(steps: Sequence[Record], name: str) -> list[tuple[int, float]]:
    return [(int(record["step"]), float(record[name])) for record in steps if record.get(name) is not None]


def _step_s(steps: Sequence[Record], tokens_per_step: int) -> float:
    # Steps of GRPO record their duration.
    durations = [float(record["step_s"]) for record in steps if record.get("step_s")]
    rates = [float(record["tokens_per_s"]) for record in steps if record.get("tokens_per_s")]
    if durations:
        return statistics.median(durations)
    return tokens_per_step / statistics.median(rates) if rates else 0.0


def _not_finite(steps: Sequence[Record]) -> list[str]:
    if not steps or "loss" not in steps[-1] or steps[-1]["loss"] is not None:
        return []
    first = next(record for record in steps if record.get("loss", 0.0) is None)
    return [f"its loss is not a number since step {first['step']}; is the learning rate too high?"]


def _not_saved(records: Sequence[Record]) -> list[str]:
    failed = [record for record in records if record.get("event") == "checkpoint_failed"]
    if not failed:
        return []
    last = failed[-1]
    return [
        f"{len(failed)} checkpoint{' was' if len(failed) == 1 else 's were'} not saved, the last one of step "
        f"{last.get('step')}: {last.get('reason')}"
    ]
