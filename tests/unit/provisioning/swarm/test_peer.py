"""What `diloco provision` tells of peers until they are in epoch 1."""

from __future__ import annotations

from provisioning.machines.jobs import JobState
from provisioning.pods.pod import Pod
from provisioning.swarm.commands import peer_argv
from provisioning.swarm.peer import PeerNews, PeerProgress

RUNS = JobState(is_running=True, code=None)


def test_the_last_line_of_a_log_is_said_now_and_then_and_once():
    news = PeerNews(100.0)
    said = {
        now: news.of(PeerProgress(RUNS, last_lines=f"earlier\nthis peer: {line}"), now)
        for now, line in ((101.0, "a"), (110.0, "b"), (112.0, "c"), (119.0, "d"), (121.0, "b"), (122.0, "e"))
    }
    assert said == {101.0: "", 110.0: "b", 112.0: "", 119.0: "", 121.0: "", 122.0: "e"}


def test_the_first_epoch_is_told_with_its_peers_its_loss_and_its_time():
    news = PeerNews(100.0)
    assert news.of(PeerProgress(RUNS), 101.0) == ""
    epoch = PeerProgress(RUNS, epoch=1, step=50, num_contributors=3, loss=2.5)
    assert news.of(epoch, 158.4) == "epoch 1 averaged by 3 peers, loss 2.500, 58 s after the start"


def test_a_peer_that_trained_before_is_only_said_to_be_there():
    look = PeerProgress(RUNS, epoch=7, num_contributors=3, loss=2.5)
    assert PeerNews(0.0).of(look, 1.0) == "is in epoch 7"


def test_peers_on_one_machine_are_told_how_many_share_it():
    pod = Pod(id="a", label="a", is_ready=True, host="127.0.0.1", ports=((1, 1), (2, 2), (3, 3)))
    common = {"run_id": "r", "listens_on": "127.0.0.1", "address": "x", "num_peers": 3, "flags": ()}
    shared = peer_argv("python", pod, num_peers_here=3, **common)
    assert shared[shared.index("--peers-here") + 1] == "3"
    assert "--peers-here" not in peer_argv("python", pod, num_peers_here=1, **common)
