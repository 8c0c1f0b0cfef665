"""The daemon's side of one life of the worker command: memories, the start, and an answer to every `ready`.

A worker may die at any moment. Its memories belong to the session, so what it had handed over is still averaged; the
next life gets memories of its own and starts from the state the daemon holds by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
from collections.abc import Awaitable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from peers.daemon.link import WAITING_INTERVAL_S, Accept, DaemonConnection, LinkMemory
from peers.errors import LinkLost, PeersError, ProtocolError, UserError
from peers.state.handover import Ahead, EpochOutcome, Memories, Start
from peers.state.layout import Layout
from peers.state.saving import Written
from peers.timing import START_S

log = logging.getLogger(__name__)

T = TypeVar("T")

_NEWS = ("doing", "evaluated", "trouble")


class Host(Protocol):
    """What a session asks of the daemon."""

    run_id: str

    @property
    def world_rank(self) -> int: ...

    @property
    def waits_for(self) -> str:
        """What it does meanwhile, in words."""

    async def manifest(self) -> Mapping[str, Any]:
        """What the swarm has agreed on, as soon as it has. Raises UserError where this peer cannot join."""

    async def admit(self, layout: Layout) -> None:
        """Raises UserError where this model is not the swarm's."""

    async def start(self, memories: Memories, offer: dict[str, Any]) -> Start: ...

    async def average(
        self, memories: Memories, ready: dict[str, Any], ahead: asyncio.Future[Ahead]
    ) -> EpochOutcome:
        """`ahead` gets its result where that takes long, and the worker is to train on meanwhile."""

    async def snapshot(self, directory: Path) -> None:
        """Begin to write the outer state as it is now. Raises OSError."""

    async def written(self, directory: Path) -> Written:
        """What came of it, once that is known. Raises OSError."""

    def progressed(self, progress: dict[str, Any]) -> None: ...

    def doing(self, message: Mapping[str, Any] | None) -> None: ...

    def evaluated(self, message: Mapping[str, Any]) -> None: ...

    def is_in_trouble(self, what: str, text: str) -> None: ...

    def finished(self) -> None: ...

    def refused(self) -> None:
        """A worker has been told what its user must mend."""

    def worker_lost(self) -> None:
        """The worker has hung up: nothing is trained until the next one has started."""


