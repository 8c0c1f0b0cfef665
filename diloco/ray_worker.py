"""What runs as a Ray job: Ray Train's TorchTrainer places workers on the cluster, and each runs one rank of a program.

The program is our trainer or any script that takes its rank from torchrun's variables. It is a process of its own
below Ray's worker: it may set up torch.distributed as it likes, and dies with its worker. When one rank dies Ray starts
all of them again, and the program goes on from its own checkpoint.

    python -m diloco.ray_worker --num-workers 2 --storage /shared -- -m diloco.train_fsdp --config config.toml
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.supervisor import die_with_parent

_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """0 once all ranks have finished; raises what Ray says when they could not."""
    arguments, program = _parsed(list(sys.argv[1:] if argv is None else argv))
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"program": program},
        scaling_config=ScalingConfig(
            num_workers=arguments.num_workers,
            use_gpu=arguments.use_gpu,
            placement_strategy="SPREAD",
        ),
        # Only for the ranks to find each other: the program's own group is another one.
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name=arguments.name,
            storage_path=arguments.storage,
            failure_config=FailureConfig(max_failures=arguments.max_failures),
        ),
    )
    trainer.fit()
    return 0


def run_rank(config: Mapping[str, Any]) -> None:
    """One rank, in Ray's worker. Raises RuntimeError when the program fails, so that Ray starts all ranks again."""
    import ray.train
    import torch.distributed as dist

    import diloco

    context = ray.train.get_context()
    where: list[Any] = [_address() if context.get_world_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    host, port = where[0]
    env = {
        **os.environ,
        **rank_env(
            rank=context.get_world_rank(),
            local_rank=context.get_local_rank(),
            node_rank=context.get_node_rank(),
            num_ranks=context.get_world_size(),
            num_local_ranks=context.get_local_world_size(),
            host=host,
            port=port,
        ),
    }
    # The job's working directory; Ray has moved its worker to the storage's.
    directory = Path(str(diloco.__file__)).parents[1]
    code = _run_program([sys.executable, *config["program"]], env, directory)
    if code:
        raise RuntimeError(f"rank {context.get_world_rank()} ended with {code}")


def rank_env(
    *, rank: int, local_rank: int, node_rank: int, num_ranks: int, num_local_ranks: int, host: str, port: int
) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node_rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_local_ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _run_program(argv: Sequence[str], env: Mapping[str, str], directory: Path) -> int:
    parent_pid = os.getpid()
    process = subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent_pid),
    )
    try:
        # In short waits: Ray stops a worker by an exception, which a blocking wait would not let through.
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_STOP_TIMEOUT_S)


def _address() -> tuple[str, int]:
    import ray.util

    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), int(probe.getsockname()[1])


def _parsed(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m diloco.ray_worker", description=__doc__)
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--storage", required=True, help="a directory that all nodes share")
    parser.add_argument("--name", default="diloco")
    parser.add_argument("--max-failures", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true")
    own, _, program = _split(argv)
    arguments = parser.parse_args(own)
    if not program:
        parser.error("behind `--` the program is missing")
    return arguments, program


def _split(argv: list[str]) -> tuple[list[str], str, list[str]]:
    index = argv.index("--") if "--" in argv else len(argv)
    return argv[:index], "--", argv[index + 1 :]


if __name__ == "__main__":
    sys.exit(main())
