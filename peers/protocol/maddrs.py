"""libp2p multiaddresses (/ip4/…/tcp/…/p2p/…), checked before they are used."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from peers.errors import UserError
from peers.protocol.libp2p_keys import base58_decode

_EXAMPLE = "/ip4/203.0.113.7/tcp/30001"
_EXAMPLE_ID = "/p2p/12D3KooW…"
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_PEER_ID_BYTES = range(34, 43)


@dataclass(frozen=True)
class Maddr:
    """A TCP address. `kind` is ip4, ip6, dns, dns4 or dns6; `peer_id` is None if the address names no peer."""

    kind: str
    host: str
    port: int
    peer_id: str | None

    def __str__(self) -> str:
        return f"/{self.kind}/{self.host}/tcp/{self.port}" + (f"/p2p/{self.peer_id}" if self.peer_id else "")


def validate_maddr(text: str, *, peer_id: bool | None = None) -> None:
    """Raises UserError unless `text` is an address. `peer_id`: whether it must end in /p2p/…; None: either way."""
    whole = f"copy the whole address that `diloco dht start` prints, like {_EXAMPLE}{_EXAMPLE_ID}"
    if peer_id is True and not text.startswith("/"):
        raise UserError(f"{text!r} is not an address; {whole}")
    maddr = parse_maddr(text)
    if peer_id is True and maddr.peer_id is None:
        raise UserError(f"{text} lacks the peer's id at its end; {whole}")
    if peer_id is False and maddr.peer_id is not None:
        raise UserError(f"{text} names a peer; an address to listen on or to announce looks like {_EXAMPLE}")
    if peer_id is True and maddr.port == 0:
        raise UserError(f"{text} has port 0, which nobody can dial; give the port the peer listens on")


@lru_cache(maxsize=4096)  # Every announcement of a peer contains the same addresses again.
def parse_maddr(text: str) -> Maddr:
    """Raises UserError."""
    parts = text.split("/")
    if len(parts) not in (5, 7) or parts[0] or parts[3] != "tcp" or (len(parts) == 7 and parts[5] != "p2p"):
        raise UserError(
            f"{text!r} is not an address like {_EXAMPLE} or {_EXAMPLE}{_EXAMPLE_ID} (only TCP is supported)"
        )
    _, kind, host, _, port = parts[:5]
    peer_id = parts[6] if len(parts) == 7 else None
    if not _is_host(kind, host):
        raise UserError(f"{host!r} in {text!r} is not a host of kind {kind!r}; use /ip4/…, /ip6/… or /dns/…")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise UserError(f"{port!r} in {text!r} is not a port from 0 to 65535")
    if peer_id is not None and not is_peer_id(peer_id):
        raise UserError(f"{peer_id!r} in {text!r} is not a peer id; copy the whole address")
    return Maddr(kind, host, int(port), peer_id)


def is_maddr(text: str) -> bool:
    try:
        parse_maddr(text)
    except UserError:
        return False
    return True


def is_peer_id(text: str) -> bool:
    """Whether `text` is the base58 multihash of a public key."""
    try:
        data = base58_decode(text[:64])
    except ValueError:
        return False
    return len(text) <= 64 and len(data) in _PEER_ID_BYTES and data[:2] in (b"\x12\x20", b"\x00\x24")


def check_listenable(host_maddrs: Iterable[str]) -> None:
    """Raises UserError, with advice, for an address that this machine cannot listen on now: p2pd would fail later."""
    for text in host_maddrs:
        maddr = parse_maddr(text)
        if maddr.kind not in ("ip4", "ip6"):
            raise UserError(
                f"cannot listen on {text}: give an IP address, like /ip4/0.0.0.0/tcp/{maddr.port}"
            )
        family = socket.AF_INET6 if maddr.kind == "ip6" else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((maddr.host, maddr.port))
            except OSError as error:
                raise UserError(f"cannot listen on {text}: {_listen_advice(error, maddr)}") from error


def is_loopback(maddr: Maddr) -> bool:
    return maddr.kind in ("ip4", "ip6") and ipaddress.ip_address(maddr.host).is_loopback


def by_reach(maddrs: Iterable[str]) -> list[str]:
    """The addresses sorted by how far they are reachable: public ones first, loopback ones last."""
    return sorted(maddrs, key=lambda text: _nearness(parse_maddr(text)))


def _is_host(kind: str, host: str) -> bool:
    try:
        if kind == "ip4":
            return bool(ipaddress.IPv4Address(host))
        if kind == "ip6":
            # A zone (fe80::1%eth0) is valid on one machine only, and other parsers treat it differently.
            return "%" not in host and bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False
    return kind in ("dns", "dns4", "dns6") and _HOST_NAME.fullmatch(host) is not None


def _listen_advice(error: OSError, maddr: Maddr) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {maddr.port} is in use; stop what uses it, or choose another port (0: any free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{maddr.host} is not an address of this machine; 0.0.0.0 listens on all it has"
    return f"{error.strerror}"


def _nearness(maddr: Maddr) -> tuple[int, str]:
    if maddr.kind not in ("ip4", "ip6"):
        return 0, str(maddr)
    address = ipaddress.ip_address(maddr.host)
    return (
        3 if address.is_loopback else 2 if address.is_link_local else 1 if address.is_private else 0
    ), str(maddr)
