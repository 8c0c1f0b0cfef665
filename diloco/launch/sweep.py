"""Plans a sweep: seed, GPUs, directories and flags of each instance. Pure, except for the checks."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import UserError
from diloco.options.trainer import TrainConfig, flat_values
from diloco.train.devices import thread_settings
from diloco.train.run_dir import METRICS, slug
from peers.daemon.link import LINK_ENV

_LARGEST_SEED = 2**48
PER_INSTANCE_FIELDS = (
    "run_dir",
    "ckpt.path",
    "ckpt.delta_path",
    "grpo.rollout_url",
    "grpo.run_suffix",
    "grpo.vllm_gpu",
    "hv.world_rank",
)
LOGS = Path("logs") / "parallel_training"


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One training of a sweep."""

    number: int
    seed: int
    server_gpu: str | None
    trainer_gpu: str | None
    dataset: str
    """The data set, in the form used in file names."""

    @property
    def suffix(self) -> str:
        return f"instance{self.number}_seed{self.seed}"

    @property
    def name(self) -> str:
        return f"instance {self.number}"

    @property
    def output_dir(self) -> Path:
        return Path("outputs") / f"trl_{self.dataset}_{self.suffix}"

    @property
    def deltas_dir(self) -> Path:
        return Path("checkpoints") / f"deltas_{self.dataset}_{self.suffix}"

    @property
    def log(self) -> Path:
        where = "cpu" if self.trainer_gpu is None else f"gpu{self.trainer_gpu}"
        return LOGS / f"training_instance{self.number}_{where}_seed{self.seed}.log"

    def flags(self, *, seed: int) -> list[str]:
        """The flags that differ between instances."""
        own = {
            "--seed": str(seed),
            "--run-suffix": self.suffix,
            "--run-dir": str(self.output_dir),
            "--ckpt.path": str(self.output_dir / "checkpoints"),
            "--ckpt.delta-path": str(self.deltas_dir),
        }
        return [word for pair in own.items() for word in pair]


def plan_instances(
    config: TrainConfig, *, num_instances: int, seeds: Sequence[int], gpus: Sequence[str]
) -> list[Instance]:
    """Instance i has its server on GPU 2i and its trainer on GPU 2i + 1. Raises UserError."""
    if len(seeds) != num_instances or len(set(seeds)) != num_instances:
        raise UserError(
            f"--seeds {','.join(map(str, seeds))}: {num_instances} instances need as many different seeds"
        )
    if wrong := [seed for seed in seeds if not 0 <= seed <= _LARGEST_SEED]:
        raise UserError(f"--seeds: {wrong[0]} is not a seed; use whole numbers from 0 to {_LARGEST_SEED}")
    on_cpu = config.device == "cpu"
    if not on_cpu and len(gpus) < 2 * num_instances:
        raise UserError(
            f"{num_instances} instances need {2 * num_instances} GPUs, two each, but this machine has {len(gpus)}; "
            f"--instances {len(gpus) // 2} would do"
            if len(gpus) >= 2
            else f"an instance needs two GPUs, but this machine has {len(gpus)}; --device cpu needs none"
        )
    return [
        Instance(
            number=number,
            seed=seed,
            server_gpu=None if on_cpu else gpus[2 * number],
            trainer_gpu=None if on_cpu else gpus[2 * number + 1],
            dataset=slug(config.grpo.dataset),
        )
        for number, seed in enumerate(seeds)
    ]


def notes_on_overridden_flags(config: TrainConfig, named: Collection[str]) -> list[str]:
    """One sentence for each flag of the user that the sweep overrides for each instance."""
    values, defaults = flat_values(config), flat_values(TrainConfig())
    return [
        f"--{name.replace('_', '-')} has no effect in a sweep: each instance has its own."
        for name in PER_INSTANCE_FIELDS
        if name in named and values[name] != defaults[name]
    ]


def check_resources(
    instances: Sequence[Instance],
    config: TrainConfig,
    environment: Mapping[str, str],
    *,
    min_free_bytes: int,
) -> None:
    """Check directories, disk space and the wandb key before anything is started. Raises UserError."""
    for instance in instances:
        if (instance.output_dir / METRICS).exists() and config.ckpt.resume is None:
            raise UserError(
                f"{instance.output_dir} already holds a run; remove it, use other --seeds, or resume it with "
                "--ckpt.resume auto"
            )
    free = shutil.disk_usage(Path.cwd()).free
    if free < min_free_bytes:
        raise UserError(
            f"{free / 1e9:.1f} GB are free on this disk, less than --min-free-gb {min_free_bytes / 1e9:g}; "
            "delete files, or lower the limit"
        )
    if "wandb" in config.metric_loggers and environment.get("WANDB_MODE", "online") == "online":
        netrc = Path(environment.get("NETRC") or Path.home() / ".netrc")
        if not environment.get("WANDB_API_KEY") and not netrc.is_file():
            raise UserError("WANDB_API_KEY is not set: set it, `wandb login`, or set WANDB_MODE=offline")


def trainer_environment(
    instance: Instance, environment: Mapping[str, str], *, num_instances: int
) -> dict[str, str]:
    """The environment of an instance's trainer. It sees its own GPU and, as the last one, that of its server."""
    own = {**thread_settings(environment, num_instances), "PYTHONUNBUFFERED": "1"}
    if instance.trainer_gpu is not None:
        own["CUDA_VISIBLE_DEVICES"] = f"{instance.trainer_gpu},{instance.server_gpu}"
    kept = {name: value for name, value in environment.items() if name != LINK_ENV}
    return {**kept, **own}
