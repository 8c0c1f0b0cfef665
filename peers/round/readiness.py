"""A worker's readiness for a round, from its word to its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import torch

from peers.handover import Memories, Outcome
from peers.outer_optimizer import rebase
from peers.outer_state import OuterState
from peers.reduction.plan import ReducePlan
from peers.reduction.shares import bounds_of
from peers.round.aggregation import Aggregation
from peers.round.messages import Group, Proposal
from peers.state.commit_log import Recording
from peers.state.header import StateHeader


def plan_of(group: Group, me: int, numel: int, codec: str, aggregation: Aggregation) -> ReducePlan:
    """How the members of a group reduce: the same on all of them. Raises ProtocolError for a group that cannot."""
    return ReducePlan(
        attempt=bytes.fromhex(group.attempt),
        members=group.ranks,
        me=group.ranks.index(me),
        weights=group.weights,
        norms=tuple(member.norm for member in group.members),
        bounds=bounds_of([member.bandwidth for member in group.members], numel),
        codec=codec,
        rule=aggregation.rule,
        audited=aggregation.audit > 0,
    )


class Readiness:
    """One fragment that the worker has handed over, and what becomes of it. Belongs to one event loop."""

    def __init__(self, memories: Memories, fragment: int, proposal: Proposal) -> None:
        self.memories, self.fragment, self.proposal = memories, fragment, proposal
        self.local = memories.out[fragment]
        """What the fragment's weights count as: those handed over, or the same work on top of a later anchor."""
        self.answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.plan: ReducePlan | None = None
        """Of the attempt whose result is in *in*."""
        self.previewed: StateHeader | None = None
        """What the outer step makes of that result."""
        self.recording: Recording | None = None
        """Of that attempt, where somebody downloads the state meanwhile."""
        self.clock = Stopwatch()
        self.since = time.monotonic()
        self.propose_s = 0.0
        self.grouped_at: float | None = None
        self.sent_bytes = self.received_bytes = 0
        self.carried_tokens = 0
        self._has_shifted = False

    @property
    def result(self) -> torch.Tensor:
        """The fragment's *in*."""
        return self.memories.inn[self.fragment]

    @property
    def others(self) -> list[int]:
        """The other fragments."""
        return [index for index in range(len(self.memories.inn)) if index != self.fragment]

    def rebase(self, old: OuterState, new: OuterState) -> None:
        """Carry the work over to another anchor, in memory of its own: the worker needs what it has handed over."""
        local, anchor = self.local, new.anchor[self.fragment]
        rebased = torch.empty_like(local) if local is self.memories.out[self.fragment] else local
        rebase(anchor, local, old.anchor[self.fragment], rebased)
        self.local = rebased

    def bring(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Add work that these pseudo-gradients (by fragment) stand for, after it is rebased and the others shifted."""
        for fragment, pseudo_gradient in sums.items():
            local = self.local if fragment == self.fragment else self.memories.inn[fragment]
            local -= pseudo_gradient

    def shift_others(self, old: OuterState, new: OuterState) -> None:
        """Note by how much the anchors have moved of which the worker did not hand over its weights."""
        for fragment in self.others:
            inn = self.memories.inn[fragment]
            if self._has_shifted:
                inn.sub_(old.anchor[fragment]).add_(new.anchor[fragment])
            else:
                torch.sub(new.anchor[fragment], old.anchor[fragment], out=inn)
        self._has_shifted = True

    def settle(self, state: OuterState, **figures: Any) -> None:
        """Answer the worker, which goes on from what is in *in*."""
        now, parts = time.monotonic(), self.clock.parts
        grouped_at = self.grouped_at or now
        outcome = Outcome(
            epoch=state.epoch,
            fragment=self.fragment,
            lineage=state.lineage,
            anchor_digest=state.anchor_digest,
            data_base=state.data_base,
            shifted=self.others if self._has_shifted else [],
            last=self.proposal.last,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            carried_tokens=self.carried_tokens,
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


class Stopwatch:
    """How long the parts of an attempt took, in seconds."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._started = self._last = time.monotonic()

    @property
    def total_s(self) -> float:
        """Since the attempt began."""
        return time.monotonic() - self._started

    def lap(self, part: str) -> None:
        """The part that ends now began where the one before ended."""
        now = time.monotonic()
        self.parts[part], self._last = now - self._last, now

    def restart(self) -> None:
        self.parts.clear()
        self._started = self._last = time.monotonic()
