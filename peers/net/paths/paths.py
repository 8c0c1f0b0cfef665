"""Chooses the path of every stream to another peer: direct, over libp2p, or through a third peer.

Control goes over libp2p. Bulk data (of rounds, and states for newcomers) goes direct if possible. A third peer forwards
if libp2p has no connection. The preferred path is tried first, the next one a little later, and the first that connects
is taken; a path that failed is not tried for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from peers.errors import PeersError, PeerUnreachable
from peers.net.back_off import BackOff
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.direct import Direct
from peers.net.paths.relay import Relay
from peers.net.transport import Handler, Libp2p
from peers.protocol.records import Path
from peers.tasks import cancelled
from peers.timing import (
    CONNECT_S,
    DIRECT_HEAD_START_S,
    FORGET_S,
    LIBP2P_HEAD_START_S,
    RELAY_HEAD_START_S,
    START_S,
)

log = logging.getLogger(__name__)

TransportMode = Literal["auto", "libp2p", "tcp"]

_MAX_PEERS = 4096


def _back_off() -> BackOff:
    return BackOff(START_S, FORGET_S)


@dataclass
class _PathsToPeer:
    """What is known of the paths to one peer. Each back-off says for how long something is not tried, or not first."""

    direct_failures: BackOff = field(default_factory=_back_off)
    direct_delays: BackOff = field(default_factory=_back_off)
    """A less preferred path connected before the direct one: only background streams try the direct one meanwhile."""
    libp2p_delays: BackOff = field(default_factory=_back_off)
    """A relay connected before libp2p: the relay is asked at once, without libp2p's head start."""
    libp2p_silence: BackOff = field(default_factory=_back_off)
    """The peer did not answer on an open connection of libp2p, so that connection may be dead: relays come first."""
    in_use: Path | None = None
    """The path of the newest data stream; before there is one, of any stream."""
    in_use_for_data: bool = False
    rate: float = 0.0
    """Bytes/s that the last round moved to this peer; 0: not known."""

    def was_slower(self, path: Path, now: float) -> None:
        """A less preferred path connected before this one."""
        if path is Path.DIRECT:
            self.direct_delays.failed(now)
        elif path is Path.LIBP2P:
            self.libp2p_delays.failed(now)


class _Dial(NamedTuple):
    """One transport. The next one starts `head_start_s` later, or as soon as this one fails."""

    path: Path
    head_start_s: float
    open: Callable[[], Awaitable[socket.socket]]


