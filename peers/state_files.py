"""An outer state on disk: `outer.safetensors` and `outer.json`, which says what must be in the former.

Where a lossy codec has kept something back, `residuals.safetensors` lies beside them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peers.errors import ProtocolError, UserError
from peers.outer_state import Digests, OuterState
from peers.residuals import Residuals
from peers.state_header import StateHeader

TENSORS_FILE = "outer.safetensors"
HEADER_FILE = "outer.json"
RESIDUALS_FILE = "residuals.safetensors"


def save(state: OuterState, directory: Path, residuals: Sequence[Residuals] = ()) -> None:
    """Write the files, each complete or not at all, the header last. May be repeated. Raises OSError.

    The directory must exist: whoever made it may have removed it, which takes the checkpoint back.
    """
    snapshot = state.snapshot()
    if snapshot is None:
        raise OSError("the outer state is being changed; save it between two commits")
    with snapshot:
        tensors = {f"anchor.{index}": values for index, values in enumerate(snapshot.anchor)}
        tensors |= {f"momentum.{index}": values for index, values in enumerate(snapshot.momentum)}
        header = snapshot.header
        _save_residuals(residuals, header.lineage, directory)
        _write(
            directory / TENSORS_FILE,
            lambda path: save_file(tensors, path, metadata={"lineage": header.lineage}),
        )
    message = header.to_message()
    text = json.dumps(
        {key: value.hex() if isinstance(value, bytes) else value for key, value in message.items()}
        | {
            "lineage": header.lineage,
            "anchor_digest": header.anchor_digest,
            "momentum_digest": header.momentum_digest,
        },
        indent=1,
    )
    _write(directory / HEADER_FILE, lambda path: path.write_text(text))


def load(directory: Path) -> OuterState:
    """The state saved there, every bit of it checked. Raises UserError, which names the file that is at fault."""
    header = _load_header(directory / HEADER_FILE)
    path = directory / TENSORS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            anchor, momentum = (
                [
                    _checked(file.get_tensor(f"{name}.{index}"), size)
                    for index, size in enumerate(header.sizes)
                ]
                for name in ("anchor", "momentum")
            )
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} is not a complete checkpoint: {error}. Resume from an older one.") from error
    state = OuterState(header, anchor, momentum)
    if state.verify() != Digests(header.anchor_digest, header.momentum_digest):
        raise UserError(
            f"{path} does not hold what {HEADER_FILE} says: torn or damaged. Resume from an older one."
        )
    return state


def load_residuals(directory: Path, state: OuterState) -> list[Residuals]:
    """The residuals saved with this state, by fragment. Raises UserError."""
    path = directory / RESIDUALS_FILE
    if not path.exists():
        return [Residuals(size) for size in state.sizes]
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata().get("lineage") != state.lineage:
                raise ValueError("it belongs to another state")
            return [
                Residuals.from_tensors(
                    size,
                    {
                        name.removeprefix(f"{index}."): file.get_tensor(name)
                        for name in file.keys()  # noqa: SIM118 - not a mapping
                        if name.startswith(f"{index}.")
                    },
                )
                for index, size in enumerate(state.sizes)
            ]
    except (OSError, SafetensorError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a complete checkpoint: {error}. Resume from an older one.") from error


def _save_residuals(residuals: Sequence[Residuals], lineage: str, directory: Path) -> None:
    with contextlib.ExitStack() as stack:
        tensors = {
            f"{index}.{name}": values
            for index, kept in enumerate(residuals)
            for name, values in stack.enter_context(kept.held()).items()
        }
        if tensors:
            _write(
                directory / RESIDUALS_FILE,
                lambda path: save_file(tensors, path, metadata={"lineage": lineage}),
            )


def _load_header(path: Path) -> StateHeader:
    try:
        message = json.loads(path.read_text())
        for key in ("anchor_chunks", "momentum_chunks"):
            message[key] = bytes.fromhex(message[key])
        header = StateHeader.from_message(message)
        if message["lineage"] != header.lineage:
            raise ProtocolError("its lineage does not follow from its figures")
        return header
    except (OSError, ValueError, TypeError, KeyError, ProtocolError) as error:
        raise UserError(
            f"{path} is not the header of a checkpoint: {error}. Resume from an older one."
        ) from error


def _checked(values: Tensor, size: int) -> Tensor:
    if values.dtype != torch.float32 or values.shape != (size,):
        raise ValueError(f"a tensor of {values.dtype} {tuple(values.shape)} where {size} fp32 values belong")
    # What was read may be a view of the file, which the next commit would write to.
    return values.clone()


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Give `path` its new content in one step that survives a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            write(temporary)
        except SafetensorError as error:
            # What the disk said, in a class of its own.
            raise OSError(f"cannot write {path}: {error}") from error
        for opened, flags in ((temporary, os.O_RDWR), (path.parent, os.O_RDONLY)):
            if opened == path.parent:
                temporary.replace(path)
            descriptor = os.open(opened, flags)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    finally:
        temporary.unlink(missing_ok=True)
