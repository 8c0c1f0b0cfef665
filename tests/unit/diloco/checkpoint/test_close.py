"""The ranks of a peer end their wait for the last checkpoint together."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from diloco.checkpoint import checkpoint, shards
from diloco.checkpoint.checkpoint import Checkpoints, last_save_timeout_s
from diloco.options.flags import CkptConfig
from diloco.outer.diloco import Position
from diloco.outer.outer_files import OuterFiles
from tests.support.torch_ranks import Ranks

OUTER = SimpleNamespace(
    world_rank=None, snapshot=OuterFiles, position=Position(), tokens=[0], steps_per_epoch=1, last_commit=None
)


def closed(world, path, timeouts_s):
    """Close during a save whose upload by rank 0 ends only once rank 0 has waited for it twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_POLL_S", 0.01)
        patch.setattr(checkpoint, "LAST_SAVE_TIMEOUT_S", timeouts_s[world.rank])
        patch.setattr(shards, "state_to_write", lambda inner, rank: {f"of {rank}": torch.zeros(1)})
        config = CkptConfig(path=path, interval=1)
        checkpoints = Checkpoints(config, world, SimpleNamespace(), scratch=None)
        send, wait, waits, is_closing = (
            checkpoints._store.send,
            checkpoints._saver.wait,
            [],
            threading.Event(),
        )

        def sent(*args):
            assert world.rank or is_closing.wait(20)
            send(*args)

        def waited(timeout_s=None):
            if timeout_s is not None:
                waits.append(timeout_s)
            if len(waits) == 3:
                is_closing.set()
            return wait(timeout_s)

        patch.setattr(checkpoints._store, "send", sent)
        patch.setattr(checkpoints._saver, "wait", waited)
        checkpoints.begin(0)
        checkpoints.save(OUTER, step=1)
        checkpoints.close()
        events = [event["event"] for event in checkpoints.events()]
        is_closing.set()
        wait(20)
        return events


def test_all_ranks_wait_as_long_as_rank_0_and_no_longer(tmp_path):
    with Ranks(2) as ranks:
        late, soon = 30.0, 0.0
        assert ranks.run(closed, str(tmp_path / "a"), (late, soon)) == [["checkpoint"]] * 2
        assert ranks.run(closed, str(tmp_path / "b"), (soon, late)) == [["checkpoint_failed"]] * 2


def test_no_end_of_a_training_takes_longer_than_the_saving_threads_wait_for_each_other():
    assert last_save_timeout_s(0) < last_save_timeout_s(10**9) < last_save_timeout_s(10**15)
    assert last_save_timeout_s(10**15) < checkpoint._SAVING_TIMEOUT.total_seconds()
