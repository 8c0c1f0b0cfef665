"""The one transport of the swarm's parts: each stream takes the best path there is, and nobody else knows which.

Control goes over libp2p; the data of rounds goes direct where that stands and is not slower, and so does other bulk
(states for newcomers) wherever it stands in time; all go through a third peer where libp2p has no connection to be had.
What was found unreachable is left alone for a while.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal
from weakref import WeakKeyDictionary

from peers.errors import PeersError, PeerUnreachable
from peers.net.libp2p.streams import Libp2p
from peers.net.paths.acceptor import Handler, Reception
from peers.net.paths.choice import Pair
from peers.net.paths.direct import Direct
from peers.net.paths.head_start import first_to_stand
from peers.net.paths.relay import Relay
from peers.protocol.records import Path

log = logging.getLogger(__name__)

TransportMode = Literal["auto", "libp2p", "tls", "tcp"]

DIRECT_TIMEOUT_S = 5.0
"""What a direct stream may take before libp2p has to do, in a round that waits for it."""
INDIRECT_AFTER_S = 1.0
"""What a direct stream may take before others are tried as well, where nobody knows yet whether one stands."""
BEFORE_DOUBTED_S = 2.0
"""What a third peer may take, where a connection stands that may carry nothing."""
RELAY_AFTER_S = 0.75
"""What libp2p may take to connect before a third peer is asked as well."""
_MAX_PAIRS = 4096


class Paths:
    """Used from one event loop. `data` is the protocol whose streams carry the bulk; `mode`: what it may go over.

    auto: libp2p, then direct; tls and tcp: direct from the first stream on; libp2p: never direct.
    """

    def __init__(
        self,
        *,
        libp2p: Libp2p,
        reception: Reception,
        direct: Direct | None,
        relay: Relay | None,
        data: str,
        bulk: Collection[str] = (),
        mode: TransportMode = "auto",
        check: Callable[[str, str], object] = lambda _peer_id, _protocol: None,
        unchecked: Collection[str] = (),
    ) -> None:
        """`bulk` are other protocols that carry much at a time, on streams of their own that no round waits for.

        `check` raises Refused for a peer whose streams on a protocol are not taken, save on those `unchecked`.
        """
        self._libp2p, self._reception, self._direct, self._relay = libp2p, reception, direct, relay
        self._data, self._bulk, self._mode = data, frozenset(bulk), mode
        self._check, self._unchecked = check, frozenset(unchecked)
        self._pairs: dict[str, Pair] = {}
        self._path_of: WeakKeyDictionary[socket.socket, Path] = WeakKeyDictionary()

    @property
    def in_use(self) -> Mapping[str, Path]:
        """The path to every peer that this one has opened a stream to, by peer id."""
        return {peer_id: pair.in_use for peer_id, pair in self._pairs.items() if pair.in_use}

    def rate_to(self, peer_id: str) -> float:
        """Bytes/s that rounds have moved to this peer; 0: not known."""
        return self._pairs[peer_id].rate if peer_id in self._pairs else 0.0

    async def open(
        self, peer_id: str, protocol: str, *, timeout_s: float, maddrs: Sequence[str] = ()
    ) -> socket.socket:
        """A non-blocking socket, perhaps of TLS, at the start of a new stream. Raises PeerUnreachable."""
        pair, deadline = self._pair(peer_id), time.monotonic() + timeout_s
        if protocol == self._data and self._wants_direct(pair):
            stream = await self._open_direct(peer_id, pair, min(DIRECT_TIMEOUT_S, timeout_s / 2))
            if stream is not None:
                return stream
        left_s = deadline - time.monotonic()
        direct = self._direct if protocol in self._bulk and pair.may_go_direct(time.monotonic()) else None
        if direct is not None and direct.knows(peer_id):
            return await self._open_bulk(direct, peer_id, protocol, pair, left_s)
        path, stream = await self._open_indirect(peer_id, protocol, maddrs, pair, left_s)
        return self._taken(peer_id, protocol, path, stream)

    async def serve(self, protocol: str, handler: Handler) -> None:
        """From now on, `handler(authenticated peer id, stream)` owns each new stream, whichever way it comes."""
        if protocol not in self._unchecked:
            handler = self._checked(protocol, handler)
        self._reception.serve(protocol, handler)
        await self._libp2p.serve(protocol, handler)

    def _checked(self, protocol: str, handler: Handler) -> Handler:
        async def check_first(peer_id: str, stream: socket.socket) -> None:
            self._check(peer_id, protocol)
            await handler(peer_id, stream)

        return check_first

    def heard_through_relay(self, peer_id: str) -> None:
        """This peer did not get here by itself, so we would wait in vain to get there."""
        self._pair(peer_id).libp2p.failed(time.monotonic())

    # What the pool of data streams tells and asks

    async def improved(self, peer_id: str, current: socket.socket) -> socket.socket | None:
        """A stream on a better path than the current one, if there is one: off any round's way."""
        pair, now = self._pair(peer_id), time.monotonic()
        path = self._path_of.get(current)
        if path in (Path.DIRECT, Path.PLAIN):
            if self._mode != "auto" or pair.may_go_direct(now):
                return None
            # It stands, but it proved slower.
            libp2p = await self._libp2p.open(peer_id, self._data, timeout_s=DIRECT_TIMEOUT_S)
            return self._taken(peer_id, self._data, Path.LIBP2P, libp2p)
        if self._direct is not None and pair.may_go_direct(now):
            stream = await self._open_direct(peer_id, pair, 2 * DIRECT_TIMEOUT_S)
            if stream is not None:
                return stream
        is_doubted = pair.is_doubted(now)
        if path is Path.RELAY and not is_doubted and peer_id in await self._libp2p.connected_peers():
            stream = await self._libp2p.open(peer_id, self._data, timeout_s=DIRECT_TIMEOUT_S)
            return self._taken(peer_id, self._data, Path.LIBP2P, stream)
        return None

    def used(
        self, peer_id: str, stream: socket.socket, num_bytes: float, seconds: float, group: frozenset[str]
    ) -> None:
        """A round with these peers has moved so many bytes on this stream in so long."""
        if (path := self._path_of.get(stream)) is not None:
            pair, now = self._pair(peer_id), time.monotonic()
            pair.measured(path, num_bytes, seconds, now, group)
            if path is not Path.RELAY:
                pair.doubt.stood()

    def failed(self, peer_id: str, stream: socket.socket) -> None:
        """A round was lost to this peer: if it was the path's fault, another one is taken next."""
        path = self._path_of.get(stream)
        if path in (Path.DIRECT, Path.PLAIN):
            self._pair(peer_id).direct_failed(time.monotonic())
        elif path is Path.RELAY and self._relay is not None:
            self._relay.blame(stream)

    def missed(self, peer_id: str) -> None:
        """This peer did not answer in time. If links can be silent, this one may be: for a while others go first."""
        self._pair(peer_id).missed(time.monotonic())

    def doubts(self, peer_id: str, stream: socket.socket) -> bool:
        """Whether this stream stands where nothing may get through."""
        is_relayed = self._path_of.get(stream) is Path.RELAY
        return not is_relayed and self._pair(peer_id).is_doubted(time.monotonic())

    # Opening

    def _wants_direct(self, pair: Pair) -> bool:
        if self._direct is None:
            return False
        now = time.monotonic()
        if pair.is_doubted(now):
            return False
        return pair.is_ready_for_direct(now) if self._mode == "auto" else now >= pair.direct.until

    async def _open_direct(self, peer_id: str, pair: Pair, timeout_s: float) -> socket.socket | None:
        assert self._direct is not None
        if not self._direct.knows(peer_id):
            return None
        try:
            stream = await self._direct.open(peer_id, self._data, timeout_s=timeout_s)
        except PeersError as error:
            pair.direct_failed(time.monotonic())
            log.info("%s", error)
            return None
        pair.direct_stood()
        path = Path.DIRECT if isinstance(stream, ssl.SSLSocket) else Path.PLAIN
        return self._taken(peer_id, self._data, path, stream)

    async def _open_bulk(
        self, direct: Direct, peer_id: str, protocol: str, pair: Pair, timeout_s: float
    ) -> socket.socket:
        """Direct, with a head start on all else: a newcomer knows nothing yet of its paths, and has much to fetch."""

        async def directly() -> socket.socket:
            try:
                return await direct.open(peer_id, protocol, timeout_s=timeout_s)
            except PeersError:
                pair.direct_failed(time.monotonic())
                raise

        async def indirectly() -> socket.socket:
            _, stream = await self._open_indirect(peer_id, protocol, (), pair, timeout_s)
            return stream

        path, stream = await first_to_stand(
            {Path.DIRECT: directly, Path.LIBP2P: indirectly}, INDIRECT_AFTER_S, timeout_s
        )
        if path is Path.DIRECT:
            pair.direct_stood()
        elif not pair.direct_has_stood and pair.may_go_direct(time.monotonic()):
            # Nor will the next stream wait for it: whoever does so each time asks for states that are gone by then.
            pair.direct_failed(time.monotonic())
        return stream

    async def _open_indirect(
        self, peer_id: str, protocol: str, maddrs: Sequence[str], pair: Pair, timeout_s: float
    ) -> tuple[Path, socket.socket]:
        """Over libp2p; where that takes long or fails, and it has no connection, a relay may be quicker."""

        async def over_libp2p() -> socket.socket:
            return await self._libp2p.open(peer_id, protocol, timeout_s=timeout_s, maddrs=maddrs)

        if self._relay is None:
            return Path.LIBP2P, await over_libp2p()
        relay, now = self._relay, time.monotonic()
        is_doubted = pair.is_doubted(now)

        async def over_relay() -> socket.socket:
            if not is_doubted and peer_id in await self._libp2p.connected_peers():
                raise PeerUnreachable(f"{peer_id} is connected, a relay would change nothing")
            return await relay.open(peer_id, protocol, timeout_s=timeout_s)

        ways = {Path.LIBP2P: over_libp2p, Path.RELAY: over_relay}
        head_start_s = 0.0 if now < pair.libp2p.until else RELAY_AFTER_S
        if is_doubted:
            # A stream of libp2p's stands as soon as its connection seems to.
            ways, head_start_s = {Path.RELAY: over_relay, Path.LIBP2P: over_libp2p}, BEFORE_DOUBTED_S
        path, stream = await first_to_stand(ways, head_start_s, timeout_s)
        if path is Path.RELAY and not is_doubted:
            pair.libp2p.failed(time.monotonic())
        elif path is Path.LIBP2P:
            pair.libp2p.stood()
        return path, stream

    def _taken(self, peer_id: str, protocol: str, path: Path, stream: socket.socket) -> socket.socket:
        """Remember which way it goes, and say so where that is news."""
        self._path_of[stream] = path
        pair, is_data = self._pair(peer_id), protocol == self._data
        if is_data or not pair.in_use_for_data:
            before = pair.in_use if pair.in_use_for_data else "nothing"
            if is_data and before is not path:
                log.info("data for %s goes by %s (before: %s)", peer_id, path, before)
            pair.in_use, pair.in_use_for_data = path, is_data
        return stream

    def _pair(self, peer_id: str) -> Pair:
        # To the end: records of peers that do not exist push none out that takes part in rounds.
        pair = self._pairs.pop(peer_id) if peer_id in self._pairs else Pair()
        self._pairs[peer_id] = pair
        while len(self._pairs) > _MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        return pair
