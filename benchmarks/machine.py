"""Describes a benchmark's machine by its hardware and its measured speed, since the same hardware differs in speed."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

_REPETITIONS = 9
_CALLS = 2000
_COPIED_BYTES = 128 << 20
"""Larger than any cache."""


def hardware() -> str:
    """Processor, cores, memory, torch's version, and the GPUs that torch sees."""
    import torch

    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    parts = [
        f"{len(os.sched_getaffinity(0))} cores {_processor()}",
        f"{pages * page_bytes / 2**30:.0f} GiB",
        f"torch {torch.__version__}",
    ]
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return ", ".join(parts)


def pace() -> str:
    """The current speed of one core, by the time of a torch call and of a memory copy: medians over half a second."""
    import torch

    small, source = torch.zeros(8), torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        call_s = _median_s(lambda: [small.add(1) for _ in range(_CALLS)]) / _CALLS
        copy_s = _median_s(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    return f"a torch call {call_s * 1e6:.1f} us, memory copied at {_COPIED_BYTES / copy_s / 1e9:.1f} GB/s"


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPETITIONS):
        began_at = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_at)
    return statistics.median(times)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
