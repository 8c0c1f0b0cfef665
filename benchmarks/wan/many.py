"""Twenty-four peers, whose reductions use a grid; at the end one is killed in the middle of a reduction."""

from __future__ import annotations

import statistics
import threading
import time

from benchmarks.record import Result, say
from benchmarks.swarm_harness import Swarm
from benchmarks.wan import rounds
from benchmarks.wan.cases import Case, even

_NUM_PEERS, _MBPS, _ROUND_TRIP_MS = 24, 20, 20
_KILLED = 11
_SHARE_DONE = 0.5
"""Fraction of a usual round after which the member is killed."""


def results(codecs: tuple[str, ...], num_rounds: int, *, quick: bool) -> list[Result]:
    """Round times relative to the transfer time on these links, and the time to the next commit after the death."""
    case = even("many", _NUM_PEERS, _MBPS, _ROUND_TRIP_MS, 4 if quick else 16, codecs)
    rows: list[Result] = []

    def kill_one(swarm: Swarm, codec: str, found: rounds.Rounds) -> None:
        rows.extend(_killed(case, swarm, codec, found, rounds.WARM_UP_EPOCHS + num_rounds + 1))

    found = rounds.measured(case, num_rounds, in_the_end=kill_one)
    return [*rounds.results(case, found), *rows]


def _killed(case: Case, swarm: Swarm, codec: str, found: rounds.Rounds, epoch: int) -> list[Result]:
    """Kill a member in the middle of this epoch's reduction, and check that the others commit equal anchors."""
    usual_s = statistics.median(found.parts["round_s"])
    others = [rank for rank in range(_NUM_PEERS) if rank != _KILLED]
    began = time.monotonic()
    timer = threading.Timer(_SHARE_DONE * usual_s, swarm.peers[_KILLED].kill)
    timer.start()
    records = swarm.run_epoch(epoch, ranks=others)
    timer.join()
    # All processes share the monotonic clock.
    took = max(record["time"] for record in records) - began
    # The record of a peer that was late for the commit has no contributors.
    together = max(len(record["contributors"]) for record in records)
    name = f"{case.name} {codec}, one killed"
    say(f"{name}: committed by {together} others after {took:.2f} s, usually {usual_s:.2f} s")
    return [
        Result.of(name, "epoch", "s", [took]),
        Result.of(name, "epoch / round", "ratio", [took / usual_s]),
        Result.of(name, "contributors", "peers", [float(together)]),
    ]
