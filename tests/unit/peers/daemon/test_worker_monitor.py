"""What a peer shows of its worker while the worker hands over, continues ahead, dies, and is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peers.daemon.averaging import WorkInHand
from peers.daemon.worker_monitor import WorkerMonitor
from peers.monitor.phases import Doing, in_words
from peers.protocol.mesh import DILOCOS_WORKER, OWN_WORKER, WORKER
from peers.state.handover import EpochOutcome, Memories, Start
from tests.support.scripted_daemon import COMMITTED


def a_monitor(*, worker: str = DILOCOS_WORKER) -> WorkerMonitor:
    presence = SimpleNamespace(view={"a": None}, galaxy_size=1, maddrs=(), publish=lambda: None)
    agreement = SimpleNamespace(manifest={"hv.local_steps": 10, WORKER: worker}, digest="d")
    monitor = WorkerMonitor(presence, agreement)
    monitor.runtime = SimpleNamespace(core=SimpleNamespace(epoch=2), state=None)
    return monitor


def a_work(step: int) -> WorkInHand:
    memories = Memories((torch.zeros(1),), (torch.zeros(1),))
    return WorkInHand(memories, 0, tokens=1, step=step, last=False)


def an_outcome(**fields: Any) -> EpochOutcome:
    known = {"epoch": 3, "data_base": 0, "fragment": 0, "last": False, "world_rank": 0, "num_failures": 0}
    return EpochOutcome(**{**COMMITTED, **known, **fields})


def start_at(epoch: int, local_step: int) -> Start:
    return Start(
        world_rank=0,
        epoch=epoch,
        local_step=local_step,
        data_base=0,
        anchor_digest="d",
        head="h",
        num_peers=1,
        keep_local=False,
    )


@pytest.mark.parametrize("has_worker", [True, False])
async def test_a_peer_averages_until_its_worker_continues_or_is_answered(has_worker):
    monitor, shown = a_monitor(), []
    monitor.has_worker = True
    monitor.started(start_at(epoch=2, local_step=4))
    assert (monitor.step, monitor.local_step) == (24, 4)
    work = a_work(step=30)
    monitor.handed_over(work, {"step_s": 0.5, "loss": 2.5})
    shown.append(monitor.state)
    assert monitor.journal.loss == 2.5
    monitor.goes_ahead()
    shown.append(monitor.state)
    # The worker has trained as far ahead as it may.
    monitor.waits()
    shown.append(monitor.state)
    monitor.has_worker = has_worker
    monitor.averaged(an_outcome())
    shown.append(monitor.state)
    assert shown == ["averaging", "training", "averaging", "training" if has_worker else "joining"]
    assert monitor.journal.num_rounds == 1


@pytest.mark.parametrize(("contributors", "num_commits"), [([0, 1], 1), ([1], 0)])
async def test_only_a_commit_that_contains_its_work_counts_for_the_worker(contributors, num_commits):
    monitor, commits = a_monitor(), []
    monitor.on_commit = lambda _is_last: commits.append(1)
    monitor.averaged(an_outcome(contributors=contributors))
    assert len(commits) == num_commits


def test_a_loss_that_is_not_a_number_is_a_trouble_until_the_next_one_is():
    monitor = a_monitor()
    assert monitor.progressed({"step": 25, "tokens_per_s": 1.0, "step_s": 0.5, "loss": float("nan")}) == 5
    assert "not a number" in monitor.journal.troubles["loss"] and monitor.journal.loss is None
    assert monitor.progressed({"step": 17, "tokens_per_s": 1.0, "step_s": 0.5, "loss": 2.5}) == -3
    assert "loss" not in monitor.journal.troubles and monitor.journal.loss == 2.5


@pytest.mark.parametrize(
    ("worker", "contributors", "said"),
    [
        (OWN_WORKER, [0, 1], ["epoch 3 averaged by 2 peers, loss 0.125"]),
        (OWN_WORKER, [0], ["epoch 3 averaged by 1 peer, loss 0.125"]),
        (OWN_WORKER, [1], ["epoch 3 was averaged without this peer, whose work goes into the next"]),
        # Diloco's own worker writes records, which the terminal shows already.
        (DILOCOS_WORKER, [0, 1], []),
    ],
)
def test_the_epochs_of_a_program_of_the_users_own_are_told_in_a_line_each(caplog, worker, contributors, said):
    monitor = a_monitor(worker=worker)
    monitor.progressed({"step": 25, "tokens_per_s": 1.0, "step_s": 0.0, "loss": 0.125})
    with caplog.at_level("INFO", "peers.daemon.worker_monitor"):
        monitor.averaged(an_outcome(contributors=contributors))
    assert caplog.messages == said


def test_what_a_daemon_knows_of_itself_goes_before_what_its_worker_tells():
    monitor = a_monitor()
    monitor.runtime, monitor.preparing, monitor.step = None, "agreeing with the swarm", 7
    presence = monitor._presence
    presence.view, presence.maddrs = {"a": None}, ("here",)

    def phase(state: str, *, wanted: int = 1) -> str:
        monitor.state, presence.galaxy_size = state, wanted
        return in_words(monitor.phase).partition(",")[0]

    assert phase("joining") == "starting: agreeing with the swarm"
    assert phase("joining", wanted=2) == "waiting for peers"
    presence.maddrs = ()
    assert phase("joining", wanted=2) == "starting: agreeing with the swarm"
    presence.maddrs = ("here",)
    monitor.told = Doing("starting", "loading the model")
    assert phase("joining", wanted=2) == "starting: loading the model"
    assert phase("waiting", wanted=2) == "waiting for peers"
    assert phase("waiting") == "waiting for the state"
    monitor.received = (10, 100)
    assert phase("waiting") == phase("joining") == "receiving the state"
    assert phase("training") == "starting: loading the model"
    monitor.received, monitor.told = None, Doing("evaluating", "", 3, 9, "windows")
    assert phase("training") == "evaluating"
    assert phase("averaging") == "averaging: waits for the swarm's state"
    monitor.told = None
    assert phase("training") == "training"
    monitor.told = Doing("training", "step 8", 3, 64, "micro-batches")
    assert phase("training") == "training: 3 of 64 micro-batches of step 8"
    assert phase("leaving") == "leaving"
