"""A process that is told to end leaves nothing half-written, at whatever moment of a save."""

from __future__ import annotations

from types import SimpleNamespace

import diloco.checkpoint.checkpoint
from diloco.checkpoint.checkpoint import Checkpoints
from diloco.errors import DilocoError
from diloco.options.flags import CkptConfig
from diloco.outer.world import World


def snapshot_of_a_daemon_that_was_killed(_directory) -> None:
    raise DilocoError("the daemon has ended")


def test_a_directory_is_removed_that_was_made_a_moment_ago(tmp_path, monkeypatch):
    checkpoints = Checkpoints(
        CkptConfig(path=str(tmp_path / "kept"), interval=1),
        World(),
        SimpleNamespace(),
        scratch=tmp_path / "scratch",
    )
    left = []

    def told_to_end_in_between(action):
        """As on_rank_zero, but before its answer has come the thread for signals has done its part."""
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
