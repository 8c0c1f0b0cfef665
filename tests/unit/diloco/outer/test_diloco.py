from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from diloco.errors import DilocoError
from diloco.errors import UserError as DilocoUserError
from diloco.outer.diloco import PROGRESS_INTERVAL_S, Diloco, Position, Restored, _Progress
from diloco.outer.exchange import Asked, SharedWeights, asked_daemon
from diloco.outer.world import World
from peers.daemon.link import LINK_ENV
from peers.errors import LinkLost, UserError
from tests.support.scripted_daemon import COMMITTED, ScriptedDaemon, halving, joining, slow_rounds
from tests.support.torch_ranks import Ranks


@pytest.fixture
def model():
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, 8.0)
    nn.init.zeros_(model.bias)
    return model


@pytest.fixture
def path(tmp_path, monkeypatch):
    path = tmp_path / "link.sock"
    monkeypatch.setenv(LINK_ENV, str(path))
    return path


def test_alone_it_only_counts_steps(model, monkeypatch):
    monkeypatch.delenv(LINK_ENV, raising=False)
    outer = Diloco(model, max_steps=3)
    for _ in range(3):
        assert not outer.done
        assert outer.step(num_tokens=5) is None
    outer.finish()
    assert (outer.done, outer.nominal_step, outer.epoch, outer.evaluates) == (True, 3, 0, True)
    assert model.weight.unique().tolist() == [8.0]


def test_weights_come_from_the_commit_at_each_epochs_end(model, path):
    with ScriptedDaemon(path) as daemon:
        outer = Diloco(model)
        assert (outer.active, outer.world_rank, outer.steps_per_epoch) == (True, 0, 2)
        commits = [outer.step(num_tokens=5) for _ in range(4)]
        outer.finish()
    assert [commit and commit.epoch for commit in commits] == [None, 1, None, 2]
    assert commits[1].contributors == [0]
    assert model.weight.unique().tolist() == [2.0]
    assert outer.position == Position(epoch=2, local_step=0, data_base=6)
    assert daemon.kinds() == ["offer", "ready", "ready", "finished"]
    assert [m["tokens"] for m in daemon.messages if m["kind"] == "ready"] == [10, 10]


@pytest.mark.parametrize("number", [torch.tensor, np.float32], ids=["torch", "numpy"])
def test_loss_and_tokens_may_be_what_a_loop_has_them_as(model, path, number):
    with ScriptedDaemon(path) as daemon:
        outer = Diloco(model)
        for _ in range(2):
            outer.step(num_tokens=number(5), loss=number(2.5))
        outer.finish()
    assert [(m["tokens"], m["loss"]) for m in daemon.messages if m["kind"] == "ready"] == [(10, 2.5)]


def test_a_loss_is_read_only_when_it_is_reported(model, path, monkeypatch):
    monkeypatch.setattr("diloco.outer.diloco.time", SimpleNamespace(monotonic=lambda: 0.0))

    class OnGpu:
        num_reads = 0

        def __float__(self):
            self.num_reads += 1
            return 2.5

    loss = OnGpu()
    with ScriptedDaemon(path, local_steps=3):
        outer = Diloco(model)
        for _ in range(3):
            outer.step(num_tokens=5, loss=loss)
    assert loss.num_reads == 1


def too_late_at_first(local_step: int):
    """The first work is too late for its commit and is kept as late work; all later work is averaged."""
    answers = []

    def rule(message, out, inn):
        if message["kind"] != "ready" or answers:
            return halving(message, out, inn)
        inn[:] = out
        others = {"epoch": 1, "fragment": 0, "last": False, "contributors": [], "local_step": local_step}
        answers.append({**COMMITTED, "data_base": 3, **others})
        return "committed", answers[0]

    return rule


def test_who_comes_too_late_keeps_its_tokens_and_does_not_evaluate_its_own_weights(model, path):
    with ScriptedDaemon(path, too_late_at_first(7), local_steps=10, world_rank=5) as daemon:
        outer = Diloco(model, max_steps=100)
        for _ in range(10):
            outer.step(num_tokens=5)
        assert (outer.position.local_step, outer.evaluates) == (7, False)
        for _ in range(3):
            outer.step(num_tokens=5)
        outer.finish()
    assert [m["tokens"] for m in daemon.messages if m["kind"] == "ready"][:2] == [50, 65]


