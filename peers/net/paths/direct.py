"""Streams straight over TCP, for pairs of peers that reach each other without help.

A peer has one port for them, whose announced address may differ from where it listens. A stream is encrypted by TLS 1.3
with each end pinned to the other's identity key; or plain, if both peers were told to trust their network. It is a
socket that threads can block on: no process copies its bytes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from peers.errors import PeersError, PeerUnreachable, UserError
from peers.net.paths.acceptor import Acceptor
from peers.net.socket_io import accept_forever, closed_on_error
from peers.net.transport import Handler
from peers.protocol.maddrs import Maddr, parse_maddr
from peers.protocol.records import MAX_ENDPOINTS
from peers.system import keepalive_options
from peers.tasks import Tasks
from peers.timing import PROBE_S

_BACKLOG = 128
_FAMILIES = {
    "ip4": socket.AF_INET,
    "ip6": socket.AF_INET6,
    "dns": socket.AF_UNSPEC,
    "dns4": socket.AF_INET,
    "dns6": socket.AF_INET6,
}
_MAX_LOOKUPS = 4
_lookups = threading.Semaphore(_MAX_LOOKUPS)
# A connection that breaks silently while nothing is sent is detected within a minute.
_KEEPALIVE = keepalive_options(idle_s=30, interval_s=10, count=3)


class Direct:
    """Used from one event loop. `endpoints_of` gives a peer's addresses (/ip4/…/tcp/…), as the peer announced them."""

    def __init__(self, acceptor: Acceptor, endpoints_of: Callable[[str], Sequence[str]]) -> None:
        self._acceptor, self._endpoints_of = acceptor, endpoints_of
        self._listeners: list[socket.socket] = []
        self._tasks = Tasks()

    @property
    def port(self) -> int:
        """The port that this peer listens on; 0: it does not listen."""
        return int(self._listeners[0].getsockname()[1]) if self._listeners else 0

    def listen(self, maddr: str) -> None:
        """From now on, accept connections here too. Port 0: any free one. Raises UserError."""
        where = parse_maddr(maddr)
        family = socket.AF_INET6 if where.kind == "ip6" else socket.AF_INET
        try:
            listener = socket.create_server((where.host, where.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            # create_server adds the address to the reason, in Python's words.
            reason = str(error.strerror).partition(" (while")[0]
            raise UserError(
                f"cannot listen for data on {maddr}: {reason}; choose another --hv.data-port"
            ) from error
        listener.setblocking(False)
        self._listeners.append(listener)
        self._tasks.spawn(accept_forever(listener, self._accepted, "a connection for data"))

    def knows(self, peer_id: str) -> bool:
        """Whether this peer has announced where to call it."""
        return bool(self._endpoints_of(peer_id))

    async def serve(self, protocol: str, handler: Handler) -> None:
        """From now on, `handler(authenticated peer id, stream)` owns each new stream on this protocol."""
        self._acceptor.serve(protocol, handler)

    async def open(
        self, peer_id: str, protocol: str, *, timeout_s: float, maddrs: Sequence[str] = ()
    ) -> socket.socket:
        """A non-blocking stream to a peer that serves `protocol`; `maddrs` are libp2p's. Raises PeerUnreachable."""
        deadline = time.monotonic() + timeout_s
        failures = []
        for endpoint in self._endpoints_of(peer_id)[:MAX_ENDPOINTS]:
            try:
                sock = await _connected(parse_maddr(endpoint), min(PROBE_S, _left_s(deadline)))
                return await self._acceptor.call(sock, peer_id, protocol, timeout_s=_left_s(deadline))
            except (PeersError, OSError) as error:
                failures.append(f"{endpoint}: {str(error) or 'no answer in time'}")
        raise PeerUnreachable(f"no direct stream to {peer_id}: {'; '.join(failures) or 'no endpoint known'}")

    async def close(self) -> None:
        """Accept no more connections, and drop those that are being greeted. Streams stay with their owners."""
        await self._tasks.close()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _accepted(self, sock: socket.socket, address: tuple[str, int]) -> None:
        _set_options(sock)
        self._tasks.spawn(self._acceptor.receive(sock, source=source_of(address[0])))


async def _connected(endpoint: Maddr, timeout_s: float) -> socket.socket:
    """Raises OSError."""
    async with asyncio.timeout(timeout_s):
        family, host = _FAMILIES[endpoint.kind], endpoint.host
        if endpoint.kind not in ("ip4", "ip6"):
            family, host = await _look_up(host, family)
        with closed_on_error(socket.socket(family, socket.SOCK_STREAM)) as sock:
            sock.setblocking(False)
            _set_options(sock)
            await asyncio.get_running_loop().sock_connect(sock, (host, endpoint.port))
            return sock


async def _look_up(name: str, family: socket.AddressFamily) -> tuple[socket.AddressFamily, str]:
    """The family and address of a host. Raises OSError.

    A peer may announce a name whose server never answers. So only a few threads look names up: not those of the shared
    pool, and none that the process waits for when it ends.
    """
    if not _lookups.acquire(blocking=False):
        raise OSError("too many names are being looked up already")
    found: Future[tuple[socket.AddressFamily, str]] = Future()
    found.set_running_or_notify_cancel()

    def look_up() -> None:
        try:
            first = socket.getaddrinfo(name, None, family=family, type=socket.SOCK_STREAM)[0]
            found.set_result((first[0], str(first[4][0])))
        except (OSError, UnicodeError) as error:
            found.set_exception(OSError(f"{name} is not known: {error}"))
        finally:
            _lookups.release()

    threading.Thread(target=look_up, name="look up", daemon=True).start()
    return await asyncio.wrap_future(found)


def source_of(host: str) -> str:
    """The key for limits per source: the IPv4 address, or the IPv6 network of 64 bits, which one host may fill."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return host if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
