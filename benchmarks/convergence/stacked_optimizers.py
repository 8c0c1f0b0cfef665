"""AdamW and Muon of diloco.train.optim for many models at once, each with a learning rate of its own.

All matrices are [models, values] as in stacked_llama.Stack. A rate of 0 with `active` 0 leaves a model as it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.convergence.stacked_llama import Compile, Stack
from diloco.train.muon import MOMENTUM, orthogonalized
from diloco.train.optim import ADAMW_SHARE

_BETA1 = 0.9
_EPSILON = 1e-8
_NORM_EPSILON = 1e-6


class StackedAdamW:
    """AdamW on the values from column `first` on."""

    def __init__(
        self, stack: Stack, models: slice, *, first: int, beta2: float, decay: float, compiled: Compile
    ) -> None:
        self._weights = stack.rows[models, first:]
        self._mean, self._square = torch.zeros_like(self._weights), torch.zeros_like(self._weights)
        self._count = torch.zeros(len(self._weights), 1, device=stack.rows.device)
        self._decay = decay * stack.decayed()[first:]
        self._beta2 = beta2
        self._update = compiled(_adamw_update)

    def step(self, gradients: Tensor, lr: Tensor, active: Tensor) -> None:
        """`gradients` are of these values; `lr` and `active` (1 or 0) are [models, 1]."""
        self._count += active
        self._update(
            self._weights,
            gradients,
            self._mean,
            self._square,
            self._count,
            lr,
            active,
            self._decay,
            self._beta2,
        )


class StackedMuon:
    """Muon on the hidden matrices, AdamW on the rest at a fixed share of the rate."""

    def __init__(self, stack: Stack, models: slice, *, beta2: float, decay: float, compiled: Compile) -> None:
        self._stack, self._decay = stack, decay
        self._hidden = stack.rows[models, : stack.num_hidden]
        self._buffer = torch.zeros_like(self._hidden)
        self._rest = StackedAdamW(
            stack, models, first=stack.num_hidden, beta2=beta2, decay=decay, compiled=compiled
        )
        self._nesterov = compiled(_nesterov)

    def step(self, gradients: Tensor, lr: Tensor, active: Tensor) -> None:
        """See StackedAdamW.step."""
        split = self._stack.num_hidden
        self._rest.step(gradients[:, split:], ADAMW_SHARE * lr, active)
        updates = self._nesterov(gradients[:, :split], self._buffer, active)
        self._hidden.mul_(1 - lr * self._decay)
        groups = self._stack.hidden_groups
        for weights, update in zip(groups(self._hidden), groups(updates), strict=True):
            fan_out, fan_in = weights.shape[-2:]
            matrices = (update.bfloat16() if update.is_cuda else update).flatten(0, 1)
            direction = orthogonalized(matrices).view_as(update)
            weights.sub_(direction * (lr * math.sqrt(fan_out / fan_in)).view(-1, 1, 1, 1))


def clip(gradients: Tensor, max_norm: float) -> None:
    """Scale each model's gradient down to `max_norm`, in place, as torch's clip_grads_with_norm_ does."""
    norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    gradients.mul_((max_norm / (norms + _NORM_EPSILON)).clamp(max=1.0))


def _adamw_update(
    weights: Tensor,
    gradients: Tensor,
    mean: Tensor,
    square: Tensor,
    count: Tensor,
    lr: Tensor,
    active: Tensor,
    decay: Tensor,
    beta2: float,
) -> None:
    mean.add_((gradients - mean) * ((1 - _BETA1) * active))
    square.add_((gradients * gradients - square) * ((1 - beta2) * active))
    first, second = 1 - _BETA1 ** count.clamp(min=1), 1 - beta2 ** count.clamp(min=1)
    change = (mean / first) / ((square / second).sqrt() + _EPSILON)
    weights.mul_(1 - lr * decay).sub_(lr * change)


def _nesterov(gradients: Tensor, buffer: Tensor, active: Tensor) -> Tensor:
    buffer.add_((gradients - buffer) * ((1 - MOMENTUM) * active))
    return gradients + (buffer - gradients) * MOMENTUM
