"""Asks other members to connect to this machine's ports, and measures the clock offset and the bandwidth to them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from diloco.doctor.findings import Finding, passed, warned
from diloco.doctor.nat import Observation, Port, judge_announcement, judge_nat, judge_port
from diloco.options.flags import HvConfig
from peers.errors import PeersError
from peers.net.identity import Identity
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.direct import Direct
from peers.net.paths.network import data_hosts
from peers.net.paths.reachability import DIALLED_PROTOCOL, Asked, Busy, Speed, asking, caller_of
from peers.net.paths.tls import Credentials
from peers.protocol.maddrs import Maddr, parse_maddr
from peers.protocol.refusal import Refused
from peers.system import tcp_buffer_bytes

if TYPE_CHECKING:
    from peers.net.libp2p.transport import Transport

_SLOW_BYTES_PER_S = 2e6
_ENOUGH_BYTES_PER_S = 125e6
"""1 Gbit/s: few links between places carry more."""
_SHARE_IN_BURST = 0.25
"""A short burst on a new stream reaches this share of what TCP's buffers allow, if the link carries that."""
LARGER_BUFFERS = 'sysctl -w net.ipv4.tcp_rmem="4096 131072 67108864" net.ipv4.tcp_wmem="4096 16384 67108864"'
_DISCARD_PORT = 9


class ReachabilityProbe:
    """Listens on the ports of a peer, and asks members one after another. Used from one event loop."""

    def __init__(self, hv: HvConfig, identity: Identity) -> None:
        self._hv = hv
        self.ahead_s: dict[str, float] = {}
        """How far this machine's clock is ahead of each member's, by the member's name."""
        self._asked: set[str] = set()
        self._acceptor = Acceptor(Credentials.of(identity), allows=self._asked.__contains__)
        self._acceptor.serve(DIALLED_PROTOCOL, _close_stream)
        self._listeners: list[Direct] = []
        self._ports: list[Port] = []
        self._observation: Observation | None = None

    def listen(self) -> None:
        """Listen on both of a peer's ports. Raises UserError."""
        hv = self._hv
        libp2p = [parse_maddr(text) for text in hv.host_maddrs]
        announced = [parse_maddr(text).port for text in hv.announce_maddrs]
        self._listen("libp2p port", libp2p, announced, "--hv.announce-maddrs")
        if hv.transport != "libp2p":
            data = [Maddr(maddr.kind, maddr.host, hv.data_port, None) for maddr in data_hosts(hv.host_maddrs)]
            announced = [parse_maddr(text).port for text in hv.announce_data_maddrs]
            self._listen("data port", data, announced, "--hv.announce-data-maddrs")

    async def ask(
        self, transport: Transport, peer_id: str, name: str, maddrs: Sequence[str], token: bytes
    ) -> Finding:
        """Ask one member for its time, to connect to this machine's ports, and to measure the bandwidth."""
        self._asked.add(peer_id)
        try:
            async with asking(transport, peer_id, self._hv.run_id, token=token, maddrs=maddrs) as asked:
                self.ahead_s[name] = asked.here.ahead_s
                await self._request_connections(transport, asked, peer_id, name)
                speed = await asked.speed()
                return judge_bandwidth(name, speed, asked.here.round_trip_s, tcp_buffer_bytes())
        except Busy as error:
            return warned("bandwidth", f"{name}: {error}", self._fix_by("diloco doctor", "in a minute"))
        except Refused as error:
            return warned("bandwidth", f"{name} does not answer: {error.why}", "--swarm-secret-file FILE")
        except PeersError as error:
            fix = self._fix_by("diloco status", "whether it is still in the swarm")
            return warned("bandwidth", f"{name} does not answer: {error}", fix)

    def _fix_by(self, command: str, why: str) -> str:
        return f"{command} --initial-peers {' '.join(self._hv.initial_peers)}  # {why}"

    def findings(self) -> Iterator[Finding]:
        """Findings about ports, NAT and announced addresses, as seen by a peer on another network if one was asked."""
        observation = self._observation
        if observation is None:
            yield warned(
                "nat",
                "no member could tell from which address this machine connects",
                self._fix_by("diloco status", "the members of the swarm"),
            )
            return
        for port in self._ports:
            yield judge_port(port, observation)
        yield judge_nat(observation)
        flags = {
            "--hv.announce-maddrs": self._hv.announce_maddrs,
            "--hv.announce-data-maddrs": self._hv.announce_data_maddrs,
        }
        for flag, texts in flags.items():
            for maddr in map(parse_maddr, texts):
                if maddr.kind in ("ip4", "ip6") and (
                    finding := judge_announcement(maddr.host, flag, observation)
                ):
                    yield finding

    async def close(self) -> None:
        """Repeating it is safe."""
        for direct in self._listeners:
            await direct.close()

    def _listen(
        self, name: str, maddrs: Sequence[Maddr], announced: Sequence[int], announce_flag: str
    ) -> None:
        direct = Direct(self._acceptor, lambda _: ())
        self._listeners.append(direct)
        for maddr in maddrs:
            # If the port is 0, use the first one chosen on all hosts.
            direct.listen(str(Maddr(maddr.kind, maddr.host, maddr.port or direct.port, None)))
        outside = announced[0] if announced and announced[0] else direct.port
        is_named = bool(announced) or any(maddr.port for maddr in maddrs)
        self._ports.append(Port(name, direct.port, outside, is_named, announce_flag))

    async def _request_connections(self, transport: Transport, asked: Asked, peer_id: str, name: str) -> None:
        """Let the member connect to this machine's ports, unless a peer on another network has already done so."""
        host = asked.here.host
        if not host or (self._observation is not None and not self._observation.is_near):
            return
        errors = {port.name: await asked.dial(port.announced) for port in self._ports}
        caller = caller_of(await transport.addresses_of(peer_id))
        there = caller.host if caller else ""
        self._observation = Observation(name, host, local_address(there), there, errors)


def local_address(towards: str) -> str:
    """The address from which this machine would send to a host; empty if unknown. Sends nothing."""
    if not towards:
        return ""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((towards, _DISCARD_PORT))
        return str(probe.getsockname()[0])
    return ""


def judge_bandwidth(name: str, speed: Speed, round_trip_s: float, buffer_bytes: int | None) -> Finding:
    """The finding for the link to this member; `buffer_bytes`: the largest buffers of this machine's TCP, if known."""
    slower, faster = sorted((speed.to_peer, speed.from_peer))
    message = (
        f"{name}: about {speed.to_peer / 1e6:.1f} MB/s to it and {speed.from_peer / 1e6:.1f} MB/s from it, "
        f"{round_trip_s * 1000:.0f} ms"
    )
    most = buffer_bytes / round_trip_s if buffer_bytes and round_trip_s else _ENOUGH_BYTES_PER_S
    if most < _ENOUGH_BYTES_PER_S:
        message += f"; TCP is set to carry {most / 1e6:.0f} MB/s at most in one stream over that time"
    if 0 < slower < _SLOW_BYTES_PER_S:
        return warned("bandwidth", message, "--hv.compression int4 --hv.num-fragments 4 --hv.overlap-steps 5")
    if most < _ENOUGH_BYTES_PER_S and faster > _SHARE_IN_BURST * most:
        return warned("bandwidth", message, f"{LARGER_BUFFERS}  # on all machines, as root")
    return passed("bandwidth", message)


async def _close_stream(_peer_id: str, stream: socket.socket) -> None:
    stream.close()
