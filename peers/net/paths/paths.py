"""Chooses the path of every stream to another peer: direct, over libp2p, or through a third peer.

Control goes over libp2p. Bulk (data of rounds, states for newcomers) goes direct where that stands. A third peer
forwards where libp2p has no connection. The preferred path is tried first, the next one a little later, and the first
that stands is taken; a path that failed is left alone for a while.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal
from weakref import WeakKeyDictionary

from peers.errors import PeersError, PeerUnreachable
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.choice import Pair
from peers.net.paths.direct import Direct
from peers.net.paths.happy_eyeballs import Dial, first_connected
from peers.net.paths.relay import Relay
from peers.net.transport import Handler, Libp2p
from peers.protocol.records import Path
from peers.timing import CONNECT_S, DIRECT_HEAD_START_S, LIBP2P_HEAD_START_S, RELAY_HEAD_START_S

log = logging.getLogger(__name__)

TransportMode = Literal["auto", "libp2p", "tcp"]

_MAX_PAIRS = 4096


class Paths:
    """Used from one event loop. `data` is the protocol of rounds' streams, `bulk` are others that may go direct.

    Without `direct` nothing goes direct.
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
        """`check` raises Refused for a peer whose streams on a protocol are not taken, save on those `unchecked`."""
        self._libp2p, self._acceptor, self._direct, self._relay = libp2p, acceptor, direct, relay
        self._data, self._bulk = data, {data, *bulk}
        self._check, self._unchecked = check, frozenset(unchecked)
        self._pairs: dict[str, Pair] = {}
        self._path_of: WeakKeyDictionary[socket.socket, Path] = WeakKeyDictionary()

    @property
    def in_use(self) -> Mapping[str, Path]:
        """The path to every peer that this one has opened a stream to, by peer id."""
        return {peer_id: pair.in_use for peer_id, pair in self._pairs.items() if pair.in_use}

    def rate_to(self, peer_id: str) -> float:
        """Bytes/s that the last round moved to this peer; 0: not known."""
        return self._pairs[peer_id].rate if peer_id in self._pairs else 0.0

    async def open(
        self, peer_id: str, protocol: str, *, timeout_s: float, maddrs: Sequence[str] = ()
    ) -> socket.socket:
        """A non-blocking socket, perhaps of TLS, at the start of a new stream. Raises PeerUnreachable."""
        pair = self._pair(peer_id)
        dials = self._dials(peer_id, protocol, maddrs, pair, timeout_s)
        preferred = [dial.path for dial in dials]
        path, stream = await first_connected(dials, timeout_s)
        for slower in preferred[: preferred.index(path)]:
            # Otherwise every later stream would wait for it, too.
            pair.passed_over(slower, time.monotonic())
        if path is Path.LIBP2P:
            pair.libp2p.succeeded()
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

    # What the pool of data streams tells and asks

    async def improved(self, peer_id: str, current: socket.socket) -> socket.socket | None:
        """A stream on a better path than the current one, if there is one. No round waits for this."""
        pair, path = self._pair(peer_id), self._path_of.get(current)
        if path in (Path.DIRECT, Path.PLAIN):
            return None
        if self._may_go_direct(peer_id, self._data, pair):
            with contextlib.suppress(PeersError):
                stream = await self._open_direct(peer_id, self._data, pair, CONNECT_S)
                return self._taken(peer_id, self._data, Path.DIRECT, stream)
        is_doubted = not pair.doubt.is_over(time.monotonic())
        if path is Path.RELAY and not is_doubted and peer_id in await self._libp2p.connected_peers():
            stream = await self._libp2p.open(peer_id, self._data, timeout_s=CONNECT_S)
            return self._taken(peer_id, self._data, Path.LIBP2P, stream)
        return None

    def used(self, peer_id: str, stream: socket.socket, num_bytes: float, seconds: float) -> None:
        """A round has moved so many bytes on this stream in so long."""
        pair = self._pair(peer_id)
        pair.rate = num_bytes / seconds if seconds > 0 else 0.0
        if self._path_of.get(stream) is not Path.RELAY:
            pair.doubt.succeeded()

    def failed(self, peer_id: str, stream: socket.socket) -> None:
        """A round was lost to this peer. In case the path was at fault, the next stream takes another one."""
        path = self._path_of.get(stream)
        if path in (Path.DIRECT, Path.PLAIN):
            self._pair(peer_id).direct.failed(time.monotonic())
        elif path is Path.RELAY and self._relay is not None:
            self._relay.blame(stream)

    def missed(self, peer_id: str) -> None:
        """This peer did not answer in time. The connection may be dead: prefer a relay for a while."""
        self._pair(peer_id).doubt.failed(time.monotonic())

    def doubts(self, peer_id: str, stream: socket.socket) -> bool:
        """Whether this stream is on a connection that may be dead."""
        is_relayed = self._path_of.get(stream) is Path.RELAY
        return not is_relayed and not self._pair(peer_id).doubt.is_over(time.monotonic())

    # Opening

    def _dials(
        self, peer_id: str, protocol: str, maddrs: Sequence[str], pair: Pair, timeout_s: float
    ) -> list[Dial]:
        """The paths to try, in order of preference."""
        now, relay = time.monotonic(), self._relay
        is_doubted = not pair.doubt.is_over(now)

        async def over_relay() -> socket.socket:
            assert relay is not None
            if not is_doubted and peer_id in await self._libp2p.connected_peers():
                raise PeerUnreachable(f"{peer_id} is connected, a relay would change nothing")
            return await relay.open(peer_id, protocol, timeout_s=timeout_s)

        direct = Dial(
            Path.DIRECT, DIRECT_HEAD_START_S, lambda: self._open_direct(peer_id, protocol, pair, timeout_s)
        )
        libp2p = Dial(
            Path.LIBP2P,
            LIBP2P_HEAD_START_S if pair.libp2p.is_over(now) else 0.0,
            lambda: self._libp2p.open(peer_id, protocol, timeout_s=timeout_s, maddrs=maddrs),
        )
        relayed = [Dial(Path.RELAY, RELAY_HEAD_START_S, over_relay)] if relay is not None else []
        if is_doubted:
            return [*relayed, libp2p]
        may_wait = pair.late.is_over(now) and self._may_go_direct(peer_id, protocol, pair)
        return [*([direct] if may_wait else []), libp2p, *relayed]

    def _may_go_direct(self, peer_id: str, protocol: str, pair: Pair) -> bool:
        return (
            self._direct is not None
            and protocol in self._bulk
            and pair.direct.is_over(time.monotonic())
            and self._direct.knows(peer_id)
        )

    async def _open_direct(self, peer_id: str, protocol: str, pair: Pair, timeout_s: float) -> socket.socket:
        assert self._direct is not None
        try:
            stream = await self._direct.open(peer_id, protocol, timeout_s=timeout_s)
        except PeersError as error:
            pair.direct.failed(time.monotonic())
            log.info("%s", error)
            raise
        # The greeting succeeded over it, so the link works.
        pair.direct.succeeded()
        pair.late.succeeded()
        pair.doubt.succeeded()
        return stream

    def _taken(self, peer_id: str, protocol: str, path: Path, stream: socket.socket) -> socket.socket:
        """Remember the path of a stream, and log it where it is another one than before."""
        if path is Path.DIRECT and not isinstance(stream, ssl.SSLSocket):
            path = Path.PLAIN
        self._path_of[stream] = path
        pair, is_data = self._pair(peer_id), protocol == self._data
        if is_data or not pair.in_use_for_data:
            before = pair.in_use if pair.in_use_for_data else "nothing"
            if is_data and before is not path:
                log.info("data for %s goes by %s (before: %s)", peer_id, path, before)
            pair.in_use, pair.in_use_for_data = path, is_data
        return stream

    def _pair(self, peer_id: str) -> Pair:
        # Appended at the end, so that invented records cannot push out peers that take part in rounds.
        pair = self._pairs.pop(peer_id) if peer_id in self._pairs else Pair()
        self._pairs[peer_id] = pair
        while len(self._pairs) > _MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        return pair
