"""After a fault, or with overlapped rounds, a worker trains on while it awaits its commit (late_work.py)."""

from dataclasses import replace
from itertools import pairwise

import pytest

from peers.core import effects, events
from peers.core.chain import RECENT_COMMITS
from peers.core.timing import ENOUGH_ROUNDS, PATIENCE_BEATS
from tests.unit.peers.core.made import SETTINGS
from tests.unit.peers.core.swarm import Swarm

TRAIN_S = 5.0


def running_swarm(names: str = "abc", **settings: object) -> Swarm:
    """A swarm that has made enough commits to know how long one usually takes."""
    swarm = Swarm(names, settings=replace(SETTINGS, **settings), train_s=TRAIN_S)
    assert swarm.reach(ENOUGH_ROUNDS + 1, 120)
    return swarm


def ahead(swarm: Swarm, name: str) -> list[effects.GoAhead]:
    return swarm[name].effects(effects.GoAhead)


def test_nobody_goes_ahead_in_a_swarm_that_is_well():
    swarm = running_swarm()
    assert swarm.reach(ENOUGH_ROUNDS + 6, 120)
    assert [ahead(swarm, name) for name in "abc"] == [[], [], []]


def test_where_rounds_are_overlapped_however_long_they_take_all_go_ahead_at_once():
    swarm = Swarm("abc", settings=replace(SETTINGS, never_waits=True), train_s=TRAIN_S)
    swarm.reductions.reduce_s = (0.8 * TRAIN_S, 0.8 * TRAIN_S)
    assert swarm.reach(4, 60)
    for name in "abc":
        ready_at = [at for at, effect in swarm[name].done if isinstance(effect, effects.Reduce)]
        went_at = [at for at, effect in swarm[name].done if isinstance(effect, effects.GoAhead)]
        assert len(went_at) >= 4
        assert all(went <= ready for went, ready in zip(went_at, ready_at, strict=False))


def test_who_has_lost_its_quorum_trains_on_in_the_epoch_that_is_to_follow():
    swarm = running_swarm(samples_per_block=80)
    epoch, data_base = swarm["a"].machine.epoch, swarm["a"].machine.certificate.plan.data_base
    swarm.kill("b")
    swarm.kill("c")
    assert swarm.run_until(lambda: bool(ahead(swarm, "a")), TRAIN_S + 2)
    assert ahead(swarm, "a") == [effects.GoAhead(epoch + 1, data_base + 3 * 80)]
    # The work that it handed over still waits for its commit, and others may include it.
    assert swarm["a"].machine.phase == "ready"


def test_it_goes_ahead_once_and_is_answered_when_the_commit_is_there():
    swarm = running_swarm()
    epoch = swarm["a"].machine.epoch
    swarm.kill("b")
    swarm.kill("c")
    assert swarm.run_until(lambda: swarm["a"].machine.epoch > epoch, 60)
    went_at = next(at for at, effect in swarm["a"].done if isinstance(effect, effects.GoAhead))
    at, answer = next((at, e) for at, e in swarm["a"].done if isinstance(e, effects.Answer) and at > went_at)
    assert (answer.how, answer.epoch) == ("contributed", epoch + 1)
    assert len([e for t, e in swarm["a"].done if isinstance(e, effects.GoAhead) and t < at]) == 1
    assert at > went_at + 1


def test_where_nothing_is_known_to_be_wrong_it_waits_for_longer_than_usual_first():
    swarm = running_swarm()
    swarm.reductions.reduce_s = (30.0, 30.0)
    timing = swarm["a"].machine.timing
    assert swarm.run_until(lambda: bool(ahead(swarm, "a")), 60)
    (went_at,) = [at for at, effect in swarm["a"].done if isinstance(effect, effects.GoAhead)]
    ready_at = swarm["a"].machine.worker.ready_at
    assert went_at - ready_at >= PATIENCE_BEATS * timing.beat_s


