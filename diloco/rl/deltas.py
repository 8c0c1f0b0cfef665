"""Every few steps only what has changed of the weights, from which the model of any of these steps can be made again.

<directory>/step_<N>.safetensors: the first holds all weights, each later one the changes since the one before it, as
weight_blobs.py has them. Weights are kept in bf16, as servers compute with them: of the fp32 weights that are trained,
small learning rates move few as far as the next bf16 value. Of those bf16 weights nothing is lost; digests prove it.
Beside them lie config.json and the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from diloco.errors import UserError
from diloco.rl.weight_blobs import (
    BadBlob,
    Label,
    State,
    digest_of,
    packed,
    packed_changes,
    patched,
    unpacked,
)

_STEP = re.compile(r"step_(\d+)\.safetensors")


class DeltaWriter:
    """Appends to a directory. Numbers are nominal steps, so they go on after a resume where they were."""

    def __init__(self, directory: Path, *, step: int) -> None:
        """The run goes on from this step: what is there of later ones is of a life that was given up.

        A run that begins keeps nothing of one before it.
        """
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for partial in directory.glob("step_*.partial"):
            partial.unlink()
        for later in [number for number in steps_in(directory) if number > step or step == 0]:
            _path(directory, later).unlink()
        steps = steps_in(directory)
        self._last = steps[-1] if steps else None
        self._state: State = rebuilt(directory, steps[-1]) if steps else {}

    def write(self, step: int, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """The weights of this step. One that is there already is left as it is.

        Raises UserError where what is there is of another model, and OSError, after which the next one may go well.
        """
        path = _path(self._directory, step)
        if self._last is not None and step <= self._last:
            return path
        state = {name: _kept(tensor) for name, tensor in weights}
        if self._last is not None and _outline(state) != _outline(self._state):
            raise UserError(
                f"{self._directory} holds the deltas of another model; name another --ckpt.delta-path"
            )
        label = Label(version=step, base=self._last, digest=digest_of(state))
        blob = packed(state, label) if self._last is None else packed_changes(self._state, state, label)
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(blob)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._last, self._state = step, state
        return path


def steps_in(directory: Path) -> list[int]:
    """The steps that are there, in order."""
    found = (_STEP.fullmatch(path.name) for path in directory.glob("step_*.safetensors"))
    return sorted(int(match[1]) for match in found if match)


def rebuilt(directory: Path, step: int) -> State:
    """The weights of a step. Raises UserError where it is not there, or something before it is missing or damaged."""
    steps = steps_in(directory)
    if step not in steps:
        near = ", ".join(map(str, steps[:3] + steps[3:][-3:])) or "none"
        raise UserError(f"{directory} has no step {step}; it has {near}")
    state: State = {}
    label = Label(version=-1)
    for number in steps[: steps.index(step) + 1]:
        path = _path(directory, number)
        try:
            before, (label, tensors) = label, unpacked(path.read_bytes())
            if label.base is None:
                state = tensors
            elif label.base != before.version:
                raise BadBlob(f"it holds the changes since step {label.base}, which is not there")
            else:
                state = patched(state, tensors)
        except (BadBlob, OSError) as error:
            raise UserError(f"{path} cannot be used: {error}") from error
    if digest_of(state) != label.digest:
        raise UserError(
            f"{_path(directory, step)}: what comes of it is not what was saved; a file was changed"
        )
    return state


def _path(directory: Path, step: int) -> Path:
    return directory / f"step_{step}.safetensors"


def _outline(state: State) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}


def _kept(tensor: Tensor) -> Tensor:
    """A copy: the weights themselves are trained on."""
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()
