"""The CPU time that a peer needs for each part of a round.

A *pace* is the number of bytes of fp32 weights of the averaged fragment that a peer processes per second in that part
of the round, on all of its cores.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The paces of one peer; a part with an infinite pace takes no time."""

    hand_over: float = float("inf")
    """The worker copies its weights to the daemon and does not train meanwhile."""
    propose: float = float("inf")
    """The daemon computes the norm of the pseudo-gradient."""
    reduce: float = float("inf")
    """Encode, encrypt, add, decode, hash. It overlaps with the transfer, so only the slower of both counts."""
    preview: float = float("inf")
    """The outer step's digests, computed while sums arrive, on the cores that the reduction leaves idle."""
    apply: float = float("inf")
    """The outer step itself, after the commit."""
    take: float = float("inf")
    """The worker copies or merges the new weights and does not train meanwhile."""
    hop_s: float = 0.0
    """Latency of handing work to another process or thread, independent of the size; about ten times per round."""

    def remaining_preview_s(self, num_bytes: float, reduced_in_s: float, chunk_bytes: float) -> float:
        """Time that the remaining digests take after the last sum has arrived."""
        spare_s = max(0.0, reduced_in_s - num_bytes / self.reduce)
        last_chunk_s = min(num_bytes, chunk_bytes) / self.preview
        return max(last_chunk_s, num_bytes / self.preview - spare_s)


IDEAL = Machine()


_CORE_S_PER_GB = {"hand_over": 0.3, "propose": 0.16, "preview": 0.75, "apply": 0.6, "take": 0.3}
"""Seconds per gigabyte of fp32 weights on one idle core of a 2026 Xeon server, measured for each part. A copy in memory
takes 0.17; about as much is added for the transfer from and to the GPU."""
_RESIDUALS_CORE_S_PER_GB = 0.3
"""Added to `apply` for the error feedback of lossy codecs."""
_REDUCE_CORE_S_PER_GB = {
    "fp32": 2.5,
    "fp16": 1.7,
    "bf16": 1.7,
    "int8": 0.95,
    "int4": 0.71,
    "2bit": 0.78,
    "1bit": 0.48,
    "topk": 1.1,
}
"""The same for the reduction on an AMD EPYC: four peers over TLS, benchmarks/results/reduce-cpu-2cores.json. For 2bit,
1.09 times int4, and for 1bit, 0.62 times 2bit: the ratios on two other machines."""
_HOP_S = 0.002


def machine_of(num_cores: float, codec: str) -> Machine:
    """A machine with `num_cores` cores of that kind, none of them used by training."""
    seconds = {**_CORE_S_PER_GB, "reduce": _REDUCE_CORE_S_PER_GB[codec]}
    if codec != "fp32":
        seconds["apply"] += _RESIDUALS_CORE_S_PER_GB
    return Machine(**{part: num_cores * 1e9 / each for part, each in seconds.items()}, hop_s=_HOP_S)
