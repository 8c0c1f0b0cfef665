"""Downloads an outer state from those who hold it; the messages are those of peers/protocol/states.py.

Several donors deliver at once, and what one fails to deliver is asked of another. What a state that the joiner holds
already has in common with it (fragments that have not been averaged since) is not asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from msgspec.msgpack import Decoder
from torch import Tensor

from peers.errors import PeersError, PeerUnreachable, ProtocolError, StateUnavailable
from peers.net import socket_io
from peers.net.channel import Channel
from peers.net.streams import StreamTransport
from peers.protocol.certificates import Certificate
from peers.protocol.states import (
    MAX_MESSAGE_BYTES,
    State,
    Unavailable,
    Values,
    WantChunk,
    WantState,
    state_protocol,
)
from peers.state.header import DIGEST_BYTES, StateChunk, StateHeader, chunks_of
from peers.state.outer_state import OuterState, Snapshot, hash_chunk

log = logging.getLogger(__name__)

_OVERHEAD_S = 30.0
_SLOWEST_BYTES_PER_S = 2e6
"""A state that comes more slowly is no use."""
STALL_TIMEOUT_S = 15.0
COMMIT_TIMEOUT_S = 60.0
_PATIENCE_S = 5.0
"""What one part may take while other donors have nothing to do."""
_WINDOW = 2
_FLOAT_BYTES = 4
_NAMES: tuple[Values, ...] = ("anchor", "momentum")
_ANSWER: Decoder[State | Unavailable] = Decoder(State | Unavailable)

Progress = Callable[[int, int], None]
"""Called with the bytes received so far and the bytes there are to receive."""


def download_timeout_s(sizes: Sequence[int]) -> float:
    """What a joiner gives the download of a state with so many values in each fragment, anchor and momentum."""
    return _OVERHEAD_S + 2 * _FLOAT_BYTES * sum(sizes) / _SLOWEST_BYTES_PER_S


async def download_state(
    donors: Sequence[str],
    transport: StreamTransport,
    run_id: str,
    certificate: Certificate,
    sizes: Sequence[int],
    *,
    timeout_s: float,
    have: Snapshot | None = None,
    progress: Progress | None = None,
) -> OuterState:
    """The state of this commit from these peers, all at once. Every bit of it has been checked.

    `sizes` are the values in each of our fragments, `have` is a state of theirs that is here already. Raises
    StateUnavailable when no donor can hand it over, or not in time, with those who began to and broke off; repeating it
    is safe.
    """
    zeros = await asyncio.to_thread(_digests_of_zeros, sizes)
    download = _Download(certificate, tuple(sizes), zeros, have, progress)
    tasks = {
        donor: asyncio.create_task(download.run(donor, transport, state_protocol(run_id))) for donor in donors
    }
    try:
        async with asyncio.timeout(timeout_s):
            pending = set(tasks.values())
            # Whoever takes the last part ends then; donors that have nothing to say are not waited for.
            while pending and not download.is_complete:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        raise StateUnavailable(
            f"received {download.received_bytes} of {download.total_bytes} bytes in {timeout_s:g} s",
            download.suspects,
        ) from None
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    if not download.is_complete:
        reasons = "; ".join(f"{donor}: {task.result()}" for donor, task in tasks.items() if task.result())
        raise StateUnavailable(
            f"nobody hands over the state {certificate.head[:12]}: {reasons or 'no donors'}",
            download.suspects,
        )
    return download.state()


class _Part:
    """One chunk of anchor or momentum that is still wanted, and the memory it belongs to."""

    def __init__(self, values: Values, chunk: StateChunk, target: Tensor, digest: bytes) -> None:
        self.values, self.chunk, self.target, self.digest = values, chunk, target, digest


class _Download:
    """What has arrived, and what is still to be asked for. Shared by the tasks of all donors."""

    def __init__(
        self,
        certificate: Certificate,
        sizes: tuple[int, ...],
        zeros: Mapping[int, bytes],
        have: Snapshot | None,
        progress: Progress | None,
    ) -> None:
        self._certificate, self._sizes, self._zeros, self._progress = certificate, sizes, zeros, progress
        self._have = have
        self._header: StateHeader | None = None
        self._values = {name: [_untouched_zeros(size) for size in sizes] for name in _NAMES}
        self._wanted: deque[_Part] = deque()
        self._num_open = 0
        self._num_idle = 0
        self._beginning, self._changed = asyncio.Lock(), asyncio.Condition()
        self.received_bytes = 0
        self.total_bytes = 0
        self.suspects: set[str] = set()

    @property
    def is_complete(self) -> bool:
        return self._header is not None and not self._wanted and not self._num_open

    def state(self) -> OuterState:
        assert self._header is not None
        return OuterState(self._header, self._values["anchor"], self._values["momentum"])

    async def run(self, donor: str, transport: StreamTransport, protocol: str) -> str:
        """Take from this donor whatever is wanted until nothing is. Returns why it was given up, empty: not."""
        try:
            sock = await transport.open(donor, protocol, timeout_s=STALL_TIMEOUT_S)
            channel = Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES)
            try:
                await self._ask_for_state(channel, sock)
                await self._take_chunks(channel, sock)
            except StateUnavailable:
                # It has gone on, as it may.
                raise
            except (PeersError, OSError, TimeoutError):
                self.suspects.add(donor)
                raise
            finally:
                channel.close()
        except (PeersError, OSError, TimeoutError) as error:
            log.info("the state does not come from %s: %s", donor, error)
            return str(error) or type(error).__name__
        return ""

    async def _ask_for_state(self, channel: Channel, sock: socket.socket) -> None:
        await channel.send(WantState(head=self._certificate.head), STALL_TIMEOUT_S)
        answer = await channel.read(_ANSWER, COMMIT_TIMEOUT_S)
        if isinstance(answer, Unavailable):
            raise StateUnavailable(f"it holds the state {answer.head[:12]!r}")
        digests = bytearray(2 * DIGEST_BYTES * len(list(chunks_of(self._sizes))))
        await receive_all(sock, memoryview(digests))
        half = len(digests) // 2
        header = StateHeader(
            sizes=self._sizes, anchor_chunks=bytes(digests[:half]), momentum_chunks=bytes(digests[half:])
        ).certified_by(self._certificate)
        async with self._beginning:
            if self._header is None:
                self._wanted.extend(await asyncio.to_thread(self._parts_to_fetch, header))
                self.total_bytes = _FLOAT_BYTES * sum(part.chunk.numel for part in self._wanted)
                # The first good header says what every chunk must be.
                self._header = header

    def _parts_to_fetch(self, header: StateHeader) -> list[_Part]:
        """Chunks that are neither zero nor here already; the latter are put in place."""
        missing = []
        for name in _NAMES:
            digests = _digests_of(header, name)
            for chunk in chunks_of(self._sizes):
                digest = digests[chunk.position * DIGEST_BYTES :][:DIGEST_BYTES]
                part = _Part(
                    name, chunk, self._values[name][chunk.fragment][chunk.start : chunk.stop], digest
                )
                # The memory starts as zeros, and so does all momentum.
                if digest != self._zeros[chunk.numel] and not self._take_from_own(part):
                    missing.append(part)
        return missing

    def _take_from_own(self, part: _Part) -> bool:
        if self._have is None:
            return False
        chunk, own = part.chunk, getattr(self._have, part.values)
        if (
            _digests_of(self._have.header, part.values)[chunk.position * DIGEST_BYTES :][:DIGEST_BYTES]
            != part.digest
        ):
            return False
        part.target.copy_(own[chunk.fragment][chunk.start : chunk.stop])
        # What is held here may be what was wrong.
        return not _fault_of(part)

    async def _take_chunks(self, channel: Channel, sock: socket.socket) -> None:
        """Ask for a few parts ahead, so that the donor never waits for us."""
        asked: deque[_Part] = deque()
        try:
            while True:
                while len(asked) < _WINDOW and (part := await self._next_part(wait=not asked)) is not None:
                    asked.append(part)
                    request = WantChunk(values=part.values, position=part.chunk.position)
                    await channel.send(request, STALL_TIMEOUT_S)
                if not asked:
                    return
                await self._take(asked[0], sock)
                asked.popleft()
                async with self._changed:
                    self._num_open -= 1
                    self._changed.notify_all()
        finally:
            # Whatever this donor still owes, another one may deliver.
            self._wanted.extend(asked)
            self._num_open -= len(asked)
            if asked:
                await self._notify()

    async def _next_part(self, *, wait: bool) -> _Part | None:
        """A part that nobody has been asked for. None: there is none now, or (after waiting) never again."""
        async with self._changed:
            while wait and not self._wanted and self._num_open:
                self._num_idle += 1
                try:
                    await self._changed.wait()
                finally:
                    self._num_idle -= 1
            if not self._wanted:
                return None
            self._num_open += 1
            return self._wanted.popleft()

    async def _take(self, part: _Part, sock: socket.socket) -> None:
        await self._receive_part(part, sock)
        if fault := await asyncio.to_thread(_fault_of, part):
            raise ProtocolError(f"{part.values} chunk {part.chunk.position} {fault}")
        self.received_bytes += _FLOAT_BYTES * part.chunk.numel
        if self._progress is not None:
            self._progress(self.received_bytes, self.total_bytes)

    async def _receive_part(self, part: _Part, sock: socket.socket) -> None:
        """Raises PeerUnreachable where it takes long and other donors have nothing to do, TimeoutError for silence."""
        view, done = bytes_of(part.target), 0
        begun = moved_at = time.monotonic()
        while done < len(view):
            received = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    received = await socket_io.receive_into(sock, view[done:])
            now = time.monotonic()
            if received == 0:
                raise PeerUnreachable("the peer closed the stream")
            if received:
                done, moved_at = done + received, now
            elif now - moved_at > STALL_TIMEOUT_S:
                raise TimeoutError("it sends nothing")
            if done < len(view) and self._num_idle and now - begun > _PATIENCE_S:
                raise PeerUnreachable("others may be quicker")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _untouched_zeros(numel: int) -> Tensor:
    """As torch.zeros, which takes seconds for a gigabyte: here the pages come when something is received into them."""
    return torch.from_numpy(np.zeros(numel, np.float32))


def _digests_of(header: StateHeader, name: str) -> bytes:
    return header.anchor_chunks if name == "anchor" else header.momentum_chunks


def _digests_of_zeros(sizes: Sequence[int]) -> dict[int, bytes]:
    """By number of values. Takes long, so belongs in a thread."""
    return {numel: hash_chunk(torch.zeros(numel)) for numel in {chunk.numel for chunk in chunks_of(sizes)}}


def _fault_of(part: _Part) -> str:
    """What is wrong with the values that have come; empty: nothing."""
    if hash_chunk(part.target) != part.digest:
        return "has other bytes than announced"
    return "" if bool(torch.isfinite(part.target).all()) else "is not finite"


def bytes_of(values: Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data


async def send_all(sock: socket.socket, view: memoryview) -> None:
    """Raises TimeoutError when a megabyte does not leave in time."""
    for start in range(0, len(view), 1 << 20):
        async with asyncio.timeout(STALL_TIMEOUT_S):
            await socket_io.send_all(sock, view[start : start + (1 << 20)])


async def receive_all(sock: socket.socket, view: memoryview) -> None:
    """Raises TimeoutError when no byte comes in time."""
    done = 0
    while done < len(view):
        async with asyncio.timeout(STALL_TIMEOUT_S):
            received = await socket_io.receive_into(sock, view[done:])
        if not received:
            raise PeerUnreachable("the peer closed the stream")
        done += received
