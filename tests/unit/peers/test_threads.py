from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from peers.reduce.arithmetic import norm_of_pseudo_gradient
from peers.state.header import STATE_CHUNK_NUMEL
from peers.threads import AUTOGROUP, num_threads
from tests.support.certified import begun, commit

SCRIPT = "from peers.threads import AUTOGROUP, give_way; give_way(5); print(AUTOGROUP.read_text())"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not share out time by session")
@pytest.mark.parametrize(("leads", "niceness"), [(True, "nice 5"), (False, "nice 0")])
def test_a_process_that_leads_its_session_gives_way_and_no_other_does(leads, niceness):
    command = [sys.executable, "-c", SCRIPT]
    if not leads:
        command = ["sh", "-c", '"$@"; true', "sh", *command]
    said = subprocess.run(command, start_new_session=True, capture_output=True, text=True, check=True)
    assert said.stdout.strip().endswith(niceness)


@pytest.mark.parametrize("num_cores", [4, 16, 100])
def test_the_bits_of_a_state_do_not_depend_on_the_number_of_threads(monkeypatch, num_cores):
    size = 3 * STATE_CHUNK_NUMEL + 7
    weights, local, average = torch.randn(3, size, generator=torch.Generator().manual_seed(0))

    def found(num_cores: int) -> tuple[int, str, float]:
        monkeypatch.setattr("peers.threads.num_cores", lambda: num_cores)
        state = begun([weights.clone()])
        certificate = commit(state, average)
        return num_threads(), certificate.head, norm_of_pseudo_gradient(weights, local, average)

    threads, *results = found(num_cores)
    assert threads == min(16, num_cores) and [1, *results] == [*found(1)]
