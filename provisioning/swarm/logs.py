"""Shows the logs of jobs on pods, and follows them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from provisioning.errors import MachineError
from provisioning.ledger.ledger import Ledger
from provisioning.machines.jobs import ENVIRONMENT
from provisioning.machines.machine import Machine
from provisioning.machines.paths import JOBS, pod_directory
from provisioning.pods.pod import Row
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
    """Call `write(pod name, line)` for the lines of a job's log on each pod. Returns the errors by pod.

    `job` None: the peer's log; on a pod without one, those of all its jobs except the one that makes the environment,
    by `write("pod name/job", line)`.
    """
    rows = ledger.named(names)
    without: Failures = {}
    async with renters(ledger, access, lambda name, text: None) as found:

        async def one(row: Row) -> None:
            machine = await found[row.provider].machine(row)
            there, wanted = await _jobs(machine, row), job or PEER_JOB
            shown = {}
            if job is None:
                shown = {name: f"{row.name}/{name}" for name in there if name != ENVIRONMENT}
            if wanted in there or (follow and not shown and wanted in (PEER_JOB, DHT_JOB)):
                shown = {wanted: row.name}
            if not shown:
                known = ", ".join(there) or "none yet"
                without[row.name] = MachineError(f"there is no log of a job {wanted}; there are: {known}")
            await gathered(follow_one(machine, row, name, as_what) for name, as_what in shown.items())

        async def follow_one(machine: Machine, row: Row, name: str, as_what: str) -> None:
            path = shlex.quote(f"{pod_directory(row.label)}/{JOBS}/{name}/log")
            # -F waits until the log exists.
            script = f"exec tail -n {lines} {'-F ' if follow else ''}{path} 2>/dev/null"
            async for line in machine.follow(script):
                write(as_what, line)

        failures = await each(rows, one)
    # A job may run on one pod only, like the DHT. Without `names`, it suffices that one pod has its log.
    return failures | without if names or len(without) == len(rows) else failures


async def _jobs(machine: Machine, row: Row) -> list[str]:
    jobs = shlex.quote(f"{pod_directory(row.label)}/{JOBS}")
    return (await machine.run(f"ls {jobs} 2>/dev/null; exit 0")).stdout.split()
