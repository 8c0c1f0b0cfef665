"""`diloco pods`: the commands for pods that are rented."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated

from cyclopts import App, Parameter

from diloco.cli.interrupts import run_interruptible
from diloco.cli.pod_tables import clock_hours, print_status
from diloco.cli.pods_flags import (
    Fetch,
    Given,
    Inventory,
    PodNames,
    StateFile,
    Yes,
    access,
    confirmed,
    ensure_watcher,
    locked,
    results_of,
    say,
    shout,
    shouted,
)
from diloco.cli.provision import down
from diloco.cli.state_files import opened_existing, say_if_empty, tell_other_state_files, typed
from diloco.errors import UserError
from diloco.options.checks import at_least, finite
from diloco.options.flags import AsJson, Switch

app = App(name="pods", help="Manage rented pods.")


@app.command
def status(*, as_json: AsJson = False, state_file: StateFile = None, inventory: Inventory = None) -> int:
    """Show the pods of a state file, and what their peers do."""
    from provisioning.ledger.keys import LAST_ACTION
    from provisioning.swarm.status import overview
    from provisioning.terminal import printable

    ledger = opened_existing(state_file)
    # The watcher may have ended with a restart of this machine.
    ensure_watcher(ledger)

    async def look() -> int:
        seen = await overview(ledger, access(inventory))
        found = seen.pods
        for name, why in seen.silent.items():
            shout(f"{name} did not list its pods: {why}")
        if as_json:
            print(json.dumps([one.to_json() for one in found]), flush=True)
            return 0
        print_status(seen)
        if found and (kept := ledger.recall(LAST_ACTION)):
            print(printable(f"last automatic action: {kept}"), flush=True)
        return 0

    code = run_interruptible(look())
    if state_file is None:
        tell_other_state_files("diloco pods status")
    return code


@app.command
def logs(
    *names: PodNames,
    follow: Annotated[bool, Parameter(alias="-f", negative="")] = False,
    job: str | None = None,
    lines: int = 50,
    state_file: StateFile = None,
    inventory: Inventory = None,
) -> int:
    """Print the logs of pods, all at once.

    Parameters
    ----------
    follow: bool
        Keep printing new lines.
    job: str
        peer, dht, environment, or the name of an experiment's job; default: the peer's, and of a pod without one those
        of all jobs but environment.
    lines: int
        Number of lines to print first.
    """
    from provisioning.swarm.logs import follow_all
    from provisioning.terminal import printable

    ledger = opened_existing(state_file)
    say_if_empty(ledger)

    def write(name: str, text: str) -> None:
        shown = printable(name)
        for line in printable(text).rstrip("\n").split("\n"):
            print(f"{shown} | {line}", flush=True)

    async def work() -> int:
        where = access(inventory)
        return shouted(
            await follow_all(ledger, where, names, job=job, lines=lines, follow=follow, write=write)
        )

    return run_interruptible(work())


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
    from provisioning.machines.paths import pod_directory
    from provisioning.renting.renters import renters

    ledger = opened_existing(state_file)

    async def shell() -> int:
        row = ledger.named([name])[-1]
        async with renters(ledger, access(inventory), say) as found:
            machine = await found[row.provider].machine(row)
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

    return run_interruptible(shell())


@app.command
def cost(*, as_json: AsJson = False, state_file: StateFile = None) -> int:
    """What the pods of a state file cost, those that are gone included."""
    from provisioning.terminal import printable

    ledger = opened_existing(state_file)
    now = time.time()
    bills = ledger.bills()
    total = sum(bill.dollars(now) for bill in bills)
    rate = sum(bill.offer.price_per_hour for bill in bills if bill.ended_at is None)
    if as_json:
        found = [
            {
                "name": bill.name,
                "provider": bill.provider,
                "label": bill.label,
                "price_per_hour": bill.offer.price_per_hour,
                "hours": ((bill.ended_at or now) - bill.asked_at) / 3600,
                "dollars": bill.dollars(now),
                "is_over": bill.ended_at is not None,
            }
            for bill in bills
        ]
        print(json.dumps({"pods": found, "dollars": total, "price_per_hour": rate}), flush=True)
        return 0
    for bill in bills:
        until = "until now" if bill.ended_at is None else "given back"
        hours = clock_hours((bill.ended_at or now) - bill.asked_at)
        rate_text, dollars = f"{bill.offer.price_per_hour:7.2f} $/h", f"{bill.dollars(now):9.2f} $"
        print(printable(f"{bill.name:<12} {bill.provider:<8} {rate_text} {hours:>9} {dollars}  {until}"))
    print(f"{total:.2f} $ in all, {rate:.2f} $/h now", flush=True)
    return 0


@app.command
def extend(
    *names: PodNames,
    hours: Annotated[float, Parameter(validator=(at_least(0.01), finite))],
    state_file: StateFile = None,
    inventory: Inventory = None,
) -> int:
    """Extend the rental of pods.

    Parameters
    ----------
    hours: float
        Hours to add.
    """
    from provisioning.renting.renters import renters

    ledger = opened_existing(state_file)
    found = ledger.named(names)
    # Of those that are being given back, only those that are named and have no replacement.
    living = {row.name for row in found if row.state != "deleting"}
    rows = [row for row in found if row.state != "deleting" or (names and row.name not in living)]
    endless = [row.name for row in rows if row.ends_at is None]
    said = f"no end time to extend: {', '.join(endless)}"
    if endless and (names or len(endless) == len(rows)):
        give_back = typed(f"diloco pods down {' '.join(endless)}", ledger)
        raise UserError(f"There is {said}. Pods without an end time stay until `{give_back}`.")
    if endless:
        say("–", said)

    async def work() -> int:
        async with renters(ledger, access(inventory), say) as opened:
            failures = await opened.extend([row for row in rows if row.ends_at is not None], hours)
        ensure_watcher(ledger)
        return shouted(failures)

    # Without the lock: the watcher may hold it for an hour while it replaces a pod, and the rentals of others end.
    return run_interruptible(work())


@app.command
def fetch(
    *names: PodNames, fetch: Fetch = None, state_file: StateFile = None, inventory: Inventory = None
) -> int:
    """Copy the results of pods to the run directory, without giving the pods back."""
    from provisioning.ledger.keys import RUN_DIR
    from provisioning.renting.renters import renters

    ledger = opened_existing(state_file)
    to_fetch = results_of(ledger, Given(fetch=fetch), "pods")
    ledger.remember(RUN_DIR, to_fetch.place)

    async def work() -> int:
        async with renters(ledger, access(inventory), say, fetches=to_fetch.words) as found:
            return shouted(await found.fetch_results(ledger.named(names)))

    return run_interruptible(work())


app.command(down)


@app.command
def forget(
    *names: str,
    yes: Yes = False,
    state_file: StateFile = None,
) -> int:
    """Remove pods from the state file without giving them back, because you have ended them yourself.

    Provisioning no longer waits for them, unless their provider still lists them.

    Parameters
    ----------
    names: str
        Pods.
    """
    if not names:
        raise UserError("Say which: `diloco pods forget NAME`; `diloco pods status` lists them.")
    ledger = opened_existing(state_file)

    async def work() -> int:
        rows = ledger.named(names)
        rate = sum(row.offer.price_per_hour for row in rows)
        await confirmed(f"Forget {', '.join(names)}, {rate:.2f} $/h if still there?", yes=yes)
        for row in rows:
            ledger.forget(row, now=time.time())
        return 0

    return locked(ledger, work)


@app.command
def reconcile(*, watch: Switch = False, state_file: StateFile = None, inventory: Inventory = None) -> int:
    """Compare the state file with the providers: finish what was interrupted, end orphaned pods and pods whose time is
    over.

    Changes only pods that were ordered with this state file.

    Parameters
    ----------
    watch: bool
        Again and again, until no pod has an end or is being given back, no order is in doubt, and no swarm is to be
        kept.
    """
    from provisioning.errors import Busy
    from provisioning.ledger.lock import held
    from provisioning.renting.renters import renters
    from provisioning.swarm import watcher

    ledger = opened_existing(state_file)
    if not watch:

        async def once() -> int:
            async with renters(ledger, access(inventory), say) as found:
                settled = await found.settle()
            ensure_watcher(ledger)
            return shouted({name: error for failures in settled.values() for name, error in failures.items()})

        return locked(ledger, once)

    async def forever() -> int:
        await watcher.watch(ledger, access(inventory), say)
        return 0

    try:
        # A command that looks up the watcher's process holds this lock for a moment, too.
        with held(watcher.lock_path(ledger.path), wait_s=1.0):
            return run_interruptible(forever())
    except Busy:
        # Another watcher runs already.
        return 0
