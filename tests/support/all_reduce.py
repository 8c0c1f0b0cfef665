"""A user's own training script: the ranks make an all-reduce, and each prints its result."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g} {' '.join(sys.argv[1:])}",
    flush=True,
)
dist.destroy_process_group()
