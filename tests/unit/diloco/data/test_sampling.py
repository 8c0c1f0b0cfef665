from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from diloco.data.sampling import (
    Block,
    PromptSchedule,
    permuted,
    place_of,
    random_tokens,
    step_offsets,
    windows_of,
)
from peers.core.founding import genesis_of
from peers.core.plans import Entry, fault_in, plan_of
from peers.core.schedule import Schedule
from peers.protocol.messages import Offer
from tests.unit.peers.core.made import digest, signed, with_settings, work


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), number=st.integers(0, 2**40))
def test_every_pass_is_a_permutation(size, seed, number):
    places = np.arange(size, dtype=np.uint64)
    order = permuted(places, size=size, seed=seed, passes=np.full(size, number, dtype=np.uint64))
    assert sorted(order.tolist()) == list(range(size))


def test_passes_and_seeds_order_the_windows_differently():
    orders = {
        tuple(windows_of(np.arange(first, first + 500), num_windows=500, seed=seed).tolist())
        for seed in (1, 2)
        for first in (0, 500, 1000)
    }
    assert len(orders) == 6


def test_the_order_stays_what_it_was():
    # Peers of different versions must agree; a change here is a change of the run.
    order = windows_of(np.arange(100_000), num_windows=41_652, seed=42)
    assert order[:6].tolist() == [8205, 24210, 24843, 41341, 14273, 24600]
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:16] == "98a1d4265b6f1492"
    assert random_tokens(np.array([7]), length=5, vocab_size=264, seed=42).tolist() == [
        [160, 114, 230, 135, 6]
    ]


def test_neighbours_in_the_order_are_far_apart_in_the_text():
    order = windows_of(np.arange(10_000), num_windows=10_000, seed=0)
    steps = np.abs(np.diff(order))
    # In a random order the mean distance of neighbours is a third of the size.
    assert 3_000 < steps.mean() < 3_700


def test_random_tokens_depend_on_sample_and_place_only():
    together = random_tokens(np.arange(50), length=64, vocab_size=264, seed=3)
    alone = random_tokens(np.array([31]), length=64, vocab_size=264, seed=3)
    assert (together[31] == alone[0]).all()
    assert together.min() >= 0 and together.max() < 264
    assert len(np.unique(together, axis=0)) == 50


def test_ranks_share_a_step_without_overlap():
    parts = [step_offsets(3, total_batch_size=8, rank=rank, num_ranks=4) for rank in range(4)]
    assert [part.tolist() for part in parts] == [[24, 28], [25, 29], [26, 30], [27, 31]]


