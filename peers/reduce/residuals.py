"""Error feedback: what a lossy codec lost of a fragment is added to what is sent the next time.

Contributions (Stich et al., arXiv 1809.07599). A member sends encode(v), v = (anchor - local) + its residual. After a
commit that contains it, its residual is v - decode(encode(v)), times a decay (peers/core/defaults.py). Encoding is
pure, so the new residual is computed at the commit, in place, and needs no memory before; until then every attempt
sends the same values.

Results. An owner sends encode(average + residual) for its share, and in a grid a collector sends its mates encode(sum +
residual) for theirs. What that lost is *pending*: it becomes the residual at the commit, and is dropped if the attempt
fails. Residuals are kept by position in the vector. When pieces change, positions outside the new one are dropped, and
new ones start at zero.

Top-k. SparseLoCo (arXiv 2508.15706, algorithm 1) computes e <- 0.95 e + (anchor - local), sends the largest values of e
and subtracts them: that is the contributions' residual with a decay, here applied when it is stored. It replaces the
outer momentum, which should then be 0. SparseLoCo does not compress averages; their residual does not decay.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from peers.reduce.codecs import codec_named
from peers.reduce.codecs_common import PseudoGradient
from peers.reduce.copies import cloned
from peers.reduce.kernels import Floats, energy
from peers.reduce.plan import CHUNK_NUMEL, ReducePlan, slices
from peers.threads import in_exact_threads


class _Range(NamedTuple):
    """Consecutive values of the vector, from position `start` on."""

    start: int
    values: Tensor

    def of(self, part: slice) -> tuple[slice, Tensor] | None:
        """The overlap of `part` with this range, as a slice of `part`, and the values there; None: no overlap."""
        start = max(self.start, part.start)
        stop = min(self.start + self.values.numel(), part.stop)
        if start >= stop:
            return None
        return slice(start - part.start, stop - part.start), self.values[
            start - self.start : stop - self.start
        ]


class AttemptResiduals:
    """The residuals of one attempt. Calls for disjoint chunks may come from several threads."""

    def __init__(
        self,
        plan: ReducePlan,
        contribution_residual: Tensor | None,
        result_residual: _Range | None,
        lent: Tensor | None,
    ) -> None:
        """`lent`: memory for the pending residual, used if it is as long as the piece."""
        self.plan, self.contribution_residual = plan, contribution_residual
        self._result_residual = result_residual
        piece = plan.piece
        size = piece.stop - piece.start
        fits = lent is not None and lent.numel() == size
        self.pending = _Range(piece.start, lent if lent is not None and fits else torch.empty(size))
        self._pending_array = self.pending.values.numpy()
        # Members refuse a result or a sum beyond a bound that follows from this round's norms. After a round with
        # larger norms the residual can exceed it: then an honest peer adds only as much of it as the bound allows.
        self._scale = self._largest_scale(plan.share, plan.result_residual_bound())
        self._scale_of_sums = (
            self._largest_scale(piece, plan.sum_residual_bound(plan.me)) if plan.mates else 0.0
        )

    def add_to_average(self, part: slice, average: Floats, scratch: Floats) -> None:
        """Add the residual to the finished average or sum of `part`, a part of this peer's piece."""
        share = self.plan.share
        scale = self._scale if share.start <= part.start < share.stop else self._scale_of_sums
        if self._result_residual is None or not scale:
            return
        if (found := self._result_residual.of(part)) is not None:
            where, values = found
            lost = np.multiply(values.numpy(), np.float32(scale), out=scratch[: values.numel()])
            np.add(average[where], lost, out=average[where])

    def _largest_scale(self, part: slice, bound: float) -> float:
        """The factor, at most 1, that keeps the residual of `part` within this L2 norm; 0 if there is no residual."""
        owned = self._result_residual.of(part) if self._result_residual is not None else None
        norm = _norm(owned[1]) if owned is not None else 0.0
        return min(1.0, bound / norm) if norm > 0 else 0.0

    def before_coding(self, part: slice, result: Floats) -> None:
        """To be called once for each chunk of the piece, with the values to send."""
        np.copyto(self._pending(part), result)

    def after_coding(self, part: slice, decoded: Floats) -> None:
        """To be called with the same chunk as all members decode it."""
        pending = self._pending(part)
        np.subtract(pending, decoded, out=pending)

    def _pending(self, part: slice) -> Floats:
        start = self.pending.start
        return self._pending_array[part.start - start : part.stop - start]


