"""`diloco peers`: ban peers from a run, let them back in, and make a new swarm secret, with the run's admission key."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from diloco.errors import UserError
from diloco.options.flags import HvConfig, Name, Seconds, address_list

if TYPE_CHECKING:
    from peers.admission.ban_change import ChangedBans

_PEERS = "Peer ids, or the last characters of peers that are in the swarm (of the list, to unban), 6 or more."

app = App(name="peers")


@dataclass(frozen=True, kw_only=True)
class Key:
    """The run's admission key."""

    run_id: Name = HvConfig.run_id
    """Name of the run."""
    admission_key_file: Path | None = None
    """File with the admission key; default: that of the coordinator on this machine."""
    state_dir: Path | None = None
    """Where the coordinator keeps its keys."""

    @property
    def path(self) -> Path:
        from diloco.launch.swarm_config import state_dir as default_state_dir

        if self.admission_key_file is not None:
            return self.admission_key_file
        return (self.state_dir or default_state_dir()) / "coordinator" / f"{self.run_id}.admission-key"


@dataclass(frozen=True, kw_only=True)
class Run(Key):
    """A run whose ban list is read or changed."""

    initial_peers: Annotated[tuple[str, ...], address_list(of_peers=True)] = ()
    """Addresses (/ip4/…/tcp/…/p2p/…) of any members of the swarm's DHT."""
    timeout: Seconds = 20.0
    """Seconds that the swarm may take to answer."""


RunFlags = Annotated[Run, Parameter(name="*")]


@app.command
def ban(*peer_ids: Annotated[str, Parameter(help=_PEERS)], run: RunFlags = Run()) -> int:
    """Ban peers from a run: all peers drop them at once and refuse them from then on."""
    _check_named(peer_ids)
    return _change(run, lambda outcome: _tell(outcome, "banned"), ban=peer_ids)


@app.command
def unban(*peer_ids: Annotated[str, Parameter(help=_PEERS)], run: RunFlags = Run()) -> int:
    """Lift a ban: the peers can join when they are started again."""
    _check_named(peer_ids)
    return _change(run, lambda outcome: _tell(outcome, "no longer banned"), unban=peer_ids)


@app.command(name="list")
def list_(*, run: RunFlags = Run()) -> int:
    """Print the banned peers of a run, one a line."""
    return _change(run, lambda outcome: print(*sorted(outcome.bans.peer_ids), sep="\n", flush=True))


@app.command
def new_secret(*, key: Annotated[Key, Parameter(name="*")] = Key()) -> int:
    """Replace the swarm secret: the old one no longer admits anybody; peers that are training continue."""
    from peers.admission.secrets import replace_secret

    secret_path = key.path.with_suffix(".swarm-secret")
    replace_secret(key.path, secret_path)
    print(f"a new swarm secret is in {secret_path}; give it to the peers before their tokens are half over")
    return 0


def _change(
    run: Run,
    say: Callable[[ChangedBans], None],
    *,
    ban: Collection[str] = (),
    unban: Collection[str] = (),
) -> int:
    """The exit code, after saying what came of it. Raises UserError."""
    from diloco.cli.interrupts import run_interruptible
    from peers.admission.ban_change import change_bans
    from peers.admission.secrets import load_key
    from peers.net.dht.node import load_hivemind

    if not run.initial_peers:
        raise UserError("--initial-peers is missing: the address that `diloco dht start` printed.")
    key, kept_at = load_key(run.path), run.path.with_suffix(".bans")

    async def change() -> int:
        changed = await change_bans(
            run.run_id, run.initial_peers, key, kept_at, ban=ban, unban=unban, timeout_s=run.timeout
        )
        say(changed)
        return 0

    # Takes seconds, in which an event loop would not notice a signal.
    load_hivemind()
    return run_interruptible(change())


def _check_named(peer_ids: tuple[str, ...]) -> None:
    if not peer_ids:
        raise UserError("name the peers: their ids, as `diloco status --json` has them.")


def _tell(outcome: ChangedBans, what: str) -> None:
    for peer_id in sorted(outcome.changed):
        print(f"{peer_id} is {what}")
    if not outcome.changed:
        print("nothing to change")
    told = f"{outcome.num_told} of {outcome.num_asked}"
    print(
        f"{len(outcome.bans.peer_ids)} banned in all; {told} members were told at once, and pass it on",
        flush=True,
    )
