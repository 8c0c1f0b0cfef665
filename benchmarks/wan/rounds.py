"""Measures rounds of raw TCP and ours, alternating, behind the same links."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, Link
from benchmarks.lab.players import Players
from benchmarks.light_loop import Loop
from benchmarks.record import Result, say
from benchmarks.swarm_harness import Job, Seat, Swarm
from benchmarks.wan.cases import Case, optimum_s

_PARTS = ("round_s", "reduce_s", "blocked_s", "preview_s", "vote_s", "apply_s")
COORDINATOR = Link(up_mbps=1000, down_mbps=1000, delay_ms=1)
_WARM_UP_BYTES = 8 << 20
"""Enough for TCP's congestion window to reach the rate of the link."""
_MORE_EPOCHS = 8
"""Further epochs, so that no peer leaves after the last one that is measured."""
WARM_UP_EPOCHS = 2
"""In the first, memory is touched for the first time; in the second, links are measured, on which shares depend."""


@dataclass
class Rounds:
    """The measurements with one codec, one value per round."""

    raw_s: list[float] = field(default_factory=list)
    """Times of raw TCP; empty if it was not measured with this codec."""
    parts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _PARTS})
    """Durations of the parts of the round, the maximum over peers."""
    wire_bytes: list[float] = field(default_factory=list)
    """Bytes sent per peer, by the counters of the interfaces."""


def seat(lab: Lab, peer: int) -> Seat:
    return Seat(address=lab.address(peer), prefix=tuple(lab.prefix(peer)))


def swarm_in(lab: Lab, directory: Path, case: Case, codec: str, num_epochs: int) -> Swarm:
    """A swarm behind the case's links, with its coordinator behind the next link."""
    num_peers = len(case.links)
    loop = Loop(numel=case.tensor_bytes // 4, num_layers=4, max_epochs=num_epochs)
    flags = ("--hv.compression", codec, "--hv.averaging-timeout", "300")
    job = Job(loop=loop, flags=flags)
    seats = [seat(lab, peer) for peer in range(num_peers)]
    return Swarm(job, directory, seats, coordinator=seat(lab, num_peers))


def measured(
    case: Case, num_rounds: int, *, in_the_end: Callable[[Swarm, str, Rounds], None] = lambda *_: None
) -> dict[str, Rounds]:
    """Measure the rounds of each codec, after WARM_UP_EPOCHS that are not counted. `in_the_end` may run more."""
    found: dict[str, Rounds] = {}
    with Lab([*case.links, COORDINATOR]) as lab:
        for codec in case.codecs:
            found[codec] = rounds = Rounds()
            with ExitStack() as stack:
                raw = None
                # With the first codec only. Rounds on uneven links are compared with the optimum instead.
                if codec == case.codecs[0] and len(set(case.links)) == 1:
                    raw = stack.enter_context(_raw_tcp(lab, len(case.links)))
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                swarm = stack.enter_context(
                    swarm_in(lab, directory, case, codec, WARM_UP_EPOCHS + num_rounds + _MORE_EPOCHS)
                )
                for epoch in range(1, WARM_UP_EPOCHS + 1):
                    swarm.run_epoch(epoch)
                for number in range(1, num_rounds + 1):
                    if raw is not None:
                        rounds.raw_s.append(raw.round_s(case.tensor_bytes))
                    _measure(lab, case, swarm, WARM_UP_EPOCHS + number, rounds)
                    say(f"{case.name} {codec} round {number}: {_said(rounds)}")
                in_the_end(swarm, codec, rounds)
    return found


@contextmanager
def _raw_tcp(lab: Lab, num_peers: int) -> Iterator[Players]:
    with Players(lab, "benchmarks.lab.raw_tcp", num_peers) as raw:
        raw.round_s(_WARM_UP_BYTES)
        yield raw


def _measure(lab: Lab, case: Case, swarm: Swarm, epoch: int, rounds: Rounds) -> None:
    num_peers = len(case.links)
    before = [lab.counters(peer).sent_bytes for peer in range(num_peers)]
    records: list[dict[str, Any]] = swarm.run_epoch(epoch)
    after = [lab.counters(peer).sent_bytes for peer in range(num_peers)]
    rounds.wire_bytes.append((sum(after) - sum(before)) / num_peers)
    for name in _PARTS:
        rounds.parts[name].append(max(record[name] for record in records))


def _said(rounds: Rounds) -> str:
    said = f"{rounds.parts['round_s'][-1]:.2f} s, reduced in {rounds.parts['reduce_s'][-1]:.2f} s"
    return f"{said}, raw TCP {rounds.raw_s[-1]:.2f} s" if rounds.raw_s else said


def results(case: Case, found: Mapping[str, Rounds]) -> list[Result]:
    """Rows with the times, and the ratios for which there are targets."""
    rows: list[Result] = []
    least = optimum_s(case)
    if raw_s := [seconds for rounds in found.values() for seconds in rounds.raw_s]:
        rows.append(Result.of(f"{case.name} raw TCP", "round", "s", raw_s))
    rows.append(Result.of(f"{case.name} optimum", "round", "s", [least]))
    for codec, rounds in found.items():
        name = f"{case.name} {codec}"
        for part, values in rounds.parts.items():
            rows.append(Result.of(name, part.removesuffix("_s"), "s", values))
        rows.append(Result.of(name, "sent by a peer", "MB", [sent / 1e6 for sent in rounds.wire_bytes]))
        for part in ("reduce", "round"):
            values = rounds.parts[f"{part}_s"]
            if rounds.raw_s:
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
    """Ratios, round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]
