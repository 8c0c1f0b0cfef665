"""The watcher: a background process that gives pods back at their rental end, repeats deletions that have failed, and
keeps the swarm (keeper.py).

It holds the lock `<state file>.watch` while it runs, and ends when nothing is left to watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from provisioning.errors import Busy, ProvisioningError, UserError
from provisioning.ledger.keys import UNSET, WANTED, WATCHED
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.lock import holder
from provisioning.pods.pod import Row, State
from provisioning.providers.registry import Access, open_provider
from provisioning.renting.each import Failures, each, gathered
from provisioning.renting.renter import Patience, Say
from provisioning.renting.renters import renters
from provisioning.swarm.keeper import KEEP_INTERVAL_S, Keeper

_STOP_TIMEOUT_S = 5.0
_INTERVAL_S = 60.0
_FETCH_AHEAD_S = 300.0
# Short, since the watcher tries again later, and holds the ledger's lock meanwhile.
_PATIENCE = Patience(destroy_s=15.0)
# A command may be extending the rental.
_OVERDUE_S = 60.0

Rental = tuple[str, float | None]
"""A pod's label and its rental end, which may be postponed."""


def needs_watcher(ledger: Ledger) -> bool:
    """Whether pods need care without a command: a requested swarm, a rental end, an order in doubt, or a deletion."""
    return bool(ledger.recall(WANTED)) or any(
        row.ends_at is not None or _is_open(row) for row in ledger.rows()
    )


def _is_open(row: Row) -> bool:
    """Whether settling may have something to do for this row before its rental end."""
    return row.is_in_doubt or row.state == State.DELETING


def lacks(ledger: Ledger, access: Access) -> bool:
    """Whether `access` has an API key, or a secret of the requested swarm, that the watcher's environment lacks."""
    for name in {row.provider for row in ledger.rows()}.difference(ledger.recall(WATCHED).split()):
        with contextlib.suppress(ProvisioningError):
            open_provider(name, access)
            return True
    return bool(ledger.recall(WANTED)) and any(map(access.environment.get, ledger.recall(UNSET).split()))


def lock_path(state_file: Path) -> Path:
    return state_file.with_name(f"{state_file.name}.watch")


def running_pid(state_file: Path) -> int | None:
    """The process id of the watcher; None: none runs."""
    return holder(lock_path(state_file)) if lock_path(state_file).exists() else None


