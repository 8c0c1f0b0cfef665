"""Streams for the reduction's bytes, kept open across rounds: a new one costs round trips.

Every peer sends on the streams it has opened and receives on those opened to it. At the start of a round the sender
names the attempt on each outgoing stream; the other side reads that name from the idle stream and hands the stream to
whoever awaits the attempt. After a clean round the streams are idle again; after a failed one they are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from peers.errors import PeersError, RoundFailed
from peers.net import socket_io
from peers.reduce.frames import HEADER, NOBODY, Kind, is_silent, slice_s
from peers.reduce.plan import ATTEMPT_BYTES

log = logging.getLogger(__name__)

MAX_IDLE_PER_PEER = 2
"""Incoming streams per peer that wait for a round; the oldest gives way."""
MAX_IDLE_PEERS = 256
"""Peers that such streams are kept of. Who takes part in rounds comes last: strangers who only sit there give way."""
UNCLAIMED_S = 60.0
"""How long a stream that names an attempt waits for somebody here to take part in it."""
_NAME_TIMEOUT_S = 10.0
_AHEAD_TIMEOUT_S = 10.0
_DETOUR_S = 1.0
"""Streams that are on their way have so long to come, by whatever detour, before a member's silence ends an attempt:
the two ends of a link that has fallen silent notice it up to a heartbeat apart, the later one in the next attempt."""
_MUCH_OF_IT = 0.1
"""Of the time for streams: so shortly before its end who has not come counts as silent."""


class StreamTransport(Protocol):
    """The part of peers/net/paths/paths.py that is needed here."""

    async def open(self, peer_id: str, protocol: str, *, timeout_s: float) -> socket.socket: ...

    async def serve(
        self, protocol: str, handler: Callable[[str, socket.socket], Awaitable[None]]
    ) -> None: ...


class PathChoice(Protocol):
    """The part of peers/net/paths/paths.py that is needed here: which way the streams go, and how well."""

    async def improved(self, peer_id: str, current: socket.socket) -> socket.socket | None: ...

    def used(
        self, peer_id: str, stream: socket.socket, num_bytes: float, seconds: float, group: frozenset[str]
    ) -> None: ...

    def failed(self, peer_id: str, stream: socket.socket) -> None: ...

    def missed(self, peer_id: str) -> None: ...

    def doubts(self, peer_id: str, stream: socket.socket) -> bool: ...


@dataclass(frozen=True)
class RoundStreams:
    """The streams of one attempt by world rank: blocking sockets, for threads."""

    peer_ids: Mapping[int, str]
    send: Mapping[int, socket.socket]
    receive: Mapping[int, socket.socket]


class StreamPool:
    """Used from one event loop; the sockets it hands out are blocking, for threads.

    With a `choice`, a kept stream gives way between rounds to one on a better path.
    """

    def __init__(self, transport: StreamTransport, protocol: str, choice: PathChoice | None = None) -> None:
        self._transport, self._protocol, self._choice = transport, protocol, choice
        self._outgoing: dict[str, socket.socket] = {}
        self._better: dict[str, socket.socket] = {}
        self._improving: dict[str, asyncio.Task[None]] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._idle: defaultdict[str, dict[socket.socket, asyncio.Task[bytes]]] = defaultdict(dict)
        self._named: dict[tuple[bytes, str], socket.socket] = {}
        self._awaited: dict[tuple[bytes, str], asyncio.Future[socket.socket]] = {}
        self._expiries: set[asyncio.TimerHandle] = set()

    async def start(self) -> None:
        """Accept streams from now on."""
        await self._transport.serve(self._protocol, self._accepted)

    def open_ahead(self, peer_id: str) -> None:
        """This peer is likely to be in the next round: have a stream to it by then. Nothing if there is one."""

        async def open_one() -> None:
            try:
                sock = await self._transport.open(peer_id, self._protocol, timeout_s=_AHEAD_TIMEOUT_S)
            except PeersError as error:
                log.debug("no stream to %s ahead of a round: %s", peer_id, error)
                return
            if peer_id in self._outgoing:
                sock.close()
            else:
                self._outgoing[peer_id] = sock

        if not any(peer_id in kept for kept in (self._outgoing, self._better, self._opening)):
            task = self._opening[peer_id] = asyncio.create_task(open_one())
            task.add_done_callback(lambda _: self._opening.pop(peer_id, None))

    async def connect(
        self,
        attempt: bytes,
        peer_ids: Mapping[int, str],
        *,
        timeout_s: float,
        prompt_s: float = math.inf,
        cancelled: threading.Event | None = None,
        quiet: Callable[[], Collection[int]] = frozenset,
    ) -> RoundStreams:
        """One outgoing and one incoming stream with each of these peers (by world rank), for this attempt.

        Raises RoundFailed: at once with the peers that cannot be reached, within `prompt_s` with those that have a
        stream to this one and do not name the attempt on it, else in time with those that did not come, with any of
        them that becomes `quiet` meanwhile, or soon after `cancelled`. The streams with the others are then closed,
        with a word of farewell.
        """
        prompt = {rank: peer for rank, peer in peer_ids.items() if self._idle.get(peer)}
        outgoing: dict[int, asyncio.Future[socket.socket]] = {
            rank: asyncio.create_task(self._name_outgoing(attempt, peer, timeout_s))
            for rank, peer in peer_ids.items()
        }
        incoming = {rank: self._await_incoming(attempt, peer) for rank, peer in peer_ids.items()}
        try:
            await self._gather(outgoing, incoming, timeout_s, (prompt, prompt_s), cancelled, quiet)
        except BaseException as error:
            if isinstance(error, RoundFailed):
                self._miss(peer_ids, error.silent)
            await _give_up([*outgoing.values()], farewell=HEADER.pack(Kind.ABORT, NOBODY, 0))
            await _give_up([*incoming.values()])
            raise
        finally:
            for peer in peer_ids.values():
                self._awaited.pop((attempt, peer), None)
        streams = RoundStreams(
            peer_ids,
            {rank: future.result() for rank, future in outgoing.items()},
            {rank: future.result() for rank, future in incoming.items()},
        )
        for sock in (*streams.send.values(), *streams.receive.values()):
            sock.setblocking(True)
        return streams

    def give_back(self, streams: RoundStreams, *, sent_bytes: int = 0, seconds: float = 0.0) -> None:
        """Keep the streams of a clean round, which sent so many bytes on all of them in so long, for the next one."""
        group = frozenset(streams.peer_ids.values())
        for rank, peer in streams.peer_ids.items():
            outgoing, incoming = streams.send[rank], streams.receive[rank]
            outgoing.setblocking(False)
            incoming.setblocking(False)
            if (other := self._outgoing.pop(peer, None)) is not None:
                other.close()
            self._outgoing[peer] = outgoing
            self._watch(peer, incoming)
            if self._choice is not None:
                self._choice.used(peer, outgoing, sent_bytes / len(streams.peer_ids), seconds, group)
                self._improve(self._choice, peer, outgoing)

    def discard(
        self, streams: RoundStreams, suspects: Iterable[int] = (), silent: Iterable[int] = ()
    ) -> None:
        """Close the streams of a failed round: what is still in them belongs to no other.

        Those with the suspects, as this peer has seen it itself, may have failed by their path: another one is taken
        next. From the silent ones nothing had come.
        """
        self._miss(streams.peer_ids, silent)
        if self._choice is not None:
            for rank in set(suspects) & streams.send.keys():
                self._choice.failed(streams.peer_ids[rank], streams.send[rank])
        for sock in (*streams.send.values(), *streams.receive.values()):
            sock.close()

    def _miss(self, peer_ids: Mapping[int, str], silent: Iterable[int]) -> None:
        if self._choice is not None:
            for rank in silent:
                self._choice.missed(peer_ids[rank])

    def drop(self, peer_id: str) -> None:
        """Close every idle stream with a peer that is lost."""
        for kept in (self._outgoing, self._better):
            if (outgoing := kept.pop(peer_id, None)) is not None:
                outgoing.close()
        for under_way in (self._improving, self._opening):
            if (task := under_way.get(peer_id)) is not None:
                task.cancel()
        for reading in self._idle.pop(peer_id, {}).values():
            reading.cancel()

    async def close(self) -> None:
        """Close every stream that is not in a round."""
        tasks: list[asyncio.Task[Any]] = [
            task for watched in self._idle.values() for task in watched.values()
        ]
        tasks += [*self._improving.values(), *self._opening.values()]
        for peer in {*self._outgoing, *self._better, *self._improving, *self._opening, *self._idle}:
            self.drop(peer)
        for handle in self._expiries:
            handle.cancel()
        for sock in self._named.values():
            sock.close()
        self._named.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Outgoing

    async def _gather(
        self,
        outgoing: Mapping[int, asyncio.Future[socket.socket]],
        incoming: Mapping[int, asyncio.Future[socket.socket]],
        timeout_s: float,
        prompt: tuple[Mapping[int, str], float],
        cancelled: threading.Event | None,
        quiet: Callable[[], Collection[int]],
    ) -> None:
        """Wait for all streams; for those of the prompt ones not as long. Raises RoundFailed."""
        began = time.monotonic()
        prompt_ones, prompt_s = prompt
        deadline, heeds_silence_at = began + timeout_s, began + min(_DETOUR_S, timeout_s / 4)
        # Of whom nothing is heard from the beginning, there may be another way to.
        quiet_before = set(quiet())
        pending = {*outgoing.values(), *incoming.values()}
        while pending:
            slice_, waits_from = slice_s(len(outgoing)), time.monotonic()
            _, pending = await asyncio.wait(pending, timeout=slice_, return_when=asyncio.FIRST_EXCEPTION)
            # While this process stood still nothing could be heard of anybody.
            prompt_s += max(0.0, time.monotonic() - waits_from - 2 * slice_)
            # Others wait as long, and somebody is always a little quicker to give up.
            is_late = time.monotonic() > deadline - _MUCH_OF_IT * timeout_s
            if failed := {
                rank: future.exception() for rank, future in outgoing.items() if _has_failed(future)
            }:
                raise RoundFailed(
                    f"cannot reach {_named(failed)}: {next(iter(failed.values()))}",
                    failed,
                    silent=failed if is_late else (),
                )
            missing = {rank for rank in outgoing if pending & {outgoing[rank], incoming[rank]}}
            # Where many are missing it is this peer that is slow, or the machine.
            many = 1 + max(1, len(outgoing) // 4)
            silent = missing if is_late and len(missing) < many else set[int]()
            if cancelled is not None and cancelled.is_set():
                raise RoundFailed("cancelled", silent=silent)
            fallen = missing & set(quiet()) - quiet_before
            if fallen and time.monotonic() > heeds_silence_at:
                few = fallen if len(fallen) < many else set[int]()
                raise RoundFailed(f"{_named(fallen)} has fallen silent", fallen, silent=few)
            # Who has closed that stream opens another one.
            tardy = {
                rank
                for rank, peer in prompt_ones.items()
                if incoming[rank] in pending and self._idle.get(peer)
            }
            if tardy and len(tardy) < many and time.monotonic() > began + prompt_s:
                raise RoundFailed(f"{_named(tardy)} does not begin", tardy, silent=tardy)
            if pending and time.monotonic() > deadline:
                raise RoundFailed(
                    f"no streams with {_named(missing)} in {timeout_s:g} s", missing, silent=silent
                )

    async def _name_outgoing(self, attempt: bytes, peer: str, timeout_s: float) -> socket.socket:
        """A stream to this peer, kept or new, on which the attempt has been named."""
        sock = None
        for kept in (self._better.pop(peer, None), self._outgoing.pop(peer, None)):
            if kept is not None and (sock is not None or not self._is_usable(peer, kept)):
                kept.close()
            else:
                sock = sock or kept
        if sock is None:
            sock = await self._transport.open(peer, self._protocol, timeout_s=timeout_s)
        try:
            await socket_io.send_all(sock, attempt)
        except BaseException:
            sock.close()
            raise
        return sock

    def _is_usable(self, peer: str, kept: socket.socket) -> bool:
        """Whether nothing has come on a stream that waits for us, and its path is not in doubt."""
        is_doubted = self._choice is not None and self._choice.doubts(peer, kept)
        return not is_doubted and is_silent(kept)

    def _improve(self, choice: PathChoice, peer: str, current: socket.socket) -> None:
        """Look for a better stream than the current one while no round waits for it; the next round takes it."""

        async def improve() -> None:
            try:
                better = await choice.improved(peer, current)
            except PeersError as error:
                log.debug("no better stream to %s: %s", peer, error)
                return
            if better is not None:
                if (older := self._better.pop(peer, None)) is not None:
                    older.close()
                self._better[peer] = better

        if peer not in self._improving and peer not in self._better:
            task = self._improving[peer] = asyncio.create_task(improve())
            task.add_done_callback(lambda _: self._improving.pop(peer, None))

    # Incoming

    async def _accepted(self, peer_id: str, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._watch(peer_id, sock)

    def _watch(self, peer: str, sock: socket.socket) -> None:
        watched = self._idle[peer]
        while len(watched) >= MAX_IDLE_PER_PEER:
            watched.pop(next(iter(watched))).cancel()
        while len(self._idle) > MAX_IDLE_PEERS:
            for reading in self._idle.pop(next(iter(self._idle))).values():
                reading.cancel()
        task = watched[sock] = asyncio.create_task(_read_name(sock))
        task.add_done_callback(lambda task: self._after_reading(peer, sock, task))

    def _after_reading(self, peer: str, sock: socket.socket, task: asyncio.Task[bytes]) -> None:
        self._idle.get(peer, {}).pop(sock, None)
        if not self._idle.get(peer, True):
            del self._idle[peer]
        # Only now has the event loop let go of the socket, so only now may it be closed.
        if task.cancelled():
            sock.close()
        elif (error := task.exception()) is not None:
            log.debug("dropped an idle stream of %s: %s", peer, error)
            sock.close()
        else:
            self._hand_over(task.result(), peer, sock)

    def _hand_over(self, attempt: bytes, peer: str, sock: socket.socket) -> None:
        awaited = self._awaited.get((attempt, peer))
        if awaited is not None and not awaited.done():
            awaited.set_result(sock)
            return
        others = [key for key in self._named if key[1] == peer]
        for key in others[: max(0, len(others) + 1 - MAX_IDLE_PER_PEER)]:
            self._named.pop(key).close()
        if (double := self._named.pop((attempt, peer), None)) is not None:
            double.close()
        self._named[attempt, peer] = sock
        loop = asyncio.get_running_loop()
        self._expiries = {handle for handle in self._expiries if handle.when() > loop.time()}
        self._expiries.add(loop.call_later(UNCLAIMED_S, self._expire, (attempt, peer), sock))

    def _await_incoming(self, attempt: bytes, peer: str) -> asyncio.Future[socket.socket]:
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        if (sock := self._named.pop((attempt, peer), None)) is not None:
            future.set_result(sock)
        else:
            self._awaited[attempt, peer] = future
        return future

    def _expire(self, key: tuple[bytes, str], sock: socket.socket) -> None:
        if self._named.get(key) is sock:
            del self._named[key]
            sock.close()


async def _read_name(sock: socket.socket) -> bytes:
    """The attempt that the next bytes on an idle stream belong to; takes not one byte more."""
    name = b""
    while len(name) < ATTEMPT_BYTES:
        # An idle stream is silent for as long as training takes; a name that was begun is not.
        async with asyncio.timeout(_NAME_TIMEOUT_S if name else None):
            piece = await socket_io.receive(sock, ATTEMPT_BYTES - len(name))
        if not piece:
            raise ConnectionError("closed while idle")
        name += piece
    return name


async def _give_up(futures: Sequence[asyncio.Future[socket.socket]], farewell: bytes = b"") -> None:
    """Cancel those that still run, and close what the others have brought.

    The farewell keeps the other side, which may be in the round already, from taking us for dead.
    """
    for future in futures:
        future.cancel()
    for outcome in await asyncio.gather(*futures, return_exceptions=True):
        if isinstance(outcome, socket.socket):
            with contextlib.suppress(OSError):
                outcome.send(farewell)
            outcome.close()


def _named(ranks: Iterable[int]) -> str:
    return "peer " + ", ".join(map(str, sorted(ranks)))


def _has_failed(future: asyncio.Future[socket.socket]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
