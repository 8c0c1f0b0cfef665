"""How much memory a reduction takes beyond its tensors, whatever their size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from peers.protocol.codecs import CODEC_NAMES
from tests.support.commands import ROOT
from tests.support.exhaustive import exhaustive_but
from tests.support.reduction_memory import NUM_MEMBERS

PER_PEER_BYTES = 8 << 20


@pytest.fixture(scope="module")
def growths(request):
    """The growth of memory by codec, of those that are tested, with few chunks and with many."""
    codecs = {item.callspec.params["codec"] for item in request.session.items if item.path == request.path}
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the kernel does not start peaks anew: {error}")
    argv = [sys.executable, "-m", "tests.support.reduction_memory", *codecs]
    return json.loads(subprocess.run(argv, cwd=ROOT, capture_output=True, check=True, timeout=600).stdout)


@pytest.mark.parametrize("codec", exhaustive_but(("fp32", "topk"), CODEC_NAMES))
def test_buffers_are_bounded_by_the_number_of_peers_alone(growths, codec):
    growth = growths[codec]
    assert max(growth) <= NUM_MEMBERS * (NUM_MEMBERS - 1) * PER_PEER_BYTES
    # A copy of every member's share would make a difference of 24 MiB.
    assert growth[1] - growth[0] < 16 << 20
