"""Throughput of each codec on one thread, on chunks of the size that a reduction uses.

    python -m benchmarks.codecs [--quick] [--json FILE]

`encode` encodes a contribution (anchor - local + residual); `decode and add` decodes it and adds it to a weighted sum,
as an owner does with each member's contribution. Both in GB of fp32 per second, with a memory copy for comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.record import Result, parser, report
from peers.protocol.codecs import CODEC_NAMES
from peers.reduce.codecs import codec_named
from peers.reduce.codecs_common import PseudoGradient
from peers.reduce.plan import CHUNK_NUMEL

_FLOAT_BYTES = 4
_CHUNKS = 16
"""Number of distinct chunks, together larger than the caches."""


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parser(__doc__)
    given = flags.parse_args(arguments)
    runs, rounds = (3, 2) if given.quick else (7, 8)
    kinds = {name: sides(name) for name in CODEC_NAMES} | {"memory": {"copy": copying()}}
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(runs):
        # Interleaved, so that other load on the machine affects all codecs.
        for name, both in kinds.items():
            for side, work in both.items():
                rates.setdefault((name, side), []).append(gigabytes_per_s(work, rounds))
    rows = [Result.of(name, side, "GB/s", values) for (name, side), values in rates.items()]
    sizes = [Result.of(name, "fp32 bytes / sent bytes", "x", [shrinks(name)]) for name in CODEC_NAMES]
    report("codecs", [*rows, *sizes], given.json)
    return 0


def shrinks(name: str) -> float:
    """Compression ratio of a contribution's chunk relative to fp32."""
    return _FLOAT_BYTES * CHUNK_NUMEL / codec_named(name).encoded_bytes(CHUNK_NUMEL)


def sides(name: str) -> dict[str, Callable[[int], None]]:
    """Functions that encode and decode the k-th chunk."""
    codec, random = codec_named(name), np.random.default_rng(0)
    anchor, local, residual = random.standard_normal((3, _CHUNKS, CHUNK_NUMEL), np.float32) * np.float32(1e-3)
    scratch, total = np.empty((2, CHUNK_NUMEL), np.float32)
    buffers = np.empty((_CHUNKS, codec.encoded_bytes(CHUNK_NUMEL)), np.uint8)
    chunks = [PseudoGradient(*of) for of in zip(anchor, local, residual, strict=True)]
    own = np.empty((_CHUNKS, CHUNK_NUMEL), np.float32)
    payloads = [codec.encode(c.values(out), b) for c, out, b in zip(chunks, own, buffers, strict=True)]

    def encode(k: int) -> None:
        codec.encode_contribution(chunks[k], scratch, buffers[k])

    def decode(k: int) -> None:
        codec.accumulate(payloads[k], np.float32(0.25), total, scratch, is_first=False)

    return {"encode": encode, "decode and add": decode}


def copying() -> Callable[[int], None]:
    """A plain copy of the k-th chunk, an upper bound."""
    source, target = np.ones((_CHUNKS, CHUNK_NUMEL), np.float32), np.empty(CHUNK_NUMEL, np.float32)
    return lambda k: np.copyto(target, source[k])


def gigabytes_per_s(work: Callable[[int], None], rounds: int) -> float:
    work(0)
    began = time.perf_counter()
    for _ in range(rounds):
        for k in range(_CHUNKS):
            work(k)
    return rounds * _CHUNKS * _FLOAT_BYTES * CHUNK_NUMEL / 1e9 / (time.perf_counter() - began)


if __name__ == "__main__":
    raise SystemExit(main())
