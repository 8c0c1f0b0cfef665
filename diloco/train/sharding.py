"""How a model is laid over the ranks of a peer: FSDP2, precision, compilation, activation checkpointing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from diloco.options.flags import TrainConfig


@dataclass(frozen=True)
class Precision:
    """What is computed in which type. The master weights, gradients' sums and the optimizer are always fp32."""

    compute: torch.dtype

    @classmethod
    def of(cls, choice: str, device: torch.device) -> Precision:
        """`auto`: fp32 on CPU (fp16 there is eight times slower); on GPU bf16 where it exists, else fp16."""
        if choice == "auto":
            if device.type == "cpu":
                choice = "32-true"
            else:
                choice = "bf16-mixed" if torch.cuda.is_bf16_supported() else "fp16-mixed"
        types = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
        return cls(types[choice])

    @property
    def scales_loss(self) -> bool:
        """fp16 gradients vanish without a scaler."""
        return self.compute == torch.float16

    def autocast(self, model: nn.Module, device: torch.device) -> AbstractContextManager[object]:
        """Around a forward pass: FSDP casts by itself, a model on one rank needs autocast."""
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

    A single rank has no mesh: FSDP2 on one rank copies every weight twice a step for nothing (a tenth of the
    throughput on CPU, see benchmarks/inner_loop.py).
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
    """Unless told otherwise only on GPU: on CPU it needs a C++ compiler."""
    return device.type == "cuda" if config.torch_compile is None else config.torch_compile


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights and buffers, whole and on the CPU, under the model's own names; empty on ranks other than 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))  # type: ignore[arg-type]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: those transformers says not to split, else the longest list of modules."""
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
