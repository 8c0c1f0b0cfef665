"""One run: peers train, the planned faults are injected, and in the end all peers must commit together again."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.history import History, Struck
from benchmarks.chaos.links import Pair
from benchmarks.chaos.plan import CLOCK_SKEW_S, DISORDER, KINDS, Fault
from benchmarks.chaos.swarm import GONE_WITHIN_S, ChaosSwarm, Life
from benchmarks.light_swarm import wait_until

_POLL_S = 0.05
_RESTART_S = 1.0
"""Delay before a peer that has ended by itself is restarted, as by a service manager."""
_SETTLES_WITHIN_S = 120.0
_START_WITHIN_S = 120.0
_MAX_TRIES = 5


class Unrecoverable(RuntimeError):
    """The swarm did not recover from the faults."""


@dataclass
class Outcome:
    history: History
    unplanned: list[str]
    """The last output of peers whose end no fault explains."""
    failed_checkpoints: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)


def run(
    directory: Path,
    *,
    num_peers: int,
    seconds: float,
    faults: Sequence[Fault],
    **worker: object,
) -> Outcome:
    """Run a swarm under these faults.

    Raises Unrecoverable, and AssertionError if a process does not end.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with ChaosSwarm(directory, num_peers, **{"max_steps": 10**9, **worker}) as swarm:
        chaos = _Chaos(swarm, faults)
        for rank in range(num_peers):
            for parity in (0, 1):
                (directory / f"peer{rank}" / "checkpoints" / str(parity)).mkdir(parents=True, exist_ok=True)
            swarm.start(rank, checkpoints=str(directory / f"peer{rank}" / "checkpoints"))
        wait_until(
            lambda: all(p.epochs for p in swarm.peers.values()), "everybody's first epoch", _START_WITHIN_S
        )
        chaos.strike_for(seconds)
        chaos.settle()
        swarm.leave_all()
        swarm.kill_coordinator()
        wait_until(lambda: not swarm.left_over(), "the end of all processes", GONE_WITHIN_S)
        history = History(directory, swarm.lives, chaos.struck)
    failed = sum(r.get("failed", "") != "" for records in history.worker.values() for r in records)
    return Outcome(history, chaos.unplanned, failed, Counter(fault.kind for fault in chaos.struck))


