"""The transports and paths of this peer, built, started and closed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peers.net.gate import Gate
from peers.net.identity import Identity
from peers.net.mesh import mesh_protocol
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.direct import Direct
from peers.net.paths.paths import Paths, TransportMode
from peers.net.paths.relay import Relay
from peers.net.paths.tls import Credentials
from peers.net.transport import Libp2p
from peers.protocol.maddrs import Maddr, is_loopback, parse_maddr
from peers.protocol.records import MAX_ENDPOINTS, MAX_PATHS, NO_RANK, Announcement, Path
from peers.protocol.refusal import Refused
from peers.protocol.states import state_protocol


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Where this peer listens, and by which paths its data may go."""

    transport: TransportMode = "auto"
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Where libp2p listens; data has a port of its own on the same hosts."""
    announce_maddrs: tuple[str, ...] = ()
    data_port: int = 0
    announce_data_maddrs: tuple[str, ...] = ()


class Network:
    """`peers` returns the newest announcement of every other live peer of the run."""

    paths: Paths

    def __init__(
        self,
        *,
        run_id: str,
        identity: Identity,
        libp2p: Libp2p,
        settings: NetworkSettings,
        peers: Callable[[], Iterable[Announcement]],
        gate: Gate,
    ) -> None:
        self._settings, self._peers, self._gate = settings, peers, gate
        self._acceptor = Acceptor(
            Credentials.of(identity),
            allows=self._may_call,
            plain=settings.transport == "tcp",
        )
        self._direct = Direct(self._acceptor, self._endpoints_of) if settings.transport != "libp2p" else None
        self._relay = Relay(
            run_id=run_id,
            peer_id=identity.peer_id,
            libp2p=libp2p,
            acceptor=self._acceptor,
            peers=lambda: {peer.peer_id: peer.maddrs for peer in self._peers()},
            rate_to=lambda peer_id: self.paths.rate_to(peer_id),
        )
        self.data_protocol = f"diloco/{run_id}/data"
        self.paths = Paths(
            libp2p=libp2p,
            acceptor=self._acceptor,
            direct=self._direct,
            relay=self._relay,
            data=self.data_protocol,
            bulk={state_protocol(run_id)},
            check=gate.check_shown,
            # Peers show their tokens on the mesh's protocol.
            unchecked={mesh_protocol(run_id)},
        )

    async def start(self) -> None:
        """Accept connections, and forward for others. Raises UserError."""
        if self._direct is not None:
            for maddr in data_hosts(self._settings.host_maddrs):
                port = self._direct.port or self._settings.data_port
                self._direct.listen(str(Maddr(maddr.kind, maddr.host, port, None)))
        await self._relay.start()

    async def close(self) -> None:
        """May be repeated."""
        if self._direct is not None:
            await self._direct.close()
        await self._relay.close()

    @property
    def forwarded_bytes(self) -> int:
        """Bytes that this peer has forwarded for others so far, in each direction."""
        return self._relay.forwarded_bytes

    def endpoints(self, maddrs: Iterable[str]) -> tuple[str, ...]:
        """Where others can call this peer directly; `maddrs`: the addresses at which they see its libp2p."""
        return announced_endpoints(self._settings, self._direct.port, maddrs) if self._direct else ()

    def paths_shown(self) -> tuple[tuple[int, Path], ...]:
        """World rank and path of each peer to which this one has opened streams, as many as a record has room for."""
        in_use = self.paths.in_use
        shown: dict[int, Any] = {peer.world_rank: in_use.get(peer.peer_id) for peer in self._peers()}
        shown.pop(NO_RANK, None)
        return tuple((rank, path) for rank, path in sorted(shown.items()) if path)[:MAX_PATHS]

    def _may_call(self, peer_id: str) -> bool:
        """Whether to accept a direct connection from a caller that claims to be this peer."""
        try:
            self._gate.check_shown(peer_id, "data port")
        except Refused:
            return False
        return peer_id in self._ids()

    def _ids(self) -> set[str]:
        return {peer.peer_id for peer in self._peers()}

    def _endpoints_of(self, peer_id: str) -> Sequence[str]:
        return next((peer.endpoints for peer in self._peers() if peer.peer_id == peer_id), ())


def data_hosts(host_maddrs: Iterable[str]) -> list[Maddr]:
    """The hosts on which data connections are accepted: those that libp2p listens on, each once."""
    found = {(maddr.kind, maddr.host): maddr for maddr in map(parse_maddr, host_maddrs)}
    # Listening on the unspecified address takes the port on every address of its family.
    everywhere = {maddr.kind: maddr for maddr in found.values() if maddr.host in ("0.0.0.0", "::")}
    return list(dict.fromkeys(everywhere.get(maddr.kind, maddr) for maddr in found.values()))


def announced_endpoints(settings: NetworkSettings, port: int, maddrs: Iterable[str]) -> tuple[str, ...]:
    """The data port's addresses, as others see them.

    Those that the user announces; else the hosts at which others see libp2p. If the user announces only libp2p's port,
    a host that maps ports one to one is used for data too; a host that maps single ports is not.
    """
    if not port:
        return ()
    said = [parse_maddr(text) for text in settings.announce_data_maddrs]
    if said:
        return tuple(str(Maddr(m.kind, m.host, m.port or port, None)) for m in said)[:MAX_ENDPOINTS]
    seen = [parse_maddr(text) for text in settings.announce_maddrs or maddrs]
    if settings.announce_maddrs:
        own_ports = {parse_maddr(text).port for text in settings.host_maddrs}
        seen = [maddr for maddr in seen if maddr.port in own_ports]
    # On another machine, a loopback address is that machine's own.
    seen = [maddr for maddr in seen if not is_loopback(maddr)] or seen
    hosts = dict.fromkeys((maddr.kind, maddr.host) for maddr in seen)
    return tuple(str(Maddr(kind, host, port, None)) for kind, host in hosts)[:MAX_ENDPOINTS]
