"""Derives findings on this machine's ports, NAT and announced addresses from connections of another peer. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

from diloco.doctor.findings import Finding, failed, passed, warned

NatKind = Literal["direct", "filtered", "mapped", "hidden"]


@dataclass(frozen=True)
class Port:
    """One port of a peer: where it listens, and the port that it announces to others."""

    name: str
    listens: int
    announced: int
    is_named: bool
    """Whether the user has chosen the port, in which case an unreachable port is a failure."""
    announce_flag: str


@dataclass(frozen=True)
class Observation:
    """What one peer has observed of this machine."""

    peer: str
    """The peer's name."""
    host: str
    """The address from which this machine's connection comes, as the peer sees it."""
    local_host: str
    """The address that this machine itself uses towards the peer."""
    peer_host: str
    """The peer's address, as this machine sees it."""
    errors: dict[str, str]
    """By port name, why the peer's connection to the port failed; empty if it succeeded."""

    @property
    def is_near(self) -> bool:
        """Whether the peer is on this machine or behind the same address, so that its connections do not come
        from outside."""
        return ipaddress.ip_address(self.host).is_loopback or self.peer_host == self.host

    @property
    def kind(self) -> NatKind:
        """`direct` and `filtered`: seen under its own address, and reached or not; `mapped` and `hidden`: seen under
        another address (NAT), and reached or not."""
        is_reached = any(not error for error in self.errors.values())
        if self.host == self.local_host:
            return "direct" if is_reached else "filtered"
        return "mapped" if is_reached else "hidden"


def judge_port(port: Port, observation: Observation) -> Finding:
    error = observation.errors[port.name]
    if not error:
        return passed(port.name, f"{port.announced} is reached by {observation.peer}")
    where = (
        f"announced for port {port.listens} of this machine"
        if port.listens != port.announced
        else "this machine listens on it"
    )
    message = f"{port.announced} is not reached by {observation.peer}: {error} ({where})"
    fix = _fix(port, observation)
    if port.is_named:
        return failed(port.name, message, fix)
    return warned(port.name, f"{message}; data will use other paths, at worst through a third peer", fix)


def judge_nat(observation: Observation) -> Finding:
    host = observation.host
    if observation.is_near:
        return warned(
            "nat",
            f"{observation.peer} is on this machine or behind the same address, so access from outside is not tested",
            "diloco doctor --initial-peers <maddr>  # the address of a peer on another network",
        )
    is_global = ipaddress.ip_address(host).is_global
    near = "" if is_global else ", on a private network"
    if observation.kind == "direct":
        kind = "public" if is_global else "direct"
        return passed("nat", f"{kind}: seen as {host}, this machine's own address{near}")
    if observation.kind == "mapped":
        return passed("nat", f"mapped: seen as {host}{near}, and reachable")
    if observation.kind == "filtered":
        return warned(
            "nat",
            f"filtered: seen as {host}, this machine's own address{near}, but a firewall blocks connections",
            "sudo ufw allow 30002:30003/tcp  # or in the cloud's firewall; then use them in --hv.host-maddrs",
        )
    return warned(
        "nat",
        f"hidden: seen as {host}{near}, and connections to it do not reach this machine",
        f"--hv.announce-maddrs /ip4/{host}/tcp/PORT  # a port that the router or pod maps to this machine",
    )


def judge_announcement(announced: str, flag: str, observation: Observation) -> Finding | None:
    """A warning if an announced IP address is not the one that the peer has observed."""
    if observation.is_near or announced == observation.host:
        return None
    return warned(
        "announced address",
        f"{flag} has {announced}, but {observation.peer} sees this machine as {observation.host}",
        f"{flag} /ip4/{observation.host}/tcp/PORT",
    )


def _fix(port: Port, observation: Observation) -> str:
    if port.listens != port.announced:
        return f"map port {port.announced} to {port.listens} here, or announce the mapped port: {port.announce_flag}"
    if observation.kind == "hidden":
        return f"{port.announce_flag} /ip4/{observation.host}/tcp/PORT  # a port that is mapped to {port.listens} here"
    return f"sudo ufw allow {port.listens}/tcp  # or in the cloud's firewall"
