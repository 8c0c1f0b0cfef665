"""Exports the model of a checkpoint as a transformers directory."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from diloco.checkpoint.choice import Candidate, newest_first
from diloco.checkpoint.mark import Damaged, problems_of
from diloco.checkpoint.restore import candidates_in, named_in, split, whole
from diloco.checkpoint.shards import read
from diloco.checkpoint.store import Store, open_store
from diloco.data.tokenizer import load_tokenizer
from diloco.errors import UserError
from diloco.options.model_files import load_model_config, save_pretrained_dir
from diloco.outer.layout import layout_of
from diloco.train.model import outline
from peers.state import files as state_files

log = logging.getLogger(__name__)

Weights = Literal["agreed", "own"]

# Metadata key of the format before torch.distributed.checkpoint.
_OLD_OFFSETS_KEY = "pieces"


def exported(checkpoint: str, directory: Path, *, weights: Weights) -> dict[str, Any]:
    """Write a checkpoint's model, from the anchor or the peer's own weights; returns a summary. Raises UserError,
    and DilocoError if the place is out of reach when it is opened."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="export-")))
        try:
            store, found, source = _opened(checkpoint, scratch, stack)
        except OSError as error:
            raise UserError(f"{checkpoint} cannot be read: {error}") from error
        if (source / "adapter_config.json").is_file():
            raise UserError(
                f"{store.name_of(found.name, found.part)} holds adapters without their base weights; use the "
                "merged model that the run wrote at its end (model/ in --run-dir)"
            )
        is_of_trainer = (source / "config.json").is_file()
        model = source if is_of_trainer else source / "model"
        if not (model / "config.json").is_file():
            raise UserError(f"{store.name_of(found.name, found.part)} has no model configuration")
        is_agreed = weights == "agreed" and found.mark.head != "" and not is_of_trainer
        if is_of_trainer:
            state = _trainers_weights(source)
        elif is_agreed:
            state = _agreed_weights(source, model)
        else:
            state = own_weights(source)
        config, tokenizer = load_model_config(str(model)), load_tokenizer(str(model))
        try:
            save_pretrained_dir(directory, state, config, tokenizer)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{directory} cannot be written: {error}. Name another place, or make room"
            ) from error
        return {
            "checkpoint": store.name_of(found.name, found.part),
            "step": int(found.name.removeprefix("model_step_")),
            "epoch": found.mark.position.epoch,
            "weights": "agreed" if is_agreed else "own",
            "directory": str(directory),
            "parameters": sum(tensor.numel() for tensor in state.values()),
        }


def _opened(checkpoint: str, scratch: Path, stack: contextlib.ExitStack) -> tuple[Store, Candidate, Path]:
    """Find the checkpoint and verify its files; also returns its local directory. Raises OSError and UserError."""
    place, name, part = split(checkpoint)
    problems = list[str]()
    if name.startswith("model_step_") or part:
        store = open_store(place, scratch)
        candidates, is_named = [named_in(store, name, part)], True
    else:
        store, is_named = open_store(checkpoint, scratch), False

        def is_damaged(_name: str, _part: str, problem: str) -> None:
            problems.append(problem)

        of_peers = whole(store, store.all_marks(), is_damaged)
        candidates = newest_first([*candidates_in(store, "", is_damaged), *of_peers])
    for problem in problems:
        log.warning("skipping a checkpoint: %s", problem)
    for candidate in candidates:
        directory = stack.enter_context(store.opened(candidate))
        if not (damage := problems_of(directory, candidate.mark.files)):
            return store, candidate, directory
        if is_named:
            raise Damaged(f"{damage[0]}; export another checkpoint")
        problems.append(damage[0])
        log.warning("%s; trying an older checkpoint", damage[0])
    why = f" ({problems[0]})" if problems else ""
    raise UserError(
        f"no complete checkpoint in {checkpoint}{why}; give the directory of --ckpt.path, or one model_step_<N> in it"
    )


def own_weights(source: Path) -> dict[str, Tensor]:
    """The weights of the peer's worker, unsharded. Raises UserError."""
    files = sorted(source.glob("rank_*.safetensors"))
    with safe_open(files[0], framework="pt") as file:
        is_of_earlier_version = _OLD_OFFSETS_KEY in (file.metadata() or {})
    if is_of_earlier_version:
        return _old_weights(files)
    state = read(
        source,
        lambda there: {name: torch.empty(there[name].size) for name in there if name.startswith("model.")},
    )
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def _old_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """Read the format before torch.distributed.checkpoint, whose metadata has each shard's first row."""
    rows: dict[str, dict[int, Tensor]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name, (start, *_) in json.loads(file.metadata()[_OLD_OFFSETS_KEY]).items():
                if name.startswith("model."):
                    rows.setdefault(name.removeprefix("model."), {})[start] = file.get_tensor(name)
    return {name: torch.cat([parts[start] for start in sorted(parts)]) for name, parts in rows.items()}


def _agreed_weights(source: Path, model: Path) -> dict[str, Tensor]:
    """The anchor, by the model's parameter names."""
    state = state_files.load(source)
    layout = layout_of(outline(load_model_config(str(model))), len(state.sizes))
    if layout.sizes != state.sizes:
        raise UserError(f"the outer state in {source} does not fit the model configuration beside it")
    return {
        slot.name: anchor[slot.offset : slot.offset + slot.numel].view(slot.shape)
        for fragment, anchor in zip(layout.fragments, state.anchor, strict=True)
        for slot in fragment
    }


def _trainers_weights(source: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint of transformers' Trainer."""
    files = sorted(source.glob("model*.safetensors"))
    if not files:
        raise UserError(f"{source} holds no weights of a whole model")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise UserError(f"{source} cannot be read: {error}") from error
