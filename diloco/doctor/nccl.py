"""One rank of the all-reduce with which `diloco doctor` tests NCCL, under torchrun. Exits with 1 for a wrong sum."""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist

_TIMEOUT = datetime.timedelta(seconds=60)
_NUMEL = 1 << 20


def main() -> int:
    # With more ranks than GPUs, ranks share a GPU, which NCCL reports as an error.
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=_TIMEOUT, device_id=device)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((_NUMEL,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    wanted = size * (size + 1) / 2
    is_right = bool((tensor == wanted).all())
    dist.destroy_process_group()
    if not is_right:
        print(f"the sum over {size} ranks should be {wanted:g} and is {tensor[0].item():g}", file=sys.stderr)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
