"""The daemon's side of one life of the worker command: its memories, its start, and an answer to every `ready`.

A worker may die at any moment. Its memories belong to the session, so what it had handed over is still averaged. The
worker's next life gets memories of its own, and starts from the state that the daemon holds by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
from collections.abc import Awaitable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from peers.daemon.averaging import WorkInHand
from peers.daemon.host import WorkerHost
from peers.daemon.link import WAITING_INTERVAL_S, Accept, DaemonConnection, LinkMemory
from peers.errors import LinkLost, PeersError, ProtocolError, UserError
from peers.monitor.phases import in_words
from peers.state.handover import EpochOutcome, Memories
from peers.state.layout import Layout
from peers.tasks import cancelled
from peers.timing import START_S

log = logging.getLogger(__name__)

T = TypeVar("T")

_NEWS = ("doing", "evaluated", "trouble")


class WorkerSession:
    """Serves all local ranks of one life of the worker."""

    def __init__(self, host: WorkerHost) -> None:
        self._host, self._monitor = host, host.monitor
        self._layout: Layout | None = None
        self._memories: list[LinkMemory] = []
        self._descriptors: list[int] = []
        self._work: WorkInHand | None = None
        self._averaging: asyncio.Future[EpochOutcome] | None = None
        """What will become of the work in hand."""
        self._started: DaemonConnection | None = None
        """The connection of rank 0, once it has asked where to start."""

    async def serve(self, connection: DaemonConnection) -> None:
        """Serve one local rank until it hangs up. The worker has ended when rank 0 hangs up."""
        try:
            hello = await asyncio.wait_for(connection.receive(), START_S)
            if hello["kind"] == "adopt":
                manifest = await self._answer(connection, self._host.manifest())
                await connection.send(
                    "manifest", manifest=dict(manifest), world_rank=self._host.runtime.core.world_rank
                )
                hello = await asyncio.wait_for(connection.receive(), START_S)
            if hello["kind"] == "written":
                await self._report_written(connection, Path(hello["directory"]))
                return
            if hello["kind"] == "policy":
                await self._host.rollouts.serve_trainer(connection, hello, partial(self._answer, connection))
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
            self._host.refused.set()
        except LinkLost:
            log.debug("local rank hung up")
        except (TimeoutError, ProtocolError) as error:
            log.error("hung up on a worker: %s", error or "it said nothing")
        except PeersError as error:
            # The worker's work cannot be averaged. It tells its user; its next life may succeed.
            log.error("hung up on a worker: %s", error)
            self._monitor.is_in_trouble("worker", str(error))
            with contextlib.suppress(LinkLost):
                await connection.send("failed_for_good", message=str(error))
        finally:
            connection.close()
            if connection is self._started:
                self._host.worker_lost()

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

    def close(self) -> None:
        """Close the descriptors. Memory that is still averaged from stays mapped until that ends."""
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()

    async def _welcome(self, connection: DaemonConnection, hello: dict[str, Any]) -> None:
        layout = Layout.from_message(hello["layout"])
        await self._answer(connection, self._host.admit(layout))
        if self._layout is None:
            self._layout = layout
            for index, numel in enumerate(layout.sizes):
                memory, descriptors = LinkMemory.create(index, numel)
                self._memories.append(memory)
                self._descriptors += descriptors
        elif self._layout.digest != layout.digest:
            raise UserError(
                "the local ranks of this peer built different models; start them with the same flags"
            )
        await connection.welcome(
            self._descriptors, run_id=self._host.run_id, world_rank=self._host.runtime.core.world_rank
        )

    async def _handle(self, connection: DaemonConnection, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "offer":
                self._started = connection
                start = await self._answer(connection, self._host.start(self._tensors(), message))
                await connection.send("start", **asdict(start))
            case "ready":
                self._begin_averaging(message)
            case "collect" | "poll":
                await self._collect(connection, message)
            case "progress":
                self._host.progressed(message)
            case "checkpoint" | "snapshot":
                await self._save(
                    connection, Path(message["directory"]), waits=message["kind"] == "checkpoint"
                )
            case "finished":
                await connection.send("bye")
                self._host.finished.set()
            case kind:
                raise ProtocolError(f"unknown link message {kind!r}")

    def _begin_averaging(self, ready: dict[str, Any]) -> None:
        if self._averaging is not None:
            raise ProtocolError("ready again before it has collected what it was ready for")
        self._work = WorkInHand(
            self._tensors(),
            int(ready["fragment"]),
            tokens=int(ready["tokens"]),
            step=int(ready["step"]),
            last=bool(ready["last"]),
            ahead=asyncio.get_running_loop().create_future(),
        )
        self._monitor.handed_over(self._work, ready)
        # A task of its own: the work counts even if the worker dies now.
        self._averaging = asyncio.ensure_future(self._average(self._work))
        # A worker that has died never asks for the result.
        self._averaging.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _average(self, work: WorkInHand) -> EpochOutcome:
        try:
            outcome = await self._host.runtime.average(work)
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

    async def _save(self, connection: DaemonConnection, directory: Path, *, waits: bool) -> None:
        """Begin to write the outer state, and answer the worker then or, if it waits, when it is written."""
        try:
            await self._answer(connection, self._host.snapshot(directory))
        except OSError as error:
            await connection.send("failed", reason=str(error))
        else:
            await (self._report_written(connection, directory) if waits else connection.send("snapped"))

    async def _report_written(self, connection: DaemonConnection, directory: Path) -> None:
        try:
            written = await self._answer(connection, self._host.saving.finish(directory))
        except OSError as error:
            await connection.send("failed", reason=str(error))
        else:
            files = {name: (record.num_bytes, record.digest) for name, record in written.files.items()}
            await connection.send("checkpointed", files=files, head=written.head)

    def _tensors(self) -> Memories:
        return Memories(
            tuple(_floats(memory.out, memory.numel) for memory in self._memories),
            tuple(_floats(memory.inn, memory.numel) for memory in self._memories),
        )

    async def _answer(self, connection: DaemonConnection, work: Awaitable[T]) -> T:
        """Await the work, and send `waiting` meanwhile. Raises LinkLost as soon as the worker is gone.

        Without delay: otherwise the worker's next life would be served by this session, and write into memories that
        are still averaged from.
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
            # It watches the socket until it has ended, and the next receive needs the socket.
            await cancelled([gone])


def _floats(memory: mmap.mmap, numel: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.float32, count=numel) if numel else torch.empty(0)


async def serve_workers(accept: Accept, host: WorkerHost) -> None:
    """Serve one life of the worker after the other, for ever: a connection while none is open begins the next life."""
    session: WorkerSession | None = None
    serving: set[asyncio.Task[None]] = set()
    try:
        while True:
            connection = await accept()
            serving = {task for task in serving if not task.done()}
            if session is None or not serving:
                if session is not None:
                    session.close()
                session = WorkerSession(host)
            serving.add(asyncio.create_task(session.serve(connection)))
    finally:
        await cancelled(serving)
        if session is not None:
            session.close()
