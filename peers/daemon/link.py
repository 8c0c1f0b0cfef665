"""Both ends of the link between a daemon and its workers: a Unix socket, and two shared memories per fragment.

Every local rank sends `hello` and receives the descriptors of the memories (by SCM_RIGHTS). After that only local rank
0 talks. It speaks for all ranks of the peer, which agree among themselves first.

    worker                                   daemon
    adopt {}                            ->   (asks what the swarm has agreed on)
                                        <-   manifest {manifest, world_rank, needs_offer, run_is_alive}
    hello {layout, local_rank}          ->
                                        <-   welcome {world_rank} + 2 file descriptors a fragment
    offer {resume, is_own, local_step}  ->   (*out* holds the worker's initial weights)
                                        <-   start {world_rank, epoch, ...}       (*in* holds the weights to start from)
    ready {fragment, epoch, tokens, ..} ->   (*out* holds the fragment; the worker leaves it alone until the answer)
    progress {step, loss, ...}          ->   (at any time)
    budget {}                           ->   (after each step of an epoch whose length was not known at its beginning)
                                        <-   budget {epoch_s}
    collect {may_go_ahead}              ->   (at once, or after the worker has trained some steps meanwhile)
                                        <-   committed {...}   (*in* is the worker's)
                                          |  ahead {epoch, data_base}   (the commit is awaited: go on training)
    poll {}                             ->   (after each step of a worker that has gone ahead)
                                        <-   committed {...} | pending {}
    snapshot {directory}                ->   (begin to write the outer state; training continues meanwhile)
                                        <-   snapped {} | failed {reason}
    written {directory}                 ->   (on a connection of its own, without a hello: asks for the snapshot's end)
                                        <-   checkpointed {files, head} | failed {reason}
    doing {name, detail, done, ...}     ->   (on a connection of its own, without a hello: its work beside its steps)
    evaluated {step, loss}              ->   (on the same connection, as is the next)
    trouble {what, text}                ->   (what is wrong; an empty text says that it no longer is)
    policy {digest, files, terms, ...}  ->   (on a connection of its own, without a hello: the newest weights)
    take {count, timeout_s}             ->   (on the same connection)
                                        <-   rollouts {num_rollouts, num_uniform, senders, is_alone}
                                        <-   rollout {peer_id, example, staleness, completions}   (so many, or none)
    finished {}                         ->
                                        <-   bye {}

After `committed`, *in* holds the weights from which the worker continues: the new anchor, or its own work where no
commit contains it. `committed` also lists the other fragments whose anchor has moved, because this peer had missed
commits: their *in* holds what to add to the weights.

While a worker waits, the daemon sends `waiting {reason}` once a second with what it is doing, so silence means that the
daemon is dead. `refused {message}` may answer any message, and says what the user must correct. So may `failed_for_good
{message}`, which says why this life of the worker is over. Frames are msgpack behind a 4-byte length.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from peers.errors import LinkLost, PeersError, ProtocolError, UserError
from peers.net.socket_io import accept_next
from peers.protocol.codecs import FLOAT_BYTES
from peers.state.layout import Layout
from peers.system import anonymous_file
from peers.timing import COMMIT_S, OFTEN_S, RETRY_S, START_S

LINK_ENV = "DILOCO_LINK"
"""The environment variable that names the link's socket to the worker."""

SILENCE_TIMEOUT_S = COMMIT_S
"""After this long without any message, a waiting worker takes its daemon for dead."""

WAITING_INTERVAL_S = OFTEN_S
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 1 << 30
"""Large, since both ends belong to one user, and a rollout peer's generator sends the completions of a whole batch."""
_PIECE_BYTES = 1 << 20
# The kernel passes at most 253 descriptors in one message.
_MAX_DESCRIPTORS = 250


class LinkMemory:
    """*out* and *in* of one fragment, as byte buffers of `numel` fp32 values each."""

    def __init__(self, descriptors: Sequence[int], numel: int) -> None:
        self.numel = numel
        # mmap refuses length 0; an empty fragment still needs a buffer to point at.
        self.out, self.inn = (mmap.mmap(fd, max(numel * FLOAT_BYTES, 1)) for fd in descriptors)

    @staticmethod
    def create(index: int, numel: int) -> tuple[LinkMemory, list[int]]:
        """New zeroed memories and their descriptors, which the caller closes."""
        descriptors = []
        for name in ("out", "in"):
            fd = anonymous_file(f"diloco-{name}-{index}")
            os.ftruncate(fd, max(numel * FLOAT_BYTES, 1))
            descriptors.append(fd)
        return LinkMemory(descriptors, numel), descriptors


