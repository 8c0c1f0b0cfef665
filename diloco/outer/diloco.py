"""The one object that a training loop adds to take part in a swarm.

outer = Diloco(model)          # finds its daemon through the environment; without one, it does nothing
for batch in loader:
    loss = step(model, batch)
    outer.step(num_tokens=batch.numel())
outer.finish()
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from diloco.errors import DilocoError, UserError
from diloco.outer.exchange import Exchange
from diloco.outer.outer_files import OuterFiles
from diloco.outer.world import barrier, on_rank_zero, summed
from peers.core.schedule import Schedule
from peers.daemon.link import LINK_ENV
from peers.state.handover import EpochFigures

PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a peer is in the run, and where the data of its epoch begins."""

    epoch: int = 0
    local_step: int = 0
    """Inner steps since the last commit; without a swarm, since the beginning."""
    data_base: int = 0
    """The samples assigned in all earlier epochs; if not `Diloco.counts_samples`, the data blocks."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint that has been loaded into the model: its position, and the directory of its outer state."""

    position: Position
    tokens: tuple[int, ...]
    """For each fragment, the tokens that each rank had trained since the fragment was averaged."""
    directory: Path
    steps_per_epoch: int = 0
    """Inner steps of an epoch when it was saved; 0: not known."""
    is_own: bool = True
    """False if another peer saved it: this peer then begins with the outer state alone."""


@dataclass(frozen=True, kw_only=True)
class Commit(EpochFigures):
    """How an epoch ended; its `epoch` record in metrics.jsonl has the same fields."""

    blocked_s: float
    """How long this peer's training waited for the epoch."""


Restore = Callable[[int | None, bool], Restored | None]
"""Loads the checkpoint of this world rank into the model. Returns None if there is none. The second argument is whether
the daemon may need the checkpoint's outer state."""


