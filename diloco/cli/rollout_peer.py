"""`diloco peer --role rollout`: generates rollouts for the learners of a run, and trains nothing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.cli.peer import tell_in, worker_environment
from diloco.errors import UserError
from diloco.options.extras import check_extras
from diloco.options.trainer import Scalar, TrainConfig, for_mode, settled
from diloco.train.run_dir import created_run_dir, last_words, reason_in, written_config

if TYPE_CHECKING:
    from peers.daemon.supervisor import WorkerCommand


def rollout_peer(train: TrainConfig, named: frozenset[str], *, num_peers: int) -> int:
    """Run one rollout peer; `named` are the fields that the user has set. Raises UserError."""
    from diloco.cli.interrupts import run_interruptible
    from diloco.launch.swarm_config import daemon_config

    if "mode" in named and train.mode != "grpo":
        raise UserError(f"--role rollout is for --mode grpo: under --mode {train.mode} nothing is generated.")
    if train.grpo.rollout == "peers":
        raise UserError("--rollout says what a rollout peer generates by: vllm, or hf, which needs no GPU.")
    if not train.hv.initial_peers:
        raise UserError(
            "--initial-peers is missing: a rollout peer joins a run that has learners, started with --mode grpo "
            "--rollout peers."
        )
    # With `mode` among the named, a run that does not learn by reinforcement is refused.
    named |= {"mode"}
    config = settled(for_mode(replace(train, mode="grpo"), named), named)
    check_extras(config)
    fields = daemon_config(config, named)
    run_dir = created_run_dir(config)
    print(f"run directory: {run_dir}", flush=True)
    # Takes seconds: only after the arguments have been checked, and before the event loop, which would not notice a
    # signal.
    import peers.daemon.rollout_peer  # noqa: F401
    from peers.net.dht.node import load_hivemind

    load_hivemind()
    return run_interruptible(_live(Workplace(config, named, run_dir, num_peers), fields))


@dataclass(frozen=True)
class Workplace:
    """How the process that generates is started."""

    config: TrainConfig
    named: frozenset[str]
    run_dir: Path
    num_peers: int
    """Peers on this machine."""

    @property
    def worker_log(self) -> Path:
        return self.run_dir / "logs" / "worker.log"

    def command(self, manifest: Mapping[str, Scalar], link_path: Path) -> WorkerCommand:
        """Its command line, after writing the configuration that it names. Raises UserError."""
        from diloco.launch.swarm_config import adopted
        from peers.daemon.supervisor import WorkerCommand

        config = adopted(self.config, manifest, self.named, run_dir=self.run_dir)
        path = written_config(replace(config, run_dir=str(self.run_dir)), self.run_dir)
        return WorkerCommand(
            argv=(sys.executable, "-m", "diloco.generate_rollouts", "--config", str(path)),
            env=worker_environment(link_path, num_workers=self.num_peers),
            cwd=Path.cwd(),
            log_path=self.worker_log,
            reason_in=reason_in,
        )


async def _live(workplace: Workplace, fields: Mapping[str, Any]) -> int:
    from peers.daemon.config import DaemonConfig
    from peers.daemon.rollout_peer import run_rollout_peer

    tell_in(workplace.run_dir / "logs" / "daemon.log")
    policies = workplace.run_dir / "policies"
    shutil.rmtree(policies, ignore_errors=True)
    policies.mkdir()
    try:
        code = await run_rollout_peer(DaemonConfig(**fields), worker=workplace.command, directory=policies)
    finally:
        shutil.rmtree(policies, ignore_errors=True)
    if code == 2:
        raise UserError(last_words(workplace.worker_log) or f"See {workplace.worker_log}.")
    return 0
