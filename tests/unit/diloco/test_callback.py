"""The callback when the nominal step is ahead of the trainer's own count, and when the trainer saves."""

from __future__ import annotations

import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import TrainerControl, TrainerState, TrainingArguments

from diloco.callback import DilocoCallback, _set_schedule
from diloco.checkpoint import digests
from diloco.checkpoint.digests import checked_mark
from diloco.checkpoint.mark import Damaged
from diloco.outer.diloco import Position
from diloco.outer.outer_files import OuterFiles
from diloco.outer.world import World
from peers.state.whole_files import record_of, write_bytes


def due_at(tmp_path, nominal_steps, *, in_flight=False, **settings):
    """For each of these nominal steps, one per trainer step: whether to save, to evaluate and to log."""
    intervals = {"save_steps": 100, "eval_steps": 100, "logging_steps": 100}
    strategies = {"save_strategy": "steps", "eval_strategy": "steps", **settings}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **intervals, **strategies)
    state, callback = TrainerState(max_steps=1000, **intervals), DilocoCallback()
    found = []
    for step in nominal_steps:
        callback.outer = SimpleNamespace(
            active=True, in_flight=in_flight, done=False, commits=(), nominal_step=step, step=lambda **_: None
        )
        control = TrainerControl()
        state.global_step += 1
        callback.on_step_end(args, state, control)
        found.append((control.should_save, control.should_evaluate, control.should_log))
    return found


def test_what_is_due_at_a_multiple_is_done_where_the_nominal_step_jumps_over_it(tmp_path):
    nothing, all_three = (False,) * 3, (True,) * 3
    # transformers itself handles 100, which it counts before the callback; 95 is a return from a fork.
    found = due_at(tmp_path, [1, 99, 100, 110, 205, 95, 130])
    assert found == [nothing, nothing, nothing, nothing, all_three, nothing, all_three]
    assert due_at(tmp_path, [250], eval_delay=300) == [(True, False, True)]
    assert due_at(tmp_path, [250], in_flight=True) == [(False, True, True)]
    never = {"save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no"}
    assert due_at(tmp_path, [250], **never) == [nothing]


def test_what_the_daemon_has_just_written_is_not_read_again_for_the_mark(tmp_path, monkeypatch):
    args, state = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]), TrainerState()
    state.global_step, directory = 4, tmp_path / "checkpoint-4"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")

    def snapshot(into):
        written = write_bytes(into / "outer.safetensors", b"anchor")
        return OuterFiles(into, files={"outer.safetensors": written})

    read = []
    monkeypatch.setattr(digests, "record_of", lambda path: read.append(path.name) or record_of(path))
    callback = DilocoCallback()
    callback.outer = SimpleNamespace(
        active=True,
        in_flight=False,
        snapshot=snapshot,
        position=Position(),
        tokens=[0],
        steps_per_epoch=1,
        last_commit=None,
    )
    callback.on_save(args, state, TrainerControl())
    callback.finish_save()
    assert read == ["model.safetensors"]
    assert checked_mark(directory, World()).files.keys() == {"outer.safetensors", "model.safetensors"}
    (directory / "outer.safetensors").write_bytes(b"damage")
    with pytest.raises(Damaged, match=r"outer\.safetensors does not hold what was saved"):
        checked_mark(directory, World())


class WrittenLater(OuterFiles):
    """The daemon's part of a checkpoint, written once the test opens the gate."""

    def wait(self):
        assert self.gate.wait(10)
        self.files = {"outer.safetensors": write_bytes(self.directory / "outer.safetensors", b"anchor")}
        return self


def saved_in_background(tmp_path, step=4):
    """A callback after `on_save`, the gate at which the daemon waits, and the checkpoint's directory."""
    args, state = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]), TrainerState()
    state.global_step, directory = step, tmp_path / f"checkpoint-{step}"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    # A worker that resumed from an earlier step has saved this one before.
    (directory / "outer.safetensors").write_bytes(b"an older anchor")
    written, callback = WrittenLater(directory), DilocoCallback()
    written.gate = threading.Event()
    callback.outer = SimpleNamespace(
        active=True,
        in_flight=False,
        snapshot=lambda into: written,
        position=Position(epoch=1, local_step=2),
        tokens=[7],
        steps_per_epoch=4,
        last_commit=None,
    )
    callback.on_save(args, state, TrainerControl())
    return callback, written.gate, directory


def test_training_goes_on_while_the_daemon_writes_and_the_checkpoint_is_of_the_moment_of_the_save(tmp_path):
    callback, gate, directory = saved_in_background(tmp_path)
    assert not (directory / "complete.json").exists()
    # An error that ends the process now does not end this thread.
    assert not callback._saving.daemon
    callback.outer.position, callback.outer.tokens = Position(epoch=2), [0]
    gate.set()
    callback.finish_save()
    mark = checked_mark(directory, World())
    assert (mark.position, mark.tokens) == (Position(epoch=1, local_step=2), (7,))
    assert mark.files.keys() == {"outer.safetensors", "model.safetensors"}


def test_a_checkpoint_that_the_daemon_cannot_write_is_only_logged(tmp_path, caplog):
    callback, gate, directory = saved_in_background(tmp_path)
    shutil.rmtree(directory)
    gate.set()
    callback.finish_save()
    assert f"so {directory} cannot be resumed" in caplog.text


@pytest.mark.parametrize("what", ["a step", "a pass", "an evaluation", "the training"])
def test_a_checkpoint_is_finished_before_the_trainer_may_delete_it(tmp_path, what):
    finished, left = [], []
    callback = DilocoCallback()
    callback.outer = SimpleNamespace(
        active=True,
        in_flight=False,
        done=False,
        is_at_end=True,
        commits=(),
        nominal_step=1,
        step=lambda **_: None,
        finish=lambda: left.extend(finished),
    )
    strategy = "best" if what == "an evaluation" else "steps"
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy=strategy, eval_strategy="steps"
    )
    state, control = TrainerState(max_steps=9, save_steps=2, logging_steps=2, eval_steps=2), TrainerControl()
    callback._saving = SimpleNamespace(join=lambda: finished.append(what))
    if what == "the training":
        callback.on_train_end(args, state, control)
        assert left == [what], "the daemon was left before it had written"
        return
    end = {
        "a step": callback.on_step_end,
        "a pass": callback.on_epoch_end,
        "an evaluation": callback.on_evaluate,
    }[what]
    if what != "an evaluation":
        end(args, state, control)
        assert finished == []
        control.should_save = True
    end(args, state, control)
    assert finished == [what]


@pytest.mark.parametrize(
    "kind", [ReduceLROnPlateau, lambda optimizer: LambdaLR(optimizer, lambda step: step)]
)
def test_a_schedule_follows_the_nominal_step_unless_it_goes_by_the_loss(kind):
    scheduler = kind(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))
    _set_schedule(scheduler, 5)
    assert scheduler.last_epoch == (0 if isinstance(scheduler, ReduceLROnPlateau) else 5)
