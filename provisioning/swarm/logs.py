"""Logs of jobs on pods, followed while they are written."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from provisioning.errors import MachineError
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row
from provisioning.machines.machine import Machine
from provisioning.machines.paths import JOBS, pod_directory
from provisioning.providers.registry import Access
from provisioning.renting.each import Failures, each, gathered
from provisioning.renting.renters import renters
from provisioning.swarm.commands import DHT_JOB, PEER_JOB


async def follow_all(
    ledger: Ledger,
    access: Access,
    names: Sequence[str],
    *,
    job: str | None,
    lines: int,
    follow: bool,
    write: Callable[[str, str], None],
) -> Failures:
    """Give the lines of a job's log on each pod to `write(name, line)`; what went wrong, by pod.

    Without a job it is the peer's; a pod that has none gives those of all its jobs, to `write(name/job, line)`.
    """
    rows = ledger.named(names)
    without: Failures = {}
    async with renters(ledger, access, lambda name, text: None) as found:

        async def one(row: Row) -> None:
            machine = await found[row.provider].machine(row)
            there, wanted = await _jobs(machine, row), job or PEER_JOB
            shown = {name: f"{row.name}/{name}" for name in there} if job is None else {}
            if wanted in there or (follow and not shown and wanted in (PEER_JOB, DHT_JOB)):
                shown = {wanted: row.name}
            if not shown:
                known = ", ".join(there) or "none yet"
                without[row.name] = MachineError(f"there is no log of a job {wanted}; there are: {known}")
            await gathered(follow_one(machine, row, name, as_what) for name, as_what in shown.items())

        async def follow_one(machine: Machine, row: Row, name: str, as_what: str) -> None:
            path = shlex.quote(f"{pod_directory(row.label)}/{JOBS}/{name}/log")
            # -F waits for a log that is not there yet.
            script = f"exec tail -n {lines} {'-F ' if follow else ''}{path} 2>/dev/null"
            async for line in machine.follow(script):
                write(as_what, line)

        failures = await each(rows, one)
    # Only one pod has a DHT: that the others have none is no failure, unless they were asked for by name.
    return failures | without if names or len(without) == len(rows) else failures


async def _jobs(machine: Machine, row: Row) -> list[str]:
    jobs = shlex.quote(f"{pod_directory(row.label)}/{JOBS}")
    return (await machine.run(f"ls {jobs} 2>/dev/null; exit 0")).stdout.split()
