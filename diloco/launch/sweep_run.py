"""Runs the trainers of a sweep, which start their own vLLM servers, with a live view and a final report."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.errors import DilocoError
from diloco.launch.live import PeerRow, running_view, show
from diloco.launch.local_swarm import PER_PEER_FIELDS, coordinator_address, coordinator_command, free_port
from diloco.launch.log_tail import LogTail
from diloco.launch.sweep import LOGS, PER_INSTANCE_FIELDS, Instance, trainer_environment
from diloco.options.trainer import TrainConfig, to_toml
from diloco.train.metrics_file import Record
from peers.admission.secrets import SECRET_ENV
from peers.daemon.restarts import RestartPolicy
from peers.daemon.supervisor import Supervisor, WorkerCommand

BETWEEN_TRAINERS_S = 5.0
# A trainer that fails is not restarted; it can be resumed from its checkpoints.
_ONCE = RestartPolicy(max_deaths=1, stop_timeout_s=6.0)


@dataclass
class Sweep:
    """A sweep. `named` are the fields that the user has set; with `average`, the instances form one swarm."""

    config: TrainConfig
    named: frozenset[str]
    instances: Sequence[Instance]
    average: bool
    rewards: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {"seed", *PER_INSTANCE_FIELDS}
        self._environment = dict(os.environ)
        if self.average:
            # As in `diloco run`, the coordinator is on loopback and admits every peer.
            own |= PER_PEER_FIELDS
            self._environment.pop(SECRET_ENV, None)
            # The keys and the ledger of this sweep's swarm must not mix with those of other runs.
            self._environment["XDG_STATE_HOME"] = str((self.instances[0].output_dir / "state").absolute())
        LOGS.mkdir(parents=True, exist_ok=True)
        self._config_path = LOGS / "sweep.toml"
        self._config_path.write_text(to_toml(self.config, only=self.named - own), encoding="utf-8")
        self._rows = [PeerRow(instance.name, instance.output_dir) for instance in self.instances]
        self._codes: dict[int, int] = {}

    async def run(self) -> int:
        """Run the sweep and print its report. Returns 0 if every instance has finished. No process is left."""
        if self.average:
            for instance, row in zip(self.instances, self._rows, strict=True):
                row.name = f"peer {instance.number}"
        supervisors: list[Supervisor] = []
        try:
            async with running_view(show(self._rows, on_records=self._received)):
                await self._train(supervisors)
        finally:
            await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
        return self._report()

    async def _train(self, supervisors: list[Supervisor]) -> None:
        swarm: list[str] = []
        if self.average:
            coordinator = Supervisor(
                coordinator_command(
                    self.config.hv.run_id, free_port(), self._environment, LOGS / "coordinator.log"
                ),
                policy=RestartPolicy(stop_timeout_s=6.0),
            )
            supervisors.append(coordinator)
            log = LogTail(coordinator.command.log_path)
            coordinator_end = asyncio.create_task(coordinator.run())
            swarm = ["--hv.initial-peers", await coordinator_address(coordinator_end, log)]
            swarm += [
                "--hv.galaxy-size",
                str(len(self.instances)),
                "--hv.host-maddrs",
                "/ip4/127.0.0.1/tcp/0",
            ]
        ends: list[asyncio.Task[None]] = []
        for instance in self.instances:
            if ends:
                await asyncio.sleep(BETWEEN_TRAINERS_S)
            own = [*swarm, "--hv.world-rank", str(instance.number)] if swarm else []
            seed = self.instances[0].seed if self.average else instance.seed
            command = self._trainer(instance, [*instance.flags(seed=seed), *own])
            supervisors.append(Supervisor(command, policy=_ONCE))
            ends.append(asyncio.create_task(self._run_trainer(instance, supervisors[-1])))
        await asyncio.gather(*ends)

    async def _run_trainer(self, instance: Instance, supervisor: Supervisor) -> None:
        row = self._rows[instance.number]
        row.since = time.time()
        log = LogTail(instance.log)
        code = (await supervisor.run()).code
        self._codes[instance.number] = code
        row.state = "done" if code == 0 else "failed"
        if code:
            _say(f"{instance.name} failed with {code}; the end of {log.path}:\n{log.last_words()}")

    def _trainer(self, instance: Instance, flags: Sequence[str]) -> WorkerCommand:
        words = ["--config", str(self._config_path), *flags]
        return WorkerCommand(
            argv=(sys.executable, "-m", "diloco.train_grpo", *words),
            env=trainer_environment(instance, self._environment, num_instances=len(self.instances)),
            cwd=Path.cwd(),
            log_path=instance.log,
        )

    def _received(self, index: int, new: Sequence[Record]) -> None:
        found = [float(r["reward"]) for r in new if r.get("kind") == "step" and r.get("reward") is not None]
        self.rewards.setdefault(index, []).extend(found)

    def _report(self) -> int:
        for instance in self.instances:
            rewards = self.rewards.get(instance.number) or []
            last = f"last reward {rewards[-1]:.3f} after {len(rewards)} steps" if rewards else "no step"
            ended = "finished" if self._codes.get(instance.number) == 0 else "FAILED"
            print(
                f"{instance.name}, seed {instance.seed}: {ended}, {last}, {instance.output_dir}", flush=True
            )
        failed = [instance for instance in self.instances if self._codes.get(instance.number) != 0]
        if failed:
            raise DilocoError(
                f"{len(failed)} of {len(self.instances)} instances failed: "
                + ", ".join(f"{one.name} ({one.log})" for one in failed)
            )
        return 0


def _say(text: str) -> None:
    print(f"--- {text}", flush=True)
