"""What a rank holds of weights and optimizer state, written by however many ranks and read by another number of them.

rank_<k>.safetensors holds the rows of each tensor that rank k was the first to hold; its metadata says from which row
on, and the shape of the whole. Bytes are kept as they are, so nothing is lost by another number of ranks. Random
numbers are each rank's own: ranks that there were not before keep the state that their seed gave them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from diloco.errors import UserError
from diloco.outer.flat import layout_of, pieces_of, trainable_parameters
from diloco.train.inner import InnerLoop

PIECES, _SCALE = "pieces", "loss_scale"
_RNG_CPU, _RNG_CUDA = "rng.cpu", "rng.cuda"


def file_of(rank: int) -> str:
    return f"rank_{rank}.safetensors"


@dataclass(frozen=True)
class Shard:
    """Rows from `start` on of a tensor of this shape; `local` is a view, and writing to it writes to the model."""

    local: Tensor
    start: int
    shape: tuple[int, ...]
    is_first: bool
    """Whether this rank is the first of those that hold the same rows."""

    @property
    def num_rows(self) -> int:
        return self.local.shape[0] if self.shape else 1


def shards_of(inner: InnerLoop, *, rank: int) -> dict[str, Shard]:
    """This rank's shards by name: `model.<parameter>`, and `optimizer.<parameter>.<state>` where there is some."""
    layout = layout_of(inner.model)
    slots, pieces = layout.fragments[0], pieces_of(inner.model, layout)
    parameters = dict(trainable_parameters(inner.model))
    shards = {}
    for slot, piece in zip(slots, pieces, strict=True):
        row = slot.numel // slot.shape[0] if slot.shape and slot.shape[0] else 1
        start = (piece.start - slot.offset) // max(row, 1)
        shards[f"model.{slot.name}"] = Shard(piece.local, start, slot.shape, piece.is_first)
        for key, value in inner.optimizer.state[parameters[slot.name]].items():
            local = value.to_local() if isinstance(value, DTensor) else value
            name = f"optimizer.{slot.name}.{key}"
            if local.ndim == 0 and slot.shape:
                # The number of its steps, which is the same everywhere.
                shards[name] = Shard(local, 0, (), rank == 0)
            else:
                shards[name] = Shard(local, start, slot.shape, piece.is_first)
    return shards


