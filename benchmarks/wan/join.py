"""A third peer joins two with a large state: while they are idle, and while epochs are shorter than its download."""

from __future__ import annotations

import re
import tempfile
import time
from datetime import datetime
from pathlib import Path

from benchmarks.lab import Lab
from benchmarks.light_loop import Loop
from benchmarks.progress import Progress
from benchmarks.record import Result
from benchmarks.swarm_harness import Job, Peer, Swarm
from benchmarks.wan.cases import Case, even
from benchmarks.wan.rounds import COORDINATOR, START_S, seat
from diloco.sim.cost.links import TCP_PAYLOAD

_MBPS, _ROUND_TRIP_MS, _DONORS = 1000, 10, 2
_WITHIN_S = 300.0
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ", re.M)
_AVERAGING = {"at rest": "fp32", "short epochs": "int8"}
"""What the donors do during the join, with the codec that they average with."""


def steps(*, quick: bool) -> dict[str, float]:
    """The parts of `results` with their estimated seconds, for a Progress."""
    return {_name(how): START_S + 6 * _least_s(_case(quick=quick)) for how in _AVERAGING}


def results(progress: Progress, *, quick: bool) -> list[Result]:
    """The newcomer's time from its first request to training, relative to the transfer time of the state."""
    rows: list[Result] = []
    for how, codec in _AVERAGING.items():
        took, epochs, replayed = _measured(_case(quick=quick), codec, is_gated=how == "at rest")
        least = _least_s(_case(quick=quick))
        rows += [
            Result.of(_name(how), "until it trains", "s", [took]),
            Result.of(_name(how), "state / link", "s", [least]),
            Result.of(_name(how), "until it trains / state over link", "ratio", [took / least]),
            Result.of(_name(how), "commits of the others meanwhile", "epochs", [float(epochs)]),
            Result.of(_name(how), "commits made after them", "epochs", [float(replayed)]),
        ]
        progress.done(_name(how), f"{took:.1f} s, {took / least:.2f} of its bytes' time")
    return rows


def _name(how: str) -> str:
    return f"join {how}"


def _case(*, quick: bool) -> Case:
    """The network, and the size of the model; the state, anchor and momentum, is twice as large."""
    return even("join", _DONORS + 1, _MBPS, _ROUND_TRIP_MS, 32 if quick else 512, ["fp32"])


def _least_s(case: Case) -> float:
    return 2 * case.tensor_bytes / (TCP_PAYLOAD * case.links[0].down_bytes_per_s)


def _measured(case: Case, codec: str, *, is_gated: bool) -> tuple[float, int, int]:
    """Seconds until the newcomer trains, epochs committed by the others meanwhile, commits replayed by the newcomer."""
    loop = Loop(numel=case.tensor_bytes // 4, num_layers=4, max_epochs=10_000)
    job = Job(
        loop=loop, is_gated=is_gated, flags=("--hv.compression", codec, "--hv.averaging-timeout", "300")
    )
    with Lab([*case.links, COORDINATOR]) as lab, tempfile.TemporaryDirectory() as directory:
        seats = [seat(lab, peer) for peer in range(_DONORS)]
        with Swarm(job, Path(directory), seats, coordinator=seat(lab, len(case.links))) as swarm:
            # Start after epoch 1: at epoch 0 the momentum is zero and is not sent.
            swarm.run_epoch(1)
            before = len(swarm.peers[0].epochs)
            seats.append(seat(lab, _DONORS))
            newcomer = swarm.start_peer(_DONORS)
            deadline = time.monotonic() + _WITHIN_S
            while not (ended := _said_at(newcomer, "training from epoch")):
                if time.monotonic() > deadline or newcomer.process.poll() is not None:
                    raise RuntimeError(f"no newcomer trains:\n{_log_of(newcomer)[-3000:]}")
                time.sleep(0.05)
            epochs = len(swarm.peers[0].epochs) - before
            replayed = sum(map(int, re.findall(r"made (\d+) commits", _log_of(newcomer))))
            return ended - _said_at(newcomer, "asking "), epochs, replayed


def _log_of(peer: Peer) -> str:
    path = peer.directory / "run" / "logs" / "daemon.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _said_at(peer: Peer, what: str) -> float:
    """The Unix time of the first line in the peer's log that contains `what`; 0 if there is none yet."""
    for line in _log_of(peer).splitlines():
        if what in line and (stamp := _STAMP.match(line)):
            return datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return 0.0
