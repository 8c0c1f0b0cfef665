"""`diloco peers`: bans peers from a run, lifts bans, and replaces the swarm secret, with the run's admission key."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from diloco.cli.interrupts import run_with_hivemind
from diloco.errors import UserError
from diloco.options.flags import HvConfig, Name, Seconds, address_list

if TYPE_CHECKING:
    from peers.admission.bans import ChangedBans

_PEERS = "Peer ids, or at least their last 6 characters for peers that are in the swarm (to unban: in the ban list)."

app = App(name="peers")


@dataclass(frozen=True, kw_only=True)
class KeyFlags:
    """The run's admission key."""

    run_id: Name = HvConfig.run_id
    """Name of the run."""
    admission_key_file: Path | None = None
    """File with the admission key; default: the key of the coordinator on this machine."""
    state_dir: Path | None = None
    """Directory of the coordinator's keys."""

    @property
    def path(self) -> Path:
        """Raises UserError if no file is named, and the coordinator has none here."""
        from diloco.launch.swarm_config import state_dir as default_state_dir

        if self.admission_key_file is not None:
            return self.admission_key_file
        path = (self.state_dir or default_state_dir()) / "coordinator" / f"{self.run_id}.admission-key"
        if not path.exists():
            raise UserError(
                f"there is no admission key of the run {self.run_id} here ({path}): the run is open (its coordinator "
                "was started without --admission), or its coordinator is on another machine, or it has another "
                "--run-id"
            )
        return path


@dataclass(frozen=True, kw_only=True)
class BanListFlags(KeyFlags):
    """A run whose ban list is read or changed."""

    initial_peers: Annotated[tuple[str, ...], address_list(of_peers=True)] = ()
    """Addresses (/ip4/…/tcp/…/p2p/…) of any members of the swarm's DHT."""
    timeout: Seconds = 20.0
    """Seconds to wait for the swarm's answer."""


BanList = Annotated[BanListFlags, Parameter(name="*")]


@app.command
def ban(*peer_ids: Annotated[str, Parameter(help=_PEERS)], run: BanList = BanListFlags()) -> int:
    """Ban peers from a run: all peers close their connections to them, and refuse new ones."""
    _check_peers_named(peer_ids)
    return _change_bans(run, lambda outcome: _print_outcome(outcome, "banned"), ban=peer_ids)


@app.command
def unban(*peer_ids: Annotated[str, Parameter(help=_PEERS)], run: BanList = BanListFlags()) -> int:
    """Lift bans: the peers can join again when they are restarted."""
    _check_peers_named(peer_ids)
    return _change_bans(run, lambda outcome: _print_outcome(outcome, "no longer banned"), unban=peer_ids)


@app.command(name="list")
def list_(*, run: BanList = BanListFlags()) -> int:
    """Print the banned peers of a run, one per line."""
    return _change_bans(run, _print_banned)


@app.command
def new_secret(*, key: Annotated[KeyFlags, Parameter(name="*")] = KeyFlags()) -> int:
    """Replace the swarm secret: the old one no longer admits peers; peers that are training continue."""
    from peers.admission.secrets import replace_secret

    secret_path = key.path.with_suffix(".swarm-secret")
    replace_secret(key.path, secret_path)
    print(
        f"the new swarm secret is in {secret_path}; peers need it before half of the validity "
        "of their tokens has passed"
    )
    return 0


def _change_bans(
    run: BanListFlags,
    report: Callable[[ChangedBans], None],
    *,
    ban: Collection[str] = (),
    unban: Collection[str] = (),
) -> int:
    """Change the bans, or only read them, and pass the outcome to `report`. Returns the exit code. Raises UserError."""
    from peers.admission.bans import change_bans
    from peers.admission.secrets import load_key

    if not run.initial_peers:
        raise UserError("--initial-peers is missing: the address that `diloco dht start` printed.")
    key, bans_path = load_key(run.path), run.path.with_suffix(".bans")

    async def change() -> int:
        changed = await change_bans(
            run.run_id, run.initial_peers, key, bans_path, ban=ban, unban=unban, timeout_s=run.timeout
        )
        report(changed)
        return 0

    return run_with_hivemind(change())


def _check_peers_named(peer_ids: tuple[str, ...]) -> None:
    if not peer_ids:
        raise UserError("No peer is named: give peer ids, which `diloco status --json` prints.")


def _print_banned(outcome: ChangedBans) -> None:
    for peer_id in sorted(outcome.bans.peer_ids):
        print(peer_id, flush=True)


def _print_outcome(outcome: ChangedBans, what: str) -> None:
    for peer_id in sorted(outcome.changed):
        print(f"{peer_id} is {what}")
    if not outcome.changed:
        print("no change")
    count = len(outcome.bans.peer_ids)
    print(
        f"{count} {'peer is' if count == 1 else 'peers are'} banned; the list has reached {outcome.num_told} of "
        f"{outcome.num_asked} members, which forward it",
        flush=True,
    )
