"""Every few steps only what has changed of the weights, from which the model of any of these steps can be made again.

<directory>/step_<N>.safetensors: the first holds all weights, each later one the changes since the one before it, or
all weights again where those are fewer bytes (weights.py). Weights are kept in bf16, as servers compute with them: of
the fp32 weights that are trained, small learning rates move few as far as the next bf16 value. Of those bf16 weights
nothing is lost; digests prove it.
Beside them lie config.json and the tokenizer.
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
        state = own_copies(dict(weights), torch.bfloat16)
        if self._last is not None and _outline(state) != _outline(self._state):
            raise UserError(
                f"{self._directory} holds the deltas of another model; name another --ckpt.delta-path"
            )
        label = Label(version=step, base=self._last, digest=digest_of(state))
        blob = packed(state, label) if self._last is None else packed_smaller(self._state, state, label)[1]
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
    for _, label, state in _states(directory, steps[: steps.index(step) + 1]):  # noqa: B007 - the last one counts
        pass
    if digest_of(state) != label.digest:
        _name_the_changed_file(directory, steps[: steps.index(step) + 1])
    return state


def _states(directory: Path, steps: list[int]) -> Iterator[tuple[int, Label, State]]:
    """The weights of one step after the other. Raises UserError that names the first file that cannot be used."""
    state: State = {}
    label = Label(version=-1)
    for number in steps:
        path = _path(directory, number)
        try:
            before, (label, tensors) = label, unpacked(path.read_bytes())
            if label.base is not None and label.base != before.version:
                raise BadBlob(f"it holds the changes since step {label.base}, which is not there")
            state = tensors if label.base is None else patched(state, tensors)
        except (BadBlob, OSError) as error:
            raise UserError(f"{path} cannot be used: {error}") from error
        yield number, label, state


def _name_the_changed_file(directory: Path, steps: list[int]) -> NoReturn:
    changed = (
        number for number, label, state in _states(directory, steps) if digest_of(state) != label.digest
    )
    raise UserError(
        f"{_path(directory, next(changed))} was changed after it was saved: what comes of it has another digest. The "
        "steps before it can be rebuilt"
    )


def _path(directory: Path, step: int) -> Path:
    return directory / f"step_{step}.safetensors"


def _outline(state: State) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}
