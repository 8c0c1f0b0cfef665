"""The daemon's peak memory beyond its imports and the tensors that it must hold for the model's size."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.light_loop import Loop
from benchmarks.record import Result, say
from benchmarks.swarm_harness import Job, Seat, Swarm
from peers.reduce.codecs import codec_named, result_codec_named

_NUM_PEERS = 4
_EXACT = "fp32"
"""The codec without residuals."""
_IMPORTS = (
    "import diloco.cli.peer, peers.daemon; from peers.net.dht.node import load_hivemind; load_hivemind();"
    "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))"
)


def results(codecs: tuple[str, ...], num_rounds: int, *, quick: bool) -> list[Result]:
    """Measured on loopback, where rounds are fastest and the most data is in flight."""
    baseline = imports_bytes()
    rows = [Result.of("memory imports", "peak resident", "MB", [baseline / 1e6])]
    for codec in codecs:
        for megabytes in (16, 32) if quick else (64, 256):
            tensor_bytes = megabytes << 20
            daemons = measured(tensor_bytes, codec, num_rounds)
            peaks = [daemon.peak_bytes for daemon in daemons]
            beyond = [
                (daemon.peak_bytes - baseline - held_tensors(codec, daemon.shares) * tensor_bytes) / 1e6
                for daemon in daemons
            ]
            case = f"memory {megabytes} MB {codec}"
            rows.append(Result.of(case, "daemon's peak", "MB", [peak / 1e6 for peak in peaks]))
            rows.append(Result.of(case, "beyond imports and state", "MB", beyond))
            say(f"{case}: {max(beyond):.0f} MB")
    return rows


@dataclass(frozen=True)
class Daemon:
    peak_bytes: int
    """Peak resident memory since its start, including the shared memory that it has touched."""
    shares: tuple[float, ...]
    """The fraction of the vector that it owned in each round, which depends on measured bandwidths."""


def held_tensors(codec: str, shares: Sequence[float]) -> float:
    """The memory that a daemon must hold, in multiples of the model: anchor, momentum, and the two buffers of the link.

    With error feedback also the residuals: of the contribution, and for its share those of the result, of the previous
    round and the current one (peers/reduce/residuals.py).
    """
    if codec == _EXACT:
        return 4
    return 5 + max(before + now for before, now in pairwise((0.0, *shares)))


def share_of(sent_bytes: int, codec: str, numel: int) -> float:
    """The fraction of the vector that a peer owned, computed from the bytes that it sent in a round.

    If the encoded vector has C bytes as contributions and R as results, it sends (1 - share) C + (N - 1) share R.
    """
    contribution = codec_named(codec).encoded_bytes(numel)
    result = result_codec_named(codec).encoded_bytes(numel)
    return (sent_bytes - contribution) / ((_NUM_PEERS - 1) * result - contribution)


def imports_bytes() -> int:
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True)
    return 1024 * int(done.stdout)


def measured(tensor_bytes: int, codec: str, num_rounds: int) -> list[Daemon]:
    loop = Loop(numel=tensor_bytes // 4, num_layers=4, max_epochs=num_rounds)
    job = Job(loop=loop, flags=("--hv.compression", codec))
    with (
        tempfile.TemporaryDirectory() as directory,
        Swarm(job, Path(directory), [Seat()] * _NUM_PEERS) as swarm,
    ):
        rounds = [swarm.run_epoch(epoch) for epoch in range(1, num_rounds + 1)]
        peaks = [resident_peak_bytes(peer.process.pid) for peer in swarm.peers]
    sent = zip(*([record["sent_bytes"] for record in records] for records in rounds), strict=True)
    return [
        Daemon(peak, tuple(share_of(count, codec, tensor_bytes // 4) for count in counts))
        for peak, counts in zip(peaks, sent, strict=True)
    ]


def resident_peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"process {pid} is gone")
