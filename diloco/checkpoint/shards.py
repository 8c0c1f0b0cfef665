"""A rank's part of a checkpoint: weights, optimizer state, loss scale and random numbers.

torch.distributed.checkpoint plans who writes and who reads which rows, so that another number of ranks may go on from
them, and brings the ranks together. The files are those that its HuggingFaceStorageReader reads, written by
us: torch's writer of safetensors makes a second copy of all in memory, and its other format is pickled.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, Replicate
from torch.futures import Future

from diloco.errors import UserError
from diloco.outer.layout import trainable_parameters
from diloco.train.inner import InnerLoop
from peers.state.whole_files import FileRecord

Files = dict[str, FileRecord]
"""What lies in a checkpoint, by name."""

# Of a file that others than us have written.
_MALFORMED = (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
# torch's name for where in its tensor each piece of a file begins.
_PLACES = "DCP_SHARDING_INFO"


def file_of(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def state_of(inner: InnerLoop) -> dict[str, Tensor]:
    """`model.<parameter>`, `optimizer.<parameter>.<state>`, which are the memory itself, and `loss_scale.<field>`."""
    state: dict[str, Tensor] = {}
    for name, parameter in trainable_parameters(inner.model):
        state[f"model.{name}"] = parameter.detach()
        for key, value in inner.optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{name}.{key}"] = value
    scale = asdict(inner.loss_scale)
    return state | {f"loss_scale.{name}": torch.tensor(scale[name], dtype=torch.float64) for name in scale}


def state_to_write(inner: InnerLoop, rank: int) -> dict[str, Tensor]:
    """What this rank is the first to hold, and its own random numbers."""
    state = state_of(inner)
    return {name: tensor for name, tensor in state.items() if _is_first(tensor, rank)} | _random_state(rank)


def save(
    state: Mapping[str, Tensor],
    copies: Mapping[str, Tensor],
    write: Callable[[Mapping[str, Tensor], Mapping[str, str]], Files],
    finish: Callable[[Files], None],
    group: Any,
) -> int:
    """Each rank writes its rows, and rank 0 finishes when all have; returns the bytes that it finished.

    The state says where the rows lie; what is written are the copies of the same names. `group` are the ranks, for this
    alone; None for a single one. Raises OSError on all ranks where one has failed.
    """
    writer = _Writer(write, finish)
    _expect_a_single_rank()
    try:
        dcp.save(
            dict(state),
            storage_writer=writer,
            planner=_Planner(copies),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        reason = _first_of(error)
        raise OSError(str(reason) or repr(reason)) from reason
    return writer.num_bytes


def load(directory: Path, inner: InnerLoop, *, rank: int, with_random: bool = True) -> None:
    """Fill model and optimizer from what any number of ranks saved, and take the random state unless told otherwise.

    Ranks that there were not before keep the one that their seed gave them. Raises UserError for another model's.
    """
    make_optimizer_state(inner)
    random = _random_state(rank) if with_random else {}
    state = read(
        directory,
        lambda there: state_of(inner) | {name: random[name] for name in random if name in there},
    )
    for name, before in asdict(inner.loss_scale).items():
        setattr(inner.loss_scale, name, type(before)(state[f"loss_scale.{name}"].item()))
    if (numbers := state.get(f"rng.cpu.{rank}")) is not None:
        torch.set_rng_state(numbers)
    if (numbers := state.get(f"rng.cuda.{rank}")) is not None:
        torch.cuda.set_rng_state(numbers)


def read(directory: Path, wanted: Callable[[Mapping[str, Any]], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Fill the tensors that are wanted, by what is there, and return them. Raises UserError."""
    _expect_a_single_rank()
    try:
        reader = HuggingFaceStorageReader(str(directory))
        there = reader.read_metadata().state_dict_metadata
        _check_whole(there)
        state = wanted(there)
        # Each rank for itself: who has failed need not be waited for.
        dcp.load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, SafetensorError, *_MALFORMED) as error:
        reason = _first_of(error) if isinstance(error, CheckpointException) else error
        raise UserError(
            f"{directory} holds another model than this one, or of an earlier version: {reason!r:.200}"
        ) from reason
    return state


def make_optimizer_state(inner: InnerLoop) -> None:
    """An optimizer makes its state in the first step: take one that changes nothing."""
    for _, parameter in trainable_parameters(inner.model):
        parameter.grad = torch.zeros_like(parameter)
    for group in inner.optimizer.param_groups:
        group["lr"] = 0.0
    inner.optimizer.step()
    inner.optimizer.zero_grad()


class HostCopies:
    """One set of copies, as large as the tensors and used again each time; page-locked for those of a GPU."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's rows. What the call before returned is overwritten, so whoever reads that must be done."""
        local = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in tensors.items()}
        self._copies = {name: self._room_for(name, tensor) for name, tensor in local.items()}
        for name, tensor in local.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in local.values()):
            torch.cuda.synchronize()
        return dict(self._copies)

    def _room_for(self, name: str, tensor: Tensor) -> Tensor:
        room = self._copies.get(name)
        if room is not None and (room.shape, room.dtype) == (tensor.shape, tensor.dtype):
            return room
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


class _Planner(DefaultSavePlanner):
    """Takes what is written from the copies, since training changes the tensors meanwhile."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index.fqn]


class _Writer(HuggingFaceStorageWriter):
    """One file of each rank, by our own hands."""

    def __init__(
        self,
        write: Callable[[Mapping[str, Tensor], Mapping[str, str]], Files],
        finish: Callable[[Files], None],
    ) -> None:
        super().__init__(path="", save_distributed=True)
        self._write, self._finish = write, finish
        self.num_bytes = 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The directory is there, or has been discarded."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        places = {item.index.fqn: {"saved_offsets": list(item.index.offset or ())} for item in plan.items}
        files = self._write(tensors, {_PLACES: json.dumps(places)})
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                WriteResult(MetadataIndex(name), record.num_bytes, (name, record))
                for name, record in files.items()
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = dict(result.storage_data for of_rank in results for result in of_rank)
        self._finish(files)
        self.num_bytes = sum(record.num_bytes for record in files.values())


def _check_whole(there: Mapping[str, Any]) -> None:
    """torch would leave rows that no file has as they are."""
    for name, tensor in there.items():
        if sum(piece.sizes.numel() for piece in tensor.chunks) != tensor.size.numel():
            raise ValueError(f"{name} is not there as a whole")


def _random_state(rank: int) -> dict[str, Tensor]:
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def _is_first(tensor: Tensor, rank: int) -> bool:
    """Whether this rank is the first of those that hold the same values."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    replicas = [dim for dim, place in enumerate(tensor.placements) if isinstance(place, Replicate)]
    return all(tensor.device_mesh.get_local_rank(dim) == 0 for dim in replicas)


def _first_of(error: CheckpointException) -> BaseException:
    return next(iter(error.failures.values()))[0]


def _expect_a_single_rank() -> None:
    """torch warns of it."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
