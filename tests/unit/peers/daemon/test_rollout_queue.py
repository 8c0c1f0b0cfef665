"""Which rollouts a learner keeps, and how old they are when it trains on them."""

from __future__ import annotations

import pytest
from msgspec.msgpack import Decoder

from peers.daemon.rollout_queue import MAX_SENDERS, RolloutQueue
from peers.errors import ProtocolError
from peers.protocol.rollouts import Completion, prompt_of
from tests.support.rollout_messages import FIRST, ME, RUN, completion, rollout, terms, uniform

POLICIES = [character * 64 for character in "abcdef"]
COMPLETIONS = Decoder(tuple[Completion, ...])


@pytest.fixture
def queue():
    found = RolloutQueue(RUN, ME, first_number=FIRST)
    found.published(POLICIES[0], 10, terms())
    return found


def test_rollouts_are_taken_in_the_order_in_which_they_came_and_only_as_many_as_are_wanted(queue):
    assert queue.take(2) is None
    assert queue.offer("x", rollout(FIRST), 1.0) == ""
    assert queue.take(2) is None
    assert queue.offer("y", rollout(FIRST), 2.0) == ""
    assert queue.offer("x", rollout(FIRST + 1), 3.0) == ""
    assert [one.peer_id for one in queue.take(2).rollouts] == ["x", "y"]
    assert [one.peer_id for one in queue.take(1).rollouts] == ["x"]


def test_a_rollout_is_as_old_as_the_steps_since_its_policy(queue):
    queue.offer("x", rollout(FIRST), 1.0)
    queue.published(POLICIES[1], 11, terms())
    queue.published(POLICIES[2], 12, terms())
    queue.offer("x", rollout(FIRST + 1, policy=POLICIES[1]), 2.0)
    taken = queue.take(2).rollouts
    assert [one.staleness for one in taken] == [2, 1]
    assert taken[0].example == prompt_of(RUN, ME, "x", FIRST, num_examples=1000)
    figures = queue.senders["x"].figures(5.0)
    assert (figures["staleness_mean"], figures["staleness_max"], figures["taken"]) == (1.5, 2, 2)
    assert figures["rollouts_per_s"] == 0.5


def test_what_is_older_than_may_be_is_dropped_whether_it_waits_or_comes(queue):
    queue.offer("x", rollout(FIRST), 1.0)
    queue.published(POLICIES[1], 13, terms())
    assert queue.take(1) is None
    assert queue.offer("x", rollout(FIRST + 1), 2.0) == "stale"
    assert queue.senders["x"].dropped == {"stale": 2}


def test_rollouts_of_a_fork_that_was_left_are_dropped(queue):
    queue.published(POLICIES[1], 12, terms())
    queue.offer("x", rollout(FIRST, policy=POLICIES[1]), 1.0)
    queue.published(POLICIES[2], 11, terms())
    assert queue.take(1) is None
    assert queue.offer("x", rollout(FIRST + 1, policy=POLICIES[0]), 2.0) == ""


def test_where_more_come_than_are_trained_on_the_oldest_make_room(queue):
    for index in range(6):
        assert queue.offer("x", rollout(FIRST + index), float(index)) == ""
    assert numbers(queue.take(4).rollouts) == [2, 3, 4, 5]
    assert queue.senders["x"].dropped == {"surplus": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"number": FIRST + 1},
        {"number": FIRST - 1},
        {"run_id": "other"},
        {"learner": "other"},
        {"completions": (completion(),)},
        {"completions": (completion(),) * 3},
        {"completions": (completion(tokens=(7, 50)),) * 2},
        {"completions": (completion(tokens=(7,) * 5, logprobs=(-1.0,) * 5),) * 2},
        {"completions": (completion(scores=(1.0,)),) * 2},
        {"completions": (completion(scores=(1.0, 0.0, 0.0)),) * 2},
    ],
)
def test_what_is_not_as_the_trainer_needs_it_is_refused(queue, changes):
    with pytest.raises(ProtocolError):
        queue.offer("x", rollout(**changes), 1.0)
    assert len(queue) == 0


