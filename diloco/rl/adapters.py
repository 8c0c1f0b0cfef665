"""LoRA (arXiv 2106.09685): matrices of low rank are trained beside the model's weights, which stay as they are.

Only these adapters are averaged and sent to rollout peers. Servers and saved models get whole weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALPHA = 32
"""The output of adapters is scaled by alpha / rank. With a constant alpha the best learning rate hardly depends on the
rank, and is about ten times that of full training (thinkingmachines.ai/blog/lora, 2025)."""
_ADAPTER = "default"
"""The name that PEFT and TRL expect."""


def with_adapters(model: PreTrainedModel, rank: int | None, *, seed: int) -> PreTrainedModel:
    """The model with adapters at all its linear layers but the head, or unchanged if `rank` is None.

    The first matrix of each adapter is drawn from the seed, and the second is 0, so the model's outputs do not change.
    Torch's global generator is left as it was.
    """
    if rank is None:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(model, config)
    return adapted


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained: the adapters if there are any, else all."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def merged(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields these weights of the model with the adapters added, under the names that a model without adapters has.

    Sums are in fp32, whatever type the weights are kept in.
    """
    if not has_adapters(model):
        yield from weights
        return
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    for name, tensor in weights:
        if ".lora_" in name:
            continue
        layer, _, kind = name.rpartition(".base_layer.")
        if layer in layers and kind == "weight":
            with torch.no_grad():
                delta = layers[layer].get_delta_weight(_ADAPTER)
                tensor = tensor.detach().float() + delta.to(tensor.device, torch.float32)
        yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), tensor
