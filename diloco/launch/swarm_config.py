"""Makes the configuration of a peer's daemon, and adopts the swarm's manifest in the configuration of its workers.

The manifest consists of the shared fields, of `model`, which is the content of config.json, and of `tokenizer`, a
digest. So a peer on another machine needs no model directory, and directories with the same content are the same model.
With adapters (`--grpo.lora-rank`) or a reference model (`--grpo.beta`), `weights` is the digest of the initial weights,
which no peer sends. In GRPO, `chat_template` is the digest of the template that formats the prompts: it is a program,
so no peer takes it from another one either.
`worker` tells whether the workers run diloco's trainer or the user's own program (`--worker`). In the latter case, the
manifest has only the fields that the daemon reads, since the user's program ignores the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diloco.data.tokenizer import chat_template_of
from diloco.errors import UserError
from diloco.options.model_files import (
    PRESETS_DIR,
    clean_config,
    directory_of,
    has_weights,
    is_preset,
    load_model_config,
)
from diloco.options.trainer import Scalar, TrainConfig, shared_fields, shared_values, with_shared
from diloco.rl.task_choice import is_own_code
from diloco.train.devices import hardware_in_words
from peers.admission.secrets import AdmissionSettings
from peers.protocol.mesh import DILOCOS_WORKER, OWN_WORKER, WORKER

_MODEL, _TOKENIZER, _WEIGHTS, _PATH = "model", "tokenizer", "weights", "path_model"
_TEMPLATE = "chat_template"
_DAEMON_FIELD_PREFIXES = ("hv.", "optimizer")
"""Prefixes of the shared fields that the daemon reads. Defaults of the outer step depend on the inner optimizer."""


def state_dir() -> Path:
    """The directory for keys and ledgers."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "diloco"


def daemon_config(
    config: TrainConfig, named: Collection[str], *, link_path: str | None = None, has_own_worker: bool = False
) -> dict[str, Any]:
    """The fields of peers.daemon.DaemonConfig as JSON values. `named` are the fields that the user has set, and
    `has_own_worker` says that the user's program trains.

    Raises UserError if the model is not found, a secret cannot be read, or neither user nor coordinator assigns a world
    rank.
    """
    hv = config.hv
    if hv.world_rank is None and not hv.initial_peers:
        raise UserError(
            "--initial-peers is missing: the address that `diloco dht start` printed. To begin a run without "
            "a coordinator, give its first peer --world-rank 0."
        )
    # Checks only that the secrets can be read. The daemon reads them itself, so that none is passed to it.
    AdmissionSettings(
        swarm_secret_file=hv.swarm_secret_file, admission_key_file=hv.admission_key_file
    ).secret()
    # Not at the top: it loads torch, and the checks above need none of it.
    from peers.daemon.config import DaemonConfig

    values = {item.name: getattr(hv, item.name) for item in fields(DaemonConfig) if hasattr(hv, item.name)}
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in values.items()},
        # For display only. Peers may have different torch versions: shared state is computed without torch's kernels.
        "hardware": f"{hardware_in_words(os.environ, config.device)}, torch {version('torch')}",
        "manifest": manifest_of(config, has_own_worker=has_own_worker),
        "named": sorted(_named_in_manifest(named)),
        "state_dir": str(state_dir()),
        "link_path": link_path,
    }


def manifest_of(config: TrainConfig, *, has_own_worker: bool = False) -> dict[str, Scalar]:
    """This peer's proposal for the run's manifest."""
    manifest = shared_values(config)
    if has_own_worker:
        manifest = {
            name: value for name, value in manifest.items() if name.startswith(_DAEMON_FIELD_PREFIXES)
        }
        return manifest | {WORKER: OWN_WORKER}
    if Path(config.path_model).expanduser().is_dir() and not is_preset(config.path_model):
        # Paths differ between machines.
        manifest[_PATH] = ""
    manifest[_MODEL] = json.dumps(load_model_config(config.path_model), sort_keys=True)
    manifest[_TOKENIZER] = _tokenizer_digest(directory_of(config.path_model, weights=False))
    if config.mode == "grpo":
        if config.trains_adapters or config.grpo.beta:
            manifest[_WEIGHTS] = _weights_digest(config.path_model)
        manifest[_TEMPLATE] = _template_digest(config.path_model)
    manifest[WORKER] = DILOCOS_WORKER
    return manifest


