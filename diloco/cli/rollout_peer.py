"""`diloco peer --role rollout`: generates rollouts for the learners of a run, without training."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.cli.interrupts import run_with_hivemind
from diloco.cli.machine_recipes import settled
from diloco.errors import UserError
from diloco.launch.peer_workers import log_and_print, worker_command
from diloco.options.extras import check_extras
from diloco.options.trainer import Scalar, TrainConfig, as_rollout_peer
from diloco.train.run_dir import run_dir_of

if TYPE_CHECKING:
    from peers.daemon.supervisor import WorkerCommand


def rollout_peer(train: TrainConfig, named: frozenset[str], *, num_peers: int) -> int:
    """Run one rollout peer; `named` are the fields that the user has set. Raises UserError."""
    from diloco.launch.swarm_config import daemon_config

    if "mode" in named and train.mode != "grpo":
        raise UserError(f"--role rollout is for --mode grpo: --mode {train.mode} needs no completions.")
    if train.grpo.rollout == "peers":
        raise UserError(
            "--rollout peers is for learners; a rollout peer takes --rollout vllm, or hf, which needs no GPU."
        )
    if not train.hv.initial_peers:
        raise UserError(
            "--initial-peers is missing: a rollout peer joins a run that has learners, started with --mode grpo "
            "--rollout peers."
        )
    config, named = as_rollout_peer(train, named)
    config = settled(config, named).config
    check_extras(config)
    fields = daemon_config(config, named)
    with run_dir_of(config) as run_dir:
        print(f"run directory: {run_dir}", flush=True)
        # This import takes seconds. It follows the checks of the arguments, so that they fail fast, and precedes the
        # event loop, which could not handle signals meanwhile.
        import peers.daemon.rollout_peer  # noqa: F401

        return run_with_hivemind(_run(config, named, fields, run_dir, num_peers))


async def _run(
    config: TrainConfig, named: frozenset[str], fields: Mapping[str, Any], run_dir: Path, num_peers: int
) -> int:
    from diloco.launch.swarm_config import adopt_manifest
    from peers.daemon.config import DaemonConfig
    from peers.daemon.rollout_peer import run_rollout_peer

    def command(manifest: Mapping[str, Scalar], link_path: Path) -> WorkerCommand:
        agreed = adopt_manifest(config, manifest, named, run_dir=run_dir, is_learner=False)
        agreed = replace(agreed, run_dir=str(run_dir))
        return worker_command(
            agreed, run_dir, link_path, module="diloco.generate_rollouts", num_peers=num_peers
        )

    log_and_print(run_dir / "logs" / "daemon.log")
    policies = run_dir / "policies"
    shutil.rmtree(policies, ignore_errors=True)
    policies.mkdir()
    try:
        return await run_rollout_peer(DaemonConfig(**fields), worker=command, directory=policies)
    finally:
        shutil.rmtree(policies, ignore_errors=True)
