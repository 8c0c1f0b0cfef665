"""The harm that one hostile peer of five can do to a training; the peers average by the real reduction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.convergence.reduction import Member, average
from peers.core.weights import Aggregation
from peers.reduce.residuals import Residuals
from peers.state.outer_optimizer import OuterOptimizer
from peers.state.outer_state import OuterState

NUM_PEERS, EPOCHS, LOCAL_STEPS, TOKENS = 5, 15, 8, 100
HOSTILE = NUM_PEERS - 1
HELD_OUT = 10**9

Attack = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(anchor, honest weights, this peer's first honest pseudo-gradient) -> the weights that it submits instead."""

ATTACKS: dict[str, Attack] = {
    "a thousand times as long": lambda anchor, local, first: anchor + 1000 * (local - anchor),
    "flipped": lambda anchor, local, first: anchor - (local - anchor),
    "stale": lambda anchor, local, first: anchor - first,
    "honest": lambda anchor, local, first: local,
}


@pytest.fixture(scope="module")
def undisturbed() -> float:
    return final_loss(NUM_PEERS - 1)


@pytest.mark.parametrize(
    ("rule", "attack", "tokens"),
    [
        ("clip", "a thousand times as long", TOKENS),
        ("clip", "honest", 2**39),
        ("trimmed-mean", "flipped", TOKENS),
        ("trimmed-mean", "stale", TOKENS),
        ("trimmed-mean", "a thousand times as long", 2**39),
        ("centered-clip", "flipped", TOKENS),
        ("centered-clip", "stale", TOKENS),
        ("centered-clip", "a thousand times as long", 2**39),
    ],
)
def test_one_hostile_peer_of_five_leaves_the_loss_where_it_would_be_without_it(
    undisturbed, rule, attack, tokens
):
    loss = final_loss(NUM_PEERS, Aggregation(rule=rule), ATTACKS[attack], tokens)
    assert loss < 1.01 * undisturbed


@pytest.mark.parametrize(
    ("rule", "attack", "tokens"),
    [("mean", "flipped", 2**39), ("clip", "flipped", 2**39)],
)
def test_a_rule_that_does_not_stop_an_attack_is_not_said_to(undisturbed, rule, attack, tokens):
    # The hostile peer weighs as much as all others together, as --hv.max-weight may allow.
    aggregation = Aggregation(rule=rule, max_weight=NUM_PEERS - 1)
    loss = final_loss(NUM_PEERS, aggregation, ATTACKS[attack], tokens)
    assert not loss < 1.01 * undisturbed


def final_loss(
    num_peers: int,
    aggregation: Aggregation | None = None,
    attack: Attack = ATTACKS["honest"],
    hostile_tokens: int = TOKENS,
) -> float:
    """The held-out loss after a training whose fifth peer, if any, is hostile; not finite if the training diverged."""
    anchor = nn.utils.parameters_to_vector(fresh_model().parameters()).detach().clone()
    state, optimizer = OuterState.initial([anchor]), OuterOptimizer(lr=0.7, momentum=0.5)
    residuals = [Residuals(anchor.numel()) for _ in range(num_peers)]
    first = torch.zeros_like(anchor)
    for epoch in range(EPOCHS):
        anchor = state.anchor[0]
        weights = [trained(anchor, rank, epoch) for rank in range(num_peers)]
        if num_peers == NUM_PEERS:
            first = anchor - weights[HOSTILE] if epoch == 0 else first
            weights[HOSTILE] = attack(anchor, weights[HOSTILE], first)
        members = [
            Member(local, hostile_tokens if rank == HOSTILE else TOKENS, kept, torch.empty_like(anchor))
            for rank, (local, kept) in enumerate(zip(weights, residuals, strict=True))
        ]
        average(anchor, members, codec="fp32", decay=1.0, aggregation=aggregation or Aggregation())
        optimizer.commit(state, 0, members[0].result)
    with torch.no_grad():
        return float(loss_of(loaded(state.anchor[0]), *samples(HELD_OUT, 8192)))


def fresh_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Linear(6, 3)


def loaded(weights: Tensor) -> nn.Module:
    model = fresh_model()
    nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    return model


def samples(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Samples of the task that all peers learn. About half of the held-out loss is noise, which cannot be learned."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, inputs[:, :3] - inputs[:, 3:] + 0.5 * torch.randn(count, 3, generator=generator)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (model(inputs) - targets).square().mean()


def trained(anchor: Tensor, rank: int, epoch: int) -> Tensor:
    model = loaded(anchor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(LOCAL_STEPS):
        optimizer.zero_grad()
        loss_of(model, *samples(1000 * rank + LOCAL_STEPS * epoch + step, 64)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()
