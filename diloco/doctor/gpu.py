"""Do torch, the driver and NCCL work together on the GPUs of this machine?"""

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
    """What this torch makes of CUDA."""

    built_for: str | None
    """Version of CUDA; none: a build for CPUs."""
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
    yield judged(gpus, Cuda.here())


def judged(gpus: Sequence[str], cuda: Cuda) -> Finding:
    """What is to be said of these GPUs, which the driver shows, with this torch."""
    if not gpus:
        return failed(
            "gpu", "--device cuda, and no GPU is to be seen", "nvidia-smi  # or leave out --device cuda"
        )
    if cuda.built_for is None:
        return failed("gpu", f"{len(gpus)} GPUs, and a torch that is built for CPUs", _REINSTALL)
    if not cuda.is_available:
        return failed(
            "gpu",
            f"torch is built for CUDA {cuda.built_for}, and cannot use the {len(gpus)} GPUs with this driver",
            "nvidia-smi  # shows the driver; install one for that CUDA, or a torch for an older one",
        )
    return passed("gpu", f"{len(cuda.names)} x {cuda.names[0]}")


def check_nccl(device: str, num_ranks: int, *, compiles: bool) -> Iterator[Finding]:
    """One all-reduce over the ranks of this peer, by a process each."""
    if device == "cpu" or not visible_gpus(os.environ) or not Cuda.here().is_available:
        yield passed("nccl", "not needed without a GPU")
        return
    if compiles and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        yield failed("compiler", "no C++ compiler for torch.compile", "--no-torch-compile  # or install g++")
    code, words = _all_reduce(num_ranks)
    if code == 0:
        yield passed("nccl", f"{num_ranks} ranks have the same sum")
    else:
        yield failed(
            "nccl",
            f"{num_ranks} ranks cannot add up: {words}",
            "NCCL_DEBUG=WARN diloco doctor  # says why; NCCL_P2P_DISABLE=1 fixes many",
        )


def _all_reduce(num_ranks: int) -> tuple[int, str]:
    """Exit code and last line of the ranks, none of which outlives this."""
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
            # Its end has the guardian end whatever still runs.
            process.stdin.close()
            process.wait()
        log.seek(0)
        return process.returncode, last_words(log)


def last_words(log: Iterable[str]) -> str:
    """Of ranks under torchrun, whose own words at the end only say that one of them has failed."""
    lines = [line.strip() for line in log if line.strip()]
    errors = (line for line in lines if _ERROR.search(line))
    return next(errors, lines[-1] if lines else "they said nothing")


def gpu_memory_bytes() -> int | None:
    """What is free on the GPUs together; none where there is none to use."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
