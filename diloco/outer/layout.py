"""Where each parameter of a model lies in the flat fp32 fragments that the daemon averages.

A shard along dimension 0 is one contiguous range of its parameter's slot, so every rank copies its own FSDP2 shards
directly to and from their place (exchange.py), and nothing is gathered on one rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from diloco.errors import UserError
from peers.state.layout import Layout, ParameterSlot

_LAYER = re.compile(r"(?:[^.]*\.)*?\d+(?=\.)")
# Wrappers add these to parameter names; two peers that wrap their models differently still have the same layout.
_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and parameter in canonical order; tied parameters occur once, names are those without wrappers.

    Raises UserError for FSDP1: its parameters are plain tensors of a rank's part, which look like replicas.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UserError(
            "the model is sharded by FullyShardedDataParallel (FSDP1), whose parts diloco cannot read; shard it with "
            "torch.distributed.fsdp.fully_shard (FSDP2; with accelerate, fsdp_version 2)"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return [(_plain(name), p) for name, p in model.named_parameters() if p.requires_grad]


def layout_of(model: nn.Module, num_fragments: int = 1) -> Layout:
    """Where each trainable parameter lies.

    Fragments are strided by layer: layer l is in fragment l mod num_fragments, so that each fragment holds early and
    late layers (arXiv 2501.18512, section 2.1). Parameters outside the layers (embeddings, the last norm, the head) go
    to the smallest fragment. Raises UserError if a fragment would be empty.
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


def layer_of(name: str) -> str:
    """The name of a parameter's layer, up to its number; empty for a parameter outside the layers."""
    match = _LAYER.match(name)
    return match[0] if match else ""


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank holds: `local` lies, flattened, at `start` in its fragment."""

    fragment: int
    start: int
    local: Tensor
    is_first: bool
    """Whether this rank is the first of those that hold the same values."""
    copies: Any
    """The process group of the ranks that hold the same values; None means all ranks."""


def pieces_of(model: nn.Module, layout: Layout) -> list[Piece]:
    """This rank's pieces, in the layout's order. They are views: writing to them writes to the model."""
    parameters = dict(trainable_parameters(model))
    return [
        _piece(index, slot, parameters[slot.name])
        for index, fragment in enumerate(layout.fragments)
        for slot in fragment
    ]


def _fragments_by_name(parameters: Sequence[tuple[str, int]], num_fragments: int) -> list[int]:
    """The fragment of each parameter, which is given as its name and size."""
    layers = [layer_of(name) for name, _ in parameters]
    number = {layer: index for index, layer in enumerate(dict.fromkeys(filter(None, layers)))}
    sizes = [0] * num_fragments
    found: list[int] = [-1] * len(parameters)
    for index, ((_, numel), layer) in enumerate(zip(parameters, layers, strict=True)):
        if layer:
            found[index] = number[layer] % num_fragments
            sizes[found[index]] += numel
    # The largest come first: after the small ones have been spread evenly, an embedding would unbalance the fragments.
    rest = sorted((i for i, f in enumerate(found) if f < 0), key=lambda i: (-parameters[i][1], i))
    for index in rest:
        found[index] = sizes.index(min(sizes))
        sizes[found[index]] += parameters[index][1]
    return found


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
