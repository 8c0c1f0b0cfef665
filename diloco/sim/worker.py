"""What workers of both runtimes share, and a worker that makes pieces in each step, which show lost or doubled ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim.clock import Clock
from diloco.sim.values import Pieces, fragment_of
from peers.core.effects import Answer, GoAhead
from peers.core.events import WorkerTrains, WorkReady
from peers.core.schedule import Schedule
from peers.protocol.certificates import Work

if TYPE_CHECKING:
    from diloco.sim.peer import VirtualPeer

STEP_JITTER = 0.2


class Worker:
    """Where a worker stands in its epoch. How it trains, and what becomes of its work, is left to the two runtimes."""

    def __init__(self, clock: Clock, schedule: Schedule) -> None:
        self.is_running = True
        self.epoch = 0
        """The epoch that it trains in."""
        self.is_ahead = False
        """Whether it trains in the next epoch while the work it handed over waits for its commit."""
        self.schedule, self.clock = schedule, clock
        self.epoch_s = self.entered_at = 0.0
        """How long its epoch may last (0: as long as its steps take), and when it began, for that time budget."""
        self.learns_from: int | None = None
        """The local step at which it entered an epoch whose length its peer did not know yet; None: it did."""

    def stop(self) -> None:
        """End the worker for good."""
        self.is_running = False

    def enter(self, epoch: int, local_step: int, epoch_s: float, *, goes_on: bool = False) -> None:
        """Stand at this local step of this epoch. `goes_on`: it is in that epoch already."""
        self.epoch, self.epoch_s = epoch, epoch_s
        is_open = self.schedule.learns_epoch_s and not epoch_s
        self.learns_from = (0 if goes_on else local_step) if is_open else None
        entered_at = self.clock.now - self.schedule.elapsed_at(local_step, epoch_s)
        self.entered_at = min(self.entered_at, entered_at) if goes_on else entered_at

    def learn(self, epoch_s: float) -> None:
        """The present epoch, if its length was not known at its beginning, may last so long, by the speeds that its
        peer knows so far."""
        if self.learns_from is not None:
            elapsed_at = self.schedule.elapsed_at
            self.entered_at += elapsed_at(self.learns_from, self.epoch_s) - elapsed_at(
                self.learns_from, epoch_s
            )
            self.epoch_s = epoch_s

    def nominal_step(self, local_step: int, step_s: float) -> int:
        """The local step by the time budget, if that is more than the one by steps alone (peers/core/schedule.py)."""
        if self.is_ahead:
            return local_step
        elapsed_s = self.clock.now - self.entered_at
        return self.schedule.local_step_after(local_step, elapsed_s, self.epoch_s, step_s=step_s)

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        """Let the event happen, unless the worker has ended by then."""
        self.clock.after(seconds, lambda: event() if self.is_running else None)


@dataclass(frozen=True)
class Handed:
    """The work that a worker has handed over: the pieces in its weights beyond the anchor of the head `base`."""

    worker: VirtualWorker
    pieces: Pieces
    base: str


class VirtualWorker(Worker):
    """One worker process of this peer."""

    def __init__(self, peer: VirtualPeer) -> None:
        steps, num_fragments = peer.swarm.settings.steps_per_epoch, peer.swarm.settings.num_fragments
        epoch_s = peer.swarm.settings.epoch_s
        schedule = Schedule(
            local_steps=steps * num_fragments,
            num_fragments=num_fragments,
            local_time_s=None if epoch_s is None else epoch_s * num_fragments,
        )
        super().__init__(peer.swarm.clock, schedule)
        self.step_s = peer.swarm.durations.step_s * peer.slowness
        self.trained: set[int] = set()
        """All pieces that it has ever made."""
        self.pending: set[int] = set()
        """The pieces in its weights that are in no commit it was told of."""
        self.ends_after_this = False
        """Its next work is its last: it ends once a commit contains it."""
        self._peer, self._base, self._local_step = peer, "", 0
        self._handed: Pieces | None = None
        self._is_last = False
        """The work it handed over is its last."""

    @property
    def has_begun(self) -> bool:
        return bool(self._base)

    @property
    def waits(self) -> bool:
        """Whether it idles until the work it handed over is answered."""
        return self._handed is not None and not (self.is_ahead and self._has_steps_left)

    def start(self, after_s: float) -> None:
        """Load the model, offer its state, and ask where to begin."""
        self.after(after_s, lambda: self._peer.arrived(self))

    def begin(self, head: str, answer: Answer) -> None:
        self.pending.clear()
        self._base, self._handed, self.is_ahead = head, None, False
        self._stand_at(answer.epoch, answer.local_step, answer.epoch_s)
        self._step_or_hand_over()

    def answered(self, head: str, answer: Answer) -> None:
        """The work it handed over is answered. `head`: whose anchor its weights are based on now."""
        if answer.how == "contributed":
            self.pending -= self._handed or set()
        was_standing, goes_on = self.waits, self.is_ahead and answer.epoch == self.epoch
        self._base, self._handed, self.is_ahead = head, None, False
        if self._is_last and answer.how == "contributed":
            self.stop()
            return
        local_step = max(answer.local_step, self._local_step) if goes_on else answer.local_step
        self._stand_at(answer.epoch, local_step, answer.epoch_s, goes_on=goes_on)
        if was_standing:
            self._step_or_hand_over()

    def goes_ahead(self, order: GoAhead) -> None:
        """Its commit is awaited: train on in the next epoch."""
        if self.waits:
            self.is_ahead = True
            self._stand_at(order.epoch, 0, order.epoch_s)
            self._step_or_hand_over()

    @property
    def _has_steps_left(self) -> bool:
        return self._local_step < self.schedule.steps_per_epoch

    def _stand_at(self, epoch: int, local_step: int, epoch_s: float, *, goes_on: bool = False) -> None:
        self._local_step = local_step
        self.enter(epoch, local_step, epoch_s, goes_on=goes_on)

    def _step_or_hand_over(self) -> None:
        if self._has_steps_left:
            jitter = self._peer.swarm.rng.uniform(1 - STEP_JITTER, 1 + STEP_JITTER)
            self.after(self.step_s * jitter, self._step)
            return
        if self.is_ahead:
            return
        fragment = self.schedule.fragment_of(self.epoch)
        self._handed = frozenset(
            piece for piece in self.pending if fragment_of(piece, self.schedule.num_fragments) == fragment
        )
        self._is_last = self.ends_after_this
        work = Work(
            tokens=len(self._handed),
            norm=float(len(self._handed)),
            step=self.epoch * self.schedule.steps_per_epoch + self._local_step,
            based_on=0,
            last=self.ends_after_this,
        )
        self._peer.told(WorkReady(work), Handed(self, self._handed, self._base))

    def _step(self) -> None:
        pieces = self._peer.swarm.new_pieces()
        self.trained.update(pieces)
        self.pending.update(pieces)
        if not self._peer.is_honest:
            self._peer.swarm.truth.may_count_twice.update(pieces)
        self._local_step += 1
        if not self.is_ahead:
            self.learn(self._peer.machine.epoch_s)
        self._local_step = self.nominal_step(self._local_step, self.step_s)
        ahead = self.schedule.steps_per_epoch if self.is_ahead else 0
        if ahead or self._has_steps_left:
            self._peer.told(WorkerTrains(ahead + self._local_step, self.step_s))
        self._step_or_hand_over()
