"""Model directories: presets, local directories and hub ids; reading config.json; saving. Imports no torch."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import UserError
from diloco.options.common_names import closest_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PRESETS_DIR = Path(__file__).parents[1] / "presets"
_CONFIG = "config.json"
_HUB_FILES = ["*.json", "*.jinja", "tokenizer.model"]
_HUB_WEIGHTS = ["*.safetensors"]
# A config.json may come from another peer, so fields that make transformers fetch code or kernels are refused.
_REFUSED_FIELDS = ("auto_map", "quantization_config", "custom_pipelines")
_DROPPED_FIELDS = (
    "attn_implementation",
    "experts_implementation",
    "transformers_version",
    "dtype",
    "torch_dtype",
)


def preset_names() -> list[str]:
    """Names of the models that come with the package, smallest first."""
    directories = [path.parent for path in PRESETS_DIR.glob(f"*/{_CONFIG}")]
    return [path.name for path in sorted(directories, key=_preset_width)]


def is_preset(path_model: str) -> bool:
    return "/" not in path_model and (PRESETS_DIR / path_model / _CONFIG).is_file()


def load_model_config(path_model: str) -> dict[str, Any]:
    """The model's config.json without machine-dependent fields, such as the dtype. Raises UserError. Loads no torch."""
    path = directory_of(path_model, weights=False) / _CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a model's config.json: {error}") from error
    return clean_config(config, origin=str(path))


def clean_config(config: object, *, origin: str) -> dict[str, Any]:
    """Check a config.json, which may come from a peer, and drop machine-dependent fields. UserError names `origin`."""
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{origin} has no model_type, so it is not the config.json of a transformers model")
    refused = [name for name in _REFUSED_FIELDS if config.get(name)]
    if refused:
        raise UserError(
            f"{origin} has the field {refused[0]}, which would run code from elsewhere; remove the field"
        )
    return {k: v for k, v in config.items() if not k.startswith("_") and k not in _DROPPED_FIELDS}


def directory_of(path_model: str, *, weights: bool) -> Path:
    """The local directory of a preset, directory or hub id. The latter is downloaded, with or without its weights."""
    if is_preset(path_model):
        return PRESETS_DIR / path_model
    local = Path(path_model).expanduser()
    if (local / _CONFIG).is_file():
        return local
    if local.exists() or not may_be_hub_id(path_model):
        what = "has no config.json" if local.exists() else "does not exist"
        close = closest_name(path_model, preset_names())
        hint = f". Did you mean {close}? Otherwise " if close and not local.exists() else "; "
        raise UserError(f"{path_model} is not a model: it {what}{hint}{_what_to_name()}")
    return _from_hub(path_model, weights=weights)


def has_weights(directory: Path) -> bool:
    """Whether the directory has weights as safetensors. Raises UserError if it has only pickled weights."""
    if any(directory.glob("*.safetensors")):
        return True
    pickled = [*directory.glob("pytorch_model*.bin"), *directory.glob("*.pt")]
    if pickled:
        raise UserError(f"{pickled[0]} is pickled; convert the weights to safetensors (save_pretrained does)")
    return False


def save_pretrained_dir(
    directory: Path,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Write a directory for AutoModelForCausalLM.from_pretrained, atomically; an existing one is replaced.

    `state` holds unsharded tensors by the model's parameter names.
    """
    from safetensors.torch import save_file

    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(directory)
    temporary.mkdir()
    try:
        tied = bool(config.get("tie_word_embeddings"))
        # Tied weights share memory, which safetensors refuses, or are copies of each other if the model was sharded.
        first: dict[Any, str] = {}
        for k, v in state.items():
            if not (tied and k == "lm_head.weight"):
                first.setdefault((v.data_ptr(), v.shape, v.stride()) if v.numel() else k, k)
        tensors = {k: state[k].detach().cpu().contiguous() for k in first.values()}
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps({**config, "dtype": _dtype_name(tensors)}, indent=2, sort_keys=True)
        (temporary / _CONFIG).write_text(text + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        _replace_directory(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def model_files(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """The files of a model's directory except the weights, named `model/<name>`."""
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as directory:
        tokenizer.save_pretrained(directory)
        files = {
            f"model/{path.name}": path.read_bytes() for path in Path(directory).iterdir() if path.is_file()
        }
    text = json.dumps(dict(config), indent=2, sort_keys=True)
    return {**files, f"model/{_CONFIG}": (text + "\n").encode()}


def _replace_directory(new: Path, directory: Path) -> None:
    """Rename `new` to `directory`. A reader sees the old directory, for a moment none, then the new one."""
    if not directory.exists():
        new.rename(directory)
        return
    old = _sibling(directory)
    directory.rename(old)
    new.rename(directory)
    shutil.rmtree(old)


def _dtype_name(tensors: Mapping[str, torch.Tensor]) -> str:
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def _sibling(directory: Path) -> Path:
    """A new hidden path on the same file system."""
    return directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:12]}")


def _preset_width(directory: Path) -> int:
    return int(json.loads((directory / _CONFIG).read_text(encoding="utf-8"))["hidden_size"])


def _what_to_name() -> str:
    presets = ", ".join(preset_names())
    return f"name a preset ({presets}), a directory with a config.json, or a Hugging Face id (owner/name)"


def may_be_hub_id(path_model: str) -> bool:
    """Whether it has the form `owner/name`. A bare name is a misspelt preset; more slashes mean a path."""
    parts = path_model.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _from_hub(model_id: str, *, weights: bool) -> Path:
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = _HUB_FILES + (_HUB_WEIGHTS if weights else [])
    try:
        directory = Path(snapshot_download(model_id, allow_patterns=patterns))
        # Without this check, a model that has only pickled weights would silently be initialized at random.
        files = list_repo_files(model_id) if weights and not has_weights(directory) else []
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{model_id} is not a directory here, and cannot be loaded from Hugging Face ({reason}); "
            f"{_what_to_name()}"
        ) from error
    if not (directory / _CONFIG).is_file():
        raise UserError(f"{model_id} on Hugging Face has no config.json; {_what_to_name()}")
    if pickled := [name for name in files if name.endswith((".bin", ".pt", ".pth"))]:
        raise UserError(
            f"{model_id} on Hugging Face has pickled weights ({pickled[0]}), and no safetensors to load"
        )
    return directory
