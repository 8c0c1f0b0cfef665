"""Error feedback: what a lossy codec has kept back of a fragment is added to what is sent the next time.

Contributions (Stich et al., arXiv 1809.07599). A member sends encode(v), v = (anchor - local) + its residual. After a
commit that lists it, the residual is v - decode(encode(v)), times a decay (peers/core/defaults.py). Encoding is pure,
so this is worked out at the commit, in place, and takes no memory before; until then every new attempt sends the same
values.

Results. An owner sends encode(average + residual) for its share, and keeps what that lost as pending: it takes the
residual's place at the commit, and is forgotten with the attempt otherwise. It is kept by position in the vector. When
shares change, what is owned no longer is dropped, and what is owned newly starts at zero.

Top-k. SparseLoCo (arXiv 2508.15706, algorithm 1) has e <- 0.95 e + (anchor - local), sends its largest values and
takes them off: the contributions' residual with a decay, here applied when it is stored. It stands in for the outer
momentum, which should then be 0. That method sends no compressed averages; their residual does not decay.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from peers.reduce.codecs import PseudoGradient, codec_named
from peers.reduce.kernels import Floats
from peers.reduce.plan import CHUNK_NUMEL, ReducePlan, slices
from peers.threads import num_threads


def contribution(anchor: Tensor, local: Tensor, residual: Tensor | None) -> PseudoGradient:
    """What a member has to send, before the codec. As arrays: to slice a tensor takes many times longer."""
    return PseudoGradient(anchor.numpy(), local.numpy(), residual.numpy() if residual is not None else None)


class _Stretch(NamedTuple):
    """Values from `start` on in the vector."""

    start: int
    values: Tensor

    def of(self, part: slice) -> tuple[slice, Tensor] | None:
        """Where `part` and this overlap, relative to `part`, and the values there."""
        start = max(self.start, part.start)
        stop = min(self.start + self.values.numel(), part.stop)
        if start >= stop:
            return None
        return slice(start - part.start, stop - part.start), self.values[
            start - self.start : stop - self.start
        ]


class AttemptResiduals:
    """The residuals as one attempt uses them. Calls for disjoint chunks may come from several threads."""

    def __init__(
        self, plan: ReducePlan, contribution: Tensor | None, result: _Stretch | None, lent: Tensor | None
    ) -> None:
        """What will be pending is kept in `lent`, if that is as long as the share."""
        self.plan, self.contribution_residual, self._result = plan, contribution, result
        share = slice(plan.bounds[plan.me], plan.bounds[plan.me + 1])
        size = share.stop - share.start
        fits = lent is not None and lent.numel() == size
        self.pending = _Stretch(share.start, lent if lent is not None and fits else torch.empty(size))
        self._pending_array = self.pending.values.numpy()
        owned = result.of(share) if result is not None else None
        norm = _norm(owned[1]) if owned is not None else 0.0
        # Members refuse a result beyond the bound, which follows this round's norms: after a round with large norms, an
        # honest owner must not send all that was lost then at once.
        self._scale = min(1.0, plan.result_residual_bound() / norm) if norm > 0 else 0.0

    def add_to_average(self, part: slice, average: Floats, scratch: Floats) -> None:
        """Add to the finished average of `part` of this peer's share what was lost of the ones before."""
        if self._result is None or not self._scale:
            return
        if (found := self._result.of(part)) is not None:
            where, values = found
            lost = np.multiply(values.numpy(), np.float32(self._scale), out=scratch[: values.numel()])
            np.add(average[where], lost, out=average[where])

    def before_coding(self, part: slice, result: Floats) -> None:
        """Of each chunk of the share once, with what is to be sent."""
        np.copyto(self._pending(part), result)

    def after_coding(self, part: slice, decoded: Floats) -> None:
        """The same chunk as all members have it."""
        pending = self._pending(part)
        np.subtract(pending, decoded, out=pending)

    def _pending(self, part: slice) -> Floats:
        start = self.pending.start
        return self._pending_array[part.start - start : part.stop - start]


