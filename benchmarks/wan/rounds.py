"""Rounds of raw TCP and ours in turns, behind the same links."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lab import Lab, Link
from benchmarks.lab.players import Players
from benchmarks.light_loop import Loop
from benchmarks.record import Result
from benchmarks.swarm_harness import Job, Seat, Swarm
from benchmarks.wan.cases import Case, optimum_s

_PARTS = ("round_s", "reduce_s", "blocked_s")
COORDINATOR = Link(up_mbps=1000, down_mbps=1000, delay_ms=1)


@dataclass
class Rounds:
    """What was measured with one codec, a value a round."""

    raw_s: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _PARTS})
    """The longest of all peers."""
    wire_bytes: list[float] = field(default_factory=list)
    """Sent by each peer, by its interface's counter."""


def seat(lab: Lab, peer: int) -> Seat:
    return Seat(address=lab.address(peer), prefix=tuple(lab.prefix(peer)))


def swarm_in(lab: Lab, directory: Path, case: Case, codec: str, num_epochs: int) -> Swarm:
    """A swarm behind the case's links; its coordinator behind the one after them."""
    num_peers = len(case.links)
    loop = Loop(numel=case.tensor_bytes // 4, num_layers=4, max_epochs=num_epochs)
    flags = ("--hv.compression", codec, "--hv.averaging-timeout", "300")
    job = Job(loop=loop, flags=flags)
    seats = [seat(lab, peer) for peer in range(num_peers)]
    return Swarm(job, directory, seats, coordinator=seat(lab, num_peers))


def measured(case: Case, num_rounds: int) -> dict[str, Rounds]:
    """By codec. A first round of each, in which connections are made, is not counted."""
    found: dict[str, Rounds] = {}
    num_peers = len(case.links)
    with (
        Lab([*case.links, COORDINATOR]) as lab,
        Players(lab, "benchmarks.lab.raw_tcp", num_peers) as raw,
    ):
        raw.round_s(case.tensor_bytes)
        for codec in case.codecs:
            rounds = found[codec] = Rounds()
            with (
                tempfile.TemporaryDirectory() as directory,
                swarm_in(lab, Path(directory), case, codec, num_rounds + 1) as swarm,
            ):
                swarm.run_epoch(1)
                for epoch in range(2, num_rounds + 2):
                    rounds.raw_s.append(raw.round_s(case.tensor_bytes))
                    before = [lab.counters(peer).sent_bytes for peer in range(num_peers)]
                    records = swarm.run_epoch(epoch)
                    after = [lab.counters(peer).sent_bytes for peer in range(num_peers)]
                    rounds.wire_bytes.append((sum(after) - sum(before)) / num_peers)
                    for name in _PARTS:
                        rounds.parts[name].append(max(record[name] for record in records))
    return found


def gloo_s(case: Case, num_rounds: int) -> list[float]:
    """torch's own all-reduce of the same tensors behind the same links."""
    num_peers = len(case.links)
    with (
        Lab([*case.links, COORDINATOR]) as lab,
        Players(lab, "benchmarks.lab.gloo", num_peers) as gloo,
    ):
        gloo.round_s(case.tensor_bytes)
        return [gloo.round_s(case.tensor_bytes) for _ in range(num_rounds)]


def results(case: Case, found: dict[str, Rounds]) -> list[Result]:
    """Times, and the ratios that the targets are about."""
    rows: list[Result] = []
    least = optimum_s(case)
    raw_s = [seconds for rounds in found.values() for seconds in rounds.raw_s]
    rows.append(Result.of(f"{case.name} raw TCP", "round", "s", raw_s))
    rows.append(Result.of(f"{case.name} optimum", "round", "s", [least]))
    for codec, rounds in found.items():
        name = f"{case.name} {codec}"
        for part, values in rounds.parts.items():
            rows.append(Result.of(name, part.removesuffix("_s"), "s", values))
        rows.append(Result.of(name, "sent by a peer", "MB", [sent / 1e6 for sent in rounds.wire_bytes]))
        for part in ("reduce", "round"):
            values = rounds.parts[f"{part}_s"]
            rows.append(Result.of(name, f"{part} / raw TCP", "ratio", quotients(values, rounds.raw_s)))
            if codec == "fp32":
                rows.append(Result.of(name, f"{part} / optimum", "ratio", [v / least for v in values]))
            elif "fp32" in found:
                plain = found["fp32"].parts[f"{part}_s"]
                rows.append(Result.of(name, f"fp32's {part} / its own", "ratio", quotients(plain, values)))
        if codec != "fp32" and "fp32" in found:
            fewer = quotients(found["fp32"].wire_bytes, rounds.wire_bytes)
            rows.append(Result.of(name, "fp32's bytes / its own", "ratio", fewer))
    return rows


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]