class Diloco:
    """A model's place in the swarm. All ranks of a peer construct it, after sharding, and call it together.

    Without a daemon (no DILOCO_LINK in the environment) it only counts steps.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        local_steps: int | None = None,
        max_steps: int | None = None,
        restore: Restore | None = None,
        goes_ahead: bool = True,
        on_waiting: Callable[[str], None] | None = None,
    ) -> None:
        """Waits for the swarm and loads the weights to start from.

        `local_steps` is H, the number of inner steps between two averagings of the same weights; by default it is the
        swarm's. `max_steps` ends the run after this many nominal steps. `restore` is called once, before anything is
        offered to the swarm. `goes_ahead` lets training continue while a commit is awaited, if faults have happened
        lately or the commit takes longer than usual; a later step then returns the commit. While this peer waits for
        its daemon, `on_waiting` is called about once a second with what the daemon does.

        Raises peers.errors.UserError if the swarm refuses this peer, LinkLost if its daemon is gone.
        """
        self.position = Position()
        self.max_steps = max_steps
        self.world_rank: int | None = None
        self.num_peers = 1
        self.last_commit: Commit | None = None
        self.commits: list[Commit] = []
        """The commits of the last call of `step` or `finish`; at the run's end, one for each fragment."""
        self.tokens = [0]
        """For each fragment, the tokens that this rank has trained since the fragment was averaged."""
        self._schedule = None if local_steps is None else Schedule(local_steps=local_steps)
        self._flight: _Flight | None = None
        self._goes_ahead = goes_ahead
        self._epoch_s = 0.0
        """How long the epoch may last, as the daemon said; 0: as long as its steps take."""
        self._learns_from: int | None = None
        """The local step at which this peer entered an epoch whose length its daemon did not know yet; None: it did."""
        self._epoch_began_at = time.monotonic()
        self._step_time = _StepTime()
        self._is_over = False
        self._progress = _Progress()
        self._loss: float | Tensor | None = None
        """The loss of the last step, if the training loop passed it."""
        path = on_rank_zero(lambda: os.environ.get(LINK_ENV))
        self._exchange = Exchange(model, Path(path), on_waiting=on_waiting) if path else None
        self._in_swarm = self._exchange is not None
        self.began_run = False
        """Whether the run began while this worker waited for it."""
        if self._exchange is not None:
            self.world_rank = self._exchange.world_rank
            agreed = self._exchange.schedule
            self._schedule = replace(agreed, local_steps=local_steps) if local_steps else agreed
            self.tokens = [0] * agreed.num_fragments
        needs_outer = self._exchange is not None and self._exchange.needs_offer
        restored = restore(self.world_rank, needs_outer) if restore else None
        if restored is not None:
            self._check_fits(restored)
            self.position, self.tokens = restored.position, list(restored.tokens)
        if self._exchange is not None:
            self._start(self._exchange, restored)

    @property
    def active(self) -> bool:
        """Whether this peer is in a swarm, or was until it finished."""
        return self._in_swarm

    @property
    def epoch(self) -> int:
        return self.position.epoch

    @property
    def local_step(self) -> int:
        return self.position.local_step

    @property
    def steps_per_epoch(self) -> int:
        """Inner steps between two outer steps, which may be of different fragments."""
        return self._scheduled.steps_per_epoch

    @property
    def in_flight(self) -> bool:
        """Whether a round is under way. A checkpoint would then hold half of an outer step."""
        return self._flight is not None

    @property
    def nominal_step(self) -> int:
        """Steps since the start of the run as schedules count them: the same for fast and for slow peers."""
        if not self._in_swarm:
            return self.local_step
        return self._scheduled.nominal_step(self.epoch, self.local_step, self.max_steps)

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return self._is_over or (self.max_steps is not None and self.nominal_step >= self.max_steps)

    @property
    def evaluates(self) -> bool:
        """Whether this peer is the one that evaluates: the contributor to the last commit with the lowest world rank.

        Before the run's first commit, world rank 0 evaluates. With fragments or overlap, the weights evaluated in
        mid-run also contain this peer's recent training; at the run's end all peers have the same weights.
        """
        if self.last_commit is not None:
            # A peer that was too late for a round does not hold the average, and leaves evaluation to a contributor.
            nobody = self.world_rank if self._is_over else None
            return self.world_rank == min(self.last_commit.contributors, default=nobody)
        return not self.active or (self.world_rank == 0 and self.epoch == 0)

    def step(
        self, *, num_tokens: int | Tensor, loss: float | Tensor | None = None, is_save_due: bool = False
    ) -> Commit | None:
        """Call after every optimizer step; `num_tokens` are those that this rank trained in it.

        A `loss` on a GPU is waited for only when it is reported, about twice a second; `num_tokens` in every step.

        At an epoch's end, loads the swarm's new weights of the epoch's fragment and returns the commit; the optimizer's
        state stays as it is. If this peer's work came too late for the commit, `contributors` does not list this peer,
        and its work is added to the new weights. At the run's end, averages all fragments and returns the last commit.
        With `is_save_due`, training does not go ahead at an epoch's end, so that no round is in flight then: if rounds
        take as long as epochs, one otherwise always is. Raises LinkLost if the daemon is gone.
        """
        num_tokens = int(num_tokens)
        self.commits = []
        self.position = replace(self.position, local_step=self.local_step + 1)
        self.tokens = [tokens + num_tokens for tokens in self.tokens]
        exchange = self._exchange
        if exchange is None:
            return None
        self._step_time.ended()
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss
        try:
            return self._after_step(exchange, num_tokens, self._goes_ahead and not is_save_due)
        finally:
            self._step_time.begins()

    def _after_step(self, exchange: Exchange, num_tokens: int, may_go_ahead: bool) -> Commit | None:
        commit = self._poll(exchange)
        self._keep_to_time_budget(exchange)
        if self.done:
            return self._average_all(exchange)
        if self._flight is None and self.local_step >= self._scheduled.leaves_at(self.epoch, self.max_steps):
            self._leave(exchange, last=False)
        while self.local_step >= self.steps_per_epoch and not self.done:
            # A peer that has gone ahead for the whole of this epoch hands over its fragment at once.
            if self._flight is None:
                self._leave(exchange, last=False)
            commit = self._collect(exchange, may_go_ahead=may_go_ahead) or commit
        # After a round that it was too late for, this peer may be at the run's end with work that no commit contains.
        if self.done and not self._is_over and not self.is_at_end:
            return self._average_all(exchange)
        if commit is None:
            self._report(exchange, num_tokens)
        return commit

    def checkpoint(self, directory: Path) -> None:
        """Have the daemon write its outer state into `directory`, and wait for it. Raises DilocoError if it cannot."""
        files = self.snapshot(directory)
        on_rank_zero(files.wait)

    def snapshot(self, directory: Path) -> OuterFiles:
        """Have the daemon write its outer state, as it is now, into `directory` while training continues.

        Raises DilocoError if the daemon cannot begin; if it fails later, `OuterFiles.wait` raises DilocoError.
        """
        if self._exchange is None:
            return OuterFiles(directory)
        answer = self._exchange.ask("snapshot", "snapped", "failed", directory=str(directory.absolute()))
        if answer["kind"] == "failed":
            raise DilocoError(f"the outer state was not saved to {directory}: {answer['reason']}")
        return OuterFiles(directory, self._exchange.link_path)

    def finish(self) -> None:
        """Average what is left of the epoch and leave the swarm. Repeating it is safe."""
        if self._exchange is None:
            return
        self.commits = []
        if self._flight is not None:
            self._collect(self._exchange)
        # Of all ranks: they have to take the same branch.
        if not self._is_over and not self.is_at_end and summed(sum(self.tokens)):
            self._average_all(self._exchange)
        self.leave()

    def leave(self) -> None:
        """Leave the swarm and the weights as they are: what is left of the epoch is lost. Repeating it is safe."""
        if self._exchange is None:
            return
        if self._flight is not None:
            # What has been handed over still counts, if this peer stays until it has been averaged.
            self._exchange.ask("collect", "committed", may_go_ahead=False)
            self._flight = None
        self._exchange.ask("finished", "bye")
        self._exchange.close()
        self._exchange, self._is_over = None, True

    def _check_fits(self, restored: Restored) -> None:
        """Raise UserError if this run's epochs are others than those in which the checkpoint counts its steps."""
        num_fragments, saved = len(restored.tokens), restored.steps_per_epoch
        if num_fragments != len(self.tokens):
            raise UserError(
                f"{restored.directory} was saved with {num_fragments} fragments, this run has "
                f"{len(self.tokens)}; resume it with --hv.num-fragments {num_fragments}"
            )
        # Without a swarm there are no epochs.
        if not self._in_swarm or saved == self.steps_per_epoch:
            return
        local_step, then = restored.position.local_step, f" of {saved} steps" if saved else ""
        if saved or local_step >= self.steps_per_epoch:
            raise UserError(
                f"{restored.directory} was saved at step {local_step} of an epoch{then}, this run's epochs have "
                f"{self.steps_per_epoch} steps; resume it with --hv.local-steps {saved * num_fragments or 'as before'}"
                ", or leave out --ckpt.resume where the swarm is alive"
            )

    def _start(self, exchange: Exchange, restored: Restored | None) -> None:
        exchange.weights.put()
        barrier()
        start = exchange.ask(
            "offer",
            "start",
            resume=str(restored.directory.absolute()) if restored else None,
            is_own=restored.is_own if restored else True,
            epoch=self.epoch,
            local_step=self.local_step,
        )
        self.world_rank, self.began_run = int(start["world_rank"]), bool(start["began_run"])
        if not start["keep_local"]:
            exchange.weights.take()
            self.tokens = [0] * len(self.tokens)
        self._adopt(start)

    @property
    def counts_samples(self) -> bool:
        """Whether the swarm knows how many samples a data block has. It does if it trains with diloco's trainer."""
        return self._scheduled.samples_per_block is not None

    @property
    def _scheduled(self) -> Schedule:
        if self._schedule is None:
            raise DilocoError(
                "the number of local steps per epoch is not known; construct Diloco with local_steps"
            )
        return self._schedule

    @property
    def is_at_end(self) -> bool:
        """Whether the run's last commit has been made. One more epoch, by this peer alone, would be a fork."""
        return self.max_steps is not None and self.epoch >= self._scheduled.final_epoch(self.max_steps)

    def _average_all(self, exchange: Exchange) -> Commit | None:
        """End the run for this peer: average every fragment as it is now, and wait for each commit."""
        if self._flight is not None:
            self._collect(exchange)
        end, schedule = self.max_steps, self._scheduled
        at_end = end is not None and self.nominal_step >= end
        final = schedule.final_epoch(end) if end is not None and at_end else self.epoch + len(self.tokens)
        while not self._is_over and self.epoch < final:
            self._leave(exchange, last=self.epoch + 1 >= final)
            self._collect(exchange)
        self._is_over = True
        return self.last_commit

    def _leave(self, exchange: Exchange, *, last: bool) -> None:
        """Hand over the weights of the epoch's fragment. Its round begins, and training may continue."""
        started_at = time.monotonic()
        fragment = self._scheduled.fragment_of(self.epoch)
        own_tokens, self.tokens[fragment] = self.tokens[fragment], 0
        # Another rank may still be merging with what is in *out*.
        barrier()
        exchange.weights.put(fragment)
        # Returns once all ranks have written their parts.
        tokens = summed(own_tokens)
        exchange.tell(
            "ready",
            fragment=fragment,
            epoch=self.epoch,
            local_step=self.local_step,
            tokens=tokens,
            step=self.nominal_step,
            step_s=self._step_time.seconds,
            loss=self._reported_loss(),
            last=last,
        )
        self._flight = _Flight(fragment, own_tokens, self.local_step, time.monotonic() - started_at)

    def _collect(self, exchange: Exchange, *, may_go_ahead: bool = False) -> Commit | None:
        """Wait for the round that is under way, and merge its commit.

        Returns None if training continues in the next epoch while the commit is awaited.
        """
        flight = self._flight
        assert flight is not None
        started_at = time.monotonic()
        answer = exchange.ask(
            "collect", "committed", "ahead", may_go_ahead=may_go_ahead and not flight.is_ahead
        )
        flight = replace(flight, blocked_s=flight.blocked_s + time.monotonic() - started_at)
        if answer["kind"] == "committed":
            return self._merge(exchange, flight, answer)
        self._flight = replace(flight, is_ahead=True)
        position = Position(epoch=int(answer["epoch"]), data_base=int(answer["data_base"]))
        self._stand_at(position, float(answer["epoch_s"]))
        return None

    def _poll(self, exchange: Exchange) -> Commit | None:
        """Merge the commit that training did not wait for, if it has been made."""
        flight = self._flight
        if flight is None or not flight.is_ahead:
            return None
        answer = exchange.ask("poll", "committed", "pending")
        return self._merge(exchange, flight, answer) if answer["kind"] == "committed" else None

    def _merge(self, exchange: Exchange, flight: _Flight, answer: dict[str, Any]) -> Commit:
        """Load the result of a round, and add the training that was done since the weights were handed over."""
        self._flight, started_at = None, time.monotonic()
        self.world_rank = int(answer["world_rank"])
        weights = exchange.weights
        if flight.is_ahead or self.local_step > flight.local_step:
            # Mixing is meant for rounds that overlap training as planned. Training that went ahead is kept whole.
            weights.merge(flight.fragment, mixing=None if flight.is_ahead else self._scheduled.mixing)
        else:
            weights.take(flight.fragment)
        for fragment in answer["shifted"]:
            weights.shift(fragment)
        if self.world_rank not in answer["contributors"]:
            # The work was not averaged: it is still in the weights, and counts in the next round.
            self.tokens[flight.fragment] += flight.tokens
        # Steps that went ahead belong to the epoch after this commit.
        self._adopt(answer, goes_on=flight.is_ahead and self.epoch == int(answer["epoch"]))
        self._is_over = bool(answer["last"])
        blocked_s = flight.blocked_s + time.monotonic() - started_at
        figures = {field.name: answer[field.name] for field in fields(EpochFigures)}
        self.last_commit = Commit(**figures, blocked_s=blocked_s)
        self.commits.append(self.last_commit)
        return self.last_commit

    def _adopt(self, answer: dict[str, Any], *, goes_on: bool = False) -> None:
        """Weights and position advance together: called only after the weights have been loaded.

        `goes_on`: this peer is in that epoch already.
        """
        position = Position(**{field.name: int(answer[field.name]) for field in fields(Position)})
        if goes_on:
            position = replace(position, local_step=max(position.local_step, self.local_step))
        self._stand_at(position, float(answer["epoch_s"]), goes_on=goes_on)
        self.num_peers = int(answer["num_peers"])

    def _stand_at(self, position: Position, epoch_s: float, *, goes_on: bool = False) -> None:
        self.position, self._epoch_s = position, epoch_s
        if self._schedule is not None:
            is_open = self._schedule.learns_epoch_s and not epoch_s
            self._learns_from = (0 if goes_on else self.local_step) if is_open else None
            elapsed_s = self._schedule.elapsed_at(self.local_step, self._epoch_s)
            entered_at = time.monotonic() - elapsed_s
            self._epoch_began_at = min(self._epoch_began_at, entered_at) if goes_on else entered_at

    def _keep_to_time_budget(self, exchange: Exchange) -> None:
        """If the epoch has a time budget, advance to the local step that the elapsed time amounts to, if that is later.

        Not while the previous commit is awaited: no fragment could be handed over.
        """
        if self._flight is not None and self._flight.is_ahead:
            return
        if self._learns_from is not None and self._step_time.num_measured <= 1:
            # An evaluation before the first step, and compiling in it, say nothing about how long steps take.
            trained_s = (self.local_step - self._learns_from) * self._step_time.seconds
            elapsed_s = trained_s + self._scheduled.elapsed_at(self._learns_from, self._epoch_s)
            self._epoch_began_at = time.monotonic() - elapsed_s
        # A lone peer has nobody to learn from.
        if self._learns_from is not None and self.num_peers > 1:
            self._learn_epoch_s(float(exchange.ask("budget", "budget")["epoch_s"]), self._learns_from)
        if self._epoch_s:
            # One clock for all ranks: they have to hand over together.
            elapsed_s, step_s = on_rank_zero(
                lambda: (time.monotonic() - self._epoch_began_at, self._step_time.seconds)
            )
            local_step = self._scheduled.local_step_after(
                self.local_step, elapsed_s, self._epoch_s, step_s=step_s
            )
            self.position = replace(self.position, local_step=local_step)

    def _learn_epoch_s(self, epoch_s: float, entered_at_step: int) -> None:
        """The present epoch may last so long, by the speeds known so far: adopt it as if it had always been known."""
        elapsed_at = self._scheduled.elapsed_at
        self._epoch_began_at += elapsed_at(entered_at_step, self._epoch_s) - elapsed_at(
            entered_at_step, epoch_s
        )
        self._epoch_s = epoch_s

    def _report(self, exchange: Exchange, num_tokens: int) -> None:
        """Report the step, the loss and the speed to the daemon, at most twice a second."""
        rate = self._progress.due(num_tokens * exchange.num_ranks, time.monotonic())
        if rate is not None:
            step, local_step = self.nominal_step, self.local_step
            figures = {"tokens_per_s": rate, "step_s": self._step_time.seconds}
            exchange.tell("progress", step=step, local_step=local_step, loss=self._reported_loss(), **figures)

    def _reported_loss(self) -> float | None:
        return None if self._loss is None else float(self._loss)


