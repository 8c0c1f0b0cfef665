"""Checks the connection to a swarm: initial peers, clock, admission, and reachability from outside."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

from diloco.doctor.findings import Finding, failed, passed, warned
from diloco.doctor.p2pd import SPARE_KEY
from diloco.doctor.reachability import ReachabilityProbe
from diloco.options.flags import HvConfig
from peers.admission.own_token import NoIssuer, request_token
from peers.admission.secrets import SwarmSecret, load_secret
from peers.errors import PeersError, UserError
from peers.net.dht.bootstrap import ClockOff
from peers.net.dht.node import Dht, announced
from peers.net.gate import Gate
from peers.net.identity import Identity
from peers.protocol.maddrs import parse_maddr
from peers.protocol.records import ISSUERS_KEY, PEERS_KEY, Announcement, CoordinatorRecord, shown_rank
from peers.protocol.refusal import Refused, Why

ADMISSION_TIMEOUT_S = 4.0
MAX_ASKED = 8
"""In a larger swarm, only this many members are asked."""
_SET_CLOCK = "sudo timedatectl set-ntp true"
_WARN_CLOCK_S = 1.0
_ALLOWED_CLOCK_S = 3.0
_GIVE_SECRET = "--swarm-secret-file FILE  # a copy of the one that `diloco dht start` names"


@dataclass(frozen=True)
class Member:
    """A peer of the run, or its coordinator."""

    peer_id: str
    name: str
    maddrs: tuple[str, ...]


async def check_swarm(hv: HvConfig, identity: Identity, timeout_s: float) -> AsyncIterator[Finding]:
    """All checks that need other members of the swarm."""
    try:
        secret = load_secret(hv.swarm_secret_file, os.environ)
    except UserError as error:
        yield failed("admission", str(error), _GIVE_SECRET)
        return
    try:
        dht = await Dht.join(
            identity=identity, initial_peers=hv.initial_peers, client_mode=True, timeout_s=timeout_s
        )
    except ClockOff as error:
        yield failed("clock", str(error), _SET_CLOCK)
        return
    except PeersError as error:
        yield failed("initial peers", str(error), _start_there(hv, hv.initial_peers[0]))
        return
    try:
        async for finding in _check_members(dht, hv, identity, secret):
            yield finding
    finally:
        await dht.close()


async def _check_members(
    dht: Dht, hv: HvConfig, identity: Identity, secret: SwarmSecret | None
) -> AsyncIterator[Finding]:
    yield await _check_initial_peers(dht, hv)
    admission, token = await _check_admission(dht, hv, identity, secret)
    yield admission
    members = await members_of(dht, hv.run_id, secret, without=identity.peer_id)
    if not members:
        yield warned(
            "swarm",
            f"this DHT has no members of the run {hv.run_id} that could test this machine's ports",
            f"diloco dht start --run-id {hv.run_id}  # or correct --run-id",
        )
        return
    shown = f"{len(members)} member{'s' if len(members) > 1 else ''} of the run {hv.run_id}"
    yield passed("swarm", shown if len(members) <= MAX_ASKED else f"{shown}, {MAX_ASKED} of which are asked")
    probe = ReachabilityProbe(hv, identity)
    try:
        probe.listen()
        for member in members[:MAX_ASKED]:
            yield await probe.ask(dht.transport, member.peer_id, member.name, member.maddrs, token)
        for finding in probe.findings():
            yield finding
    finally:
        await probe.close()
    yield judge_clock(probe.ahead_s)


async def members_of(dht: Dht, run_id: str, secret: SwarmSecret | None, *, without: str) -> list[Member]:
    """The peers of a run by world rank, then coordinators; with a secret, only those whose records it verifies."""
    from peers.admission.ranks import coordinators

    gate = Gate(run_id, secret.public_key if secret else None)
    peers = await announced(dht, PEERS_KEY(run_id), Announcement, run_id, gate.check_quietly)
    found = {
        peer.peer_id: Member(
            peer.peer_id, f"peer {shown_rank(peer.world_rank)} (…{peer.peer_id[-6:]})", peer.maddrs
        )
        for peer in sorted(peers.values(), key=lambda peer: peer.world_rank)
        if peer.state != "leaving" and peer.peer_id != without
    }
    for record in await coordinators(dht, run_id, gate):
        found.setdefault(
            record.peer_id,
            Member(record.peer_id, f"the coordinator (…{record.peer_id[-6:]})", record.maddrs),
        )
    return list(found.values())


def judge_clock(ahead_s: dict[str, float]) -> Finding:
    """The finding for the clock; `ahead_s` is how far this machine's clock is ahead of each member's."""
    if not ahead_s:
        return passed("clock", f"less than {_ALLOWED_CLOCK_S:g} s off; no member has told its time")
    name, off_s = max(ahead_s.items(), key=lambda item: abs(item[1]))
    message = f"{abs(off_s):.2f} s {'ahead of' if off_s > 0 else 'behind'} that of {name}"
    if abs(off_s) < _WARN_CLOCK_S:
        return passed("clock", message)
    if abs(off_s) < _ALLOWED_CLOCK_S:
        return warned(
            "clock", f"{message}; peers that are {_ALLOWED_CLOCK_S:g} s off are refused", _SET_CLOCK
        )
    return failed("clock", f"{message}; the limit is {_ALLOWED_CLOCK_S:g} s", _SET_CLOCK)


async def _check_initial_peers(dht: Dht, hv: HvConfig) -> Finding:
    connected = await dht.transport.connected_peers()
    silent = [text for text in hv.initial_peers if parse_maddr(text).peer_id not in connected]
    if silent:
        return warned(
            "initial peers",
            f"{len(silent)} of {len(hv.initial_peers)} do not answer: {', '.join(silent)}",
            _start_there(hv, silent[0]),
        )
    return passed("initial peers", "answer" if len(hv.initial_peers) > 1 else "answers")


def _start_there(hv: HvConfig, maddr: str) -> str:
    where = parse_maddr(maddr)
    return (
        f"on {where.host}: diloco dht start --host-maddrs /ip4/0.0.0.0/tcp/{where.port} --run-id {hv.run_id}"
        "  # and open that port"
    )


async def _check_admission(
    dht: Dht, hv: HvConfig, identity: Identity, secret: SwarmSecret | None
) -> tuple[Finding, bytes]:
    """The finding, and a token to show to other members; empty if there is none or none is needed."""
    if secret is None:
        if await _is_closed(dht, hv.run_id):
            return failed("admission", Why.NO_TOKEN.advice(identity.peer_id), _GIVE_SECRET), b""
        return passed("admission", "the swarm is open and needs no secret"), b""
    kept, problem = _kept_token(identity, hv.run_id, secret)
    try:
        token = await request_token(dht, hv.run_id, secret, timeout_s=ADMISSION_TIMEOUT_S)
        return passed("admission", "the secret is correct, and a token was issued"), token
    except Refused as error:
        return admission_refused(error.why, identity), b""
    except NoIssuer as error:
        return _without_issuer(error, kept, problem, hv.run_id, identity.peer_id)


def _kept_token(identity: Identity, run_id: str, secret: SwarmSecret) -> tuple[bytes, Why | None]:
    """The stored token if it is valid, else b"" and why it is not; b"" and None if there is none."""
    try:
        blob = identity.path.with_suffix(".token").read_bytes()
        Gate(run_id, secret.public_key).check_token(identity.peer_id, blob)
    except OSError:
        return b"", None
    except Refused as error:
        return b"", error.why
    return blob, None


def _without_issuer(
    error: NoIssuer, kept: bytes, problem: Why | None, run_id: str, peer_id: str
) -> tuple[Finding, bytes]:
    start = f"diloco dht start --admission --run-id {run_id}  # on the coordinator's machine"
    if kept:
        message = "no member issues tokens at the moment; this peer's stored token is still valid"
        return warned("admission", message, start), kept
    if problem is not None:
        return failed("admission", problem.advice(peer_id), start), b""
    if error.others:
        return failed("admission", Why.WRONG_SECRET.advice(peer_id), _GIVE_SECRET), b""
    return failed("admission", "no member that issues tokens for the given secret answers", start), b""


async def _is_closed(dht: Dht, run_id: str) -> bool:
    """Whether anyone issues tokens for this run."""
    found = await announced(dht, ISSUERS_KEY(run_id), CoordinatorRecord, run_id, lambda _: None)
    return any(record.token for record in found.values())


def admission_refused(why: Why, identity: Identity) -> Finding:
    peer_id = identity.peer_id
    if why is Why.NOT_LISTED and identity.path.name == SPARE_KEY:
        said = "the run's allowlist has to name this machine's peer, which gets its id when it first starts"
        return failed("admission", said, "diloco peer  # with the same flags; it prints its id")
    fixes = {
        Why.BANNED: f"diloco peers unban {peer_id} --initial-peers <maddr>  # needs the admission key",
        Why.NOT_LISTED: f"echo {peer_id} >> ALLOWLIST  # on the coordinator's machine",
    }
    return failed("admission", why.advice(peer_id), fixes.get(why, _GIVE_SECRET))
