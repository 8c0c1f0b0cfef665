"""The inner optimizers and their schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from diloco.train.muon import Muon

BETAS = (0.9, 0.95)
FLOOR = 0.1
"""The cosine's final value as a fraction of the peak."""
ADAMW_SHARE = 0.2
"""AdamW's learning rate as a fraction of Muon's. Chosen in a pilot study with a model of 870 thousand parameters."""


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """The rate of nominal step `step`, counted from 0: linear warm-up to the peak, then a cosine to FLOOR × peak.

    It depends on the nominal step only, so newcomers, slow peers and resumed runs share one schedule.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_of(
    name: str, model: nn.Module, *, weight_decay: float, betas: tuple[float, float] = BETAS
) -> torch.optim.Optimizer:
    """The optimizer that `--optimizer` names. Its learning rate is 0 until `set_learning_rate`."""
    return {"adamw": adamw, "muon": muon}[name](model, weight_decay=weight_decay, betas=betas)


def adamw(model: nn.Module, *, weight_decay: float, betas: tuple[float, float] = BETAS) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    return _adamw([p for p in model.parameters() if p.requires_grad], weight_decay, betas)


def muon(model: nn.Module, *, weight_decay: float, betas: tuple[float, float] = BETAS) -> Muon:
    """Muon for hidden matrices; AdamW for embeddings, the head, norms and biases, as in arXiv 2505.23725."""
    outside = {id(parameter) for parameter in _embeddings_and_head(model)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in outside]
    chosen = {id(parameter) for parameter in matrices}
    rest = _adamw([p for p in parameters if id(p) not in chosen], weight_decay, betas)
    for group in rest.param_groups:
        group["lr_scale"] = ADAMW_SHARE
    return Muon(matrices, rest, weight_decay=weight_decay)


def set_learning_rate(groups: Iterable[dict[str, Any]], lr: float) -> None:
    for group in groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _adamw(
    parameters: Sequence[nn.Parameter], weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=fused)


def _embeddings_and_head(model: nn.Module) -> list[nn.Parameter]:
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return [p for module in (*modules, head) if module is not None for p in module.parameters()]
