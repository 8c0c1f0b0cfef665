"""Runs in a Ray worker: starts this node's ranks of a program, or a peer that has the program as its worker.

Programs are child processes of Ray's worker, so they can set up torch.distributed by themselves. They die with it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from peers.system import die_with_parent

T = TypeVar("T")

TRAINER = ("-m", "diloco.train_fsdp")
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.5
_DHT_TIMEOUT_S = 120.0
_RUN_ID = "ray"


def run_node(config: Mapping[str, Any]) -> None:
    """Called by Ray Train in each worker. Raises RuntimeError if the program fails, so that Ray restarts all nodes."""
    import ray
    import ray.train
    import ray.util

    context = ray.train.get_context()
    node, num_nodes = context.get_world_rank(), context.get_world_size()
    address = ray.util.get_node_ip_address()
    places = _gathered(f"{ray.get_runtime_context().get_node_id()[:8]} at {address}", num_nodes)
    if node == 0:
        print(f"one worker on each of {num_nodes} nodes: {', '.join(places)}", flush=True)
    num_ranks = int(config["ranks_per_node"])
    if config["peer_flags"] is None:
        host, port = _broadcast(node, lambda: (address, _free_port()))
        ranks = [
            rank_env(
                node=node, num_nodes=num_nodes, local_rank=local, num_local=num_ranks, host=host, port=port
            )
            for local in range(num_ranks)
        ]
        code = run_all([([sys.executable, *config["program"]], env) for env in ranks])
    else:
        code = _run_peer(config, node, num_nodes, address)
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


def peer_argv(
    flags: Sequence[str], program: Sequence[str], *, address: str, num_peers: int, ranks: int, run_dir: Path
) -> list[str]:
    """The command of a peer that waits for all others; its worker is our trainer, or the given program."""
    words = ["-m", "diloco", "peer", "--initial-peers", address, "--run-id", _RUN_ID]
    words += ["--galaxy-size", str(num_peers), "--nproc-per-node", str(ranks), "--run-dir", str(run_dir)]
    if tuple(program[: len(TRAINER)]) == TRAINER:
        return [*words, *program[len(TRAINER) :], *flags]
    return [*words, "--worker", shlex.join(["python", *program]), *flags]


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


def _run_peer(config: Mapping[str, Any], node: int, num_nodes: int, address: str) -> int:
    """Run a peer of a swarm with a secret. The first node also runs the coordinator."""
    storage = Path(config["storage"]) / config["name"]
    with contextlib.ExitStack() as stack:
        where, secret = _broadcast(node, lambda: stack.enter_context(_coordinator(storage, address)))
        argv = peer_argv(
            config["peer_flags"],
            config["program"],
            address=where,
            num_peers=num_nodes,
            ranks=int(config["ranks_per_node"]),
            run_dir=storage / f"peer-{node}",
        )
        return run_all([([sys.executable, *argv], {"DILOCO_SWARM_SECRET": secret})])


@contextlib.contextmanager
def _coordinator(storage: Path, address: str) -> Iterator[tuple[str, str]]:
    """Run `diloco dht start`; yields its address and the swarm secret. Its state is kept in `storage`."""
    from provisioning.swarm.commands import address_in

    storage.mkdir(parents=True, exist_ok=True)
    log = storage / f"dht-{time.time_ns()}.log"
    argv = [sys.executable, "-m", "diloco", "dht", "start", "--admission", "--run-id", _RUN_ID]
    argv += ["--state-dir", str(storage), "--host-maddrs", f"/ip4/{address}/tcp/0"]
    process = _started(argv, {}, log)
    try:
        deadline = time.monotonic() + _DHT_TIMEOUT_S
        while (found := address_in(log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`diloco dht start` gave no address: {log.read_text()[-800:]}")
            time.sleep(_POLL_S)
        yield found, (storage / "coordinator" / f"{_RUN_ID}.swarm-secret").read_text()
    finally:
        _end([process])


def _started(argv: Sequence[str], env: Mapping[str, str], log: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a process in the job's working directory; Ray's worker itself runs in another one."""
    import diloco

    directory = Path(str(diloco.__file__)).parents[1]
    # The variables of Ray Train's own process group must not reach the program.
    kept = {name: value for name, value in os.environ.items() if name not in _RANK_NAMES}
    path = os.pathsep.join(filter(None, (str(directory), kept.get("PYTHONPATH"))))
    parent_pid = os.getpid()
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(log.open("wb")) if log else None
        return subprocess.Popen(
            list(argv),
            env={**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent_pid),
        )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, so that a peer leaves its swarm, then SIGKILL to what is left of the process groups."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))


def _broadcast(node: int, make: Callable[[], T]) -> T:
    """Make a value on the first node and broadcast it to all."""
    import torch.distributed as dist

    found: list[Any] = [make() if node == 0 else None]
    dist.broadcast_object_list(found, src=0)
    result: T = found[0]
    return result


def _gathered(mine: str, num_nodes: int) -> list[str]:
    """The values of all nodes, in the order of nodes."""
    import torch.distributed as dist

    found: list[Any] = [None] * num_nodes
    dist.all_gather_object(found, mine)
    return [str(one) for one in found]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


_RANK_NAMES = frozenset(rank_env(node=0, num_nodes=1, local_rank=0, num_local=1, host="", port=0)) | {
    "NODE_RANK"
}
