"""Delta checkpoints: the changes of the weights every few steps, from which the model of each saved step is rebuilt.

<directory>/step_<N>.safetensors: the first file holds all weights, each later one the changes since the previous file,
or all weights if that is smaller (weights.py). Weights are saved in bf16, the type that servers compute in: with small
learning rates few of the trained fp32 weights reach the next bf16 value. The bf16 weights are rebuilt exactly, verified
by digests. config.json and the tokenizer are in the same directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from diloco.errors import UserError
from diloco.rl.weights import (
    BadBlob,
    Label,
    State,
    digest_of,
    own_copies,
    packed,
    packed_smaller,
    patched,
    unpacked,
)

_STEP = re.compile(r"step_(\d+)\.safetensors")


class DeltaWriter:
    """Appends deltas to a directory. Files are numbered by nominal step, which continues after a resume."""

    def __init__(self, directory: Path, *, step: int) -> None:
        """Continue from this step: deltas of later steps, which a resume has made obsolete, are deleted.

        A run that begins at step 0 deletes all of them.
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
        self._digest = digest_of(self._state) if steps else ""

    def write(self, step: int, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """Write the delta of this step, unless there is one of this or a later step. Returns its path.

        Raises UserError if the directory holds another model, and OSError, after which the next write may succeed.
        """
        path = _path(self._directory, step)
        if self._last is not None and step <= self._last:
            return path
        state = own_copies(weights, torch.bfloat16)
        if self._last is not None and _outline(state) != _outline(self._state):
            raise UserError(
                f"{self._directory} holds the deltas of another model; name another --ckpt.delta-path"
            )
        label = Label(digest=digest_of(state), base=self._digest)
        blob = packed_smaller(self._state, state, label)[1] if label.base else packed(state, label)
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(blob)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._last, self._state, self._digest = step, state, label.digest
        return path


def steps_in(directory: Path) -> list[int]:
    """The steps of the directory's files, ascending."""
    found = (_STEP.fullmatch(path.name) for path in directory.glob("step_*.safetensors"))
    return sorted(int(match[1]) for match in found if match)


def rebuilt(directory: Path, step: int) -> State:
    """The weights of a step. Raises UserError if its file or one that it builds on is missing or damaged."""
    steps = steps_in(directory)
    if step not in steps:
        near = ", ".join(map(str, steps[:3] + steps[3:][-3:])) or "none"
        raise UserError(f"{directory} has no step {step}; it has {near}")
    state: State = {}
    for _, label, state in _states(directory, steps[: steps.index(step) + 1]):  # noqa: B007 - the last one counts
        pass
    if digest_of(state) != label.digest:
        _name_the_changed_file(directory, steps[: steps.index(step) + 1])
    return state


def _states(directory: Path, steps: list[int]) -> Iterator[tuple[int, Label, State]]:
    """Yields (step, label, weights) of each step. Raises UserError, which names the first file that cannot be used."""
    state: State = {}
    digest = ""
    for number in steps:
        path = _path(directory, number)
        try:
            label, tensors = unpacked(path.read_bytes())
            if label.base not in ("", digest):
                raise BadBlob("it holds the changes since a step whose file is not there")
            state, digest = patched(state, tensors) if label.base else tensors, label.digest
        except (BadBlob, OSError) as error:
            raise UserError(f"{path} cannot be used: {error}") from error
        yield number, label, state


def _name_the_changed_file(directory: Path, steps: list[int]) -> NoReturn:
    changed = (
        number for number, label, state in _states(directory, steps) if digest_of(state) != label.digest
    )
    raise UserError(
        f"{_path(directory, next(changed))} was changed after it was saved: the rebuilt weights have another digest. "
        "Earlier steps can be rebuilt"
    )


def _path(directory: Path, step: int) -> Path:
    return directory / f"step_{step}.safetensors"


def _outline(state: State) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}
