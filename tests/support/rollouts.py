"""What tests check of any inference server: its log-probabilities, and that it refuses invalid weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from diloco.rl.server_client import Sampling, Written
from diloco.rl.tasks import Example, Task, weighted
from diloco.rl.weights import Label, State, _changes, _saved, digest_of, packed

PROMPTS = [[1, 2, 3], [4, 5]]
SAMPLING = Sampling(max_tokens=5)
CLOSE = 1e-4


def packed_changes(old: State, new: State, label: Label) -> bytes:
    """A patch, even if all weights would be shorter."""
    return _saved(_changes(old, new), label)


def difference(model: nn.Module, written: Sequence[Written]) -> float:
    """The largest difference between a server's log-probabilities of its completions and the model's."""
    worst = 0.0
    for prompt, one in zip(PROMPTS, written, strict=True):
        for ids, logprobs in zip(one.token_ids, one.logprobs, strict=True):
            with torch.no_grad():
                values = torch.log_softmax(model(torch.tensor([prompt + ids])).logits[0].float(), -1)
            ours = [float(values[len(prompt) - 1 + place, token]) for place, token in enumerate(ids)]
            worst = max(worst, *(abs(a - b) for a, b in zip(ours, logprobs, strict=True)))
    return worst


def train_a_little(model: nn.Module, seed: int, *, share: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mask = torch.rand(parameter.shape, generator=generator) < share
            parameter.add_(mask * torch.randn(parameter.shape, generator=generator) * 0.1)


def refused_blobs(state: Mapping[str, Tensor]) -> list[tuple[bytes, str]]:
    """Blobs that a server must refuse, each with a pattern of the error message."""
    label = Label(digest=digest_of(state))
    without_k = {name: tensor for name, tensor in state.items() if "layers.0.self_attn.k_proj" not in name}
    turned = {
        name: tensor.t() if "layers.1.mlp.up_proj" in name else tensor for name, tensor in state.items()
    }
    spoilt = {name: torch.full_like(t, torch.nan) if "norm" in name else t for name, t in state.items()}
    other = {name: tensor + 1 for name, tensor in state.items()}
    contiguous = {name: tensor.contiguous() for name, tensor in turned.items()}
    return [
        (packed(state, label)[:-4], "it does not hold weights in the expected format"),
        (packed(contiguous, label), r"layers\.1\.mlp\.up_proj\.weight has the shape"),
        (packed(without_k, label), r"k_proj\.weight is missing"),
        (packed(spoilt, label), "values that are not finite"),
        (packed(other, label), "their digest differs"),
        (packed_changes(state, other, replace(label, base="0" * 64)), "the patch is for other weights"),
    ]


def reward_of(task: Task, text: str, example: Example) -> float:
    return weighted(task, task.scores(example, [text]))
