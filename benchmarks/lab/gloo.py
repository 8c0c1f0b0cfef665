"""torch's gloo all-reduce on CPUs, as a player of benchmarks/lab/players.py."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.lab.lab import DEVICE
from benchmarks.lab.players import play


def main(rank: int, addresses: list[str]) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME=DEVICE, MASTER_ADDR=addresses[0], MASTER_PORT="7100")
    dist.init_process_group("gloo", rank=rank, world_size=len(addresses))
    tensors: dict[int, torch.Tensor] = {}

    def take_part(tensor_bytes: int) -> tuple[float, float]:
        tensor = tensors.setdefault(tensor_bytes, torch.zeros(tensor_bytes // 4))
        dist.barrier()
        started_at = time.monotonic()
        dist.all_reduce(tensor)
        return started_at, time.monotonic()

    play(take_part)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","))
