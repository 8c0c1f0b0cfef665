"""Runs in the workers of a vLLM server: pulls weights over HTTP, and lets them in only when all is checked.

`--worker-extension-cls diloco.rl.server_extension.WeightsExtension`; vLLM mixes it into its worker class, and
`/collective_rpc` calls its methods. The server's Python environment has no diloco installed: this file and
weight_blobs.py need only what vLLM brings. No method raises: after an exception in a worker, vLLM gives up the engine.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.rl.weight_blobs import BadBlob, Label, State, check_state, digest_of, patched, unpacked

Expected = dict[str, tuple[str, tuple[int, ...]]]
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_DTYPES = {"F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}


class _Unfetched(Exception):
    """A blob could not be had; asking again may help."""


class WeightsExtension:
    """Methods beside those of vLLM's worker. Answers are plain dicts: {"ok": bool, "error": str, ...}."""

    def diloco_state(self) -> dict[str, Any]:
        """Whose weights, and which of them, are being served."""
        held = _held(self)
        return {
            "ok": True,
            "version": held.version,
            "publisher": held.publisher,
            "digest": held.digest,
            "lease": held.lease if held.leased_until > time.monotonic() else "",
            "dtype": str(self.model_config.dtype),  # type: ignore[attr-defined]
        }

    def diloco_lease(self, owner: str, seconds: str) -> dict[str, Any]:
        """Keep the server to oneself from a push to the end of its rollouts; 0 seconds give it back."""
        held = _held(self)
        if held.lease != owner and held.leased_until > time.monotonic():
            return {"ok": False, "error": f"leased to {held.lease}", "busy": True}
        try:
            held.lease, held.leased_until = owner, time.monotonic() + float(seconds)
        except ValueError as error:
            return {"ok": False, "error": str(error)}
        return {"ok": True}

    def diloco_pull(self, order: str) -> dict[str, Any]:
        """Fetch what `order` names, check all of it, and load it. Whatever is wrong, the old weights serve on.

        `order` is JSON: publisher, version, parts ([url, sha256] each), timeout_s.
        """
        held, began = _held(self), time.monotonic()
        try:
            asked = json.loads(order)
            state, label, received = _fetched(held, asked, _expected(self))
        except _Unfetched as error:
            return {"ok": False, "unfetched": True, "error": str(error)}
        except (BadBlob, OSError) as error:
            return {"ok": False, "error": str(error)}
        except (ValueError, KeyError, TypeError) as error:
            return {"ok": False, "error": f"it is no order: {error!r}"}
        fetched = time.monotonic()
        try:
            _load(self, state)
        except Exception as error:  # noqa: BLE001 - vLLM would give up the engine without saying why
            # Some of it may be in: nobody is to take what is served for a version.
            held.version, held.publisher, held.digest = 0, "", ""
            return {"ok": False, "fatal": True, "error": f"{type(error).__name__}: {error}"}
        held.state, held.version, held.publisher = state, label.version, asked["publisher"]
        held.digest = label.digest
        if held.lease == held.publisher:
            # Nobody could renew it meanwhile.
            held.leased_until += time.monotonic() - began
        return {
            "ok": True,
            "version": held.version,
            "bytes": received,
            "fetch_s": fetched - began,
            "apply_s": time.monotonic() - fetched,
        }


class _Held:
    """What a worker remembers between two pushes: the host's copy of its weights, which patches apply to."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.version, self.publisher, self.digest = 0, "", ""
        self.lease, self.leased_until = "", 0.0


def _held(worker: Any) -> _Held:
    # A mixin has no constructor of its own.
    if not hasattr(worker, "_diloco_held"):
        worker._diloco_held = _Held()
    held: _Held = worker._diloco_held
    return held


def _fetched(held: _Held, asked: dict[str, Any], expected: Expected) -> tuple[State, Label, int]:
    """The whole new state, checked. Raises BadBlob, OSError; changes nothing."""
    is_ours = asked["publisher"] == held.publisher
    if is_ours and asked["version"] <= held.version:
        raise BadBlob(f"version {asked['version']} is stale: {held.version} is served")
    state: State = {}
    label, received = Label(version=-1), 0
    for number, (url, sha256) in enumerate(asked["parts"]):
        blob = _downloaded(url, sha256, float(asked["timeout_s"]))
        received += len(blob)
        label, tensors = unpacked(blob)
        if label.version != asked["version"] or (label.part, label.num_parts) != (
            number,
            len(asked["parts"]),
        ):
            raise BadBlob(
                f"part {number} is of version {label.version}, part {label.part} of {label.num_parts}"
            )
        if label.base is not None:
            if held.state is None or not is_ours or label.base != held.version:
                raise BadBlob(f"the patch is for version {label.base}, and {held.version} is served")
            tensors = patched(held.state, tensors)
        state.update(tensors)
    check_state(state, expected)
    if digest_of(state) != label.digest:
        raise BadBlob("the weights are not those that were sent: their digest differs")
    return state, label, received


def _downloaded(url: str, sha256: str, timeout_s: float) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise BadBlob(f"{url} is no HTTP address")
    # Trainers are on this machine or a network of ours, where a proxy of the environment has no business.
    try:
        with _DIRECTLY.open(url, timeout=timeout_s) as answer:
            blob: bytes = answer.read()
    except (OSError, http.client.HTTPException) as error:
        # Who sends it may have died in the middle of it.
        raise _Unfetched(repr(error)) from error
    if hashlib.sha256(blob).hexdigest() != sha256:
        raise BadBlob("its sha256 is not the one announced")
    return blob


def _expected(worker: Any) -> Expected:
    """Names, types and shapes as the served model's own files have them, in the type that the server computes in."""
    if not hasattr(worker, "_diloco_expected"):
        dtype = str(worker.model_config.dtype)
        found: Expected = {}
        for path in sorted(_directory_of(str(worker.model_config.model)).glob("*.safetensors")):
            for name, entry in _header(path).items():
                if name != "__metadata__":
                    is_float = entry["dtype"] in _DTYPES
                    found[name] = (dtype if is_float else entry["dtype"], tuple(entry["shape"]))
        if getattr(worker.model_config.hf_config, "tie_word_embeddings", False):
            found.pop("lm_head.weight", None)
        worker._diloco_expected = found
    expected: Expected = worker._diloco_expected
    return expected


def _directory_of(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


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
            # The CPU backend packs the head once, and reloading passes over tied ones: it would stay the old one.
            weight: Tensor = embeddings.weight
            head.weight = weight
            head.quant_method.process_weights_after_loading(head)
