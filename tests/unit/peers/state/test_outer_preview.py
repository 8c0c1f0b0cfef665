import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from peers.state.header import STATE_CHUNK_NUMEL
from peers.state.outer_optimizer import OuterOptimizer
from peers.state.outer_state import OuterState
from peers.state.preview import Preview

SIZES = (2 * STATE_CHUNK_NUMEL + 300_001, 0, 5)


def state_and_average(fragment):
    generator = torch.Generator().manual_seed(3)
    state = OuterState.initial([torch.randn(size, generator=generator) for size in SIZES])
    return state, torch.randn(SIZES[fragment], generator=generator)


@pytest.mark.parametrize("fragment", range(len(SIZES)))
def test_a_preview_stores_nothing_and_says_what_the_commit_arrives_at(fragment):
    state, average = state_and_average(fragment)
    optimizer = OuterOptimizer(lr=0.7, momentum=0.9)
    optimizer.commit(state, 0, torch.ones(SIZES[0]))
    before, values = state.header, [t.clone() for t in (*state.anchor, *state.momentum, average)]
    with Preview(optimizer, state, fragment, average) as preview:
        preview.settled(slice(0, SIZES[fragment]))
        header = preview.header()
    assert state.header == before
    assert all(
        torch.equal(a, b) for a, b in zip(values, (*state.anchor, *state.momentum, average), strict=True)
    )
    optimizer.commit(state, fragment, average)
    assert state.header == header and state.is_intact()


def test_sums_may_settle_in_any_order_from_any_thread_while_the_rest_is_still_unknown():
    state, average = state_and_average(0)
    optimizer = OuterOptimizer(lr=0.7, momentum=0.9)
    arriving = torch.full_like(average, torch.nan)
    bounds = sorted(random.Random(1).sample(range(1, SIZES[0]), 40))
    parts = [slice(*both) for both in zip([0, *bounds], [*bounds, SIZES[0]], strict=True)]
    parts.append(slice(bounds[3], bounds[3]))
    random.Random(2).shuffle(parts)

    def arrive(part):
        arriving[part] = average[part]
        preview.settled(part)

    with Preview(optimizer, state, 0, arriving) as preview:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(arrive, parts))
        header = preview.header()
    optimizer.commit(state, 0, average)
    assert state.header == header


def test_there_is_no_preview_of_sums_that_are_not_all_there():
    state, average = state_and_average(0)
    with Preview(OuterOptimizer(lr=0.7, momentum=0.9), state, 0, average) as preview:
        preview.settled(slice(0, SIZES[0] - 1))
        with pytest.raises(AssertionError, match="settled"):
            preview.header()
