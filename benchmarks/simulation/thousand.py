"""Simulates a thousand unlike peers with the product's own core, on simulated links and machines.

10B weights in int4, H = 96 in 16 fragments of which each is averaged every 96 steps, workers that never wait for a
round, and the epoch length that trains most tokens (`--hv.overlap-steps auto`, `--hv.local-time auto`). Links have 100
Mbit/s to 1 Gbit/s in both directions and machines take 8 to 32 s for a step, both drawn log-uniformly; round trips are
20 to 120 ms. Each peer is lost once in 24 hours on average, falls silent like a machine that is switched off, and is
back after five minutes, when it downloads the state. The first three commits are not counted: peers learn in them how
fast the others are. All other assumptions are those of `diloco simulate`.
"""

from __future__ import annotations

import random

from benchmarks.record import Result
from diloco.sim.cost.figures import Figures
from diloco.sim.cost.links import Link
from diloco.sim.cost.machine import machine_of
from diloco.sim.cost.scenario import Scenario, SimulatedPeer
from peers.core.schedule import AS_LONG_AS_THE_ROUND, Schedule

NUM_PEERS = 1000
_CORES = 8
_SEED = 1


def scenario(num_peers: int = NUM_PEERS, num_epochs: int = 8) -> Scenario:
    rng = random.Random(_SEED)
    machine = machine_of(_CORES, "int4")
    peers = []
    for _ in range(num_peers):
        bits_per_s, step_s = 100e6 * 10 ** rng.random(), 8.0 * 4 ** rng.random()
        link = Link(
            up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, delay_s=rng.choice((0.005, 0.015, 0.03))
        )
        peers.append(SimulatedPeer(link=link, machine=machine, step_s=step_s))
    return Scenario(
        peers=tuple(peers),
        num_params=10**10,
        codec="int4",
        schedule=Schedule(
            local_steps=96, num_fragments=16, overlap_steps=AS_LONG_AS_THE_ROUND, local_time_s=0.0
        ),
        tokens_per_step=1 << 19,
        num_epochs=num_epochs,
        num_uncounted=3,
        jitter=0.005,
        mtbf_s=24 * 3600.0,
    )


def results(figures: Figures, cpu_s: float) -> list[Result]:
    case = f"{figures.num_peers} peers, 10B, int4, failures"
    values = {
        ("utilisation", ""): figures.utilisation,
        ("length of an epoch", "s"): figures.epoch_s,
        ("round", "s"): figures.parts.round_s,
        ("first peer waits for the last", "s"): figures.parts.wait_s,
        ("gathering, from the last one's work", "s"): figures.gathering_s,
        ("contributors", ""): figures.members,
        ("epochs", ""): float(figures.num_epochs),
        ("peers lost", ""): float(figures.losses.peers_lost),
        ("attempts failed", ""): float(figures.losses.failed_attempts),
        ("processor time", "s"): cpu_s,
    }
    return [Result.of(case, metric, unit, [value]) for (metric, unit), value in values.items()]
