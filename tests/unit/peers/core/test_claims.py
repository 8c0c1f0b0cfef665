"""World ranks without a coordinator: which rank a peer claims, and which one the certificates give it."""

from __future__ import annotations

import pytest

from peers.core import effects
from peers.core.plans import MAX_CLAIMED_RANK, claim_of
from tests.unit.peers.core.driven import Driven
from tests.unit.peers.core.made import OFFER, commit, genesis, status
from tests.unit.peers.core.swarm import Swarm

GENESIS = genesis("abc")
"""Its members have ranks 0, 1 and 2."""


def newcomer(name: str = "n") -> Driven:
    return Driven(name, has_worker=False)


def test_a_newcomer_claims_the_lowest_rank_that_neither_the_roster_nor_anybody_else_has():
    n = newcomer()
    n.announce(GENESIS, "ab")
    n.announce(None, "x", "waiting", world_rank=3)
    n.run(2)
    assert n.peer.world_rank == -1, "others may be there who have not been heard yet"
    n.run(2)
    # Rank 2 belongs to `c`, a member that is away.
    assert n.peer.world_rank == 4


def test_who_comes_back_gets_the_rank_that_the_roster_has_for_it():
    c = newcomer("c")
    c.announce(GENESIS, "ab")
    c.run(2)
    assert c.peer.world_rank == 2


def test_newcomers_that_come_at_once_claim_ranks_in_the_order_of_their_peer_ids():
    ranks = {}
    for name in "xyz":
        peer = newcomer(name)
        peer.announce(GENESIS, "abc")
        peer.announce(None, set("xyz") - {name}, "waiting")
        peer.run(4)
        ranks[name] = peer.peer.world_rank
    assert ranks == {"x": 3, "y": 4, "z": 5}


def test_the_first_of_a_run_claim_ranks_from_zero():
    b = newcomer("b")
    b.announce(None, "a", "waiting", offer=OFFER)
    b.run(4)
    assert b.peer.world_rank == 1


def test_a_run_that_nobody_proves_holds_up_no_claim_for_long():
    n = newcomer()
    n.mute.add("x")
    n.announce(GENESIS, "x")
    n.run(3.5)
    assert n.peer.world_rank == -1
    n.run(3)
    assert n.peer.world_rank == 0


def test_a_claim_that_a_certificate_gives_to_another_is_given_up_before_anything_is_trained():
    n = Driven("n")
    n.peer.world_rank = 3
    newer = commit(GENESIS, "abcx")
    assert newer.plan.roster[-1].world_rank == 3
    n.come_to((newer,), "abcx")
    assert n.peer.world_rank == 4
    assert any("is another peer's" in effect.text for effect in n.effects if isinstance(effect, effects.Tell))


def test_a_newcomer_that_has_claimed_no_rank_yet_claims_one_before_anything_is_trained():
    n = Driven("n")
    assert n.peer.world_rank == -1
    n.come_to((commit(GENESIS, "abc"),), "abc")
    (begin,) = n.of(effects.Answer)
    assert begin.how == "begin"
    assert n.peer.world_rank == 3


def test_who_was_taken_off_and_comes_back_does_not_keep_a_rank_that_is_another_peers_by_now():
    swarm = Swarm("abc", train_s=2.0)
    assert swarm.reach(2, 60)
    lost = next(name for name in "abc" if swarm[name].machine.world_rank == 1)
    others = [name for name in "abcd" if name != lost]
    swarm.partition(lost, others)
    swarm[lost].hang()
    assert swarm.run_until(
        lambda: lost not in {m.peer_id for m in swarm[others[0]].machine.certificate.plan.roster}, 200
    )
    swarm.start("d")
    assert swarm.run_until(lambda: swarm["d"].machine.world_rank == 1 and swarm["d"].machine.head, 60)
    swarm.heal_partition(lost, others)
    assert swarm.run_until(lambda: len(swarm.heads()) == 1 and swarm[lost].machine.world_rank != 1, 200)
    ranks = [node.machine.world_rank for node in swarm.live.values()]
    assert len(set(ranks)) == 4


@pytest.mark.parametrize(
    ("roster", "others", "claim"),
    [
        ({}, {}, 0),
        ({"a": 0, "b": 2}, {}, 1),
        ({"a": 0}, {"a": -1, "b": -1}, 2),
        ({"a": 0}, {"a": 0, "z": -1}, 1),
        # Many strangers without a rank do not push the claim beyond the largest that is allowed.
        ({}, {f"b{n}": -1 for n in range(5000)}, MAX_CLAIMED_RANK),
    ],
)
def test_what_is_claimed(roster, others, claim):
    live = [(peer_id, status(world_rank=rank)) for peer_id, rank in others.items()]
    assert claim_of("n", roster, live) == claim