def test_an_offset_outside_the_block_is_refused():
    block = Block(epoch=0, world_rank=1, data_base=5)
    assert block.indices(np.array([0, 9]), 10).tolist() == [15, 24]
    with pytest.raises(ValueError, match="leave a block of 10"):
        block.indices(np.array([10]), 10)
    with pytest.raises(ValueError, match="leave a block of 10"):
        block.indices(np.array([-1]), 10)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_peers_that_come_and_go_never_train_a_window_twice_in_a_pass(data):
    """The swarm's rule: blocks of an epoch are numbered by world rank, and the commit skips all that were assigned."""
    num_windows = data.draw(st.integers(5, 60))
    samples_per_block = data.draw(st.integers(1, 12))
    data_base, ranks = 0, {0, 1}
    given_out: list[int] = []
    for epoch in range(data.draw(st.integers(1, 6))):
        joiners = data.draw(st.sets(st.integers(0, 5), max_size=2))
        leavers = data.draw(st.sets(st.sampled_from(sorted(ranks)), max_size=1))
        data_width = max(ranks | joiners) + 1
        for rank in ranks | joiners:
            # A joiner starts within its block, a leaver stops within it.
            first = samples_per_block // 2 if rank in joiners - ranks else 0
            last = samples_per_block // 2 if rank in leavers else samples_per_block
            block = Block(epoch=epoch, world_rank=rank, data_base=data_base)
            given_out += block.indices(np.arange(first, last), samples_per_block).tolist()
        data_base += data_width * samples_per_block
        ranks = (ranks | joiners) - leavers or {0}
    windows = windows_of(np.array(given_out, dtype=np.int64), num_windows=num_windows, seed=9)
    trained = [(index // num_windows, window) for index, window in zip(given_out, windows, strict=True)]
    assert len(trained) == len(set(trained))


def test_peers_that_are_all_there_train_every_window_once():
    num_windows, samples_per_block, num_peers = 60, 5, 3
    seen: list[int] = []
    for epoch in range(4):
        for rank in range(num_peers):
            block = Block(epoch=epoch, world_rank=rank, data_base=epoch * num_peers * samples_per_block)
            indices = block.indices(np.arange(samples_per_block), samples_per_block)
            seen += windows_of(indices, num_windows=num_windows, seed=1).tolist()
    assert sorted(seen) == list(range(num_windows))


def test_a_run_resumed_with_another_batch_size_goes_on_with_the_next_sample():
    certificate, given_out = None, []
    for batch in (8, 6, 16):
        manifest = {"total_batch_size": batch, "hv.local_steps": 3}
        samples_per_block = Schedule.of(manifest).samples_per_block
        core = with_settings(samples_per_block=samples_per_block)
        offer = Offer(anchor=digest("anchor"), momentum=digest("momentum"), certificate=certificate)
        certificate = signed(genesis_of(core, {name: (-1, offer) for name in "ab"}, 0))
        for _ in range(2):
            plan = certificate.plan
            for rank in (member.world_rank for member in plan.roster):
                block = Block(epoch=plan.epoch, world_rank=rank, data_base=plan.data_base)
                given_out += block.indices(np.arange(samples_per_block), samples_per_block).tolist()
            entries = {name: Entry(-1, work()) for name in "ab"}
            plan = plan_of(certificate, 0, entries, off=(), data_width=2, settings=core)
            assert fault_in(plan, certificate, off_allowed=(), data_width=2, settings=core) == ""
            certificate = signed(replace(certificate.body, plan=plan))
    assert given_out == list(range(2 * 2 * 3 * (8 + 6 + 16)))


@pytest.mark.parametrize(
    ("world_rank", "counts_samples", "first"),
    [(2, True, 50 + 2 * 12), (2, False, 52 * 12), (None, False, 12)],
)
def test_the_place_of_a_step_follows_from_what_the_swarm_counts(world_rank, counts_samples, first):
    position = SimpleNamespace(epoch=4, local_step=2, data_base=50)
    outer = SimpleNamespace(position=position, world_rank=world_rank, counts_samples=counts_samples)
    block, local_step = place_of(outer, 5, steps_per_epoch=3, samples_per_block=12)
    assert (block.indices(np.arange(1), 12).tolist(), local_step) == ([first], 2)


def schedule(*, batches_per_step=1, batches_per_generation=2, prompts_per_generation=4, seed=5):
    return PromptSchedule(
        seed=seed,
        steps_per_epoch=6,
        batches_per_step=batches_per_step,
        batches_per_generation=batches_per_generation,
        prompts_per_generation=prompts_per_generation,
    )


DEAL = schedule()


def epoch_of(rank, data_base, deal=DEAL):
    block = Block(epoch=0, world_rank=rank, data_base=data_base)
    batches = range(0, 6 * deal.batches_per_step, deal.batches_per_generation)
    places = [divmod(batch, deal.batches_per_step) for batch in batches]
    return [number for place in places for number in deal.numbers(block, *place, num_examples=96)]


def test_no_prompt_is_dealt_twice_in_a_pass():
    dealt = [number for base in (0, 48) for rank in range(4) for number in epoch_of(rank, base)]
    assert sorted(dealt) == list(range(96))


@pytest.mark.parametrize(
    ("per_step", "per_generation", "prompts"),
    [(8, 1, 1), (4, 1, 2), (4, 3, 6), (2, 1, 4), (2, 3, 12), (1, 1, 8)],
)
def test_peers_with_batches_of_any_size_are_dealt_different_prompts(per_step, per_generation, prompts):
    """Every peer trains on 8 prompts in each of 6 steps; some generate several times in a step."""
    deal = schedule(
        batches_per_step=per_step, batches_per_generation=per_generation, prompts_per_generation=prompts
    )
    other = schedule(batches_per_step=2, batches_per_generation=2, prompts_per_generation=8)
    assert sorted(epoch_of(0, 0, deal) + epoch_of(1, 0, other)) == list(range(96))


def test_a_generation_is_the_same_from_every_batch_that_it_serves():
    block = Block(epoch=3, world_rank=1, data_base=7)
    first, second = (DEAL.numbers(block, step, 0, num_examples=50) for step in (2, 3))
    assert first == second != DEAL.numbers(block, 4, 0, num_examples=50)
    deal = schedule(batches_per_step=2, batches_per_generation=3)
    middle = [deal.numbers(block, *place, num_examples=50) for place in ((1, 1), (2, 0), (2, 1))]
    assert middle[0] == middle[1] == middle[2] != deal.numbers(block, 1, 0, num_examples=50)


def test_another_seed_deals_other_prompts():
    block = Block(epoch=0, world_rank=0, data_base=0)
    numbers = [schedule(seed=seed).numbers(block, 0, 0, num_examples=10_000) for seed in (5, 6)]
    assert numbers[0] != numbers[1]
