"""Opens the sinks that the configuration names, and names the wandb run."""

from __future__ import annotations

from pathlib import Path

from diloco.options.trainer import TrainConfig, flat_values
from diloco.train.queued_sink import Sink
from diloco.train.run_dir import slug
from diloco.train.sinks import TensorBoardSink, WandbSink


def opened_sinks(config: TrainConfig, run_dir: Path) -> list[Sink]:
    """The sinks that `--metric-logger-type` names. Raises UserError if one cannot be started."""
    sinks: list[Sink] = []
    if "tensorboard" in config.metric_loggers:
        sinks.append(TensorBoardSink(run_dir=run_dir))
    if "wandb" in config.metric_loggers:
        sinks.append(
            WandbSink(
                project=config.project,
                run_dir=run_dir,
                config=flat_values(config),
                name=run_name(config),
                group=config.hv.run_id if is_peer(config) else None,
                tags=(f"seed{config.seed}",) if config.mode == "grpo" else (),
            )
        )
    return sinks


def is_peer(config: TrainConfig) -> bool:
    """Whether this training is a peer of a swarm."""
    return config.hv.world_rank is not None or bool(config.hv.initial_peers)


def run_name(config: TrainConfig) -> str | None:
    """The wandb run's name: run id and world rank of a peer; for GRPO, dataset, model, `--grpo.run-suffix` and world
    rank. None lets wandb choose.
    """
    rank = config.hv.world_rank
    peer = f"peer-{rank}" if rank is not None else ""
    if config.mode != "grpo":
        return f"{config.hv.run_id}-{peer}" if peer else None
    parts = [f"trl_{slug(config.grpo.dataset)}_grpo_{Path(config.path_model).name}", config.grpo.run_suffix]
    return "_".join(filter(None, (*parts, peer)))
