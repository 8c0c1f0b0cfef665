"""What a light peer's process does before it becomes a peer: enter another network, or patch its daemon."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import numpy as np

from peers.protocol.certificates import Certificate

LIES = "this peer has lied"
"""In the log of a peer that has lied."""
STALLS = "stalling"
"""In the log of a peer that ignores its ban, with the id of each peer that asks for its state."""
SERVES = "serving a made-up state"
"""In the log of a liar that was asked for a state that it has made up, with its head."""
HOLDS = "holding its state back"
"""In the log of a peer that was asked for its state and does not send it yet."""
Poison = Literal["not finite", "longer than announced"]

_CERTIFICATE = msgspec.json.Decoder(Certificate)

log = logging.getLogger(__name__)


def edges(*, namespace: str = "", cut_off_from: Sequence[str] = ()) -> None:
    """Enter this network namespace, and let libp2p reach none of these peers, as if no packets got through."""
    from peers.errors import PeerUnreachable
    from peers.net.libp2p.transport import Transport
    from tests.support import namespaces

    if namespace:
        namespaces.enter(namespaces.path_of(namespace))
    if not cut_off_from:
        return
    really_open, really_list = Transport.open, Transport.connected_peers

    async def open_stream(self: Transport, peer_id: str, protocol: str, **options: Any) -> Any:
        if peer_id in cut_off_from:
            raise PeerUnreachable(f"no path to {peer_id}")
        return await really_open(self, peer_id, protocol, **options)

    async def connected_peers(self: Transport) -> set[str]:
        return await really_list(self) - set(cut_off_from)

    Transport.open, Transport.connected_peers = open_stream, connected_peers  # type: ignore[method-assign]


def clock_off(seconds: float) -> None:
    """Shift the clock of this process's daemon, and so the times that it announces."""
    from peers.daemon import daemon

    names = {name: getattr(time, name) for name in ("monotonic", "time_ns")}
    daemon.time = SimpleNamespace(**names, time=lambda: time.time() + seconds)  # type: ignore[attr-defined]


def poison(kind: Poison) -> None:
    """Make this process contribute values of this kind to rounds, and accept whatever it gets. It follows the protocol
    otherwise."""
    from peers.reduce import arithmetic
    from peers.reduce.arithmetic import Arithmetic

    honest = Arithmetic.__init__

    def hostile(self: Arithmetic, *arguments: Any) -> None:
        honest(self, *arguments)
        sent = self._contribution
        local = sent.anchor - np.float32(1000) * (sent.anchor - sent.local)
        self._contribution = sent._replace(
            local=np.full_like(local, np.nan) if kind == "not finite" else local
        )

    Arithmetic.__init__ = hostile  # type: ignore[method-assign]
    # Otherwise it would refuse its own contribution, and abort.
    arithmetic.spend = lambda energy_left, energy, what: energy_left


def ignore_bans() -> None:
    """Make this process ignore its own ban, and let peers that ask for its state wait in vain."""
    from peers.admission.service import AdmissionService
    from peers.net.states.server import StateServer

    async def stall(server: StateServer, head: str, channel: Any) -> None:
        asking = next(peer_id for peer_id, newest in server._newest.items() if newest is channel)
        log.info("%s %s", STALLS, asking)
        await asyncio.sleep(60.0)

    AdmissionService._is_banned = property(lambda service: False)  # type: ignore[assignment, method-assign]
    StateServer._serve_state = stall  # type: ignore[method-assign]


def hold_state_until(flag: Path) -> None:
    """Make this process send its state only once the file `flag` exists."""
    from peers.net.states import server

    hand_over = server._serve_snapshot

    async def hold(*arguments: Any) -> None:
        log.info(HOLDS)
        while not flag.exists():
            await asyncio.sleep(0.02)
        await hand_over(*arguments)

    server._serve_snapshot = hold


