from collections import deque

import pytest

from peers.net.overlay import FULL_MESH, neighbours_of


def hops_from(start, peer_ids):
    """How many hops what `start` says takes to each."""
    hops, left = {start: 0}, deque([start])
    while left:
        here = left.popleft()
        for neighbour in neighbours_of(here, peer_ids):
            if neighbour not in hops:
                hops[neighbour] = hops[here] + 1
                left.append(neighbour)
    return hops


@pytest.mark.parametrize("count", [1, 2, 5, FULL_MESH])
def test_few_have_a_channel_with_everybody(count):
    peer_ids = {f"p{number}" for number in range(count)}
    assert all(neighbours_of(peer_id, peer_ids) == peer_ids - {peer_id} for peer_id in peer_ids)


@pytest.mark.parametrize(
    ("count", "num_neighbours", "num_hops"), [(33, 10, 3), (50, 10, 3), (256, 15, 4), (1000, 18, 6)]
)
def test_many_have_a_channel_with_few_and_reach_everybody_in_a_few_hops(count, num_neighbours, num_hops):
    peer_ids = {f"p{number}" for number in range(count)}
    assert max(len(neighbours_of(peer_id, peer_ids)) for peer_id in peer_ids) == num_neighbours
    hops = hops_from("p0", peer_ids)
    assert hops.keys() == peer_ids
    assert max(hops.values()) == num_hops


def test_neighbours_are_each_others_neighbours_whoever_works_it_out():
    peer_ids = {f"p{number}" for number in range(50)}
    for peer_id in peer_ids:
        assert neighbours_of(peer_id, peer_ids) == neighbours_of(peer_id, peer_ids - {peer_id})
        assert all(peer_id in neighbours_of(other, peer_ids) for other in neighbours_of(peer_id, peer_ids))
