"""The trainer's end of rollout peers' rollouts, by a daemon that answers as the test says."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch

from diloco.options.flags import GrpoConfig
from diloco.rl.peer_rollouts import Group, PeerRollouts, rows_of
from diloco.rl.task_choice import open_task


def completions(*scores: list[float], tokens: list[list[int]], logprobs: list[list[float]]) -> list[dict]:
    fields = zip(tokens, logprobs, scores, strict=True)
    return [{"tokens": ids, "logprobs": values, "scores": of, "turns": []} for ids, values, of in fields]


OWN = Group(
    example=5,
    completions=completions([0.0, 1.0], [1.0, 1.0], tokens=[[1], [2]], logprobs=[[-1.0], [-2.0]]),
)
TERMS = {"vocab_size": 9, "reward_weights": [0.9, 0.1], "num_generations": 2, "num_kept": 4}
SENDER = {"dropped": 3, "rollouts_per_s": 2.0}


class Daemon:
    """The link to a daemon whose queue holds these rollouts."""

    def __init__(self) -> None:
        self.queue: list[dict[str, Any]] = []
        self.uniform: list[dict[str, Any]] = []
        self.is_alone = False
        self.asked: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._frames: list[dict[str, Any]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.asked.append({"kind": kind, **fields})

    def receive(self, kind: str) -> dict[str, Any]:
        if kind == "rollout":
            return {"kind": kind, **self._frames.pop(0)}
        assert not self._frames
        count = self.asked[-1]["count"]
        taken = self.queue[:count] if len(self.queue) >= count else []
        self.queue = self.queue[len(taken) :]
        uniform, self.uniform = self.uniform, []
        self._frames = [*taken, *uniform]
        return {
            "kind": kind,
            "num_rollouts": len(taken),
            "num_uniform": len(uniform),
            "senders": {"peer": SENDER},
            "is_alone": self.is_alone,
        }

    def close(self) -> None: ...


def sent(staleness: int, *scores: list[float], by: str = "peer") -> dict[str, Any]:
    scores = scores or ([1.0, 1.0], [0.0, 0.0])
    told = completions(*scores, tokens=[[3, 4], [5]], logprobs=[[-0.5, -0.5], [-1.5]])
    return {"peer_id": by, "example": 7, "staleness": staleness, "completions": told}


@pytest.fixture
def daemon():
    return Daemon()


@pytest.fixture
def source(daemon, tmp_path):
    return source_of(daemon, tmp_path)


def source_of(daemon, tmp_path, **terms):
    return PeerRollouts(
        daemon,
        tmp_path / "policies",
        torch.float32,
        {**TERMS, **terms},
        step_of=lambda: 12,
        judge=lambda asked: [[1.0, 1.0] if tokens == [3, 4] else [0.0, 0.0] for _, tokens, _ in asked],
        on_event=lambda **fields: daemon.events.append(fields),
    )


def test_rollouts_of_peers_are_trained_on_with_their_age(daemon, source):
    daemon.queue = [sent(0), sent(3)]
    groups = source.take(2)
    assert [group.staleness for group in groups] == [0, 3]
    assert source.figures() == {
        "staleness_mean": 1.5,
        "staleness_max": 3,
        "uniform_groups": 0,
        "reward_of_all": 0.5,
        "rollout_peers": 1,
        "rollouts_dropped": 3,
        "rollouts_per_s": 2.0,
    }


def test_a_learner_generates_its_own_only_while_no_rollout_peer_is_there_and_says_so_once(
    daemon, source, caplog
):
    for is_alone, queue, found in (
        (False, [], None),
        (True, [], []),
        (True, [], []),
        (False, [], None),
        (False, [sent(0)], [Group(**sent(0))]),
    ):
        daemon.is_alone, daemon.queue = is_alone, queue
        assert source.take(1) == found
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert source.figures()["rollout_peers"] == 1
    source.generated([OWN])
    assert source.figures()["rollout_peers"] == 0
    assert source.figures()["reward_of_all"] == pytest.approx((0.1 + 1.0) / 2)


def test_the_daemon_is_told_of_each_policy_and_of_the_step_that_it_is_of(daemon, source):
    source.publisher.take({"w": torch.ones(4)}.items())
    source.push()
    told = daemon.asked[-1]
    assert (told["kind"], told["step"]) == ("policy", 12)
    assert told["digest"] == source.publisher.digest == told["files"][-1]["leads_to"]
    assert told["terms"] == TERMS


def test_groups_of_uniform_reward_are_counted_and_checked_but_not_trained_on(daemon, source):
    for _ in range(10):
        daemon.queue = [sent(0)]
        daemon.uniform = [sent(0, [1.0, 1.0], [1.0, 1.0], by="forger")] * 3
        assert [group.peer_id for group in source.take(1)] == ["peer"]
        source.compared([(0, 0.01), (1, 0.02)])
    assert source.figures()["uniform_groups"] == 3
    assert source.figures()["reward_of_all"] == pytest.approx(7 / 8)
    # One completion of two, chosen at random, is judged again: about half are found to be false.
    assert set(left_out(daemon)) == {"forger"}


def left_out(daemon: Daemon) -> list[str]:
    return [asked["peer_id"] for asked in daemon.asked if asked["kind"] == "leave out"]


@pytest.mark.parametrize(
    ("differences", "scores", "reason"),
    [
        ([0.01, 0.02], [[1.0, 1.0], [0.0, 0.0]], ""),
        ([2.0, 1.5], [[1.0, 1.0], [0.0, 0.0]], "nats per token"),
        ([0.01, 0.02], [[0.5, 1.0], [1.0, 1.0]], "judged again were false"),
    ],
)
def test_who_cheats_is_left_out_within_a_few_generations(daemon, source, differences, scores, reason):
    for _ in range(10):
        daemon.queue = [sent(0, *scores)]
        source.take(1)
        source.compared(enumerate(differences))
    assert set(left_out(daemon)) == ({"peer"} if reason else set())
    assert bool(daemon.events) is bool(reason)
    if reason:
        assert reason in daemon.events[0]["reason"]


def test_a_completion_that_cannot_be_judged_counts_as_falsely_judged(daemon, source):
    source._judge = lambda asked: [[math.inf] for _ in asked]
    for _ in range(10):
        daemon.queue = [sent(0)]
        assert len(source.take(1)) == 1
    assert set(left_out(daemon)) == {"peer"}


def test_a_completion_without_a_verdict_counts_neither_for_nor_against_its_peer(daemon, source):
    def judged_by(scores, times):
        source._judge = lambda asked: [scores for _ in asked]
        for _ in range(times):
            daemon.queue = [sent(0)]
            source.take(1)
        return left_out(daemon)

    assert judged_by([], 64) == []
    assert judged_by([math.inf], 9) == ["peer"]


def test_no_more_of_a_peers_completions_are_judged_again_at_once_than_are_needed(daemon, source):
    judge, num_judged = source._judge, []
    source._judge = lambda asked: num_judged.append(len(asked)) or judge(asked)
    daemon.queue = [sent(0, by=by) for by in ["few"] * 3 + ["many"] * 40]
    daemon.uniform = [sent(0, [1.0, 1.0], [1.0, 1.0], by="uniform")] * 60
    source.take(43)
    assert num_judged == [3 + 8 + 8]


def test_copies_of_the_step_before_are_recognized_in_steps_of_any_size(daemon, tmp_path):
    source, per_generation, numbers = source_of(daemon, tmp_path, num_kept=3000), 1500, itertools.count()

    def unlikely(by, tokens):
        told = completions([0.0, 0.0], [0.0, 0.0], tokens=tokens, logprobs=[[-40.0], [-40.0]])
        return {"peer_id": by, "example": 7, "staleness": 0, "completions": told}

    first, *others = ([[next(numbers)], [next(numbers)]] for _ in range(2 * per_generation))
    daemon.queue = [unlikely("author", tokens) for tokens in (first, *others)]
    source.take(per_generation)
    source.take(per_generation)
    daemon.queue = [unlikely("copies", first)]
    source.take(1)
    source.take(0)
    assert left_out(daemon) == ["copies"]


def test_who_cheats_is_left_out_once_though_a_generation_is_compared_in_parts_and_again(daemon, source):
    daemon.queue = [sent(0)] * 8
    source.take(8)
    for start in (0, 4, 8, 12, 0, 4, 8, 12):
        source.compared((number, 9.0) for number in range(start, start + 4))
    source.take(1)
    source.take(1)
    assert left_out(daemon) == ["peer"]


def test_a_learners_own_completions_are_not_compared(daemon, source):
    daemon.is_alone = True
    for _ in range(10):
        source.take(1)
        source.generated([OWN])
        source.compared([(0, 9.0), (1, 9.0)])
    assert left_out(daemon) == []


def test_completions_of_a_prompt_are_rows_side_by_side_with_what_was_judged():
    task = open_task(GrpoConfig(dataset="reasoning-gym:chain_sum"), seed=0)
    rows = rows_of(task, [OWN, Group(**sent(1))])
    assert [(row["tokens"], row["logprobs"], row["mask"]) for row in rows] == [
        ([1], [-1.0], [1]),
        ([2], [-2.0], [1]),
        ([3, 4], [-0.5, -0.5], [1, 1]),
        ([5], [-1.5], [1]),
    ]
    assert [row["scores"] for row in rows] == [[0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert [row["prompt"] for row in rows[::2]] == [task.example(5).prompt, task.example(7).prompt]