def lie(name: str) -> None:
    """Let the daemon decide with the liar of this name from the random schedules (`ALL_LIARS`).

    One that forges commits also shows them to whoever asks, and serves their state."""
    from diloco.sim.forgers import Forger
    from diloco.sim.schedules import ALL_LIARS
    from tests.support.real_liars import ServingForger

    make = ALL_LIARS[name]
    if isinstance(make, partial) and make.func is Forger:
        make = partial(ServingForger, **make.keywords)
    _decide_with(make)


def forge_votes() -> None:
    """Make this process sign its votes with nobody's key. It follows the protocol otherwise."""
    from tests.support.real_liars import ForgesVotes

    _decide_with(ForgesVotes)


def claim_rank(rank: int) -> None:
    """Make this process claim this world rank towards everybody, whichever it is given."""
    from tests.support.real_liars import ClaimsRank

    _decide_with(partial(ClaimsRank, rank=rank))


def _decide_with(make_liar: Callable[..., Any]) -> None:
    from peers.daemon import daemon

    honest = daemon.Peer

    def make(*, keys: Any, now: float, **rest: Any) -> Any:
        inner = honest(keys=keys, now=now, **rest)
        liar = make_liar(inner=inner, keys=keys, rng=random.Random(1), now=now, lies_at=now)
        liar.hear = noted(liar.hear, lambda event: event)
        liar.say = noted(liar.say, lambda effect: (effect,))
        liar.invent = noted(liar.invent, lambda: ())
        liar.answer = noted(liar.answer, lambda event: ())
        _serve_made_up(liar)
        return liar

    daemon.Peer = make  # type: ignore[misc, assignment]


def _serve_made_up(liar: Any) -> None:
    """Let this process serve `liar.state` for every head in `liar.made_up`."""
    from peers.net.states import server
    from peers.protocol.states import Unavailable, WantCommits, WantState

    honest = server.StateServer._answer

    async def answer(self: server.StateServer, request: WantState | WantCommits, channel: Any) -> None:
        head = request.head if isinstance(request, WantState) else request.until
        if head not in liar.made_up:
            await honest(self, request, channel)
            return
        log.info("%s %s", SERVES, head)
        if isinstance(request, WantCommits):
            await channel.send_last(Unavailable(), 5.0)
        else:
            await server._serve_snapshot(liar.state.snapshot(), channel)

    server.StateServer._answer = answer  # type: ignore[method-assign]


def record_commits(path: Path) -> None:
    """Append the certificate of each commit that this process makes or adopts to a file, for `commits_in`."""
    from peers.core.effects import Adopt, Apply
    from peers.daemon import daemon

    honest = daemon.Peer.handle

    def handle(self: daemon.Peer, event: Any, now: float) -> Any:
        made = honest(self, event, now)
        with path.open("ab") as file:
            for effect in made:
                if isinstance(effect, Adopt | Apply):
                    file.write(msgspec.json.encode(effect.certificate) + b"\n")
        return made

    daemon.Peer.handle = handle  # type: ignore[method-assign]


def commits_in(path: Path) -> Sequence[Certificate]:
    """What `record_commits` has written so far."""
    return [
        _CERTIFICATE.decode(line)
        for line in path.read_bytes().splitlines(keepends=True)
        if line[-1:] == b"\n"
    ]


def agree_once_met(*peer_ids: str) -> None:
    """Make this process adopt a manifest only when it has met all of these peers."""
    from peers.daemon.agreement import Agreement

    reach = Agreement.reach

    async def wait_and_reach(self: Agreement, *arguments: Any, **options: Any) -> Any:
        while not self._presence.view.keys() >= set(peer_ids):
            await self._presence.wait_for_change()
        return await reach(self, *arguments, **options)

    Agreement.reach = wait_and_reach  # type: ignore[method-assign]


def noted(said: Callable[..., Any], honest: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `said`, and logs each result that differs from what `honest` returns."""

    def say(*arguments: Any) -> Any:
        truth, told = honest(*arguments), said(*arguments)
        if isinstance(truth, tuple):
            told = tuple(told)
        if told != truth:
            log.info(LIES)
        return told

    return say
