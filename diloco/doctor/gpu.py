"""Checks that torch, the driver and NCCL work together on the GPUs of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diloco.doctor.findings import Finding, failed, passed
from diloco.train.devices import num_cores, visible_gpus

_NCCL_TIMEOUT_S = 90.0
_ERROR = re.compile(r"\w+(Error|Exception): |the sum over")
_REINSTALL = 'pip install --force-reinstall "torch>=2.10,<2.14"'


@dataclass(frozen=True)
class Cuda:
    """CUDA as the installed torch sees it."""

    built_for: str | None
    """CUDA version of the build; None for a CPU build."""
    is_available: bool
    names: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Cuda:
        import torch

        if torch.version.cuda is None or not torch.cuda.is_available():
            return cls(torch.version.cuda, False)
        count = torch.cuda.device_count()
        return cls(
            torch.version.cuda, True, tuple(torch.cuda.get_device_name(index) for index in range(count))
        )


def check_gpus(device: str, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    gpus = visible_gpus(environment) if device != "cpu" else []
    if device != "cuda" and not gpus:
        yield passed("gpu", f"none in use: training on the CPU, with {num_cores()} cores")
        return
    yield judge_gpus(gpus, Cuda.here())


def judge_gpus(gpus: Sequence[str], cuda: Cuda) -> Finding:
    """The finding for the GPUs that the driver lists and the installed torch."""
    if not gpus:
        return failed(
            "gpu", "--device cuda, but the driver lists no GPU", "nvidia-smi  # or leave out --device cuda"
        )
    if cuda.built_for is None:
        return failed("gpu", f"there are {len(gpus)} GPUs, but torch is built for CPUs", _REINSTALL)
    if not cuda.is_available:
        return failed(
            "gpu",
            f"torch, built for CUDA {cuda.built_for}, cannot use the {len(gpus)} GPUs with this driver",
            "nvidia-smi  # shows the driver; install one for that CUDA version, or torch for an older version",
        )
    return passed("gpu", f"{len(cuda.names)} x {cuda.names[0]}")


def check_nccl(device: str, num_ranks: int, *, compiles: bool) -> Iterator[Finding]:
    """Run one all-reduce over the ranks of this peer, with a process for each."""
    if device == "cpu" or not visible_gpus(os.environ) or not Cuda.here().is_available:
        yield passed("nccl", "not needed without a GPU")
        return
    if compiles and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        yield failed("compiler", "no C++ compiler for torch.compile", "--no-torch-compile  # or install g++")
    code, error = _all_reduce(num_ranks)
    if code == 0:
        yield passed("nccl", f"an all-reduce over {num_ranks} ranks works")
    else:
        yield failed(
            "nccl",
            f"an all-reduce over {num_ranks} ranks fails: {error}",
            "NCCL_DEBUG=WARN diloco doctor  # shows why; often NCCL_P2P_DISABLE=1 helps",
        )


def _all_reduce(num_ranks: int) -> tuple[int, str]:
    """Run diloco.doctor.nccl under torchrun. Returns the exit code and the error line; no process is left running."""
    ranks = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco.rl.guardian", *ranks, "-m", "diloco.doctor.nccl"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
        assert process.stdin is not None
        try:
            process.wait(_NCCL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return 1, f"no answer within {_NCCL_TIMEOUT_S:g} s"
        finally:
            # End of file makes the guardian kill the remaining processes.
            process.stdin.close()
            process.wait()
        log.seek(0)
        return process.returncode, first_error_line(log)


def first_error_line(log: Iterable[str]) -> str:
    """The first error line in the log, else the last line. torchrun's own last lines only say that a rank failed."""
    lines = [line.strip() for line in log if line.strip()]
    errors = (line for line in lines if _ERROR.search(line))
    return next(errors, lines[-1] if lines else "no output")


def gpu_memory_bytes() -> int | None:
    """Free memory of all GPUs together; None if torch cannot use any."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
