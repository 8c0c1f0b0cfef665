"""The faults of plan.py on the virtual runtime: 20 minutes of six peers in seconds, and how long workers wait.

The peers use the daemons' state machine (peers/core); links, reductions and downloads are models (diloco/sim). A test
compares the goodput with that of a run without faults, as a first check of waiting rules before the real benchmark.
Faults without a model (slow link, corrupt byte, disorder, clock, disk, coordinator) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos.plan import Fault
from diloco.sim.swarm import Durations, VirtualSwarm, settings_for

STEPS = 50
STEP_S = 0.1
SAMPLE_INTERVAL_S = 0.05
"""Interval at which the peers' activity is sampled."""
FORMS_S = 30.0
RESTART_S = 0.4


@dataclass(frozen=True)
class Outcome:
    tokens_per_live_s: float
    waiting: float
    """Fraction of the time in which running workers wait."""


def run(seed: int, *, num_peers: int, seconds: float, faults: Sequence[Fault]) -> Outcome:
    # Durations of the light peers in the real benchmark on two cores.
    durations = Durations(step_s=STEP_S, load_s=(0.6, 1.2), reduce_s=(0.08, 0.25), fetch_s=(0.1, 0.3))
    settings = settings_for(num_peers, steps_per_epoch=STEPS, grace_s=float("inf"))
    swarm = VirtualSwarm(num_peers, seed, settings=settings, durations=durations, encodes=False)
    swarm.run(FORMS_S)
    for fault in faults:
        _plan(swarm, fault, swarm.now)
    end, live_s, waited_s = swarm.now + seconds, 0.0, 0.0
    before = _num_committed(swarm)
    while swarm.now < end:
        swarm.run(SAMPLE_INTERVAL_S)
        for peer in swarm.peers.values():
            worker = peer.worker
            if worker is not None and worker.has_begun and not peer.is_frozen:
                live_s += SAMPLE_INTERVAL_S
                if worker.waits:
                    waited_s += SAMPLE_INTERVAL_S
    return Outcome((_num_committed(swarm) - before) / live_s, waited_s / live_s)


def _plan(swarm: VirtualSwarm, fault: Fault, began_at: float) -> None:
    at, end = began_at + fault.at_s, began_at + fault.until_s
    ranks = fault.ranks
    others = [rank for rank in range(swarm.num_peers) if rank not in ranks]
    match fault.kind:
        case "kill daemon" | "kill p2pd":
            swarm.at(at, lambda: swarm.kill(ranks[0]))
            swarm.at(end, lambda: swarm.start(ranks[0]))
        case "leave":
            swarm.at(at, lambda: swarm.leave(ranks[0], RESTART_S))
            swarm.at(max(end, at + 2 * RESTART_S), lambda: swarm.start(ranks[0]))
        case "kill worker":
            swarm.at(at, lambda: swarm.crash_worker(ranks[0], RESTART_S))
        case "freeze":
            swarm.at(at, lambda: swarm.freeze(ranks[0], end - at))
        case "cut link" | "silent link":
            swarm.at(at, lambda: swarm.cut(*ranks))
            swarm.at(end, lambda: swarm.heal(*ranks))
        case "partition":
            swarm.at(at, lambda: swarm.partition(ranks, others))
            swarm.at(end, lambda: swarm.heal_partition(ranks, others))


def _num_committed(swarm: VirtualSwarm) -> int:
    states = [peer.state for peer in swarm.peers.values() if peer.state is not None]
    return len(max(states, key=lambda state: state.epoch).pieces)
