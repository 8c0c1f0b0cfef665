"""Which commits a donor keeps."""

from __future__ import annotations

import numpy as np
import pytest

from peers.reduce import commit_log
from peers.reduce.commit_log import NUM_KEPT, CommitLog, Recording
from peers.reduce.plan import Chunk


@pytest.mark.parametrize(("downloads", "num_kept"), [(False, NUM_KEPT), (True, 8)])
def test_for_peers_that_only_miss_commits_few_are_kept_and_during_a_download_as_many_as_the_state_has_memory_for(
    monkeypatch, downloads, num_kept
):
    monkeypatch.setattr(commit_log, "KEPT_FOR_S", 0.0)
    log = CommitLog()
    if downloads:
        log._since.append("")
    for number in range(20):
        recording = Recording()
        recording.keep(Chunk(0, 0), np.zeros(100, np.uint8))
        log.add(recording, parent=str(number), head=str(number + 1), state_numel=100)
    assert [commit.head for commit in log.between(str(20 - num_kept), "20")] == [
        str(number) for number in range(21 - num_kept, 21)
    ]
    assert log.between(str(19 - num_kept), "20") == []
