from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from diloco.errors import UserError
from diloco.outer.world import (
    World,
    of_first_of_node,
    on_every_rank,
    on_rank_zero,
    scattered,
    summed,
    world_of_worker,
)
from tests.support.torch_ranks import Ranks


def test_without_torchrun_a_process_is_alone():
    world = World.from_environment({})
    assert (world.num_ranks, world.num_nodes, world.is_main) == (1, 1, True)


def test_torchruns_variables_place_a_rank():
    world = World.from_environment(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    )
    assert (world.node, world.num_nodes, world.is_main) == (1, 2, False)


def test_nodes_of_different_sizes_are_refused():
    with pytest.raises(UserError, match="3 ranks are not a multiple of the 2"):
        World.from_environment({"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})


def test_cuda_without_enough_devices_is_refused():
    with pytest.raises(UserError, match="--device cpu"):
        World(num_local_ranks=1000, num_ranks=1000).device("cuda")


def test_ranks_without_a_process_group_are_refused_before_each_takes_itself_for_the_first():
    assert world_of_worker({"WORLD_SIZE": "1"}).is_main
    with pytest.raises(
        UserError, match=r"2 training .* has 1: call .*init_process_group .*--nproc-per-node 1"
    ):
        world_of_worker({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})


def test_alone_rank_zero_is_this_one():
    assert on_rank_zero(lambda: 7) == 7
    assert on_every_rank(lambda: 7) == scattered(lambda: [[7]]) == [7]
    assert summed(3) == 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def shared(world):
    heard = on_rank_zero(lambda: f"from {world.rank}")
    try:
        on_rank_zero(refuse)
    except UserError as error:
        return heard, str(error), summed(world.rank + 1)


def of_node(world):
    return of_first_of_node(world, world.rank)


def test_ranks_of_a_node_get_the_value_of_its_first(ranks):
    assert ranks.run(of_node) == [0, 0]
    assert ranks.run(of_node, num_nodes=2) == [0, 1]


def test_the_only_rank_of_a_node_is_its_first_whatever_it_is_called():
    assert World(local_rank=1).is_first_of_node
    assert not World(rank=3, local_rank=1, num_ranks=4, num_local_ranks=2).is_first_of_node


def refuse():
    raise UserError("taken")


def test_every_rank_takes_rank_zeros_branch_also_when_it_fails(ranks):
    assert ranks.run(shared) == [("from 0", "taken", 3)] * 2


def dealt_out(world):
    own = scattered(lambda: [f"from {world.rank} to {rank}" for rank in range(world.num_ranks)])
    try:
        scattered(refuse)
    except UserError as error:
        return own, str(error), summed(1)


def test_every_rank_gets_what_rank_zero_has_for_it_or_its_error(ranks):
    assert ranks.run(dealt_out) == [(f"from 0 to {rank}", "taken", 2) for rank in range(2)]


def all_did(world):
    done = on_every_rank(lambda: world.rank)
    try:
        on_every_rank(refuse if world.rank == 1 else lambda: 7)
    except UserError as error:
        return done, str(error), summed(1)


def test_every_rank_gets_what_all_did_or_the_error_of_one(ranks):
    assert ranks.run(all_did) == [([0, 1], "taken", 2)] * 2


def told_without_a_cpu_backend(world, path):
    """The default group is one that carries CUDA tensors alone, as NCCL does, and is not the first of its process."""
    told = shared(world)
    dist.destroy_process_group()
    dist.init_process_group(
        "cuda:gloo", init_method=f"file://{path}", rank=world.rank, world_size=world.num_ranks
    )
    return told == shared(world), all_did(world)


def test_a_training_loop_may_have_a_group_that_carries_no_cpu_tensors(tmp_path):
    with Ranks(2) as ranks:
        assert ranks.run(told_without_a_cpu_backend, tmp_path / "store") == [(True, ([0, 1], "taken", 2))] * 2
