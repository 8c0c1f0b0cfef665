"""What a daemon does for its worker: where to start, averaging, checkpoints. Implements worker_session.Host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from peers.core import events
from peers.core.advice import Advice, advice_on, num_layers_of
from peers.core.schedule import Schedule
from peers.daemon.agreement import Agreement
from peers.daemon.doing import Activity
from peers.daemon.pace import Pace
from peers.daemon.presence import Presence
from peers.daemon.runtime import Runtime
from peers.daemon.standing import standing_of
from peers.errors import PeersError, StateUnavailable, UserError
from peers.monitor.journal import Journal
from peers.monitor.phases import Doing, in_words, training_left_s
from peers.monitor.reporting import RunFigures, entry_of
from peers.net.states.replay import can_be_repeated, replay_commits
from peers.net.states.transfer import download_state
from peers.net.transport import StreamTransport
from peers.protocol.certificates import Certificate
from peers.protocol.mesh import Scalar
from peers.protocol.records import State
from peers.protocol.reports import Evaluation, Phase, Point, Standing
from peers.protocol.signatures import verify_signature
from peers.reduce.residuals import Residuals
from peers.state import files as state_files
from peers.state.handover import Ahead, EpochOutcome, Memories, Start
from peers.state.layout import Layout
from peers.state.outer_state import OuterState
from peers.state.saving import Saving, Written
from peers.timing import START_S

log = logging.getLogger(__name__)

_FLOAT_BYTES = 4
DIVERGED = "its loss is not a number any more; is the learning rate too high?"
REFUSAL_TIMEOUT_S = START_S
"""How long a worker that has to be told why it cannot join may take to connect."""


@dataclass
class WorkerStanding:
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
        standing: WorkerStanding,
        transport: StreamTransport,
        waited_out: Callable[[], bool],
    ) -> None:
        self.run_id = run_id
        self.ready: asyncio.Future[Runtime] = asyncio.get_running_loop().create_future()
        self.finished_at = asyncio.Event()
        self.on_progress: Callable[[], None] = lambda: None
        self.on_commit: Callable[[], None] = lambda: None
        """An epoch holds this worker's work."""
        self.journal, self.activity = Journal(), Activity()
        self._presence, self._agreement, self._standing = presence, agreement, standing
        self._transport, self._waited_out = transport, waited_out
        self._saving, self._advice = Saving(), Advice()
        self._refused = asyncio.Event()
        self._layout: Layout | None = None
        self.has_worker = False

    @property
    def world_rank(self) -> int:
        return self.ready.result().core.world_rank

    @property
    def _schedule(self) -> Schedule:
        return Schedule.of(self._agreement.manifest)

    @property
    def phase(self) -> Phase:
        """What this peer is doing, for people."""
        end_step, step = self.run_figures.end_step, self._standing.step
        return self.activity.phase(
            self._standing.state,
            here=len(self._presence.view) if self._presence.maddrs else 0,
            wanted=self._presence.galaxy_size,
            waits_for=self._waits_for,
            step=step,
            end_step=end_step,
            left_s=training_left_s(self.journal.curve.points, step, end_step),
        )

    @property
    def run_figures(self) -> RunFigures:
        if not self._agreement.digest:
            return RunFigures()
        manifest = self._agreement.manifest
        ends = [int(manifest[name] or 0) for name in ("max_steps", "total_steps") if manifest.get(name)]
        return RunFigures(
            steps_per_epoch=self._schedule.steps_per_epoch,
            end_step=min(ends, default=0),
            step_s=self._standing.pace.step_s,
            compression=str(manifest.get("hv.compression") or "fp32"),
            overlap_steps=self._schedule.overlap_steps,
        )

    @property
    def waits_for(self) -> str:
        """What the worker that waits for an answer is told."""
        return in_words(self.phase)

    @property
    def _waits_for(self) -> str:
        here, wanted = len(self._presence.view), self._presence.galaxy_size
        if self._standing.state not in ("joining", "waiting"):
            return standing_of(self.ready.result().core).waits_for
        return f"peers, {here} of {wanted} are here" if here < wanted else "the swarm's state"

    @property
    def steps_per_epoch(self) -> int:
        """0: not agreed yet."""
        return self._schedule.steps_per_epoch if self._agreement.digest else 0

    @property
    def standing_in_round(self) -> Standing:
        """For people: also of a peer that is not in any round yet."""
        if self._standing.state in ("joining", "waiting") or not self.ready.done():
            return Standing(waits_for=self._waits_for)
        return standing_of(self.ready.result().core)

    async def manifest(self) -> Mapping[str, Scalar]:
        await asyncio.shield(self.ready)
        return self._agreement.manifest

    async def admit(self, layout: Layout) -> None:
        await asyncio.shield(self.ready)
        if self._layout is not None and self._layout.digest != layout.digest:
            raise UserError("the worker came back with another model than before; start the peer anew")
        self._layout = layout
        timing = self.ready.result().core.timing
        timing.set_sizes(
            fragment_bytes=_FLOAT_BYTES * max(layout.sizes), state_bytes=2 * _FLOAT_BYTES * sum(layout.sizes)
        )

    async def start(self, memories: Memories, offer: dict[str, Any]) -> Start:
        """The state to begin from: the swarm's, a checkpoint's, or the worker's own initial weights."""
        runtime = await asyncio.shield(self.ready)
        self.has_worker = True
        offered, residuals = await asyncio.to_thread(_offered_state, memories.out, offer.get("resume"))
        if runtime.state is None:
            self._show("waiting")
        start = await runtime.begin_worker(memories.inn, offered, residuals)
        if offer.get("resume") and offer.get("is_own", True) and runtime.is_offered(offered):
            start = replace(start, keep_local=True, local_step=int(offer["local_step"]))
        self._standing.step = start.epoch * self._schedule.steps_per_epoch + start.local_step
        self._standing.pace.entered(start.local_step, time.monotonic())
        self._show("training")
        log.info(
            "training from epoch %d, step %d, anchor %s",
            start.epoch,
            self._standing.step,
            start.anchor_digest[:12],
        )
        return start

    async def average(
        self, memories: Memories, ready: dict[str, Any], ahead: asyncio.Future[Ahead]
    ) -> EpochOutcome:
        runtime = await asyncio.shield(self.ready)
        step, tokens, last = int(ready["step"]), int(ready["tokens"]), bool(ready["last"])
        self._standing.step = step
        self._standing.pace.reached(
            max(0, step - runtime.core.epoch * self._schedule.steps_per_epoch), time.monotonic()
        )
        self._show("averaging")
        fragment = int(ready["fragment"])
        ahead.add_done_callback(lambda done: None if done.cancelled() else self._show("training"))
        try:
            outcome = await runtime.average(
                memories, fragment, tokens=tokens, step=step, last=last, ahead=ahead
            )
        except PeersError:
            # This life of the worker is over.
            self._show("joining")
            raise
        self._standing.pace.entered(outcome.local_step, time.monotonic())
        self.journal.committed(entry_of(outcome))
        self.is_in_trouble("worker", "")
        if outcome.world_rank in outcome.contributors:
            self.on_commit()
            self._tell_of_likeness(runtime.likeness.world_ranks)
        self._advise(runtime, outcome)
        self._show("leaving" if last else "training" if self.has_worker else "joining")
        return outcome

    def _tell_of_likeness(self, world_ranks: Sequence[int]) -> None:
        # Of two, the first tells it.
        others = [rank for rank in world_ranks if rank > self.world_rank]
        text = ""
        if others:
            of = f"peer{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
            text = f"sends nearly the same as {of}: do they train on the same data? Deal it out by world rank"
            if not self.journal.troubles.get("data"):
                log.warning("this peer %s", text)
        self.is_in_trouble("data", text)

    def _advise(self, runtime: Runtime, outcome: EpochOutcome) -> None:
        usual = self._advice.epoch_ended(
            time.monotonic(),
            round_s=outcome.round_s,
            bytes_per_s=outcome.bandwidth,
            num_peers=len(outcome.contributors),
        )
        if usual is None or self._layout is None or runtime.state is None:
            return
        text = advice_on(
            usual,
            self._schedule,
            codec=str(self._agreement.manifest.get("hv.compression") or "fp32"),
            sizes=runtime.state.sizes,
            num_layers=num_layers_of(slot.name for part in self._layout.fragments for slot in part),
        )
        if text:
            log.info("%s", text)

    async def snapshot(self, directory: Path) -> None:
        runtime = await asyncio.shield(self.ready)
        if runtime.state is None:
            raise OSError("there is no outer state yet")
        await self._saving.begin(runtime.state, runtime.residuals, directory)

    async def written(self, directory: Path) -> Written:
        return await self._saving.finish(directory)

    def progressed(self, progress: dict[str, Any]) -> None:
        """Shown with the next heartbeat; not worth a message of its own."""
        runtime, step = self.ready.result(), int(progress["step"])
        # A worker that trains on while its round takes place is still in the epoch before.
        since_commit = step - runtime.core.epoch * self._schedule.steps_per_epoch
        self._standing.step = step
        if since_commit >= 0:
            pace = self._standing.pace
            pace.reached(since_commit, time.monotonic())
            runtime.post(events.WorkerTrains(since_commit, pace.step_s))
        self._standing.tokens_per_s = float(progress["tokens_per_s"])
        loss = progress.get("loss")
        is_known = loss is not None and math.isfinite(loss)
        self.is_in_trouble("loss", "" if is_known or loss is None else DIVERGED)
        self.journal.progressed(
            Point(
                time=time.time(),
                step=step,
                loss=float(loss) if loss is not None and is_known else None,
                tokens_per_s=self._standing.tokens_per_s,
            )
        )
        self.on_progress()

    def doing(self, message: Mapping[str, Any] | None) -> None:
        """The worker has told what it does beside its steps; None, or without a name: nothing."""
        doing = Doing.told(message) if message else None
        self.activity.told = doing if doing is not None and doing.name else None

    def evaluated(self, message: Mapping[str, Any]) -> None:
        loss = message.get("loss")
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            loss = None
        step = max(0, int(message["step"]))
        self.journal.evaluations.append(Evaluation(time=time.time(), step=step, loss=loss))

    def is_in_trouble(self, what: str, text: str) -> None:
        """What is wrong on this peer, until it is told with no text that it is not any more."""
        if text and self.journal.troubles.get(what) != text:
            self.journal.happened(time.time(), text)
        self.journal.is_in_trouble(what, text)

    def worker_lost(self) -> None:
        """Nobody is to wait for what this peer does not train; what it has handed over is averaged still."""
        self.has_worker = False
        if self.ready.done() and not self.ready.exception():
            self.ready.result().post(events.WorkerGone())
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

    async def download(
        self, path: Sequence[Certificate], donors: Sequence[str], timeout_s: float
    ) -> OuterState:
        """The state at the end of this path. Raises StateUnavailable, PeerUnreachable or ProtocolError."""
        assert self._layout is not None
        runtime, sizes, until = self.ready.result(), self._layout.sizes, time.monotonic() + timeout_s
        asked = f"{len(donors)} peer{'' if len(donors) == 1 else 's'}"
        log.info("asking %s for the state of epoch %d", asked, path[-1].plan.epoch)
        with contextlib.ExitStack() as stack:
            stack.callback(self._received, None)
            self._received((0, 2 * _FLOAT_BYTES * sum(sizes)))
            have = runtime.state.snapshot() if runtime.state is not None else None
            if have is not None:
                stack.enter_context(have)
            if have is not None and can_be_repeated(have, path):
                with contextlib.suppress(StateUnavailable, TimeoutError):
                    return await replay_commits(
                        donors,
                        self._transport,
                        self.run_id,
                        have,
                        path,
                        runtime.settings.codec,
                        runtime.settings.optimizer_for,
                        # Whoever hands commits over slowly is not to cost the state as well.
                        timeout_s=timeout_s / 2,
                    )
            return await download_state(
                donors,
                self._transport,
                self.run_id,
                path[-1],
                sizes,
                timeout_s=max(0.0, until - time.monotonic()),
                have=have,
                progress=lambda received, total: self._received((received, total)),
            )

    def _received(self, received: tuple[int, int] | None) -> None:
        self.activity.received = received

    def _show(self, state: State) -> None:
        self._standing.state = state
        self._presence.publish()


