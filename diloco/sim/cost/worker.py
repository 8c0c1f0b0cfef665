"""The training loop of one peer: steps, handing over a fragment, and waiting for the outcome of its round.

As in diloco/outer/diloco.py, weights are handed over `overlap_steps` before the end of an epoch, and their average is
merged at its end. Steps are not simulated one by one, but all of those up to the next decision together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim.worker import Worker
from peers.core.effects import Answer, GoAhead

if TYPE_CHECKING:
    from diloco.sim.cost.peer import CostPeer

_LEAST_PACE = 0.1
"""Lower limit of the jittered step duration, as a fraction of the mean."""


@dataclass
class Work:
    """An amount of training."""

    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        self.steps += steps
        self.seconds += seconds


class CostWorker(Worker):
    """Calls `handed_over` of its peer when a fragment's weights have been copied to the daemon, and `merged` with the
    time at which an average is merged and the time for which the round has blocked training."""

    def __init__(self, peer: CostPeer) -> None:
        scenario = peer.swarm.scenario
        super().__init__(peer.swarm.clock, scenario.schedule)
        self._peer, self._scenario, self._means = peer, scenario, scenario.peers[peer.rank]
        self._chance = peer.swarm.chance_of(peer.rank, peer.incarnation)
        self._pending = Work()
        self._handed = Work()
        self._pace = self._means.step_s
        """Seconds per step."""
        self._began_at, self._began_with = 0.0, 0
        """When the worker began to train without a break, and its local step then."""
        self._trains_since: float | None = None
        self._blocked_since: float | None = None
        self._blocked_s = 0.0
        self._ahead_to: GoAhead | None = None
        """The epoch in which to go ahead as soon as the worker would be blocked; None: do not go ahead."""
        self._answer: Answer | None = None

    @property
    def local_step(self) -> int:
        """The nominal local step in the worker's epoch (peers/core/schedule.py)."""
        # Rounded up by a little: a step that ends now is done.
        done = int((self.clock.now - self._began_at) / self._pace + 1e-6) if self._pace else 0
        return min(self.nominal_step(self._began_with + done, 0.0), self.schedule.steps_per_epoch)

    @property
    def epoch_merged(self) -> int:
        """The epoch to which the last merged commit led."""
        return self.epoch - self.is_ahead

    @property
    def uncommitted_s(self) -> float:
        """Training time whose work is in no commit."""
        running_s = self.clock.now - self._trains_since if self._trains_since is not None else 0.0
        return self._pending.seconds + self._handed.seconds + max(0.0, running_s)

    def begin(self, epoch: int, local_step: int, epoch_s: float, *, goes_on: bool = False) -> None:
        """Train in this epoch from this local step on. `goes_on`: the worker is in that epoch already."""
        self.enter(epoch, local_step, epoch_s, goes_on=goes_on)
        # The worker checks the time after each step only, so it makes one first, unless it just has, or none is left.
        least = 0 if goes_on or local_step >= self.schedule.steps_per_epoch else 1
        self._train_on(0, least)

    def answered(self, answer: Answer) -> None:
        """The round is over: merge the outcome, now or at the end of the epoch."""
        self._answer = answer
        if answer.how == "contributed":
            self._handed = Work()
        if self._blocked_since is not None:
            self._merge()
        elif self.is_ahead:
            # The worker looks for the answer after each step, so it finishes the present one.
            trained_s = self.clock.now - self._began_at
            num_steps = math.ceil(trained_s / self._pace - 1e-6) if self._pace else 0
            self.after(max(0.0, num_steps * self._pace - trained_s), lambda: self._collect(num_steps))

    def goes_ahead(self, order: GoAhead) -> None:
        """The round takes long: train in the next epoch as soon as the worker would be blocked."""
        self._ahead_to = order
        if self._blocked_since is not None and self._answer is None and not self.is_ahead:
            self._train_ahead(order)

    def enter(self, epoch: int, local_step: int, epoch_s: float, *, goes_on: bool = False) -> None:
        if not goes_on:
            jitter = self._chance.gauss(1.0, self._scenario.jitter)
            self._pace = self._means.step_s * max(_LEAST_PACE, jitter)
        super().enter(epoch, local_step, epoch_s, goes_on=goes_on)
        self._began_at = self._trains_since = self.clock.now
        self._began_with = local_step

    def _steps_to(self, local_step: int) -> int:
        """Number of steps from `_began_at` until the worker is at this nominal local step of its epoch or beyond."""
        num_steps = max(0, local_step - self._began_with)
        if self.epoch_s and not self.is_ahead and self._pace:
            due_at = self.entered_at + self.schedule.elapsed_at(local_step, self.epoch_s)
            num_steps = min(num_steps, max(0, round((due_at - self._began_at) / self._pace)))
        return num_steps

    def _train_on(self, num_done: int, least: int) -> None:
        """Train until the fragment's weights are to be handed over, at least this many steps from `_began_at` on. While
        the epoch's length is not known, ask for it after each step."""
        num_steps = max(least, self._steps_to(self.schedule.leaves_at(self.epoch, None)))
        if self.learns_from is not None and not self.epoch_s and num_done < num_steps:
            self.after(self._pace, lambda: self._ask(num_done + 1))
        else:
            self.after((num_steps - num_done) * self._pace, lambda: self._leave(num_steps))

    def _ask(self, num_done: int) -> None:
        self.learn(self._peer.budget())
        self._train_on(num_done, num_done)

    def _train_ahead(self, order: GoAhead) -> None:
        assert self._blocked_since is not None
        self._blocked_s += self.clock.now - self._blocked_since
        self._blocked_since, self._ahead_to, self.is_ahead = None, None, True
        self.enter(order.epoch, 0, order.epoch_s)
        began_at, num_steps = self._began_at, self._steps_to(self.schedule.steps_per_epoch)

        def end() -> None:
            if self.is_ahead and self._began_at == began_at and self._answer is None:
                self._collect(num_steps)

        self.after(num_steps * self._pace, end)

    def _leave(self, num_steps: int) -> None:
        self._train(num_steps)
        took_s = self._bytes / self._means.machine.hand_over
        handed, self._pending = self._pending, Work()
        self._handed, self._blocked_s = handed, took_s
        self._trains_since = self.clock.now + took_s
        rest = self._steps_to(self.schedule.steps_per_epoch) - num_steps
        self.after(took_s, lambda: self._peer.handed_over(handed))
        self.after(took_s + rest * self._pace, lambda: self._collect(rest))

    def _collect(self, num_steps: int) -> None:
        self._train(num_steps)
        self._trains_since, self._blocked_since = None, self.clock.now
        if self._answer is not None:
            self._merge()
        elif self._ahead_to is not None and not self.is_ahead:
            self._train_ahead(self._ahead_to)

    def _merge(self) -> None:
        assert self._answer is not None and self._blocked_since is not None
        answer, self._answer = self._answer, None
        took_s = self._bytes / self._means.machine.take
        blocked_s = self._blocked_s + self.clock.now - self._blocked_since + took_s
        goes_on = self.is_ahead and answer.epoch == self.epoch
        self._blocked_since, self._ahead_to = None, None
        # Work that is in no commit is handed over again with the next fragment.
        self._pending.add(self._handed.steps, self._handed.seconds)
        self._handed = Work()
        step = max(answer.local_step, self.local_step if goes_on else 0)
        self.is_ahead = False
        self.after(took_s, lambda: self.begin(answer.epoch, step, answer.epoch_s, goes_on=goes_on))
        self._peer.merged(self.clock.now + took_s, blocked_s)

    @property
    def _bytes(self) -> float:
        return self._scenario.fragment_bytes(self.epoch)

    def _train(self, num_steps: int) -> None:
        self._pending.add(num_steps, num_steps * self._pace)
