"""A rank's part of a checkpoint: weights, optimizer state, loss scale and random state.

torch.distributed.checkpoint (DCP) plans which rank writes and reads which rows, so that a different number of ranks can
resume, and synchronizes the ranks. The files are in the format of its HuggingFaceStorageReader but written by this
module: DCP's safetensors writer makes a second copy of everything in memory, and its default format is pickled.
"""

from __future__ import annotations

import json
import re
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
from diloco.outer.page_locked import lock_pages
from diloco.train.inner import InnerLoop
from diloco.train.sharding import local_tensor
from peers.state.whole_files import FileRecord

Files = dict[str, FileRecord]
"""Size and digest of a checkpoint's files, by name."""

# What reading a malformed file may raise.
_MALFORMED = (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
# DCP's metadata key for the offset of each shard in its tensor.
_OFFSETS_KEY = "DCP_SHARDING_INFO"
_ALIGNMENT = 64
_FILE = re.compile(r"rank_(0|[1-9][0-9]{0,8})\.safetensors")


def file_of(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def rank_of(name: str) -> int | None:
    """The rank that wrote this file; None if it is not a rank's file."""
    found = _FILE.fullmatch(name)
    return int(found[1]) if found else None


def state_of(inner: InnerLoop) -> dict[str, Tensor]:
    """`model.<parameter>` and `optimizer.<parameter>.<state>`, not copied, and `loss_scale.<field>` (float64)."""
    state: dict[str, Tensor] = {}
    for name, parameter in trainable_parameters(inner.model):
        state[f"model.{name}"] = parameter.detach()
        for key, value in inner.optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{name}.{key}"] = value
    scale = asdict(inner.loss_scale)
    return state | {f"loss_scale.{name}": torch.tensor(scale[name], dtype=torch.float64) for name in scale}


def state_to_write(inner: InnerLoop, rank: int) -> dict[str, Tensor]:
    """The tensors that this rank has to write: those of which it holds the first replica, and its random state."""
    state = state_of(inner)
    return {
        name: tensor for name, tensor in state.items() if _holds_first_replica(tensor, rank)
    } | _random_state(rank)


def save(
    state: Mapping[str, Tensor],
    copies: Mapping[str, Tensor],
    write: Callable[[Mapping[str, Tensor], Mapping[str, str]], Files],
    finish: Callable[[Files], None],
    group: Any,
) -> int:
    """Each rank writes its shards, then rank 0 calls `finish`. Returns the total size in bytes on rank 0.

    `state` gives the sharding; the values written are the `copies` of the same names. `group` is a process group for
    saving only, None for a single rank. If one rank fails, all ranks raise OSError.
    """
    writer = _Writer(write, finish)
    _suppress_single_rank_warning()
    try:
        dcp.save(
            dict(state),
            storage_writer=writer,
            planner=_Planner(copies),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        reason = _first_failure(error)
        raise OSError(str(reason) or repr(reason)) from reason
    return writer.num_bytes


def load(directory: Path, inner: InnerLoop, *, rank: int, with_random: bool = True) -> None:
    """Load model, optimizer and, with `with_random`, this rank's random state, saved by any number of ranks.

    A rank for which no random state was saved keeps its own. Raises UserError if the checkpoint is of another model.
    """
    make_optimizer_state(inner)
    random = _random_state(rank) if with_random else {}
    state = read(
        directory,
        lambda there: state_of(inner) | {name: random[name] for name in random if name in there},
    )
    # This run's precision decides whether the loss is scaled; that of the checkpoint may differ.
    if inner.loss_scale.interval and state["loss_scale.interval"]:
        inner.loss_scale.scale = state["loss_scale.scale"].item()
        inner.loss_scale.good_steps = int(state["loss_scale.good_steps"].item())
    if (numbers := state.get(f"rng.cpu.{rank}")) is not None:
        torch.set_rng_state(numbers)
    if (numbers := state.get(f"rng.cuda.{rank}")) is not None:
        torch.cuda.set_rng_state(numbers)


def read(directory: Path, wanted: Callable[[Mapping[str, Any]], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Fill and return the tensors that `wanted` makes, given the saved tensors' metadata by name. Raises UserError."""
    _suppress_single_rank_warning()
    try:
        reader = HuggingFaceStorageReader(str(directory))
        there = reader.read_metadata().state_dict_metadata
        _check_whole(there)
        state = wanted(there)
        # Each rank reads by itself, so that none waits in a collective for a rank that has failed.
        dcp.load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, SafetensorError, *_MALFORMED) as error:
        reason = _first_failure(error) if isinstance(error, CheckpointException) else error
        raise UserError(
            f"{directory} holds another model, or was saved by an earlier version: {reason!r:.200}"
        ) from reason
    return state


def make_optimizer_state(inner: InnerLoop) -> None:
    """Create the optimizer's state, which exists only after a step, by a step with zero gradients and rate 0."""
    for _, parameter in trainable_parameters(inner.model):
        parameter.grad = torch.zeros_like(parameter)
    for group in inner.optimizer.param_groups:
        group["lr"] = 0.0
    inner.optimizer.step()
    inner.optimizer.zero_grad()


class HostCopies:
    """Host copies of the tensors, allocated once and reused by every save; page-locked if the tensors are on a GPU."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's shards. Overwrites the result of the previous call, which must no longer be in use."""
        local = {name: local_tensor(one) for name, one in tensors.items()}
        on_gpu = any(tensor.is_cuda for tensor in local.values())
        self._make_room(local, page_locked=on_gpu)
        for name, tensor in local.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return {name: self._copies[name] for name in local}

    def _make_room(self, local: Mapping[str, Tensor], *, page_locked: bool) -> None:
        """Allocate one memory for all tensors that have no room yet.

        torch's own allocator of page-locked memory would round the size of each one up to a power of two.
        """
        missing = {name: tensor for name, tensor in local.items() if not self._has_room(name, tensor)}
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in missing.values()]
        memory = torch.empty(sum(sizes), dtype=torch.uint8)
        if page_locked:
            lock_pages(memory)
        for (name, tensor), room in zip(missing.items(), memory.split(sizes), strict=True):
            self._copies[name] = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _has_room(self, name: str, tensor: Tensor) -> bool:
        room = self._copies.get(name)
        return room is not None and (room.shape, room.dtype) == (tensor.shape, tensor.dtype)


class _Planner(DefaultSavePlanner):
    """Resolves tensors to their host copies, since training changes the originals during the save."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index.fqn]


class _Writer(HuggingFaceStorageWriter):
    """Writes one file per rank through the callbacks instead of DCP's own writer."""

    def __init__(
        self,
        write: Callable[[Mapping[str, Tensor], Mapping[str, str]], Files],
        finish: Callable[[Files], None],
    ) -> None:
        super().__init__(path="", save_distributed=True)
        self._write, self._finish = write, finish
        self.num_bytes = 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The base class would create the directory; here it exists, or has been discarded on purpose."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        places = {item.index.fqn: {"saved_offsets": list(item.index.offset or ())} for item in plan.items}
        files = self._write(tensors, {_OFFSETS_KEY: json.dumps(places)})
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
    """Raise ValueError if a tensor's shards are incomplete: DCP would silently leave the missing rows unchanged."""
    for name, tensor in there.items():
        if sum(piece.sizes.numel() for piece in tensor.chunks) != tensor.size.numel():
            raise ValueError(f"{name} is incomplete")


def _random_state(rank: int) -> dict[str, Tensor]:
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def _holds_first_replica(tensor: Tensor, rank: int) -> bool:
    """Whether this rank holds the first replica of its shard."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    replicas = [dim for dim, place in enumerate(tensor.placements) if isinstance(place, Replicate)]
    return all(tensor.device_mesh.get_local_rank(dim) == 0 for dim in replicas)


def _first_failure(error: CheckpointException) -> BaseException:
    return next(iter(error.failures.values()))[0]


def _suppress_single_rank_warning() -> None:
    """Suppress DCP's warning about running without torch.distributed, which is intended for a single rank."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
