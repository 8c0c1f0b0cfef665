"""The cost of forming a swarm and of gathering for rounds with N peers: light peers on one machine.

    python -m benchmarks.membership [--sizes 2 5 10 20 35 50] [--quick] [--json FILE]

All peers start by the same command, eight at a time; a coordinator assigns the ranks. Measured are the time from the
first start until all peers train, the time that one more peer needs, the time from the last member's readiness to the
group, the round itself, and the CPU time of membership between rounds. All N peers share one machine's cores, so times
are upper bounds; only the CPU time per peer carries over to separate machines.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.coordinator import Coordinator
from benchmarks.chaos.links import free_port
from benchmarks.light_swarm import LightPeer, LightSwarm, children_of, wait_until
from benchmarks.record import Result, parser, report

RUN_ID = "membership"
SIZES = (2, 5, 10, 20, 35, 50)
NUM_EPOCHS = 3
_AT_ONCE = 8
_MAX_STARTS = 3
_EPOCH_S = 10.0
_SETTLE_S = 2.0
_IDLE_S = 5.0
_TIMEOUT_S = 400.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """The measurements with one number of peers; times in seconds."""

    num_peers: int
    forming_s: float
    joining_s: float
    gathering_s: list[float]
    rounds_s: list[float]
    upkeep: float
    """Fraction of a core that a peer's daemon and p2pd use while its worker trains."""


class Assigned(LightSwarm):
    """A swarm whose ranks are assigned by the coordinator."""

    def config_of(self, rank: int, directory: Path, worker: dict[str, Any]) -> dict[str, Any]:
        return super().config_of(rank, directory, worker) | {"world_rank": None}


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parser(__doc__)
    flags.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    given = flags.parse_args(arguments)
    sizes = (2, 4) if given.quick else given.sizes
    found = []
    for size in sizes:
        found.append(measured(size))
        print(f"{size} peers: {found[-1]}", file=sys.stderr, flush=True)
    report("membership", _results(found), given.json, extra={"notes": _notes()}, keeps=True)
    return 0


def measured(num_peers: int) -> Measured:
    """Start `num_peers` peers, let them train for some epochs, then start one more."""
    with tempfile.TemporaryDirectory(prefix="diloco-membership-") as directory:
        coordinator = Coordinator(Path(directory, "coordinator"), RUN_ID, free_port())
        worker = {"numel": 1000, "local_steps": 60, "max_steps": 10**9, "step_s": _EPOCH_S / 60}
        swarm = Assigned(Path(directory), [], RUN_ID, **worker)
        try:
            swarm.initial_peers = [coordinator.start()]
            began = time.time()
            peers = start_all(swarm, num_peers)
            forming_s = max(first_steps_of(peers)) - began
            check_ranks(peers)
            wait_until(lambda: min(peer.epoch for peer in peers) >= NUM_EPOCHS, "the epochs", _TIMEOUT_S)
            upkeep = upkeep_of(peers)
            gathering_s, rounds_s = epochs_of(peers)
            began = time.time()
            joining_s = max(first_steps_of([swarm.start(num_peers)])) - began
            swarm.check_digests()
        finally:
            swarm.close()
            coordinator.kill()
    return Measured(num_peers, forming_s, joining_s, gathering_s, rounds_s, upkeep)


def start_all(swarm: LightSwarm, num_peers: int) -> list[LightPeer]:
    swarm.galaxy_size = num_peers
    for rank in range(num_peers):
        wait_until(lambda: len(coming(swarm)) < _AT_ONCE, "the arrival of those before", _TIMEOUT_S)
        swarm.start(rank)
    wait_until(lambda: not coming(swarm), "the arrival of all", _TIMEOUT_S)
    return list(swarm.peers.values())


def coming(swarm: LightSwarm) -> list[LightPeer]:
    """The peers that are not in the swarm yet. Restarts those that have given up because the machine was too busy."""
    found = [peer for peer in swarm.peers.values() if "joined the swarm" not in peer.log]
    for peer in found:
        if peer.process.exitcode is not None:
            assert swarm.num_started <= _MAX_STARTS * len(swarm.peers), f"peers do not live: {peer.error}"
            print(f"peer {peer.rank} is started again: {peer.error}", file=sys.stderr, flush=True)
            swarm.start(peer.rank)
    return found


def first_steps_of(peers: Sequence[LightPeer]) -> list[float]:
    """The times at which the peers' workers began to train. Raises AssertionError if a daemon has ended."""

    def started() -> list[float]:
        for peer in peers:
            assert peer.process.exitcode is None, f"peer {peer.rank} ended: {peer.error or peer.log[-2000:]}"
        found = [next((r["time"] for r in peer.records("start")), None) for peer in peers]
        return [at for at in found if at is not None] if None not in found else []

    return list(wait_until(started, "the first step of all", _TIMEOUT_S))


def check_ranks(peers: Sequence[LightPeer]) -> None:
    """Assert that the peers have different ranks, even if the coordinator was too busy to assign some."""
    ranks = [peer.records("start")[0]["world_rank"] for peer in peers]
    assert len(set(ranks)) == len(ranks), sorted(ranks)


def upkeep_of(peers: Sequence[LightPeer]) -> float:
    """CPU time of membership per peer, as a fraction of a core, measured in the middle of an epoch."""
    pids = [peer.process.pid for peer in peers]
    pids += [pid for owner in pids for pid, argv in children_of(owner) if "p2pd" in argv[0]]
    time.sleep(_SETTLE_S)
    began, before = time.monotonic(), _cpu_s(pids)
    time.sleep(_IDLE_S)
    return (_cpu_s(pids) - before) / (time.monotonic() - began) / len(peers)


def epochs_of(peers: Sequence[LightPeer]) -> tuple[list[float], list[float]]:
    """For each epoch, the time from the last member's readiness to the group, and from the group to the commit."""
    gathering, rounds = [], []
    for epoch in range(1, NUM_EPOCHS + 1):
        told = [record for peer in peers for record in peer.epochs if record["epoch"] == epoch]
        gathering.append(min(record["wait_s"] for record in told))
        rounds.append(max(record["round_s"] for record in told))
    return gathering, rounds


def _cpu_s(pids: Sequence[int]) -> float:
    fields = (Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split() for pid in pids)
    return sum(int(found[11]) + int(found[12]) for found in fields) / _TICKS


def _results(found: Sequence[Measured]) -> list[Result]:
    rows: list[Result] = []
    for one in found:
        values: Mapping[str, tuple[str, list[float]]] = {
            "all train": ("s", [one.forming_s]),
            "one more trains": ("s", [one.joining_s]),
            "gathering": ("s", one.gathering_s),
            "round": ("s", one.rounds_s),
            "upkeep of a peer": ("% of a core", [100 * one.upkeep]),
        }
        rows += [Result.of(f"{one.num_peers} peers", name, unit, of) for name, (unit, of) in values.items()]
    return rows


def _notes() -> list[str]:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return [f"All on one machine, whose load averages were {load} at the end: times are upper bounds."]


if __name__ == "__main__":
    sys.exit(main())
