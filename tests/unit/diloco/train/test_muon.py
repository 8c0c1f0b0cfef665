from __future__ import annotations

import math

import pytest
import torch

from diloco.train.muon import MOMENTUM, orthogonalized
from diloco.train.optim import ADAMW_SHARE, muon, set_learning_rate
from tests.support.tiny_model import samples, tiny_llama


def gradients(model, seed):
    batch = samples(4, seed=seed)
    model(input_ids=batch[:, :-1], labels=batch[:, 1:]).loss.backward()


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8), (1, 5)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ orthogonalized(matrix[None])[0] @ v.T
    assert torch.allclose(found, torch.diag(found.diag()), atol=1e-4)
    assert found.diag().min() > 0.6 and found.diag().max() < 1.3


def test_a_matrix_of_zeros_has_no_direction():
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


def test_a_batch_gives_what_each_of_its_matrices_gives_alone():
    matrices = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([orthogonalized(matrix[None]) for matrix in matrices])
    assert torch.allclose(orthogonalized(matrices), alone, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_hidden_matrices_go_to_muon_and_embeddings_head_and_norms_to_adamw(tied):
    model = tiny_llama(tied=tied)
    matrices, decayed, kept = muon(model, weight_decay=0.5).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)].rsplit(".", 2)[-2] for p in matrices["params"]} == {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert [names[id(p)] for p in decayed["params"]] == [
        "model.embed_tokens.weight",
        *([] if tied else ["lm_head.weight"]),
    ]
    assert all(p.ndim == 1 for p in kept["params"])
    assert len(names) == sum(len(group["params"]) for group in (matrices, decayed, kept))
    assert [group["weight_decay"] for group in (matrices, decayed, kept)] == [0.5, 0.5, 0.0]


def test_one_scheduled_rate_is_muons_and_a_fifth_of_it_adamws():
    optimizer = muon(tiny_llama(), weight_decay=0.0)
    set_learning_rate(optimizer.param_groups, 0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02 * ADAMW_SHARE, 0.02 * ADAMW_SHARE]


def test_steps_are_those_of_torchs_muon_and_adamw_beside_each_other(monkeypatch):
    # torch's iterates in bf16, which on matrices so small is off by a tenth of a step.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    ours, theirs = tiny_llama(), tiny_llama()
    optimizer, lr, decay = muon(ours, weight_decay=0.1), 0.02, 0.1
    set_learning_rate(optimizer.param_groups, lr)
    chosen = {id(p) for p in optimizer.param_groups[0]["params"]}
    matrices = [t for o, t in zip(ours.parameters(), theirs.parameters(), strict=True) if id(o) in chosen]
    # torch scales the rate by sqrt(max(1, rows / columns)), MuLoCo by sqrt(rows / columns).
    by_torch = [
        torch.optim.Muon([p], lr=lr * scale_beside_torchs(p), weight_decay=decay / scale_beside_torchs(p))
        for p in matrices
    ]
    rest = [p for p in theirs.parameters() if not any(p is matrix for matrix in matrices)]
    theirs_adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim == 2], "weight_decay": decay},
            {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=lr * ADAMW_SHARE,
        betas=(0.9, 0.95),
    )
    assert all(one.param_groups[0]["momentum"] == MOMENTUM for one in by_torch)
    for seed in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            gradients(model, seed)
        for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad.copy_(their.grad)
        optimizer.step()
        for one in (theirs_adamw, *by_torch):
            one.step()
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, their, rtol=0, atol=1e-6)


def scale_beside_torchs(parameter):
    return min(1.0, math.sqrt(parameter.shape[0] / parameter.shape[1]))
