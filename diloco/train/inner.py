"""One inner step: forward, backward, clip, update. Independent of the swarm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from diloco.outer.world import in_group
from diloco.train.optim import set_learning_rate
from diloco.train.sharding import Precision, local_tensor


@dataclass(frozen=True)
class StepResult:
    """`loss` is the mean over all tokens of the step on all ranks, in nats; `grad_norm` is before clipping."""

    loss: float
    grad_norm: float


@dataclass
class LossScale:
    """Loss scaling against fp16 underflow: doubles after `interval` finite steps, halves after an overflow.

    torch's GradScaler checks only its own rank's shards, so ranks could disagree on skipping a step; here the caller
    passes a result that is the same on all ranks. An interval of 0 disables scaling.
    """

    scale: float = 65536.0
    good_steps: int = 0
    interval: int = 2000

    def update(self, is_finite: bool) -> bool:
        """Adjust the scale after a step, given whether its gradients were finite; returns whether to apply them."""
        if not is_finite:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            return False
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale, self.good_steps = self.scale * 2, 0
        return True


class InnerLoop:
    """The model, its optimizer, and the training step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: Precision,
        device: torch.device,
        micro_batch_size: int,
        max_grad_norm: float,
    ) -> None:
        # transformers loads weights into a model in evaluation mode, in which nothing is dropped out.
        self.model = model.train()
        self.optimizer = optimizer
        self.loss_scale = LossScale() if precision.scales_loss else LossScale(scale=1.0, interval=0)
        self._precision = precision
        self.device = device
        self.micro_batch_size = micro_batch_size
        self._max_grad_norm = max_grad_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def step(
        self,
        samples: Tensor,
        *,
        lr: float,
        on_micro_batch: Callable[[int, int], None] = lambda done, total: None,
    ) -> StepResult:
        """Train on token ids `samples` [n, seq_length + 1], this rank's part of the batch.

        Gradients are averaged over ranks, so n must be the same on all. Synchronizes with the device once. After each
        micro-batch, `on_micro_batch` is called with the number done and the total; on a GPU, micro-batches that count
        as done may still be queued.
        """
        set_learning_rate(self.optimizer.param_groups, lr)
        micro_batches = samples.split(self.micro_batch_size)
        loss = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches):
            if isinstance(self.model, FSDPModule):
                # Each micro-batch scatters its gradients: else every rank would keep those of the whole model. Replicas
                # average their sums once.
                self.model.set_requires_all_reduce(number == len(micro_batches) - 1)
            part = self.loss(batch, reduction="sum") / (samples.shape[0] * (samples.shape[1] - 1))
            (part * self.loss_scale.scale).backward()
            loss += part.detach()
            on_micro_batch(number + 1, len(micro_batches))
        grad_norm = self._clip()
        if self.loss_scale.interval == 0:
            self.optimizer.step()
            result = self._figures(loss, grad_norm)
        else:
            result = self._figures(loss, grad_norm)
            # The norm is over all ranks, so either all of them skip the step or none does.
            if self.loss_scale.update(math.isfinite(result.grad_norm)):
                self.optimizer.step()
        self.optimizer.zero_grad()
        return result

    def loss(self, samples: Tensor, *, reduction: str) -> Tensor:
        """Next-token cross-entropy in nats over `samples` [n, seq_length + 1]."""
        samples = samples.to(self.device, non_blocking=True)
        with self._precision.autocast(self.model, self.device):
            logits = self.model(input_ids=samples[:, :-1], use_cache=False).logits
        return functional.cross_entropy(
            logits.float().flatten(0, 1), samples[:, 1:].flatten(), reduction=reduction
        )

    def _clip(self) -> Tensor:
        """Unscale and clip the gradients; returns their norm over all ranks."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self.loss_scale.scale != 1.0:
            torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], 1 / self.loss_scale.scale)
        norm = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self._max_grad_norm:
            nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, norm)
        return norm

    def _figures(self, loss: Tensor, grad_norm: Tensor) -> StepResult:
        """Average the loss over ranks and copy both figures to the host; the step's only device synchronization."""
        if in_group():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return StepResult(*torch.stack((loss, grad_norm)).tolist())

    @torch.no_grad()
    def activation_norms(self, samples: Tensor) -> list[float]:
        """Root mean square of the hidden state before the first layer and after each layer, over one micro-batch."""
        samples = samples[: self.micro_batch_size, :-1].to(self.device)
        with self._precision.autocast(self.model, self.device):
            states: Sequence[Tensor] = self.model(
                input_ids=samples, use_cache=False, output_hidden_states=True
            ).hidden_states
        return torch.stack([state.float().square().mean().sqrt() for state in states]).tolist()
