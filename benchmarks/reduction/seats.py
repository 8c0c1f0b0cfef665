"""Runs one process per peer, synchronizes them, lets them take part in a contender's rounds, and measures them.

The processes come from a fork server that has imported all modules, so that a group starts quickly and its memory
contains nothing of an earlier group.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import xxhash
from torch import Tensor

from benchmarks.reduction import vectors

_SAMPLE_S = 0.02
_EXIT_TIMEOUT_S = 20.0


class Contender(Protocol):
    """One implementation of averaging. It is pickled to the processes."""

    @property
    def name(self) -> str: ...

    def missing(self) -> str:
        """Why it cannot run on this machine; empty if it can."""
        ...

    def take_part(self, seat: Seat) -> None:
        """Set up, then iterate over `seat.rounds` and average `vectors.delta(seat.index, seat.numel)` in each."""
        ...


@dataclass(frozen=True)
class Round:
    """One peer's measurements of one round. Times are on a clock that all processes share."""

    started_at: float
    ended_at: float
    cpu_s: float
    """CPU time of the process and its descendants."""
    error: float
    """Relative error of the result; NaN for a contender that only moves bytes."""
    digest: str
    """Digest of the result."""


@dataclass
class Outcome:
    rounds: list[list[Round]] = field(default_factory=list)
    """By round, then by peer, without the warm-up round."""
    peak_bytes: int = 0
    """Peak memory (proportional set size) of the first peer's processes in the warm-up round, without the memory that
    they had before and without the tensors."""


class Seat:
    """A peer's end of the pipe to the measuring process."""

    def __init__(
        self, index: int, num_peers: int, numel: int, num_rounds: int, directory: Path, pipe: Connection
    ) -> None:
        self.index, self.num_peers, self.numel = index, num_peers, numel
        self.directory = directory
        self.others = tuple(other for other in range(num_peers) if other != index)
        self._num_rounds, self._pipe = num_rounds, pipe

    def meet(self, value: Any = None, note: str = "") -> list[Any]:
        """Wait for all peers; returns the values that they passed, by peer."""
        self._pipe.send((note, value))
        values: list[Any] = self._pipe.recv()
        return values

    def rounds(
        self,
        result: Tensor,
        tensor_bytes: int,
        prepare: Callable[[], object] = lambda: None,
    ) -> Iterator[int]:
        """Yields the number of each round, which begins when all peers are prepared and ends with the next iteration.

        When a round ends, `result` must hold the average. `tensor_bytes` is the size of the caller's tensors.
        """
        for number in range(self._num_rounds + 1):
            # Erase the result of the previous round, so that it cannot pass for this round's.
            result.fill_(math.nan)
            prepare()
            self.meet(tensor_bytes, "measure memory" if number == 0 else "")
            cpu_before, started_at = _cpu_s(), time.perf_counter()
            yield number
            ended_at = time.perf_counter()
            cpu_s = _cpu_s() - cpu_before
            self.meet(note="measured" if number == 0 else "")
            error = vectors.relative_error(result, self.num_peers)
            digest = xxhash.xxh3_128(result.numpy().data).hexdigest()
            self.meet(Round(started_at, ended_at, cpu_s, error, digest), "round")


def preload() -> None:
    """Let the fork server import the modules that the peers need."""
    modules = ["torch", "hivemind", "benchmarks.reduction.ours", "benchmarks.reduction.rivals"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)


def run(
    contender: Contender, num_peers: int, numel: int, num_rounds: int, directory: Path, timeout_s: float
) -> Outcome:
    """Run the rounds in a fresh group. Raises RuntimeError if a peer fails or after `timeout_s`."""
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    for index in range(num_peers):
        ours, theirs = context.Pipe()
        arguments = (contender, index, num_peers, numel, num_rounds, directory, theirs)
        # Not a daemon: Hivemind's peers start processes of their own.
        process = context.Process(target=_peer_main, args=arguments)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    patience_s = 0.0
    try:
        outcome = _coordinate(contender.name, pipes, psutil.Process(processes[0].pid), timeout_s)
        patience_s = _EXIT_TIMEOUT_S
        return outcome
    finally:
        _end(processes, patience_s)
        for pipe in pipes:
            pipe.close()


def _peer_main(
    contender: Contender,
    index: int,
    num_peers: int,
    numel: int,
    num_rounds: int,
    directory: Path,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    seat = Seat(index, num_peers, numel, num_rounds, directory, pipe)
    seat.meet(note="seated")
    try:
        contender.take_part(seat)
    except Exception as error:
        pipe.send(("failed", f"peer {index}: {type(error).__name__}: {error}"))
        raise
    seat.meet(note="over")


def _coordinate(name: str, pipes: Sequence[Connection], first: psutil.Process, timeout_s: float) -> Outcome:
    outcome, deadline = Outcome(), time.monotonic() + timeout_s
    baseline = peak = 0
    sampling = False
    while True:
        arrived: dict[Connection, tuple[str, Any]] = {}
        while len(arrived) < len(pipes):
            missing = [pipe for pipe in pipes if pipe not in arrived]
            for pipe in wait(missing, _SAMPLE_S if sampling else 1.0):
                assert isinstance(pipe, Connection)
                try:
                    arrived[pipe] = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"{name}: peer {pipes.index(pipe)} ended early") from None
                if arrived[pipe][0] == "failed":
                    raise RuntimeError(f"{name}: {arrived[pipe][1]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name}: not done in {timeout_s:g} s")
            if sampling:
                peak = max(peak, _pss_bytes(first))
        note, values = arrived[pipes[0]][0], [arrived[pipe][1] for pipe in pipes]
        if note == "seated":
            baseline = _pss_bytes(first)
        elif note == "measure memory":
            sampling, baseline = True, baseline + values[0]
        elif note == "measured":
            sampling = False
            outcome.peak_bytes = peak - baseline
        elif note == "round":
            outcome.rounds.append(values)
        for pipe in pipes:
            pipe.send(values)
        if note == "over":
            # Warm-up: the first round opens connections and touches memory for the first time.
            del outcome.rounds[0]
            return outcome


def _end(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    """Wait for the processes, then kill those that have not ended, and their remaining descendants."""
    trees = [_tree(process.pid) for process in processes if process.exitcode is None]
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for member in (member for tree in trees for member in tree):
        if member.is_running():
            _kill(member)
    for process in processes:
        process.join()


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _tree(pid: int | None) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_s() -> float:
    times = []
    for process in _tree(None):
        try:
            times.append(process.cpu_times())
        except psutil.NoSuchProcess:
            continue
    return sum(spent.user + spent.system for spent in times)


def _pss_bytes(root: psutil.Process) -> int:
    """Memory of a process and its descendants, with shared memory counted once."""
    total = 0
    for process in _tree(root.pid):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
