"""The outer step, and other computations on whole fragments.

Every peer computes every commit itself, so the step consists of single IEEE operations in a fixed order, which give the
same bits on every CPU. Nothing here needs more memory than a few chunks.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from peers.protocol.certificates import Certificate
from peers.reduce.kernels import Floats, compiled
from peers.reduce.plan import CHUNK_NUMEL, slices
from peers.state.header import StateChunk, StateHeader
from peers.state.outer_state import OuterState
from peers.threads import exact_threads, in_exact_threads

_PART_NUMEL = 1 << 16
"""Values computed at a time, few enough that the results are still in the cache when they are hashed."""


@compiled(
    "void(float32[::1], float32[::1], float32[::1], float32, float32, float32[::1], float32[::1])",
)
def outer_step(
    old_anchor: Floats,
    old_momentum: Floats,
    average: Floats,
    lr: np.float32,
    factor: np.float32,
    anchor: Floats,
    momentum: Floats,
) -> None:
    """The arithmetic of the outer step: SGD with Nesterov momentum; `factor` is the momentum coefficient."""
    for i in range(average.size):
        moved = old_momentum[i] * factor + average[i]
        momentum[i] = moved
        anchor[i] = old_anchor[i] - (moved * factor + average[i]) * lr


class Target(NamedTuple):
    """The tensors that a commit writes to."""

    anchor: Tensor
    momentum: Tensor
    copy: Tensor | None
    """A second destination of the anchor."""


class OuterOptimizer:
    """Nesterov SGD on averaged pseudo-gradients, as torch.optim.SGD(nesterov=True) does it, without its fused adds.

    Both parameters are rounded to fp32 here, so that every peer applies the same values.
    """

    def __init__(self, *, lr: float, momentum: float) -> None:
        self.lr, self.momentum = struct.unpack("2f", struct.pack("2f", lr, momentum))

    def commit(
        self,
        state: OuterState,
        fragment: int,
        average: Tensor,
        *,
        certificate: Certificate | None = None,
        previewed: StateHeader | None = None,
        into: Tensor | None = None,
    ) -> None:
        """Advance anchor, momentum and certificate together, and with the certificate epoch, head and data blocks.

        `average` is the averaged pseudo-gradient. `previewed` is the header of a Preview of the same state and average;
        with it nothing is hashed a second time. The new anchor is also copied to `into`, which may be `average`. Raises
        ProtocolError if the result does not match the certificate; then the state must not be used any more. Without a
        certificate (for callers that want the arithmetic alone) the state keeps its old one.
        """
        old, chunks = state.header, state.chunks(fragment)
        target = Target(*state.begin_change(fragment), into)

        def step(chunk: StateChunk) -> tuple[bytes, bytes]:
            return self.step_chunk(state, chunk, average, target, hashing=previewed is None)

        with exact_threads("outer") as pool:
            digests = list(pool.map(step, chunks))
        header = previewed or old.with_chunks(chunks, digests)
        if certificate is not None:
            header = header.certified_by(certificate)
        state.end_change(header, fragment, target.anchor, target.momentum)

    def step_chunk(
        self, state: OuterState, chunk: StateChunk, average: Tensor, target: Target | None, *, hashing: bool
    ) -> tuple[bytes, bytes]:
        """One chunk's step, written to `target` if there is one. Returns BLAKE3 of anchor and momentum if `hashing`."""
        fragment = chunk.fragment
        old_anchor, old_momentum = state.anchor[fragment].numpy(), state.momentum[fragment].numpy()
        if average.numel() != old_anchor.size:
            raise ValueError(f"an average of {average.numel()} values for a fragment of {old_anchor.size}")
        averages, hashes = average.numpy(), (blake3(), blake3())
        lr, factor = np.float32(self.lr), np.float32(self.momentum)
        # Not in place: the compiled loop takes three times as long on arrays that overlap.
        new_anchor, new_momentum = (np.empty(min(chunk.numel, _PART_NUMEL), np.float32) for _ in range(2))
        for start in range(chunk.start, chunk.stop, _PART_NUMEL):
            part = slice(start, min(start + _PART_NUMEL, chunk.stop))
            anchor, momentum = new_anchor[: part.stop - start], new_momentum[: part.stop - start]
            outer_step(old_anchor[part], old_momentum[part], averages[part], lr, factor, anchor, momentum)
            if target is not None:
                target.anchor.numpy()[part], target.momentum.numpy()[part] = anchor, momentum
                if target.copy is not None:
                    target.copy.numpy()[part] = anchor
            if hashing:
                hashes[0].update(anchor.view(np.uint8).data)
                hashes[1].update(momentum.view(np.uint8).data)
        return hashes[0].digest(), hashes[1].digest()


def rebase(new_anchor: Tensor, local: Tensor, base: Tensor, out: Tensor) -> None:
    """Put local work on top of another anchor: out = new_anchor + (local - base). `out` may be any of the three."""

    def move(mine: list[slice]) -> None:
        scratch = torch.empty(min(local.numel(), CHUNK_NUMEL))
        for part in mine:
            work = scratch[: part.stop - part.start]
            torch.sub(local[part], base[part], out=work)
            torch.add(new_anchor[part], work, out=out[part])

    in_exact_threads("rebase", move, slices(local.numel()))