def _pack(kind: str, fields: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode({"kind": kind, **fields})
    return _LENGTH.pack(len(body)) + body


def _unpack(body: bytes) -> dict[str, Any]:
    message = msgspec.msgpack.decode(body)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("a link message is a map with a kind")
    return message


class WorkerLink:
    """The worker's end. Blocking; used from one thread of one local rank."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.memories: list[LinkMemory] = []
        self.on_waiting: Callable[[str], None] = lambda _reason: None
        """Called with what the daemon is doing, while this waits for an answer."""

    @classmethod
    def connect(
        cls,
        path: str | Path,
        *,
        timeout_s: float = START_S,
        silence_s: float | None = SILENCE_TIMEOUT_S,
    ) -> WorkerLink:
        """Connect to the daemon's socket, waiting for it to appear. Raises LinkLost.

        A daemon that is silent for `silence_s` counts as dead; None: only one that hangs up.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(path))
                sock.settimeout(silence_s)
                return cls(sock)
            except OSError as error:
                sock.close()
                if time.monotonic() > deadline:
                    raise LinkLost(f"no daemon answers at {path}: {error}") from error
                time.sleep(RETRY_S / 5)

    def hello(self, layout: Layout, *, local_rank: int) -> dict[str, Any]:
        """Introduce this rank and map the shared memories. Returns the `welcome` message."""
        self.send("hello", layout=layout, local_rank=local_rank)
        sizes = layout.sizes
        descriptors: list[int] = []
        welcome = self._receive(descriptors)
        if welcome["kind"] != "welcome":
            raise ProtocolError(f"expected a welcome, got {welcome['kind']}")
        while len(descriptors) < 2 * len(sizes):
            self._receive(descriptors)
        for index, numel in enumerate(sizes):
            self.memories.append(LinkMemory(descriptors[2 * index : 2 * index + 2], numel))
        for fd in descriptors:
            os.close(fd)
        return welcome

    def send(self, kind: str, **fields: Any) -> None:
        """One message to the daemon. Raises LinkLost when it is gone."""
        try:
            self._sock.sendall(_pack(kind, fields))
        except OSError as error:
            raise LinkLost(f"the daemon is gone: {error}") from error

    def receive(self, *kinds: str) -> dict[str, Any]:
        """The next message that is not `waiting`; it must be of one of these kinds.

        Raises UserError for `refused`, PeersError for `failed_for_good`, LinkLost when the daemon closes or is
        silent for too long (`connect`).
        """
        while True:
            message = self._receive([])
            if message["kind"] in kinds:
                return message
            if message["kind"] != "waiting":
                raise ProtocolError(f"expected {' or '.join(kinds)}, got {message['kind']}")
            self.on_waiting(str(message["reason"]))

    def close(self) -> None:
        self._sock.close()

    def _receive(self, descriptors: list[int]) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, descriptors))
        if length > _MAX_FRAME_BYTES:
            raise ProtocolError(f"a link message of {length} bytes")
        message = _unpack(self._read(length, descriptors))
        if message["kind"] == "refused":
            raise UserError(message["message"])
        if message["kind"] == "failed_for_good":
            raise PeersError(message["message"])
        return message

    def _read(self, length: int, descriptors: list[int]) -> bytes:
        body = bytearray()
        while len(body) < length:
            try:
                piece, fds, _flags, _address = socket.recv_fds(
                    self._sock, min(length - len(body), _PIECE_BYTES), _MAX_DESCRIPTORS
                )
            except OSError as error:
                raise LinkLost(f"the daemon is gone or silent: {error}") from error
            if not piece:
                raise LinkLost("the daemon closed the link")
            descriptors.extend(fds)
            body += piece
        return bytes(body)


class DaemonConnection:
    """The daemon's end of one local rank's connection. Used from the event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def receive(self) -> dict[str, Any]:
        """The next message. Raises LinkLost when the worker is gone."""
        (length,) = _LENGTH.unpack(await self._read(_LENGTH.size))
        if length > _MAX_FRAME_BYTES:
            raise ProtocolError(f"a link message of {length} bytes")
        return _unpack(await self._read(length))

    async def send(self, kind: str, **fields: Any) -> None:
        try:
            await self._loop.sock_sendall(self._sock, _pack(kind, fields))
        except OSError as error:
            raise LinkLost(f"the worker is gone: {error}") from error

    async def hung_up(self) -> None:
        """Return when the worker is gone. Only for use while the worker waits for an answer, and so sends nothing."""
        readable = asyncio.Event()
        self._loop.add_reader(self._sock, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(self._sock)
        with contextlib.suppress(OSError):
            if self._sock.recv(1, socket.MSG_PEEK):
                await self._loop.create_future()

    async def welcome(self, descriptors: Sequence[int], **fields: Any) -> None:
        """Send the descriptors. The frames are small enough for the empty socket buffer, so this does not block."""
        frames = [_pack("welcome", fields)]
        batches = [
            descriptors[i : i + _MAX_DESCRIPTORS] for i in range(0, len(descriptors), _MAX_DESCRIPTORS)
        ]
        frames += [_pack("descriptors", {}) for _ in batches[1:]]
        try:
            for frame, batch in zip(frames, batches, strict=True):
                socket.send_fds(self._sock, [frame], list(batch))
        except OSError as error:
            raise LinkLost(f"the worker is gone: {error}") from error

    def close(self) -> None:
        self._sock.close()

    async def _read(self, length: int) -> bytes:
        body = bytearray()
        while len(body) < length:
            try:
                piece = await self._loop.sock_recv(self._sock, min(length - len(body), _PIECE_BYTES))
            except OSError as error:
                raise LinkLost(f"the worker is gone: {error}") from error
            if not piece:
                raise LinkLost("the worker closed the link")
            body += piece
        return bytes(body)


Accept = Callable[[], Awaitable[DaemonConnection]]


async def refuse(accept: Accept, error: PeersError) -> None:
    """Tell the next worker that connects why this peer cannot join."""
    kind = "refused" if isinstance(error, UserError) else "failed_for_good"
    with contextlib.suppress(TimeoutError, LinkLost):
        async with asyncio.timeout(START_S):
            connection = await accept()
            await connection.receive()
            await connection.send(kind, message=str(error))
            connection.close()


@contextlib.asynccontextmanager
async def listen(path: Path) -> AsyncIterator[Accept]:
    """Listen on `path` (owner only) and yield a coroutine function that accepts one DaemonConnection."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(256)
        listener.setblocking(False)

        async def accept() -> DaemonConnection:
            sock, _ = await accept_next(listener, "a worker")
            return DaemonConnection(sock)

        yield accept
    finally:
        listener.close()
        path.unlink(missing_ok=True)
