"""Torch ranks for tests: processes joined by gloo on loopback, started once and given one task after another."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from benchmarks.chaos.links import free_port

TIMEOUT_S = 180.0


class Ranks:
    """`num_ranks` processes of one peer, until the block is left."""

    def __init__(self, num_ranks: int = 2) -> None:
        context = multiprocessing.get_context("forkserver")
        # Each rank is a fork of one process that has torch, which takes seconds to load.
        context.set_forkserver_preload(["diloco.outer.world"])
        port = free_port()
        self._ends, self._processes = [], []
        for rank in range(num_ranks):
            mine, theirs = context.Pipe()
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            process = context.Process(target=_rank, args=(theirs, environment), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def run(self, function: Callable[..., Any], *arguments: Any, num_nodes: int = 1) -> list[Any]:
        """What `function(world, *arguments)` returns on each rank, as if the ranks were on so many nodes.

        The function must be importable. Fails with the error of a rank.
        """
        for end in self._ends:
            end.send_bytes(pickle.dumps((function, arguments, num_nodes)))
        return [_result(end) for end in self._ends]


def _result(end: Connection) -> Any:
    if not end.poll(TIMEOUT_S):
        raise AssertionError(f"a rank was not done after {TIMEOUT_S:g} s")
    result, error = pickle.loads(end.recv_bytes())
    if error:
        raise AssertionError(f"a rank failed:\n{error}")
    return result


def _rank(end: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import torch

    from diloco.outer.world import World, joined

    torch.set_num_threads(1)
    world = World.from_environment(os.environ)
    with joined(world, torch.device("cpu")):
        while True:
            try:
                function, arguments, num_nodes = pickle.loads(end.recv_bytes())
            except EOFError:
                return
            try:
                num_local_ranks = world.num_ranks // num_nodes
                placed = replace(
                    world, local_rank=world.rank % num_local_ranks, num_local_ranks=num_local_ranks
                )
                outcome = (function(placed, *arguments), None)
            except Exception:
                outcome = (None, traceback.format_exc())
            # Not Connection.send: torch would pass tensors by descriptors that end with this process.
            end.send_bytes(pickle.dumps(outcome))
