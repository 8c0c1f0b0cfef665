"""`--discover`, as it is typed on two machines of one network: nobody copies an address."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.test_readme import DISCOVERABLE, DISCOVERING
from tests.support.commands import DILOCO, wait_until
from tests.support.documents import typed
from tests.support.namespaces import hub, inside, why_not

SHORT = ("--fake-data", "--seq-length", 16, "--total-batch-size", 2, "--eval-tokens", 32, "--max-steps", 4)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_peer_trains_with_a_coordinator_that_it_finds_by_itself(start, model):
    with hub(1) as machines:
        with inside(machines.middle):
            coordinator = start(*typed(DISCOVERABLE), name="coordinator")
        wait_until(lambda: "--initial-peers" in coordinator.stdout, "the coordinator")
        with inside(machines.spokes[0]):
            doctor = start(*DILOCO, "doctor", "--discover", "--path-model", model, name="doctor")
            assert doctor.wait() == 0, doctor.stdout
            there = rf"/ip4/{machines.addresses[machines.spokes[0]]}/tcp/\d+/p2p/"
            assert re.search(
                rf"^pass  discover +the run 'diloco' answers at\s+{there}", doctor.stdout, re.MULTILINE
            )
            assert re.search(r"^pass  initial peers +answers$", doctor.stdout, re.MULTILINE)
            peer = start(
                *typed(DISCOVERING, *SHORT, "--path-model", model, "--hv.local-steps", 2), name="peer"
            )
            status = start(*DILOCO, "status", "--discover", "--json", name="status")
        assert status.wait() == 0, status.stderr
        assert json.loads(status.stdout)["run_id"] == "diloco"
        assert peer.wait() == 0, peer.stderr
        # By the rank that the coordinator gave: who finds nobody does not begin.
        assert "training as world rank 0" in peer.stdout and "epoch 2 averaged by" in peer.stdout
