"""Judges this machine's ports, NAT and announced addresses by the calls that another peer has made to it. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

from diloco.doctor.findings import Finding, failed, passed, warned

Kind = Literal["direct", "filtered", "mapped", "hidden"]


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
    """How one peer sees this machine."""

    by: str
    host: str
    """The address from which this machine's connection comes, as the peer sees it."""
    local: str
    """The address that this machine itself uses towards the peer."""
    there: str
    """The peer's address, as this machine sees it."""
    errors: dict[str, str]
    """By port name, why the peer's call to the port failed; empty if it succeeded."""

    @property
    def is_near(self) -> bool:
        """Whether the peer is on this machine or behind the same address, so its calls do not come from outside."""
        return ipaddress.ip_address(self.host).is_loopback or self.there == self.host

    @property
    def kind(self) -> Kind:
        """`direct` and `filtered`: seen under its own address, and reached or not; `mapped` and `hidden`: seen under
        another address (NAT), and reached or not."""
        is_reached = any(not error for error in self.errors.values())
        if self.host == self.local:
            return "direct" if is_reached else "filtered"
        return "mapped" if is_reached else "hidden"


def judge_port(port: Port, seen: Observation) -> Finding:
    error = seen.errors[port.name]
    if not error:
        return passed(port.name, f"{port.announced} is reached by {seen.by}")
    where = f"inside it is {port.listens}" if port.listens != port.announced else "this machine listens there"
    said = f"{port.announced} is not reached by {seen.by}: {error} ({where})"
    fix = _fix(port, seen)
    if port.is_named:
        return failed(port.name, said, fix)
    return warned(port.name, f"{said}; bytes will go by other ways, the last through a third peer", fix)


def judge_nat(seen: Observation) -> Finding:
    host = seen.host
    if seen.is_near:
        return warned(
            "nat",
            f"{seen.by} is on this machine or behind the same address, so nothing is known of the outside",
            "diloco doctor --initial-peers <maddr>  # of a peer elsewhere",
        )
    is_global = ipaddress.ip_address(host).is_global
    near = "" if is_global else ", on a private network"
    if seen.kind == "direct":
        kind = "public" if is_global else "direct"
        return passed("nat", f"{kind}: seen as {host}, this machine's own address{near}")
    if seen.kind == "mapped":
        return passed("nat", f"mapped: seen as {host}{near}, and calls to it get through")
    if seen.kind == "filtered":
        return warned(
            "nat",
            f"filtered: seen as {host}, this machine's own address{near}, but a firewall blocks calls to it",
            "sudo ufw allow 30002:30003/tcp  # or in the cloud's firewall; then name them by --hv.host-maddrs",
        )
    return warned(
        "nat",
        f"hidden: seen as {host}{near}, and calls to it do not reach this machine",
        f"--hv.announce-maddrs /ip4/{host}/tcp/PORT  # once a router or pod maps that port to this machine",
    )


def judge_announcement(announced: str, flag: str, seen: Observation) -> Finding | None:
    """A warning if an announced IP address is not the one under which this machine is seen."""
    if seen.is_near or announced == seen.host:
        return None
    return warned(
        "announced address",
        f"{flag} says {announced}, and {seen.by} sees this machine as {seen.host}",
        f"{flag} /ip4/{seen.host}/tcp/PORT",
    )


def _fix(port: Port, seen: Observation) -> str:
    if port.listens != port.announced:
        return f"map port {port.announced} to {port.listens} here, or announce the one that is: {port.announce_flag}"
    if seen.kind == "hidden":
        return f"{port.announce_flag} /ip4/{seen.host}/tcp/PORT  # a port that leads to {port.listens} here"
    return f"sudo ufw allow {port.listens}/tcp  # or in the cloud's firewall"
