"""A training that cannot go on states the reason once and ends after three attempts."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.commands import (
    DILOCO,
    TORCHRUN,
    TRAINER,
    check_gone,
    text_of_boxes,
    training_flags,
    wait_until,
)

LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
# Enough for a coordinator, a peer, and three workers one after the other.
RUN_TIMEOUT_S = 240.0
REASON = "this peer's weights are not finite any more; is the learning rate too high?"
# So large that the second step overflows.
DIVERGING = {"lr": 1e38, "warmup-steps": 0, "max-grad-norm": 0, "hv.local-steps": 40, "max-steps": 80}


@pytest.mark.exhaustive
def test_a_peer_that_diverges_says_why_and_ends_after_three_times(start, model):
    command = start(*DILOCO, "peer", "--world-rank", 0, *LOOPBACK, *training_flags(model, **DIVERGING))
    assert command.wait() == 1, command.stdout + command.stderr
    check_gone(command)
    assert command.stdout.count(REASON) == 1
    assert command.stdout.count("the worker ended with 1") == 2
    (box,) = text_of_boxes(command.stderr)
    assert box.startswith("the worker failed 3 times in a row for the same reason: ")
    assert REASON in box and "Traceback" not in command.stderr


@pytest.mark.exhaustive
def test_a_run_ends_with_the_reason_of_its_peer(start, model):
    command = start(*DILOCO, "run", "--peers", 1, *training_flags(model, **DIVERGING))
    assert command.wait(RUN_TIMEOUT_S) == 1, command.stdout + command.stderr
    check_gone(command)
    (box,) = text_of_boxes(command.stderr)
    assert "the worker failed 3 times in a row" in box and REASON in box
    assert "starting it again" not in command.stdout
    assert command.stdout.count(f"--- peer 0: the worker ended with 1 and is started again: {REASON}") == 1


def test_a_program_of_the_users_own_is_given_up_on_with_its_exception(start, tmp_path):
    (tmp_path / "loop.py").write_text("raise ValueError('no such column: text')\n")
    worker = f"python {tmp_path / 'loop.py'}"
    command = start(*DILOCO, "peer", "--world-rank", 0, *LOOPBACK, "--worker", worker)
    assert command.wait() == 1, command.stdout + command.stderr
    assert command.stdout.count("the worker ended with 1 ") == 2
    (box,) = text_of_boxes(command.stderr)
    assert "3 times in a row for the same reason: ValueError: no such column: text" in box


@pytest.mark.exhaustive
def test_a_program_that_never_joins_is_not_taken_for_one_that_has_trained(start, tmp_path):
    (tmp_path / "loop.py").write_text("print('hello')\n")
    worker = f"python {tmp_path / 'loop.py'}"
    command = start(*DILOCO, "peer", "--world-rank", 0, *LOOPBACK, "--worker", worker)
    assert command.wait() == 2, command.stdout + command.stderr
    (box,) = text_of_boxes(command.stderr)
    assert box.startswith("the program ended without calling diloco.Diloco(model)")
    assert "training is done" not in command.stdout


@pytest.mark.exhaustive
def test_under_torchrun_the_daemons_end_is_told_in_its_own_words(start, model):
    flags = training_flags(model, per_device_train_batch_size=2, **{"hv.world-rank": 0})
    command = start(*TORCHRUN, *TRAINER, *flags, "--hv.host-maddrs", LOOPBACK[1])
    logs = wait_until(lambda: command.files("metrics.jsonl"), "metrics", command=command)
    wait_until(lambda: '"kind": "step"' in logs[0].read_text(), "a step", command=command)
    (pid,) = (pid for pid, argv in command.processes().items() if "/p2pd " in argv)
    os.kill(pid, signal.SIGKILL)
    assert command.wait() != 0
    (box,) = text_of_boxes(command.stderr)
    assert "p2pd, the process that carries this peer's connections, has died" in box