class Residuals:
    """Of one fragment and one peer. Lossless codecs never touch it, and it holds nothing before the first commit.

    Memory: the contributions' one is as long as the fragment, the results' one as the share, and so is the pending one.
    One thread makes attempts and commits; others may hold the tensors meanwhile.
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.contribution_residual: Tensor | None = None
        """Belongs into this peer's next contribution, and so into the norm that it announces."""
        self._result: _Stretch | None = None
        self._attempt: AttemptResiduals | None = None
        # What was pending last, or a result's residual before that: fresh memory costs a page fault every 4 kB.
        self._spare: Tensor | None = None
        self._lock = threading.Lock()
        self._num_holders = 0

    def for_attempt(self, plan: ReducePlan) -> AttemptResiduals | None:
        """What this attempt adds and keeps; None where its codec loses nothing. What an earlier one kept is gone."""
        if plan.bounds[-1] != self.numel:
            raise ValueError(f"residuals of {self.numel} values do not fit a plan for {plan.bounds[-1]}")
        lossless = codec_named(plan.codec).lossless
        self.drop_attempt()
        if not lossless:
            lent, self._spare = self._spare, None
            self._attempt = AttemptResiduals(plan, self.contribution_residual, self._result, lent)
        return self._attempt

    def drop_attempt(self) -> None:
        """The attempt will not be committed, and its threads have ended. May be repeated."""
        if self._attempt is not None:
            self._spare = self._attempt.pending.values
        self._attempt = None

    def commit(self, plan: ReducePlan, anchor: Tensor, local: Tensor, *, decay: float) -> None:
        """A commit lists this peer with what it sent under `plan`: keep what that lost, times `decay`.

        Before the outer step, since `anchor` and `local` must be those of the attempt. Not to be repeated.
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
            replaced, self._result = self._result, attempt.pending if attempt is not None and same else None
            is_held = self._num_holders > 0
            self._spare = replaced.values if replaced is not None and not is_held else None

    def reset(self) -> None:
        """After joining, a fork, or a commit this peer only heard of: what was lost belongs to another history."""
        self.contribution_residual = self._result = self._attempt = self._spare = None

    @contextmanager
    def held(self) -> Iterator[dict[str, Tensor]]:
        """The tensors to save, by name. No commit writes to them meanwhile; entering waits for one under way."""
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
        if self._result is not None and self._result.values.numel():
            tensors["result"] = self._result.values
            tensors["result_start"] = torch.tensor([self._result.start])
        return tensors

    @classmethod
    def from_tensors(cls, numel: int, tensors: Mapping[str, Tensor]) -> Self:
        """Of what `held` gave, which is copied. Raises ValueError on anything else."""
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
            residuals._result = _Stretch(int(start), _checked(tensors["result"], "result", size))
        return residuals


def _store_losses(
    plan: ReducePlan, anchor: Tensor, local: Tensor, residual: Tensor | None, out: Tensor, decay: np.float32
) -> None:
    """What the codec lost of each chunk as it was sent, times `decay`; `out` may be `residual`."""
    codec = codec_named(plan.codec)
    # Blocks of a codec count from the start of a chunk, and chunks from the start of a share.
    parts = [
        plan.chunk(owner, i) for owner in range(len(plan.members)) for i in range(plan.num_chunks(owner))
    ]

    sent, losses = contribution(anchor, local, residual), out.numpy()

    def store(mine: list[slice]) -> None:
        scratch = np.empty(CHUNK_NUMEL, np.float32)
        payload = np.empty(codec.encoded_bytes(CHUNK_NUMEL), np.uint8)
        for part in mine:
            lost = losses[part]
            codec.losses(sent.of(part), scratch, payload, lost)
            if decay != 1:
                np.multiply(lost, decay, out=lost)

    # Flushing denormals is a state of the thread, and must be the same as in those that sent.
    with ThreadPoolExecutor(num_threads(), "residuals", torch.set_flush_denormal, (False,)) as pool:
        list(pool.map(store, [parts[first :: num_threads()] for first in range(num_threads())]))


def _norm(values: Tensor) -> float:
    return math.sqrt(sum(float(torch.dot(values[part], values[part])) for part in slices(values.numel())))


def _checked(values: Tensor, name: str, numel: int) -> Tensor:
    if values.dtype != torch.float32 or values.shape != (numel,):
        raise ValueError(
            f"the {name} residual is {values.dtype} {tuple(values.shape)}, not {numel} fp32 values"
        )
    if not math.isfinite(_norm(values)):
        raise ValueError(f"the {name} residual has values that are not finite")
    return values.clone()
