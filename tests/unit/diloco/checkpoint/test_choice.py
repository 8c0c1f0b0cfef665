from __future__ import annotations

import pytest

from diloco.checkpoint.choice import (
    Candidate,
    Registration,
    newest_first,
    of_others,
    to_delete,
    to_resume,
)
from diloco.checkpoint.mark import Mark
from diloco.outer.diloco import Position


def at(
    step: int,
    *,
    saved_at_ms: int | None = None,
    contributors: tuple[int, ...] = (0, 1),
    number: int = 5,
) -> Candidate:
    """World rank 0's checkpoint of a step; its head is named after the step."""
    mark = Mark(
        position=Position(epoch=step),
        tokens=(0,),
        num_ranks=1,
        number=number,
        saved_at_ms=step if saved_at_ms is None else saved_at_ms,
        contributors=contributors,
        head=f"head {step}",
    )
    return Candidate(name=f"model_step_{step}", part="diloco_rank_0", mark=mark)


def steps(candidates) -> list[str]:
    return [one.name.removeprefix("model_step_") for one in candidates]


def saved_by(**peers: tuple[int, ...]) -> dict[str, dict[int, str]]:
    """Which steps other peers have, `rank1=(4, 8)`."""
    found: dict[str, dict[int, str]] = {}
    for name, theirs in peers.items():
        for step in theirs:
            rank = int(name.removeprefix("rank"))
            found.setdefault(f"model_step_{step}", {})[rank] = f"head {step}"
    return found


BOTH = {0: Registration(), 1: Registration()}
FIRST_UNDER_WAY = Registration(at_ms=1, has_saved=False)
OWN = newest_first([at(4), at(8), at(12)])


def test_the_newest_is_resumed_that_all_who_save_here_have():
    assert to_resume(OWN, saved_by(rank1=(4, 8, 12)), BOTH, 0) == at(12)
    assert to_resume(OWN, saved_by(rank1=(4, 8)), BOTH, 0) == at(8)


def test_who_saves_elsewhere_or_was_not_in_the_last_commit_is_not_waited_for():
    assert to_resume(OWN, {}, {0: Registration()}, 0) == at(12)
    assert to_resume(OWN, {}, {0: Registration(), 2: Registration()}, 0) == at(12)


def test_a_step_of_another_history_is_not_the_same_step():
    others = saved_by(rank1=(4, 8, 12))
    others["model_step_12"][1] = "another head"
    assert to_resume(OWN, others, BOTH, 0) == at(8)


def test_nobody_goes_back_further_than_peers_that_save_side_by_side_can_be_apart():
    own = newest_first([at(step) for step in range(4, 40, 4)])
    assert to_resume(own, saved_by(rank1=(4,)), BOTH, 0) == at(36)
    assert to_resume([], {}, BOTH, 0) is None


def test_before_the_first_commit_all_who_save_here_count():
    own = [at(4, contributors=()), at(2, contributors=())]
    assert to_resume(own, saved_by(rank1=(2,)), BOTH, 0) == at(2, contributors=())


def test_the_last_are_those_saved_last_and_not_those_of_the_highest_steps():
    kept = [at(100, saved_at_ms=1), at(6, saved_at_ms=2), at(8, saved_at_ms=3)]
    assert steps(newest_first(kept)) == ["8", "6", "100"]
    assert steps(to_delete(kept, topk=2)) == ["100"]
    assert to_delete(kept, topk=3) == to_delete(kept, topk=None) == []


def test_where_others_were_saving_their_very_first_all_begin_anew():
    first, begun = at(4, number=0), {0: Registration(), 1: FIRST_UNDER_WAY}
    assert to_resume([first], {}, begun, 0) is None
    assert to_resume([first], saved_by(rank1=(4,)), BOTH, 0) == first
    assert to_resume([first], {}, {0: Registration()}, 0) == first
    # What peer 1 takes, which was saving its first checkpoint, and peer 2, which had not joined yet.
    assert of_others([first], 1, FIRST_UNDER_WAY) is None
    assert of_others([first], 2, FIRST_UNDER_WAY) == first
    assert of_others([first, at(8)], 1, FIRST_UNDER_WAY) == at(8)
    # A checkpoint from before the first commit names no contributors.
    unnamed = at(4, number=0, contributors=())
    assert to_resume([unnamed], {}, begun, 0) is None
    assert of_others([unnamed], 1, FIRST_UNDER_WAY) is None


@pytest.mark.parametrize("elsewhere", [None, Registration(at_ms=5, has_saved=False), Registration()])
def test_nobody_begins_anew_beside_a_first_checkpoint_for_who_came_later_or_has_lost_its_own(elsewhere):
    """The other peer never saved here, came after the checkpoint was saved, or has lost its own checkpoint."""
    savers = {0: Registration()} | ({1: elsewhere} if elsewhere else {})
    for first in (at(4, number=0), at(4, number=0, contributors=())):
        assert to_resume([first], {}, savers, 0) == first
        assert of_others([first], 1, elsewhere) == first


def test_a_rank_that_is_no_more_makes_nobody_go_back_before_the_first_commit():
    own = newest_first([at(2, contributors=()), at(4, contributors=())])
    savers = {**BOTH, 7: Registration()}
    assert to_resume(own, saved_by(rank1=(2, 4)), savers, 0) == own[0]


def test_of_each_other_peer_its_newest_counts_and_not_what_it_gave_up():
    given_up, newest = at(500, saved_at_ms=1), at(300, saved_at_ms=2)
    assert of_others([given_up, newest], 1, None) == newest
