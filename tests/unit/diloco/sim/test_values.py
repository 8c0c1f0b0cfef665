"""States as sets of pieces, and signatures that only their owner can make."""

from __future__ import annotations

from dataclasses import replace

from diloco.sim.keys import KeyRing
from diloco.sim.values import NOTHING, apply_outcome, begin_from, digest, initial_state, reduce_parts
from peers.protocol.certificates import Body, Certificate, Member, Plan, Signature

PLAN = Plan(
    manifest=digest("manifest"),
    parent="",
    epoch=0,
    fragment=0,
    attempt=0,
    contributors=(),
    roster=(Member(peer_id="a", world_rank=0),),
    data_base=0,
    tokens=0,
)


def certificate_of(plan: Plan, anchor: str, momentum: str) -> Certificate:
    body = Body(plan=plan, anchor=anchor, momentum=momentum)
    return Certificate(body=body, signatures=(Signature(public_key=b"", signature=b""),))


def genesis():
    offered = initial_state("seed")
    return begin_from(offered, certificate_of(PLAN, offered.anchor, offered.momentum), 1.0)


def test_a_commit_brings_the_pieces_of_its_members_into_the_state():
    state = genesis()
    plan = Plan(
        **{name: getattr(PLAN, name) for name in PLAN.__struct_fields__} | {"parent": state.head, "epoch": 1}
    )
    outcome = reduce_parts(state, plan, {"a": frozenset({1, 2}), "b": frozenset({3})})
    after = apply_outcome(state, outcome, certificate_of(plan, outcome.anchor, outcome.momentum), 2.0)
    assert after.pieces == {1, 2, 3}
    assert after.epoch == 1 and after.parent is state
    assert state.leads_to(after) and state.leads_to(state) and not after.leads_to(state)


def test_members_in_the_same_state_get_the_same_digests_and_others_get_others():
    state, parts = genesis(), {"a": frozenset({1}), "b": frozenset({2})}
    one, same = reduce_parts(state, PLAN, parts), reduce_parts(state, PLAN, dict(reversed(parts.items())))
    assert (one.anchor, one.momentum) == (same.anchor, same.momentum)
    assert reduce_parts(state, PLAN, parts | {"b": frozenset({3})}).anchor != one.anchor
    assert reduce_parts(replace(state, anchor=digest("other")), PLAN, parts).anchor != one.anchor


def test_a_piece_that_comes_twice_is_seen():
    state = replace(genesis(), pieces=frozenset({1}))
    assert reduce_parts(state, PLAN, {"a": frozenset({2}), "b": frozenset({3})}).doubled == NOTHING
    assert reduce_parts(state, PLAN, {"a": frozenset({2}), "b": frozenset({2, 3})}).doubled == {2}
    assert reduce_parts(state, PLAN, {"a": frozenset({1, 2})}).doubled == {1}


def test_a_genesis_follows_the_checkpoint_that_it_starts_from():
    old = replace(genesis(), pieces=frozenset({1, 2}))
    plan = Plan(
        **{name: getattr(PLAN, name) for name in PLAN.__struct_fields__} | {"parent": old.head, "attempt": 3}
    )
    again = begin_from(old, certificate_of(plan, old.anchor, old.momentum), 5.0)
    assert again.pieces == old.pieces and again.epoch == old.epoch and again.head != old.head
    assert old.leads_to(again)


def test_nobody_signs_for_another():
    ring = KeyRing(seed=1)
    a, b = ring.keys_of("a"), ring.keys_of("b")
    assert ring.verify("a", b"text", a.sign(b"text"))
    assert not ring.verify("a", b"other", a.sign(b"text"))
    assert not ring.verify("a", b"text", b.sign(b"text"))
    assert not ring.verify("nobody", b"text", a.sign(b"text"))
    assert ring.keys_of("a").sign(b"text") == a.sign(b"text")
    assert KeyRing(seed=2).keys_of("a").sign(b"text") != a.sign(b"text")
