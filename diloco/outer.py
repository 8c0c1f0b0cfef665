"""The one object that a training loop adds to take part in a swarm.

outer = Diloco(model)          # finds its daemon through the environment; alone, it does nothing
for batch in loader:
    loss = step(model, batch)
    outer.step(num_tokens=batch.numel())
outer.finish()
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from diloco.errors import DilocoError
from diloco.exchange import Exchange
from diloco.world import on_rank_zero
from peers.link import LINK_ENV

PROGRESS_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a peer is in the run, and from which block on its epoch's data lies."""

    epoch: int = 0
    local_step: int = 0
    """Inner steps since the last commit; alone, since the beginning."""
    data_base: int = 0


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint that was loaded into the model: where it was taken, and the directory of its outer state."""

    position: Position
    tokens: int
    """Those that each rank had trained since the last commit."""
    directory: Path


@dataclass(frozen=True, kw_only=True)
class Commit:
    """How an epoch ended: what its `epoch` record in metrics.jsonl says."""

    epoch: int
    """Outer steps done, this one included."""
    lineage: str
    anchor_digest: str
    num_peers: int
    contributors: list[int]
    """World ranks whose work is in the anchor."""
    sent_bytes: int
    received_bytes: int
    round_s: float
    wait_s: float


Restore = Callable[[int | None], Restored | None]
"""Loads this world rank's checkpoint into the model, if there is one to be loaded."""


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
    ) -> None:
        """Waits for the swarm and loads the weights to start from.

        `local_steps` (inner steps an epoch) is the swarm's where it is not given; `max_steps` ends the run after so
        many nominal steps; `restore` is called once, before anything is offered to the swarm. Raises
        peers.errors.UserError where the swarm refuses this peer, LinkLost where its daemon is gone.
        """
        self.position = Position()
        self.max_steps = max_steps
        self.world_rank: int | None = None
        self.num_peers = 1
        self.last_commit: Commit | None = None
        self._local_steps = local_steps
        self.tokens = 0
        """What this rank has trained since the last commit."""
        self._is_over = False
        self._progress = _Progress()
        path = on_rank_zero(lambda: os.environ.get(LINK_ENV))
        self._exchange = Exchange(model, Path(path)) if path else None
        self._in_swarm = self._exchange is not None
        if self._exchange is not None:
            self.world_rank = int(self._exchange.welcome["world_rank"])
            self._local_steps = local_steps or self._exchange.welcome.get("local_steps")
        restored = restore(self.world_rank) if restore else None
        if restored is not None:
            self.position, self.tokens = restored.position, restored.tokens
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
    def local_steps(self) -> int:
        """Inner steps between two outer steps."""
        if self._local_steps is None:
            raise DilocoError(
                "nobody said how many local steps an epoch has; construct Diloco with local_steps"
            )
        return self._local_steps

    @property
    def nominal_step(self) -> int:
        """Steps since the start of the run as schedules count them, the same for fast and slow peers."""
        if not self._in_swarm:
            return self.local_step
        step = self.epoch * self.local_steps + min(self.local_step, self.local_steps)
        # The last epoch may be a short one.
        return step if self.max_steps is None else min(step, self.max_steps)

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return self._is_over or (self.max_steps is not None and self.nominal_step >= self.max_steps)

    @property
    def evaluates(self) -> bool:
        """Whether this peer evaluates weights that all have: the lowest contributor of the last commit.

        Before the run's first commit it is world rank 0.
        """
        if self.last_commit is not None:
            return self.world_rank == min(self.last_commit.contributors, default=self.world_rank)
        return not self.active or (self.world_rank == 0 and self.epoch == 0)

    def step(self, *, num_tokens: int, loss: float | None = None) -> Commit | None:
        """Call after every optimizer step; `num_tokens` are those that this rank trained in it.

        At an epoch's end this averages with the swarm, loads the new weights (the optimizer's state stays) and
        returns the commit. Raises DilocoError where the epoch was abandoned, LinkLost where the daemon is gone.
        """
        self.position = replace(self.position, local_step=self.local_step + 1)
        self.tokens += num_tokens
        if self._exchange is None:
            return None
        if self.local_step >= self.local_steps or self.done:
            return self._average(self._exchange, last=self.done)
        self._report(self._exchange, num_tokens, loss)
        return None

    def checkpoint(self, directory: Path) -> None:
        """Have the daemon write its outer state into `directory`. Raises DilocoError where it cannot."""
        if self._exchange is None:
            return
        answer = self._exchange.ask(
            "checkpoint", "checkpointed", "failed", directory=str(directory.absolute())
        )
        if answer["kind"] == "failed":
            raise DilocoError(f"the outer state was not saved to {directory}: {answer['reason']}")

    def finish(self) -> None:
        """Average what is left of the epoch and leave the swarm. Repeating it is safe."""
        if self._exchange is None:
            return
        if self.tokens and not self._is_over:
            self._average(self._exchange, last=True)
        self._exchange.ask("finished", "bye")
        self._exchange.close()
        self._exchange, self._is_over = None, True

    def _start(self, exchange: Exchange, restored: Restored | None) -> None:
        exchange.put()
        start = exchange.ask(
            "offer",
            "start",
            resume=str(restored.directory.absolute()) if restored else None,
            epoch=self.epoch,
            local_step=self.local_step,
        )
        if not start["keep_local"]:
            exchange.take()
            self.tokens = 0
        self._adopt(start)

    def _average(self, exchange: Exchange, *, last: bool) -> Commit:
        tokens = exchange.put(tokens=self.tokens)
        answer = exchange.ask(
            "ready",
            "committed",
            "abandoned",
            fragment=0,
            epoch=self.epoch,
            local_step=self.local_step,
            tokens=tokens,
            step=self.nominal_step,
            last=last,
        )
        if answer["kind"] == "abandoned":
            raise DilocoError(f"epoch {self.epoch} could not be averaged: {answer['reason']}")
        exchange.take()
        self._adopt(answer)
        self.tokens, self._is_over = 0, bool(answer["last"])
        self.last_commit = Commit(**{field.name: answer[field.name] for field in fields(Commit)})
        return self.last_commit

    def _adopt(self, answer: dict[str, Any]) -> None:
        """Weights and position move together: called only after the weights have been taken."""
        self.position = Position(**{field.name: int(answer[field.name]) for field in fields(Position)})
        self.num_peers = int(answer["num_peers"])

    def _report(self, exchange: Exchange, num_tokens: int, loss: float | None) -> None:
        """Rank 0 tells the daemon how it goes, at most once a second."""
        if not exchange.speaks:
            return
        rate = self._progress.due(num_tokens * exchange.num_ranks, time.monotonic())
        if rate is not None:
            step, local_step = self.nominal_step, self.local_step
            exchange.tell("progress", step=step, local_step=local_step, loss=loss, tokens_per_s=rate)


@dataclass
class _Progress:
    """Counts tokens between two reports."""

    tokens: int = 0
    reported_at: float | None = None

    def due(self, tokens: int, now: float) -> float | None:
        """Tokens per second since the last report, if one is due again."""
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