class _Chaos:
    def __init__(self, swarm: ChaosSwarm, faults: Sequence[Fault]) -> None:
        self._swarm = swarm
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._faults = faults
        self.struck: list[Struck] = []
        self.unplanned: list[str] = []
        self._tries: Counter[int] = Counter()

    def strike_for(self, seconds: float) -> None:
        began = time.monotonic()
        for fault in self._faults:
            self._due.append((began + fault.at_s, lambda fault=fault: self._strike(began, fault)))  # type: ignore[misc]
        while time.monotonic() < began + seconds:
            self._run_due()

    def settle(self) -> None:
        """Wait until all faults are over and all peers have made a commit together. Raises Unrecoverable."""
        while self._due:
            self._run_due()
        peers = self._swarm.peers
        begun = max(peer.epoch for peer in peers.values())
        deadline = time.monotonic() + _SETTLES_WITHIN_S
        while not all(
            p.epochs and p.epoch > begun and len(p.epochs[-1]["contributors"]) == len(peers)
            for p in peers.values()
        ):
            self._run_due()
            if time.monotonic() > deadline:
                standing = {rank: (p.epoch, p.process.is_alive(), p.log[-600:]) for rank, p in peers.items()}
                raise Unrecoverable(f"no epoch of all peers in {_SETTLES_WITHIN_S:g} s: {standing}")

    def _run_due(self) -> None:
        now = time.monotonic()
        due, self._due = [a for at, a in self._due if at <= now], [(at, a) for at, a in self._due if at > now]
        for action in due:
            action()
        for life in self._swarm.notice_ends():
            self._ended(life)
        time.sleep(_POLL_S)

    def _ended(self, life: Life) -> None:
        peer = self._swarm.peers[life.rank]
        said = f"peer {life.rank} ended with {peer.process.exitcode}: {peer.error or peer.log[-300:]}"
        print(said, file=sys.stderr, flush=True)
        self.unplanned.append(said)
        trained = any(record["time"] > life.started_at for record in peer.epochs)
        self._tries[life.rank] = 1 if trained else self._tries[life.rank] + 1
        if self._tries[life.rank] > _MAX_TRIES:
            raise Unrecoverable(f"started {_MAX_TRIES} times in vain: {said}")
        self._later(time.monotonic() + _RESTART_S, lambda: self._start(life.rank))

    def _start(self, rank: int) -> None:
        if self._swarm.life_of(rank) is None:
            directory = self._swarm.directory / f"peer{rank}"
            (directory / "error").unlink(missing_ok=True)
            self._swarm.start(rank, checkpoints=str(directory / "checkpoints"))

    def _later(self, at: float, action: Callable[[], None]) -> None:
        self._due.append((at, action))

    def _strike(self, began: float, fault: Fault) -> None:
        swarm, until = self._swarm, began + fault.until_s
        living = [rank for rank in fault.ranks if swarm.life_of(rank) is not None]
        if fault.ranks and not living:
            return
        print(f"{fault.at_s:7.1f} s: {fault}", file=sys.stderr, flush=True)
        now = time.time()
        self.struck.append(Struck(fault.kind, fault.ranks, now, now + fault.until_s - fault.at_s))
        if KINDS[fault.kind].is_death:
            swarm.end(fault.ranks[0], fault.kind)
            self._later(until, lambda: self._start(fault.ranks[0]))
            return
        undo = self._begin(fault)
        if undo is not None:
            self._later(until, undo)

    def _begin(self, fault: Fault) -> Callable[[], None] | None:
        """Inject a fault other than a death. Returns the function that ends the fault; None: it does not last."""
        swarm, doors, ranks = self._swarm, self._swarm.doors, fault.ranks
        pairs = [frozenset(ranks)]
        match fault.kind:
            case "kill worker":
                _kill_worker(swarm, ranks[0])
                return None
            case "freeze":
                return _both(swarm.freeze, swarm.thaw, ranks[0])
            case "cut link":
                doors.cut(pairs, True)
                return lambda: doors.cut(pairs, False)
            case "silent link":
                doors.silence(pairs, True)
                return lambda: doors.silence(pairs, False)
            case "slow link":
                doors.slow_down(pairs, True)
                return lambda: doors.slow_down(pairs, False)
            case "partition":
                across = list(_across(set(ranks), swarm.peers))
                doors.cut(across, True)
                return lambda: doors.cut(across, False)
            case "corrupt byte":
                doors.corrupt(pairs)
                return None
            case "disorder":
                swarm.tell(ranks[0], disorder=DISORDER)
                return lambda: swarm.tell(ranks[0], disorder=0.0)
            case "clock":
                swarm.tell(ranks[0], clock=fault.sign * CLOCK_SKEW_S)
                return lambda: swarm.tell(ranks[0], clock=0.0)
            case "disk full":
                swarm.fill_disk(ranks[0], True)
                return lambda: swarm.fill_disk(ranks[0], False)
            case "kill coordinator":
                swarm.kill_coordinator()
                return swarm.start_coordinator
        raise ValueError(f"no such fault: {fault.kind}")


def _kill_worker(swarm: ChaosSwarm, rank: int) -> None:
    # The worker may be restarting.
    try:
        swarm.peers[rank].kill_worker()
    except (StopIteration, ProcessLookupError):
        return


def _both(begin: Callable[[int], None], end: Callable[[int], None], rank: int) -> Callable[[], None]:
    begin(rank)
    return lambda: end(rank)


def _across(side: set[int], ranks: Iterable[int]) -> Iterable[Pair]:
    return (frozenset((one, other)) for one in side for other in ranks if other not in side)
