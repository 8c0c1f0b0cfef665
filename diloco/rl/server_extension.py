"""Runs in the workers of a vLLM server: reads weights from a file and loads them after checking all of them.

With `--worker-extension-cls diloco.rl.server_extension.WeightsExtension`, vLLM mixes the class into its worker class,
and `/collective_rpc` calls its methods. diloco is not installed in the server's Python environment: this file and
weights.py import only what vLLM depends on. No method raises, since an exception in a worker makes vLLM stop the
engine.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.rl.weights import BadBlob, Expected, Held, State

_DTYPES = {"F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}


class WeightsExtension:
    """Methods added to vLLM's worker. Answers are plain dicts: {"ok": bool, "error": str, ...}."""

    def diloco_state(self) -> dict[str, Any]:
        """The digest of the weights that were pushed last."""
        return {"ok": True, "digest": _held(self).digest}

    def diloco_pull(self, path: str, sha256: str) -> dict[str, Any]:
        """Read a blob, check it completely, and load it. If a check fails, the old weights stay in use.

        `is_lost` in the answer means that a restarted server may succeed.
        """
        held = _held(self)
        try:
            blob = Path(path).read_bytes()
            if hashlib.sha256(blob).hexdigest() != sha256:
                raise BadBlob("its sha256 is not the one announced")
            digest, state = held.after([blob], _expected(self))
        except OSError as error:
            return {"ok": False, "is_lost": True, "error": str(error)}
        except BadBlob as error:
            return {"ok": False, "error": str(error)}
        try:
            _load(self, state)
        except Exception as error:  # noqa: BLE001 - vLLM would stop the engine without a reason
            # The weights may be loaded in part.
            held.digest = ""
            return {"ok": False, "is_lost": True, "error": f"{type(error).__name__}: {error}"}
        held.state, held.digest = state, digest
        return {"ok": True, "bytes": len(blob)}


def _held(worker: Any) -> Held:
    """The host copy of a worker's weights."""
    # A mixin's constructor would not be called.
    if not hasattr(worker, "_diloco_held"):
        worker._diloco_held = Held()
    held: Held = worker._diloco_held
    return held


def _expected(worker: Any) -> Expected:
    """Names, dtypes and shapes of the served model's files, with the server's dtype for floating-point tensors."""
    if not hasattr(worker, "_diloco_expected"):
        dtype = str(worker.model_config.dtype)
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in sorted(Path(worker.model_config.model).glob("*.safetensors")):
            for name, entry in _header(path).items():
                if name != "__metadata__":
                    is_float = entry["dtype"] in _DTYPES
                    found[name] = (dtype if is_float else entry["dtype"], tuple(entry["shape"]))
        if getattr(worker.model_config.hf_config, "tie_word_embeddings", False):
            found.pop("lm_head.weight", None)
        worker._diloco_expected = found
    expected: Expected = worker._diloco_expected
    return expected


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        return header


def _load(worker: Any, state: State) -> None:
    with torch.no_grad():
        worker.reload_weights(weights_iterator=iter(list(state.items())))
        model = worker.model_runner.get_model()
        head: Any = getattr(model, "lm_head", None)
        embeddings: Any = getattr(getattr(model, "model", None), "embed_tokens", None)
        is_tied = getattr(worker.model_config.hf_config, "tie_word_embeddings", False)
        if is_tied and head is not None and embeddings is not None and worker.device.type == "cpu":
            # The CPU backend keeps a packed copy of the head, and reloading skips a tied head: pack it again.
            weight: Tensor = embeddings.weight
            head.weight = weight
            head.quant_method.process_weights_after_loading(head)
