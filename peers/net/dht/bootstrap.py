"""The first contact with a swarm: which of the given addresses answer, and if none does, why."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peers.errors import PeerUnreachable, UserError
from peers.protocol.maddrs import parse_maddr

if TYPE_CHECKING:
    from peers.net.libp2p.transport import Transport

_ANOTHER_PEER = "another peer answers there, not the one whose id ends the address"
_PLAIN_REASONS = ("connection refused", "no route to host", "network is unreachable", "no such host")
_CLOCKS = re.compile(r"local: ([\d.]+), peer: ([\d.]+)")


async def connect_any(transport: Transport, initial_peers: Sequence[str], *, timeout_s: float) -> list[str]:
    """Connect to all of `initial_peers` (each with /p2p/…); returns those that answer.

    Raises UserError if other peers answer at all of these addresses, otherwise PeerUnreachable if none answers: an
    address where nobody does may be a mistake, or that of a machine that is down for a while.
    """
    reasons = await asyncio.gather(*(_connect(transport, maddr, timeout_s) for maddr in initial_peers))
    if initial_peers and None not in reasons:
        details = "; ".join(
            f"{maddr}: {reason}" for maddr, reason in zip(initial_peers, reasons, strict=True)
        )
        kind = UserError if set(reasons) == {_ANOTHER_PEER} else PeerUnreachable
        raise kind(
            f"none of the initial peers answers ({details}). Is one of them running, and its port "
            "open to this machine?"
        )
    return [maddr for maddr, reason in zip(initial_peers, reasons, strict=True) if reason is None]


async def _connect(transport: Transport, maddr: str, timeout_s: float) -> str | None:
    """Returns None, or why it failed."""
    try:
        await transport.connect(str(parse_maddr(maddr).peer_id), [maddr], timeout_s=timeout_s)
        return None
    except PeerUnreachable as error:
        return plain_reason(str(error))


def is_nobody_there(error: str) -> bool:
    """Whether libp2p's error for a failed dial says that no process listens there, rather than that it was slow."""
    return "connection refused" in error and not _is_slow(error)


def _is_slow(error: str) -> bool:
    return any(text in error for text in ("deadline exceeded", "i/o timeout", "no answer within"))


def plain_reason(error: str) -> str:
    """What libp2p's error for a failed dial means, in words for people."""
    if "peer id mismatch" in error:
        return _ANOTHER_PEER
    for text in _PLAIN_REASONS:
        if text in error:
            return text
    if _is_slow(error):
        return "no answer in time"
    if "failed to negotiate security protocol" in error:
        return "something else than diloco seems to listen there"
    return " ".join(error.split())[-200:]


class ClockOff(UserError):
    """The swarm's nodes refuse this machine because its clock differs from theirs."""


def not_taken(error: str) -> UserError:
    """The error to raise if Hivemind refuses a new DHT node: what that means, and what the user can do."""
    clocks = _CLOCKS.search(error)
    if clocks is None:
        return UserError(f"the swarm's DHT does not take this machine: {error}")
    ahead_s = float(clocks[1]) - float(clocks[2])
    off = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'}"
    return ClockOff(
        f"this machine's clock is {off} the swarm's, and at most 3 s are allowed. Set it right (`timedatectl set-ntp "
        "true`, or the clock of the machine that hosts this one), then start again"
    )
