"""Rule 4: work that comes too late for the commit it was meant for is not lost, and nobody stands still for one that
comes late itself.

A worker whose work was too late trains on at once, where the others are, and its weights are rebased: new anchor +
(local - old anchor). All of it is brought to the next commit, with the epoch since which it was trained.

A worker whose work waits for a commit that meets with a fault trains on meanwhile, in the epoch that is to follow; what
it has handed over stays as it is, and what it has trained since lies on top of whatever becomes of that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from peers.core.catch_up import CatchUp
from peers.core.chain import Chain
from peers.core.effects import Answer, GoAhead, Rebase, Tell
from peers.core.health import Swarm
from peers.core.round import Round
from peers.core.settings import Settings
from peers.core.timing import Timing
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
    timing: Timing

    def answer_late(self, turn: Turn, round_: Round | None) -> bool:
        """Answer the worker, where its work came too late. True if anything was due."""
        worker = self.worker
        if worker.work is None:
            return False
        target = self.catch_up.target
        if target is not None and not self.catch_up.is_checking:
            # What this peer has voted for may have been committed: then the work is in it.
            is_in_doubt = bool(worker.voted_heads)
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

    def go_ahead(self, turn: Turn, round_: Round | None) -> bool:
        """Where a commit takes longer than usual, the worker trains on meanwhile. True if it was told to."""
        worker, work = self.worker, self.worker.work
        if round_ is None or work is None or work.last or worker.is_ahead or worker.has_lost_work:
            return False
        others = self.swarm.roster - {self.catch_up.me}
        is_troubled = bool(round_.failures) or not all(map(self.swarm.is_live, others))
        if not turn.passed(worker.ready_at + self.timing.patience_s(is_troubled=is_troubled)):
            return False
        worker.is_ahead = True
        turn.do(GoAhead(worker.epoch + 1, round_.next_data_base))
        return True

    def commit_in(self, path: Sequence[Certificate]) -> Certificate | None:
        """The commit on this path that has taken the work in hand in: this peer has voted for it."""
        return next(
            (certificate for certificate in path if certificate.head in self.worker.voted_heads), None
        )

    def entry_step(self, turn: Turn, head: str = "") -> int:
        """Where the worker enters the epoch of those who train on `head`; default: on this peer's own."""
        head = head or self.chain.head
        others = [
            (status, self.swarm.age_s(peer_id, turn.now))
            for peer_id, status in self.swarm.live()
            if status.head == head and status.phase in ("training", "ready")
        ]
        return entry_step(others, self.settings.steps_per_epoch, self.worker.step_s)

    def head_start(self, turn: Turn, commit: Certificate) -> int:
        """The local step at which most of its other contributors begin the epoch after this commit: later than 0 where
        they trained on while it was made. Who begins with them is done with them. Whatever they say, no more than this
        peer's own worker would have done since it was ready."""
        worker, steps_per_epoch, steps = self.worker, self.settings.steps_per_epoch, list[float]()
        for peer_id in commit.plan.signers:
            status = self.swarm.status(peer_id)
            if status is None:
                continue
            step = float(status.local_step - (0 if status.head == commit.head else steps_per_epoch))
            if step > 0 and status.step_s > 0:
                step += self.swarm.age_s(peer_id, turn.now) / status.step_s
            steps.append(max(0.0, step))
        if not steps or not worker.step_s:
            return 0
        own = (turn.now - worker.ready_at) / worker.step_s
        return min(int(min(own, statistics.median_low(steps))), steps_per_epoch - 1)

    def _answer(
        self, turn: Turn, how: Literal["rebase", "keep"], towards: Certificate, round_: Round | None
    ) -> bool:
        worker, work = self.worker, self.worker.work
        assert work is not None
        if worker.has_lost_work:
            turn.do(Tell("lost_work", f"{work.tokens} tokens are lost with the worker that trained them"))
        if round_ is not None:
            # A commit that comes to light now would answer for the same work again.
            round_.voted_result = None
        step = self.entry_step(turn, towards.head)
        worker.resume(towards.plan.epoch, step)
        turn.do(Answer(how, towards, step))
        return True