def to_save(inner: InnerLoop, *, rank: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that this rank writes, still where they are, and the metadata that goes with them."""
    shards = shards_of(inner, rank=rank)
    mine = {name: one for name, one in shards.items() if one.is_first and one.local.numel()}
    tensors = {name: one.local for name, one in mine.items()} | _random_state()
    places = {name: [one.start, *one.shape] for name, one in mine.items()}
    return tensors, {PIECES: json.dumps(places), _SCALE: json.dumps(asdict(inner.loss_scale))}


@torch.no_grad()
def load(directory: Path, inner: InnerLoop, *, rank: int, saved_by: int, with_random: bool = True) -> None:
    """Fill model and optimizer from what `saved_by` ranks saved, and take the random state unless told otherwise.

    Raises UserError for another model's.
    """
    make_optimizer_state(inner)
    with Stored(directory, saved_by, first=rank) as stored:
        for name, shard in shards_of(inner, rank=rank).items():
            stored.read(name, shard)
        for name, value in stored.scale().items():
            setattr(inner.loss_scale, name, value)
        if with_random and rank < saved_by:
            _set_random_state(stored, rank)


def make_optimizer_state(inner: InnerLoop) -> None:
    """AdamW makes its state in the first step: take one that changes nothing."""
    for _, parameter in trainable_parameters(inner.model):
        parameter.grad = torch.zeros_like(parameter)
    for group in inner.optimizer.param_groups:
        group["lr"] = 0.0
    inner.optimizer.step()
    inner.optimizer.zero_grad()


class Stored:
    """The tensors of a checkpoint, from whichever files they are in. A context manager: leaving it closes them."""

    def __init__(self, directory: Path, num_ranks: int, *, first: int = 0) -> None:
        """Rank `first`'s file is looked at first: on several nodes it may be the only one that is here."""
        self._directory = directory
        self._order = sorted(range(num_ranks), key=lambda rank: (rank != first, rank))
        self._files: dict[int, tuple[Any, dict[str, list[int]]]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Of all tensors whose name begins so."""
        return {
            name: tuple(shape)
            for rank in self._order
            for name, (_, *shape) in self._file(rank)[1].items()
            if name.startswith(prefix)
        }

    def whole(self, name: str) -> Tensor:
        """A tensor in one piece, fp32. Raises UserError."""
        shape = self.shapes(name)[name]
        values = torch.empty(shape)
        self.read(name, Shard(values, 0, shape, True))
        return values

    def read(self, name: str, shard: Shard) -> None:
        """Fill a shard. Raises UserError where the checkpoint does not have all of it, or of another shape."""
        missing = shard.num_rows if shard.local.numel() else 0
        for rank, start, stop in self._places(name, shard):
            low, high = max(start, shard.start), min(stop, shard.start + shard.num_rows)
            if low < high:
                self._copy(rank, name, shard, low, high, start)
                missing -= high - low
            if missing <= 0:
                return
        if missing:
            raise UserError(
                f"{self._directory} holds another model than this one: {name} is missing or differs in shape"
            )

    def scale(self) -> dict[str, Any]:
        """The loss scale, which is the same on all ranks."""
        rank = self._order[0]
        with self._errors(rank):
            return dict(json.loads(self._opened(rank).metadata()[_SCALE]))

    def tensor(self, rank: int, name: str) -> Tensor | None:
        """One of a rank's own tensors, if it has saved it."""
        with self._errors(rank):
            file = self._opened(rank)
            found: Tensor | None = file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118
        return found

    def _places(self, name: str, shard: Shard) -> Iterator[tuple[int, int, int]]:
        """Each file that has rows of the tensor, and from which to which."""
        for rank in self._order:
            place = self._file(rank)[1].get(name)
            if place is not None and tuple(place[1:]) == shard.shape:
                with self._errors(rank):
                    rows = self._opened(rank).get_slice(name).get_shape()[0] if shard.shape else 1
                yield rank, place[0], place[0] + rows

    def _copy(self, rank: int, name: str, shard: Shard, low: int, high: int, start: int) -> None:
        with self._errors(rank):
            if not shard.shape:
                shard.local.copy_(self._opened(rank).get_tensor(name))
                return
            rows = self._opened(rank).get_slice(name)[low - start : high - start]
            shard.local[low - shard.start : high - shard.start].copy_(rows)

    def _opened(self, rank: int) -> Any:
        return self._file(rank)[0]

    def _file(self, rank: int) -> tuple[Any, dict[str, list[int]]]:
        if rank not in self._files:
            with self._errors(rank):
                file = self._stack.enter_context(safe_open(self._directory / file_of(rank), framework="pt"))
                self._files[rank] = file, dict(json.loads((file.metadata() or {})[PIECES]))
        return self._files[rank]

    @contextlib.contextmanager
    def _errors(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
            path = self._directory / file_of(rank)
            raise UserError(f"{path} is not a rank's part of a checkpoint: {error!r:.200}") from error


def _random_state() -> dict[str, Tensor]:
    states = {_RNG_CPU: torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[_RNG_CUDA] = torch.cuda.get_rng_state()
    return states


def _set_random_state(stored: Stored, rank: int) -> None:
    if (state := stored.tensor(rank, _RNG_CPU)) is not None:
        torch.set_rng_state(state)
    if torch.cuda.is_available() and (state := stored.tensor(rank, _RNG_CUDA)) is not None:
        torch.cuda.set_rng_state(state)