class Paths:
    """Used from one event loop. `data` is the protocol of the reduction; `bulk` are others that may go direct.

    Without `direct`, no stream goes direct.
    """

    def __init__(
        self,
        *,
        libp2p: Libp2p,
        acceptor: Acceptor,
        direct: Direct | None,
        relay: Relay | None,
        data: str,
        bulk: Collection[str] = (),
        check: Callable[[str, str], object] = lambda _peer_id, _protocol: None,
        unchecked: Collection[str] = (),
    ) -> None:
        """`check(peer id, protocol)` raises Refused for a stream to refuse; not called for `unchecked` protocols."""
        self._libp2p, self._acceptor, self._direct, self._relay = libp2p, acceptor, direct, relay
        self._data, self._bulk = data, {data, *bulk}
        self._check, self._unchecked = check, frozenset(unchecked)
        self._paths_to: dict[str, _PathsToPeer] = {}
        self._path_of: WeakKeyDictionary[socket.socket, Path] = WeakKeyDictionary()

    @property
    def in_use(self) -> Mapping[str, Path]:
        """The path to every peer that this one has opened a stream to, by peer id."""
        return {peer_id: known.in_use for peer_id, known in self._paths_to.items() if known.in_use}

    def rate_to(self, peer_id: str) -> float:
        """Bytes/s that the last round moved to this peer; 0: not known."""
        return self._paths_to[peer_id].rate if peer_id in self._paths_to else 0.0

    async def open(
        self, peer_id: str, protocol: str, *, timeout_s: float, maddrs: Sequence[str] = ()
    ) -> socket.socket:
        """A non-blocking socket, perhaps of TLS, at the start of a new stream. Raises PeerUnreachable."""
        known = self._to(peer_id)
        dials = self._dials(peer_id, protocol, maddrs, known, timeout_s)
        preferred = [dial.path for dial in dials]
        path, stream = await _first_connected(dials, timeout_s)
        for slower in preferred[: preferred.index(path)]:
            # Otherwise every later stream would wait for the slower path, too.
            known.was_slower(slower, time.monotonic())
        if path is Path.LIBP2P:
            known.libp2p_delays.succeeded()
        return self._taken(peer_id, protocol, path, stream)

    async def serve(self, protocol: str, handler: Handler) -> None:
        """From now on, `handler(authenticated peer id, stream)` owns each new stream, by whichever path it comes."""
        if protocol not in self._unchecked:
            handler = self._checked(protocol, handler)
        self._acceptor.serve(protocol, handler)
        await self._libp2p.serve(protocol, handler)

    def _checked(self, protocol: str, handler: Handler) -> Handler:
        async def check_first(peer_id: str, stream: socket.socket) -> None:
            self._check(peer_id, protocol)
            await handler(peer_id, stream)

        return check_first

    # Called by the pool of data streams

    async def improved(self, peer_id: str, current: socket.socket) -> socket.socket | None:
        """A stream on a better path than the current one, if there is one. No round waits for this."""
        known, path = self._to(peer_id), self._path_of.get(current)
        if path in (Path.DIRECT, Path.PLAIN):
            return None
        if self._may_go_direct(peer_id, self._data, known):
            with contextlib.suppress(PeersError):
                stream = await self._open_direct(peer_id, self._data, known, CONNECT_S)
                return self._taken(peer_id, self._data, Path.DIRECT, stream)
        is_silent = not known.libp2p_silence.is_over(time.monotonic())
        if path is Path.RELAY and not is_silent and peer_id in await self._libp2p.connected_peers():
            stream = await self._libp2p.open(peer_id, self._data, timeout_s=CONNECT_S)
            return self._taken(peer_id, self._data, Path.LIBP2P, stream)
        return None

    def used(self, peer_id: str, stream: socket.socket, num_bytes: float, seconds: float) -> None:
        """A round has moved this many bytes on this stream in this time."""
        known = self._to(peer_id)
        known.rate = num_bytes / seconds if seconds > 0 else 0.0
        if self._path_of.get(stream) is not Path.RELAY:
            known.libp2p_silence.succeeded()

    def failed(self, peer_id: str, stream: socket.socket) -> None:
        """A round was lost to this peer. In case the path was at fault, the next stream takes another one."""
        path = self._path_of.get(stream)
        if path in (Path.DIRECT, Path.PLAIN):
            self._to(peer_id).direct_failures.failed(time.monotonic())
        elif path is Path.RELAY and self._relay is not None:
            self._relay.blame(stream)

    def no_answer(self, peer_id: str) -> None:
        """This peer did not answer in time. The connection may be dead: prefer a relay for a while."""
        self._to(peer_id).libp2p_silence.failed(time.monotonic())

    def may_be_dead(self, peer_id: str, stream: socket.socket) -> bool:
        """Whether this stream is on a connection that may be dead."""
        is_relayed = self._path_of.get(stream) is Path.RELAY
        return not is_relayed and not self._to(peer_id).libp2p_silence.is_over(time.monotonic())

    # Opening

    def _dials(
        self, peer_id: str, protocol: str, maddrs: Sequence[str], known: _PathsToPeer, timeout_s: float
    ) -> list[_Dial]:
        """The paths to try, in order of preference."""
        now, relay = time.monotonic(), self._relay
        is_silent = not known.libp2p_silence.is_over(now)

        async def over_relay() -> socket.socket:
            assert relay is not None
            if not is_silent and peer_id in await self._libp2p.connected_peers():
                raise PeerUnreachable(f"{peer_id} is connected, a relay would change nothing")
            return await relay.open(peer_id, protocol, timeout_s=timeout_s)

        direct = _Dial(
            Path.DIRECT, DIRECT_HEAD_START_S, lambda: self._open_direct(peer_id, protocol, known, timeout_s)
        )
        libp2p = _Dial(
            Path.LIBP2P,
            LIBP2P_HEAD_START_S if known.libp2p_delays.is_over(now) else 0.0,
            lambda: self._libp2p.open(peer_id, protocol, timeout_s=timeout_s, maddrs=maddrs),
        )
        relayed = [_Dial(Path.RELAY, RELAY_HEAD_START_S, over_relay)] if relay is not None else []
        if is_silent:
            return [*relayed, libp2p]
        goes_direct = known.direct_delays.is_over(now) and self._may_go_direct(peer_id, protocol, known)
        return [*([direct] if goes_direct else []), libp2p, *relayed]

    def _may_go_direct(self, peer_id: str, protocol: str, known: _PathsToPeer) -> bool:
        return (
            self._direct is not None
            and protocol in self._bulk
            and known.direct_failures.is_over(time.monotonic())
            and self._direct.knows(peer_id)
        )

    async def _open_direct(
        self, peer_id: str, protocol: str, known: _PathsToPeer, timeout_s: float
    ) -> socket.socket:
        assert self._direct is not None
        try:
            stream = await self._direct.open(peer_id, protocol, timeout_s=timeout_s)
        except PeersError as error:
            known.direct_failures.failed(time.monotonic())
            log.info("%s", error)
            raise
        # The greeting went over it, so the link works.
        known.direct_failures.succeeded()
        known.direct_delays.succeeded()
        known.libp2p_silence.succeeded()
        return stream

    def _taken(self, peer_id: str, protocol: str, path: Path, stream: socket.socket) -> socket.socket:
        """Remember the path of a stream, and log it if it has changed."""
        if path is Path.DIRECT and not isinstance(stream, ssl.SSLSocket):
            path = Path.PLAIN
        self._path_of[stream] = path
        known, is_data = self._to(peer_id), protocol == self._data
        if is_data or not known.in_use_for_data:
            before = known.in_use if known.in_use_for_data else "nothing"
            if is_data and before is not path:
                log.info("data for %s goes by %s (before: %s)", peer_id, path, before)
            known.in_use, known.in_use_for_data = path, is_data
        return stream

    def _to(self, peer_id: str) -> _PathsToPeer:
        # Moved to the end at each use, so that invented records cannot push out peers that take part in rounds.
        known = self._paths_to.pop(peer_id) if peer_id in self._paths_to else _PathsToPeer()
        self._paths_to[peer_id] = known
        while len(self._paths_to) > _MAX_PEERS:
            del self._paths_to[next(iter(self._paths_to))]
        return known


