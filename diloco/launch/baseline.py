"""Trains a single peer with the settings of the swarm's peers, as a baseline for the swarm's result."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from diloco.errors import DilocoError
from diloco.launch.history import History
from diloco.launch.live import PeerRow, running_view, show
from diloco.launch.local_swarm import PER_PEER_FIELDS, environment_of_peers, gpu_of_peer
from diloco.launch.phase_file import write_phase
from diloco.options.trainer import TrainConfig, flat_values, to_toml
from diloco.train.file_tail import FileTail
from diloco.train.metrics_file import Record
from diloco.train.run_dir import reason_in
from peers.daemon.supervisor import Supervisor, WorkerCommand
from peers.monitor.phases import Doing, PhaseClock
from peers.protocol.reports import Phase


async def train_alone(
    config: TrainConfig, named: Collection[str], run_dir: Path, num_peers: int, gpus: Sequence[str]
) -> list[Record]:
    """Train without a swarm, with the flags, data, seed and threads of one of `num_peers` peers, and a live view.

    `run_dir` is that of the swarm; of this machine's `gpus` it takes the first. Returns the records. Raises
    DilocoError. No process is left, even if cancelled.
    """
    own_dir = run_dir / "alone"
    own_dir.mkdir(parents=True, exist_ok=True)
    # Without checkpoints, which would mix with those of the peers.
    checkpoints = {name for name in flat_values(config) if name.startswith("ckpt.")}
    path = own_dir / "flags.toml"
    path.write_text(to_toml(config, only=set(named) - PER_PEER_FIELDS - checkpoints), encoding="utf-8")
    command = WorkerCommand(
        argv=(sys.executable, "-m", "diloco.train_fsdp", "--config", str(path), "--run-dir", str(own_dir)),
        env=environment_of_peers(os.environ, run_dir, num_peers) | gpu_of_peer(0, gpus),
        cwd=Path.cwd(),
        log_path=own_dir / "logs" / "peer.log",
        reason_in=reason_in,
    )
    history, clock = History(), PhaseClock()
    row = PeerRow("alone", own_dir, since=time.time())
    write_phase(own_dir, Phase(name="starting", detail="loading torch, the model and the data"))

    def received(_index: int, new: Sequence[Record]) -> None:
        history.add(new)
        if steps := [record for record in new if record.get("kind") == "step"]:
            doing = Doing("training", done=steps[-1]["step"], total=config.end_step, unit="steps")
            write_phase(own_dir, clock.at(doing, time.time()))

    async with running_view(show([row], on_records=received)):
        log = FileTail(command.log_path)
        # Not restarted, since it saves no checkpoints.
        end = await Supervisor(command, max_deaths=1).run()
    if end.code:
        raise DilocoError(
            f"The baseline training ended with exit code {end.code}. The end of {log.path}:\n{log.last_words()}"
        )
    return history.records
