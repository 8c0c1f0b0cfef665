"""`diloco launch --engine ray`: a training over a Ray cluster on pods that are set up already."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import UserError
from diloco.pods_flags import access, locked, opened, say

if TYPE_CHECKING:
    from provisioning.ledger import Ledger, Row

_CONFIG = "launch.toml"


def run_on_pods(
    config: Path,
    *,
    program: Sequence[str],
    config_flag: str,
    more: Sequence[str],
    num_nodes: int,
    storage: str | None,
    cpus_per_node: int | None,
    state_file: Path | None,
    inventory: Path | None,
) -> int:
    """Start what of the cluster does not run yet, submit the training, print what it says; its exit code."""
    ledger = opened(state_file)

    async def work() -> int:
        from provisioning.day_two import renters
        from provisioning.launchers.ray_cluster import RayCluster, RayJob
        from provisioning.pod_paths import CODE, VENV, pod_directory
        from provisioning.setup import put_private

        rows = _rows(ledger, num_nodes)
        async with renters(ledger, access(inventory), say) as by_provider:
            renter = by_provider[rows[0].provider]
            is_here = rows[0].provider == "local"
            python = sys.executable if is_here else renter.provider.python() or f"{VENV}/bin/python"
            if storage is None and not is_here:
                raise UserError(
                    "--storage is missing: a directory that all nodes share, for Ray's checkpoints."
                )
            for row in rows:
                machine = await renter.machine(row.name)
                await put_private(
                    machine, f"{pod_directory(row.label)}/{CODE}/{_CONFIG}", config.read_bytes()
                )
            cluster = RayCluster(renter, rows, python)
            await cluster.start(cpus=cpus_per_node)
            named = [config_flag, _CONFIG] if config_flag else []
            return await cluster.run(
                RayJob(
                    num_workers=num_nodes,
                    program=[*program, *named, *more],
                    storage=storage or str(ledger.path.parent / "ray"),
                    use_gpu=not rows[0].offer.is_cpu,
                )
            )

    return locked(ledger, work)


def _rows(ledger: Ledger, num_nodes: int) -> list[Row]:
    from provisioning.states import State

    rows = [row for row in ledger.rows() if row.state in (State.SYNCED, State.RUNNING)]
    if len(rows) < num_nodes:
        raise UserError(
            f"{num_nodes} nodes are wanted and {len(rows)} pods of {ledger.path} are set up; "
            f"`diloco provision --pods {num_nodes} --deploy-only` makes them."
        )
    return rows[:num_nodes]
