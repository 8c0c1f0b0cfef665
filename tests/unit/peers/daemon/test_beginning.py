"""The state that a worker offers the run to begin from."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from peers.daemon.beginning import offered_state, touch
from peers.reduce.plan import CHUNK_NUMEL
from peers.reduce.residuals import Residuals
from peers.state import files as state_files
from peers.state.outer_state import OuterState
from tests.support.certified import signed_genesis

SIZE = 300


@pytest.mark.parametrize(("codec", "kept"), [("int8", [1.0]), ("fp32", None), ("bf16", [1.0])])
def test_a_checkpoints_residuals_are_taken_over_by_a_run_whose_contributions_contain_them(
    tmp_path, codec, kept
):
    state = OuterState.initial([torch.ones(SIZE)])
    state.certify(signed_genesis(tmp_path, state.anchor_digest, state.header.momentum_digest))
    saved = Residuals.from_tensors(SIZE, {"contribution": torch.ones(SIZE)})
    state_files.save(state, tmp_path, [saved])
    loaded, residuals = offered_state([torch.zeros(SIZE)], str(tmp_path), codec=codec)
    assert loaded.head == state.head
    assert (residuals and residuals[0].contribution_residual.unique().tolist()) == kept


def test_a_workers_initial_weights_are_copied_by_all_threads(monkeypatch):
    weights, both = (
        torch.randn(2 * CHUNK_NUMEL, generator=torch.Generator().manual_seed(0)),
        threading.Barrier(2),
    )

    def copyto(*args):
        both.wait(10)
        np.copyto(*args)

    monkeypatch.setattr("peers.threads.num_cores", lambda: 2)
    monkeypatch.setattr("peers.reduce.copies.np", SimpleNamespace(copyto=copyto))
    state, residuals = offered_state([weights], None, codec="int8")
    assert residuals is None and state.is_intact()
    assert torch.equal(state.anchor[0], weights) and state.anchor[0].data_ptr() != weights.data_ptr()


def test_each_page_of_fresh_memory_is_written_to():
    fresh = [torch.ones(size) for size in (CHUNK_NUMEL + 1025, 0, 3)]
    touch(fresh)
    for values in fresh:
        assert not values[::1024].any()
        assert int(torch.count_nonzero(values)) == values.numel() - len(range(0, values.numel(), 1024))
