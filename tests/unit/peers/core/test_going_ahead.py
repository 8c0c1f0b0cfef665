"""A worker whose commit meets with a fault trains on meanwhile (late_work.py)."""

from dataclasses import replace

import pytest

from peers.core import effects, events
from peers.core.timing import ENOUGH_ROUNDS, PATIENCE_BEATS
from tests.unit.peers.core.made import SETTINGS
from tests.unit.peers.core.pump import Pump

TRAIN_S = 5.0


def running_swarm(names: str = "abc") -> Pump:
    """One that knows what a commit usually takes."""
    pump = Pump(names, train_s=TRAIN_S)
    assert pump.reach(ENOUGH_ROUNDS + 1, 120)
    return pump


def ahead(pump: Pump, name: str) -> list[effects.GoAhead]:
    return pump[name].effects(effects.GoAhead)


def test_nobody_goes_ahead_in_a_swarm_that_is_well():
    pump = running_swarm()
    assert pump.reach(ENOUGH_ROUNDS + 6, 120)
    assert [ahead(pump, name) for name in "abc"] == [[], [], []]


def test_where_rounds_are_overlapped_however_long_they_take_all_go_ahead_at_once():
    pump = Pump("abc", settings=replace(SETTINGS, never_waits=True), train_s=TRAIN_S)
    pump.reduce_s = 0.8 * TRAIN_S
    assert pump.reach(4, 60)
    for name in "abc":
        ready_at = [at for at, effect in pump[name].done if isinstance(effect, effects.Reduce)]
        went_at = [at for at, effect in pump[name].done if isinstance(effect, effects.GoAhead)]
        assert len(went_at) >= 4
        assert all(went <= ready for went, ready in zip(went_at, ready_at, strict=False))


def test_who_has_lost_its_quorum_trains_on_in_the_epoch_that_is_to_follow():
    pump = running_swarm()
    epoch, data_base = pump["a"].peer.epoch, pump["a"].peer.certificate.plan.data_base
    pump.kill("b")
    pump.kill("c")
    assert pump.run(TRAIN_S + 2, lambda: bool(ahead(pump, "a")))
    assert ahead(pump, "a") == [effects.GoAhead(epoch + 1, data_base + 3)]
    # What it has handed over still waits for its commit, and others may ask for it.
    assert pump["a"].peer.phase == "ready"


def test_it_goes_ahead_once_and_is_answered_when_the_commit_is_there():
    pump = running_swarm()
    epoch = pump["a"].peer.epoch
    pump.kill("b")
    pump.kill("c")
    assert pump.run(60, lambda: pump["a"].peer.epoch > epoch)
    assert len(ahead(pump, "a")) == 1
    (went_at,) = [at for at, effect in pump["a"].done if isinstance(effect, effects.GoAhead)]
    at, answer = next(
        (at, e) for at, e in reversed(pump["a"].done) if isinstance(e, effects.Answer) and at > went_at
    )
    assert (answer.how, answer.epoch) == ("contributed", epoch + 1)
    assert at > went_at + 1


def test_where_nothing_is_known_to_be_wrong_it_waits_for_longer_than_usual_first():
    pump = running_swarm()
    pump.reduce_s = 30.0
    timing = pump["a"].peer.timing
    assert pump.run(60, lambda: bool(ahead(pump, "a")))
    (went_at,) = [at for at, effect in pump["a"].done if isinstance(effect, effects.GoAhead)]
    ready_at = pump["a"].peer.worker.ready_at
    assert went_at - ready_at >= PATIENCE_BEATS * timing.beat_s


def test_while_a_commit_waits_for_one_that_says_nothing_the_others_train_on():
    pump = running_swarm("abcd")
    pump.run(TRAIN_S - 2)
    # Frozen: its channels stand, and it counts as live for some time yet.
    pump["d"].is_up = False
    epoch = pump["a"].peer.epoch
    assert pump.run(4, lambda: all(ahead(pump, name) for name in "abc"))
    assert {pump[name].peer.epoch for name in "abc"} == {epoch}
    assert all(pump.now - pump[name].peer.worker.ready_at < 1.0 for name in "abc")


@pytest.mark.parametrize(("own_step_s", "local_step"), [(0.5, 3), (4.0, 1), (0.0, 0)])
def test_the_others_begin_the_next_epoch_where_those_who_went_ahead_are_by_then(own_step_s, local_step):
    pump = running_swarm()
    epoch, pump.reduce_s = pump["a"].peer.epoch, 4.0
    assert pump.run(60, lambda: all(ahead(pump, name) for name in "abc"))
    pump["a"].peer.worker.step_s = own_step_s
    for name in "bc":
        pump.feed(name, events.WorkerTrains(pump.settings.steps_per_epoch + 3, step_s=100.0))
    assert pump.reach(epoch + 1, 60)
    answer = pump["a"].effects(effects.Answer)[-1]
    # Not more than its own worker would have done meanwhile.
    assert (answer.how, answer.local_step) == ("contributed", local_step)