@dataclass(frozen=True)
class _Flight:
    """A fragment that has been handed over and whose commit has not been merged."""

    fragment: int
    tokens: int
    """The tokens that this rank had trained since the fragment was averaged."""
    local_step: int
    """The local step at which the fragment was handed over."""
    blocked_s: float
    """How long training has waited for the commit."""
    is_ahead: bool = False
    """Whether training has continued in the next epoch, while the commit is awaited."""


@dataclass
class _StepTime:
    """The duration of a step: the median of the last steps, without the time spent in `Diloco.step`."""

    _began_at: float | None = None
    _measured: deque[float] = field(default_factory=lambda: deque(maxlen=9))

    @property
    def num_measured(self) -> int:
        return len(self._measured)

    @property
    def seconds(self) -> float:
        """0 if unknown."""
        return statistics.median(self._measured) if self._measured else 0.0

    def begins(self) -> None:
        self._began_at = time.monotonic()

    def ended(self) -> None:
        if self._began_at is not None:
            self._measured.append(time.monotonic() - self._began_at)


@dataclass
class _Progress:
    """Counts tokens between two reports."""

    tokens: int = 0
    reported_at: float | None = None

    def due(self, tokens: int, now: float) -> float | None:
        """Tokens per second since the last report if the next report is due, else None."""
        if self.reported_at is None:
            self.reported_at = now
            return None
        self.tokens += tokens
        elapsed_s = now - self.reported_at
        if elapsed_s < PROGRESS_INTERVAL_S:
            return None
        rate = self.tokens / elapsed_s
        self.tokens, self.reported_at = 0, now
        return rate
