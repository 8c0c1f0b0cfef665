"""What a daemon does for its worker: where to start, averaging, checkpoints. Implements worker_session.Host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peers import joining, membership
from peers.advice import Advice, advice_on, num_layers_of
from peers.agreement import Agreement
from peers.averaging import Averager
from peers.donors import Donors
from peers.errors import StateUnavailable, UserError
from peers.handover import Memories, Outcome, Start
from peers.joining import Scalar
from peers.layout import Layout
from peers.network.streams import StreamTransport
from peers.onlookers.journal import Journal, Point
from peers.onlookers.reporting import entry_of
from peers.outer_state import OuterState
from peers.pace import Pace, progress_of_others
from peers.presence import Presence
from peers.records import Announcement, State
from peers.round.standing import Standing as RoundStanding
from peers.schedule import Schedule
from peers.state import files as state_files
from peers.state.replay import replay_commits
from peers.state.saving import Saving, Written
from peers.state.transfer import download_state, download_timeout_s

log = logging.getLogger(__name__)

_PROGRESS_S = 5.0
_ADOPTED_IN_VAIN = 3
_PAGE_BYTES = 4096
REFUSAL_TIMEOUT_S = 30.0
"""How long a worker that has to be told why it cannot join may take to connect."""


@dataclass
class Standing:
    """What this peer shows of its worker."""

    state: State = "joining"
    step: int = 0
    pace: Pace = field(default_factory=Pace)
    tokens_per_s: float = 0.0

    def local_step(self, steps_per_epoch: int) -> int:
        """By now: the worker does not tell every step."""
        if self.state != "training":
            return self.pace.local_step
        return self.pace.local_step_at(time.monotonic(), steps_per_epoch)


class WorkerHost:
    """`ready` is set by the daemon once the swarm has agreed; until then workers wait."""

    def __init__(
        self,
        *,
        run_id: str,
        presence: Presence,
        agreement: Agreement,
        standing: Standing,
        transport: StreamTransport,
        waited_out: Callable[[], bool],
    ) -> None:
        self.run_id = run_id
        self.ready: asyncio.Future[Averager] = asyncio.get_running_loop().create_future()
        self.finished_at = asyncio.Event()
        self.on_progress: Callable[[], None] = lambda: None
        self.on_commit: Callable[[], None] = lambda: None
        """An epoch holds this worker's work."""
        self.journal = Journal()
        self._presence, self._agreement, self._standing = presence, agreement, standing
        self._transport, self._waited_out = transport, waited_out
        self._saving, self._advice = Saving(), Advice()
        self._refused = asyncio.Event()
        self._layout: Layout | None = None
        self.has_worker = False

    @property
    def world_rank(self) -> int:
        return self._presence.world_rank

    @property
    def _schedule(self) -> Schedule:
        return Schedule.of(self._agreement.manifest)

    @property
    def waits_for(self) -> str:
        here, wanted = len(self._presence.view), self._presence.galaxy_size
        if self._standing.state not in ("joining", "waiting"):
            return self.ready.result().standing.waits_for
        return f"peers, {here} of {wanted} are here" if here < wanted else "the swarm's state"

    @property
    def steps_per_epoch(self) -> int:
        """0: not agreed yet."""
        return self._schedule.steps_per_epoch if self._agreement.digest else 0

    @property
    def standing_in_round(self) -> RoundStanding:
        """For people: also of a peer that is not in any round yet."""
        if self._standing.state in ("joining", "waiting") or not self.ready.done():
            return RoundStanding(waits_for=self.waits_for)
        return self.ready.result().standing

    async def manifest(self) -> Mapping[str, Scalar]:
        await asyncio.shield(self.ready)
        return self._agreement.manifest

    async def admit(self, layout: Layout) -> None:
        await asyncio.shield(self.ready)
        if self._layout is not None and self._layout.digest != layout.digest:
            raise UserError("the worker came back with another model than before; start the peer anew")
        self._layout = layout

    async def start(self, memories: Memories, offer: dict[str, Any]) -> Start:
        """The state to begin from: the swarm's, a checkpoint's, or the worker's own initial weights."""
        averager = await asyncio.shield(self.ready)
        self.has_worker, keep_local = True, False
        # The pages of new memory cost seconds, which pass while the state is fetched.
        touched = asyncio.create_task(asyncio.to_thread(_touch, memories.inn))
        if averager.has_state:
            await averager.await_new_worker()
            await self._catch_up(averager)
        else:
            offered = await asyncio.to_thread(_offered_state, memories.out, offer.get("resume"))
            averager.adopt(offered)
            self._show("waiting")
            await self._adopt_best(averager)
            is_own = bool(offer.get("resume")) and offer.get("is_own", True)
            keep_local = is_own and averager.state is offered
            if keep_local:
                saved = await asyncio.to_thread(
                    state_files.load_residuals, Path(str(offer["resume"])), offered
                )
                averager.adopt(offered, saved)
        state, steps = averager.state, self._schedule.steps_per_epoch
        await touched
        for inn, anchor in zip(memories.inn, state.anchor, strict=True):
            await asyncio.to_thread(inn.copy_, anchor)
        step = progress_of_others(
            self._presence.view, state.lineage, self.world_rank, steps, self._presence.mesh.ages
        )
        if keep_local:
            step = int(offer["local_step"])
        self._standing.step = state.epoch * steps + step
        self._standing.pace.entered(step, time.monotonic())
        self._show("training")
        log.info("training from epoch %d, step %d, anchor %s", state.epoch, step, state.anchor_digest[:12])
        return Start(
            epoch=state.epoch,
            local_step=step,
            data_base=state.data_base,
            anchor_digest=state.anchor_digest,
            lineage=state.lineage,
            num_peers=len(self._presence.view),
            keep_local=keep_local,
        )

    async def average(self, memories: Memories, ready: dict[str, Any]) -> Outcome:
        averager = await asyncio.shield(self.ready)
        step, tokens, last = int(ready["step"]), int(ready["tokens"]), bool(ready["last"])
        self._standing.step = step
        self._standing.pace.reached(
            max(0, step - averager.state.epoch * self._schedule.steps_per_epoch), time.monotonic()
        )
        self._show("averaging")
        fragment = int(ready["fragment"])
        outcome = await averager.average(memories, fragment, tokens=tokens, step=step, last=last)
        self._standing.pace.entered(outcome.local_step, time.monotonic())
        self.journal.committed(entry_of(outcome))
        if self.world_rank in outcome.contributors:
            self.on_commit()
        if outcome.carried_tokens:
            self.journal.happened(
                time.time(),
                f"the swarm was split; {outcome.carried_tokens} tokens of the side given up are in now",
            )
        self._advise(averager, outcome)
        self._show("leaving" if last else "training" if self.has_worker else "joining")
        return outcome

    def _advise(self, averager: Averager, outcome: Outcome) -> None:
        usual = self._advice.epoch_ended(
            time.monotonic(),
            round_s=outcome.round_s,
            bytes_per_s=outcome.bandwidth,
            num_peers=len(outcome.contributors),
        )
        if usual is None or self._layout is None:
            return
        text = advice_on(
            usual,
            self._schedule,
            codec=str(self._agreement.manifest.get("hv.compression") or "fp32"),
            sizes=averager.state.sizes,
            num_layers=num_layers_of(slot.name for part in self._layout.fragments for slot in part),
        )
        if text:
            log.info("%s", text)

    async def snapshot(self, directory: Path) -> None:
        averager = await asyncio.shield(self.ready)
        await self._saving.begin(averager.state, averager.residuals, directory)

    async def written(self, directory: Path) -> Written:
        return await self._saving.finish(directory)

    def progressed(self, progress: dict[str, Any]) -> None:
        """Shown with the next heartbeat; not worth a message of its own."""
        averager, step = self.ready.result(), int(progress["step"])
        # A worker that trains on while its round takes place is still in the epoch before.
        since_commit = step - averager.state.epoch * self._schedule.steps_per_epoch
        self._standing.step = step
        if since_commit >= 0:
            self._standing.pace.reached(since_commit, time.monotonic())
        self._standing.tokens_per_s = float(progress["tokens_per_s"])
        loss = progress.get("loss")
        self.journal.progressed(
            Point(
                time=time.time(),
                step=step,
                loss=float(loss) if loss is not None and math.isfinite(loss) else None,
                tokens_per_s=self._standing.tokens_per_s,
            )
        )
        self.on_progress()

    def worker_lost(self) -> None:
        """Nobody is to wait for what this peer does not train; what it has handed over is averaged still."""
        self.has_worker = False
        if not self.finished_at.is_set():
            self.journal.num_worker_losses += 1
            self.journal.happened(time.time(), "its worker ended")
        if self._standing.state in ("training", "waiting"):
            self._show("joining")

    def finished(self) -> None:
        self.finished_at.set()

    def refused(self) -> None:
        self._refused.set()

    async def refuse(self, error: UserError, *, wait: bool) -> None:
        """Whoever waits for this peer to be ready is told; `wait` until somebody has been."""
        self.ready.set_exception(error)
        self.ready.exception()
        if wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFUSAL_TIMEOUT_S):
                    await self._refused.wait()

    async def _adopt_best(self, averager: Averager) -> None:
        """Start from the same state as everybody else."""
        presence, donors, said, num_adopted = self._presence, self._donors(), "", 0
        while True:
            if self.waits_for != said:
                said = self.waits_for
                log.info("waiting for %s", said)
            source = joining.state_source(
                donors.credible_view(averager.state.lineage),
                me=self.world_rank,
                galaxy_size=presence.galaxy_size,
                waited_out=self._waited_out(),
            )
            if source is not None and _is_near(averager.state, source, num_adopted):
                return
            if source is not None and await self._adopt_from(source, averager, donors):
                num_adopted += 1
            else:
                await presence.wait_for_change()

    async def _catch_up(self, averager: Averager) -> None:
        """While no worker was there, the others may have gone on."""
        presence, donors, num_adopted = self._presence, self._donors(), 0
        while True:
            ahead = membership.ahead_of(donors.credible_view(averager.state.lineage), self.world_rank)
            if ahead is None or _is_near(averager.state, ahead, num_adopted):
                return
            if await self._adopt_from(ahead, averager, donors):
                num_adopted += 1
            else:
                await presence.wait_for_change()

    def _donors(self) -> Donors:
        return Donors(self.world_rank, lambda: self._presence.view, self.download)

    async def _adopt_from(self, source: Announcement, averager: Averager, donors: Donors) -> bool:
        """Whether this peer's state could be had from those who hold it."""
        state = await donors.hand_over(source, averager.state.lineage)
        if state is not None:
            averager.adopt(state)
        return state is not None

    async def download(self, donors: list[str], lineage: str) -> OuterState:
        """The state of this lineage. Raises StateUnavailable, PeerUnreachable or ProtocolError."""
        assert self._layout is not None
        averager, sizes = self.ready.result(), self._layout.sizes
        log.info("asking %d peers for the state %s", len(donors), lineage[:12])
        with contextlib.ExitStack() as stack:
            have = averager.state.snapshot() if averager.has_state else None
            if have is not None:
                stack.enter_context(have)
            if have is not None and have.header.sizes == sizes:
                with contextlib.suppress(StateUnavailable, TimeoutError):
                    return await replay_commits(
                        donors,
                        self._transport,
                        self.run_id,
                        have,
                        lineage,
                        averager.optimizer_for,
                        timeout_s=download_timeout_s(sizes),
                    )
            return await download_state(
                donors,
                self._transport,
                self.run_id,
                lineage,
                sizes,
                timeout_s=download_timeout_s(sizes),
                have=have if have is not None and have.header.sizes == sizes else None,
                progress=ProgressLog(),
            )

    def _show(self, state: State) -> None:
        self._standing.state = state
        self._presence.publish()


