"""Runs torchrun on this node: checks before the start, network settings, a log with a stable name."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

from provisioning.errors import UserError
from provisioning.launchers.job import LOGS, LaunchJob, default_interface, network_env, torchrun_argv
from provisioning.pods.tables import read_toml

_MASTER_TIMEOUT_S = 600.0
"""As long as torchrun itself waits: node 0 may import torch from a shared, busy file system."""
_MIN_FREE_GPU_MB = 1024
_STOP_TIMEOUT_S = 40.0
"""Longer than the 30 s after which torchrun kills its ranks: in sessions of their own, they would outlive it."""


def python_of(venv: Path | None) -> str:
    """The Python of --venv, else this one. Raises UserError if it is missing."""
    if venv is None:
        return sys.executable
    python = venv.expanduser() / "bin" / "python"
    if not python.exists():
        raise UserError(f"There is no bin/python in {venv}; name an existing environment.")
    return str(python.absolute())


def checked_config(path: Path) -> Path:
    """The absolute path of a configuration. Raises UserError unless it is TOML."""
    read_toml(path)
    return path.absolute()


def resumes(config: Path) -> bool:
    """Whether a training with this configuration saves checkpoints, and continues from the newest one."""
    ckpt = read_toml(config).get("ckpt")
    return isinstance(ckpt, Mapping) and ckpt.get("resume") == "auto" and {"interval", "path"} <= ckpt.keys()


def checked(job: LaunchJob) -> tuple[LaunchJob, int]:
    """The job with its backend resolved, and the number of processes. Raises UserError if the node lacks something."""
    free_mb = free_gpu_memory()
    backend = job.backend
    if backend == "auto":
        # All nodes need the same backend, and a node knows only its own GPUs.
        backend = "gloo" if job.num_nodes == 1 and not free_mb else "nccl"
    if backend not in ("nccl", "gloo"):
        raise UserError(f'BACKEND "{backend}" is neither nccl nor gloo.')
    if backend == "nccl" and not free_mb:
        raise UserError(
            "BACKEND nccl needs GPUs, and nvidia-smi shows none here; to train on CPUs, set BACKEND=gloo on every node."
        )
    if backend == "nccl" and min(free_mb) < _MIN_FREE_GPU_MB:
        index = free_mb.index(min(free_mb))
        raise UserError(
            f"GPU {index} has only {free_mb[index]} MB free; end what runs on it (nvidia-smi shows it)."
        )
    nproc = num_processes(job.nproc_per_node, len(free_mb) if backend == "nccl" else 0)
    check_master(job)
    return replace(job, backend=backend), nproc


def check_master(job: LaunchJob) -> None:
    """Node 0: check that the master port is free. Other nodes: wait until the master answers.

    Raises UserError if the port is taken, the master does not answer in time, or the node's rank is out of range.
    """
    if job.num_nodes == 1:
        return
    if not 0 <= job.node_rank < job.num_nodes:
        raise UserError(
            f"node_rank {job.node_rank}: with {job.num_nodes} nodes the last one is {job.num_nodes - 1}."
        )
    if job.node_rank == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", job.master_port))
            except OSError as error:
                raise UserError(
                    f"Port {job.master_port} of this node, the master's, is taken ({error.strerror}); name another one."
                ) from error
        return
    deadline = time.monotonic() + _MASTER_TIMEOUT_S
    print(
        f"waiting up to {_MASTER_TIMEOUT_S:g} s for node 0 at {job.master_addr}:{job.master_port}", flush=True
    )
    while True:
        try:
            socket.create_connection((job.master_addr, job.master_port), 3.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"The master {job.master_addr}:{job.master_port} does not answer within {_MASTER_TIMEOUT_S:g} s "
                    f"({error}); start node 0 first, and open that port on it."
                ) from error
            time.sleep(0.5)


def free_gpu_memory() -> list[int]:
    """Free MB of each GPU that nvidia-smi lists; empty without nvidia-smi."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20.0,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in answer.stdout.split() if line.isdigit()]


def run(job: LaunchJob, nproc: int, environment: Mapping[str, str], directory: Path) -> int:
    """Run torchrun until it ends, copy its output to stdout and to the log, and return its exit code.

    SIGINT, SIGTERM and SIGHUP, number n, are forwarded to all its processes. The exit code is then 128 + n, and what
    torchrun prints, its own traceback, goes to the log only.
    """
    log_path = log_file(directory, job.node_rank)
    env = {**environment, **node_env(job, environment)}
    caught: list[int] = []
    with log_path.open("wb", buffering=0) as log:
        process = subprocess.Popen(
            torchrun_argv(job, nproc=nproc),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

        def forward(number: int, _frame: FrameType | None) -> None:
            caught.append(number)
            _signal(process, number)

        before = {
            number: signal.signal(number, forward)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            # Under nohup, SIGHUP is ignored.
            if signal.getsignal(number) != signal.SIG_IGN
        }
        assert process.stdout is not None
        try:
            for line in process.stdout:
                # A full disk does not end the training.
                with contextlib.suppress(OSError):
                    log.write(line)
                if not caught:
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()
            code = process.wait()
            if caught:
                return 128 + caught[0]
            return 128 - code if code < 0 else code
        finally:
            # Nobody reads any more: torchrun and its ranks must not wait until somebody does.
            process.stdout.close()
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
            _signal(process, signal.SIGKILL)
            process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


def node_env(job: LaunchJob, environment: Mapping[str, str]) -> dict[str, str]:
    devices = Path("/sys/class/infiniband")
    infiniband = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    routes = Path("/proc/net/route")
    interface = default_interface(routes.read_text()) if routes.exists() else None
    # A single node uses the loopback interface only.
    network = network_env(infiniband, interface, environment) if job.num_nodes > 1 else {}
    own = {"LOGLEVEL": job.log_level, "PYTHONUNBUFFERED": "1"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if job.backend == "gloo" else {}
    return {**network, **own, **hidden}


def log_file(directory: Path, node_rank: int) -> Path:
    """The path of a new log, cluster_train_<time>_node<rank>.log; latest_node<rank>.log is a link to it."""
    logs = directory / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"cluster_train_{time.strftime('%Y%m%d_%H%M%S')}_node{node_rank}.log"
    fresh = logs / f".latest_node{node_rank}.{os.getpid()}"
    fresh.symlink_to(path.name)
    fresh.replace(logs / f"latest_node{node_rank}.log")
    return path


def num_processes(wanted: str, num_gpus: int) -> int:
    """NPROC_PER_NODE as a number; auto: one per GPU, or 1 without GPUs. Raises UserError if it is invalid."""
    if wanted == "auto":
        return max(num_gpus, 1)
    if not wanted.isdigit() or int(wanted) < 1:
        raise UserError(f'NPROC_PER_NODE "{wanted}" is neither auto nor a number from 1 on.')
    if num_gpus and int(wanted) > num_gpus:
        raise UserError(f"NPROC_PER_NODE {wanted} is more than this node's {num_gpus} GPUs.")
    return int(wanted)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return
