"""Which of the trainers are lost, and which are back."""

from __future__ import annotations

from types import SimpleNamespace

from peers.daemon.trainers import Trainers


def view(**states):
    return {name: SimpleNamespace(world_rank=int(name[-1]), state=state) for name, state in states.items()}


def test_who_trained_and_is_gone_is_lost_and_back_once_somebody_trains_by_its_rank():
    trainers = Trainers()
    assert trainers.seen(view(p0="training", p1="averaging", p2="joining")) == ([], [])
    assert trainers.seen(view(p0="training")) == ([1], [])
    assert trainers.seen(view(p0="training")) == ([], [])
    assert trainers.seen(view(p0="training", p1="joining")) == ([], [])
    assert trainers.seen(view(p0="training", q1="training")) == ([], [1])
    assert trainers.seen(view(p0="training", q1="training")) == ([], [])


def test_who_says_that_it_leaves_is_not_lost():
    trainers = Trainers()
    trainers.seen(view(p0="training", p1="training"))
    assert trainers.seen(view(p0="training", p1="leaving")) == ([], [])
    assert trainers.seen(view(p0="training")) == ([], [])