def check_certificate(state: OuterState, resume: str) -> None:
    """Raises UserError where the checkpoint is not proved to be of a run: that its values fit is known already."""
    certificate = state.header.certificate
    if certificate is None:
        raise UserError(
            f"the checkpoint {resume} has no certificate: a version of diloco from before certificates saved it, and "
            "training cannot go on from it. Take its model out with `diloco export`, and begin a run with it by "
            "--path-model"
        )
    if not certificate.is_signed(verify_signature):
        raise UserError(
            f"the certificate of the checkpoint {resume} is not signed by all of those whose work it says is in it: it "
            "has been altered, or put together from parts of several. Resume from another one, of a place that only "
            "you can write to"
        )


def _offered_state(
    out: Sequence[torch.Tensor], resume: str | None
) -> tuple[OuterState, list[Residuals] | None]:
    """What this peer can start from by itself. Raises UserError where the checkpoint is another model's."""
    if not resume:
        return OuterState.initial([weights.clone() for weights in out]), None
    state = state_files.load(Path(resume))
    check_certificate(state, resume)
    sizes = tuple(weights.numel() for weights in out)
    if state.sizes != sizes:
        raise UserError(
            f"the checkpoint {resume} is of another model or has other fragments: it has {list(state.sizes)} "
            f"parameters in them, this one {list(sizes)}"
        )
    return state, state_files.load_residuals(Path(resume), state)
