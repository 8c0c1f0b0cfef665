"""`diloco status`: who is in a swarm."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import App, Parameter

from diloco.errors import UserError
from diloco.metrics_file import figure
from diloco.options import HvConfig, Name, Seconds, address_list

DEFAULTS = HvConfig()

_WORDS = ("state", "anchor", "path", "peer")

app = App(name="status")


@app.default
def status(
    *,
    initial_peers: Annotated[tuple[str, ...], address_list(of_peers=True)] = (),
    run_id: Name = DEFAULTS.run_id,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    timeout: Seconds = 20.0,
    swarm_secret_file: str | None = None,
) -> int:
    """Show who is in a swarm, from outside: epoch, state, speed and anchor of every peer.

    Parameters
    ----------
    initial_peers: tuple
        Addresses (/ip4/…/tcp/…/p2p/…) of any members of the swarm's DHT.
    run_id: str
        Name of the run.
    as_json: bool
        One JSON object instead of a table.
    timeout: float
        Seconds to wait for an answer.
    swarm_secret_file: str
        File with the swarm secret, or the secret itself in DILOCO_SWARM_SECRET: only admitted peers are shown then.
    """
    if not initial_peers:
        raise UserError("--initial-peers is missing: the address that `diloco dht start` printed.")
    from diloco.interrupts import run_interruptible
    from peers.admission_secrets import load_secret
    from peers.dht import load_hivemind
    from peers.observer import read_swarm

    secret = load_secret(swarm_secret_file, os.environ)

    async def look() -> int:
        swarm = await read_swarm(run_id, initial_peers, timeout_s=timeout, secret=secret)
        if as_json:
            print(json.dumps(swarm), flush=True)
        else:
            _print_table(swarm)
        return 0

    # Takes seconds, in which an event loop would not notice a signal.
    load_hivemind()
    return run_interruptible(look())


def _print_table(swarm: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rank", "state", "epoch", "step", "tokens/s", "anchor", "path", "seen", "peer"):
        table.add_column(column, no_wrap=True, justify="left" if column in _WORDS else "right")
    for peer in swarm["peers"]:
        table.add_row(
            str(peer["world_rank"]),
            peer["state"],
            str(peer["epoch"]),
            str(peer["step"]),
            figure(peer["tokens_per_s"]),
            peer["anchor_digest"][:12] or "–",
            _paths_in_words(peer["paths"]),
            f"{peer['last_seen_s']:.0f} s ago",
            # As the coordinator names it; --json has all of it.
            f"…{peer['peer_id'][-6:]}",
        )
    console = Console()
    number = len(swarm["peers"])
    console.print(
        f"run {swarm['run_id']}: epoch {swarm['epoch']}, {number} peer{'' if number == 1 else 's'}",
        highlight=False,
    )
    if swarm["peers"]:
        console.print(table)


def _paths_in_words(paths: Mapping[str, str]) -> str:
    """One word where all of a peer's streams go the same way, else how many go which."""
    numbers = Counter(paths.values())
    if len(numbers) == 1:
        return next(iter(numbers))
    return ", ".join(f"{path} {number}" for path, number in numbers.most_common()) or "–"