def test_who_comes_too_late_for_the_last_round_but_one_ends_on_the_average_of_the_last(model, path):
    with ScriptedDaemon(path, too_late_at_first(7), local_steps=10) as daemon:
        outer = Diloco(model, max_steps=15)
        while not outer.done:
            outer.step(num_tokens=5)
        # Trainers evaluate and save these weights, before they call `finish`.
        assert model.weight.unique().tolist() == [4.0]
        outer.finish()
    assert [m["last"] for m in daemon.messages if m["kind"] == "ready"] == [False, True]


def test_under_a_time_budget_the_epoch_ends_after_the_steps_that_were_possible(model, path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("diloco.outer.diloco.time", SimpleNamespace(monotonic=lambda: now))

    def within_four_seconds(message, out, inn):
        answer = halving(message, out, inn)
        return answer and (answer[0], {**answer[1], "epoch_s": 4.0})

    with ScriptedDaemon(path, within_four_seconds, local_steps=10) as daemon:
        outer, steps = Diloco(model), []
        for seconds in (1.0, 1.0, 1.0, 1.0, 0.1, *[0.01] * 9):
            now += seconds
            outer.step(num_tokens=5)
            steps.append(outer.nominal_step)
        outer.finish()
    assert steps[:4] == [2, 5, 7, 10]
    # A peer that is quick enough does all its steps.
    assert steps[4:] == list(range(11, 21))
    ready = [(m["local_step"], m["tokens"], m["step"]) for m in daemon.messages if m["kind"] == "ready"]
    assert ready == [(10, 20, 10), (10, 50, 20)]
    # The daemon is told the duration of an inner step, not of a nominal one.
    assert [m["step_s"] for m in daemon.messages if m["kind"] == "ready"] == [1.0, pytest.approx(0.01)]


def learned_after(*answers: float, local_step: int = 0):
    """The epoch's length, by the daemon's answers one after the other, and then by the last one."""
    answers = list(answers)

    def rule(message, out, inn):
        match message["kind"]:
            case "offer":
                kind, start = halving(message, out, inn)
                return kind, {**start, "local_step": local_step, "num_peers": 2}
            case "budget":
                return "budget", {"epoch_s": answers.pop(0) if len(answers) > 1 else answers[0]}
        answer = halving(message, out, inn)
        return answer and (
            answer[0],
            {**answer[1], "num_peers": 2} if message["kind"] == "ready" else answer[1],
        )

    return rule


@pytest.mark.parametrize(
    ("answers", "local_step", "steps"),
    [
        # Until the length is known only steps count; then the time since the epoch's beginning.
        ((0.0, 0.0, 10.0), 0, [1, 2, 6, 8, 10]),
        # The first answer is by few speeds, or by the duration of a slow first step.
        ((0.0, 100.0, 10.0), 0, [1, 2, 6, 8, 10]),
        ((10.0, 100.0), 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        # The others are gone, or were wrong.
        ((10.0, 0.0), 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        # A fifth of the time is over for who begins at a fifth of the steps.
        ((0.0, 100.0, 10.0), 2, [3, 4, 8, 10]),
    ],
)
def test_in_an_epoch_that_began_without_a_known_length_a_worker_asks_for_it(
    model, path, monkeypatch, answers, local_step, steps
):
    now, found = 100.0, []
    monkeypatch.setattr("diloco.outer.diloco.time", SimpleNamespace(monotonic=lambda: now))
    rule = learned_after(*answers, local_step=local_step)
    with ScriptedDaemon(path, rule, local_steps=10, local_time=0) as daemon:
        outer = Diloco(model)
        # It evaluates, and compiles.
        now += 90.0
        while outer.epoch == 0:
            now += 2.0
            outer.step(num_tokens=5)
            found.append(outer.nominal_step)
        outer.finish()
    assert found == steps
    assert daemon.kinds().count("budget") == len(steps)


@pytest.mark.parametrize(("num_peers", "known_s", "local_time"), [(1, 0.0, 0), (2, 4.0, 0), (2, 0.0, None)])
def test_a_worker_asks_for_an_epochs_length_only_if_others_may_say_it(
    model, path, num_peers, known_s, local_time
):
    rule = joining(0, 1.0, epoch_s=known_s, num_peers=num_peers)
    with ScriptedDaemon(path, rule, local_steps=3, local_time=local_time) as daemon:
        outer = Diloco(model)
        outer.step(num_tokens=5)
        outer.step(num_tokens=5)
    assert "budget" not in daemon.kinds()


def steps_of_a_late_rank(world: World, path: Path) -> list[int]:
    """The local step after each of its steps, in an epoch whose length becomes known in its course."""
    os.environ[LINK_ENV] = str(path)
    outer, found = Diloco(nn.Linear(3, 2)), []
    if world.rank == 1:
        # By its own clock the epoch is nearly over.
        outer._epoch_began_at -= 3500.0
    for _ in range(3):
        outer.step(num_tokens=5)
        found.append(outer.local_step)
    return found


def test_all_ranks_learn_an_epochs_length_at_the_same_step(tmp_path):
    path = tmp_path / "link.sock"
    rule = learned_after(0.0, 3600.0)
    with ScriptedDaemon(path, rule, local_steps=10, local_time=0) as daemon, Ranks(2) as ranks:
        assert ranks.run(steps_of_a_late_rank, path) == [[1, 2, 3]] * 2
    assert daemon.kinds().count("budget") == 3


def test_the_optimizers_state_survives_a_commit(model, path):
    optimizer = torch.optim.AdamW(model.parameters())
    with ScriptedDaemon(path, local_steps=1):
        outer = Diloco(model)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        before = optimizer.state[model.weight]["exp_avg"].clone()
        outer.step(num_tokens=1)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], before)


@pytest.mark.parametrize(
    ("max_steps", "averaged"),
    [(3, [(2, 2, False), (3, 1, True)]), (2, [(2, 2, True)])],
    ids=["partial", "whole"],
)
def test_the_last_epoch_is_averaged_once_when_the_run_ends(model, path, max_steps, averaged):
    with ScriptedDaemon(path) as daemon:
        outer = Diloco(model, max_steps=max_steps)
        while not outer.done:
            outer.step(num_tokens=5)
        assert outer.nominal_step == max_steps
        outer.finish()
        outer.finish()
    ready = [(m["step"], m["local_step"], m["last"]) for m in daemon.messages if m["kind"] == "ready"]
    assert ready == averaged
    assert daemon.kinds()[-1] == "finished"


def test_a_loop_that_just_stops_has_its_work_averaged(model, path):
    with ScriptedDaemon(path) as daemon:
        outer = Diloco(model)
        outer.step(num_tokens=7)
        outer.finish()
    ready = next(m for m in daemon.messages if m["kind"] == "ready")
    assert (ready["tokens"], ready["last"]) == (7, True)


def test_a_loop_that_stops_while_a_commit_is_awaited_waits_for_it_before_it_leaves(model, path):
    with ScriptedDaemon(path, slow_rounds(), local_steps=2) as daemon:
        outer = Diloco(model)
        assert trained(outer, model, steps=2) == [None] * 2 and outer.in_flight
        outer.finish()
    assert [(commit.epoch, outer.epoch) for commit in outer.commits] == [(1, 1)]
    # The weights were 10 when handed over.
    assert model.weight.unique().tolist() == [5.0]
    assert daemon.kinds() == ["offer", "ready", "finished"]


def test_a_joiner_starts_where_the_swarm_is(model, path):
    with ScriptedDaemon(path, joining(4, 1.0, local_step=1, data_base=9, num_peers=3), world_rank=2):
        outer = Diloco(model)
        assert (outer.nominal_step, outer.world_rank, outer.num_peers) == (9, 2, 3)
        assert model.weight.unique().tolist() == [1.0]
        assert not outer.evaluates
        assert outer.step(num_tokens=1).epoch == 5


def test_a_checkpoint_of_the_swarms_state_keeps_its_own_weights(model, path, tmp_path):
    def restore(world_rank, needs_outer):
        assert (world_rank, needs_outer) == (0, True)
        nn.init.constant_(model.weight, 3.0)
        return Restored(
            position=Position(epoch=6, local_step=1, data_base=4), tokens=(30,), directory=tmp_path
        )

    with ScriptedDaemon(path) as daemon:
        outer = Diloco(model, restore=restore)
        assert (outer.epoch, outer.local_step) == (6, 1)
        assert model.weight.unique().tolist() == [3.0]
        outer.step(num_tokens=12)
    assert daemon.messages[0]["resume"] == str(tmp_path)
    # Those before the checkpoint weigh as much as those after it.
    assert daemon.messages[1]["tokens"] == 42


def test_a_worker_that_starts_again_in_a_live_run_needs_no_outer_state_of_its_checkpoint(model, path):
    needed = []
    with ScriptedDaemon(path, joining(4, 1.0), needs_offer=False):
        Diloco(model, restore=lambda _rank, needs_outer: needed.append(needs_outer))
        assert asked_daemon() == Asked(world_rank=0, needs_outer=False, run_is_alive=True)
    assert needed == [False]


def test_without_a_daemon_no_run_is_alive(monkeypatch):
    monkeypatch.delenv(LINK_ENV, raising=False)
    assert asked_daemon() == Asked(world_rank=None, needs_outer=False, run_is_alive=False)


def test_the_daemon_adds_its_state_to_a_checkpoint(model, path, tmp_path):
    with ScriptedDaemon(path):
        Diloco(model).checkpoint(tmp_path)
    assert (tmp_path / "outer.bin").read_bytes() == b"state"


@pytest.mark.parametrize(
    ("kind", "answer", "error", "message"),
    [
        ("snapshot", ("failed", {"reason": "no state yet"}), DilocoError, "no state yet"),
        ("written", ("failed", {"reason": "disk full"}), DilocoError, "disk full"),
        ("offer", ("refused", {"message": "rank 1 is taken"}), UserError, "rank 1 is taken"),
    ],
)
def test_a_refusal_says_why(model, path, tmp_path, kind, answer, error, message):
    def rule(received, out, inn):
        return answer if received["kind"] == kind else halving(received, out, inn)

    with ScriptedDaemon(path, rule), pytest.raises(error, match=message):
        outer = Diloco(model, local_steps=1)
        outer.checkpoint(tmp_path)
        outer.step(num_tokens=1)


def test_a_daemon_that_dies_is_noticed(model, path):
    with ScriptedDaemon(path):
        outer = Diloco(model, local_steps=1)
    with pytest.raises(LinkLost):
        outer.step(num_tokens=1)


def test_the_lowest_contributor_evaluates(model, path):
    def rule(message, out, inn):
        kind, fields = halving(message, out, inn)
        return kind, {**fields, "contributors": [2, 1]} if kind == "committed" else fields

    with ScriptedDaemon(path, rule, world_rank=1, local_steps=1):
        outer = Diloco(model)
        assert not outer.evaluates
        outer.step(num_tokens=1)
        assert outer.evaluates


def test_progress_is_reported_now_and_then_with_its_rate():
    progress, interval_s = _Progress(), PROGRESS_INTERVAL_S
    assert [progress.due(10, now * interval_s) for now in (0.0, 0.4, 0.8)] == [None, None, None]
    assert progress.due(10, 1.5 * interval_s) == pytest.approx(30 / (1.5 * interval_s))
    assert progress.due(10, 2 * interval_s) is None


def trained(outer: Diloco, model: nn.Module, steps: int = 2) -> list[int | None]:
    """Take steps that each add 1 to every weight. Returns for each step the epoch that it ended, or None."""
    epochs = []
    for _ in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        commit = outer.step(num_tokens=5)
        epochs.append(commit and commit.epoch)
    return epochs


@pytest.mark.parametrize(("mixing", "merged"), [(None, 5 + 2), (0.0, 5), (0.5, (12 + 5) / 2)])
def test_training_goes_on_while_a_round_takes_place(model, path, mixing, merged):
    with ScriptedDaemon(path, local_steps=4, overlap_steps=2, mixing=mixing) as daemon:
        outer = Diloco(model)
        assert trained(outer, model) == [None, None]
        assert outer.in_flight
        assert trained(outer, model) == [None, 1]
        assert not outer.in_flight
        # The weights were 10 when sent and have grown by 2; the round returned 5.
        assert model.weight.unique().tolist() == [merged]
        assert outer.position == Position(epoch=1, local_step=0, data_base=3)
        ready = next(m for m in daemon.messages if m["kind"] == "ready")
        assert (ready["local_step"], ready["tokens"], ready["step"]) == (2, 10, 2)
        assert outer.tokens == [10]


def outer_sgd_of_rate_two(start):
    """torchft's outer step in its regression test of streaming: global' = global - 2 (global - snapshot)."""
    anchors = {}

    def rule(message, out, inn):
        answer = halving(message, out, inn)
        if message["kind"] == "ready":
            anchor = anchors.get(message["fragment"], start)
            anchors[message["fragment"]] = inn[:] = anchor - 2 * (anchor - out[0])
        return answer

    return rule


@pytest.mark.parametrize(
    ("mixing", "first", "second"),
    [
        # H = 6, two fragments, steps of -2, a merge one step after the snapshot, worked out by hand. Fragment 0 leaves
        # at 96, its anchor moves from 100 to 92, and the local 94 becomes 92 - 2, or 92, or what lies between.
        (None, [98, 96, 90, 88, 86, 84, 82, 80, 66], [98, 96, 94, 92, 90, 78, 76, 74, 72]),
        (0.0, [98, 96, 92, 90, 88, 86, 84, 82, 72], [98, 96, 94, 92, 90, 80, 78, 76, 74]),
        (0.5, [98, 96, 93, 91, 89, 87, 85, 83, 77.5], [98, 96, 94, 92, 90, 84, 82, 80, 78]),
        (1.0, [98, 96, 94, 92, 90, 88, 86, 84, 82], [98, 96, 94, 92, 90, 88, 86, 84, 82]),
    ],
)
def test_overlapped_fragments_are_merged_as_torchft_does_it_or_keep_their_progress(
    path, mixing, first, second
):
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 100.0)
    seen, rule = [], outer_sgd_of_rate_two(100.0)
    with ScriptedDaemon(path, rule, local_steps=6, num_fragments=2, overlap_steps=1, mixing=mixing):
        outer = Diloco(model)
        for _ in range(9):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(2.0)
            outer.step(num_tokens=1)
            seen.append([layer.weight.item() for layer in model])
    assert seen == [list(pair) for pair in zip(first, second, strict=True)]


