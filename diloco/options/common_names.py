"""Suggests our flag for a misspelt name, or for the name that other programs use."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_OTHER_NAMES = {
    "per_device_train_batch_size": "accumulation_steps gradient_accumulation_steps micro_batch_size",
    "initial_peers": "address bootstrap coordinator join peer",
    "total_batch_size": "batch batch_size bs global_batch_size",
    "ckpt.resume": "checkpoint resume resume_from_checkpoint",
    "ckpt.path": "checkpoint_dir checkpoint_path save_dir",
    "ckpt.interval": "checkpoint_interval save_every save_interval save_steps",
    "hv.compression": "codec quantization",
    "seq_length": "context_length max_length max_seq_length seq_len sequence_length",
    "dataset_name_or_path": "data data_path dataset dataset_name",
    "total_steps": "epochs num_epochs num_steps num_train_epochs steps train_steps",
    "eval_interval": "eval_steps",
    "precision": "fp16 bf16 mixed_precision",
    "nproc_per_node": "gpus workers",
    "activation_checkpointing": "gradient_checkpointing",
    "max_grad_norm": "gradient_clipping",
    "hv.local_steps": "h inner_steps sync_every",
    "host_maddrs": "host listen port",
    "lr": "inner_lr learning_rate",
    "run_dir": "log_dir output output_dir",
    "metric_logger_type": "logger report_to wandb",
    "path_model": "model model_name model_name_or_path",
    "hv.outer_momentum": "momentum",
    "run_id": "name run_name",
    "peers": "num_peers",
    "world_rank": "rank",
    "warmup_steps": "warmup",
    "weight_decay": "wd",
    "hv.galaxy_size": "world_size",
}
"""By field, the names that other programs use for it. Fields whose flag has a short form are named without section."""
_FIELD_BY_OTHER_NAME = {other: ours for ours, others in _OTHER_NAMES.items() for other in others.split()}


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
