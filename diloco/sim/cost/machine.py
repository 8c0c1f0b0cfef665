"""What a peer's processors take for their part of a round.

A pace is how many bytes of fp32 weights (of the fragment that is averaged) a peer gets through in a second in that part
of the round, with all the processors that it has for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The paces of one peer."""

    hand_over: float
    """The worker copies its weights out; it stands still meanwhile."""
    propose: float
    """The daemon takes the norm of the work."""
    reduce: float
    """Encode, encrypt, add, decode, hash: while the bytes go over the links, so only the slower of both counts."""
    preview: float
    """The outer step's digests: computed while sums arrive, as far as the reduction leaves processors for it."""
    apply: float
    """The outer step itself, after the commit."""
    take: float
    """The worker copies the new weights in, or merges them; it stands still meanwhile."""
    hop_s: float = 0.0
    """What a step from one process or thread to the next costs, whatever the weights: about ten times in a round."""

    def left_to_preview_s(self, num_bytes: float, reduced_in_s: float, chunk_bytes: float) -> float:
        """What of the digests is still to be computed when the last sum has come."""
        spare_s = max(0.0, reduced_in_s - num_bytes / self.reduce)
        last_chunk_s = min(num_bytes, chunk_bytes) / self.preview
        return max(last_chunk_s, num_bytes / self.preview - spare_s)


IDEAL = Machine(
    hand_over=float("inf"),
    propose=float("inf"),
    reduce=float("inf"),
    preview=float("inf"),
    apply=float("inf"),
    take=float("inf"),
)
"""Whose processors cost no time."""


_CORE_S_PER_GB = {"hand_over": 0.3, "propose": 0.16, "preview": 0.75, "apply": 0.6, "take": 0.3}
"""What one core of a 2026 Xeon server takes for a gigabyte of fp32 weights in each part, measured on idle cores. Copies
take 0.17 in memory; as much again is added for the way from and to the GPU."""
_RESIDUALS_CORE_S_PER_GB = 0.3
"""What error feedback adds to the outer step, where a codec is lossy."""
_REDUCE_CORE_S_PER_GB = {
    "fp32": 2.6,
    "fp16": 2.0,
    "bf16": 2.1,
    "int8": 1.2,
    "int4": 1.1,
    "2bit": 1.2,
    "topk": 1.8,
}
"""The same for the reduction: four peers over TLS, by `python -m benchmarks.reduce`."""
_HOP_S = 0.002


def machine_of(num_cores: float, codec: str) -> Machine:
    """A machine of so many such cores, none of which training needs."""
    seconds = {**_CORE_S_PER_GB, "reduce": _REDUCE_CORE_S_PER_GB[codec]}
    if codec != "fp32":
        seconds["apply"] += _RESIDUALS_CORE_S_PER_GB
    return Machine(**{part: num_cores * 1e9 / each for part, each in seconds.items()}, hop_s=_HOP_S)
