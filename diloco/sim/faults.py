"""Random faults of a schedule: drawn from a seed, and injected into a swarm. All are over by the schedule's end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from diloco.sim.peer import VirtualPeer
from diloco.sim.swarm import VirtualSwarm, peer_id_of
from peers.core import effects

MOST_FAULTS = 6
LONGEST_S = 15.0
MOMENTS = {
    kind.__name__: kind
    for kind in (
        effects.Pledge,
        effects.Send,
        effects.Broadcast,
        effects.Reduce,
        effects.Apply,
        effects.Adopt,
    )
}
"""Effects just before which a fault may be injected."""


@dataclass(frozen=True)
class Fault:
    """A fault from `at` on, for `seconds`.

    `before`: it is injected just before the first rank's next effect of this kind, if that comes before its end.
    """

    at: float
    kind: str
    ranks: tuple[int, ...]
    seconds: float
    before: str = ""

    def __str__(self) -> str:
        when = f" before its next {self.before}" if self.before else ""
        return (
            f"{self.at:6.2f} s: {self.kind} {' '.join(map(str, self.ranks))}{when}, for {self.seconds:.2f} s"
        )


Begin = Callable[[VirtualSwarm, Fault], Callable[[], object]]
"""Injects a fault; returns the function that ends it."""


def draw_faults(rng: random.Random, num_peers: int, end_s: float) -> list[Fault]:
    """Random faults in order of time; all are over by `end_s`."""
    kinds = rng.sample(list(KINDS), k=rng.randint(1, 4))
    faults = [_draw(rng, rng.choice(kinds), num_peers, end_s) for _ in range(rng.randint(0, MOST_FAULTS))]
    return sorted(faults, key=lambda fault: fault.at)


def _draw(rng: random.Random, kind: str, num_peers: int, end_s: float) -> Fault:
    seconds = min(rng.expovariate(1 / 4.0) + 0.1, LONGEST_S)
    ranks = rng.sample(range(num_peers), k=num_peers)
    if kind == "partition":
        ranks = ranks[: rng.randint(1, num_peers - 1)]
    elif kind.startswith("cut"):
        ranks = ranks[:2]
    else:
        ranks = ranks[:1]
    fault = Fault(rng.uniform(0.0, end_s - seconds), kind, tuple(ranks), seconds)
    return replace(fault, before=rng.choice(list(MOMENTS))) if rng.random() < 0.4 else fault


def inject(swarm: VirtualSwarm, faults: list[Fault]) -> None:
    for fault in faults:
        swarm.at(fault.at, lambda fault=fault: _strike(swarm, fault))  # type: ignore[misc]


def _strike(swarm: VirtualSwarm, fault: Fault) -> None:
    begin, until = KINDS[fault.kind], fault.at + fault.seconds
    if not fault.before:
        swarm.at(until, begin(swarm, fault))
        return
    peer = swarm.peers.get(fault.ranks[0])
    if peer is not None:
        peer.before[MOMENTS[fault.before]] = lambda: (
            swarm.at(until, begin(swarm, fault)) if swarm.now < until else None
        )


def _kill(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    (rank,) = fault.ranks
    swarm.kill(rank)
    return lambda: swarm.start(rank)


def _vanish(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    (rank,) = fault.ranks
    swarm.kill(rank, vanishes=True)
    return lambda: swarm.start(rank)


def _leave(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    (rank,) = fault.ranks
    swarm.leave(rank)

    def end() -> None:
        swarm.kill(rank)
        swarm.start(rank)

    return end


def _finish(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    (rank,) = fault.ranks
    swarm.finish(rank)

    def end() -> None:
        swarm.kill(rank)
        swarm.start(rank)

    return end


def _freeze(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    swarm.freeze(fault.ranks[0], fault.seconds)
    return lambda: None


def _cut(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    swarm.cut(*fault.ranks)
    return lambda: swarm.heal(*fault.ranks)


def _cut_one_way(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    swarm.cut(*fault.ranks, one_way=True)
    return lambda: swarm.heal(*fault.ranks, one_way=True)


def _partition(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    rest = [rank for rank in range(swarm.num_peers) if rank not in fault.ranks]
    swarm.partition(fault.ranks, rest)
    return lambda: swarm.heal_partition(fault.ranks, rest)


def _crash_worker(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    swarm.crash_worker(fault.ranks[0], fault.seconds)
    return lambda: None


def _slow(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    (rank,) = fault.ranks
    swarm.slow_down(rank, swarm.world.rng.uniform(1.5, 6.0))
    return lambda: swarm.slow_down(rank, 1.0)


def _garble(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    peer = swarm.peers.get(fault.ranks[0])

    def end() -> None:
        if peer is not None:
            peer.garbles = False

    if peer is not None:
        peer.garbles = True
    return end


def _bad_links(swarm: VirtualSwarm, fault: Fault) -> Callable[[], object]:
    """All links lose, duplicate and delay messages."""
    rng, quality = swarm.world.rng, swarm.world.network.quality
    quality.loss, quality.duplication, quality.reordering = (rng.uniform(0.0, 0.2) for _ in range(3))

    def end() -> None:
        quality.loss = quality.duplication = quality.reordering = 0.0

    return end


KINDS: dict[str, Begin] = {
    "kill": _kill,
    "vanish": _vanish,
    "leave": _leave,
    "finish": _finish,
    "freeze": _freeze,
    "cut": _cut,
    "cut one way": _cut_one_way,
    "partition": _partition,
    "crash the worker of": _crash_worker,
    "slow": _slow,
    "garble": _garble,
    "bad links": _bad_links,
}


def is_over(swarm: VirtualSwarm) -> bool:
    """Whether all injected faults are over."""
    everybody = {peer_id_of(rank) for rank in range(swarm.num_peers)}
    return everybody == set(swarm.live) and not swarm.world.network.cuts and not any(map(_ails, swarm.honest))


def _ails(peer: VirtualPeer) -> bool:
    return peer.is_frozen or peer.worker is None or peer.slowness != 1.0
