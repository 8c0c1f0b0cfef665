from collections import deque

import pytest

from peers.net.overlay import FULL_MESH, Ring


def hops_from(start, peer_ids):
    """How many hops a message from `start` takes to each peer."""
    ring, hops, left = Ring(peer_ids), {start: 0}, deque([start])
    while left:
        here = left.popleft()
        for neighbour in ring.neighbours_of(here):
            if neighbour not in hops:
                hops[neighbour] = hops[here] + 1
                left.append(neighbour)
    return hops


@pytest.mark.parametrize("count", [1, 2, 5, FULL_MESH])
def test_few_have_a_channel_with_everybody(count):
    peer_ids = {f"p{number}" for number in range(count)}
    assert all(Ring(peer_ids).neighbours_of(peer_id) == peer_ids - {peer_id} for peer_id in peer_ids)


@pytest.mark.parametrize(
    ("count", "num_neighbours", "num_hops"), [(33, 10, 3), (50, 10, 3), (256, 15, 4), (1000, 18, 6)]
)
def test_many_have_a_channel_with_few_and_reach_everybody_in_a_few_hops(count, num_neighbours, num_hops):
    peer_ids = {f"p{number}" for number in range(count)}
    assert max(len(Ring(peer_ids).neighbours_of(peer_id)) for peer_id in peer_ids) == num_neighbours
    hops = hops_from("p0", peer_ids)
    assert hops.keys() == peer_ids
    assert max(hops.values()) == num_hops


def test_neighbours_are_each_others_neighbours_whoever_works_it_out():
    peer_ids = {f"p{number}" for number in range(50)}
    ring = Ring(peer_ids)
    for peer_id in peer_ids:
        without_it = Ring(peer_ids - {peer_id})
        assert ring.neighbours_of(peer_id) == without_it.with_({peer_id}).neighbours_of(peer_id)
        assert all(peer_id in ring.neighbours_of(other) for other in ring.neighbours_of(peer_id))


@pytest.mark.parametrize(("count", "num_hops"), [(33, 4), (34, 4), (50, 4), (256, 7), (1000, 8)])
def test_what_one_says_comes_to_everybody_once_over_channels_that_there_are(count, num_hops):
    peer_ids = sorted(f"p{number}" for number in range(count))
    ring = Ring(peer_ids)
    for origin in peer_ids[:3]:
        hops = dict.fromkeys(ring.neighbours_of(origin), 1)
        left = deque(hops)
        while left:
            teller = left.popleft()
            told = ring.told_by(teller, origin)
            assert told <= ring.neighbours_of(teller) and not told & hops.keys()
            hops |= dict.fromkeys(told, hops[teller] + 1)
            left += told
        assert hops.keys() == set(peer_ids) - {origin}
        assert max(hops.values()) == num_hops
