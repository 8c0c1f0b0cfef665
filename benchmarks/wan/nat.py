"""Two peers behind NAT that cannot reach each other, and a public one that both reach, which is killed at the end."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.lab import Lab
from benchmarks.record import Result, say
from benchmarks.swarm_harness import Swarm, SwarmError
from benchmarks.wan.cases import Case, even
from benchmarks.wan.rounds import COORDINATOR, WARM_UP_EPOCHS, swarm_in
from diloco.sim.cost.links import TCP_PAYLOAD

_MBPS, _ROUND_TRIP_MS = 100, 40
_PUBLIC, _HIDDEN = 0, (1, 2)
_LONE_EPOCHS = 2


def results(num_rounds: int, *, quick: bool) -> list[Result]:
    """Round times relative to the transfer time on the public link, and the others' rounds after that peer's death."""
    case = _case(quick=quick)
    rows: list[Result] = []
    with Lab([*case.links, COORDINATOR]) as lab, tempfile.TemporaryDirectory() as directory:
        for peer in _HIDDEN:
            lab.put_behind_nat(peer)
        num_epochs = WARM_UP_EPOCHS + num_rounds + _LONE_EPOCHS
        with swarm_in(lab, Path(directory), case, "fp32", num_epochs) as swarm:
            for epoch in range(1, WARM_UP_EPOCHS + 1):
                swarm.run_epoch(epoch)
            times, costs, contributors = [], [], []
            for number in range(1, num_rounds + 1):
                before = lab.counters(_PUBLIC)
                records = swarm.run_epoch(WARM_UP_EPOCHS + number)
                used = lab.counters(_PUBLIC) - before
                times.append(max(record["round_s"] for record in records))
                busiest = max(used.up_wire_bytes, used.down_wire_bytes)
                costs.append(busiest / case.links[_PUBLIC].up_bytes_per_s)
                contributors.append(float(min(len(record["contributors"]) for record in records)))
                say(f"nat round {number}: {times[-1]:.2f} s")
            least = TCP_PAYLOAD * case.links[_PUBLIC].up_bytes_per_s
            rows += [
                Result.of("nat", "round", "s", times),
                Result.of("nat", "public link's bytes / rate", "s", costs),
                Result.of(
                    "nat", "round / public link", "ratio", [t / c for t, c in zip(times, costs, strict=True)]
                ),
                Result.of("nat", "contributors", "peers", contributors),
                Result.of("nat", "one tensor over a link", "s", [case.tensor_bytes / least]),
            ]
            rows += _without_the_public_peer(swarm, WARM_UP_EPOCHS + num_rounds + 1)
            say(f"nat, public peer killed: next epoch after {rows[-2].median:.1f} s")
    return rows


def _case(*, quick: bool) -> Case:
    return even("nat", 3, _MBPS, _ROUND_TRIP_MS, 4 if quick else 32, ["fp32"])


def _without_the_public_peer(swarm: Swarm, epoch: int) -> list[Result]:
    """Kill the public peer and measure the others' next epoch. Without a relay, they may not reach each other."""
    swarm.peers[_PUBLIC].kill()
    began = time.monotonic()
    try:
        records = swarm.run_epoch(epoch, ranks=_HIDDEN)
    except SwarmError as error:
        # Two peers that cannot reach each other continue on separate chains until they are connected again.
        if "anchors" not in str(error):
            raise
        records = [swarm.peers[rank].epochs[epoch] for rank in _HIDDEN]
    # All processes share the monotonic clock.
    took = max(record["time"] for record in records) - began
    together = float(min(len(record["contributors"]) for record in records))
    return [
        Result.of("nat, public peer killed", "until the next epoch", "s", [took]),
        Result.of("nat, public peer killed", "contributors", "peers", [together]),
    ]
