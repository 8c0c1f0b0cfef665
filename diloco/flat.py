"""Between a model's parameters and the flat fp32 memories that the daemon averages.

Every rank copies its own FSDP2 shards straight to and from their place, so nothing is gathered on one rank: a shard
along dimension 0 is one contiguous range of the parameter's slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from peers.layout import Layout, ParameterSlot

# What wrappers put into parameter names; two peers that wrap differently still have the same layout.
_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and parameter in canonical order, tied ones once, names free of wrappers."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return [(_plain(name), p) for name, p in model.named_parameters() if p.requires_grad]


def layout_of(model: nn.Module, num_fragments: int = 1) -> Layout:
    """Where each trainable parameter lies. Fragments are runs of neighbours of about the same size."""
    parameters = trainable_parameters(model)
    total = sum(p.numel() for _, p in parameters)
    fragments: list[list[ParameterSlot]] = [[] for _ in range(num_fragments)]
    ends = [0] * num_fragments
    passed = 0
    for name, parameter in parameters:
        # The fragment in which the middle of the parameter falls.
        middle = passed + parameter.numel() / 2
        index = min(int(middle * num_fragments / max(total, 1)), num_fragments - 1)
        fragments[index].append(ParameterSlot(name, tuple(parameter.shape), ends[index]))
        ends[index] += parameter.numel()
        passed += parameter.numel()
    return Layout(tuple(tuple(fragment) for fragment in fragments))


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one parameter: `local`, flat, lies at [start, start + numel) of a fragment."""

    fragment: int
    start: int
    local: Tensor
    is_first: bool
    """Whether this rank is the first of those that hold the same values."""
    copies: Any
    """The process group of the ranks that hold the same values; none: all ranks do."""


def pieces_of(model: nn.Module, layout: Layout) -> list[Piece]:
    """This rank's pieces, in the layout's order. They are views: writing to them writes to the model."""
    parameters = dict(trainable_parameters(model))
    return [
        _piece(index, slot, parameters[slot.name])
        for index, fragment in enumerate(layout.fragments)
        for slot in fragment
    ]


@torch.no_grad()
def copy_out(pieces: Sequence[Piece], memories: Sequence[Tensor]) -> None:
    """Write this rank's share of the weights; every value is written by the first rank that holds it."""
    for piece in pieces:
        if piece.is_first:
            _place(piece, memories).copy_(piece.local, non_blocking=True)
    _wait_for_device(pieces)


@torch.no_grad()
def copy_in(pieces: Sequence[Piece], memories: Sequence[Tensor], *, num_nodes: int = 1) -> None:
    """Read this rank's share of the weights. Over several nodes only the first sees the memories; it broadcasts."""
    for piece in pieces:
        if num_nodes == 1 or piece.is_first:
            piece.local.copy_(_place(piece, memories), non_blocking=True)
        if num_nodes > 1 and piece.local.numel():
            dist.broadcast(piece.local, group=piece.copies, group_src=0)
    _wait_for_device(pieces)


def _plain(name: str) -> str:
    for part in _WRAPPER_PARTS:
        name = name.replace(part, "")
    return name


def _piece(fragment: int, slot: ParameterSlot, parameter: nn.Parameter) -> Piece:
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        return Piece(fragment, slot.offset, tensor, is_first, None)
    mesh, placements = tensor.device_mesh, tensor.placements
    replicas = [dim for dim, placement in enumerate(placements) if isinstance(placement, Replicate)]
    shards = [placement for placement in placements if not isinstance(placement, Replicate)]
    if any(not isinstance(p, Shard) or p.dim != 0 for p in shards) or len(shards) > 1 or len(replicas) > 1:
        raise NotImplementedError(
            f"{slot.name} lies as {placements}; only FSDP2's own dim-0 shards are copied"
        )
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    row = slot.numel // slot.shape[0] if slot.shape[0] else 0
    is_first = all(mesh.get_local_rank(dim) == 0 for dim in replicas)
    copies = mesh.get_group(replicas[0]) if replicas else None
    return Piece(fragment, slot.offset + offset[0] * row, tensor.to_local(), is_first, copies)


def _place(piece: Piece, memories: Sequence[Tensor]) -> Tensor:
    numel = piece.local.numel()
    return memories[piece.fragment][piece.start : piece.start + numel].view(piece.local.shape)


def _wait_for_device(pieces: Sequence[Piece]) -> None:
    if any(device.type == "cuda" for device in _devices(pieces)):
        torch.cuda.synchronize()


def _devices(pieces: Sequence[Piece]) -> Iterator[torch.device]:
    return (device for device, _ in itertools.groupby(piece.local.device for piece in pieces))
