"""Trains a single peer with the settings of the swarm's peers, as a baseline for the swarm's result."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.errors import DilocoError
from diloco.launch.live import PeerRow, running_view, show
from diloco.launch.local_swarm import PER_PEER_FIELDS, environment_of_peers, gpu_of_peer
from diloco.launch.log_tail import LogTail
from diloco.launch.phase_file import write_phase
from diloco.options.trainer import TrainConfig, flat_values, to_toml
from diloco.train.devices import visible_gpus
from diloco.train.metrics_file import Record
from diloco.train.run_dir import reason_in
from peers.daemon.restarts import RestartPolicy
from peers.daemon.supervisor import Supervisor, WorkerCommand
from peers.monitor.phases import Doing, PhaseClock
from peers.protocol.reports import Phase

NAME = "alone"
# Not restarted, since it saves no checkpoints.
_POLICY = RestartPolicy(max_deaths=1)


@dataclass
class LoneTraining:
    """A training without a swarm, with the flags, data, seed and threads of one of `num_peers` peers."""

    config: TrainConfig
    named: frozenset[str]
    run_dir: Path
    """The run directory of the swarm; that of this training is a subdirectory."""
    num_peers: int
    records: list[Record] = field(default_factory=list)

    async def run(self) -> None:
        """Train to the end with a live view. Raises DilocoError. No process is left, even if cancelled."""
        row = PeerRow(NAME, self.run_dir / NAME, since=time.time())
        row.run_dir.mkdir(parents=True, exist_ok=True)
        write_phase(row.run_dir, Phase(name="starting", detail="loading torch, the model and the data"))
        command, clock = self._command(row.run_dir), PhaseClock()

        def received(_index: int, new: Sequence[Record]) -> None:
            self.records += new
            if steps := [record for record in new if record.get("kind") == "step"]:
                doing = Doing("training", done=steps[-1]["step"], total=self.config.end_step, unit="steps")
                write_phase(row.run_dir, clock.at(doing, time.time()))

        async with running_view(show([row], on_records=received)):
            log = LogTail(command.log_path)
            end = await Supervisor(command, policy=_POLICY).run()
        if end.code:
            raise DilocoError(
                f"The baseline training ended with exit code {end.code}. The end of {log.path}:\n"
                f"{log.last_words()}"
            )

    def _command(self, own_dir: Path) -> WorkerCommand:
        path = own_dir / "flags.toml"
        path.write_text(to_toml(self.config, only=self._fields), encoding="utf-8")
        flags = ("--config", str(path), "--run-dir", str(own_dir))
        environment = environment_of_peers(os.environ, self.run_dir, self.num_peers)
        return WorkerCommand(
            argv=(sys.executable, "-m", "diloco.train_fsdp", *flags),
            env={**environment, **gpu_of_peer(0, visible_gpus(os.environ))},
            cwd=Path.cwd(),
            log_path=own_dir / "logs" / "peer.log",
            reason_in=reason_in,
        )

    @property
    def _fields(self) -> frozenset[str]:
        """The fields that the user has set, without those of the swarm, and without checkpoints, which would mix with
        those of the peers."""
        checkpoints = {name for name in flat_values(self.config) if name.startswith("ckpt.")}
        return self.named - PER_PEER_FIELDS - checkpoints
