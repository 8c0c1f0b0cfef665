"""After Ctrl-C, SIGTERM, SIGHUP or SIGKILL at any moment nothing keeps running and no file is half-written."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import (
    DILOCO,
    GONE_WITHIN_S,
    TORCHRUN,
    TRAINER,
    Command,
    check_gone,
    check_nothing_left,
    check_whole_files,
    training_flags,
    wait_until,
)

SIGNALS = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}
LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
# An outer step and a checkpoint after every inner step, so that most of the time goes to rounds and to writing.
BUSY = {"hv.local-steps": 1, "ckpt.interval": 1, "ckpt.path": "checkpoints", "ckpt.topk": 2}

Moment = Callable[[Command], object]


def loads_torch(command: Command) -> bool:
    """Whether the command's own process is in the middle of its imports."""
    return "libtorch" in Path(f"/proc/{command.process.pid}/maps").read_text()


def has_p2pd(command: Command) -> bool:
    return any("/p2pd " in argv for argv in command.processes().values())


def has_worker(command: Command) -> bool:
    return any("train_fsdp --config" in argv for argv in command.processes().values())


def has_epochs(number: int) -> Moment:
    """The moment when every metrics.jsonl of the command has at least this many epochs."""

    def moment(command: Command) -> bool:
        found = [path.read_text() for path in command.files("metrics.jsonl")]
        return bool(found) and all(text.count('"kind": "epoch"') >= number for text in found)

    return moment


def check_ends(command: Command, moment: Moment, number: signal.Signals, code: int) -> None:
    """Send the signal at that moment; check that all processes end in time, nothing is left, and the exit code."""
    wait_until(lambda: moment(command), moment.__name__, command=command)
    command.send(number)
    check_gone(command)
    assert command.wait(GONE_WITHIN_S) == code, command.stderr
    check_nothing_left(command)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("verb", [("dht", "start"), ("peer", "--world-rank", "0")], ids=lambda verb: verb[0])
def test_a_signal_during_imports_ends_the_command_at_once(verb, number, start):
    command = start(*DILOCO, *verb, *LOOPBACK)
    check_ends(command, loads_torch, number, SIGNALS[number])
    assert command.stderr == ""


def test_sigterm_ends_a_coordinator(start):
    command = start(*DILOCO, "dht", "start", *LOOPBACK)
    check_ends(command, lambda command: command.stdout, signal.SIGTERM, 143)
    assert command.stderr == ""


def test_ctrl_c_ends_a_peer_that_waits_for_others(start, model):
    flags = training_flags(model, run_dir="run", galaxy_size=2)
    command = start(*DILOCO, "peer", "--world-rank", "0", *LOOPBACK, *flags)
    check_ends(command, has_worker, signal.SIGINT, 130)
    assert command.stderr == ""


@pytest.mark.exhaustive
def test_sigterm_ends_a_peer_while_it_trains_and_saves(start, model):
    flags = training_flags(model, run_dir="run", **BUSY)
    command = start(*DILOCO, "peer", "--world-rank", "0", *LOOPBACK, *flags)
    check_ends(command, has_epochs(3), signal.SIGTERM, 143)
    assert command.stderr == ""
    assert (
        "this was the last peer: without checkpoints (--ckpt.interval) the progress of the run is lost"
        in command.stdout
    )
    assert list((command.directory / "checkpoints").glob("model_step_*/diloco_rank_0/complete.json"))


@pytest.mark.exhaustive
def test_sigterm_ends_a_run_whose_peers_are_starting(start, model):
    command = start(*DILOCO, "run", *training_flags(model, run_dir="run"))
    check_ends(
        command,
        lambda command: any(" peer " in argv for argv in command.processes().values()),
        signal.SIGTERM,
        143,
    )
    assert command.stderr == ""


@pytest.mark.exhaustive
def test_ctrl_c_ends_a_run_in_the_middle_of_its_rounds(start, model):
    command = start(*DILOCO, "run", *training_flags(model, run_dir="run", **BUSY))
    check_ends(command, has_epochs(3), signal.SIGINT, 130)
    assert command.stderr == ""


@pytest.mark.exhaustive
def test_everything_goes_by_itself_when_a_run_is_killed(start, model):
    command = start(*DILOCO, "run", *training_flags(model, run_dir="run", **{"hv.local-steps": 2}))
    wait_until(lambda: has_epochs(2)(command), "epoch 2 of both peers", command=command)
    assert len(command.processes()) >= 8
    command.send(signal.SIGKILL)
    check_gone(command)
    check_whole_files(command.directory)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "moment", "flags"),
    [(signal.SIGINT, has_epochs(2), BUSY), (signal.SIGTERM, has_p2pd, {"hv.galaxy-size": 2})],
    ids=["ctrl-c while training", "sigterm while waiting for peers"],
)
def test_a_signal_to_torchrun_ends_its_ranks_and_their_daemon(number, moment, flags, start, model):
    flags = training_flags(model, run_dir="run", per_device_train_batch_size=2, **flags)
    place = ("--hv.world-rank", "0", "--hv.host-maddrs", LOOPBACK[1])
    command = start(*TORCHRUN, "--standalone", *TRAINER, *place, *flags)
    # The exit code is torchrun's own.
    check_ends(command, moment, number, 1)