def test_while_a_commit_waits_for_one_that_says_nothing_the_others_train_on():
    swarm = running_swarm("abcd")
    swarm.run(TRAIN_S - 2)
    # Its channels stay open, so it still counts as live for some time.
    swarm.freeze("d", 60)
    epoch = swarm["a"].machine.epoch
    assert swarm.run_until(lambda: all(ahead(swarm, name) for name in "abc"), 4)
    assert {swarm[name].machine.epoch for name in "abc"} == {epoch}
    assert all(swarm.now - swarm[name].machine.worker.ready_at < 1.0 for name in "abc")


def test_after_a_fault_no_worker_waits_for_a_commit_until_it_is_long_ago():
    swarm = running_swarm("abcd")
    swarm.kill("d")
    assert swarm.run_until(lambda: all(ahead(swarm, name) for name in "abc"), TRAIN_S + 2)
    at_fault = swarm["a"].machine.epoch
    assert swarm.reach(at_fault + 4, 120)
    epochs = [order.epoch for order in ahead(swarm, "a")]
    assert epochs == [*range(epochs[0], epochs[0] + len(epochs))] and len(epochs) >= 4
    assert swarm.reach(at_fault + RECENT_COMMITS + 2, 600)
    count = len(ahead(swarm, "a"))
    assert swarm.reach(at_fault + RECENT_COMMITS + 6, 120)
    assert len(ahead(swarm, "a")) == count


def test_who_ends_with_this_epoch_waits_for_its_commit_after_a_fault_too():
    swarm = running_swarm("abcd")
    swarm.kill("d")
    assert swarm.reach(swarm["a"].machine.epoch + 2, 60)
    node = swarm["a"]
    node.worker.ends_after_this = True
    assert swarm.run_until(lambda: node.machine.worker.work is not None and node.machine.worker.work.last, 30)
    count = len(ahead(swarm, "a"))
    assert swarm.run_until(lambda: not node.worker.is_running, 30)
    assert len(ahead(swarm, "a")) == count


@pytest.mark.parametrize(("own_step_s", "local_step"), [(0.5, 3), (4.0, 1), (0.0, 0)])
def test_the_others_begin_the_next_epoch_where_those_who_went_ahead_are_by_then(own_step_s, local_step):
    swarm = running_swarm()
    epoch = swarm["a"].machine.epoch
    swarm.reductions.reduce_s = (4.0, 4.0)
    assert swarm.run_until(lambda: all(ahead(swarm, name) for name in "abc"), 60)
    for name, num_ahead, step_s in (("a", 0, own_step_s), ("b", 3, 100.0), ("c", 3, 100.0)):
        swarm[name].hang()
        swarm[name].post(events.WorkerTrains(SETTINGS.steps_per_epoch + num_ahead, step_s))
    assert swarm.reach(epoch + 1, 60)
    answer = swarm["a"].effects(effects.Answer)[-1]
    # It does not begin further than its own worker could have trained meanwhile.
    assert (answer.how, answer.local_step) == ("contributed", local_step)


def test_who_goes_ahead_trains_on_no_block_of_a_newcomers_that_takes_a_rank_below_the_highest():
    swarm = Swarm("abc", train_s=TRAIN_S)
    assert swarm.reach(3, 120)
    gone = next(name for name in "abc" if swarm[name].machine.world_rank == 1)
    nodes = dict(swarm.live)
    swarm.kill(gone)
    assert swarm.run_until(
        lambda: len(next(iter(swarm.live.values())).machine.certificate.plan.roster) == 2, 120
    )
    nodes["n"] = swarm.start("n")
    assert swarm.run_until(
        lambda: len(next(iter(swarm.live.values())).machine.certificate.plan.roster) == 3, 120
    )
    swarm.run(4 * TRAIN_S)
    assert any(node.effects(effects.GoAhead) for node in nodes.values())
    trained: dict[int, set[str]] = {}
    for name, node in nodes.items():
        begun = [(at, e) for at, e in node.done if isinstance(e, effects.Answer | effects.GoAhead)]
        for (at, effect), (until, _) in pairwise(begun):
            if until - at > 0.1 and getattr(effect, "how", "") != "keep":
                trained.setdefault(effect.data_base + node.machine.world_rank, set()).add(name)
    assert not [names for names in trained.values() if len(names) > 1]
