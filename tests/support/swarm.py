"""Light swarms (benchmarks/light_swarm.py) on networks of a test's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import light_swarm
from benchmarks.light_swarm import DEADLINE_S, LightPeer, children_of, wait_until
from tests.support.light_edges import edges
from tests.support.lying_core import lie
from tests.support.poison import Lie, poison

__all__ = ["DEADLINE_S", "LightPeer", "LightSwarm", "children_of", "wait_until"]


class LightSwarm(light_swarm.LightSwarm):
    def __init__(self, directory: Path, initial_peers: list[str], run_id: str, **worker: Any) -> None:
        super().__init__(directory, initial_peers, run_id, **worker)
        self.namespaces: dict[int, str] = {}
        """Network namespaces that peers live in, by rank."""
        self.no_path: set[frozenset[int]] = set()
        """Pairs of ranks between which libp2p gets nothing through."""
        self.lies: dict[int, Lie] = {}
        """What hostile peers do to what they contribute, by rank."""
        self.liars: dict[int, str] = {}
        """How they lie in what they say, by rank: names of diloco.sim.schedules.ALL_LIARS."""
        self.preparations: dict[int, Callable[[], object]] = {}
        """What else a process does before it becomes a peer, by rank."""

    def preparation_of(self, rank: int) -> Callable[[], object] | None:
        others = [other for pair in self.no_path if rank in pair for other in pair - {rank}]
        namespace = self.namespaces.get(rank, "")
        if rank in self.preparations:
            return self.preparations[rank]
        if rank in self.lies:
            return partial(poison, self.lies[rank])
        if rank in self.liars:
            return partial(lie, self.liars[rank])
        if not others and not namespace:
            return None
        return partial(edges, namespace=namespace, cut_off_from=[self.peer_id(other) for other in others])
