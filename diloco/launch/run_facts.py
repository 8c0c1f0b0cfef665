"""Derives the facts for the verdict on a run from its records. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from diloco.rl.signal_watch import lasting_problems
from diloco.train.metrics_file import Record
from peers.monitor.verdict import PeerFacts, SwarmFacts


def facts_of(
    records_of: Mapping[str, Sequence[Record]],
    *,
    tokens_per_step: int,
    compression: str,
    overlaps: bool = False,
) -> SwarmFacts:
    """`records_of` holds each peer's records in the order of writing; peers are in the order of world ranks.

    Steps of GRPO record their duration, so `tokens_per_step` is not used for them; their loss does not measure
    progress and is left out.
    """
    has_finished = [
        any(record.get("event") == "finished" for record in records) for records in records_of.values()
    ]
    peers = [
        replace(
            _facts(rank, records, tokens_per_step, compression),
            # If no peer has finished, all were stopped together and none counts as lost.
            overlaps=overlaps,
            state="lost" if any(has_finished) and not has_finished[rank] else "training",
        )
        for rank, records in enumerate(records_of.values())
        if records
    ]
    return SwarmFacts(peers=peers, differs_at=next(iter(disagreements(records_of)), None))


def disagreements(records_of: Mapping[str, Sequence[Record]]) -> dict[int, dict[str, str]]:
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


def _facts(rank: int, records: Sequence[Record], tokens_per_step: int, compression: str) -> PeerFacts:
    steps = [record for record in records if record.get("kind") == "step"]
    epochs = [record for record in records if record.get("kind") == "epoch" and "blocked_s" in record]
    times = [float(record["time"]) for record in records if "time" in record]
    took_s = max(times) - min(times) if times else 0.0
    waited = sum(waited_s(record) for record in epochs)
    blocked = sum(float(record["blocked_s"]) for record in epochs)
    rewards = _points(steps, "reward")
    sent = [
        float(r["sent_bytes"]) / r["reduce_s"] for r in epochs if r.get("sent_bytes") and r.get("reduce_s")
    ]
    return PeerFacts(
        world_rank=rank,
        step=max((int(record["step"]) for record in steps), default=0),
        step_s=_step_s(steps, tokens_per_step),
        losses=_points(steps, "loss") if not rewards else (),
        rewards=rewards,
        not_learning=list(lasting_problems(steps).values()),
        round_share=(blocked - waited) / took_s if took_s > 0 else 0.0,
        wait_share=waited / took_s if took_s > 0 else 0.0,
        bytes_per_s=statistics.median(sent) if sent else 0.0,
        round_bytes=float(epochs[-1].get("sent_bytes") or 0.0) if epochs else 0.0,
        compression=compression,
        troubles=[*_not_finite(steps), *_not_saved(records)],
    )


def _points(steps: Sequence[Record], name: str) -> list[tuple[int, float]]:
    return [(int(record["step"]), float(record[name])) for record in steps if record.get(name) is not None]


def _step_s(steps: Sequence[Record], tokens_per_step: int) -> float:
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
