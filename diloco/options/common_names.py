"""Suggests our flag for a misspelt name, or for the name that other programs use."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_FIELD_BY_OTHER_NAME = {
    "accumulation_steps": "per_device_train_batch_size",
    "address": "initial_peers",
    "batch": "total_batch_size",
    "batch_size": "total_batch_size",
    "bootstrap": "initial_peers",
    "bs": "total_batch_size",
    "checkpoint": "ckpt.resume",
    "checkpoint_dir": "ckpt.path",
    "checkpoint_interval": "ckpt.interval",
    "checkpoint_path": "ckpt.path",
    "codec": "hv.compression",
    "coordinator": "initial_peers",
    "context_length": "seq_length",
    "data": "dataset_name_or_path",
    "data_path": "dataset_name_or_path",
    "dataset": "dataset_name_or_path",
    "dataset_name": "dataset_name_or_path",
    "epochs": "total_steps",
    "eval_steps": "eval_interval",
    "fp16": "precision",
    "bf16": "precision",
    "global_batch_size": "total_batch_size",
    "gpus": "nproc_per_node",
    "gradient_accumulation_steps": "per_device_train_batch_size",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_clipping": "max_grad_norm",
    "h": "hv.local_steps",
    "host": "host_maddrs",
    "inner_lr": "lr",
    "inner_steps": "hv.local_steps",
    "join": "initial_peers",
    "learning_rate": "lr",
    "listen": "host_maddrs",
    "log_dir": "run_dir",
    "logger": "metric_logger_type",
    "max_length": "seq_length",
    "max_seq_length": "seq_length",
    "micro_batch_size": "per_device_train_batch_size",
    "mixed_precision": "precision",
    "model": "path_model",
    "model_name": "path_model",
    "model_name_or_path": "path_model",
    "momentum": "hv.outer_momentum",
    "name": "run_id",
    "num_epochs": "total_steps",
    "num_peers": "peers",
    "num_steps": "total_steps",
    "num_train_epochs": "total_steps",
    "output": "run_dir",
    "output_dir": "run_dir",
    "peer": "initial_peers",
    "port": "host_maddrs",
    "quantization": "hv.compression",
    "rank": "world_rank",
    "report_to": "metric_logger_type",
    "resume": "ckpt.resume",
    "resume_from_checkpoint": "ckpt.resume",
    "run_name": "run_id",
    "save_dir": "ckpt.path",
    "save_every": "ckpt.interval",
    "save_interval": "ckpt.interval",
    "save_steps": "ckpt.interval",
    "seq_len": "seq_length",
    "sequence_length": "seq_length",
    "steps": "total_steps",
    "sync_every": "hv.local_steps",
    "train_steps": "total_steps",
    "wandb": "metric_logger_type",
    "warmup": "warmup_steps",
    "wd": "weight_decay",
    "workers": "nproc_per_node",
    "world_size": "hv.galaxy_size",
}
"""From other programs' names to our fields: dotted, with underscores for dashes, and without their section where the
flag has a short form."""


def suggested_name(name: str, known: Collection[str]) -> str | None:
    """The name in `known` that is most likely meant by `name`; None if nothing is similar.

    Names have underscores, a section in front (`hv.local_steps`), and no leading dashes.
    """
    # The plural has priority: `--peer` means `--peers` in commands that have it, else `--initial-peers`.
    if f"{name}s" in known:
        return f"{name}s"
    ours = _FIELD_BY_OTHER_NAME.get(name.rpartition(".")[2].lower(), "")
    # The same field has a section in some commands and none in others.
    for candidate in (ours, ours.rpartition(".")[2], f"hv.{ours}"):
        if candidate in known:
            return candidate
    return closest_name(name, known)


def closest_name(name: str, known: Collection[str]) -> str | None:
    """The name in `known` of which `name` is probably a misspelling; None if there is none."""
    close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None
