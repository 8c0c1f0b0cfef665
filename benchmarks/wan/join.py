"""A third peer joins two with a large state: while they are idle, and while epochs are shorter than the download."""

from __future__ import annotations

import re
import tempfile
import time
from datetime import datetime
from pathlib import Path

from benchmarks.lab import Lab
from benchmarks.light_loop import Loop
from benchmarks.record import Result, say
from benchmarks.swarm_harness import Job, Peer, Swarm
from benchmarks.wan.cases import Case, even
from benchmarks.wan.rounds import COORDINATOR, seat
from diloco.sim.cost.links import TCP_PAYLOAD

_MBPS, _ROUND_TRIP_MS, _DONORS = 1000, 10, 2
_WITHIN_S = 300.0
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ", re.M)
_AVERAGING = {"at rest": "fp32", "short epochs": "int8"}
"""What the donors do during the join, with the codec that they average with."""


def results(*, quick: bool) -> list[Result]:
    """The newcomer's time from its first request to training, relative to the transfer time of the state."""
    rows: list[Result] = []
    network = even("join", _DONORS + 1, _MBPS, _ROUND_TRIP_MS, 32 if quick else 512, ["fp32"])
    # The state, anchor and momentum, is twice as large as the model.
    least = 2 * network.tensor_bytes / (TCP_PAYLOAD * network.links[0].down_bytes_per_s)
    for how, codec in _AVERAGING.items():
        case = f"join {how}"
        took, epochs, replayed = _measured(network, codec, is_gated=how == "at rest")
        rows += [
            Result.of(case, "until it trains", "s", [took]),
            Result.of(case, "state / link", "s", [least]),
            Result.of(case, "until it trains / state over link", "ratio", [took / least]),
            Result.of(case, "commits of the others meanwhile", "epochs", [float(epochs)]),
            Result.of(case, "commits made after them", "epochs", [float(replayed)]),
        ]
        say(f"{case}: {took:.1f} s, {took / least:.2f} of its bytes' time")
    return rows


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