class Residuals:
    """The residuals of one fragment on one peer. Empty before the first commit, and always under lossless codecs.

    Memory: the contributions' residual is as long as the fragment; the results' and the pending one are as long as the
    piece. One thread makes attempts and commits; others may hold the tensors meanwhile (`held`).
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.contribution_residual: Tensor | None = None
        """Part of this peer's next contribution, and so of the norm that it announces."""
        self._result_residual: _Range | None = None
        self._attempt: AttemptResiduals | None = None
        # Memory of an earlier residual, reused: fresh memory costs a page fault every 4 kB.
        self._spare: Tensor | None = None
        self._lock = threading.Lock()
        self._num_holders = 0

    def for_attempt(self, plan: ReducePlan) -> AttemptResiduals | None:
        """The residuals for a new attempt; None if its codec is lossless. Drops those of an earlier attempt."""
        if plan.bounds[-1] != self.numel:
            raise ValueError(f"residuals of {self.numel} values do not fit a plan for {plan.bounds[-1]}")
        lossless = codec_named(plan.codec).lossless
        self.drop_attempt()
        if not lossless:
            lent, self._spare = self._spare, None
            self._attempt = AttemptResiduals(plan, self.contribution_residual, self._result_residual, lent)
        return self._attempt

    def drop_attempt(self) -> None:
        """The attempt will not be committed. Its threads must have ended. May be repeated."""
        if self._attempt is not None:
            self._spare = self._attempt.pending.values
        self._attempt = None

    def commit(self, plan: ReducePlan, anchor: Tensor, local: Tensor, *, decay: float) -> None:
        """A commit contains this peer's contribution under `plan`: store what the codec lost of it, times `decay`.

        To be called once, before the outer step: `anchor` and `local` must be those of the attempt.
        """
        codec = codec_named(plan.codec)
        if codec.lossless:
            return
        with self._lock:
            new = self.contribution_residual
            if new is None or self._num_holders:
                new = torch.empty(self.numel)
            _store_losses(plan, anchor, local, self.contribution_residual, new, np.float32(decay))
            self.contribution_residual = new
            attempt, self._attempt = self._attempt, None
            same = attempt is not None and attempt.plan.attempt == plan.attempt
            replaced, self._result_residual = (
                self._result_residual,
                attempt.pending if attempt is not None and same else None,
            )
            is_held = self._num_holders > 0
            self._spare = replaced.values if replaced is not None and not is_held else None

    @contextmanager
    def held(self) -> Iterator[dict[str, Tensor]]:
        """The tensors to save, by name. Commits do not write to them meanwhile; entering waits for a running commit."""
        with self._lock:
            self._num_holders += 1
            tensors = self._to_tensors()
        try:
            yield tensors
        finally:
            with self._lock:
                self._num_holders -= 1

    def _to_tensors(self) -> dict[str, Tensor]:
        tensors = {}
        if self.contribution_residual is not None:
            tensors["contribution"] = self.contribution_residual
        if self._result_residual is not None and self._result_residual.values.numel():
            tensors["result"] = self._result_residual.values
            tensors["result_start"] = torch.tensor([self._result_residual.start])
        return tensors

    @classmethod
    def from_tensors(cls, numel: int, tensors: Mapping[str, Tensor]) -> Self:
        """Residuals from a copy of the tensors that `held` gave. Raises ValueError for anything else."""
        residuals = cls(numel)
        if unknown := tensors.keys() - {"contribution", "result", "result_start"}:
            raise ValueError(f"no residual is named {', '.join(sorted(unknown))}")
        if "contribution" in tensors:
            residuals.contribution_residual = _checked(tensors["contribution"], "contribution", numel)
        if ("result" in tensors) != ("result_start" in tensors):
            raise ValueError("the residual of results and its start come together")
        if "result" in tensors:
            start = tensors["result_start"]
            if start.dtype != torch.int64 or start.shape != (1,) or not 0 <= int(start) < numel:
                raise ValueError(f"no residual starts at {start} of {numel} values")
            size = tensors["result"].numel()
            if size > numel - int(start):
                raise ValueError(f"a residual of {size} values from {int(start)} on ends beyond {numel}")
            residuals._result_residual = _Range(int(start), _checked(tensors["result"], "result", size))
        return residuals


def _store_losses(
    plan: ReducePlan, anchor: Tensor, local: Tensor, residual: Tensor | None, out: Tensor, decay: np.float32
) -> None:
    """Write what the codec lost of each chunk as it was sent, times `decay`, to `out`, which may be `residual`."""
    codec = codec_named(plan.codec)
    # The same chunks as were sent: a codec's blocks start with a chunk, and chunks start with a share.
    parts = [plan.place(chunk) for chunk in plan.chunks(range(len(plan.members)))]

    sent, losses = PseudoGradient.of_tensors(anchor, local, residual), out.numpy()

    def store(mine: list[slice]) -> None:
        scratch = np.empty(CHUNK_NUMEL, np.float32)
        payload = np.empty(codec.encoded_bytes(CHUNK_NUMEL), np.uint8)
        for part in mine:
            lost = losses[part]
            codec.losses(sent.of(part), scratch, payload, lost)
            if decay != 1:
                np.multiply(lost, decay, out=lost)

    in_exact_threads("residuals", store, parts)


def _norm(values: Tensor) -> float:
    """The L2 norm; not finite if a value is not, or if its square overflows fp32."""
    array = values.numpy()

    def energies(mine: list[slice]) -> list[float]:
        return [energy(array[part]) for part in mine]

    # In threads: a reduction begins only once this is known, and the other members wait for its first frame.
    found = in_exact_threads("norm", energies, slices(values.numel()))
    return math.sqrt(math.fsum(chain.from_iterable(found)))


def _checked(values: Tensor, name: str, numel: int) -> Tensor:
    if values.dtype != torch.float32 or values.shape != (numel,):
        raise ValueError(
            f"the {name} residual is {values.dtype} {tuple(values.shape)}, not {numel} fp32 values"
        )
    own = cloned(values)
    if not math.isfinite(_norm(own)):
        raise ValueError(f"the {name} residual has values that are not finite")
    return own
