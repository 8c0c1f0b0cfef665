"""Checks that peers run before they start any process. They raise UserError for errors that would occur later."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from diloco.data.tokenizer import check_vocabulary
from diloco.doctor.p2pd import check_ports
from diloco.doctor.resources import check_disk
from diloco.doctor.software import check_vllm
from diloco.errors import UserError, print_note
from diloco.options.extras import check_extras
from diloco.options.flags import HvConfig
from diloco.options.model_files import load_model_config
from diloco.options.trainer import TrainConfig
from diloco.rl.hub_tasks import HUB_TASKS
from diloco.rl.task_choice import check_task, open_task
from diloco.train.devices import Machine, starts_server
from diloco.train.memory import check_peers_fit, number_in

# Parts of a model besides the layers that can be fragments: embeddings, the last norm, the head.
_NUM_NON_LAYER_UNITS = 3


def check_memory_and_disk(
    config: TrainConfig,
    machine: Machine,
    state_dir: Path,
    *,
    named: Collection[str] = (),
    num_ranks: int = 1,
    is_settled: bool = True,
) -> None:
    """Raise UserError if memory or a disk is too small for all peers on this machine. Does not import torch.

    `is_settled=False` means that settings that the user has not `named` may still come from the swarm. Then activations
    and the run's later checkpoints are not counted, the optimizer is the one that takes less memory, and GRPO counts as
    training adapters, which takes less too.
    """
    if not is_settled and config.mode == "pretrain" and "optimizer" not in named:
        config = replace(config, optimizer="muon")
    num_peers, samples = machine.num_peers, config.per_device_train_batch_size
    is_counted = is_settled and config.mode == "pretrain"
    tokens = samples * config.seq_length * num_ranks if is_counted else 0
    has_adapters = config.trains_adapters or (not is_settled and config.mode == "grpo")
    try:
        check_peers_fit(
            config.path_model,
            num_peers=num_peers,
            optimizer=config.optimizer,
            on_gpu=machine.num_gpus > 0,
            activation_tokens=tokens,
            gpu_bytes=machine.gpu_bytes_each * num_ranks or None,
            has_adapters=has_adapters,
            recomputes=config.activation_checkpointing,
            copies_state=config.copies_state,
            num_copies=None if config.shards_model else num_ranks,
            compression=config.hv.compression,
        )
    except UserError as error:
        if config.mode == "pretrain" or has_adapters:
            raise
        raise UserError(f"{error}; or train adapters only (--grpo.lora-rank)") from error
    for finding in check_disk(config, state_dir, num_peers=num_peers, is_settled=is_settled):
        if finding.verdict == "fail":
            raise UserError(f"{finding.name}: {finding.said}; try {finding.fix}")
        if finding.verdict == "warn":
            print_note(f"{finding.name}: {finding.said}; try {finding.fix}")


def check_choices(config: TrainConfig, machine: Machine, *, is_settled: bool = True) -> None:
    """Raise UserError for settings that a worker would refuse later.

    `is_settled=False` means that values may still come from the swarm; then those are not checked.
    """
    if config.device == "cuda" and not machine.num_gpus:
        raise UserError(
            "--device cuda: nvidia-smi shows no GPU here; leave --device out, or repair the driver"
        )
    resume = config.ckpt.resume
    if resume and resume != "auto" and "://" not in resume and not Path(resume).expanduser().is_dir():
        raise UserError(
            f"--ckpt.resume {resume}: there is no such directory; use a model_step_<N>, or `auto` for the newest"
        )
    check_extras(config)
    if config.ckpt.interval is not None:
        _check_scheme(config.ckpt.path)
    check_vocabulary(config.path_model)
    if config.mode == "grpo":
        _check_reinforcement(config, is_settled=is_settled)
    elif is_settled:
        check_fragments(config)


def _check_scheme(path: str) -> None:
    """Raise UserError for a URL whose scheme fsspec does not support. Does not connect."""
    scheme, is_url, _ = path.partition("://")
    if is_url:
        from fsspec import available_protocols

        if scheme not in available_protocols():
            raise UserError(
                f"--ckpt.path {path}: fsspec does not support {scheme}://; use s3://, for instance."
            )


def _check_reinforcement(config: TrainConfig, *, is_settled: bool) -> None:
    check_task(config.grpo)
    # Data sets that must be downloaded are not opened here: that may take too long for a check.
    name = config.grpo.dataset
    if is_settled and (name not in HUB_TASKS or "=" in name):
        open_task(config.grpo, seed=config.seed)
    if starts_server(config):
        for finding in check_vllm(config.grpo):
            if finding.verdict == "fail":
                raise UserError(finding.said)


def check_fragments(config: TrainConfig) -> None:
    """Raise UserError for more fragments than the model can be cut into."""
    layers = number_in(load_model_config(config.path_model), "num_hidden_layers", "n_layer")
    wanted = config.hv.num_fragments
    if layers and wanted > layers + _NUM_NON_LAYER_UNITS:
        raise UserError(
            f"{config.path_model} has {layers} layers, too few for --hv.num-fragments {wanted}; use {layers} or fewer"
        )


def check_ports_free(hv: HvConfig) -> None:
    """Raise UserError if another process listens on one of the peer's ports."""
    finding = check_ports(hv)
    if finding.verdict == "fail":
        raise UserError(finding.said)
