"""A process that is told to end leaves nothing half-written, at whatever moment of a save."""

from __future__ import annotations

import threading
import uuid
from types import SimpleNamespace

import pytest
import torch

import diloco.checkpoint.checkpoint
from diloco.checkpoint.checkpoint import Checkpoints
from diloco.checkpoint.mark import Mark, write_mark
from diloco.checkpoint.saver import check_saved
from diloco.checkpoint.store import Store, own_part
from diloco.errors import DilocoError
from diloco.options.flags import CkptConfig
from diloco.outer.diloco import Position
from diloco.outer.outer_files import OuterFiles
from diloco.outer.world import World
from peers.core.timing import SLOWEST_LINK
from peers.daemon.link import LINK_ENV
from tests.support.scripted_daemon import ScriptedDaemon


def snapshot_of_a_daemon_that_was_killed(_directory) -> None:
    raise DilocoError("the daemon has ended")


def outer_of_no_swarm() -> SimpleNamespace:
    return SimpleNamespace(
        world_rank=None,
        snapshot=OuterFiles,
        position=Position(),
        tokens=[0],
        steps_per_epoch=1,
        last_commit=None,
    )


def test_a_peer_resumes_its_own_checkpoint_in_a_live_run_and_else_the_step_that_all_resume(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(diloco.checkpoint.shards, "load", lambda *args, **kwargs: None)
    store = Store(tmp_path / "kept")
    for step, rank in ((4, 0), (8, 1)):
        staging = store.staging(step, own_part(rank))
        place = Position(epoch=step)
        mark = Mark(position=place, tokens=(0,), num_ranks=0, saved_at_ms=step, contributors=(rank,))
        write_mark(staging, mark)
        store.finish(staging, step, own_part(rank))
    config = CkptConfig(path=str(tmp_path / "kept"), resume="auto")
    monkeypatch.setenv(LINK_ENV, str(tmp_path / "link"))
    for is_alive, step in ((True, 4), (False, 8)):
        with ScriptedDaemon(tmp_path / "link", needs_offer=not is_alive):
            checkpoints = Checkpoints(config, World(), SimpleNamespace(), scratch=tmp_path / "scratch")
            restored = checkpoints.restore(0, needs_outer=not is_alive)
        assert restored.position.epoch == step and restored.is_own is is_alive


def test_a_last_checkpoint_that_takes_too_long_has_failed_and_a_required_one_ends_the_training(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(diloco.checkpoint.checkpoint, "LAST_SAVE_TIMEOUT_S", 0.0)
    released = threading.Event()
    config = CkptConfig(path=str(tmp_path / "kept"), interval=1, required=True)
    checkpoints = Checkpoints(config, World(), SimpleNamespace(), scratch=tmp_path / "scratch")
    checkpoints.begin(5)
    checkpoints._saver.begin(5, lambda: int(released.wait(20)), blocked_s=0.0)
    checkpoints.close()
    (event,) = checkpoints.events()
    released.set()
    assert (event["event"], event["step"]) == ("checkpoint_failed", 5)
    with pytest.raises(DilocoError, match=r"checkpoint of step 5 was not saved .*not written within 0 s"):
        check_saved(event, is_required=True)


def test_the_last_checkpoint_may_take_as_long_as_its_bytes_over_a_slow_link(tmp_path, monkeypatch):
    monkeypatch.setattr(diloco.checkpoint.checkpoint, "LAST_SAVE_TIMEOUT_S", 0.0)
    # Twice these bytes take ten seconds at the least rate that a link may have.
    state = {"model.weight": torch.zeros(int(SLOWEST_LINK) * 5 // 4)}
    monkeypatch.setattr(diloco.checkpoint.shards, "state_to_write", lambda inner, rank: state)
    checkpoints = Checkpoints(
        CkptConfig(path=f"memory://{uuid.uuid4().hex}", interval=1, required=True),
        World(),
        SimpleNamespace(),
        scratch=tmp_path,
    )
    is_closing, wait, send = threading.Event(), checkpoints._saver.wait, checkpoints._store.send

    def told_to_close(timeout_s=None):
        if timeout_s is not None:
            is_closing.set()
        return wait(timeout_s)

    def slow_send(*args):
        assert is_closing.wait(20)
        send(*args)

    monkeypatch.setattr(checkpoints._saver, "wait", told_to_close)
    monkeypatch.setattr(checkpoints._store, "send", slow_send)
    checkpoints.begin(0)
    checkpoints.save(outer_of_no_swarm(), step=1)
    checkpoints.close()
    assert [event["event"] for event in checkpoints.events()] == ["checkpoint"]


def test_a_directory_is_removed_that_was_made_a_moment_ago(tmp_path, monkeypatch):
    checkpoints = Checkpoints(
        CkptConfig(path=str(tmp_path / "kept"), interval=1),
        World(),
        SimpleNamespace(),
        scratch=tmp_path / "scratch",
    )
    left = []

    def told_to_end_in_between(action):
        """on_rank_zero, with the signal thread's clean-up between the action and its return."""
        result = action()
        assert result.is_dir()
        checkpoints.discard_partial()
        left.extend((tmp_path / "kept").rglob("*diloco_rank_*"))
        return result

    monkeypatch.setattr(diloco.checkpoint.shards, "state_to_write", lambda inner, rank: {})
    monkeypatch.setattr(diloco.checkpoint.checkpoint, "on_rank_zero", told_to_end_in_between)
    outer = SimpleNamespace(world_rank=0, snapshot=snapshot_of_a_daemon_that_was_killed)
    checkpoints.save(outer, step=1)
    assert left == []
    assert [event["event"] for event in checkpoints.events()] == ["checkpoint_failed"]