def test_nothing_is_taken_before_there_is_a_policy():
    with pytest.raises(ProtocolError):
        RolloutQueue(RUN, ME, first_number=FIRST).offer("x", rollout(), 1.0)


def test_only_so_many_rollout_peers_are_remembered(queue):
    for index in range(MAX_SENDERS + 5):
        queue.sender(f"peer{index}")
    assert len(queue.senders) == MAX_SENDERS and "peer0" not in queue.senders


def test_nothing_more_is_taken_from_one_that_was_left_out(queue):
    queue.offer("x", rollout(FIRST), 1.0)
    queue.offer("y", rollout(FIRST), 1.0)
    queue.leave_out("x", "lies")
    assert [one.peer_id for one in queue.take(1).rollouts] == ["y"]
    assert queue.senders["x"].dropped == {"left out": 1}
    with pytest.raises(ProtocolError, match="left out"):
        queue.offer("x", rollout(FIRST + 1), 2.0)


def numbers(waiting) -> list[int]:
    return [one.number - FIRST for one in waiting]


def test_rollouts_whose_completions_all_earn_the_same_are_left_out_and_only_shown(queue):
    for index, made in enumerate((rollout, uniform, uniform, rollout)):
        assert queue.take(2) is None
        assert queue.offer("x", made(FIRST + index), 1.0) == ""
    taken = queue.take(2)
    assert (numbers(taken.rollouts), numbers(taken.uniform)) == ([0, 3], [1, 2])
    assert queue.senders["x"].num_taken == 2 and not queue.senders["x"].dropped
    assert queue.take(1) is None
    nearly = (completion(scores=(0.5, 0.0)), completion(scores=(0.5, 0.1)))
    assert queue.offer("x", rollout(FIRST + 4, completions=nearly), 2.0) == ""
    taken = queue.take(1)
    assert (numbers(taken.rollouts), numbers(taken.uniform)) == ([4], [])


def test_the_trainer_gets_all_completions_to_train_on_and_one_of_each_rollout_that_it_only_checks(queue):
    given = [uniform(FIRST), *(rollout(FIRST + 1 + index) for index in range(2))]
    for one in given:
        queue.offer("x", one, 1.0)
    taken = queue.take(2)
    found = [COMPLETIONS.decode(one.completions) for one in (*taken.uniform, *taken.rollouts)]
    assert found[1:] == [one.completions for one in given[1:]]
    (shown,) = found[0]
    assert shown in given[0].completions
    for index in range(terms().num_kept):
        queue.offer("x", uniform(FIRST + 3 + index), 1.0)
    (chosen,) = queue.take(1).rollouts
    assert COMPLETIONS.decode(chosen.completions) == uniform().completions


def test_where_everything_earns_the_same_the_newest_of_it_are_trained_on_rather_than_waited_for_ever(queue):
    queue.offer("x", rollout(FIRST), 1.0)
    for index in range(terms().num_kept):
        assert queue.take(2) is None
        queue.offer("x", uniform(FIRST + 1 + index), 1.0)
    taken = queue.take(2)
    assert (numbers(taken.rollouts), numbers(taken.uniform)) == ([0, 4], [1, 2, 3])


def test_rollouts_of_uniform_reward_grow_old_and_are_left_out_with_their_sender(queue):
    for index in range(3):
        queue.offer("x", uniform(FIRST + index), 1.0)
        queue.offer("y", uniform(FIRST + index), 1.0)
    assert len(queue._uniform) == terms().num_kept
    queue.leave_out("x", "lies")
    assert {kept.peer_id for kept in queue._uniform} == {"y"}
    for step, policy in enumerate(POLICIES[1:5], 11):
        queue.published(policy, step, terms())
    assert queue.take(1) is None
    assert queue.senders["y"].dropped["stale"] == 2
