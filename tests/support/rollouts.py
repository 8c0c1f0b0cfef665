"""What tests ask of any inference server: the trainer's log-probabilities, and to refuse what it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from diloco.rl.fleet import Sampling, Written
from diloco.rl.weight_blobs import Label, digest_of, packed, packed_changes

PROMPTS = [[1, 2, 3], [4, 5]]
SAMPLING = Sampling(max_tokens=5)
CLOSE = 1e-4


def difference(model: nn.Module, written: Sequence[Written]) -> float:
    """The largest between what a server said of its completions and what the model says."""
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


def orders(state: Mapping[str, Tensor], served: int) -> list[tuple[bytes, int, str | None, str]]:
    """What must be refused, and by which words: (blob, version, sha256 to announce or none, words)."""
    label = Label(version=7, digest=digest_of(state))
    without_k = {name: tensor for name, tensor in state.items() if "layers.0.self_attn.k_proj" not in name}
    turned = {
        name: tensor.t() if "layers.1.mlp.up_proj" in name else tensor for name, tensor in state.items()
    }
    spoilt = {name: torch.full_like(t, torch.nan) if "norm" in name else t for name, t in state.items()}
    other = {name: tensor + 1 for name, tensor in state.items()}
    whole = packed(state, label)
    return [
        (whole, 7, "0" * 64, "its sha256 is not the one announced"),
        (whole[:-4], 7, None, "it is no blob of weights"),
        (packed(turned, label), 7, None, r"layers\.1\.mlp\.up_proj\.weight has the shape"),
        (packed(without_k, label), 7, None, r"k_proj\.weight is missing, a part of q_proj\+k_proj\+v_proj"),
        (packed(spoilt, label), 7, None, "values that are not finite"),
        (packed(other, label), 7, None, "their digest differs"),
        (
            packed(state, Label(version=1, digest=label.digest)),
            1,
            None,
            f"version 1 is stale: {served} is served",
        ),
        (packed_changes(state, other, Label(version=7, base=5)), 7, None, "the patch is for version 5"),
        (packed(state, Label(version=8)), 7, None, "part 0 is of version 8"),
    ]
