from __future__ import annotations

import pytest

from diloco.checkpoint.choice import Candidate, Registration, newest_first, to_delete, to_resume
from diloco.checkpoint.mark import Mark
from diloco.checkpoint.store import own_part
from diloco.outer.diloco import Position


def at(
    step: int,
    rank: int = 0,
    *,
    saved_at_ms: int | None = None,
    contributors: tuple[int, ...] = (0, 1),
    number: int = 5,
    head: str = "",
) -> Candidate:
    """A checkpoint of a step; its head is named after the step."""
    mark = Mark(
        position=Position(epoch=step),
        tokens=(0,),
        num_ranks=1,
        number=number,
        saved_at_ms=step if saved_at_ms is None else saved_at_ms,
        contributors=contributors,
        head=head or f"head {step}",
    )
    return Candidate(name=f"model_step_{step}", part=own_part(rank), mark=mark)


def steps(candidates) -> list[str]:
    return [one.name.removeprefix("model_step_") for one in candidates]


def of(rank: int, *steps: int, **more) -> list[Candidate]:
    return [at(step, rank, **more) for step in steps]


def chosen(found, savers=None, *, ranks=range(3), **more) -> Candidate | None:
    """What all these ranks choose: the same step, each its own checkpoint of it, else that of the lowest rank."""
    known = {int(one.part.removeprefix("diloco_rank_")): Registration() for one in found} | (savers or {})
    results = {rank: to_resume(found, known, own_part(rank), **more) for rank in ranks}
    if None in results.values():
        assert set(results.values()) == {None}
        return None
    assert len({(one.name, one.mark.head) for one in results.values()}) == 1
    [same] = {one.name: one for one in results.values()}
    parts = {one.part for one in found if (one.name, one.mark.head) == (same, results[0].mark.head)}
    for rank, one in results.items():
        assert one.part == (own_part(rank) if own_part(rank) in parts else min(parts))
    return results[0]


FIRST_UNDER_WAY = Registration(at_ms=1, has_saved=False)
OWN = of(0, 4, 8, 12)


def test_the_newest_is_resumed_that_all_who_save_here_have():
    assert chosen([*OWN, *of(1, 4, 8, 12)]) == at(12)
    assert chosen([*OWN, *of(1, 4, 8)]) == at(8)


def test_who_saves_elsewhere_or_was_not_in_the_last_commit_is_not_waited_for():
    assert chosen(OWN) == at(12)
    assert chosen(OWN, {2: Registration()}) == at(12)


def test_a_step_of_another_history_is_not_the_same_step():
    assert chosen([*OWN, *of(1, 4, 8), at(12, 1, head="another head", saved_at_ms=11)]) == at(8)


def test_nobody_goes_back_further_than_peers_that_save_side_by_side_can_be_apart():
    assert chosen([*of(0, *range(4, 40, 4)), at(4, 1)]) == at(36)
    assert to_resume([], {0: Registration()}, own_part(0)) is None


def test_before_the_first_commit_all_who_save_here_count():
    found = [*of(0, 4, 2, contributors=()), at(2, 1, contributors=())]
    assert chosen(found) == at(2, contributors=())


def test_the_last_are_those_saved_last_and_not_those_of_the_highest_steps():
    kept = [at(100, saved_at_ms=1), at(6, saved_at_ms=2), at(8, saved_at_ms=3)]
    assert steps(newest_first(kept)) == ["8", "6", "100"]
    assert steps(to_delete(kept, topk=2)) == ["100"]
    assert to_delete(kept, topk=3) == to_delete(kept, topk=None) == []


def test_where_others_were_saving_their_very_first_all_begin_anew():
    first, begun = at(4, number=0), {1: FIRST_UNDER_WAY}
    later = Registration(at_ms=9, has_saved=False)
    assert chosen([first], {**begun, 2: later}) is None
    assert chosen([first, at(4, 1, number=0)]) == first
    assert chosen([first]) == first
    assert chosen([first, at(8)], begun) == at(8)
    # A checkpoint from before the first commit names no contributors.
    assert chosen([at(4, number=0, contributors=())], begun) is None


