"""Runs real peers in the laboratory, and simulates the same runs."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab
from benchmarks.lab import Link as LabLink
from benchmarks.light_loop import Loop
from benchmarks.record import Result, say
from benchmarks.swarm_harness import Job, Swarm
from benchmarks.wan.cases import link
from benchmarks.wan.rounds import COORDINATOR, seat
from diloco.sim.cost.figures import Figures
from diloco.sim.cost.links import Link
from diloco.sim.cost.machine import Machine
from diloco.sim.cost.scenario import Scenario, SimulatedPeer
from diloco.sim.cost.swarm import simulate
from peers.core.schedule import Schedule

NUM_PEERS = 4
_ROUND_TRIP_MS = 20.0
_WAIT_S = 0.1
"""Duration of a step, nearly all of it a sleep, as if for a device, since all peers and daemons share one machine."""
_FASTER = link(500, 1)
"""The link for calibration, faster than those of the predicted runs, so that CPU times dominate."""
_CODEC = "fp32"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Parameters of the runs."""

    megabytes: int = 32
    """2**20 bytes of fp32 weights."""
    num_epochs: int = 6
    """Epochs that are measured, after one for warm-up."""
    mbps: Sequence[float] = (50.0, 100.0, 200.0)

    @property
    def numel(self) -> int:
        return (self.megabytes << 20) // 4


QUICK = Setting(megabytes=8, num_epochs=3, mbps=(100.0,))
SCHEDULES = {
    "blocking": Schedule(local_steps=20),
    "overlapped": Schedule(local_steps=40, num_fragments=2, overlap_steps=10),
}
_CALIBRATED_BY = Schedule(local_steps=20)


@dataclass(frozen=True)
class Measured:
    """The records of a run: for each peer those of its commits in order, without the first."""

    peers: Sequence[Sequence[Mapping[str, Any]]]

    @property
    def epoch_s(self) -> list[float]:
        """Times between commits, each taken when the last peer has made it."""
        ends = [max(times) for times in zip(*([r["time"] for r in peer] for peer in self.peers), strict=True)]
        return [later - earlier for earlier, later in itertools.pairwise(ends)]

    def longest(self, part: str) -> list[float]:
        """The maximum of a figure over all peers, for each epoch."""
        return [max(values) for values in zip(*([r[part] for r in peer] for peer in self.peers), strict=True)]


def results(setting: Setting) -> list[Result]:
    machine, step_s = calibrated(setting)
    names = ("propose", "reduce", "preview", "apply", "take")
    paces = ", ".join(f"{name} {getattr(machine, name) / 1e6:.0f} MB/s" for name in names)
    say(f"processors: a step takes {1e3 * step_s:.0f} ms, {paces}")
    rows: list[Result] = []
    for mbps in setting.mbps:
        for name, schedule in SCHEDULES.items():
            behind = link(mbps, _ROUND_TRIP_MS)
            measured = run(setting, schedule, behind)
            predicted = predict(setting, schedule, behind, machine, step_s)
            case = f"lab {mbps:g} Mbit/s {name}"
            found = compared(case, measured, predicted)
            rows += found
            say(f"{case}: " + ", ".join(f"{r.metric} {r.median:.3f}" for r in found if "/" in r.metric))
    return rows


def compared(case: str, measured: Measured, predicted: Figures) -> list[Result]:
    rows = []
    pairs = {
        "epoch": (measured.epoch_s, predicted.epoch_s),
        "round": (measured.longest("round_s"), predicted.parts.round_s),
        "reduce": (measured.longest("reduce_s"), predicted.parts.reduce_s),
        "outer step": (measured.longest("apply_s"), predicted.parts.apply_s),
        "stood still": (measured.longest("blocked_s"), predicted.parts.blocked_s),
    }
    for what, (values, expected) in pairs.items():
        rows += [
            Result.of(case, what, "s", values),
            Result.of(case, f"{what}, predicted", "s", [expected]),
        ]
        if what in ("epoch", "round"):
            rows.append(
                Result.of(
                    case, f"{what}, predicted / measured", "ratio", [expected / statistics.median(values)]
                )
            )
    return rows


def run(setting: Setting, schedule: Schedule, behind: LabLink) -> Measured:
    """Run real peers, started by `diloco peer`."""
    loop = Loop(
        numel=setting.numel,
        num_layers=4 * schedule.num_fragments,
        wait_s=_WAIT_S,
        move_parts=schedule.steps_per_epoch,
        max_epochs=1 + setting.num_epochs,
    )
    flags: tuple[str, ...] = ("--hv.compression", _CODEC, "--hv.averaging-timeout", "300")
    flags += (
        "--hv.num-fragments",
        str(schedule.num_fragments),
        "--hv.overlap-steps",
        str(schedule.overlap_steps),
    )
    job = Job(loop=loop, local_steps=schedule.local_steps, is_gated=False, flags=flags)
    with Lab([*[behind] * NUM_PEERS, COORDINATOR]) as lab, tempfile.TemporaryDirectory() as directory:
        seats = [seat(lab, peer) for peer in range(NUM_PEERS)]
        with Swarm(job, Path(directory), seats, coordinator=seat(lab, NUM_PEERS)) as swarm:
            swarm.wait_for_end()
            records = [list(peer.epochs.values()) for peer in swarm.peers]
    # Without the first epoch, in which connections are opened and links measured.
    return Measured([peer[1:] for peer in records])


def calibrated(setting: Setting) -> tuple[Machine, float]:
    """The machine's paces and the duration of a step, from a blocking run behind a faster link."""
    measured = run(setting, _CALIBRATED_BY, _FASTER)
    usual = {
        part: statistics.median(measured.longest(part))
        for part in ("propose_s", "connect_s", "reduce_s", "preview_s", "vote_s", "apply_s")
    }
    copies_s = statistics.median(
        record["blocked_s"] - record["wait_s"] - record["round_s"]
        for peer in measured.peers
        for record in peer
    )
    epoch_s, blocked_s = statistics.median(measured.epoch_s), statistics.median(measured.longest("blocked_s"))
    # The reduction is limited by the link as well, so its pace is a lower bound, which is enough for slower links.
    num_bytes, round_trip_s = 4.0 * setting.numel, 4e-3 * _FASTER.delay_ms
    machine = Machine(
        hand_over=2 * num_bytes / copies_s,
        propose=num_bytes / usual["propose_s"],
        reduce=num_bytes / usual["reduce_s"],
        preview=num_bytes / usual["preview_s"],
        apply=num_bytes / usual["apply_s"],
        take=2 * num_bytes / copies_s,
        hop_s=max(0.0, usual["vote_s"] - round_trip_s) / 2,
    )
    return machine, (epoch_s - blocked_s) / _CALIBRATED_BY.local_steps


def predict(
    setting: Setting, schedule: Schedule, behind: LabLink, machine: Machine, step_s: float
) -> Figures:
    peer = SimulatedPeer(
        link=Link(
            up_bits_per_s=1e6 * behind.up_mbps,
            down_bits_per_s=1e6 * behind.down_mbps,
            delay_s=1e-3 * behind.delay_ms,
        ),
        machine=machine,
        step_s=step_s,
    )
    scenario = Scenario(
        peers=(peer,) * NUM_PEERS,
        num_params=setting.numel,
        codec=_CODEC,
        schedule=schedule,
        num_epochs=setting.num_epochs,
    )
    return simulate(scenario)
