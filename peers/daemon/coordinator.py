"""The coordinator of a run: it bootstraps the DHT, admits peers and assigns world ranks. Training survives its death.

Its messages are in peers/protocol/admission.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.admission.ledger import RankLedger
from peers.admission.ranks import Registrar
from peers.admission.secrets import DEFAULT_LIFETIME_DAYS, AdmissionSettings, load_or_create_key
from peers.admission.service import AdmissionService
from peers.daemon.known_peers import KnownPeers
from peers.errors import UserError
from peers.monitor.news import Watcher
from peers.net.dht.node import Dht, announced
from peers.net.gate import Gate
from peers.net.identity import Identity, check_run_id, load_or_create
from peers.net.paths.reachability import Reachability
from peers.protocol.admission import coordinator_protocol
from peers.protocol.maddrs import parse_maddr
from peers.protocol.records import COORDINATOR_KEY, PEERS_KEY, TRAINING_STATES, Announcement
from peers.tasks import first_of
from peers.timing import LOOK_S, OFTEN_S, rest_s


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """What a coordinator needs to know."""

    state_dir: Path
    """Holds the ledger, the addresses of peers and, unless `identity_path` names another, the key:
    <state_dir>/coordinator/<run_id>.*"""
    run_id: str = "diloco"
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce_maddrs: tuple[str, ...] = ()
    identity_path: Path | None = None
    initial_peers: tuple[str, ...] = ()
    """Members of the DHT to join; without any, the coordinator enters that of the peers that it knew, or begins one."""
    admission: bool | None = None
    """Whether peers need a token; by default, if this run already has an admission key."""
    allowlist_file: str | None = None
    token_days: float = DEFAULT_LIFETIME_DAYS

    @property
    def admission_key_path(self) -> Path:
        return self.state_dir / "coordinator" / f"{self.run_id}.admission-key"

    @property
    def swarm_secret_path(self) -> Path:
        return self.state_dir / "coordinator" / f"{self.run_id}.swarm-secret"


async def serve(config: CoordinatorConfig, say: Callable[[str], None]) -> None:
    """Coordinate until cancelled. Raises UserError before it serves, PeersError when p2pd dies later.

    `say` is called with the lines to paste for peers, then with who may join, then, if peers of this run are there
    already, with that, then with one line for each peer that joins or leaves and for each epoch.
    """
    directory = config.state_dir / "coordinator"
    run_id = check_run_id(config.run_id)
    async with contextlib.AsyncExitStack() as stack:
        identity = _claim_identity(config.identity_path or directory / f"{run_id}.key")
        stack.callback(identity.release)
        settings = admission_settings(config)
        ledger = stack.enter_context(contextlib.closing(RankLedger(directory / f"{run_id}.sqlite")))
        dht = await Dht.join(
            identity=identity,
            initial_peers=config.initial_peers,
            host_maddrs=config.host_maddrs,
            announce_maddrs=config.announce_maddrs,
        )
        stack.push_async_callback(dht.close)
        known = KnownPeers(directory / f"{run_id}.peers")
        # Before anybody can join through this node, and see no other peer.
        await known.enter(dht)
        admission = AdmissionService(run_id, identity, dht, settings)
        await admission.enter()
        registrar = Registrar(run_id, ledger, dht, admission.gate)
        await dht.transport.serve(coordinator_protocol(run_id), registrar.handle)
        reachability = Reachability(run_id, identity, dht.transport, admission.gate)
        await reachability.start()
        await admission.announce(COORDINATOR_KEY(run_id))
        for line in lines_to_paste(
            await dht.maddrs(), config.host_maddrs, config.announce_maddrs, dht.peer_id
        ):
            say(line)
        say(who_may_join(config, admission.gate.is_open))
        await first_of(
            dht.fail_with_p2pd(),
            _announce_forever(run_id, admission),
            _report_forever(dht, run_id, admission.gate, known, say),
            admission.run(),
        )


def admission_settings(config: CoordinatorConfig) -> AdmissionSettings:
    """The settings of an open swarm, or of one with an admission key, which is created if asked for and missing.

    Raises UserError.
    """
    key_path = config.admission_key_path
    if not (key_path.exists() if config.admission is None else config.admission):
        if config.allowlist_file is not None:
            raise UserError("an allowlist says who is given a token: it needs --admission")
        return AdmissionSettings(use_environment=False)
    load_or_create_key(key_path, config.swarm_secret_path)
    return AdmissionSettings(
        use_environment=False,
        admission_key_file=str(key_path),
        allowlist_file=config.allowlist_file,
        token_days=config.token_days,
    )


def who_may_join(config: CoordinatorConfig, is_open: bool) -> str:
    """One line for people, without the secret itself."""
    if is_open:
        return "the swarm is open: whoever knows an address of it can join; --admission asks for a secret"
    listed = ", if the allowlist names them" if config.allowlist_file else ""
    return f"peers join with the swarm secret in {config.swarm_secret_path}{listed}: --swarm-secret-file <copy of it>"


def what_goes_on(run_id: str, here: Mapping[str, Announcement]) -> str:
    """One line if peers train in this run as the coordinator starts, for whoever means to begin another one; else an
    empty text."""
    epochs = [record.epoch for record in here.values() if record.state in TRAINING_STATES]
    if not epochs:
        return ""
    found = "1 peer is here" if len(epochs) == 1 else f"{len(epochs)} peers are here"
    return (
        f"the run {run_id} goes on at epoch {max(epochs)}: {found}, and new peers join that run; "
        "to begin another run, give another --run-id"
    )


def lines_to_paste(
    maddrs: Sequence[str], host_maddrs: Sequence[str], announce_maddrs: Sequence[str], peer_id: str
) -> list[str]:
    """`--initial-peers …` lines, of which the first works on this machine. `maddrs` are those that the DHT node shows.

    Addresses that the user announces (a router's, for instance) may not work from this machine, and come second.
    """
    if not announce_maddrs:
        return [f"--initial-peers {maddr}" for maddr in maddrs[:1]]
    here = [local for maddr in host_maddrs if (local := _seen_from_here(maddr)) is not None]
    there = [maddr for maddr in announce_maddrs if maddr not in here]
    return [f"--initial-peers {maddr}/p2p/{peer_id}" for maddr in (*here[:1], *there)]


def _seen_from_here(host_maddr: str) -> str | None:
    maddr = parse_maddr(host_maddr)
    if maddr.port == 0:
        return None
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return f"/{maddr.kind}/{loopback.get(maddr.host, maddr.host)}/tcp/{maddr.port}"


def _claim_identity(path: Path) -> Identity:
    try:
        return load_or_create(path)
    except BlockingIOError:
        raise UserError(
            f"the identity {path} is in use: this coordinator runs already. Stop it first, or give another "
            "--run-id or --identity-path"
        ) from None


async def _announce_forever(run_id: str, admission: AdmissionService) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        await admission.announce(COORDINATOR_KEY(run_id))


async def _report_forever(
    dht: Dht, run_id: str, gate: Gate, known: KnownPeers, say: Callable[[str], None]
) -> None:
    watcher, is_first_look = Watcher(), True
    while True:
        here = await announced(dht, PEERS_KEY(run_id), Announcement, run_id, gate.check_record)
        await asyncio.to_thread(known.update, here)
        if is_first_look and (line := what_goes_on(run_id, here)):
            say(line)
        is_first_look = False
        for line in watcher.update(here, time.monotonic()):
            say(line)
        await asyncio.sleep(max(OFTEN_S, rest_s(len(here))))
