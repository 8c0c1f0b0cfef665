"""`diloco status`: prints the state of a swarm and of its peers."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from diloco.cli.watched import Watched

if TYPE_CHECKING:
    from rich.status import Status

    from peers.admission.secrets import SwarmSecret
    from peers.monitor.observer import Observer

REDRAW_S = 1.0
"""Seconds between two updates while nothing changes."""
MIN_REDRAW_S = 0.2

app = App(name="status")


@app.default
def status(
    *,
    swarm: Annotated[Watched, Parameter(name="*")] = Watched(),  # noqa: B008
    watch: Annotated[bool, Parameter(negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Show the peers of a swarm, with the state, epoch, loss, speed, bandwidth and anchor of each; the peers that a
    round waits for, and why; and the last rounds with their failures.

    Parameters
    ----------
    watch: bool
        Update the table until Ctrl-C; with --json, print a line for each change.
    as_json: bool
        Print one JSON object.
    """
    secret = swarm.secret()
    from rich.console import Console

    from diloco.cli.interrupts import run_interruptible
    from peers.net.dht.node import load_hivemind

    with Console(stderr=True).status(f"querying the peers of {swarm.run_id}") as waiting:
        # Takes seconds, during which an event loop could not handle signals.
        load_hivemind()
        return run_interruptible(_show_status(swarm, secret, waiting, watch=watch, as_json=as_json))


async def _show_status(
    swarm: Watched, secret: SwarmSecret | None, waiting: Status, *, watch: bool, as_json: bool
) -> int:
    async with swarm.observed(secret) as observer:
        waiting.stop()
        if not watch:
            _print(observer.swarm(), as_json=as_json)
        elif as_json or not sys.stdout.isatty():
            await _print_forever(observer, as_json=as_json)
        else:
            await _redraw_forever(observer)
    return 0


def _print(swarm: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(swarm), flush=True)
        return
    from rich.console import Console

    from diloco.cli.status_table import render

    console = Console()
    console.print(render(swarm, width=console.width))


async def _print_forever(observer: Observer, *, as_json: bool) -> None:
    # Not at the top: `--help` needs no event loop.
    import asyncio

    while True:
        # In a thread, so that Ctrl-C works even if the reader of a pipe blocks.
        await asyncio.to_thread(_print, observer.swarm(), as_json=as_json)
        await asyncio.sleep(MIN_REDRAW_S)
        await observer.changed(REDRAW_S)


async def _redraw_forever(observer: Observer) -> None:
    import asyncio

    from rich.live import Live

    from diloco.cli.status_table import render

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            table = render(observer.swarm(), width=live.console.width, height=live.console.height)
            live.update(table, refresh=True)
            await asyncio.sleep(MIN_REDRAW_S)
            await observer.changed(REDRAW_S)
