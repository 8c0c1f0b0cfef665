"""An outer state on disk: `outer.safetensors`, and its header `outer.json` with the digests of the former.

Under a lossy codec `residuals.safetensors` is saved beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peers.errors import ProtocolError, UserError
from peers.protocol.certificates import decode_certificate
from peers.protocol.limits import Count
from peers.protocol.wire import encode
from peers.reduce.copies import cloned
from peers.reduce.residuals import Residuals
from peers.state.header import (
    DIGEST_BYTES,
    HEADER_FILE,
    RESIDUALS_FILE,
    STATE_CHUNK_NUMEL,
    TENSORS_FILE,
    StateHeader,
)
from peers.state.outer_state import OuterState
from peers.state.whole_files import FileRecord, write_bytes, write_tensors
from peers.threads import stand_back

_BEING_CHANGED = "the outer state is being changed; save it between two commits"


class HeldState:
    """A snapshot of an outer state and its residuals: later commits write to other memory.

    A context manager: leaving it releases the memory.
    """

    def __init__(
        self, state: OuterState, residuals: Sequence[Residuals] = (), is_workers_base: bool = True
    ) -> None:
        """May wait for a running commit. `is_workers_base`: see the function of that name. Raises OSError if the state
        is being changed."""
        snapshot = state.snapshot()
        if snapshot is None:
            raise OSError(_BEING_CHANGED)
        self.snapshot, self._is_workers_base = snapshot, is_workers_base
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(snapshot)
        self.residuals = {
            f"{index}.{name}": values
            for index, kept in enumerate(residuals)
            for name, values in self._stack.enter_context(kept.held()).items()
        }
        # A commit stores new residuals before the state that they belong to.
        if self.residuals and not state.is_still(snapshot):
            self.close()
            raise OSError(_BEING_CHANGED)

    def write(self, directory: Path) -> dict[str, FileRecord]:
        """Write the files, each atomically, the header last. May be repeated. Raises OSError.

        The directory must exist: its owner may have removed it to cancel the checkpoint. Returns what was written, by
        file name.
        """
        header, written = self.snapshot.header, {}
        metadata = {"head": header.head}
        if self.residuals:
            path = directory / RESIDUALS_FILE
            written[RESIDUALS_FILE] = write_tensors(path, self.residuals, metadata)
        else:
            (directory / RESIDUALS_FILE).unlink(missing_ok=True)
        tensors = {f"anchor.{index}": values for index, values in enumerate(self.snapshot.anchor)}
        tensors |= {f"momentum.{index}": values for index, values in enumerate(self.snapshot.momentum)}
        written[TENSORS_FILE] = write_tensors(directory / TENSORS_FILE, tensors, metadata)
        content = _header_bytes(header, self._is_workers_base)
        written[HEADER_FILE] = write_bytes(directory / HEADER_FILE, content)
        return written

    def close(self) -> None:
        """May be repeated."""
        self._stack.close()

    def __enter__(self) -> HeldState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def save(state: OuterState, directory: Path, residuals: Sequence[Residuals] = ()) -> dict[str, FileRecord]:
    """Snapshot the state and write it at once; see HeldState. Raises OSError."""
    with HeldState(state, residuals) as held:
        return held.write(directory)


def load(directory: Path) -> OuterState:
    """Load the state saved there and verify every digest. Raises UserError, which names the file at fault."""
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
    if not state.is_intact():
        raise UserError(
            f"{path} does not hold what {HEADER_FILE} says: torn or damaged. Resume from an older one."
        )
    return state


def is_workers_base(directory: Path) -> bool:
    """Whether the worker's weights in this checkpoint, whose state `load` has loaded, are based on its anchor. If not,
    the peer had adopted the state in the middle of an epoch that its worker had begun on an older one."""
    return msgspec.json.decode((directory / HEADER_FILE).read_bytes(), type=_HeaderFile).is_workers_base


def load_residuals(directory: Path, state: OuterState) -> list[Residuals]:
    """Load the residuals saved with this state, by fragment. Raises UserError."""
    path = directory / RESIDUALS_FILE
    if not path.exists():
        return [Residuals(size) for size in state.sizes]
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata().get("head") != state.head:
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


class _HeaderFile(msgspec.Struct, frozen=True, kw_only=True):
    """A StateHeader as it is saved, bytes in hex. `head` and the fields after it are for people and not read back."""

    sizes: tuple[Count, ...]
    anchor_chunks: str
    momentum_chunks: str
    certificate: str = ""
    """Empty in files of a version without certificates: the model can be exported, but training cannot resume."""
    is_workers_base: bool = True
    head: str = ""
    epoch: int = 0
    anchor_digest: str = ""
    momentum_digest: str = ""


def _header_bytes(header: StateHeader, is_workers_base: bool = True) -> bytes:
    saved = _HeaderFile(
        sizes=header.sizes,
        anchor_chunks=header.anchor_chunks.hex(),
        momentum_chunks=header.momentum_chunks.hex(),
        certificate=encode(header.certificate).hex() if header.certificate else "",
        is_workers_base=is_workers_base,
        head=header.head,
        epoch=header.epoch,
        anchor_digest=header.anchor_digest,
        momentum_digest=header.momentum_digest,
    )
    return msgspec.json.format(msgspec.json.encode(saved), indent=1)


def _load_header(path: Path) -> StateHeader:
    try:
        return _header_in(path.read_bytes())
    except (OSError, ValueError, msgspec.DecodeError, ProtocolError) as error:
        raise UserError(
            f"{path} is not the header of a checkpoint: {error}. Resume from an older one."
        ) from error


def _header_in(text: bytes) -> StateHeader:
    """Raises ValueError, DecodeError or ProtocolError."""
    saved = msgspec.json.decode(text, type=_HeaderFile)
    header = StateHeader(
        sizes=saved.sizes,
        anchor_chunks=bytes.fromhex(saved.anchor_chunks),
        momentum_chunks=bytes.fromhex(saved.momentum_chunks),
    )
    num_bytes = DIGEST_BYTES * sum(-(-size // STATE_CHUNK_NUMEL) for size in header.sizes)
    if not len(header.anchor_chunks) == len(header.momentum_chunks) == num_bytes:
        raise ValueError(f"a state of sizes {header.sizes!s:.100} has {num_bytes} bytes of digests")
    if not saved.certificate:
        return header
    return header.certified_by(decode_certificate(bytes.fromhex(saved.certificate)))


def _checked(values: Tensor, size: int) -> Tensor:
    if values.dtype != torch.float32 or values.shape != (size,):
        raise ValueError(f"a tensor of {values.dtype} {tuple(values.shape)} where {size} fp32 values belong")
    # The tensor may be a view of the mapped file, which the next commit would write to.
    return cloned(values)


# Below the priority of rounds.
_NICENESS = 10
# Outcomes that are kept: several, because a worker that died never asks for the outcome of its own.
_MAX_REMEMBERED = 4


@dataclass(frozen=True)
class Written:
    """What was written to the directory."""

    files: dict[str, FileRecord]
    head: str


class Saving:
    """Used from the daemon's event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "saving", stand_back, (_NICENESS,))
        self._writing: dict[Path, asyncio.Future[Written]] = {}

    async def begin(
        self, state: OuterState, residuals: Sequence[Residuals], directory: Path, is_workers_base: bool = True
    ) -> None:
        """Take a snapshot of the state, and begin to write it; later commits do not change what is written.

        Arguments as for HeldState. Raises OSError if a commit is being applied.
        """
        holding = asyncio.get_running_loop().run_in_executor(
            None, HeldState, state, residuals, is_workers_base
        )
        try:
            held = await asyncio.shield(holding)
        except asyncio.CancelledError:
            # The thread runs on. Nobody will use the snapshot that it takes: release it.
            holding.add_done_callback(_release)
            raise
        while len(self._writing) >= _MAX_REMEMBERED:
            self._writing.pop(next(iter(self._writing)))
        writing = asyncio.get_running_loop().run_in_executor(self._pool, _write, held, directory)
        # Retrieve the exception: perhaps nobody ever calls `finish`.
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._writing[directory] = writing

    async def finish(self, directory: Path) -> Written:
        """Wait for what `begin` started for this directory. To be called once. Raises OSError."""
        writing = self._writing.pop(directory, None)
        if writing is None:
            raise OSError(f"nothing is being saved to {directory}")
        return await asyncio.shield(writing)


def _release(holding: asyncio.Future[HeldState]) -> None:
    if not holding.cancelled() and holding.exception() is None:
        holding.result().close()


def _write(held: HeldState, directory: Path) -> Written:
    with held:
        return Written(held.write(directory), held.snapshot.header.head)