class WorkerSession:
    """All local ranks of one life of the worker."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._layout: Layout | None = None
        self._memories: list[LinkMemory] = []
        self._descriptors: list[int] = []
        self._averaging: asyncio.Future[EpochOutcome] | None = None
        self._ahead: asyncio.Future[Ahead] = asyncio.get_running_loop().create_future()
        self._started: DaemonConnection | None = None
        """Rank 0's, once it has asked where to start."""

    async def serve(self, connection: DaemonConnection) -> None:
        """Serve one local rank until it hangs up; only rank 0's end is an event of its own."""
        try:
            hello = await asyncio.wait_for(connection.receive(), START_S)
            if hello["kind"] == "adopt":
                manifest = await self._answer(connection, self._host.manifest())
                await connection.send("manifest", manifest=dict(manifest), world_rank=self._host.world_rank)
                hello = await asyncio.wait_for(connection.receive(), START_S)
            if hello["kind"] == "written":
                await self._report_written(connection, Path(hello["directory"]))
                return
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
            self._host.refused()
        except LinkLost:
            log.debug("local rank hung up")
        except (TimeoutError, ProtocolError) as error:
            log.error("hung up on a worker: %s", error or "it said nothing")
        except PeersError as error:
            # What it handed over cannot be averaged. It tells its user; its next life may do better.
            log.error("hung up on a worker: %s", error)
            self._host.is_in_trouble("worker", str(error))
            with contextlib.suppress(LinkLost):
                await connection.send("failed_for_good", message=str(error))
        finally:
            connection.close()
            if connection is self._started:
                self._host.worker_lost()

    async def _hear(self, connection: DaemonConnection, message: dict[str, Any]) -> None:
        """A connection on which the worker only tells. Raises LinkLost at its end."""
        try:
            while True:
                match message["kind"]:
                    case "doing":
                        self._host.doing(message)
                    case "evaluated":
                        self._host.evaluated(message)
                    case "trouble":
                        self._host.is_in_trouble(str(message["what"]), str(message["text"]))
                    case kind:
                        raise ProtocolError(f"unknown news {kind!r}")
                message = await connection.receive()
        finally:
            self._host.doing(None)

    def close(self) -> None:
        """Give the descriptors back; memory that is still averaged from stays mapped until that ends."""
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
            self._descriptors, run_id=self._host.run_id, world_rank=self._host.world_rank
        )

    async def _handle(self, connection: DaemonConnection, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "offer":
                self._started = connection
                start = await self._answer(connection, self._host.start(self._tensors(), message))
                await connection.send("start", **asdict(start))
            case "ready":
                self._begin_averaging(message)
            case "collect":
                await self._collect(connection, may_go_ahead=bool(message.get("may_go_ahead")))
            case "poll":
                await self._poll(connection)
            case "progress":
                self._host.progressed(message)
            case "checkpoint":
                if await self._snapshot(connection, Path(message["directory"])):
                    await self._report_written(connection, Path(message["directory"]))
            case "snapshot":
                if await self._snapshot(connection, Path(message["directory"])):
                    await connection.send("snapped")
            case "finished":
                await connection.send("bye")
                self._host.finished()
            case kind:
                raise ProtocolError(f"unknown link message {kind!r}")

    def _begin_averaging(self, ready: dict[str, Any]) -> None:
        if self._averaging is not None:
            raise ProtocolError("ready again before it has collected what it was ready for")
        # Not tied to this worker's life: what it handed over counts even if it dies now.
        self._ahead = asyncio.get_running_loop().create_future()
        self._averaging = asyncio.ensure_future(self._host.average(self._tensors(), ready, self._ahead))
        # A worker that died never asks what became of it.
        self._averaging.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _collect(self, connection: DaemonConnection, *, may_go_ahead: bool) -> None:
        if self._averaging is None:
            raise ProtocolError("nothing to collect")
        waits_for: set[asyncio.Future[Any]] = (
            {self._averaging, self._ahead} if may_go_ahead else {self._averaging}
        )
        await self._answer(connection, asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED))
        if self._averaging.done():
            await self._tell_outcome(connection, self._averaging)
        else:
            await connection.send("ahead", **asdict(self._ahead.result()))

    async def _poll(self, connection: DaemonConnection) -> None:
        if self._averaging is None:
            raise ProtocolError("nothing to collect")
        if self._averaging.done():
            await self._tell_outcome(connection, self._averaging)
        else:
            await connection.send("pending")

    async def _tell_outcome(
        self, connection: DaemonConnection, averaging: asyncio.Future[EpochOutcome]
    ) -> None:
        self._averaging = None
        await connection.send("committed", **asdict(averaging.result()))

    async def _snapshot(self, connection: DaemonConnection, directory: Path) -> bool:
        """Begin to write the outer state; tells the worker where that cannot be, and returns whether it can."""
        try:
            await self._answer(connection, self._host.snapshot(directory))
        except OSError as error:
            await connection.send("failed", reason=str(error))
            return False
        return True

    async def _report_written(self, connection: DaemonConnection, directory: Path) -> None:
        try:
            written = await self._answer(connection, self._host.written(directory))
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
        """Await the work, telling the worker all the while that somebody is there. Raises LinkLost once it is gone.

        At once, that is: the next life must not be taken for this one's, whose memories are still averaged from.
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
                await connection.send("waiting", reason=self._host.waits_for)
        finally:
            task.cancel()
            gone.cancel()
            # It watches the socket until then, which the next receive needs for itself.
            await asyncio.gather(gone, return_exceptions=True)


def _floats(memory: mmap.mmap, numel: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.float32, count=numel) if numel else torch.empty(0)


async def serve_workers(accept: Accept, host: Host) -> None:
    """Sessions one after the other, for ever: a hello by local rank 0 begins the next life."""
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
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        if session is not None:
            session.close()
