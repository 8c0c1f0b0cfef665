"""`diloco launch --engine ray`: runs a training on a Ray cluster of pods that are set up already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.cli.interrupts import run_interruptible
from diloco.cli.pods_flags import access, locked, say
from diloco.cli.state_files import opened_existing
from diloco.errors import UserError

if TYPE_CHECKING:
    from provisioning.launchers.job import LaunchJob
    from provisioning.launchers.ray_cluster import RayJob
    from provisioning.ledger.ledger import Ledger
    from provisioning.pods.pod import Pod, Row
    from provisioning.renting.renter import Renter

_CONFIG = "launch.toml"


def run_on_pods(
    job: LaunchJob,
    *,
    storage: str | None,
    cpus: int | None,
    state_file: Path | None,
    inventory: Path | None,
) -> int:
    """Start the nodes of the cluster that do not run yet, submit the training and print its output; its exit code.

    `storage` is a directory that all nodes share; None only if all pods are on this machine.
    """
    ledger = opened_existing(state_file)

    async def work() -> int:
        from provisioning.launchers.ray_cluster import RayCluster
        from provisioning.machines.paths import CODE, pod_directory
        from provisioning.machines.setup import put_private
        from provisioning.renting.renters import renters

        rows = _rows(ledger, job.num_nodes)
        async with renters(ledger, access(inventory), say) as found:
            told = ray_job(job, storage, rows, ledger)
            for row in rows:
                machine, pod = await found[row.provider].reached(row)
                check_reachable(row, pod, num_nodes=len(rows))
                path = f"{pod_directory(row.label)}/{CODE}/{_CONFIG}"
                await put_private(machine, path, job.config.read_bytes())
            cluster = RayCluster(found, rows, _python(ledger, found[rows[0].provider]))
            await cluster.start(cpus=cpus)
            return await cluster.run(told)

    return locked(ledger, work, for_jobs=True)


def print_cluster_yaml(
    job: LaunchJob, *, cpus: int | None, state_file: Path | None, inventory: Path | None
) -> int:
    """Print the cluster as a configuration file for `ray up`, and send its token to the pods; starts nothing."""
    ledger = opened_existing(state_file)

    async def work() -> int:
        from provisioning.launchers.ray_cluster import RayCluster
        from provisioning.launchers.ray_yaml import RayHost, cluster_yaml
        from provisioning.machines.ssh import SshMachine
        from provisioning.renting.renters import renters

        rows = _rows(ledger, job.num_nodes)
        async with renters(ledger, access(inventory), say) as found:
            hosts, users = [], {}
            for row in rows:
                machine, pod = await found[row.provider].reached(row)
                if not isinstance(machine, SshMachine):
                    raise UserError(
                        f"`ray up` works over SSH, and {row.name} is on this machine; run it without --dry-run."
                    )
                where = machine.address
                hosts.append(RayHost(inside=pod.host, outside=where.host, ssh_port=where.port))
                users[where.user, where.key_path] = row.name
            if len(users) > 1:
                raise UserError(
                    f"`ray up` uses one user and one key for all machines; "
                    f"those of {', '.join(users.values())} differ."
                )
            ((user, key),) = users
            python = _python(ledger, found[rows[0].provider])
            await RayCluster(found, rows, python).send_token()
            print(
                cluster_yaml(hosts, owner=ledger.owner, user=user, key=key, python=python, cpus=cpus),
                end="",
                flush=True,
            )
            return 0

    return run_interruptible(work())


def _python(ledger: Ledger, renter: Renter) -> str:
    """The Python interpreter that the pods were set up with."""
    from provisioning.ledger.keys import PYTHON
    from provisioning.machines.paths import VENV

    return ledger.recall(PYTHON) or renter.provider.python() or f"{VENV}/bin/python"


def check_reachable(row: Row, pod: Pod, *, num_nodes: int) -> None:
    if num_nodes > 1 and any(inside != outside for inside, outside in pod.ports):
        raise UserError(
            f"{row.name} is behind a port mapping, but Ray's nodes have to reach each other on all ports; "
            "use machines on one network (--provider ssh)."
        )


def ray_job(job: LaunchJob, storage: str | None, rows: Sequence[Row], ledger: Ledger) -> RayJob:
    from provisioning.launchers.node import num_processes
    from provisioning.launchers.ray_cluster import RayJob

    if storage is None and rows[0].provider != "local":
        raise UserError("--storage is missing: a directory that all nodes share, for Ray's checkpoints.")
    on_gpus = [row.offer.gpu_count for row in rows if not row.offer.is_cpu]
    if on_gpus and (len(on_gpus) < len(rows) or len(set(on_gpus)) > 1):
        counts = ", ".join(f"{row.name} {0 if row.offer.is_cpu else row.offer.gpu_count}" for row in rows)
        raise UserError(f"All nodes of one training need the same number of GPUs; they have: {counts}.")
    named = [job.config_flag, _CONFIG] if job.config_flag else []
    return RayJob(
        num_nodes=job.num_nodes,
        ranks_per_node=num_processes(job.nproc_per_node, on_gpus[0] if on_gpus else 0),
        program=[*job.program, *named, *job.more],
        storage=storage or str(ledger.path.parent / "ray"),
        use_gpu=bool(on_gpus),
    )


def _rows(ledger: Ledger, num_nodes: int) -> list[Row]:
    from provisioning.pods.pod import State

    rows = [row for row in ledger.rows() if row.state in (State.SYNCED, State.RUNNING)]
    if len(rows) < num_nodes:
        raise UserError(
            f"{num_nodes} nodes are needed, but only {len(rows)} pods in {ledger.path} are set up; "
            f"`diloco provision --pods {num_nodes} --deploy-only` sets them up."
        )
    return rows[:num_nodes]
