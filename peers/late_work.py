"""What becomes of work that comes too late for the commit it was meant for: it waits, trains on, or is lost.

Late is what was handed over when the others had committed without it, and what the losing side of a fork has committed
(peers/state/branch.py). Either is work on top of another anchor now.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection

from peers import membership
from peers.outer_state import OuterState
from peers.pace import Ages, entry_with_work
from peers.round.readiness import Readiness
from peers.schedule import Schedule
from peers.state.branch import Aside, Branch

log = logging.getLogger(__name__)


class LateWork:
    """Of one peer. `has_worker`: whether the worker lives that has handed over what is averaged."""

    def __init__(self, schedule: Schedule, has_worker: Callable[[], bool]) -> None:
        self._schedule, self._has_worker = schedule, has_worker
        self.branch = Branch()
        # By fragment, the tokens that came over from the losing side of a fork and wait in the worker's weights.
        self._carried: Counter[int] = Counter()
        self._is_riding = False

    def carried_tokens(self, fragment: int) -> int:
        """That are in the worker's weights beside those it counts."""
        return self._carried[fragment]

    def worker_is_gone(self) -> None:
        """What was left in its weights is gone with it."""
        if self._carried:
            log.warning("%d tokens that were brought along are lost with the worker", self._carried.total())
        self._carried.clear()
        self._is_riding = False

    def is_in(self, waiting: Readiness, *, is_lost: bool = False) -> None:
        """In a commit; or lost, with a last epoch that comes too late."""
        self._is_riding = False
        tokens = self._carried.pop(waiting.fragment, 0) // self._schedule.num_fragments
        if is_lost and tokens:
            log.warning("%d tokens that were brought along come too late for any epoch", tokens)
        waiting.carried_tokens = 0 if is_lost else tokens

    def set_aside(
        self, old: OuterState, new: OuterState, trainers: Collection[int], *, brings: bool
    ) -> Aside:
        """What this peer's state has that the new one, on which these train, has not; and tell of it."""
        path = old.header.path_since_split(new.header)
        aside = self.branch.set_aside(path)
        self.branch.moved(new.lineage, trainers)
        if old.header.has_unknown_split_from(new.header):
            log.warning("the swarm was split long ago: what this side has committed since is given up")
        elif aside.num_commits:
            log.warning(
                "the swarm was split: in %d epochs of this side the others have trained more, and all go on from "
                "there; of the last %d this peer brings its %d tokens along",
                aside.num_commits,
                aside.num_brought if brings else 0,
                aside.tokens.total() // self._schedule.num_fragments if brings else 0,
            )
        return aside

    async def carry_over(self, waiting: Readiness, old: OuterState, new: OuterState, aside: Aside) -> None:
        """What is handed over, and what this side of a fork has committed, becomes work on top of the new state."""
        await asyncio.to_thread(waiting.rebase, old, new)
        await asyncio.to_thread(waiting.bring, aside.sums)
        self._carried += aside.tokens
        tokens = waiting.proposal.tokens + aside.tokens[waiting.fragment]
        waiting.proposal = dataclasses.replace(waiting.proposal, tokens=tokens)

    def ride(self, view: membership.View, lineage: str, me: int, ages: Ages) -> int | None:
        """The local step at which the worker trains on, its work within its weights; None: that waits for the round."""
        schedule = self._schedule
        if schedule.overlap_steps or self._is_riding or not self._has_worker():
            # It trains on already; or it has come too late all the same, and might do so for ever; or is no more.
            return None
        entry = entry_with_work(
            view,
            lineage,
            me,
            schedule.steps_per_epoch,
            ages,
            has_time_budget=schedule.local_time_s > 0,
        )
        self._is_riding = entry is not None
        return entry
