"""Builds the model in fp32, with weights drawn from a seed or loaded from a directory or hub id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diloco.errors import UserError
from diloco.options.model_files import clean_config, directory_of, has_weights, load_model_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# More than any model has. A config.json may come from another peer and must not make this one build layers forever.
_MAX_LAYERS = 1024


def load_model(
    path_model: str,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
    keeps_dtype: bool = False,
) -> PreTrainedModel:
    """The fp32 model of a preset, directory or hub id, with its safetensors if it has any, else initialized.

    `keeps_dtype`: safetensors that are all bf16 or all fp16 stay what they are, in half the memory.
    Initial weights are drawn on the CPU and depend on (config, seed) only; torch's global generators are left
    as they were. Raises UserError if it is not a causal language model.
    """
    directory = directory_of(path_model, weights=True)
    if has_weights(directory):
        dtype = _stored_dtype(directory) if keeps_dtype else torch.float32
        return _moved(_from_weights(directory, path_model, attn_implementation, dtype), device)
    config = load_model_config(path_model)
    return model_from_config(config, seed=seed, device=device, attn_implementation=attn_implementation)


def model_from_config(
    config: Mapping[str, Any],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """An initialized fp32 model for a config.json, which may come from another peer's manifest; see load_model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(hf_config(config), attn_implementation)
    return _moved(model, device)


def num_parameters(config: Mapping[str, Any]) -> int:
    """Number of parameters of the model, counted without allocating them."""
    return sum(parameter.numel() for parameter in outline(config).parameters())


def outline(config: Mapping[str, Any]) -> PreTrainedModel:
    """The model on the meta device. Raises UserError."""
    with torch.device("meta"):
        return _build(hf_config(config), "eager")


def hf_config(config: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' configuration object for a config.json. Raises UserError if transformers does not accept it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    fields = clean_config(dict(config), origin="the model's config.json")
    model_type = fields.pop("model_type")
    try:
        parsed: PretrainedConfig = AutoConfig.for_model(model_type, **fields)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"transformers cannot use this config.json ({model_type}): {reason}") from error
    layers = getattr(parsed, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MAX_LAYERS:
        raise UserError(f"config.json asks for {layers} layers; at most {_MAX_LAYERS} are built")
    return parsed


def _build(config: PretrainedConfig, attn_implementation: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation, trust_remote_code=False
        )
    except (ValueError, ImportError) as error:
        raise UserError(
            f"no causal language model can be built from this config.json: {_first_line(error)}"
        ) from error
    return model


def _stored_dtype(directory: Path) -> torch.dtype:
    """The floating-point type of the directory's weights; fp32 if it has several, or cannot be read."""
    from safetensors import SafetensorError, safe_open

    found = set[str]()
    try:
        for path in directory.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError):
        # `_from_weights` says what is wrong.
        return torch.float32
    names = {name for name in found if "F" in name}
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get("".join(names), torch.float32)


def _from_weights(
    directory: Path, path_model: str, attn_implementation: str, dtype: torch.dtype
) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    loaded: Any
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the weights of {path_model} do not load: {_first_line(error)}") from error
    model: PreTrainedModel
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers would initialize them at random, independently of our seed.
        raise UserError(
            f"the weights of {path_model} lack {len(missing)} tensors, {missing[0]} first; save it again"
        )
    return model


def _moved(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    # transformers wraps `to` in a way that hides its signature.
    torch.nn.Module.to(model, device)
    return model


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
