"""One process per peer: they meet, take part in a contender's rounds, and are measured from outside.

The processes come from a fork server that has imported everything beforehand, so that a group is up at once and its
memory holds nothing of the group before.
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
    """One way to average. Sent to the processes, so it is made of plain values."""

    @property
    def name(self) -> str: ...

    def missing(self) -> str:
        """Why it cannot run here; empty when it can."""
        ...

    def take_part(self, seat: Seat) -> None:
        """Set up, then go through `seat.rounds`, averaging `vectors.delta(seat.index, seat.numel)` in each."""
        ...


@dataclass(frozen=True)
class Round:
    """What one peer saw of one round, on the clock that all processes of a machine share."""

    started_at: float
    ended_at: float
    cpu_s: float
    """Of the process and all it has started."""
    error: float
    """Relative, against the true mean; NaN of a contender that only moves bytes."""
    digest: str
    """Of all bits of the result."""


@dataclass
class Outcome:
    rounds: list[list[Round]] = field(default_factory=list)
    """By round, then by peer, without the first one, in which everybody warms up."""
    peak_bytes: int = 0
    """Of the first peer's processes (proportional set size) in the first round, beyond what they had before the
    tensors, and beyond the tensors."""


def _nothing() -> None:
    return


class Seat:
    """A peer's end of the pipe to the one who measures."""

    def __init__(
        self, index: int, num_peers: int, numel: int, num_rounds: int, directory: Path, pipe: Connection
    ) -> None:
        self.index, self.num_peers, self.numel = index, num_peers, numel
        self.directory = directory
        self.others = tuple(other for other in range(num_peers) if other != index)
        self._num_rounds, self._pipe = num_rounds, pipe

    def meet(self, value: Any = None, note: str = "") -> list[Any]:
        """Wait for all peers; what each of them brought."""
        self._pipe.send((note, value))
        values: list[Any] = self._pipe.recv()
        return values

    def rounds(
        self,
        result: Tensor,
        tensor_bytes: int,
        prepare: Callable[[], object] = _nothing,
        conclude: Callable[[], object] = _nothing,
    ) -> Iterator[int]:
        """Numbers of the rounds: each begins when all are prepared, and ends when the caller asks for the next.

        `result` then holds the average, or `conclude` puts it there, which is not timed; `tensor_bytes` is what the
        caller has allocated for its tensors.
        """
        for number in range(self._num_rounds + 1):
            # What the round before left in there must not pass for this one's result.
            result.fill_(math.nan)
            prepare()
            self.meet(tensor_bytes, "measure memory" if number == 0 else "")
            cpu_before, started_at = _cpu_s(), time.perf_counter()
            yield number
            ended_at = time.perf_counter()
            cpu_s = _cpu_s() - cpu_before
            self.meet(note="measured" if number == 0 else "")
            conclude()
            error = vectors.relative_error(result, self.num_peers)
            digest = xxhash.xxh3_128(result.numpy().data).hexdigest()
            self.meet(Round(started_at, ended_at, cpu_s, error, digest), "round")


def preload() -> None:
    """Have the fork server import what the peers need."""
    modules = ["torch", "hivemind", "benchmarks.reduction.ours", "benchmarks.reduction.rivals"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)


def run(
    contender: Contender, num_peers: int, numel: int, num_rounds: int, directory: Path, timeout_s: float
) -> Outcome:
    """Have a fresh group go through the rounds. Raises RuntimeError when a peer fails or the time is up."""
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    for index in range(num_peers):
        ours, theirs = context.Pipe()
        arguments = (contender, index, num_peers, numel, num_rounds, directory, theirs)
        # Not a daemon: Hivemind's peers start processes of their own.
        process = context.Process(target=_sit, args=arguments)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    patience_s = 0.0
    try:
        outcome = _preside(contender.name, pipes, psutil.Process(processes[0].pid), timeout_s)
        patience_s = _EXIT_TIMEOUT_S
        return outcome
    finally:
        _end(processes, patience_s)
        for pipe in pipes:
            pipe.close()


def _sit(
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


def _preside(name: str, pipes: Sequence[Connection], first: psutil.Process, timeout_s: float) -> Outcome:
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
            # The first round opens connections and touches memory for the first time.
            del outcome.rounds[0]
            return outcome


def _end(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    """Wait for the processes, then kill those that have not ended, and whatever any of them has left behind."""
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
    """Memory of a process and all it has started; what they share counts once."""
    total = 0
    for process in _tree(root.pid):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