async def _first_connected(dials: Sequence[_Dial], timeout_s: float) -> tuple[Path, socket.socket]:
    """The first stream that connects, and its path: all are tried at once, preferred ones a little earlier ("happy
    eyeballs"). Raises the PeersError of the most preferred transport that failed.
    """
    running: dict[asyncio.Future[socket.socket], _Dial] = {}
    waiting, failures = list(dials), dict[Path, PeersError]()
    deadline = time.monotonic() + timeout_s
    try:
        while (waiting or running) and (left_s := deadline - time.monotonic()) > 0:
            if waiting:
                dial = waiting.pop(0)
                running[asyncio.ensure_future(dial.open())] = dial
                left_s = min(dial.head_start_s, left_s) if waiting else left_s
            done, _ = await asyncio.wait(running, timeout=left_s, return_when="FIRST_COMPLETED")
            for task in done:
                path, error = running.pop(task).path, task.exception()
                if error is None:
                    return path, task.result()
                if not isinstance(error, PeersError):
                    raise error
                failures[path] = error
    finally:
        for outcome in await cancelled(running):
            if isinstance(outcome, socket.socket):
                outcome.close()
    in_order = (failures[dial.path] for dial in dials if dial.path in failures)
    raise next(in_order, PeerUnreachable("took too long"))
