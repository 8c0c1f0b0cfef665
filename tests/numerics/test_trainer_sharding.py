"""Two sharded ranks compute what one rank computes, and micro-batches what the whole batch gives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from diloco.options.flags import TrainConfig
from diloco.outer.exchange import SharedWeights
from diloco.outer.layout import layout_of, pieces_of
from diloco.outer.world import World, barrier, device_mesh
from diloco.train.inner import InnerLoop
from diloco.train.optim import optimizer_of
from diloco.train.sharding import Precision, full_state, prepare
from tests.support.exhaustive import exhaustive_but
from tests.support.tiny_model import samples, tiny_llama
from tests.support.torch_ranks import Ranks

CPU = torch.device("cpu")
NUM_STEPS, BATCH = 4, 12


@dataclass(frozen=True)
class Case:
    strategy: str = "FULL_SHARD"
    num_nodes: int = 1
    precision: torch.dtype = torch.float32
    checkpointing: bool = False
    optimizer: str = "adamw"


def loop_of(case: Case, world: World, *, micro_batch_size: int = BATCH) -> InnerLoop:
    model = tiny_llama(tied=True)
    precision = Precision(case.precision)
    config = TrainConfig(sharding_strategy=case.strategy, activation_checkpointing=case.checkpointing)
    mesh = device_mesh(world, CPU, case.strategy) if world.num_ranks > 1 else None
    prepare(model, config, precision=precision, device=CPU, mesh=mesh)
    return InnerLoop(
        model,
        optimizer_of(case.optimizer, model, weight_decay=0.1),
        precision=precision,
        device=CPU,
        micro_batch_size=micro_batch_size,
        max_grad_norm=0.5,
    )


def trained(
    world: World, case: Case, micro_batch_size: int = BATCH
) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """Loss and gradient norm of each step, and the weights after them."""
    loop = loop_of(case, world, micro_batch_size=micro_batch_size)
    figures = []
    for step in range(NUM_STEPS):
        result = loop.step(samples(BATCH, seed=step)[world.rank :: world.num_ranks], lr=1e-2)
        figures.append((result.loss, result.grad_norm))
    state = full_state(loop.model)
    return figures, torch.cat([state[name].flatten() for name in sorted(state)]) if state else torch.empty(0)


def exchanged(world: World, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first node's ranks write in all, and what they write after they have read twice those values."""
    loop = loop_of(case, world)
    layout = layout_of(loop.model)
    memory = torch.zeros(layout.sizes)
    pieces = pieces_of(loop.model, layout)
    SharedWeights(pieces, [memory], []).put()
    barrier()
    # The sum joins the parts that the ranks wrote, as one shared memory would.
    torch.distributed.all_reduce(memory)
    written = memory.clone()
    visible = memory * 2 if world.node == 0 else torch.full_like(memory, float("nan"))
    copy = torch.zeros(layout.sizes)
    weights = SharedWeights(pieces, [copy], [visible], world.num_nodes)
    weights.take()
    weights.put()
    torch.distributed.all_reduce(copy)
    return written, copy


CASES = [
    Case(),
    Case(strategy="NO_SHARD"),
    Case(num_nodes=2),
    Case(checkpointing=True),
    Case(optimizer="muon"),
    Case(optimizer="muon", strategy="NO_SHARD"),
    Case(optimizer="muon", num_nodes=2),
]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("case", exhaustive_but((CASES[0], CASES[4], CASES[6]), CASES), ids=str)
def test_two_ranks_train_like_one(ranks, case):
    (figures, weights), (their_figures, _) = ranks.run(trained, case, num_nodes=case.num_nodes)
    expected_figures, expected_weights = trained(World(), Case(optimizer=case.optimizer))
    assert figures == their_figures
    assert torch.tensor(figures) == pytest.approx(torch.tensor(expected_figures), abs=1e-5)
    assert torch.allclose(weights, expected_weights, atol=1e-5)


