"""Between a model's parameters and the flat fp32 memories that the daemon averages.

Every rank copies its own FSDP2 shards straight to and from their place, so nothing is gathered on one rank: a shard
along dimension 0 is one contiguous range of the parameter's slot.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from diloco.errors import UserError
from peers.state.layout import Layout, ParameterSlot

# What wrappers put into parameter names; two peers that wrap differently still have the same layout.
_LAYER = re.compile(r"(?:[^.]*\.)*?\d+(?=\.)")
_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and parameter in canonical order, tied ones once, names free of wrappers."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return [(_plain(name), p) for name, p in model.named_parameters() if p.requires_grad]


def layout_of(model: nn.Module, num_fragments: int = 1) -> Layout:
    """Where each trainable parameter lies.

    Fragments are strided by layer, layer l in fragment l mod num_fragments, so that each of them holds early and late
    layers (arXiv 2501.18512, section 2.1). What belongs to no layer (embeddings, the last norm, the head) goes where
    least is. Raises UserError where there are fewer parameters than fragments.
    """
    parameters = trainable_parameters(model)
    ranks = _fragments_by_name([(name, p.numel()) for name, p in parameters], num_fragments)
    fragments: list[list[ParameterSlot]] = [[] for _ in range(num_fragments)]
    ends = [0] * num_fragments
    for (name, parameter), index in zip(parameters, ranks, strict=True):
        fragments[index].append(ParameterSlot(name, tuple(parameter.shape), ends[index]))
        ends[index] += parameter.numel()
    if num_fragments > 1 and not all(ends):
        raise UserError(
            f"the model has too few layers for --hv.num-fragments {num_fragments}: "
            f"{sum(map(bool, ends))} would do"
        )
    return Layout(tuple(tuple(fragment) for fragment in fragments))


def _fragments_by_name(parameters: Sequence[tuple[str, int]], num_fragments: int) -> list[int]:
    """The fragment of each parameter, given as name and size."""
    layers = [layer_of(name) for name, _ in parameters]
    number = {layer: index for index, layer in enumerate(dict.fromkeys(filter(None, layers)))}
    sizes = [0] * num_fragments
    found: list[int] = [-1] * len(parameters)
    for index, ((_, numel), layer) in enumerate(zip(parameters, layers, strict=True)):
        if layer:
            found[index] = number[layer] % num_fragments
            sizes[found[index]] += numel
    # The largest first, or an embedding would come on top of whatever small ones have been spread already.
    rest = sorted((i for i, f in enumerate(found) if f < 0), key=lambda i: (-parameters[i][1], i))
    for index in rest:
        found[index] = sizes.index(min(sizes))
        sizes[found[index]] += parameters[index][1]
    return found


def layer_of(name: str) -> str:
    """The name of the layer a parameter belongs to, up to its number; empty: of none."""
    match = _LAYER.match(name)
    return match[0] if match else ""


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
    """Read this rank's share of the weights."""
    _read(pieces, num_nodes, lambda piece: _place(piece, memories))


@torch.no_grad()
def shift(pieces: Sequence[Piece], memories: Sequence[Tensor], *, num_nodes: int = 1) -> None:
    """Add what lies in the memories to this rank's share of the weights."""
    _read(pieces, num_nodes, lambda piece: piece.local + _on_device(piece, memories))


@torch.no_grad()
def merge(
    pieces: Sequence[Piece],
    snapshots: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    mixing: float | None,
    num_nodes: int = 1,
) -> None:
    """Bring weights that were trained on since their snapshot to the snapshot's target.

    Without mixing, local = target + (local - snapshot): what was trained since is kept whole, and counts in the next
    pseudo-gradient. With mixing, local = mixing * local + (1 - mixing) * target, as arXiv 2501.18512 has it (alpha).
    """

    def merged(piece: Piece) -> Tensor:
        target = _on_device(piece, targets)
        if mixing is not None:
            return piece.local.to(target.dtype).lerp(target, 1 - mixing)
        snapshot = _on_device(piece, snapshots)
        if piece.local.dtype == target.dtype:
            # Training stands still meanwhile, and most of it would be page faults of what comes between.
            return piece.local.sub_(snapshot).add_(target)
        return target + (piece.local - snapshot)

    _read(pieces, num_nodes, merged)


def _read(pieces: Sequence[Piece], num_nodes: int, values: Callable[[Piece], Tensor]) -> None:
    """Over several nodes only the first sees the memories; it broadcasts."""
    for piece in pieces:
        if num_nodes == 1 or piece.is_first:
            piece.local.copy_(values(piece), non_blocking=True)
        if num_nodes > 1 and piece.local.numel():
            dist.broadcast(piece.local, group=piece.copies, group_src=0)
    _wait_for_device(pieces)


def _on_device(piece: Piece, memories: Sequence[Tensor]) -> Tensor:
    return _place(piece, memories).to(piece.local.device, non_blocking=True)


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
        raise UserError(
            f"{slot.name} is distributed as {placements}, and diloco reads only shards along dimension 0 with at most "
            "one dimension of replicas; shard it with fully_shard alone, without tensor or pipeline parallelism"
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