def test_fragments_are_averaged_one_after_the_other(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 8.0)
    with ScriptedDaemon(path, local_steps=4, num_fragments=2) as daemon:
        outer = Diloco(model)
        assert trained(outer, model) == [None, 1]
        assert [layer.weight.unique().tolist() for layer in model] == [[5.0], [10.0]]
        assert trained(outer, model) == [None, 2]
        assert [layer.weight.unique().tolist() for layer in model] == [[7.0], [6.0]]
        assert outer.nominal_step == 4
    ready = [(m["fragment"], m["tokens"]) for m in daemon.messages if m["kind"] == "ready"]
    assert ready == [(0, 10), (1, 20)]


def test_every_fragment_is_averaged_once_more_when_the_run_ends(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with ScriptedDaemon(path, local_steps=6, num_fragments=3, overlap_steps=1) as daemon:
        outer = Diloco(model, max_steps=4)
        while not outer.done:
            last = outer.step(num_tokens=1)
        flushed = outer.commits
        outer.finish()
    ready = [(m["fragment"], m["local_step"], m["last"]) for m in daemon.messages if m["kind"] == "ready"]
    assert ready == [(0, 1, False), (1, 2, False), (2, 0, False), (0, 0, True)]
    assert (last.epoch, outer.nominal_step) == (4, 4)
    assert [commit.epoch for commit in flushed] == [2, 3, 4]


def test_work_that_missed_its_round_counts_the_next_time(path, model):
    def rule(message, out, inn):
        kind, fields = halving(message, out, inn)
        if message["kind"] == "ready" and message["epoch"] == 0:
            fields = {**fields, "contributors": [], "epoch": 3}
        return kind, fields

    with ScriptedDaemon(path, rule, local_steps=2) as daemon:
        outer = Diloco(model)
        for _ in range(2):
            trained(outer, model)
    assert [m["tokens"] for m in daemon.messages if m["kind"] == "ready"] == [10, 20]


def test_fragments_whose_anchor_moved_meanwhile_are_shifted(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.constant_(model[1].weight, 8.0)

    def rule(message, out, inn):
        kind, fields = halving(message, out, inn)
        if message["kind"] == "ready":
            daemon.buffers(1)[1][:] = -3.0
            fields = {**fields, "shifted": [1]}
        return kind, fields

    with ScriptedDaemon(path, rule, local_steps=4, num_fragments=2) as daemon:
        trained(Diloco(model), model)
    assert model[1].weight.unique().tolist() == [7.0]


def test_a_checkpoint_with_other_fragments_is_refused(model, path, tmp_path):
    def restore(world_rank, needs_outer):
        return Restored(position=Position(), tokens=(1, 2), directory=tmp_path)

    with ScriptedDaemon(path), pytest.raises(DilocoUserError, match="num-fragments 2"):
        Diloco(model, restore=restore)


@pytest.mark.parametrize(
    ("saved", "local_step", "message"),
    [
        (4, 1, "step 1 of an epoch of 4 steps, this run's epochs have 2 .* --hv.local-steps 4"),
        (1, 0, "--hv.local-steps 1"),
        (0, 2, "step 2 of an epoch, this run's epochs have 2 steps"),
        (0, 1, ""),
        (2, 1, ""),
    ],
)
def test_a_checkpoint_of_epochs_of_another_length_is_refused(
    model, path, tmp_path, saved, local_step, message
):
    """Its epoch and its step would be another place in this run; a place beyond the epoch would never be left."""
    place = Position(epoch=3, local_step=local_step)

    def restore(world_rank, needs_outer):
        return Restored(position=place, tokens=(1,), directory=tmp_path, steps_per_epoch=saved)

    refused = pytest.raises(DilocoUserError, match=message) if message else contextlib.nullcontext()
    with ScriptedDaemon(path), refused:
        assert Diloco(model, restore=restore).nominal_step == 7


def test_a_claim_that_the_certificate_did_not_meet_is_given_up(model, path):
    def rule(message, out, inn):
        answer = halving(message, out, inn)
        if message["kind"] != "ready":
            return answer
        return "committed", {**answer[1], "world_rank": 7, "contributors": [5, 7]}

    with ScriptedDaemon(path, rule, world_rank=5, local_steps=1) as daemon:
        outer = Diloco(model)
        assert outer.world_rank == 5
        outer.step(num_tokens=3)
        assert (outer.world_rank, outer.evaluates) == (7, False)
        outer.step(num_tokens=4)
    assert [m["tokens"] for m in daemon.messages if m["kind"] == "ready"] == [3, 4]


def slow_to_commit(num_pending: int, *, epoch_s: float = 0.0):
    """The first commit is slow: the worker is told to train on, and its first `num_pending` polls find no commit."""
    state = {"pending": num_pending, "outcome": None}

    def rule(message, out, inn):
        match message["kind"]:
            case "ready" if state["outcome"] is None:
                _, fields = halving(message, out, inn)
                state["outcome"] = fields
                fields["epoch_s"] = epoch_s
                return "ahead", {name: fields[name] for name in ("epoch", "epoch_s", "data_base")}
            case "collect":
                return "committed", state["outcome"]
            case "poll":
                state["pending"] -= 1
                return ("pending", {}) if state["pending"] >= 0 else ("committed", state["outcome"])
        return halving(message, out, inn)

    return rule


@pytest.mark.parametrize("merge", [{}, {"mixing": 0.0}, {"mixing": 0.5}])
def test_training_goes_on_while_a_commit_takes_long_and_stays_on_top_of_it(model, path, merge):
    with ScriptedDaemon(path, slow_to_commit(1), local_steps=4, **merge) as daemon:
        outer = Diloco(model)
        # The weights are 12 at the end of the epoch; the commit halves them and comes after two more steps.
        assert trained(outer, model, steps=4) == [None] * 4
        assert (outer.in_flight, outer.position) == (True, Position(epoch=1, local_step=0, data_base=3))
        assert trained(outer, model, steps=2) == [None, 1]
        assert model.weight.unique().tolist() == [6 + 2]
        assert (outer.in_flight, outer.position) == (False, Position(epoch=1, local_step=2, data_base=3))
        assert outer.tokens == [10]
        assert trained(outer, model, steps=2) == [None, 2]
        outer.finish()
    assert [m["tokens"] for m in daemon.messages if m["kind"] == "ready"] == [20, 20]
    assert [m["may_go_ahead"] for m in daemon.collects] == [True, True]


def test_who_is_ahead_by_a_whole_epoch_waits_for_the_commit_before_it_hands_over_more(model, path):
    with ScriptedDaemon(path, slow_to_commit(9), local_steps=2) as daemon:
        outer = Diloco(model)
        assert trained(outer, model, steps=3) == [None] * 3
        # Polls after each of the two steps find no commit; then it waits for it, and hands over the two steps.
        assert trained(outer, model, steps=1) == [2]
        assert [commit.epoch for commit in outer.commits] == [1, 2]
        outer.finish()
    assert [m["may_go_ahead"] for m in daemon.collects] == [True, False, True]


@pytest.mark.parametrize(
    ("num_pending", "handed_over"),
    [
        # The time of two steps is long over when the commit comes: the work is handed over at once.
        (2, (4, 15, 8)),
        # The commit comes within the time: it counts from when the peer went ahead.
        (0, (4, 10, 8)),
        # The peer has done all steps of the epoch before the commit comes.
        (9, (4, 20, 8)),
    ],
)
def test_who_is_ahead_when_the_time_is_up_trains_on_until_the_commit_comes(
    model, path, monkeypatch, num_pending, handed_over
):
    now = 100.0
    monkeypatch.setattr("diloco.outer.diloco.time", SimpleNamespace(monotonic=lambda: now))
    with ScriptedDaemon(path, slow_to_commit(num_pending, epoch_s=2.0), local_steps=4) as daemon:
        outer, places = Diloco(model), []
        for _ in range(8):
            now += 1.0
            if 2 in [commit.epoch for commit in outer.commits]:
                break
            places.append((outer.epoch, outer.local_step))
            outer.step(num_tokens=5)
        outer.finish()
    # Data and schedules depend on the place (epoch, inner step): each occurs once, in order.
    assert places == sorted(set(places))
    ready = [(m["local_step"], m["tokens"], m["step"]) for m in daemon.messages if m["kind"] == "ready"]
    assert ready == [(4, 20, 4), handed_over]


def test_where_rounds_take_as_long_as_epochs_an_epoch_ends_with_nothing_in_flight_if_a_save_is_due(
    model, path
):
    with ScriptedDaemon(path, slow_rounds(), local_steps=2):
        outer = Diloco(model)
        flights = []
        for step in range(1, 9):
            outer.step(num_tokens=5, is_save_due=step in (5, 6))
            flights.append(outer.in_flight)
        outer.finish()
    # Always, except in the first epoch, which has no round before it, and while the due save waits.
    assert flights == [False, True, True, True, True, False, False, True]


def trained_by_a_slow_rank(world: World, path: Path) -> list[float]:
    """The weights after two epochs. Each rank holds the whole model; rank 1 is slow to merge."""
    os.environ[LINK_ENV] = str(path)
    merge = SharedWeights.merge

    def late(self, fragment, *, mixing):
        time.sleep(0.5)
        merge(self, fragment, mixing=mixing)

    if world.rank == 1:
        SharedWeights.merge = late
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    outer = Diloco(model)
    trained(outer, model, steps=4)
    weights = model.weight.detach().unique().tolist()
    # At its end, one rank has trained on tokens that no commit contains yet.
    outer.step(num_tokens=5 * world.rank)
    outer.finish()
    return weights


def test_no_rank_hands_over_the_next_weights_while_another_merges_with_the_last(tmp_path):
    path = tmp_path / "link.sock"
    with ScriptedDaemon(path, slow_rounds(), local_steps=2), Ranks(2) as ranks:
        # The weights were 3 when sent and have grown by 2; the round returned 1.5.
        assert ranks.run(trained_by_a_slow_rank, path) == [[1.5 + 2]] * 2


def test_who_must_not_go_ahead_waits(model, path):
    with ScriptedDaemon(path, local_steps=2) as daemon:
        outer = Diloco(model, goes_ahead=False)
        assert trained(outer, model, steps=2) == [None, 1]
        outer.finish()
    assert [m["may_go_ahead"] for m in daemon.collects] == [False]
