"""`diloco status`: prints the state of a swarm and of its peers."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from diloco.cli.interrupts import run_with_hivemind
from diloco.cli.watched import Watched
from diloco.options.flags import AsJson, Switch

if TYPE_CHECKING:
    from rich.status import Status

    from peers.admission.secrets import SwarmSecret

REDRAW_S = 1.0
"""Seconds between two updates while nothing changes."""
MIN_REDRAW_S = 0.2

app = App(name="status")


@app.default
def status(
    *,
    swarm: Annotated[Watched, Parameter(name="*")] = Watched(),  # noqa: B008
    watch: Switch = False,
    as_json: AsJson = False,
) -> int:
    """Show the peers of a swarm, with the state, epoch, loss, speed, bandwidth and anchor of each; the peers that a
    round waits for, and why; and the last rounds with their failures.

    Parameters
    ----------
    watch: bool
        Update the table until Ctrl-C; with --json, print a line at least every second.
    """
    secret = swarm.secret()
    from rich.console import Console

    with Console(stderr=True).status(f"querying the peers of {swarm.run_id}") as waiting:
        return run_with_hivemind(_show_status(swarm, secret, waiting, watch=watch, as_json=as_json))


async def _show_status(
    swarm: Watched, secret: SwarmSecret | None, waiting: Status, *, watch: bool, as_json: bool
) -> int:
    # Not at the top: `--help` needs neither.
    import asyncio

    from rich.console import Console
    from rich.live import Live

    from diloco.cli.status_table import render

    console = Console()

    def show(summary: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps(summary), flush=True)
        else:
            console.print(render(summary, width=console.width))

    async with swarm.observed(secret) as observer:
        waiting.stop()
        if not watch:
            show(observer.swarm())
            return 0
        is_redrawn = sys.stdout.isatty() and not as_json
        with Live(console=console, auto_refresh=False, screen=True) if is_redrawn else nullcontext() as live:
            while True:
                if live is not None:
                    table = render(observer.swarm(), width=console.width, height=console.height)
                    live.update(table, refresh=True)
                else:
                    # Printed in a thread, so that Ctrl-C works even if the reader of a pipe blocks. `swarm()` is called
                    # in this thread, which receives the reports.
                    await asyncio.to_thread(show, observer.swarm())
                await asyncio.sleep(MIN_REDRAW_S)
                await observer.changed(REDRAW_S)
