"""What the daemon does for its worker, over the link: its memories, its start, and an answer to every `ready`.

A worker may die at any moment. What it had handed over is still averaged, in memories that its next life does not get.
The next life starts from the state that the daemon holds by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from peers.core import events
from peers.daemon.agreement import Agreement
from peers.daemon.averaging import WorkInHand
from peers.daemon.beginning import offered_state
from peers.daemon.config import codec_of
from peers.daemon.link import WAITING_INTERVAL_S, Accept, DaemonConnection, LinkMemory
from peers.daemon.rollout_service import RolloutService
from peers.daemon.runtime import Runtime
from peers.daemon.worker_monitor import WorkerMonitor
from peers.errors import LinkLost, PeersError, ProtocolError, UserError
from peers.monitor.phases import in_words
from peers.protocol.codecs import FLOAT_BYTES
from peers.state.files import Saving, is_workers_base
from peers.state.handover import EpochOutcome, Memories, Start, floats_of
from peers.state.layout import Layout
from peers.tasks import cancelled, is_set_within
from peers.timing import START_S

log = logging.getLogger(__name__)

T = TypeVar("T")

_NEWS = ("doing", "evaluated", "trouble")
_REFUSAL_TIMEOUT_S = START_S
"""How long to wait for a worker to connect, in order to tell it why this peer cannot join."""


class WorkerHost:
    """Serves one life of the worker after the other. Used from one event loop."""

    def __init__(self, agreement: Agreement, monitor: WorkerMonitor, rollouts: RolloutService) -> None:
        self._agreement, self._monitor, self._rollouts = agreement, monitor, rollouts
        self.finished = asyncio.Event()
        """Set when the worker says that its training is over."""
        self._refused = asyncio.Event()
        """Set when a worker has been told why its life is over."""
        self._saving = Saving()
        self._ready: asyncio.Future[Runtime] = asyncio.get_running_loop().create_future()
        self._layout: Layout | None = None
        self._memories: list[LinkMemory] = []
        """Of this life of the worker, like the next four attributes."""
        self._descriptors: list[int] = []
        self._work: WorkInHand | None = None
        self._averaging: asyncio.Future[EpochOutcome] | None = None
        """The outcome of the work in hand, to come."""
        self._started: DaemonConnection | None = None
        """The connection of rank 0, once it has asked where to start."""

    @property
    def runtime(self) -> Runtime:
        """Set once this peer may train; workers are welcomed only then."""
        return self._ready.result()

    @property
    def has_met_worker(self) -> bool:
        """Whether a worker has ever introduced its model to this peer."""
        return self._layout is not None

    def may_train(self, runtime: Runtime) -> None:
        """Serve the workers that wait for this peer to join."""
        self._monitor.runtime = runtime
        self._ready.set_result(runtime)

    async def refuse(self, error: PeersError, *, wait: bool) -> None:
        """Tell waiting workers why this peer cannot join, unless it has joined. `wait`: until one has been told."""
        if self._ready.done():
            return
        # A plain PeersError: `_serve` would not tell the worker of some that another connection has met.
        self._ready.set_exception(error if isinstance(error, UserError) else PeersError(str(error)))
        # Marks the exception as retrieved: there may be no worker.
        self._ready.exception()
        if wait:
            await is_set_within(self._refused, _REFUSAL_TIMEOUT_S)

    async def serve(self, accept: Accept) -> None:
        """Serve workers for ever. A connection that opens while no other is open begins the worker's next life."""
        serving: set[asyncio.Task[None]] = set()
        try:
            while True:
                connection = await accept()
                serving = {task for task in serving if not task.done()}
                if not serving:
                    self._forget_life()
                serving.add(asyncio.create_task(self._serve(connection)))
        finally:
            await cancelled(serving)
            self._forget_life()

    def _forget_life(self) -> None:
        """Close the descriptors. Memory that a reduction still reads stays mapped until the reduction ends."""
        for fd in self._descriptors:
            os.close(fd)
        self._memories, self._descriptors = [], []
        self._work = self._averaging = self._started = None

    async def _serve(self, connection: DaemonConnection) -> None:
        """Serve one local rank until it hangs up. The worker has ended when rank 0 hangs up."""
        try:
            # Without a timeout: a trainer may load its model for long, and its end closes the connection.
            hello = await connection.receive()
            if hello["kind"] == "adopt":
                runtime = await self._answer(connection, asyncio.shield(self._ready))
                manifest = dict(self._agreement.manifest)
                await connection.send(
                    "manifest",
                    manifest=manifest,
                    world_rank=runtime.core.world_rank,
                    needs_offer=runtime.needs_offer,
                    run_is_alive=runtime.run_is_alive,
                )
                hello = await connection.receive()
            if hello["kind"] == "written":
                await self._report_written(connection, Path(hello["directory"]))
                return
            if hello["kind"] == "policy":
                await self._rollouts.serve_trainer(connection, hello, partial(self._answer, connection))
            if hello["kind"] in _NEWS:
                await self._hear(connection, hello)
            if hello["kind"] != "hello":
                raise ProtocolError(f"expected a hello, got {hello['kind']}")
            await self._welcome(connection, hello)
            while True:
                message = await connection.receive()
                if hello["local_rank"] == 0:
                    await self._handle(connection, message)
        except UserError as error:
            with contextlib.suppress(LinkLost):
                await connection.send("refused", message=str(error))
            self._refused.set()
        except LinkLost:
            log.debug("local rank hung up")
        except (TimeoutError, ProtocolError) as error:
            log.error("closed the link to a worker: %s", str(error) or "it took too long")
        except PeersError as error:
            # The worker's work cannot be averaged. The worker tells its user; its next life may succeed.
            log.error("closed the link to a worker: %s", error)
            self._monitor.is_in_trouble("worker", str(error))
            with contextlib.suppress(LinkLost):
                await connection.send("failed_for_good", message=str(error))
            self._refused.set()
        finally:
            connection.close()
            if connection is self._started:
                self._worker_lost()

    async def _hear(self, connection: DaemonConnection, message: dict[str, Any]) -> None:
        """Serve a connection on which the worker only reports. Raises LinkLost at its end."""
        try:
            while True:
                match message["kind"]:
                    case "doing":
                        self._monitor.doing(message)
                    case "evaluated":
                        self._monitor.evaluated(message)
                    case "trouble":
                        self._monitor.is_in_trouble(str(message["what"]), str(message["text"]))
                    case kind:
                        raise ProtocolError(f"unknown news {kind!r}")
                message = await connection.receive()
        finally:
            self._monitor.doing(None)

    async def _start(self, memories: Memories, offer: Mapping[str, Any]) -> Start:
        """The state to begin from: the swarm's, a checkpoint's, or the worker's own initial weights."""
        runtime, resume = self.runtime, offer.get("resume")
        self._monitor.has_worker = True
        offered, residuals = None, None
        if runtime.needs_offer:
            codec = codec_of(self._agreement.manifest)
            offered, residuals = await asyncio.to_thread(offered_state, memories.out, resume, codec=codec)
        was_waiting = runtime.state is None
        if was_waiting:
            self._monitor.show("waiting")
        start = await runtime.begin_worker(memories.inn, offered, residuals)
        start = replace(start, began_run=was_waiting and start.epoch == 0)
        own = resume if offer.get("is_own", True) else None
        if own and runtime.state is offered and is_workers_base(Path(own)):
            # The run began from this very checkpoint, so the worker's weights are on top of the right anchor.
            start = replace(start, keep_local=True, local_step=int(offer["local_step"]))
        self._monitor.started(start)
        return start

    def _worker_lost(self) -> None:
        """The worker has hung up. Nobody is to wait for it; what it has handed over is still averaged."""
        self._monitor.has_worker = False
        if self._ready.done() and not self._ready.exception():
            self.runtime.post(events.WorkerGone())
        if self.finished.is_set():
            self._monitor.show("leaving")
            return
        self._monitor.lost()
        if self._monitor.state != "averaging":
            self._monitor.show("joining")

    async def _welcome(self, connection: DaemonConnection, hello: dict[str, Any]) -> None:
        layout = Layout.from_message(hello["layout"])
        runtime = await self._answer(connection, asyncio.shield(self._ready))
        if self._layout is not None and self._layout.digest != layout.digest:
            raise UserError(
                "the local ranks of this peer built different models; start them with the same flags"
                if self._memories
                else "the restarted worker has another model than before; restart the whole peer"
            )
        self._layout = layout
        runtime.core.timing.set_sizes(
            fragment_bytes=FLOAT_BYTES * max(layout.sizes), state_bytes=2 * FLOAT_BYTES * sum(layout.sizes)
        )
        if not self._memories:
            for index, numel in enumerate(layout.sizes):
                memory, descriptors = LinkMemory.create(index, numel)
                self._memories.append(memory)
                self._descriptors += descriptors
        await connection.welcome(self._descriptors, world_rank=runtime.core.world_rank)

    async def _handle(self, connection: DaemonConnection, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "offer":
                self._started = connection
                # The life before may have failed after it had said that it was over.
                self.finished.clear()
                start = await self._answer(connection, self._start(self._tensors(), message))
                await connection.send("start", **asdict(start))
            case "ready":
                self._begin_averaging(message)
            case "collect" | "poll":
                await self._collect(connection, message)
            case "progress":
                since_commit = self._monitor.progressed(message)
                # With overlap, the worker may still be in the epoch that the last commit ended.
                if since_commit >= 0:
                    self.runtime.post(events.WorkerTrains(since_commit, self._monitor.step_s))
            case "budget":
                await connection.send("budget", epoch_s=self.runtime.core.epoch_s)
            case "snapshot":
                await self._save(connection, Path(message["directory"]))
            case "finished":
                await connection.send("bye")
                self.finished.set()
            case kind:
                raise ProtocolError(f"unknown link message {kind!r}")

    def _begin_averaging(self, ready: dict[str, Any]) -> None:
        if self._averaging is not None:
            raise ProtocolError("ready again before it has collected the average of its last work")
        self._work = WorkInHand(
            self._tensors(),
            int(ready["fragment"]),
            tokens=int(ready["tokens"]),
            step=int(ready["step"]),
            last=bool(ready["last"]),
        )
        self._monitor.handed_over(self._work, ready)
        # A task of its own: the work counts even if the worker dies now.
        self._averaging = asyncio.ensure_future(self._average(self._work))
        # A worker that has died never asks for the result.
        self._averaging.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _average(self, work: WorkInHand) -> EpochOutcome:
        try:
            outcome = await self.runtime.average(work)
        except PeersError:
            # This ends the worker's life.
            self._monitor.show("joining")
            raise
        self._monitor.averaged(outcome)
        return outcome

    async def _collect(self, connection: DaemonConnection, message: dict[str, Any]) -> None:
        averaging, work = self._averaging, self._work
        if averaging is None or work is None:
            raise ProtocolError("nothing to collect")
        if message["kind"] == "collect":
            ends: list[asyncio.Future[Any]] = [averaging]
            if message.get("may_go_ahead"):
                ends.append(work.ahead)
            elif not averaging.done():
                self._monitor.waits()
            await self._answer(connection, asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED))
        if averaging.done():
            self._averaging = self._work = None
            await connection.send("committed", **asdict(averaging.result()))
        elif message["kind"] == "collect":
            self._monitor.goes_ahead()
            await connection.send("ahead", **asdict(work.ahead.result()))
        else:
            await connection.send("pending")

    async def _save(self, connection: DaemonConnection, directory: Path) -> None:
        """Begin to write the outer state. The worker is answered at once."""
        try:
            state = self.runtime.state
            if state is None:
                raise OSError("there is no outer state yet")
            residuals, is_base = self.runtime.averaging.residuals, self.runtime.is_workers_base
            await self._answer(connection, self._saving.begin(state, residuals, directory, is_base))
        except OSError as error:
            await connection.send("failed", reason=str(error))
        else:
            await connection.send("snapped")

    async def _report_written(self, connection: DaemonConnection, directory: Path) -> None:
        try:
            written = await self._answer(connection, self._saving.finish(directory))
        except OSError as error:
            await connection.send("failed", reason=str(error))
        else:
            files = {name: (record.num_bytes, record.digest) for name, record in written.files.items()}
            await connection.send("checkpointed", files=files, head=written.head)

    def _tensors(self) -> Memories:
        return Memories(
            tuple(floats_of(memory.out, memory.numel) for memory in self._memories),
            tuple(floats_of(memory.inn, memory.numel) for memory in self._memories),
        )

    async def _answer(self, connection: DaemonConnection, work: Awaitable[T]) -> T:
        """Await the work, and send `waiting` meanwhile. Raises LinkLost as soon as the worker is gone.

        Without delay: otherwise the worker's next life would count as this one, and write into memories that are still
        being averaged.
        """
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(connection.hung_up())
        try:
            while True:
                await asyncio.wait(
                    {task, gone}, timeout=WAITING_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
                if task.done():
                    return task.result()
                if gone.done():
                    raise LinkLost("the worker hung up before it was answered")
                await connection.send("waiting", reason=in_words(self._monitor.phase))
        finally:
            task.cancel()
            # `gone` watches the socket until it has ended, and the next receive needs the socket.
            await cancelled([gone])
