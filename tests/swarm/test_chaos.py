"""Six peers under two minutes of faults drawn from a seed: whatever happens, every guarantee holds."""

from __future__ import annotations

import pytest

from benchmarks.chaos.plan import KINDS, draw
from benchmarks.chaos.run import run

SECONDS = 120.0


@pytest.mark.exhaustive
def test_two_minutes_of_faults_break_no_guarantee(tmp_path):
    faults = draw(3, seconds=SECONDS, num_peers=6, mean_s=6.0)
    assert {fault.kind for fault in faults} == set(KINDS)
    outcome = run(
        tmp_path, num_peers=6, seconds=SECONDS, faults=faults, numel=20_000, local_steps=50, step_s=0.1
    )
    assert outcome.history.faults_found() == []
    assert outcome.unplanned == []
    # They make progress: at least a third of the pace of six peers without faults on an idle machine.
    assert len(outcome.history.chain) >= SECONDS / 5.0 / 3
