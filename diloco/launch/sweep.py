"""Runs several GRPO trainings at the same time, which start their own vLLM servers, with a live view and a report."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import DilocoError, UserError
from diloco.launch.live import PeerRow, running_view, show
from diloco.options.trainer import TrainConfig, to_toml
from diloco.train.devices import thread_settings
from diloco.train.file_tail import FileTail
from diloco.train.metrics_file import Record
from diloco.train.run_dir import METRICS, slug
from peers.daemon.link import LINK_ENV
from peers.daemon.supervisor import Supervisor, WorkerCommand

LOGS = Path("logs") / "parallel_training"
PER_INSTANCE_FIELDS = (
    "run_dir",
    "ckpt.path",
    "ckpt.delta_path",
    "grpo.run_suffix",
    "grpo.vllm_gpu",
    "hv.world_rank",
)
BETWEEN_TRAINERS_S = 5.0
_STOP_TIMEOUT_S = 6.0


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One training of a sweep."""

    number: int
    seed: int
    gpus: tuple[str, ...]
    """The trainer's GPU, then that of its server; empty on the CPU."""
    dataset: str
    """The data set, in the form used in file names."""

    @property
    def suffix(self) -> str:
        return f"instance{self.number}_seed{self.seed}"

    @property
    def output_dir(self) -> Path:
        return Path("outputs") / f"trl_{self.dataset}_{self.suffix}"

    @property
    def log(self) -> Path:
        where = f"gpu{self.gpus[0]}" if self.gpus else "cpu"
        return LOGS / f"training_instance{self.number}_{where}_seed{self.seed}.log"

    def flags(self) -> list[str]:
        """The flags that differ between instances."""
        own = {
            "--seed": str(self.seed),
            "--run-suffix": self.suffix,
            "--run-dir": str(self.output_dir),
            "--ckpt.path": str(self.output_dir / "checkpoints"),
            "--ckpt.delta-path": str(Path("checkpoints") / f"deltas_{self.dataset}_{self.suffix}"),
        }
        return [word for pair in own.items() for word in pair]


def plan_instances(config: TrainConfig, *, seeds: Sequence[int], gpus: Sequence[str]) -> list[Instance]:
    """Instance i has its server on GPU 2i and its trainer on GPU 2i + 1. Raises UserError."""
    on_cpu = config.device == "cpu"
    if not on_cpu and len(gpus) < 2 * len(seeds):
        raise UserError(
            f"{len(seeds)} instances need {2 * len(seeds)} GPUs, two each, but this machine has {len(gpus)}; use a "
            f"smaller number of --instances, or --device cpu, which needs none"
        )
    instances = [
        Instance(
            number=number,
            seed=seed,
            gpus=() if on_cpu else (gpus[2 * number + 1], gpus[2 * number]),
            dataset=slug(config.grpo.dataset),
        )
        for number, seed in enumerate(seeds)
    ]
    for instance in instances:
        if (instance.output_dir / METRICS).exists() and config.ckpt.resume is None:
            raise UserError(
                f"{instance.output_dir} already holds a run; remove it, use other --seeds, or resume it with "
                "--ckpt.resume auto"
            )
    return instances


class Sweep:
    """A sweep. `named` are the fields that the user has set."""

    def __init__(self, config: TrainConfig, named: frozenset[str], instances: Sequence[Instance]) -> None:
        self._environment = {name: value for name, value in os.environ.items() if name != LINK_ENV}
        LOGS.mkdir(parents=True, exist_ok=True)
        self.config_path = LOGS / "sweep.toml"
        shared = named - {"seed", *PER_INSTANCE_FIELDS}
        self.config_path.write_text(to_toml(config, only=shared), encoding="utf-8")
        self._instances = instances
        self._rows = [PeerRow(f"instance {one.number}", one.output_dir) for one in instances]
        self._rewards: list[list[float]] = [[] for _ in instances]

    async def run(self) -> int:
        """Run the sweep and print its report. Returns 0 if every instance has finished. No process is left."""
        supervisors: list[Supervisor] = []
        try:
            async with running_view(show(self._rows, on_records=self._received)):
                await self._train(supervisors)
        finally:
            await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
        return self._report()

    def trainer(self, instance: Instance) -> WorkerCommand:
        """The trainer of an instance. It sees its own GPU and, as the last one, that of its server."""
        gpus: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": ",".join(instance.gpus)} if instance.gpus else {}
        threads = thread_settings(self._environment, len(self._instances))
        words = ("--config", str(self.config_path), *instance.flags())
        return WorkerCommand(
            argv=(sys.executable, "-m", "diloco.train_grpo", *words),
            env={**self._environment, **threads, "PYTHONUNBUFFERED": "1", **gpus},
            cwd=Path.cwd(),
            log_path=instance.log,
        )

    async def _train(self, supervisors: list[Supervisor]) -> None:
        ends: list[asyncio.Task[None]] = []
        for instance in self._instances:
            if ends:
                await asyncio.sleep(BETWEEN_TRAINERS_S)
            # A trainer that fails is not restarted; it can be resumed from its checkpoints.
            supervisors.append(
                Supervisor(self.trainer(instance), max_deaths=1, stop_timeout_s=_STOP_TIMEOUT_S)
            )
            ends.append(asyncio.create_task(self._run_trainer(instance, supervisors[-1])))
        await asyncio.gather(*ends)

    async def _run_trainer(self, instance: Instance, supervisor: Supervisor) -> None:
        row = self._rows[instance.number]
        row.since = time.time()
        log = FileTail(instance.log)
        code = (await supervisor.run()).code
        row.state = "FAILED" if code else "finished"
        if code:
            print(
                f"--- {row.name} failed with {code}; the end of {log.path}:\n{log.last_words()}", flush=True
            )

    def _received(self, index: int, new: Sequence[Record]) -> None:
        steps = (record for record in new if record.get("kind") == "step")
        self._rewards[index] += [float(r["reward"]) for r in steps if r.get("reward") is not None]

    def _report(self) -> int:
        failed = []
        for instance, row, rewards in zip(self._instances, self._rows, self._rewards, strict=True):
            last = f"last reward {rewards[-1]:.3f} after {len(rewards)} steps" if rewards else "no step"
            print(f"{row.name}, seed {instance.seed}: {row.state}, {last}, {instance.output_dir}", flush=True)
            if row.state == "FAILED":
                failed.append(f"{row.name} ({instance.log})")
        if failed:
            raise DilocoError(
                f"{len(failed)} of {len(self._instances)} instances failed: {', '.join(failed)}"
            )
        return 0
