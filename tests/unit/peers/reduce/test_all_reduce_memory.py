"""What a reduction takes beyond its tensors, whatever their size."""

import ctypes
import gc
from pathlib import Path

import pytest

from peers.protocol.codecs import CODEC_NAMES
from peers.reduce.plan import CHUNK_NUMEL
from tests.support.reduction_group import outcomes

NUM_MEMBERS = 4
PER_PEER_BYTES = 8 << 20


def resident_bytes(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field}")


def growth_while_reducing(group):
    """Of the whole process, in which all members are."""
    gc.collect()
    # What malloc keeps of an earlier reduction would pass for memory that this one does without.
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the kernel does not start peaks anew: {error}")
    before = resident_bytes("VmRSS")
    outcomes(group, range(NUM_MEMBERS))
    return resident_bytes("VmHWM") - before


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_buffers_are_bounded_by_the_number_of_peers_alone(swarm, codec):
    growth = [
        growth_while_reducing(swarm(NUM_MEMBERS, NUM_MEMBERS * chunks * CHUNK_NUMEL, codec=codec))
        for chunks in (2, 8)
    ]
    assert max(growth) <= NUM_MEMBERS * (NUM_MEMBERS - 1) * PER_PEER_BYTES
    # A copy of every member's share would make a difference of 24 MiB.
    assert growth[1] - growth[0] < 16 << 20
