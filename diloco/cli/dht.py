"""`diloco dht start`: runs the bootstrap node of the DHT and the coordinator of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from diloco.cli.interrupts import run_with_hivemind
from diloco.options.checks import at_least, finite
from diloco.options.flags import HvConfig, Name, address_list
from diloco.output import lose_unwritable

DEFAULTS = HvConfig()

Days = Annotated[float, Parameter(validator=(finite, at_least(1e-5)))]

start_app = App(name="start")


@start_app.default
def start(
    *,
    host_maddrs: Annotated[tuple[str, ...], address_list()] = DEFAULTS.host_maddrs,
    announce_maddrs: Annotated[tuple[str, ...], address_list()] = DEFAULTS.announce_maddrs,
    initial_peers: Annotated[tuple[str, ...], address_list(of_peers=True)] = (),
    run_id: Name = DEFAULTS.run_id,
    identity_path: Path | None = None,
    state_dir: Path | None = None,
    admission: Annotated[bool | None, Parameter(show_default=False)] = None,
    allowlist_file: Path | None = None,
    token_days: Days = 30.0,
) -> int:
    """Start the first DHT node of a run and coordinate the run: admit peers and assign world ranks.

    Prints the flag `--initial-peers <address>` for `diloco peer`, then a line for each peer that joins or leaves and
    for each epoch. Training continues without the coordinator; the same command starts it again. With --admission it
    creates a swarm secret and prints the name of its file; only peers with this secret can join.

    Parameters
    ----------
    host_maddrs: tuple
        Addresses to listen on.
    announce_maddrs: tuple
        Addresses at which others reach this node, if they differ from --host-maddrs.
    initial_peers: tuple
        Members of a DHT to join; default: the peers that an earlier start has stored, else begin a new one.
    run_id: str
        Name of the run.
    identity_path: Path
        File of the key that gives this node its peer id; default: <state-dir>/coordinator/<run-id>.key, created if
        missing.
    state_dir: Path
        Directory of the keys, the world ranks and the peers' addresses; default: $XDG_STATE_HOME/diloco.
    admission: bool
        Admit only peers that have the swarm secret; default: as at the last start of this run.
    allowlist_file: Path
        With --admission: a file of the peer ids to admit, one per line, which is read again when it changes.
    token_days: float
        With --admission: days for which a peer's token is valid.
    """
    from diloco.launch.swarm_config import state_dir as default_state_dir
    from peers.daemon.coordinator import CoordinatorConfig, serve
    from peers.net.identity import load
    from peers.protocol.maddrs import check_listenable

    lose_unwritable("stdout")
    config = CoordinatorConfig(
        run_id=run_id,
        host_maddrs=host_maddrs,
        announce_maddrs=announce_maddrs,
        initial_peers=initial_peers,
        identity_path=identity_path,
        state_dir=state_dir or default_state_dir(),
        admission=admission,
        allowlist_file=str(allowlist_file) if allowlist_file else None,
        token_days=token_days,
    )

    async def coordinate() -> int:
        await serve(config, lambda line: print(line, flush=True))
        return 0

    check_listenable(host_maddrs)
    if identity_path is not None and identity_path.exists():
        load(identity_path)
    return run_with_hivemind(coordinate())
