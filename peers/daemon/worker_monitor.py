"""What this peer shows of its worker and of its round: to other peers, to people, and to programs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from peers.core.peer import Peer
from peers.core.round import Stage
from peers.core.schedule import Schedule
from peers.daemon.agreement import Agreement
from peers.daemon.averaging import WorkInHand
from peers.daemon.presence import Presence
from peers.daemon.runtime import Runtime
from peers.monitor.journal import Journal, entry_of
from peers.monitor.phases import Doing, PhaseClock, training_left_s
from peers.protocol.mesh import OWN_WORKER, WORKER
from peers.protocol.records import State
from peers.protocol.reports import Evaluation, Phase, Point, Standing
from peers.state.handover import EpochOutcome, Start

log = logging.getLogger(__name__)

_STEPS = {Stage.GATHER: "seeking", Stage.REDUCE: "reducing", Stage.VOTE: "voted"}
_WAITS = {Stage.REDUCE: "the sums", Stage.VOTE: "the votes"}
_TRAINING = "training"
_DIVERGED = "its loss is not a number any more; is the learning rate too high?"


class WorkerMonitor:
    """Is told what happens to the worker and its work, and changes nothing about either."""

    def __init__(self, presence: Presence, agreement: Agreement) -> None:
        self._presence, self._agreement = presence, agreement
        self.runtime: Runtime | None = None
        """Set once this peer may train."""
        self.state: State = "joining"
        self.step = 0
        self.local_step = 0
        """The worker's nominal local step (core/schedule.py), by its last report."""
        self.step_s = 0.0
        """Seconds per step; 0: not known."""
        self.tokens_per_s = 0.0
        self.has_worker = False
        self.journal = Journal()
        self.preparing = "joining the network"
        """What this peer is doing before it has a state to train from."""
        self.told: Doing | None = None
        """What the worker reports that it does instead of steps, or how far it is in a long step."""
        self.received: tuple[int, int] | None = None
        """While a state is being downloaded: the bytes that are here, and those of the whole state."""
        self._clock = PhaseClock()
        self.on_progress: Callable[[], None] = lambda: None
        self.on_commit: Callable[[bool], None] = lambda _is_last: None
        """Called after a commit that contains this worker's work."""

    # What others ask

    @property
    def phase(self) -> Phase:
        """What this peer is doing, for people."""
        return self._clock.at(self._doing(), time.monotonic())

    def _doing(self) -> Doing:
        here, wanted = len(self._presence.view) if self._presence.maddrs else 0, self._presence.galaxy_size
        lacking = Doing("waiting for peers", "", here, wanted, "peers") if here < wanted else None
        if self.state == "leaving":
            return Doing("leaving")
        # A download does not interrupt training.
        if self.received is not None and self.state != "training":
            return Doing("receiving the state", "", *self.received, "bytes")
        if self.state == "averaging":
            waits_for = self.standing.waits_for
            return Doing("averaging", f"waits for {waits_for}" if waits_for else "")
        if self.state == "joining" and self.told is None:
            return lacking if lacking and here else Doing("starting", self.preparing)
        if self.state == "waiting":
            return lacking or Doing("waiting for the state")
        told, end_step = self.told, self.end_step
        if told is not None and told.name != _TRAINING:
            return told
        left_s = training_left_s(self.journal.curve.points, self.step, end_step)
        # What the worker reports within a long step counts as progress.
        detail = f"{told.done:.0f} of {told.total:.0f} {told.unit} of {told.detail}" if told else ""
        return Doing(_TRAINING, detail, self.step, end_step, "steps", left_s)

    @property
    def standing(self) -> Standing:
        """What this peer waits for in its round, or before it has one."""
        if self.state not in ("joining", "waiting") and self.runtime is not None:
            return standing_of(self.runtime.core)
        here, wanted = len(self._presence.view), self._presence.galaxy_size
        return Standing(
            waits_for=f"peers, {here} of {wanted} are here" if here < wanted else "the swarm's state"
        )

    @property
    def end_step(self) -> int:
        """The nominal step at which training ends; 0: not known."""
        manifest = self._agreement.manifest
        ends = [int(manifest[name] or 0) for name in ("max_steps", "total_steps") if manifest.get(name)]
        return min(ends, default=0)

    # What happens

    def show(self, state: State) -> None:
        self.state = state
        self._presence.publish()

    def started(self, start: Start) -> None:
        """The worker begins to train."""
        self.step = start.epoch * self._schedule.steps_per_epoch + start.local_step
        self.local_step = start.local_step
        self.show("training")
        log.info(
            "training from epoch %d, step %d, anchor %s", start.epoch, self.step, start.anchor_digest[:12]
        )

    def handed_over(self, work: WorkInHand, ready: Mapping[str, Any]) -> None:
        """The worker waits for a commit, until it is told to continue training meanwhile."""
        self.step = work.step
        self.local_step, self.step_s = max(0, self._steps_since_commit(work.step)), _step_s_in(ready)
        self.journal.loss = self._loss_in(ready)
        self.show("averaging")

    def goes_ahead(self) -> None:
        """The worker trains on while the commit of its work is awaited."""
        self.show("training")

    def waits(self) -> None:
        """The worker has gone ahead as far as it may, and waits for the commit."""
        if self.state == "training":
            self.show("averaging")

    def averaged(self, outcome: EpochOutcome) -> None:
        """The worker has an answer."""
        self.local_step = outcome.local_step
        self.journal.committed(entry_of(outcome, time.time()))
        self.is_in_trouble("worker", "")
        if self._agreement.manifest.get(WORKER) == OWN_WORKER:
            log.info("%s", self._epoch_in_words(outcome))
        if outcome.world_rank in outcome.contributors:
            self.on_commit(outcome.last)
        self.show("joining" if not self.has_worker else "leaving" if outcome.last else "training")

    def progressed(self, progress: Mapping[str, Any]) -> int:
        """The worker reports its step and its loss; other peers see them with the next heartbeat.

        Returns the steps since the last commit; negative while the worker is still in the epoch that this commit ended.
        """
        self.step = int(progress["step"])
        since_commit = self._steps_since_commit(self.step)
        if since_commit >= 0:
            self.local_step, self.step_s = since_commit, _step_s_in(progress)
        self.tokens_per_s = float(progress["tokens_per_s"])
        self.journal.progressed(
            Point(
                time=time.time(),
                step=self.step,
                loss=self._loss_in(progress),
                tokens_per_s=self.tokens_per_s,
            )
        )
        self.on_progress()
        return since_commit

    def doing(self, message: Mapping[str, Any] | None) -> None:
        """The worker reports what it does beside its steps; None, or a message without a name, ends that."""
        doing = Doing.told(message) if message else None
        self.told = doing if doing is not None and doing.name else None

    def evaluated(self, message: Mapping[str, Any]) -> None:
        loss = message.get("loss")
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            loss = None
        step = max(0, int(message["step"]))
        self.journal.evaluations.append(Evaluation(time=time.time(), step=step, loss=loss))

    def is_in_trouble(self, what: str, text: str) -> None:
        """Something is wrong on this peer, until a call without a text says that it no longer is."""
        if text and self.journal.troubles.get(what) != text:
            self.journal.happened(time.time(), text)
        self.journal.is_in_trouble(what, text)

    def lost(self) -> None:
        """The worker has ended before its training did."""
        self.journal.num_worker_losses += 1
        self.journal.happened(time.time(), "its worker ended")

    def _loss_in(self, message: Mapping[str, Any]) -> float | None:
        """The loss of the worker's last step, by its report; if it is not finite, None, and this peer is in trouble."""
        loss = message.get("loss")
        is_finite = loss is not None and math.isfinite(loss)
        self.is_in_trouble("loss", _DIVERGED if loss is not None and not is_finite else "")
        return float(loss) if loss is not None and is_finite else None

    @property
    def _schedule(self) -> Schedule:
        return Schedule.of(self._agreement.manifest)

    def _steps_since_commit(self, step: int) -> int:
        assert self.runtime is not None
        return step - self.runtime.core.epoch * self._schedule.steps_per_epoch

    def _epoch_in_words(self, outcome: EpochOutcome) -> str:
        """For a training program of the user's own, which may log nothing itself; diloco's trainer writes records."""
        number = len(outcome.contributors)
        if outcome.world_rank not in outcome.contributors:
            return f"epoch {outcome.epoch} was averaged without this peer, whose work goes into the next"
        loss = "" if self.journal.loss is None else f", loss {self.journal.loss:.4g}"
        return f"epoch {outcome.epoch} averaged by {number} peer{'' if number == 1 else 's'}{loss}"


def _step_s_in(message: Mapping[str, Any]) -> float:
    """Seconds per step, by the worker's report; 0: not known."""
    step_s = float(message["step_s"])
    return step_s if math.isfinite(step_s) and step_s > 0 else 0.0


def standing_of(core: Peer) -> Standing:
    """What this peer waits for in its round, and which peers."""
    round_ = core.round
    if round_ is None:
        return Standing(waits_for="the swarm's state")
    if core.catch_up.target is not None:
        return Standing(step="joining", waits_for=f"the state of epoch {core.catch_up.target.plan.epoch}")
    if core.worker.work is None:
        return Standing(step="idle")
    leader, missing = core.rank_of(round_.leader_of(round_.attempt)), core.missing_ranks
    waits_for = _WAITS.get(round_.stage, "")
    if round_.stage is Stage.GATHER and core.num_lacking:
        more = "1 more peer" if core.num_lacking == 1 else f"{core.num_lacking} more peers"
        waits_for = f"{more}, the least that its aggregation rule needs"
    elif round_.stage is Stage.GATHER:
        peers = f"peer{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
        waits_for = peers if missing else "the next attempt"
    return Standing(step=_STEPS[round_.stage], leader=leader, missing=missing, waits_for=waits_for)
