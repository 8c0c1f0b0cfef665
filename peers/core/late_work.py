"""The Late-work rule: work that missed its commit goes into the next one, and no worker idles while faults happen.

Late work: a worker whose work missed the commit trains on at once, in the epoch that the others are in. Its weights are
rebased: new anchor + (local - old anchor). Its next work contains the late work, with the epoch since which it was
trained (`based_on`). Where the others would not wait for one more step, it hands over the late work as it is. Work
counts twice if its peer voted for a commit, did not see it made, went to another side of a fork, and came back to the
side of that commit.

Going ahead: while faults happen, no worker waits for the commit of its work, but trains on in the next epoch at once.
The work it has handed over stays unchanged; what it trains meanwhile is put on top of the result. Without faults a
worker first waits as long as usual, so that a run repeats bit for bit; with --hv.overlap-steps auto it never waits.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from peers.core.catch_up import CatchUp
from peers.core.chain import Chain
from peers.core.effects import Answer, GoAhead, Rebase, Tell
from peers.core.epoch_time import best_epoch_s, nominal_step_s
from peers.core.health import Swarm
from peers.core.round import Round
from peers.core.settings import Settings
from peers.core.timing import Timing
from peers.core.turn import Turn
from peers.core.worker import Other, Worker, entry_step
from peers.protocol.certificates import Certificate


@dataclass
class LateWork:
    worker: Worker
    chain: Chain
    swarm: Swarm
    catch_up: CatchUp
    settings: Settings
    timing: Timing

    def answer_late(self, turn: Turn, round_: Round | None) -> bool:
        """Answer the worker if its work missed the commit, or rebase that work. True if anything was due."""
        worker = self.worker
        if worker.work is None:
            return False
        target = self.catch_up.target
        if target is not None and not self.catch_up.is_checking:
            # A commit that this peer voted for may have been made, and would contain the work.
            may_be_committed = bool(worker.voted_heads)
            if worker.epoch >= target.plan.epoch or may_be_committed:
                return False
            if round_ is not None:
                round_.give_up(turn, "it has to catch up")
            return self._answer(turn, "keep", target, round_)
        if worker.base != self.chain.head:
            # The anchor has changed since the work was handed over.
            turn.do(Rebase())
            worker.base = self.chain.head
            return True
        epoch, fragment_of = self.chain.epoch, self.settings.fragment_of
        if worker.epoch < epoch or fragment_of(worker.epoch) != fragment_of(epoch):
            # Work of a past epoch; or, after a rollback, of an epoch that averages another fragment than this one.
            return self._answer(turn, "rebase", self.chain.newest, round_)
        return False

    def go_ahead(self, turn: Turn, round_: Round | None) -> bool:
        """Let the worker train on while its commit is awaited. True if it was told to."""
        worker, work = self.worker, self.worker.work
        if round_ is None or work is None or work.last or worker.is_ahead or worker.has_lost_work:
            return False
        waits = not self.settings.never_waits and self._is_well(round_)
        if waits and not turn.passed(worker.ready_at + self.timing.patience_s):
            return False
        worker.is_ahead = True
        turn.do(GoAhead(worker.epoch + 1, round_.next_data_base, self.epoch_s()))
        return True

    def _is_well(self, round_: Round) -> bool:
        me, is_live = self.catch_up.me, self.swarm.is_live
        is_faultless = self.chain.is_faultless and not round_.failures
        return is_faultless and all(peer_id == me or is_live(peer_id) for peer_id in self.swarm.roster)

    def own_commit_in(self, path: Sequence[Certificate]) -> Certificate | None:
        """The commit on this path that contains the work in hand: one that this peer voted for."""
        return next(
            (certificate for certificate in path if certificate.head in self.worker.voted_heads), None
        )

    def epoch_s(self) -> float:
        """How long the epoch may last that the worker now enters; 0: as long as its steps take."""
        if self.settings.epoch_s != 0.0:
            return self.settings.epoch_s or 0.0
        own, steps, roster = self.worker.step_s, self.settings.steps_per_epoch, self.swarm.roster
        # Only members count: any stranger can come and claim to be fast.
        others = [s.step_s for peer_id, s in self.swarm.live() if peer_id in roster and s.step_s > 0]
        if not others:
            return 0.0
        # A worker that has just come takes no longer than the others, until it knows its own speed.
        own = own or statistics.median(others)
        hides_rounds = self.settings.never_waits or not self.chain.is_faultless
        return best_epoch_s(own, others, steps, self.timing.learned_round_s, hides_rounds=hides_rounds)

    def entry_step(self, turn: Turn, head: str = "", *, least_left: int = 1) -> int:
        """The local step at which the worker joins the peers that train on `head`; default: this peer's own head."""
        head = head or self.chain.head
        steps, epoch_s = self.settings.steps_per_epoch, self.epoch_s()
        others = [
            Other(status, self.swarm.age_s(peer_id, turn.now), nominal_step_s(status.step_s, steps, epoch_s))
            for peer_id, status in self.swarm.live_at(head).items()
            if status.phase in ("training", "ready")
        ]
        own_step_s = nominal_step_s(self.worker.step_s, steps, epoch_s)
        return entry_step(others, steps, own_step_s, least_left=least_left)

    def head_start(self, turn: Turn, commit: Certificate) -> int:
        """The local step at which this peer's worker starts the epoch after this commit, so that it finishes with the
        others: the median of the contributors' local steps, which are above 0 where they went ahead.

        At most what this peer's own worker could have done since it was ready, whatever the others claim.
        """
        worker, steps_per_epoch, steps = self.worker, self.settings.steps_per_epoch, list[float]()
        epoch_s = self.epoch_s()
        for peer_id in commit.plan.signers:
            status = self.swarm.status(peer_id)
            if status is None:
                continue
            step = float(status.local_step - (0 if status.head == commit.head else steps_per_epoch))
            if step > 0 and status.step_s > 0:
                step += self.swarm.age_s(peer_id, turn.now) / nominal_step_s(
                    status.step_s, steps_per_epoch, epoch_s
                )
            steps.append(max(0.0, step))
        if not steps or not worker.step_s:
            return 0
        own = (turn.now - worker.ready_at) / nominal_step_s(worker.step_s, steps_per_epoch, epoch_s)
        return min(int(min(own, statistics.median_low(steps))), steps_per_epoch - 1)

    def _answer(
        self, turn: Turn, how: Literal["rebase", "keep"], towards: Certificate, round_: Round | None
    ) -> bool:
        worker, work = self.worker, self.worker.work
        assert work is not None
        if worker.has_lost_work:
            turn.do(Tell("lost_work", f"{work.tokens} tokens are lost with the worker that trained them"))
        if round_ is not None:
            # Forget the vote: if its certificate still arrived, the same work would be answered twice.
            round_.voted_result = None
        # With `least_left` 1, a worker whose step takes longer than the others' epoch would be late each time.
        step = self.entry_step(turn, towards.head, least_left=0 if how == "rebase" else 1)
        worker.resume(towards.plan.epoch, step)
        turn.do(Answer(how, towards, step, self.epoch_s()))
        return True
