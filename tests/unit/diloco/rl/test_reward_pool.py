"""Rewards that take long are computed by several processes, with the same outcome."""

from __future__ import annotations

import itertools
import os
from functools import partial

import pytest

from diloco.errors import DilocoError, UserError
from diloco.options.flags import GrpoConfig
from diloco.rl import reward_pool
from diloco.rl.reward_pool import PAYS_S, RewardPool
from diloco.rl.task_choice import open_task

CODE = """
import os

class Env:
    num_examples = 9

    def prompt(self, number):
        return str(number)

    def reply(self, number, said):
        return said[-1] * 2 if len(said) < 2 else None

    def reward(self, number, said):
        print("printed by the reward")
        match said[-1].split():
            case ["process"]:
                return os.getpid()
            case ["gpus"]:
                return len(os.environ["CUDA_VISIBLE_DEVICES"])
            case ["fail"]:
                raise ZeroDivisionError("by zero")
            case ["fail", "except", "in", process] if process != str(os.getpid()):
                raise RuntimeError("no GPU")
            case ["end", "except", "in", process] if process != str(os.getpid()):
                os._exit(1)
        return number + len(said[-1]) / 8
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "environment.py"
    path.write_text(CODE)
    task = open_task(GrpoConfig(dataset=f"{path}:Env"), seed=0)
    # Time flies, so that nothing is judged here first.
    task.pool = RewardPool(task.pool._opened, clock=itertools.count(0.0, PAYS_S).__next__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_pool, "num_cores", lambda: 2)
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        yield task
    for one in task.pool._processes:
        with one.process:
            one.process.kill()


def scores(task, *texts):
    return task.pool.each("scores", task.scores, [(task.example(n), [text]) for n, text in enumerate(texts)])


def test_other_processes_find_the_same_in_the_same_order_without_a_gpu(task):
    texts = ["x" * length for length in range(1, 9)]
    assert scores(task, *texts) == [task.scores(task.example(n), [text]) for n, text in enumerate(texts)]
    [process], [gpus] = scores(task, "process", "gpus")
    assert process in {one.process.pid for one in task.pool._processes} and gpus == 0.0
    assert len(task.pool._processes) == 2
    asked = [(task.example(1), ["x"]), (task.example(0), ["x", "y"])]
    assert task.pool.each("reply", task.reply, asked) == ["xx", None]
    assert task.pool.each("is_solved", task.is_solved, asked) == [True, False]


def test_what_fails_in_another_process_is_judged_here_with_the_same_error(task, caplog):
    text = f"fail except in {os.getpid()}"
    assert scores(task, "x", text, "xx") == [[1 / 8], [1 + len(text) / 8], [2 + 2 / 8]]
    assert "1 rewards failed in processes of their own" in caplog.text and "no GPU" in caplog.text
    with pytest.raises(UserError, match=r"environment\.py:Env failed with ZeroDivisionError: by zero"):
        scores(task, "x", "fail", "xx")
    assert scores(task, "x") == [[1 / 8]]


def test_a_process_that_ends_is_an_error_that_says_so(task):
    with pytest.raises(DilocoError, match="a process that computes rewards has ended"):
        scores(task, f"end except in {os.getpid()}")


def test_other_processes_judge_where_the_rest_would_take_longer_than_what_they_cost(monkeypatch):
    now, judged = [0.0], {"here": 0, "elsewhere": 0}

    def found(seconds, count):
        def here(_example, _said):
            now[0] += seconds
            judged["here"] += 1

        def elsewhere(_question, _here, asked):
            judged["elsewhere"] += len(asked)
            return [None] * len(asked)

        judged.update(here=0, elsewhere=0)
        pool = RewardPool(partial(open_task, GrpoConfig(), seed=0), clock=lambda: now[0])
        monkeypatch.setattr(pool, "_elsewhere", elsewhere)
        assert pool.each("scores", here, [(None, [])] * count) == [None] * count
        return judged["here"], judged["elsewhere"]

    assert found(5.0, 8192) == (1, 8191)
    assert found(0.125, 8192) == (16, 8176)
    assert found(0.125, 31) == (31, 0)
    assert found(0.001, 2000) == (2000, 0)
    assert found(5.0, 1) == (1, 0)
