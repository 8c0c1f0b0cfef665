"""The state that a worker offers the run to begin from."""

from __future__ import annotations

import pytest
import torch

from peers.daemon.beginning import offered_state
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
