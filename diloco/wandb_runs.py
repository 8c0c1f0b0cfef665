"""Where a trainer's figures go beside metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from diloco.config import TrainConfig, flat_values
from diloco.metrics import Sink, WandbSink


def opened_sinks(config: TrainConfig, run_dir: Path) -> list[Sink]:
    """What the configuration asks for. Raises UserError for what does not start."""
    if config.metric_logger_type != "wandb":
        return []
    return [WandbSink(project=config.project, run_dir=run_dir, config=flat_values(config))]
