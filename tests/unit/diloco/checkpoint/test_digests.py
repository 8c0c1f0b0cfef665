"""The ranks of a peer divide the files of a checkpoint: each is read once, the daemon's on its own node."""

from __future__ import annotations

from collections import Counter

import pytest

from diloco.checkpoint.digests import share_of
from diloco.checkpoint.shards import file_of, rank_of
from diloco.outer.world import World

OUTER = ["outer.json", "outer.safetensors", "residuals.safetensors"]
OF_TRAINER = ["model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"]


@pytest.mark.parametrize(("num_ranks", "num_local"), [(1, 1), (3, 3), (8, 8), (4, 2)])
@pytest.mark.parametrize("num_saved", [0, 1, 8])
def test_each_file_is_read_once_and_by_a_rank_that_has_it(num_ranks, num_local, num_saved):
    names = OUTER + OF_TRAINER + [file_of(rank) for rank in range(num_saved)]
    worlds = [
        World(rank=rank, num_ranks=num_ranks, local_rank=rank % num_local, num_local_ranks=num_local)
        for rank in range(num_ranks)
    ]
    shares = [share_of(names, world) for world in worlds]
    assert Counter(name for share in shares for name in share) == Counter(names)
    others = [[name for name in share if rank_of(name) is None] for share in shares]
    assert not any(others[num_local:])
    most, least = max(map(len, others[:num_local])), min(map(len, others[:num_local]))
    assert most - least <= 1
