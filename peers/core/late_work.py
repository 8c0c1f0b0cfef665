"""Rule 4: work that comes too late for the commit it was meant for is not lost.

Its worker trains on at once, where the others are, and its weights are rebased: new anchor + (local - old anchor). All
of it is brought to the next commit, with the epoch since which it was trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from peers.core.catch_up import CatchUp
from peers.core.chain import Chain
from peers.core.effects import Answer, Rebase, Tell
from peers.core.health import Swarm
from peers.core.round import Round
from peers.core.settings import Settings
from peers.core.turn import Turn
from peers.core.worker import Worker, entry_step
from peers.protocol.certificates import Certificate


@dataclass
class LateWork:
    """Of one peer."""

    worker: Worker
    chain: Chain
    swarm: Swarm
    catch_up: CatchUp
    settings: Settings

    def go_on(self, turn: Turn, round_: Round | None) -> bool:
        """Answer the worker, where its work came too late. True if anything was due."""
        worker = self.worker
        if worker.work is None:
            return False
        target = self.catch_up.target
        if target is not None and not self.catch_up.is_checking:
            # What this peer has voted for may have been committed: then the work is in it.
            is_in_doubt = bool(worker.voted)
            if worker.epoch >= target.plan.epoch or is_in_doubt:
                return False
            if round_ is not None:
                round_.give_up(turn, "it has to catch up")
            return self._answer(turn, "keep", target, round_)
        if worker.base != self.chain.head:
            # Its anchor has moved under it.
            turn.do(Rebase())
            worker.base = self.chain.head
            return True
        epoch, fragment_of = self.chain.epoch, self.settings.fragment_of
        if worker.epoch < epoch or fragment_of(worker.epoch) != fragment_of(epoch):
            # Of an epoch that is over; or not what this one averages, of one that never came here.
            return self._answer(turn, "rebase", self.chain.newest, round_)
        return False

    def commit_in(self, path: Sequence[Certificate]) -> Certificate | None:
        """The commit on this path that has taken the work in hand in: this peer has voted for it."""
        return next((certificate for certificate in path if certificate.head in self.worker.voted), None)

    def entry_step(self, turn: Turn, head: str = "") -> int:
        """Where the worker enters the epoch of those who train on `head`; default: on this peer's own."""
        head = head or self.chain.head
        others = [
            (status, self.swarm.age_s(peer_id, turn.now))
            for peer_id, status in self.swarm.live()
            if status.head == head and status.phase in ("training", "ready")
        ]
        return entry_step(others, self.settings.steps_per_epoch, self.worker.step_s)

    def _answer(
        self, turn: Turn, how: Literal["rebase", "keep"], towards: Certificate, round_: Round | None
    ) -> bool:
        worker, work = self.worker, self.worker.work
        assert work is not None
        if worker.has_lost_work:
            turn.do(Tell("lost_work", f"{work.tokens} tokens are lost with the worker that trained them"))
        if round_ is not None:
            # A commit that comes to light now would answer for the same work again.
            round_.held = None
        step = self.entry_step(turn, towards.head)
        worker.goes_on(towards.plan.epoch, step)
        turn.do(Answer(how, towards, step))
        return True