def test_the_first_checkpoint_of_a_peer_that_came_late_is_not_the_first_of_the_run():
    newest, came = at(100, 7, number=0, contributors=(7, 8)), Registration(at_ms=90)
    assert chosen([*OWN, newest], {7: came, 8: FIRST_UNDER_WAY}) == at(12)
    assert chosen([*of(0, 88, 92, 96, number=2, contributors=(0, 8)), newest], {8: FIRST_UNDER_WAY}) == newest


@pytest.mark.parametrize("elsewhere", [None, Registration(at_ms=5, has_saved=False), Registration()])
def test_nobody_begins_anew_beside_a_first_checkpoint_for_who_came_later_or_has_lost_its_own(elsewhere):
    """The other peer never saved here, came after the checkpoint was saved, or has lost its own checkpoint."""
    savers = {1: elsewhere} if elsewhere else {}
    for first in (at(4, number=0), at(4, number=0, contributors=())):
        assert chosen([first], savers) == first


def test_a_rank_that_is_no_more_makes_nobody_go_back_before_the_first_commit():
    found = [*of(0, 2, 4, contributors=()), *of(1, 2, 4, contributors=())]
    assert chosen(found, {7: Registration()}) == at(4, contributors=())


def test_what_was_given_up_does_not_count_for_a_peer_that_never_saved():
    given_up, newest = at(500, saved_at_ms=1), at(300, saved_at_ms=2)
    assert to_resume([given_up, newest], {0: Registration()}, own_part(1)) == newest


def test_whoever_has_the_world_rank_of_a_peer_of_long_ago_resumes_the_newest_step_of_all():
    """After all machines were replaced, ranks are assigned from 0 again, and the first peers' checkpoints are there."""
    ago = [at(step, rank) for step in (4, 8, 12) for rank in (0, 1)]
    lately = [at(step, rank, contributors=(40, 41)) for step in (900, 904) for rank in (40, 41)]
    assert chosen([*ago, *lately]) == at(904, 40, contributors=(40, 41))
    # A rank that was in use at both times: of the same step counts its own.
    mine = at(904, 0, contributors=(0, 40, 41))
    assert chosen([*ago, *(at(904, rank, contributors=(0, 40, 41)) for rank in (40, 41)), mine]) == mine


def test_a_peer_of_a_live_run_keeps_what_is_its_own():
    found = [*OWN, *of(1, 4, 8, 12, 16, contributors=(1,))]
    assert to_resume(found, {0: Registration(), 1: Registration()}, own_part(0), keeps_own=True) == at(12)
    assert chosen(found) == at(16, 1, contributors=(1,))
    assert to_resume(found, {1: Registration()}, own_part(5), keeps_own=True) == at(16, 1, contributors=(1,))


def test_for_a_damaged_checkpoint_another_peers_of_the_same_step_is_taken_before_an_older_one():
    found = [*OWN, *of(1, 4, 8, 12)]
    savers, refused = {0: Registration(), 1: Registration()}, {(own_part(0), "model_step_12")}
    assert to_resume(found, savers, own_part(0), refused=refused) == at(12, 1)
    assert to_resume(found, savers, own_part(0), refused=refused, keeps_own=True) == at(8)
    refused.add((own_part(1), "model_step_12"))
    assert to_resume(found, savers, own_part(0), refused=refused) == at(8)


def test_peers_that_saved_one_outer_state_at_different_steps_resume_what_each_has_saved():
    found = [at(step, rank, head="one") for step, rank in ((498, 0), (500, 0), (503, 1), (450, 2))]
    savers = {0: Registration(), 1: Registration()}
    assert [to_resume(found, savers, own_part(rank)).name for rank in range(4)] == [
        f"model_step_{step}" for step in (500, 503, 450, 503)
    ]


