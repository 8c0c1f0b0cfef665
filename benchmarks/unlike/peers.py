"""The peers of both measurements: all equal, except that the last but one has a thin link and the last is slow."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.lab import Lab, Link
from benchmarks.swarm_harness import Job, Swarm
from benchmarks.wan.rounds import COORDINATOR, seat

SLOWER = 4.0
_THIN = 0.1
_DELAY_MS = 10


def links(num_peers: int, mbps: float) -> list[Link]:
    """The peers' links, and the coordinator's."""
    found = [Link(up_mbps=mbps, down_mbps=mbps, delay_ms=_DELAY_MS)] * num_peers
    found[-2] = Link(up_mbps=_THIN * mbps, down_mbps=_THIN * mbps, delay_ms=_DELAY_MS)
    return [*found, COORDINATOR]


@contextmanager
def started(lab: Lab, job: Job, num_peers: int) -> Iterator[Swarm]:
    """A swarm behind the links of `lab`. Its epochs end without a gate."""
    seats = [seat(lab, peer) for peer in range(num_peers)]
    job = replace(job, is_gated=False, slower={num_peers - 1: SLOWER})
    with (
        tempfile.TemporaryDirectory() as directory,
        Swarm(job, Path(directory), seats, coordinator=seat(lab, num_peers)) as swarm,
    ):
        yield swarm
