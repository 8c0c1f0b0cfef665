"""The networks, and a lower bound of a round's duration on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lab import Link
from diloco.sim.cost.links import TCP_PAYLOAD


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, and the size and codecs to average with."""

    name: str
    links: tuple[Link, ...]
    megabytes: int
    """2**20 bytes of fp32 weights."""
    codecs: tuple[str, ...]

    @property
    def tensor_bytes(self) -> int:
        return self.megabytes << 20


def link(mbps: float, round_trip_ms: float) -> Link:
    """A symmetric link; `round_trip_ms` is to a peer with the same link."""
    return Link(up_mbps=mbps, down_mbps=mbps, delay_ms=round_trip_ms / 4)


def even(
    name: str, num_peers: int, mbps: float, round_trip_ms: float, megabytes: int, codecs: Sequence[str]
) -> Case:
    links = (link(mbps, round_trip_ms),) * num_peers
    return Case(name=name, links=links, megabytes=megabytes, codecs=tuple(codecs))


def cases(codecs: Sequence[str], *, quick: bool) -> dict[str, Case]:
    """The cases by name; `quick` sends less."""
    uneven = (link(50, 10), *(link(200, 10),) * 3)
    made = [
        even("gigabit", 4, 1000, 10, 32 if quick else 256, codecs),
        even("broadband", 4, 100, 40, 8 if quick else 64, codecs),
        Case(name="uneven", links=uneven, megabytes=16 if quick else 64, codecs=("fp32",)),
    ]
    return {case.name: case for case in made}


def optimum_s(case: Case) -> float:
    """A lower bound of the time in which these links can average D = `tensor_bytes` bytes, without latency.

    Peer i, which owns the share s_i, sends the rest of its own tensor, (1 - s_i) D, and its share to the n - 1 others:
    D (1 + (n - 2) s_i) in total; it receives as much. In time T it can therefore own at most (T b_i / D - 1) / (n - 2).
    T is the smallest time for which these shares add up to one, and at least D / b_i for any peer, which has to send
    its own tensor and receive the average. b_i is the smaller of a link's rates, in bytes of TCP payload.
    """
    rates = [TCP_PAYLOAD * min(link.up_bytes_per_s, link.down_bytes_per_s) for link in case.links]
    least = max(case.tensor_bytes / rate for rate in rates)
    if len(rates) == 2:
        return least
    # If the slowest peer's share would be negative, `level` is below `least`, so the maximum is right in that case too.
    level = case.tensor_bytes * (2 * len(rates) - 2) / sum(rates)
    return max(least, level)
