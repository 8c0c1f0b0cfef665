"""A virtual worker: trains steps, each of which makes a piece, hands over its work, waits for the answer, continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim.values import Pieces
from peers.core.effects import Answer, GoAhead
from peers.core.events import StateOffered, WorkerTrains, WorkerWaits, WorkReady
from peers.core.schedule import Schedule
from peers.protocol.certificates import Work

if TYPE_CHECKING:
    from diloco.sim.peer import VirtualPeer

STEP_JITTER = 0.2


@dataclass(frozen=True)
class Handed:
    """The work that a worker has handed over: the pieces in its weights beyond the anchor of the head `base`."""

    worker: VirtualWorker
    pieces: Pieces
    base: str


class VirtualWorker:
    """One worker process of this peer."""

    def __init__(self, peer: VirtualPeer) -> None:
        self.is_running = True
        self.step_s = peer.swarm.durations.step_s * peer.slowness
        self.trained: set[int] = set()
        """All pieces that it has ever made."""
        self.pending: set[int] = set()
        """The pieces in its weights that are in no commit it was told of."""
        self.ends_after_this = False
        """Its next work is its last: it ends once a commit contains it."""
        self._peer, self._clock = peer, peer.swarm.clock
        self._schedule = Schedule(local_steps=peer.swarm.settings.steps_per_epoch)
        self._base, self._epoch, self._local_step = "", 0, 0
        self._epoch_s = self._epoch_began_at = 0.0
        self._handed: Pieces | None = None
        self._is_ahead = False
        """It trains on while the work it handed over waits for its commit."""
        self._is_last = False
        """The work it handed over is its last."""

    @property
    def has_begun(self) -> bool:
        return bool(self._base)

    @property
    def waits(self) -> bool:
        """Whether it idles until the work it handed over is answered."""
        return self._handed is not None and not (self._is_ahead and self._local_step < self._schedule.steps_per_epoch)

    def start(self, after_s: float) -> None:
        """Load the model, offer its state, and ask where to begin."""
        self._after(after_s, self._arrive)

    def crash(self) -> None:
        self.is_running = False

    def begin(self, head: str, answer: Answer) -> None:
        self.pending.clear()
        self._base, self._handed, self._is_ahead = head, None, False
        self._enter(answer.epoch, answer.local_step, answer.epoch_s)
        self._step_or_hand_over()

    def answered(self, head: str, answer: Answer) -> None:
        """The work it handed over is answered. `head`: whose anchor its weights are based on now."""
        if answer.how == "contributed":
            self.pending -= self._handed or set()
        was_standing, was_ahead = self.waits, self._is_ahead
        self._base, self._handed, self._is_ahead = head, None, False
        if self._is_last and answer.how == "contributed":
            self.is_running = False
            return
        self._enter(
            answer.epoch,
            answer.local_step,
            answer.epoch_s,
            goes_on=was_ahead and answer.epoch == self._epoch,
        )
        if was_standing:
            self._step_or_hand_over()

    def goes_ahead(self, order: GoAhead) -> None:
        """Its commit is awaited: train on in the next epoch."""
        if self.waits:
            self._is_ahead = True
            self._enter(order.epoch, 0, order.epoch_s)
            self._step_or_hand_over()

    def _enter(self, epoch: int, local_step: int, epoch_s: float, *, goes_on: bool = False) -> None:
        """`goes_on`: it is in that epoch already."""
        local_step = max(local_step, self._local_step) if goes_on else local_step
        self._epoch, self._local_step, self._epoch_s = epoch, local_step, epoch_s
        entered_at = self._clock.now - self._schedule.elapsed_at(local_step, epoch_s)
        self._epoch_began_at = min(self._epoch_began_at, entered_at) if goes_on else entered_at

    def _arrive(self) -> None:
        self._peer.told(self, StateOffered(self._peer.offered.offer))
        if self.is_running:
            # The offer may have ended this worker.
            self._peer.told(self, WorkerWaits())

    def _step_or_hand_over(self) -> None:
        if self._local_step < self._schedule.steps_per_epoch:
            self._after(self.step_s * self._peer.swarm.rng.uniform(1 - STEP_JITTER, 1 + STEP_JITTER), self._step)
            return
        if self._is_ahead:
            return
        self._handed, self._is_last = frozenset(self.pending), self.ends_after_this
        work = Work(
            tokens=len(self._handed),
            norm=1.0,
            step=self._epoch * self._schedule.steps_per_epoch + self._local_step,
            based_on=0,
            last=self.ends_after_this,
        )
        self._peer.told(self, WorkReady(work), Handed(self, self._handed, self._base))

    def _step(self) -> None:
        piece = self._peer.swarm.new_piece()
        self.trained.add(piece)
        self.pending.add(piece)
        self._local_step += 1
        if not self._is_ahead:
            self._keep_to_time_budget()
        ahead = self._schedule.steps_per_epoch if self._is_ahead else 0
        if ahead or self._local_step < self._schedule.steps_per_epoch:
            self._peer.told(self, WorkerTrains(ahead + self._local_step, self.step_s))
        self._step_or_hand_over()

    def _keep_to_time_budget(self) -> None:
        elapsed_s = self._clock.now - self._epoch_began_at
        self._local_step = self._schedule.local_step_after(
            self._local_step, elapsed_s, self._epoch_s, step_s=self.step_s
        )

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._clock.after(seconds, lambda: event() if self.is_running else None)
