"""The networks, and the least time that a round can take on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lab import Link
from peers.reduce.codecs import codec_named

TCP_PAYLOAD = 1448 / 1500
"""Of each packet, with timestamps."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network and what is averaged on it."""

    name: str
    links: tuple[Link, ...]
    megabytes: int
    """2**20 bytes of fp32 weights."""
    codecs: tuple[str, ...]

    @property
    def tensor_bytes(self) -> int:
        return self.megabytes << 20


def link(mbps: float, round_trip_ms: float) -> Link:
    """Both ways the same; the round trip is that to a peer with the same link."""
    return Link(up_mbps=mbps, down_mbps=mbps, delay_ms=round_trip_ms / 4)


def even(
    name: str, num_peers: int, mbps: float, round_trip_ms: float, megabytes: int, codecs: Sequence[str]
) -> Case:
    links = (link(mbps, round_trip_ms),) * num_peers
    return Case(name=name, links=links, megabytes=megabytes, codecs=tuple(codecs))


def cases(codecs: Sequence[str], *, quick: bool) -> dict[str, Case]:
    """Quick: the same networks with less to send."""
    uneven = (link(50, 10), *(link(200, 10),) * 3)
    made = [
        even("gigabit", 4, 1000, 10, 32 if quick else 256, codecs),
        even("broadband", 4, 100, 40, 8 if quick else 64, codecs),
        Case(name="uneven", links=uneven, megabytes=16 if quick else 64, codecs=("fp32",)),
    ]
    return {case.name: case for case in made}


def optimum_s(case: Case) -> float:
    """The least time in which these links can average so many bytes, latency aside.

    Peer i, owner of the part s_i of D bytes, sends the rest of its own tensor, (1 - s_i) D, and its part to the n - 1
    others: D (1 + (n - 2) s_i); it receives as much. So in time T it can own at most (T b_i / D - 1) / (n - 2), and
    T is the least that lets these parts add up to one, but no less than D / b_i for any peer, which has to get its own
    tensor out and the average in. b_i is the lesser of a link's rates, in bytes of TCP's payload.
    """
    rates = [TCP_PAYLOAD * min(link.up_bytes_per_s, link.down_bytes_per_s) for link in case.links]
    least = max(case.tensor_bytes / rate for rate in rates)
    if len(rates) == 2:
        return least
    # Every peer owns something of it at the level, or the level is below what the slowest peer needs anyway.
    level = case.tensor_bytes * (2 * len(rates) - 2) / sum(rates)
    return max(least, level)


def planned_s(case: Case, codec: str) -> float:
    """About what a whole round takes."""
    numel = case.tensor_bytes // 4
    return 0.5 + 1.2 * optimum_s(case) * codec_named(codec).encoded_bytes(numel) / case.tensor_bytes
