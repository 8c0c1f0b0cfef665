"""What a worker asks of the daemon, from its word to its answer: where to begin, and what becomes of a fragment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from peers.core.effects import Answer
from peers.errors import PeersError
from peers.reduce.commit_log import Recording
from peers.reduce.plan import ReducePlan
from peers.state.handover import Ahead, EpochOutcome, Memories, Start
from peers.state.header import StateHeader
from peers.state.outer_optimizer import rebase
from peers.state.outer_state import OuterState

_PAGE_BYTES = 4096


class Beginning:
    """A worker that asks where to begin. Belongs to one event loop."""

    def __init__(self, inn: Sequence[Tensor]) -> None:
        self.start: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        self._inn = inn
        # The pages of new memory cost seconds, which pass while the state is fetched.
        self._touched = asyncio.create_task(asyncio.to_thread(_touch, inn))

    async def at(self, anchor: Sequence[Tensor]) -> None:
        """Put into *in* what it begins from."""
        await self._touched
        for inn, values in zip(self._inn, anchor, strict=True):
            await asyncio.to_thread(inn.copy_, values)

    def settle(self, start: Start) -> None:
        """A worker that has ended meanwhile is not told."""
        if not self.start.done():
            self.start.set_result(start)


def _touch(fresh: Sequence[Tensor]) -> None:
    """Write to every page of memory that nobody has written to yet."""
    for values in fresh:
        values[:: _PAGE_BYTES // values.element_size()] = 0


class WorkInHand:
    """Belongs to one event loop."""

    def __init__(
        self, memories: Memories, fragment: int, *, last: bool, ahead: asyncio.Future[Ahead]
    ) -> None:
        """`ahead`: where the worker hears that it is to train on meanwhile."""
        self.memories, self.fragment, self.last, self.ahead = memories, fragment, last, ahead
        self.local = memories.out[fragment]
        """What the fragment's weights count as: those handed over, or the same work on top of a later anchor."""
        self.answer: asyncio.Future[EpochOutcome] = asyncio.get_running_loop().create_future()
        self.plan: ReducePlan | None = None
        """Of the attempt whose result is in *in*."""
        self.previewed: StateHeader | None = None
        """What the outer step makes of that result."""
        self.recording: Recording | None = None
        """Of that attempt, where somebody downloads the state meanwhile."""
        self.parallel: tuple[int, ...] = ()
        """World ranks whose work in that attempt pointed where this does."""
        self.contributors: list[int] = []
        """World ranks of the commit that this work is in."""
        self.clock = Stopwatch()
        self.since = time.monotonic()
        self.propose_s = 0.0
        self.grouped_at: float | None = None
        self.sent_bytes = self.received_bytes = 0
        self._has_shifted = False

    @property
    def result(self) -> Tensor:
        """The fragment's *in*."""
        return self.memories.inn[self.fragment]

    @property
    def others(self) -> list[int]:
        """The other fragments."""
        return [index for index in range(len(self.memories.inn)) if index != self.fragment]

    def rebase(self, base: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Make it work on top of another anchor, in memory of its own: the worker needs what it has handed over."""
        local = self.local
        is_workers = local is self.memories.out[self.fragment]
        rebased = torch.empty_like(local) if is_workers else local
        rebase(anchor[self.fragment], local, base[self.fragment], rebased)
        self.local = rebased
        self.shift_others(base, anchor)

    def shift_others(self, base: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Note by how much the anchors have moved of which the worker did not hand over its weights."""
        for fragment in self.others:
            inn = self.memories.inn[fragment]
            if self._has_shifted:
                inn.sub_(base[fragment]).add_(anchor[fragment])
            else:
                torch.sub(anchor[fragment], base[fragment], out=inn)
        self._has_shifted = True

    def put_back(self, how: Literal["contributed", "rebase", "keep"], state: OuterState) -> None:
        """What the worker goes on from, to *in*."""
        match how:
            case "rebase" | "keep":
                self.result.copy_(self.local)
            case "contributed":
                self.result.copy_(state.anchor[self.fragment])

    def settle(self, answer: Answer, **figures: Any) -> None:
        """Answer the worker, which goes on from what is in *in*."""
        now, parts = time.monotonic(), self.clock.parts
        grouped_at = self.grouped_at or now
        outcome = EpochOutcome(
            epoch=answer.epoch,
            local_step=answer.local_step,
            data_base=answer.data_base,
            fragment=self.fragment,
            head=answer.certificate.head,
            anchor_digest=answer.certificate.body.anchor,
            shifted=self.others if self._has_shifted else [],
            last=self.last,
            contributors=self.contributors,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            round_s=now - grouped_at,
            wait_s=grouped_at - self.since,
            propose_s=self.propose_s,
            connect_s=parts.get("connect_s", 0.0),
            reduce_s=parts.get("reduce_s", 0.0),
            preview_s=parts.get("preview_s", 0.0),
            vote_s=parts.get("vote_s", 0.0),
            apply_s=parts.get("apply_s", 0.0),
            **figures,
        )
        if not self.answer.done():
            self.answer.set_result(outcome)

    def fail(self, error: PeersError) -> None:
        """Whoever awaits the answer is told why there is none."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Stopwatch:
    """How long the parts of an attempt took, in seconds."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, part: str) -> None:
        """The part that ends now began where the one before ended."""
        now = time.monotonic()
        self.parts[part], self._last = now - self._last, now

    def restart(self) -> None:
        self.parts.clear()
        self._last = time.monotonic()
