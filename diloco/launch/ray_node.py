"""Runs in a Ray worker: starts this node's ranks of a program.

Programs are child processes of Ray's worker, so they can set up torch.distributed by themselves. They die with the
worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.train.devices import thread_settings
from peers.system import free_port, with_parent

_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.5


def run_node(config: Mapping[str, Any]) -> None:
    """Called by Ray Train in each worker. Raises RuntimeError if the program fails, so that Ray restarts all nodes."""
    import ray
    import ray.train
    import ray.util

    context = ray.train.get_context()
    node, num_nodes = context.get_world_rank(), context.get_world_size()
    address = ray.util.get_node_ip_address()
    nodes = _gathered(f"{ray.get_runtime_context().get_node_id()[:8]} at {address}", num_nodes)
    if node == 0:
        print(f"one worker on each of {num_nodes} nodes: {', '.join(nodes)}", flush=True)
    num_ranks = int(config["ranks_per_node"])
    host, port = _from_first_node((address, free_port()) if node == 0 else None)
    ranks = [
        rank_env(node=node, num_nodes=num_nodes, local_rank=local, num_local=num_ranks, host=host, port=port)
        for local in range(num_ranks)
    ]
    threads = thread_env(os.environ, num_ranks)
    code = run_all([([sys.executable, *config["program"]], {**threads, **env}) for env in ranks])
    if code:
        raise RuntimeError(f"node {node} ended with {code}")


def rank_env(
    *, node: int, num_nodes: int, local_rank: int, num_local: int, host: str, port: int
) -> dict[str, str]:
    """The environment variables that torchrun would set."""
    return {
        "RANK": str(node * num_local + local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(num_nodes * num_local),
        "LOCAL_WORLD_SIZE": str(num_local),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def thread_env(environment: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """The settings for OpenMP of one of this node's ranks: its share of the cores, unless the user set others."""
    # Ray sets one thread, for the one CPU that it counts for this worker. GRPO would judge in one process, too.
    is_own = environment.get("OMP_NUM_THREADS") != "1"
    return thread_settings(environment if is_own else {**environment, "OMP_NUM_THREADS": ""}, num_ranks)


def run_all(programs: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> int:
    """Run programs, given as (argv, extra environment), at the same time in the directory of the code.

    Returns 0, or the exit code of the first that failed. No process is left when it returns or raises.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for argv, env in programs:
            processes.append(_started(argv, env))
        # Poll instead of a blocking wait: Ray stops a worker by raising an exception in it, which would be delayed.
        while True:
            codes = [process.poll() for process in processes]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(_POLL_S)
    finally:
        _end(processes)


def _started(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in the job's working directory; Ray's worker itself runs in another one."""
    import diloco

    directory = Path(str(diloco.__file__)).parents[1]
    # The variables of Ray Train's own process group must not reach the program.
    kept = {name: value for name, value in os.environ.items() if name not in _RANK_NAMES}
    path = os.pathsep.join(filter(None, (str(directory), kept.get("PYTHONPATH"))))
    return subprocess.Popen(
        with_parent(argv),
        env={**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, then SIGKILL to what is left of the process groups."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))


def _from_first_node(value: tuple[str, int] | None) -> tuple[str, int]:
    """The first node's value, on all nodes."""
    import torch.distributed as dist

    found: list[Any] = [value]
    dist.broadcast_object_list(found, src=0)
    result: tuple[str, int] = found[0]
    return result


def _gathered(mine: str, num_nodes: int) -> list[str]:
    """The values of all nodes, in the order of nodes."""
    import torch.distributed as dist

    found: list[Any] = [None] * num_nodes
    dist.all_gather_object(found, mine)
    return [str(one) for one in found]


_RANK_NAMES = frozenset(rank_env(node=0, num_nodes=1, local_rank=0, num_local=1, host="", port=0)) | {
    "NODE_RANK"
}
