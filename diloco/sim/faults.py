"""Random faults of a schedule: drawn from a seed, and injected into a swarm. All are over by the schedule's end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from diloco.sim.swarm import VirtualSwarm, peer_id_of
from peers.core import effects

MOST_FAULTS = 6
MEAN_S, LONGEST_S = 4.0, 15.0
LONG_MEAN_S, LONG_LONGEST_S = 16.0, 38.0
"""Of schedules with long faults: both sides of such a long partition commit, and have to come together again."""
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


def draw_faults(rng: random.Random, num_peers: int, end_s: float, *, long: bool) -> list[Fault]:
    """Random faults in order of time; all are over by `end_s`. `long`: they last long, partitions among them."""
    kinds = rng.sample(list(KINDS), k=rng.randint(1, 4))
    if long:
        kinds[0] = "partition"
    faults = [
        _draw(rng, rng.choice(kinds), num_peers, end_s, long=long) for _ in range(rng.randint(0, MOST_FAULTS))
    ]
    return sorted(faults, key=lambda fault: fault.at)


def _draw(rng: random.Random, kind: str, num_peers: int, end_s: float, *, long: bool) -> Fault:
    mean_s, longest_s = (LONG_MEAN_S, LONG_LONGEST_S) if long else (MEAN_S, LONGEST_S)
    seconds = min(rng.expovariate(1 / mean_s) + 0.1, longest_s)
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
    begin, end = KINDS[fault.kind]
    until = fault.at + fault.seconds

    def strike() -> None:
        if swarm.now < until:
            begin(swarm, fault)
            swarm.at(until, lambda: end(swarm, fault))

    if not fault.before:
        strike()
    elif (peer := swarm.peers.get(fault.ranks[0])) is not None:
        peer.before[MOMENTS[fault.before]] = strike


def _restart(swarm: VirtualSwarm, fault: Fault) -> None:
    swarm.kill(fault.ranks[0])
    swarm.start(fault.ranks[0])


def _begin_again(swarm: VirtualSwarm, fault: Fault) -> None:
    """Soon after its last work the worker fails, and comes again; later, its whole peer is restarted."""
    if fault.seconds < MEAN_S:
        swarm.crash_worker(fault.ranks[0], 0.0)
    else:
        _restart(swarm, fault)


def _garble(swarm: VirtualSwarm, fault: Fault, *, does: bool) -> None:
    if (peer := swarm.peers.get(fault.ranks[0])) is not None:
        peer.garbles = does


def _rest(swarm: VirtualSwarm, fault: Fault) -> list[int]:
    return [rank for rank in range(swarm.num_peers) if rank not in fault.ranks]


def _bad_links(swarm: VirtualSwarm, fault: Fault) -> None:
    """All links lose, duplicate and delay messages."""
    quality = swarm.network.quality
    quality.loss, quality.duplication, quality.reordering = (swarm.rng.uniform(0.0, 0.2) for _ in range(3))


def _good_links(swarm: VirtualSwarm, fault: Fault) -> None:
    quality = swarm.network.quality
    quality.loss = quality.duplication = quality.reordering = 0.0


def _ends_itself(swarm: VirtualSwarm, fault: Fault) -> None:
    pass


Act = Callable[[VirtualSwarm, Fault], object]

KINDS: dict[str, tuple[Act, Act]] = {
    "kill": (lambda s, f: s.kill(f.ranks[0]), lambda s, f: s.start(f.ranks[0])),
    "vanish": (lambda s, f: s.kill(f.ranks[0], vanishes=True), lambda s, f: s.start(f.ranks[0])),
    "leave": (lambda s, f: s.leave(f.ranks[0]), _restart),
    "finish": (lambda s, f: s.finish(f.ranks[0]), _begin_again),
    "freeze": (lambda s, f: s.freeze(f.ranks[0], f.seconds), _ends_itself),
    "cut": (lambda s, f: s.cut(*f.ranks), lambda s, f: s.heal(*f.ranks)),
    "cut one way": (
        lambda s, f: s.cut(*f.ranks, one_way=True),
        lambda s, f: s.heal(*f.ranks, one_way=True),
    ),
    "partition": (
        lambda s, f: s.partition(f.ranks, _rest(s, f)),
        lambda s, f: s.heal_partition(f.ranks, _rest(s, f)),
    ),
    "crash the worker of": (lambda s, f: s.crash_worker(f.ranks[0], f.seconds), _ends_itself),
    "slow": (
        lambda s, f: s.slow_down(f.ranks[0], s.rng.uniform(1.5, 6.0)),
        lambda s, f: s.slow_down(f.ranks[0], 1.0),
    ),
    "garble": (lambda s, f: _garble(s, f, does=True), lambda s, f: _garble(s, f, does=False)),
    "bad links": (_bad_links, _good_links),
}
"""How a fault begins, and how it ends."""


def is_over(swarm: VirtualSwarm) -> bool:
    """Whether all injected faults are over."""
    everybody = {peer_id_of(rank) for rank in range(swarm.num_peers)}
    ail = (peer.is_frozen or peer.worker is None or peer.slowness != 1.0 for peer in swarm.honest)
    return everybody == set(swarm.live) and not swarm.network.cuts and not any(ail)
