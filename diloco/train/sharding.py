"""Prepares a model for the ranks of a peer: FSDP2, precision, compilation, activation checkpointing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from diloco.options.flags import TrainConfig
from diloco.options.model_files import load_model_config, save_pretrained_dir
from diloco.outer.world import on_rank_zero

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Precision:
    """The dtype of forward and backward. Master weights, gradient reduction and the optimizer are always fp32."""

    compute: torch.dtype

    @classmethod
    def of(cls, choice: str, device: torch.device) -> Precision:
        """`auto` is fp32 on CPU, where fp16 is eight times slower; on GPU bf16 if supported, else fp16."""
        if choice == "auto":
            if device.type == "cpu":
                choice = "32-true"
            else:
                choice = "bf16-mixed" if torch.cuda.is_bf16_supported() else "fp16-mixed"
        types = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
        return cls(types[choice])

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled: fp16 gradients would underflow without it."""
        return self.compute == torch.float16

    def autocast(self, model: nn.Module, device: torch.device) -> AbstractContextManager[object]:
        """The context of a forward pass. FSDP casts by its own policy; a model that is not sharded needs autocast."""
        if isinstance(model, FSDPModule) or self.compute == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute)


def prepare(
    model: nn.Module,
    config: TrainConfig,
    *,
    precision: Precision,
    device: torch.device,
    mesh: DeviceMesh | None,
) -> None:
    """Wrap the decoder layers of a model and shard it over the mesh, in place.

    A single rank passes no mesh: FSDP2 would copy every weight twice a step without need, which costs a tenth of the
    throughput on CPU (benchmarks/inner_loop.py).
    """
    layers = decoder_layers(model)
    if config.activation_checkpointing:
        layers = [_checkpointed(model, layer) for layer in layers]
    if compiles(config, device):
        for layer in layers:
            layer.compile()
    if mesh is None:
        return
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=torch.float32)
    reshard = config.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Whether to use torch.compile: by default only on GPU, since it needs a C++ compiler on CPU."""
    return device.type == "cuda" if config.torch_compile is None else config.torch_compile


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights and buffers, unsharded and on the CPU, under the model's own names; empty on ranks other than 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))  # type: ignore[arg-type]


def save_model(
    state: Mapping[str, Tensor], run_dir: Path, path_model: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write <run_dir>/model/ in the format of transformers; `state` is as `full_state` returns it. A collective."""
    config = load_model_config(path_model)
    on_rank_zero(lambda: save_pretrained_dir(run_dir / "model", state, config, tokenizer))


def discard_partial_model(run_dir: Path) -> None:
    """Remove what a signal or an error has left of `save_model`."""
    for partial in run_dir.glob(".model.*"):
        shutil.rmtree(partial, ignore_errors=True)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: the modules that transformers lists in `_no_split_modules`, else the longest ModuleList."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if layers:
        return layers
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _checkpointed(model: nn.Module, layer: nn.Module) -> nn.Module:
    wrapped = checkpoint_wrapper(layer)
    name = next(name for name, module in model.named_modules() if module is layer)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, wrapped)
    return wrapped