def start(state_file: Path, argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Start a watcher that outlives this command. Returns False if one runs already."""
    if running_pid(state_file) is not None:
        return False
    with state_file.with_name(f"{state_file.name}.watch.log").open("ab") as log:
        subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return True


def stop(state_file: Path) -> None:
    """End the watcher if one runs. May be repeated."""
    pid = running_pid(state_file)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.05)
        pid = running_pid(state_file)


async def watch(
    ledger: Ledger,
    access: Access,
    say: Say,
    *,
    interval_s: float = _INTERVAL_S,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Keep the requested swarm, and give back pods at their rental end, until nothing is left to watch or `stop()`.

    No error ends this loop: pods would outlive their rental end.
    """

    def quietly(name: str, text: str) -> None:
        # If the disk is full, pods are given back without a log.
        with contextlib.suppress(OSError):
            say(name, text)

    keeper, fetched = Keeper(ledger, access, quietly), set[Rental]()
    keeping: asyncio.Task[None] | None = None
    wait_s = interval_s

    async def once() -> None:
        nonlocal keeping, wait_s
        wait_s = await keep_time(ledger, access, quietly, fetched, interval_s, keeper.clock)
        if ledger.recall(WANTED):
            wait_s = min(wait_s, KEEP_INTERVAL_S)
            if not is_keeping():
                # Replacing a pod may take an hour, in which the rentals of other pods end.
                keeping = tasks.create_task(careful(keeper.tick()))

    def is_keeping() -> bool:
        return keeping is not None and not keeping.done()

    async def careful(work: Awaitable[None]) -> None:
        try:
            await work
        except Busy:
            # Another command changes the pods now.
            pass
        except Exception as error:  # noqa: BLE001 - such as an answer that a provider was never known to give
            is_expected = isinstance(error, ProvisioningError | OSError)
            keeper.tell(f"not done yet: {'' if is_expected else f'{type(error).__name__}: '}{error}")
            if not is_expected:
                with contextlib.suppress(Exception):
                    await end_overdue(ledger, access, quietly, keeper.clock())

    with contextlib.suppress(UserError):
        async with renters(ledger, access, quietly) as found:
            ledger.remember(WATCHED, " ".join(found))
    async with asyncio.TaskGroup() as tasks:
        while not stop() and (is_keeping() or _is_needed(ledger)):
            wait_s = interval_s
            await careful(once())
            if is_keeping() or _is_needed(ledger):
                await asyncio.sleep(wait_s)


async def keep_time(
    ledger: Ledger,
    access: Access,
    say: Say,
    fetched: set[Rental],
    interval_s: float,
    clock: Callable[[], float],
) -> float:
    """Give back pods after their rental end, and settle open orders and deletions. Returns the seconds to wait.

    Results are fetched once, some minutes before the end, since some providers end rentals exactly on time; `fetched`
    contains these rentals. Rentals may be extended, so the wait is at most `interval_s`.
    """
    rows, now = ledger.rows(), clock()
    left_s = {row.label: row.ends_at - now for row in rows if row.ends_at is not None}
    ahead = {label: seconds for label, seconds in left_s.items() if seconds > 0}
    ending = [
        row
        for row in rows
        if ahead.get(row.label, math.inf) <= _FETCH_AHEAD_S and (row.label, row.ends_at) not in fetched
    ]

    async def fetch() -> None:
        # At most until the first rental ends.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(ahead.values())), renters(ledger, access, say) as found:
                failed = await found.fetch_results(ending)
                fetched.update((row.label, row.ends_at) for row in ending if row.name not in failed)

    is_settling = any(map(_is_open, rows)) or len(ahead) < len(left_s)
    # Concurrently, so that a slow fetch delays no rental end.
    work: list[Awaitable[None]] = [fetch()] if ending else []
    await gathered([*work, _settle(ledger, access, say, now)] if is_settling else work)
    waits_s = (
        seconds if seconds <= _FETCH_AHEAD_S else seconds - _FETCH_AHEAD_S for seconds in ahead.values()
    )
    passed_s = clock() - now
    return min([interval_s, *(max(seconds - passed_s, 0.0) for seconds in waits_s)])


async def _settle(ledger: Ledger, access: Access, say: Say, now: float) -> None:
    failures: Failures = {}
    # UserError: another command holds the lock, perhaps for hours, or the disk is full. Overdue pods are deleted below.
    with contextlib.suppress(UserError), ledger.locked():
        async with renters(ledger, access, say, _PATIENCE) as found:
            for by_name in (await found.settle()).values():
                failures |= by_name
    if any(row.ends_at is not None and row.ends_at < now - _OVERDUE_S for row in ledger.rows()):
        failures |= await end_overdue(ledger, access, say, now)
    for name, error in failures.items():
        say(name, f"failed: {error}")


async def end_overdue(ledger: Ledger, access: Access, say: Say, now: float) -> Failures:
    """Request the deletion of pods whose time is well over, by their ids. Needs no lock. Returns the errors by pod."""
    by = now - _OVERDUE_S
    rows = [row for row in ledger.rows() if row.provider_id and row.ends_at is not None and row.ends_at < by]
    async with renters(ledger, access, say) as found:
        return await each(rows, lambda row: found[row.provider].destroy(row.provider_id or ""))


def _is_needed(ledger: Ledger) -> bool:
    try:
        return needs_watcher(ledger)
    except UserError:
        # The ledger cannot be read now, but it may contain pods.
        return True
