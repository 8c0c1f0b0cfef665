from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import peers
from peers.daemon.coordinator import lines_to_paste, what_goes_on
from tests.support.announcements import announced

SHOWN = ["/ip4/10.0.0.2/tcp/4001/p2p/ID", "/ip4/127.0.0.1/tcp/4001/p2p/ID"]


def test_the_line_to_paste_is_the_address_of_farthest_reach():
    assert lines_to_paste(SHOWN, ["/ip4/0.0.0.0/tcp/0"], [], "ID") == [
        "--initial-peers /ip4/10.0.0.2/tcp/4001/p2p/ID"
    ]


def test_behind_a_router_the_first_line_works_here_and_the_second_from_elsewhere():
    lines = lines_to_paste(
        ["/ip4/8.8.8.8/tcp/9/p2p/ID"], ["/ip4/0.0.0.0/tcp/4001"], ["/ip4/8.8.8.8/tcp/9"], "ID"
    )
    assert lines == [
        "--initial-peers /ip4/127.0.0.1/tcp/4001/p2p/ID",
        "--initial-peers /ip4/8.8.8.8/tcp/9/p2p/ID",
    ]


def test_whoever_starts_a_coordinator_where_the_run_goes_on_is_told():
    peers = {
        "a": announced("a", epoch=3),
        "b": announced("b", epoch=4),
        "c": announced("c", state="leaving", epoch=7),
        "d": announced("d", state="joining", epoch=0),
    }
    assert what_goes_on("mine", peers) == (
        "the run mine goes on at epoch 4: 2 peers are here, and new peers join that run; "
        "to begin another run, give another --run-id"
    )
    # Those that wait for others, or have just left, are in no run.
    assert what_goes_on("mine", {name: peers[name] for name in "cd"}) == ""


def test_importing_the_coordinator_loads_neither_torch_nor_hivemind():
    code = (
        "import peers.daemon.coordinator, sys; print([m for m in ('torch', 'hivemind') if m in sys.modules])"
    )
    root = Path(peers.__file__).parent.parent
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True).strip() == "[]"
