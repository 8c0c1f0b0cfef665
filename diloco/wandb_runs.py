"""Where a trainer's figures go beside metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from diloco.config import TrainConfig, flat_values
from diloco.grpo.sweep import slug
from diloco.metrics import Sink, WandbSink


def opened_sinks(config: TrainConfig, run_dir: Path) -> list[Sink]:
    """What the configuration asks for. Raises UserError for what does not start."""
    if config.metric_logger_type != "wandb":
        return []
    tags = (f"seed{config.seed}",) if config.mode == "grpo" else ()
    return [
        WandbSink(
            project=config.project,
            run_dir=run_dir,
            config=flat_values(config),
            name=run_name(config),
            tags=tags,
        )
    ]


def run_name(config: TrainConfig) -> str | None:
    """Of a reinforcement run: what is learnt by which model, and the suffix that tells it from others."""
    if config.mode != "grpo":
        return None
    parts = [f"trl_{slug(config.grpo.dataset)}_grpo_{Path(config.path_model).name}", config.grpo.run_suffix]
    return "_".join(filter(None, parts))
