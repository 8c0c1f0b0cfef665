"""Logs of jobs on pods, followed while they are written."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Sequence

from provisioning.errors import MachineError
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row
from provisioning.machines.machine import Machine
from provisioning.machines.paths import JOBS, pod_directory
from provisioning.providers.registry import Access
from provisioning.renting.each import Failures, each
from provisioning.renting.operations import checked_names
from provisioning.renting.renters import renters
from provisioning.swarm.commands import DHT_JOB, PEER_JOB


async def follow_all(
    ledger: Ledger,
    access: Access,
    names: Sequence[str],
    *,
    job: str | None,
    lines: int,
    goes_on: bool,
    write: Callable[[str, str], None],
) -> Failures:
    """Give the lines of a job's log on each pod to `write(name, line)`; what went wrong, by pod.

    Without a job it is the peer's; a pod that has none gives those of all its jobs, to `write(name/job, line)`.
    """
    rows = checked_names(ledger, names)
    without: Failures = {}
    async with renters(ledger, access, lambda name, text: None) as by_provider:

        async def one(row: Row) -> None:
            machine = await by_provider.of(row).machine(row)
            chosen = await chosen_jobs(machine, row)
            await asyncio.gather(*(follow(machine, row, name, shown) for name, shown in chosen.items()))

        async def chosen_jobs(machine: Machine, row: Row) -> dict[str, str]:
            """Jobs, and what their lines are shown under."""
            there = await _jobs(machine, row)
            wanted = job or PEER_JOB
            if wanted in there or (goes_on and wanted in (PEER_JOB, DHT_JOB) and not (job is None and there)):
                return {wanted: row.name}
            if job is None and there:
                return {name: f"{row.name}/{name}" for name in there}
            known = ", ".join(there) or "none yet"
            without[row.name] = MachineError(f"there is no log of a job {wanted}; there are: {known}")
            return {}

        async def follow(machine: Machine, row: Row, name: str, shown: str) -> None:
            path = shlex.quote(f"{pod_directory(row.label)}/{JOBS}/{name}/log")
            # -F waits for a log that is not there yet.
            script = f"exec tail -n {lines} {'-F ' if goes_on else ''}{path} 2>/dev/null"
            async for line in machine.follow(script):
                write(shown, line)

        failures = await each(rows, lambda row: row.name, one)
    # Only one pod has a DHT: that the others have none is no failure, unless they were asked for by name.
    return failures | without if names or len(without) == len(rows) else failures


async def _jobs(machine: Machine, row: Row) -> list[str]:
    jobs = shlex.quote(f"{pod_directory(row.label)}/{JOBS}")
    return (await machine.run(f"ls {jobs} 2>/dev/null; exit 0")).stdout.split()
