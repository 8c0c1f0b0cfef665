"""Light swarms (benchmarks/light_swarm.py) on networks of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import light_swarm
from benchmarks.light_swarm import DEADLINE_S, LightPeer, wait_until
from tests.support.preparations import edges

__all__ = ["DEADLINE_S", "LightPeer", "LightSwarm", "check_well", "wait_until"]


def check_well(peers: Iterable[LightPeer]) -> None:
    """Assert that the processes of these peers still run, and that their logs contain no exception."""
    for peer in peers:
        assert peer.process.is_alive() and not peer.error
        assert "Traceback" not in peer.log, peer.log[-3000:]


class LightSwarm(light_swarm.LightSwarm):
    def __init__(self, directory: Path, initial_peers: list[str], run_id: str, **worker: Any) -> None:
        super().__init__(directory, initial_peers, run_id, **worker)
        self.namespaces: dict[int, str] = {}
        """Network namespaces that peers live in, by rank."""
        self.no_path: set[frozenset[int]] = set()
        """Pairs of ranks that libp2p cannot connect."""
        self.preparations: dict[int, Callable[[], object]] = {}
        """By rank: what a process does before it becomes a peer, in place of the above (see preparations.py)."""

    def __enter__(self) -> LightSwarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def least_epoch(self, ranks: Iterable[int] | None = None) -> int:
        return min(self.peers[rank].epoch for rank in (self.peers if ranks is None else ranks))

    def begin(self, *ranks: int) -> LightSwarm:
        """Start these peers as founders, and wait for their first epoch."""
        self.galaxy_size = len(ranks)
        founders = [self.start(rank) for rank in ranks]
        wait_until(lambda: all(peer.epoch >= 1 for peer in founders), "the first epoch")
        return self

    def goes_on(self, num_epochs: int = 2, within_s: float = DEADLINE_S) -> None:
        """Wait for so many more epochs of all peers, and check that the peers are well."""
        before = {rank: peer.epoch for rank, peer in self.peers.items()}
        wait_until(
            lambda: all(peer.epoch >= before[rank] + num_epochs for rank, peer in self.peers.items()),
            f"{num_epochs} more epochs",
            within_s,
        )
        self.check_digests()
        check_well(self.peers.values())

    def check_none_is_missed(self) -> None:
        """Assert that every epoch so far was recorded, and with one digest by all peers that recorded it."""
        last = max(peer.epoch for peer in self.peers.values())
        wait_until(lambda: self.check_digests().keys() >= set(range(1, last + 1)), "a record of every epoch")

    def preparation_of(self, rank: int) -> Callable[[], object] | None:
        if rank in self.preparations:
            return self.preparations[rank]
        others = [other for pair in self.no_path if rank in pair for other in pair - {rank}]
        namespace = self.namespaces.get(rank, "")
        if not others and not namespace:
            return None
        return partial(edges, namespace=namespace, cut_off_from=[self.peer_id(other) for other in others])
