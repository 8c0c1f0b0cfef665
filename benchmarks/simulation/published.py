"""Predicts results that others have published from their descriptions of models, peers and links.

Streaming DiLoCo (arXiv 2501.18512, table 4) gives the bandwidth required for a compute utilisation, by its own
simulation, for 1B, 10B and 100B weights, steps of 0.1, 0.8 and 4.9 s, H = 100. Additional assumptions here: two peers,
as in its experiments; bf16 on the wire unless stated otherwise, and our int4 (4.25 bits) for its FP4; no latency and no
CPU time, since it states neither; fragments of three layers, and for H the multiple of their number that is nearest to
100. It also hides communication behind the backward pass, two thirds of a step, which the product does not do, so this
time is subtracted from the blocked time of each round in our simulation. Its bandwidths are points of a grid, 50 from
0.1 to 1000 Gbit/s with equal ratios of 1.207. Ours are searched on the same grid and compared with the point nearest to
the printed value, so neighbours differ by 21 %. Most of ours are one point above: its figures fit 13.6 bits per weight
rather than 16.

INTELLECT-1 (arXiv 2412.01152, table 2) reports medians of 103 s in the USA, 382 s with Europe and 469 s around the
world for averaging 10B weights in int8, between inner phases of 38 minutes, with up to 14 nodes, and link bandwidths
between 500 Mbit/s and 4 Gbit/s. It does not say which links and how many nodes each of the three had. Assumptions: 14
peers; the fastest of these links in the USA, the slowest across an ocean; round trips of 60, 120 and 250 ms.
`network alone` has no CPU time. `one pace` takes the time that CPUs add from the first figure (and so predicts nothing
about it), as seconds that do not overlap with the network, and predicts the other two. Its ring moves the same bytes as
our shares, 2 (n - 1) / n of the vector each way, and is as fast as its slowest link, like ours, but takes 2 (n - 1)
latencies, under 7 s here, where ours takes four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.record import Result
from diloco.sim.cost.links import Link
from diloco.sim.cost.machine import IDEAL
from diloco.sim.cost.scenario import Scenario, SimulatedPeer
from diloco.sim.cost.swarm import simulate
from peers.core.schedule import Schedule

GRID = tuple(10 ** (-1 + 4 * index / 49) for index in range(50))
"""Bandwidths in Gbit/s."""
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
_BACKWARD = 2 / 3
"""Share of the backward pass in a step."""


@dataclass(frozen=True, kw_only=True)
class Model:
    num_params: int
    num_layers: int
    step_s: float


MODELS = {
    "1B": Model(num_params=10**9, num_layers=24, step_s=0.1),
    "10B": Model(num_params=10**10, num_layers=48, step_s=0.8),
    "100B": Model(num_params=10**11, num_layers=108, step_s=4.9),
}
METHODS = ("vanilla", "streaming", "overlapped", "overlapped FP4")
STREAMING_DILOCO: dict[tuple[str, str], tuple[float, ...]] = {
    ("1B", "vanilla"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "overlapped"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "overlapped FP4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "vanilla"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "overlapped"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "overlapped FP4"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "vanilla"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "overlapped"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "overlapped FP4"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
"""Published bandwidths in Gbit/s for each of TARGETS; used only for comparison."""

INTELLECT_1 = {"USA": 103.0, "USA and Europe": 382.0, "global": 469.0}
"""Published median seconds of an all-reduce."""
_INTELLECT_LINKS = {"USA": (4e9, 0.06), "USA and Europe": (500e6, 0.12), "global": (500e6, 0.25)}
NUM_MANY = 256
"""Number of peers of the simulation that is timed."""
_INTELLECT_PEERS, _INTELLECT_STEP_S = 14, 38 * 60 / 100


def streaming_diloco(sizes: Sequence[str]) -> tuple[list[Result], list[dict[str, str]]]:
    """Ratios of predicted and published bandwidths, with the five targets as repetitions, and a table of both."""
    rows, table = [], []
    for size in sizes:
        for method in METHODS:
            printed = STREAMING_DILOCO[size, method]
            theirs = [min(GRID, key=lambda point, one=one: abs(point - one)) for one in printed]
            ours = [bandwidth_for(target, MODELS[size], method) for target in TARGETS]
            ratios = [mine / published for mine, published in zip(ours, theirs, strict=True)]
            case = f"Streaming DiLoCo {size} {method}"
            rows.append(Result.of(case, "Gbit/s, predicted / published", "ratio", ratios))
            table.append(
                {
                    "Streaming DiLoCo": f"{size} {method}",
                    "Gbit/s for 50, 80, 90, 95, 99 %, published": ", ".join(f"{one:g}" for one in printed),
                    "predicted": ", ".join(f"{one:.3g}" for one in ours),
                }
            )
    return rows, table


def bandwidth_for(target: float, model: Model, method: str) -> float:
    """The lowest bandwidth of the grid, in Gbit/s, that reaches this utilisation."""
    low, high = 0, len(GRID) - 1
    while low < high:
        middle = (low + high) // 2
        figures = simulate(two_peers(model, method, 1e9 * GRID[middle]))
        hidden_s = min(figures.parts.blocked_s, _BACKWARD * model.step_s)
        if figures.train_s / (figures.epoch_s - hidden_s) >= target:
            high = middle
        else:
            low = middle + 1
    return GRID[low]


def two_peers(model: Model, method: str, bits_per_s: float) -> Scenario:
    if method == "vanilla":
        schedule = Schedule(local_steps=100)
    else:
        count = model.num_layers // 3
        schedule = Schedule(
            local_steps=count * round(100 / count),
            num_fragments=count,
            overlap_steps=int(method.startswith("overlapped")),
        )
    # The published bandwidths are net of protocol overhead.
    link = Link(up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, delay_s=0.0, fill=1.0)
    peer = SimulatedPeer(link=link, machine=IDEAL, step_s=model.step_s)
    return Scenario(
        peers=(peer,) * 2,
        num_params=model.num_params,
        codec="int4" if method.endswith("FP4") else "bf16",
        schedule=schedule,
        num_epochs=4,
    )


def intellect_1() -> list[Result]:
    """Predicted and published seconds of an all-reduce, and their ratios."""
    network = {name: all_reduce_s(*link) for name, link in _INTELLECT_LINKS.items()}
    added_s = INTELLECT_1["USA"] - network["USA"]
    rows = []
    for name, published in INTELLECT_1.items():
        case = f"INTELLECT-1 {name}"
        rows += [
            Result.of(case, "all-reduce, published", "s", [published]),
            Result.of(case, "network alone", "s", [network[name]]),
            Result.of(case, "network alone / published", "ratio", [network[name] / published]),
        ]
        if name != "USA":
            predicted = network[name] + added_s
            rows += [
                Result.of(case, "one pace", "s", [predicted]),
                Result.of(case, "one pace / published", "ratio", [predicted / published]),
            ]
    return rows


def all_reduce_s(bits_per_s: float, round_trip_s: float) -> float:
    link = Link(up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, delay_s=round_trip_s / 4)
    peer = SimulatedPeer(link=link, machine=IDEAL, step_s=_INTELLECT_STEP_S)
    scenario = Scenario(
        peers=(peer,) * _INTELLECT_PEERS,
        num_params=10**10,
        codec="int8",
        schedule=Schedule(local_steps=100),
        num_epochs=3,
    )
    return simulate(scenario).parts.reduce_s


def many_peers() -> Scenario:
    """A scenario with different links, and with failures."""
    peers = []
    for rank in range(NUM_MANY):
        bits_per_s = 100e6 * 2 ** (rank % 7)
        link = Link(up_bits_per_s=bits_per_s, down_bits_per_s=2 * bits_per_s, delay_s=0.005 * (1 + rank % 5))
        peers.append(SimulatedPeer(link=link, machine=replace(IDEAL, hop_s=0.001), step_s=1.0))
    return Scenario(
        peers=tuple(peers),
        num_params=10**9,
        codec="int8",
        schedule=Schedule(local_steps=100),
        num_epochs=5,
        jitter=0.01,
        mtbf_s=100 * 3600.0,
    )
