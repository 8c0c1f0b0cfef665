"""Rewards that take long are computed by several processes, with the same outcome."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from diloco.errors import DilocoError, UserError
from diloco.options.flags import GrpoConfig
from diloco.rl import reward_pool
from diloco.rl.dialogues import judged_again
from diloco.rl.reward_pool import PAYS_S, RewardPool
from diloco.rl.task_choice import open_task

CODE = """
import os
import signal
import time

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
                os._exit(9)
            case ["kill", "once", marker]:
                if not os.path.exists(__file__ + marker):
                    os.mkdir(__file__ + marker)
                    os.kill(os.getpid(), signal.SIGKILL)
                return os.getpid()
            case ["fork", fifo]:
                with open(fifo, "w"):
                    if os.fork():
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(20)
                    os.mkdir(fifo + ".outlived")
                    os._exit(0)
        return number + len(said[-1]) / 8
"""
# Opened by the first process of the pool alone.
OPENS_ONCE = (
    CODE
    + """
if not os.environ["CUDA_VISIBLE_DEVICES"]:
    os.mkdir(__file__ + ".opened")
"""
)


@contextmanager
def opened(directory, code):
    path = directory / "environment.py"
    path.write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_pool, "num_cores", lambda: 2)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        task = open_task(GrpoConfig(dataset=f"{path}:Env"), seed=0)
        # Time flies, so that nothing is judged here first.
        task.pool = RewardPool(task.pool._opened, clock=itertools.count(0.0, PAYS_S).__next__)
        yield task
    for one in task.pool._processes:
        one.end()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("environment"), CODE) as task:
        yield task


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


def test_what_ends_its_process_is_judged_once_more_alone_and_others_answer_the_rest(task, caplog):
    [first], x, [second], [third], [process] = scores(
        task, "kill once .a", "x", "kill once .b", "kill once .c", "process"
    )
    assert x == [1 + 1 / 8]
    assert len({first, second, third, process, os.getpid()}) == 5
    assert "3 rewards failed in processes of their own; the first: the process has ended" in caplog.text


def test_what_ends_its_process_alone_too_is_an_error_and_not_judged_here(task):
    with pytest.raises(DilocoError, match=r"memory is used up, or the reward .* ends it \(exit code 9\)"):
        scores(task, "x", f"end except in {os.getpid()}", "xx")
    assert scores(task, "x") == [[1 / 8]]


def test_what_ends_its_process_is_not_waited_for_though_it_leaves_a_child_which_is_ended(task, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        asked = [(task.example(0), [f"fork {fifo}"]), (task.example(1), ["x"])]
        assert task.pool.each("scores", task.scores, asked, no_verdict=[]) == [[], [1 + 1 / 8]]
        os.set_blocking(child, True)
        assert os.read(child, 1) == b""
    finally:
        os.close(child)
    assert not (tmp_path / "fifo.outlived").exists()


def test_what_cannot_be_sent_is_judged_here(task, caplog):
    strange = replace(task.example(0), data={**task.example(0).data, "no": lambda: 0})
    asked = [(strange, ["x"]), (task.example(0), ["y"])]
    assert task.pool.each("reply", task.reply, asked) == ["xx", "yy"]
    assert "1 rewards failed in processes of their own" in caplog.text


def test_a_rollout_peer_is_not_blamed_for_a_process_that_ended(task):
    texts = [f"end except in {os.getpid()}", "kill once .d", "x"]
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: texts[tokens[0]])
    ends, [process], x = judged_again(task, tokenizer, [(number, [number], []) for number in range(3)])
    assert (ends, x) == ([], [2 + 1 / 8]) and process != os.getpid()


def test_a_process_that_cannot_open_the_task_gets_no_questions(tmp_path, caplog):
    with opened(tmp_path, OPENS_ONCE) as task:
        found = scores(task, *["process"] * 2)
        # The other process has failed to open the task by now, or does so meanwhile.
        found += scores(task, *["process"] * 64)
        [process] = {one.process.pid for one in task.pool._processes if one.is_open}
        assert {pid for [pid] in found} == {process}
    assert not caplog.records


def test_a_task_that_opens_in_no_other_process_is_judged_here(tmp_path, caplog):
    (tmp_path / "environment.py.opened").mkdir()
    with opened(tmp_path, OPENS_ONCE) as task:
        assert scores(task, "process", "process") == [[os.getpid()]] * 2
        assert "2 rewards failed" in caplog.text and "FileExistsError" in caplog.text
        caplog.clear()
        assert scores(task, "process") == [[os.getpid()]]
    assert not task.pool._processes and not caplog.records


@pytest.mark.parametrize(("threads", "count"), [("2", 2), ("2,1", 2), ("0", 1), ("", 16), ("64", 16)])
def test_a_trainer_has_no_more_processes_than_its_share_of_the_cores(monkeypatch, threads, count):
    monkeypatch.setattr(reward_pool, "num_cores", lambda: 32)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert reward_pool._num_processes() == count


def test_other_processes_judge_where_the_rest_would_take_longer_than_what_they_cost(monkeypatch):
    now, judged = [0.0], {"here": 0, "elsewhere": 0}

    def found(seconds, count):
        def here(_example, _said):
            now[0] += seconds
            judged["here"] += 1

        def elsewhere(_question, _here, asked, _no_verdict):
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