def _is_near(state: OuterState, source: Announcement, num_adopted: int) -> bool:
    """Whether to begin from this state. Where epochs are as short as it takes to make a commit after the others, the
    newest is never at hand: then the one before does, later the one before that, and so on; the round brings its work
    to where the others are."""
    behind = max(0, num_adopted - _ADOPTED_IN_VAIN + 1)
    return source.lineage == state.lineage or (behind > 0 and source.epoch <= state.epoch + behind)


class ProgressLog:
    """Says now and then how much of a state is here."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def __call__(self, received: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said_at > _PROGRESS_S and received < total:
            self._said_at = now
            log.info("%d of %d MB of the state are here", received >> 20, total >> 20)


def _touch(fresh: Sequence[torch.Tensor]) -> None:
    """Write to every page of memory that nobody has written to yet."""
    for values in fresh:
        values[:: _PAGE_BYTES // values.element_size()] = 0


def _offered_state(out: Sequence[torch.Tensor], resume: str | None) -> OuterState:
    """What this peer can start from by itself. Raises UserError where the checkpoint is another model's."""
    if not resume:
        return OuterState.initial([weights.clone() for weights in out])
    state = state_files.load(Path(resume))
    sizes = tuple(weights.numel() for weights in out)
    if state.sizes != sizes:
        raise UserError(
            f"the checkpoint {resume} is of another model or has other fragments: it has {list(state.sizes)} "
            f"parameters in them, this one {list(sizes)}"
        )
    return state