@pytest.mark.exhaustive
def test_three_ranks_that_share_matrices_unevenly_train_by_muon_like_one():
    case = Case(optimizer="muon")
    with Ranks(3) as three:
        figures, weights = three.run(trained, case)[0]
    expected_figures, expected_weights = trained(World(), case)
    assert torch.tensor(figures) == pytest.approx(torch.tensor(expected_figures), abs=1e-5)
    assert torch.allclose(weights, expected_weights, atol=1e-5)


@pytest.mark.parametrize("case", exhaustive_but(CASES[:1], CASES[:3]), ids=str)
def test_two_ranks_exchange_the_same_bits_as_one(ranks, case):
    model = tiny_llama(tied=True)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for written, copy in ranks.run(exchanged, case, num_nodes=case.num_nodes):
        assert torch.equal(written, expected)
        assert torch.equal(copy, expected * 2)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision_stays_near_full_precision_on_one_rank_and_two(ranks, precision):
    exact, _ = trained(World(), Case())
    case = Case(precision=precision)
    for figures in (trained(World(), case)[0], ranks.run(trained, case)[0][0]):
        assert torch.tensor(figures) == pytest.approx(torch.tensor(exact), abs=0.05)


@pytest.mark.parametrize("micro_batch_size", [1, 4, 5])
def test_a_batch_in_parts_counts_like_the_batch_at_once(micro_batch_size):
    whole, whole_weights = trained(World(), Case())
    parts, weights = trained(World(), Case(), micro_batch_size)
    assert torch.tensor(parts) == pytest.approx(torch.tensor(whole), abs=1e-5)
    assert torch.allclose(weights, whole_weights, atol=1e-5)


@pytest.mark.exhaustive
def test_two_nodes_of_two_ranks_train_on_a_batch_in_parts_like_one_rank_on_the_batch_at_once():
    with Ranks(4) as four:
        figures, weights = four.run(trained, Case(), 1, num_nodes=2)[0]
        assert four.run(whole_gradients_between_micro_batches, Case(), 1, num_nodes=2) == [[0] * 3] * 4
    expected_figures, expected_weights = trained(World(), Case())
    assert torch.tensor(figures) == pytest.approx(torch.tensor(expected_figures), abs=1e-5)
    assert torch.allclose(weights, expected_weights, atol=1e-5)


def whole_gradients_between_micro_batches(world: World, case: Case, micro_batch_size: int) -> list[int]:
    """After each micro-batch: the bytes of gradients, not yet scattered, that this rank keeps."""
    loop = loop_of(case, world, micro_batch_size=micro_batch_size)
    kept = []

    def count(_done: int, _total: int) -> None:
        parameters = [
            parameter
            for module in loop.model.modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
            for parameter in group.fsdp_params
        ]
        gradients = [p.unsharded_accumulated_grad for p in parameters]
        gradients += [p.unsharded_param.grad for p in parameters if hasattr(p, "_unsharded_param")]
        kept.append(sum(gradient.nbytes for gradient in gradients if gradient is not None))

    loop.step(samples(BATCH, seed=0)[world.rank :: world.num_ranks], lr=1e-2, on_micro_batch=count)
    return kept


def test_between_micro_batches_no_rank_keeps_the_gradients_of_the_whole_model(ranks):
    assert ranks.run(whole_gradients_between_micro_batches, Case(), 3) == [[0, 0]] * 2


@pytest.mark.parametrize("case", [Case(), Case(strategy="NO_SHARD"), Case(num_nodes=2)], ids=str)
def test_two_ranks_train_on_a_batch_in_parts_like_one_on_the_batch_at_once(ranks, case):
    (figures, weights), (their_figures, _) = ranks.run(trained, case, 4, num_nodes=case.num_nodes)
    expected_figures, expected_weights = trained(World(), Case())
    assert figures == their_figures
    assert torch.tensor(figures) == pytest.approx(torch.tensor(expected_figures), abs=1e-5)
    assert torch.allclose(weights, expected_weights, atol=1e-5)
