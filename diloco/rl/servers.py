"""Starts or finds the inference servers that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.errors import UserError
from diloco.options.model_files import load_model_config, save_pretrained_dir
from diloco.options.trainer import TrainConfig
from diloco.rl.own_server import OwnServer, vllm_command
from diloco.rl.push import Publisher
from diloco.rl.rollouts import Rollouts
from diloco.rl.server_client import ServerClient, ServerLost
from diloco.rl.weights import own_copies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DTYPES = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16}


def opened_servers(
    config: TrainConfig,
    run_dir: Path,
    weights: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    gpu: str | None,
    environment: Mapping[str, str],
    on_event: Callable[..., None],
) -> Rollouts:
    """Start this peer's own server, or connect to those that the user named. Raises UserError if one does not serve.

    `weights` are written to disk for the start of an own server; the weights to serve are pushed before each rollout.
    """
    grpo = config.grpo
    if grpo.rollout_url:
        return Rollouts(grpo.rollout_url, Publisher(_dtype_of(grpo.rollout_url)), on_event=on_event)
    served = run_dir / "served"
    save_pretrained_dir(served, own_copies(weights, dtype), load_model_config(config.path_model), tokenizer)
    server = OwnServer(
        vllm_command(
            python=grpo.vllm_python,
            model=served,
            dtype=str(dtype).removeprefix("torch."),
            gpu=gpu,
            more=grpo.vllm_args,
            log_path=run_dir / "logs" / "vllm.log",
            timeout_s=grpo.vllm_timeout,
            environment=environment,
        )
    )
    server.start()
    return Rollouts([server.url], Publisher(dtype), server, on_event)


def _dtype_of(urls: tuple[str, ...]) -> torch.dtype:
    try:
        found = {url: ServerClient(url).dtype() for url in urls}
    except ServerLost as error:
        raise UserError(
            f"--rollout-url: {error}. A server needs VLLM_SERVER_DEV_MODE=1 in its environment, and "
            "--worker-extension-cls diloco.rl.server_extension.WeightsExtension with this package on its PYTHONPATH"
        ) from error
    if len(set(found.values())) > 1 or next(iter(found.values())) not in _DTYPES:
        raise UserError(f"--rollout-url: the servers' types are {found}; give all of them the same --dtype")
    return _DTYPES[next(iter(found.values()))]
