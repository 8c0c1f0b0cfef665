"""`diloco pods`: what there is to do with pods once they are rented."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from diloco.cli.pods_flags import (
    AsJson,
    Inventory,
    StateFile,
    access,
    ensure_watcher,
    locked,
    opened_existing,
    run,
    say,
)
from diloco.cli.pods_plan import confirmed, shouted
from diloco.errors import UserError
from diloco.options.checks import at_least, finite
from diloco.options.flags import Seconds

if TYPE_CHECKING:
    from provisioning.ledger import Ledger

app = App(name="pods", help="Look after rented pods.")
ssh_key = App(name="ssh-key", help="SSH keys at a provider.")
app.command(ssh_key)

Switch = Annotated[bool, Parameter(negative="")]
Hours = Annotated[float, Parameter(validator=(at_least(0.01), finite))]


@app.command
def status(*, as_json: AsJson = False, state_file: StateFile = None, inventory: Inventory = None) -> int:
    """Show the pods of a state file, and what their peers do."""
    from provisioning.pod_status import overview

    ledger = opened_existing(state_file)
    # This machine may have been off since it was started.
    ensure_watcher(ledger)

    async def look() -> int:
        seen = await overview(ledger, access(inventory))
        found = seen.pods
        for name, why in seen.silent.items():
            print(f"!!! {name} does not say what is there: {why}", file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps([one.to_json() for one in found]), flush=True)
            return 0
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("pod", "state", "machine", "$/h", "ends in", "epoch", "step", "peer"):
            # Figures are never cut; what is too wide for the terminal goes on in the next line.
            width = 8 if column in ("$/h", "ends in") else None
            table.add_column(column, overflow="fold", min_width=width)
        for one in found:
            row = one.row
            table.add_row(
                row.name,
                row.state,
                f"{row.provider} {row.offer.gpu_count} × {row.offer.gpu_type}",
                f"{row.offer.price_per_hour:.2f}",
                "–" if row.ends_at is None else _hours(row.ends_at - time.time()),
                "–" if one.epoch is None else str(one.epoch),
                "–" if one.step is None else str(one.step),
                one.peer,
            )
        Console().print(table if found else "there are no pods")
        if found:
            rate = sum(one.row.offer.price_per_hour for one in found if one.may_cost)
            print(f"{sum(one.may_cost for one in found)} pods may cost {rate:.2f} $/h", flush=True)
        return 0

    return run(look())


@app.command
def logs(
    *names: str,
    follow: Annotated[bool, Parameter(alias="-f", negative="")] = False,
    job: str | None = None,
    lines: int = 50,
    save: Path | None = None,
    state_file: StateFile = None,
    inventory: Inventory = None,
) -> int:
    """Print the logs of pods, all at once.

    Parameters
    ----------
    names: str
        Pods; default: all.
    follow: bool
        Go on printing what is written.
    job: str
        peer, dht, or the name of an experiment's job; default: the peer's, and of a pod without one those of all jobs.
    lines: int
        How many lines to begin with.
    save: Path
        Collect the whole logs in this directory instead, <pod>-<job>.log.
    """
    from provisioning.pod_logs import collect, follow_all

    ledger = opened_existing(state_file)
    if save is not None:
        return run(_each(ledger, collect(ledger, access(inventory), names, save)))
    return run(
        _each(
            ledger,
            follow_all(ledger, access(inventory), names, job=job, lines=lines, goes_on=follow, write=_line),
        )
    )


@app.command
def ssh(
    name: str,
    *,
    forward: Annotated[tuple[int, ...], Parameter(consume_multiple=1, negative="")] = (),
    state_file: StateFile = None,
    inventory: Inventory = None,
) -> int:
    """A shell on a pod, in its directory.

    Parameters
    ----------
    name: str
        The pod.
    forward: tuple
        Ports of the pod's own loopback to be reached here meanwhile, such as 8265, Ray's dashboard.
    """
    from provisioning.operations import checked_names, renters
    from provisioning.pod_paths import pod_directory

    ledger = opened_existing(state_file)

    async def shell() -> int:
        row = checked_names(ledger, [name])[-1]
        async with renters(ledger, access(inventory), say) as by_provider:
            machine = await by_provider[row.provider].machine(name)
            process = await asyncio.create_subprocess_exec(
                *machine.shell_argv(pod_directory(row.label), forward)
            )
            try:
                code = await process.wait()
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
            return 128 - code if code < 0 else code

    return run(shell())


@app.command
def cost(*, as_json: AsJson = False, state_file: StateFile = None) -> int:
    """What the pods of a state file cost, those that are gone included."""
    ledger = opened_existing(state_file)
    now = time.time()
    bills = ledger.bills()
    total = sum(bill.dollars(now) for bill in bills)
    rate = sum(bill.price_per_hour for bill in bills if bill.ended_at is None)
    if as_json:
        found = [
            {
                "name": bill.name,
                "provider": bill.provider,
                "label": bill.label,
                "price_per_hour": bill.price_per_hour,
                "hours": ((bill.ended_at or now) - bill.began_at) / 3600,
                "dollars": bill.dollars(now),
                "is_over": bill.ended_at is not None,
            }
            for bill in bills
        ]
        print(json.dumps({"pods": found, "dollars": total, "price_per_hour": rate}), flush=True)
        return 0
    for bill in bills:
        until = "until now" if bill.ended_at is None else "given back"
        hours = _hours((bill.ended_at or now) - bill.began_at)
        rate_text, dollars = f"{bill.price_per_hour:7.2f} $/h", f"{bill.dollars(now):9.2f} $"
        print(f"{bill.name:<12} {bill.provider:<8} {rate_text} {hours:>9} {dollars}  {until}")
    print(f"{total:.2f} $ in all, {rate:.2f} $/h now", flush=True)
    return 0


@app.command
def extend(*names: str, hours: Hours, state_file: StateFile = None, inventory: Inventory = None) -> int:
    """Let pods live longer.

    Parameters
    ----------
    names: str
        Pods; default: all.
    hours: float
        How much longer.
    """
    from provisioning import operations

    ledger = opened_existing(state_file)

    async def work() -> int:
        failures = await operations.extend(ledger, access(inventory), names, hours, say)
        ensure_watcher(ledger)
        return shouted(failures)

    return locked(ledger, work)


@app.command
def down(
    *names: str,
    yes: Annotated[bool, Parameter(alias="-y", negative="")] = False,
    state_file: StateFile = None,
    inventory: Inventory = None,
) -> int:
    """Give pods back, and all that was made on them. Asks nothing.

    Parameters
    ----------
    names: str
        Pods; default: all.
    yes: bool
        As for the commands that ask; it changes nothing here.
    """
    from provisioning import operations, watcher

    ledger = opened_existing(state_file)

    async def work() -> int:
        failures = await operations.down(ledger, access(inventory), names, say)
        if not ledger.rows():
            watcher.stop(ledger.path)
        ensure_watcher(ledger)
        return shouted(failures)

    return locked(ledger, work)


@app.command
def forget(
    *names: str,
    yes: Annotated[bool, Parameter(alias="-y", negative="")] = False,
    state_file: StateFile = None,
) -> int:
    """Take pods out of the state file without giving them back: those that you have ended yourself.

    Nobody looks for them any more, unless their provider lists them. Provisioning no longer waits for them.

    Parameters
    ----------
    names: str
        Pods.
    yes: bool
        Do not ask.
    """
    from provisioning import operations

    if not names:
        raise UserError("Say which: `diloco pods forget NAME`; `diloco pods status` lists them.")
    ledger = opened_existing(state_file)

    async def work() -> int:
        rows = operations.checked_names(ledger, names)
        rate = sum(row.offer.price_per_hour for row in rows)
        await confirmed(f"Forget {', '.join(names)}, {rate:.2f} $/h if still there?", yes=yes)
        operations.forget(ledger, rows)
        return 0

    return locked(ledger, work)


@app.command
def reconcile(
    *,
    provider: Annotated[tuple[str, ...], Parameter(consume_multiple=1, negative="")] = (),
    watch: Switch = False,
    interval: Seconds = 60.0,
    state_file: StateFile = None,
    inventory: Inventory = None,
) -> int:
    """Compare with the providers: finish what was interrupted, end our orphans and pods whose time is over.

    Touches only pods that this state file has ordered.

    Parameters
    ----------
    provider: tuple
        Providers to look at beside those that this state file has ever ordered of.
    watch: bool
        Again and again, until no pod has an end any more and no order is in doubt.
    interval: float
        Seconds between two looks.
    """
    from provisioning import operations
    from provisioning.watcher import watching

    ledger = opened_existing(state_file)
    if not watch:

        async def once() -> int:
            failures = await operations.reconcile(ledger, access(inventory), provider, say)
            ensure_watcher(ledger)
            return shouted(failures)

        return locked(ledger, once)

    async def forever() -> int:
        await operations.watch(ledger, access(inventory), say, interval_s=interval)
        return 0

    with watching(ledger.path) as is_mine:
        return run(forever()) if is_mine else 0


@ssh_key.command
def add(name: str, *, key_file: Path | None = None) -> int:
    """Have Lambda make a key pair, and save its private half, readable by you alone.

    Parameters
    ----------
    name: str
        Name of the key at Lambda, and of its file below ~/.ssh.
    key_file: Path
        Another place for the file.
    """
    from provisioning.private_files import write_private
    from provisioning.providers.lambda_cloud import LambdaProvider

    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        raise UserError(f'"{name}" is no name for a key: use letters, digits, dots, dashes and underscores.')
    path = (key_file or Path("~/.ssh") / f"{name}.pem").expanduser()
    if path.exists():
        raise UserError(f"{path} exists already; name another --key-file, or remove it.")

    async def work() -> int:
        provider = LambdaProvider(os.environ, path)
        write_private(path, (await provider.add_key(name)).encode())
        print(f"the key {name} is at Lambda, its private half in {path}", flush=True)
        return 0

    return run(work())


async def _each(ledger: Ledger, work: object) -> int:
    failures = await work  # type: ignore[misc]
    return shouted(failures)


def _line(name: str, text: str) -> None:
    print(f"{name} | {text}", flush=True)


def _hours(seconds: float) -> str:
    minutes = max(round(seconds / 60), 0)
    return f"{minutes // 60}:{minutes % 60:02d} h"
