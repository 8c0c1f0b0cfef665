"""The rules for plans: a leader's plan satisfies them, and every member finds the faults of a wrong one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from peers.core.plans import SPARE_BLOCKS, Entry, fault_in, is_quorum, plan_of
from peers.core.weights import Aggregation
from peers.errors import ProtocolError
from peers.protocol.certificates import Certificate, Member, Plan
from peers.protocol.limits import MAX_COUNT
from peers.protocol.messages import Found, Propose, decode_message
from peers.protocol.wire import encode
from tests.unit.peers.core.made import SETTINGS, commit, digest, genesis, with_settings, work

PARENT = genesis("abcd")
ROSTER = ("a", "b", "c", "d")


def made(
    entries=ROSTER,
    *,
    parent: Certificate = PARENT,
    claims=None,
    off=(),
    data_width: int = 4,
    settings=SETTINGS,
    attempt: int = 0,
    **works,
) -> Plan:
    own = {name: Entry((claims or {}).get(name, -1), works.get(name, work())) for name in entries}
    return plan_of(parent, attempt, own, off=off, data_width=data_width, settings=settings)


def fault(plan: Plan, *, parent: Certificate = PARENT, off=(), data_width: int = 4, settings=SETTINGS):
    return fault_in(
        plan,
        parent,
        off_allowed=off,
        data_width=data_width,
        settings=settings,
    )


def ranks(plan: Plan) -> dict[str, int]:
    return {member.peer_id: member.world_rank for member in plan.roster}


def test_a_plan_follows_its_parent_and_nothing_is_wrong_with_it():
    plan = made(attempt=3)
    assert (plan.parent, plan.epoch, plan.attempt, plan.manifest) == (PARENT.head, 1, 3, SETTINGS.manifest)
    assert plan.signers == ROSTER
    assert [c.weight for c in plan.contributors] == [0.25] * 4
    assert plan.roster == PARENT.plan.roster
    assert (plan.data_base, plan.tokens) == (4, 400)
    assert fault(plan) == ""


def test_the_fragment_is_that_of_the_epoch_which_ends():
    settings = with_settings(num_fragments=3)
    at, found = PARENT, []
    for _ in range(4):
        plan = made(parent=at, settings=settings)
        found.append(plan.fragment)
        at = commit(at, ROSTER, fragment=plan.fragment)
    assert found == [0, 1, 2, 0]


def test_a_joiner_gets_the_rank_that_it_claims_where_it_is_free():
    plan = made([*ROSTER, "n"], claims={"n": 9})
    assert ranks(plan)["n"] == 9
    assert fault(plan) == ""
    assert plan.contributors[-1].peer_id == "n"


def test_joiners_get_the_lowest_free_ranks_where_theirs_are_taken_or_none():
    parent = genesis({"a": 0, "b": 2, "c": 5})
    plan = made(["a", "b", "c", "x", "y", "z"], parent=parent, claims={"x": 2, "y": -1, "z": 1})
    # Ranks are given in order of names: `x` takes the lowest free one, though `z` claims it.
    assert ranks(plan) == {"a": 0, "x": 1, "b": 2, "y": 3, "z": 4, "c": 5}
    assert fault(plan, parent=parent, data_width=6) == ""


def test_contributors_and_roster_are_in_order_of_world_rank():
    parent = genesis({"d": 3, "a": 7, "b": 1})
    plan = made(["a", "b", "d"], parent=parent)
    assert plan.signers == ("b", "d", "a")
    assert list(ranks(plan)) == ["b", "d", "a"]


def test_who_says_that_it_leaves_and_who_is_gone_is_taken_off():
    plan = made(["a", "b", "c"], off={"d"}, b=work(last=True))
    assert list(ranks(plan)) == ["a", "c"]
    assert plan.signers == ("a", "b", "c")
    assert fault(plan, off={"d"}) == ""
    assert "to remove members that are not gone: d" in fault(plan)


def test_a_roster_is_never_empty():
    everybody = {name: work(last=True) for name in ROSTER}
    assert list(ranks(made(**everybody))) == list(ROSTER)


def test_the_data_of_an_epoch_is_as_wide_as_the_highest_rank_wherever_that_is():
    assert made(data_width=2).data_base == 4
    assert made(data_width=30).data_base == 30
    assert made([*ROSTER, "n"], claims={"n": 99}).data_base == 100


def test_the_data_of_an_epoch_is_a_whole_number_of_blocks_and_no_more_of_them_for_their_size():
    settings = with_settings(samples_per_block=10)
    plan = made(settings=settings)
    assert plan.data_base == 40
    most = 10 * (2 * 4 + SPARE_BLOCKS)
    for data_base in (40, 50, most):
        assert fault(replace(plan, data_base=data_base), settings=settings) == ""
    for data_base in (0, 30, 39, 41, 45, most + 1, most + 10):
        assert fault(replace(plan, data_base=data_base), settings=settings) != ""
    for parent in (genesis("ab", data_base=MAX_COUNT - at) for at in (0, 1, 25)):
        plan = made("ab", parent=parent, settings=settings)
        assert plan.data_base == MAX_COUNT
        assert fault(plan, parent=parent, settings=settings) == ""


def test_counts_stay_where_they_can_be_read_back():
    parent = genesis("ab", data_base=MAX_COUNT - 1, tokens=MAX_COUNT - 3)
    plan = made("ab", parent=parent)
    assert (plan.data_base, plan.tokens) == (MAX_COUNT, MAX_COUNT)
    assert fault(plan, parent=parent) == ""
    assert decode_message(encode(Propose(plan=plan))).plan == plan
    further = commit(parent, "ab", data_base=MAX_COUNT, tokens=MAX_COUNT)
    plan = made("ab", parent=further)
    assert (plan.data_base, plan.tokens) == (MAX_COUNT, MAX_COUNT)
    assert fault(plan, parent=further) == ""


@pytest.mark.parametrize("epoch", [MAX_COUNT, MAX_COUNT - 1, 1 << 61, 1 << 48, 1 << 40])
def test_whatever_epoch_can_be_read_the_next_one_can_be_read_too(epoch):
    parent = genesis("ab", epoch=epoch)
    try:
        decode_message(encode(Found(body=parent.body)))
    except ProtocolError:
        return
    plan = made("ab", parent=parent)
    assert decode_message(encode(Propose(plan=plan))).plan == plan


def sybils(plan: Plan) -> tuple[Member, ...]:
    return (*plan.roster, *(Member(peer_id=f"s{n}", world_rank=50 + n) for n in range(9)))


HONEST = made()


@pytest.mark.parametrize(
    "plan",
    [
        replace(HONEST, contributors=(replace(HONEST.contributors[0], weight=0.9), *HONEST.contributors[1:])),
        replace(HONEST, contributors=HONEST.contributors[::-1]),
        replace(HONEST, roster=sybils(HONEST)),
        replace(HONEST, roster=HONEST.roster[:2]),
        replace(HONEST, roster=(Member(peer_id="s", world_rank=0),)),
        replace(HONEST, roster=HONEST.roster[::-1]),
        replace(HONEST, roster=(*HONEST.roster, HONEST.roster[0])),
        replace(HONEST, roster=tuple(replace(m, world_rank=m.world_rank + 1) for m in HONEST.roster)),
        replace(
            HONEST, contributors=(replace(HONEST.contributors[0], world_rank=9), *HONEST.contributors[1:])
        ),
        replace(HONEST, contributors=()),
        replace(HONEST, contributors=(HONEST.contributors[0], *HONEST.contributors)),
        replace(HONEST, data_base=HONEST.data_base + 2 * 4 + SPARE_BLOCKS),
        replace(HONEST, data_base=3),
        replace(HONEST, data_base=0),
        replace(HONEST, tokens=0),
        replace(HONEST, tokens=MAX_COUNT),
        replace(HONEST, epoch=2),
        replace(HONEST, epoch=0),
        replace(HONEST, fragment=1),
        replace(HONEST, manifest=digest("another")),
        replace(HONEST, parent=digest("another")),
    ],
    ids=[
        "another weight",
        "another order",
        "sybils in the roster",
        "half of the roster",
        "a roster of its own",
        "a roster in another order",
        "a member of the roster twice",
        "other ranks in the roster",
        "another rank of a contributor",
        "nobody",
        "one twice",
        "too much data",
        "too little data",
        "data once more",
        "no tokens",
        "too many tokens",
        "an epoch too far",
        "the epoch before",
        "another fragment",
        "another manifest",
        "another parent",
    ],
)
def test_what_a_leader_has_made_up_is_named(plan):
    assert fault(plan) != ""


def test_a_few_more_blocks_than_this_member_sees_newcomers_for_are_no_fault():
    assert fault(replace(HONEST, data_base=4 + 4 + SPARE_BLOCKS)) == ""


def test_a_joiner_may_have_any_rank_that_is_free_and_no_other_for_it_may_claim_another_to_each_member():
    plan = made([*ROSTER, "n"], claims={"n": 9})
    assert fault(plan) == ""
    joined = next(contributor for contributor in plan.contributors if contributor.peer_id == "n")
    for taken in (0, 1 << 20):
        others = tuple(replace(joined, world_rank=taken) if c == joined else c for c in plan.contributors)
        assert fault(replace(plan, contributors=others)) != ""


def test_a_work_of_an_epoch_to_come_is_a_fault():
    assert fault(made(a=work(based_on=5))) != ""


def test_a_robust_rule_takes_no_group_of_two():
    settings = with_settings(aggregation=Aggregation(rule="trimmed-mean"))
    assert "needs 3" in fault(made(["a", "b"], settings=settings), settings=settings)
    assert fault(made(["a", "b", "c"], settings=settings), settings=settings) == ""


def test_one_newcomer_does_not_make_a_pass_over_the_data_end():
    # A rank of a million would hand out a million blocks an epoch, of which only a few are trained.
    plan = made([*ROSTER, "n"], claims={"n": 1 << 20})
    assert plan.data_base < 1000


@pytest.mark.parametrize(
    ("present", "quorum", "is_enough"),
    [
        ("ab", 0.5, False),
        ("abc", 0.5, True),
        ("abxyz", 0.5, False),
        ("abc", 0.75, False),
        ("abcd", 0.75, True),
        ("abcd", 1.0, False),
    ],
)
def test_a_quorum_is_more_than_a_part_of_the_roster_and_strangers_do_not_count(present, quorum, is_enough):
    assert is_quorum(present, PARENT, quorum) is is_enough


def test_where_nobody_is_left_after_a_commit_its_plan_keeps_everybody_and_all_agree():
    plan = made("ab", off="cd", a=work(last=True), b=work(last=True))
    assert plan.roster_set == set(ROSTER)
    assert fault(plan, off="cd") == ""
    assert "to remove members that are not gone" in fault(plan, off="c")
