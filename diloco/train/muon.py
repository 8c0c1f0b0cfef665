"""Muon for hidden matrices, AdamW for everything else, in one optimizer.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by approximately the
nearest orthogonal matrix, computed by five Newton-Schulz iterations. The settings are those of MuLoCo (arXiv
2505.23725): Nesterov momentum 0.95, and an update of learning rate x sqrt(fan_out / fan_in), so that one step changes
the root mean square of a layer's output by at most the learning rate (Yang et al., arXiv 2310.17813).

torch.optim.Muon does not support DTensor and always iterates in bf16. A test compares both implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from diloco.train.sharding import local_tensor

MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_LEAST_NORM = 1e-7
_BATCH_NUMEL = 1 << 25
"""Values orthogonalized at a time on a GPU: 64 MiB in bf16, and three times as much for intermediate results."""


class Muon(torch.optim.Optimizer):
    """`param_groups[0]` holds the matrices; the rest are AdamW's groups, whose `lr_scale` multiplies the schedule.

    Under FSDP2 each matrix is gathered on one rank, which orthogonalizes it and scatters the shards again.
    """

    def __init__(
        self, matrices: Sequence[nn.Parameter], adamw: torch.optim.AdamW, *, weight_decay: float
    ) -> None:
        """`adamw` holds all other parameters; its state and groups become part of this optimizer's."""
        group = {"params": list(matrices), "weight_decay": weight_decay, "momentum": MOMENTUM}
        super().__init__([group, *adamw.param_groups], {"lr": 0.0})
        self._adamw = adamw
        adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters. Closures are not supported."""
        assert closure is None
        self._adamw.step()
        group = self.param_groups[0]
        parameters = [p for p in group["params"] if p.grad is not None]
        updates = [self._with_momentum(p, group["momentum"]) for p in parameters]
        for parameter, direction in _orthogonalized_all(parameters, updates):
            fan_out, fan_in = parameter.shape
            rate = group["lr"] * math.sqrt(fan_out / fan_in)
            local = local_tensor(parameter.detach())
            local.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-rate)

    def _with_momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Update the momentum, and return this rank's rows of the Nesterov update. Its scale is arbitrary."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, buffer = local_tensor(parameter.grad), local_tensor(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Approximately the nearest orthogonal matrix of each of [n, rows, columns].

    Singular values are mapped to 0.7 to 1.2, zeros stay zero.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if is_tall else matrices
    found = found / torch.linalg.vector_norm(found, dim=(1, 2), keepdim=True).clamp(min=_LEAST_NORM)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = torch.bmm(found, found.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, polynomial, found, beta=a)
    return found.mT if is_tall else found


def _orthogonalized_all(
    parameters: Iterable[nn.Parameter], updates: Iterable[Tensor]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields each parameter with this rank's rows of its orthogonalized update."""
    pairs = sorted(zip(parameters, updates, strict=True), key=lambda pair: tuple(pair[0].shape))
    for shape, same in groupby(pairs, key=lambda pair: pair[0].shape):
        these = list(same)
        group = _shard_group(these[0][0])
        at_once = _num_at_once(these[0][1]) if group is None else dist.get_world_size(group)
        for first in range(0, len(these), at_once):
            some = these[first : first + at_once]
            # bf16 is precise enough for the iteration and faster on GPUs; many CPUs only emulate it.
            parts = [update.bfloat16() if update.is_cuda else update for _, update in some]
            found = (
                orthogonalized(torch.stack(parts)) if group is None else _by_owners(parts, shape[0], group)
            )
            yield from zip((parameter for parameter, _ in some), found, strict=True)


def _num_at_once(update: Tensor) -> int:
    """How many matrices of this shape to orthogonalize in one batch: small ones leave a GPU idle between launches."""
    return max(1, _BATCH_NUMEL // update.numel()) if update.is_cuda else 1


def _by_owners(parts: Sequence[Tensor], num_rows: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Orthogonalize at most one matrix per rank: the group's k-th rank does the k-th matrix.

    `parts[k]` is this rank's shard of matrix k, [rows, columns], and the result has the same shapes. FSDP2 gives each
    rank ceil(num_rows / ranks) rows, and fewer or none to the last ranks, so shards are padded for the all-to-all.
    """
    num_ranks, num_columns = dist.get_world_size(group), parts[0].shape[1]
    rows = parts[0].new_zeros(num_ranks, -(-num_rows // num_ranks), num_columns)
    for place, part in zip(rows, parts, strict=False):
        place[: len(part)] = part
    whole = torch.empty_like(rows)
    dist.all_to_all_single(whole, rows, group=group)
    if dist.get_rank(group) < len(parts):
        matrix = whole.view(-1, num_columns)[:num_rows]
        matrix.copy_(orthogonalized(matrix[None])[0])
    dist.all_to_all_single(rows, whole, group=group)
    return [place[: len(part)] for place, part in zip(rows, parts, strict=False)]


def _shard_group(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """The ranks over which a parameter is sharded; None if this rank holds all of it."""
    if not isinstance(parameter, DTensor):
        return None
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard) and parameter.device_mesh.size(dim) > 1:
            group: dist.ProcessGroup = parameter.device_mesh.get_group(dim)
            return group
    return None
