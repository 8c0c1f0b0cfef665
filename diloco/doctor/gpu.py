"""Checks that torch and the driver work together on the GPUs of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence

from diloco.doctor.findings import Finding, failed, passed
from diloco.train.devices import num_cores, visible_gpus

_REINSTALL = 'pip install --force-reinstall "torch>=2.10,<2.14"'


def check_gpus(device: str, *, compiles: bool) -> Iterator[Finding]:
    import torch

    gpus = visible_gpus(os.environ) if device != "cpu" else []
    if device != "cuda" and not gpus:
        yield passed("gpu", f"none in use: training on the CPU, with {num_cores()} cores")
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    yield judge_gpus(gpus, torch.version.cuda, names)
    if names and compiles and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        yield failed("compiler", "no C++ compiler for torch.compile", "--no-torch-compile  # or install g++")


def judge_gpus(gpus: Sequence[str], built_for: str | None, names: Sequence[str]) -> Finding:
    """The finding for the GPUs that the driver lists, the CUDA version of the installed torch (None: it is built for
    CPUs), and the names of the GPUs that it can use."""
    if not gpus:
        return failed(
            "gpu", "--device cuda, but the driver lists no GPU", "nvidia-smi  # or leave out --device cuda"
        )
    if built_for is None:
        return failed("gpu", f"there are {len(gpus)} GPUs, but torch is built for CPUs", _REINSTALL)
    if not names:
        return failed(
            "gpu",
            f"torch, built for CUDA {built_for}, cannot use the {len(gpus)} GPUs with this driver",
            "nvidia-smi  # shows the driver; install one for that CUDA version, or torch for an older version",
        )
    return passed("gpu", f"{len(names)} x {names[0]}")


def gpu_memory_bytes(num_ranks: int) -> int | None:
    """Free memory of the GPUs of so many ranks together; None if torch cannot use any."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return sum(
        torch.cuda.mem_get_info(index)[0] for index in range(min(num_ranks, torch.cuda.device_count()))
    )
