"""Logs of jobs on pods: followed while they are written, or collected."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from provisioning.day_two import checked_names, renters
from provisioning.errors import MachineError, ProvisioningError, UserError
from provisioning.ledger import Ledger, Row
from provisioning.machines import Machine
from provisioning.pod_paths import JOBS, pod_directory
from provisioning.providers.registry import Access
from provisioning.swarm_commands import DHT_JOB, PEER_JOB

_COLLECT_TIMEOUT_S = 300.0


async def follow_all(
    ledger: Ledger,
    access: Access,
    names: Sequence[str],
    *,
    job: str,
    lines: int,
    goes_on: bool,
    write: Callable[[str, str], None],
) -> dict[str, ProvisioningError]:
    """Give the lines of a job's log on each pod to `write(name, line)`; what went wrong, by pod."""
    rows = checked_names(ledger, names)
    failures: dict[str, ProvisioningError] = {}
    without: dict[str, ProvisioningError] = {}
    async with renters(ledger, access, lambda name, text: None) as by_provider:

        async def one(row: Row) -> None:
            path = shlex.quote(f"{pod_directory(row.label)}/{JOBS}/{job}/log")
            # -F waits for a log that is not there yet.
            how = f"-n {lines} {'-F ' if goes_on else ''}"
            script = f"exec tail {how}{path} 2>/dev/null"
            try:
                machine = await by_provider[row.provider].machine(row.name)
                there = await _jobs(machine, row)
                if job not in there and not (goes_on and job in (PEER_JOB, DHT_JOB)):
                    known = ", ".join(there) or "none yet"
                    without[row.name] = MachineError(f"there is no log of a job {job}; there are: {known}")
                    return
                async for line in machine.follow(script):
                    write(row.name, line)
            except ProvisioningError as error:
                failures[row.name] = error

        await asyncio.gather(*(one(row) for row in rows))
    # Only one pod has a DHT: that the others have none is no failure, unless they were asked for by name.
    return failures | without if names or len(without) == len(rows) else failures


async def collect(
    ledger: Ledger, access: Access, names: Sequence[str], directory: Path
) -> dict[str, ProvisioningError]:
    """Copy the logs of all jobs to <directory>/<pod>-<job>.log; what went wrong, by pod. Raises UserError."""
    rows = checked_names(ledger, names)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{directory} cannot be made: {error.strerror}.") from error
    failures: dict[str, ProvisioningError] = {}
    async with renters(ledger, access, lambda name, text: None) as by_provider:

        async def one(row: Row) -> None:
            jobs = shlex.quote(f"{pod_directory(row.label)}/{JOBS}")
            try:
                machine = await by_provider[row.provider].machine(row.name)
                for job in await _jobs(machine, row):
                    path = f"{jobs}/{shlex.quote(job)}/log"
                    answer = await machine.run(f"cat {path}", timeout_s=_COLLECT_TIMEOUT_S)
                    text = answer.checked(f"reading the log of {job}")
                    _written(directory / f"{row.name}-{Path(job).name}.log", text)
            except ProvisioningError as error:
                failures[row.name] = error

        await asyncio.gather(*(one(row) for row in rows))
    return failures


async def _jobs(machine: Machine, row: Row) -> list[str]:
    jobs = shlex.quote(f"{pod_directory(row.label)}/{JOBS}")
    return (await machine.run(f"ls {jobs} 2>/dev/null; exit 0")).stdout.split()


def _written(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
