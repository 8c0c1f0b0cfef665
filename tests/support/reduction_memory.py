"""A program that prints, for the codecs that it is given, a reduction's memory beyond its tensors, with few chunks and
with many, as JSON.

It runs in its own process, since the peak includes all other work of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
from pathlib import Path

from peers.reduce.plan import CHUNK_NUMEL
from tests.support.reduction_group import ReductionGroup, outcomes

NUM_MEMBERS = 4
CHUNKS = (2, 8)


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field}")


def growth_while_reducing(group: ReductionGroup) -> int:
    """The growth of this process, which has all members. Raises OSError if the kernel cannot reset the peak."""
    gc.collect()
    # Otherwise this reduction could use, uncounted, what malloc keeps of an earlier one.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    outcomes(group, range(NUM_MEMBERS))
    return resident_bytes("VmHWM") - before


def growth_of(codec: str, num_chunks: int) -> int:
    with contextlib.closing(
        ReductionGroup(NUM_MEMBERS, NUM_MEMBERS * num_chunks * CHUNK_NUMEL, codec=codec)
    ) as group:
        return growth_while_reducing(group)


if __name__ == "__main__":
    print(json.dumps({codec: [growth_of(codec, chunks) for chunks in CHUNKS] for codec in sys.argv[1:]}))
