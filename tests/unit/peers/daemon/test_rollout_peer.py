"""Which learner a rollout peer works for, and when it gives up. The learners are fakes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.daemon import rollout_peer
from peers.daemon.rollout_peer import RolloutPeer
from peers.errors import NotWanted, UserError
from peers.protocol.refusal import Refused, Why
from peers.protocol.rollouts import learner_for

RUN, ME = "run", "me"
THEIRS = learner_for(RUN, ME, {"a", "b"})
"""Which of the two learners this peer is to work for."""
OTHER = "b" if THEIRS == "a" else "a"


class Learners:
    """Fake learners, announced for as long as they are in `there`."""

    def __init__(self) -> None:
        self.there = {
            name: SimpleNamespace(peer_id=name, world_rank=rank, state="training", maddrs=())
            for rank, name in enumerate("ab")
        }
        self.opened: list[str] = []
        self.fails: list[Exception] = []
        """The errors with which the next streams fail, in order."""
        self.welcome = SimpleNamespace(manifest=SimpleNamespace(fields={}))

    async def announced(self, *_: Any) -> dict[str, Any]:
        return self.there

    async def open(self, _transport: Any, _run_id: str, learner: Any, _token: bytes) -> Any:
        self.opened.append(learner.peer_id)
        if self.fails:
            raise self.fails.pop(0)
        return self

    def __enter__(self) -> Learners:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def learners(monkeypatch):
    learners = Learners()
    monkeypatch.setattr(rollout_peer, "announced", learners.announced)
    monkeypatch.setattr(rollout_peer, "LearnerStream", learners)
    for name in ("LOOK_S", "OFTEN_S", "AGAIN_S"):
        monkeypatch.setattr(rollout_peer, name, 0.0)
    return learners


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.setattr(rollout_peer, "Generator", SimpleNamespace)
    config: Any = SimpleNamespace(run_id=RUN, timeout_waiting_for_peers=0.0)
    identity: Any = SimpleNamespace(peer_id=ME)
    dht: Any = SimpleNamespace(transport=None)
    admission: Any = SimpleNamespace(gate=SimpleNamespace(check_record=None), token=b"")
    peer = RolloutPeer(config, identity, dht, admission, Path())
    monkeypatch.setattr(peer, "_agree", lambda _manifest: None)
    return peer


async def test_a_learner_that_refuses_this_peer_leaves_it_to_the_others(peer, learners, monkeypatch):
    worked = []

    async def work_for(learner):
        worked.append(learner.peer_id)
        del learners.there[learner.peer_id]
        if learner.peer_id == THEIRS:
            raise Refused(Why.BANNED)
        peer._num_generated = 1

    monkeypatch.setattr(peer, "_work_for", work_for)
    peer._manifest = {"mode": "grpo"}
    assert await peer._work() == 0
    assert worked == [THEIRS, OTHER]


@pytest.mark.parametrize(
    ("error", "says"), [(Refused(Why.BANNED), "peers unban"), (NotWanted("forged rewards"), "forged rewards")]
)
async def test_a_peer_that_no_learner_wants_says_why_at_once(peer, learners, monkeypatch, error, says):
    monkeypatch.setattr(rollout_peer, "AGAIN_S", 60.0)
    peer._config.timeout_waiting_for_peers = 600.0
    learners.fails = [error, error]
    peer._manifest = {"mode": "grpo"}
    with pytest.raises(UserError, match=says):
        await peer._work()
    assert learners.opened == [THEIRS, OTHER]


@pytest.mark.parametrize("error", [NotWanted("it takes no rollouts"), Refused(Why.NO_TOKEN)])
async def test_a_learner_is_not_left_for_one_that_takes_no_rollouts(peer, learners, error):
    learners.fails = [error]
    await peer._until_reassigned(OTHER)
    assert learners.opened == [THEIRS, THEIRS]
    assert peer._failed_at.keys() == {THEIRS}
