"""The inner optimizer and its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

BETAS = (0.9, 0.95)
FLOOR = 0.1
"""Where the cosine ends, as a fraction of the peak."""


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """For the nominal step after `step` others: linear warm-up to the peak, then a cosine down to FLOOR of it.

    Only the nominal step counts, so joiners, slow peers and resumed runs share one schedule.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def adamw(model: nn.Module, *, weight_decay: float, betas: tuple[float, float] = BETAS) -> torch.optim.AdamW:
    """AdamW that decays matrices only; the learning rate is set before every step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=fused)


def set_learning_rate(groups: Iterable[dict[str, object]], lr: float) -> None:
    for group in groups:
        group["lr"] = lr
