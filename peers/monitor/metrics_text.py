"""Figures in Prometheus' text format (version 0.0.4): of one daemon, or of a whole swarm as an observer sees it. Pure.

Labels are bounded: a run's id, world ranks below MAX_RANK of at most MAX_PEERS peers at once, and words of ours. No
peer id and no text of a peer's becomes a label.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from peers.monitor.sightings import LOST, SILENT
from peers.protocol.records import STATES
from peers.protocol.reports import PARTS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_RANK = 4096
MAX_PEERS = 256
ALL_STATES = (*sorted(STATES), LOST, SILENT)


@dataclass(frozen=True)
class Family:
    """One metric: its name and what it says, which the page of docs and the Grafana dashboard rely on."""

    name: str
    kind: Literal["gauge", "counter"]
    says: str


@dataclass(frozen=True)
class Sample:
    """One value. `value` None: there is none to tell."""

    family: str
    labels: Mapping[str, str]
    value: float | None


FAMILIES = (
    Family("diloco_peers", "gauge", "Peers of the run that are there."),
    Family("diloco_stragglers", "gauge", "Peers that the leader of a round waits for."),
    Family("diloco_state", "gauge", "1 for the state that the peer is in, 0 for the others."),
    Family("diloco_epoch", "gauge", "Outer steps that the peer's anchor has."),
    Family("diloco_step", "gauge", "Nominal inner step."),
    Family("diloco_loss", "gauge", "Loss of the last step that was told, in nats per token."),
    Family("diloco_tokens_per_second", "gauge", "Tokens trained per second, lately."),
    Family("diloco_committed_tokens", "gauge", "Tokens averaged into the anchor, over all epochs and peers."),
    Family("diloco_last_seen_seconds", "gauge", "Since the peer's newest word."),
    Family("diloco_rounds_total", "counter", "Epochs that ended on the peer since it was started."),
    Family(
        "diloco_round_failures_total", "counter", "Attempts at rounds that failed, as far as it was told."
    ),
    Family("diloco_worker_losses_total", "counter", "Ends of the peer's worker before the training's."),
    Family("diloco_sent_bytes_total", "counter", "Sent for reductions."),
    Family("diloco_received_bytes_total", "counter", "Received for reductions."),
    Family("diloco_forwarded_bytes_total", "counter", "Carried for other peers, each way."),
    Family("diloco_upload_bytes_per_second", "gauge", "Sent in the last reduction, over its time."),
    Family("diloco_download_bytes_per_second", "gauge", "Received in the last reduction, over its time."),
    Family("diloco_link_bytes_per_second", "gauge", "What the peer's link carries each way at the most."),
    Family("diloco_round_seconds", "gauge", "Of the last round, from its group to the commit."),
    Family(
        "diloco_round_part_seconds",
        "gauge",
        "Of the last epoch's parts: gathering, reducing, voting and so on.",
    ),
)

# Metric by the name of the figure that it shows, in a peer's entry of peers/monitor/summary.py.
_OF_A_PEER = {
    "diloco_epoch": "epoch",
    "diloco_step": "step",
    "diloco_loss": "loss",
    "diloco_tokens_per_second": "tokens_per_s",
    "diloco_committed_tokens": "committed_tokens",
    "diloco_last_seen_seconds": "last_seen_s",
    "diloco_rounds_total": "num_rounds",
    "diloco_round_failures_total": "num_failures",
    "diloco_worker_losses_total": "num_worker_losses",
    "diloco_sent_bytes_total": "sent_bytes",
    "diloco_received_bytes_total": "received_bytes",
    "diloco_forwarded_bytes_total": "forwarded_bytes",
    "diloco_upload_bytes_per_second": "upload_bytes_per_s",
    "diloco_download_bytes_per_second": "download_bytes_per_s",
    "diloco_link_bytes_per_second": "link_bytes_per_s",
}


def swarm_metrics(swarm: Mapping[str, Any], *, only_rank: int | None = None) -> bytes:
    """Of a swarm as `summary_of` (peers/monitor/summary.py) gives it; the figures of all, or of one."""
    run = {"run_id": str(swarm["run_id"])}
    samples = [
        Sample("diloco_peers", run, sum(peer["state"] not in (LOST, SILENT) for peer in swarm["peers"])),
        Sample("diloco_stragglers", run, len(swarm["stragglers"])),
    ]
    shown: dict[int, Mapping[str, Any]] = {}
    for peer in swarm["peers"]:
        is_wanted = only_rank in (None, peer["world_rank"])
        if is_wanted and 0 <= peer["world_rank"] < MAX_RANK and len(shown) < MAX_PEERS:
            shown.setdefault(peer["world_rank"], peer)
    last_round = {entry["world_rank"]: entry for round_ in swarm["rounds"] for entry in round_["peers"]}
    for rank, peer in shown.items():
        samples += _of_peer({**run, "world_rank": str(rank)}, peer, last_round.get(rank))
    return text_of(samples)


def _of_peer(
    labels: Mapping[str, str], peer: Mapping[str, Any], last_round: Mapping[str, Any] | None
) -> list[Sample]:
    samples = [
        Sample("diloco_state", {**labels, "state": state}, float(peer["state"] == state))
        for state in ALL_STATES
    ]
    samples += [Sample(family, labels, peer[name]) for family, name in _OF_A_PEER.items()]
    if last_round is not None:
        samples.append(Sample("diloco_round_seconds", labels, last_round["round_s"]))
        samples += [
            Sample("diloco_round_part_seconds", {**labels, "part": part.removesuffix("_s")}, last_round[part])
            for part in PARTS
        ]
    return samples


def text_of(samples: Iterable[Sample]) -> bytes:
    """All families in their order, each with its samples; those without any are left out."""
    by_family: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.value is not None:
            by_family.setdefault(sample.family, []).append(sample)
    return "".join(_family_text(family, by_family.get(family.name, ())) for family in FAMILIES).encode()


def _family_text(family: Family, samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    head = f"# HELP {family.name} {family.says}\n# TYPE {family.name} {family.kind}\n"
    return head + "".join(
        f"{family.name}{{{_labels(sample.labels)}}} {_number(sample.value or 0.0)}\n" for sample in samples
    )


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