def test_on_a_fork_the_side_is_resumed_that_more_peers_have_saved():
    common = [at(8, rank, contributors=(0, 1, 2)) for rank in range(3)]
    many = [at(12, rank, contributors=(0, 1), saved_at_ms=12) for rank in (0, 1)]
    alone = at(12, 2, contributors=(2,), saved_at_ms=13, head="of one")
    assert chosen([*common, *many, alone], ranks=range(4)) == many[0]


def test_a_step_saved_again_after_an_older_one_was_resumed_counts_before_what_more_had_saved_then():
    then = [at(step, rank, contributors=(0, 1, 2)) for step in (8, 12, 16) for rank in range(3)]
    again = at(12, 9, contributors=(9,), saved_at_ms=20, head="again")
    assert chosen([*then, again], {9: Registration(at_ms=17)}) == again
    later = at(13, 9, contributors=(9,), saved_at_ms=21, head="later")
    assert chosen([*then, again, later]) == later


def test_what_a_peer_saved_last_that_was_cut_off_is_not_resumed_by_all():
    common = [at(600, rank, contributors=(0, 1, 2, 3)) for rank in range(4)]
    many = [at(800, rank, contributors=(0, 1, 2)) for rank in range(3)]
    alone = at(700, 3, contributors=(3,), saved_at_ms=805)
    assert chosen([*common, *many, alone], ranks=range(5)) == many[0]
    # The others have not saved since its last checkpoint but one.
    later = at(750, 3, contributors=(3,), saved_at_ms=806)
    assert chosen([*common, *many, alone, later], ranks=range(5)) == many[0]
    # What the peer that was cut off has is no substitute for a step that the others do not all have.
    assert chosen([*common, *many[:2], alone], ranks=range(5)) == common[0]
    sooner = at(700, 3, contributors=(3,), saved_at_ms=795)
    assert chosen([*common, *many[:2], sooner], ranks=range(5)) == common[0]


def test_a_run_that_one_peer_began_in_the_same_place_is_not_resumed_by_all():
    many = [at(step, rank, contributors=(0, 1, 2)) for step in (19_900, 20_000) for rank in range(3)]
    begun = [at(100 * i, 9, contributors=(9,), saved_at_ms=19_900 + 60 * i, number=i - 1) for i in (1, 2, 3)]
    came = {9: Registration(at_ms=19_950)}
    assert chosen([*many, begun[1]], came) == chosen([*many, *begun[:2]], came) == many[3]
    assert chosen([*many, *begun], came) == many[3]


def test_peers_of_unequal_speed_outnumber_one_that_was_cut_off_though_each_saved_another_step():
    many = [at(800 + 3 * rank, rank, contributors=(0, 1, 2), head="one") for rank in range(3)]
    alone = at(700, 3, contributors=(3,), saved_at_ms=900)
    savers = dict.fromkeys(range(4), Registration())
    assert [to_resume([*many, alone], savers, own_part(rank)) for rank in range(3)] == many


def test_peers_that_stayed_last_are_not_outnumbered_by_those_that_left():
    """They left in the last interval, after a checkpoint of their own; or before the others came."""
    before = [
        at(600, 0, contributors=(0, 1, 2)),
        *(at(603 + rank, rank, contributors=(0, 1, 2)) for rank in (1, 2)),
    ]
    stayed = at(800, 0, contributors=(0,))
    assert chosen([*before, stayed]) == stayed
    assert chosen([*before[1:], stayed]) == stayed
    # With --ckpt.topk 1 only its newest one is there; the others left long ago.
    left = [at(600, rank, contributors=(1, 2)) for rank in (1, 2)]
    newest = at(5000, 0, contributors=(0,), number=24)
    assert chosen([*left, newest], {0: Registration(at_ms=1)}) == newest
    ago = [at(12, rank, contributors=(0, 1, 2)) for rank in range(3)]
    fresh = [at(904, rank, contributors=(40, 41)) for rank in (40, 41)]
    assert chosen([*ago, fresh[0]], {40: Registration(at_ms=500)}) == fresh[0]
    assert chosen([*ago, *fresh, at(900, 40, contributors=(40, 41))]) == fresh[0]