def adopt_manifest(
    config: TrainConfig,
    manifest: Mapping[str, Scalar],
    named: Collection[str],
    *,
    run_dir: Path,
    num_ranks: Callable[[TrainConfig], int] = lambda _: 1,
    is_learner: bool = True,
) -> TrainConfig:
    """The configuration with the values of the swarm's manifest. Raises UserError if this peer cannot adopt them.

    If this machine does not have the model, its config.json is written to <run_dir>/model_config/. Only learners have a
    reference model.
    """
    shared = {
        name: value
        for name, value in manifest.items()
        if name not in (_MODEL, _TOKENIZER, _WEIGHTS, _TEMPLATE, _PATH, WORKER)
    }
    own_dataset = config.grpo.dataset
    config = with_shared(config, shared, named=named, num_ranks=num_ranks)
    if config.grpo.dataset != own_dataset and is_own_code(config.grpo.dataset):
        raise UserError(
            f"The run's environment is code: {config.grpo.dataset!r}, chosen by the peer that began the "
            "run. It would be executed on this machine. If you trust it and have a copy here, give --dataset "
            "exactly that value."
        )
    if manifest.get(_MODEL) is None:
        return config
    if not is_learner and not config.trains_adapters:
        manifest = {name: value for name, value in manifest.items() if name != _WEIGHTS}
    candidates = (
        [config.path_model] if _PATH in named else [str(manifest.get(_PATH) or ""), config.path_model]
    )
    for path_model in filter(None, candidates):
        if _is_the_same_model(path_model, manifest):
            return replace(config, path_model=path_model)
    return replace(config, path_model=str(_written_model(manifest, run_dir)))


def _named_in_manifest(named: Collection[str]) -> set[str]:
    """The manifest's fields that the user has set; --path-model stands for the model's content."""
    shared = set(named) & shared_fields()
    return shared - {_PATH} | {_MODEL, _TOKENIZER} if _PATH in shared else shared


def _is_the_same_model(path_model: str, manifest: Mapping[str, Scalar]) -> bool:
    try:
        ours = json.dumps(load_model_config(path_model), sort_keys=True)
        tokenizer = _tokenizer_digest(directory_of(path_model, weights=False))
        weights = _weights_digest(path_model) if _WEIGHTS in manifest else None
        template = _template_digest(path_model) if _TEMPLATE in manifest else None
    except UserError:
        return False
    found = (manifest[_MODEL], *map(manifest.get, (_TOKENIZER, _WEIGHTS, _TEMPLATE)))
    return found == (ours, tokenizer, weights, template)


def _written_model(manifest: Mapping[str, Scalar], run_dir: Path) -> Path:
    """Write the manifest's config.json. Raises UserError if the run's model needs more than that: initial weights, or a
    tokenizer or chat template other than the byte-level ones.
    """
    if manifest.get(_WEIGHTS):
        raise UserError(
            "The run trains adapters on, or measures a KL divergence from, weights that this machine does not have. "
            "Copy the model's directory here from a peer that has it, and name it with --path-model."
        )
    byte_level, template = {_tokenizer_digest(PRESETS_DIR / "2m"), ""}, _template_digest("2m")
    has_tokenizer = manifest.get(_TOKENIZER, "") in byte_level
    if not has_tokenizer or manifest.get(_TEMPLATE, template) != template:
        raise UserError(
            f"The run's model comes with a {'chat template' if has_tokenizer else 'tokenizer'} that this machine "
            "does not have. Copy the model's directory here from a peer that has it, and name it with --path-model."
        )
    try:
        fields = clean_config(json.loads(str(manifest[_MODEL])), origin="the swarm's manifest")
    except ValueError as error:
        raise UserError(f"The swarm's manifest holds no model configuration: {error}.") from error
    directory = run_dir / "model_config"
    directory.mkdir(parents=True, exist_ok=True)
    written = directory / "config.json.new"
    written.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    written.replace(directory / "config.json")
    return directory


def _weights_digest(path_model: str) -> str:
    """The digest of the files that hold the weights; empty if weights are drawn from the run's seed."""
    directory = directory_of(path_model, weights=True)
    if not has_weights(directory):
        return ""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _template_digest(path_model: str) -> str:
    return hashlib.sha256(chat_template_of(path_model).encode()).hexdigest()


def _tokenizer_digest(directory: Path) -> str:
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
