"""The outer state is saved as it was at one moment, whatever rounds do while it is written."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import torch

from peers.reduce.residuals import Residuals
from peers.state import files as state_files
from peers.state.files import Saving
from peers.state.outer_state import OuterState
from peers.state.whole_files import problem_with
from tests.support import certified
from tests.support.certified import begun

SIZE = 300


def some_state() -> OuterState:
    return begun([torch.randn(SIZE, generator=torch.Generator().manual_seed(1))])


def commit(state: OuterState) -> None:
    certified.commit(state, torch.ones(SIZE))


async def test_a_commit_while_it_is_written_waits_for_nothing_and_changes_nothing_of_it(
    tmp_path, monkeypatch
):
    gate, write = threading.Event(), state_files.write_tensors

    def held_up(*arguments):
        assert gate.wait(20)
        return write(*arguments)

    monkeypatch.setattr(state_files, "write_tensors", held_up)
    state, kept = some_state(), Residuals.from_tensors(SIZE, {"contribution": torch.ones(SIZE)})
    head, anchor = state.head, state.anchor[0].clone()

    saving = Saving()
    await saving.begin(state, [kept], tmp_path)
    # Two commits, neither of which may be written over the state that is being saved.
    commit(state)
    commit(state)
    gate.set()
    written = await asyncio.wait_for(saving.finish(tmp_path), 20)
    assert written.head == head != state.head
    loaded = state_files.load(tmp_path)
    assert loaded.head == head and torch.equal(loaded.anchor[0], anchor)
    assert state_files.load_residuals(tmp_path, loaded)[0].contribution_residual.tolist() == [1.0] * SIZE
    assert set(written.files) == {"outer.json", "outer.safetensors", "residuals.safetensors"}
    assert all(problem_with(tmp_path / name, record) is None for name, record in written.files.items())


async def test_what_could_not_be_written_is_told_to_who_asks_and_the_memory_is_free_again(tmp_path):
    state = some_state()
    saving = Saving()
    await saving.begin(state, [], tmp_path / "missing")
    with pytest.raises(OSError, match=r"outer\.safetensors"):
        await asyncio.wait_for(saving.finish(tmp_path / "missing"), 20)
    with pytest.raises(OSError, match="nothing is being saved"):
        await saving.finish(tmp_path)
    place = state.anchor[0].data_ptr()
    commit(state)
    assert state.anchor[0].data_ptr() == place


async def test_a_worker_that_dies_while_its_state_is_taken_hold_of_leaves_nothing_held(tmp_path):
    began, go_on = threading.Event(), threading.Event()

    class UnderWay(Residuals):
        @contextlib.contextmanager
        def held(self):
            began.set()
            assert go_on.wait(20)
            with super().held() as held:
                yield held

    state = some_state()
    beginning = asyncio.create_task(Saving().begin(state, [UnderWay(SIZE)], tmp_path))
    assert await asyncio.to_thread(began.wait, 20)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    go_on.set()
    async with asyncio.timeout(20):
        while state._snapshots:
            await asyncio.sleep(0)


def test_a_state_is_not_saved_with_the_residuals_of_the_commit_that_has_begun_since():
    class JustStored(Residuals):
        @contextlib.contextmanager
        def held(self):
            state.refuse_snapshots()
            with super().held() as held:
                yield held

    state = some_state()
    kept = JustStored.from_tensors(SIZE, {"contribution": torch.ones(SIZE)})
    with pytest.raises(OSError, match="is being changed"):
        state_files.HeldState(state, [kept])
    assert not state._snapshots and not kept._num_holders
    commit(state)
    with state_files.HeldState(state, [Residuals(SIZE)]) as held:
        assert held.snapshot.header.head == state.head


def test_residuals_of_a_save_before_do_not_stay_beside_a_state_that_has_none(tmp_path):
    kept = Residuals.from_tensors(SIZE, {"contribution": torch.ones(SIZE)})
    state_files.save(some_state(), tmp_path, [kept])
    state = some_state()
    commit(state)
    state_files.save(state, tmp_path, [Residuals(SIZE)])
    assert state_files.load_residuals(tmp_path, state_files.load(tmp_path))[0].contribution_residual is None
