"""Which learner a rollout peer works for, and when it gives up. The learners are fakes."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.daemon import rollout_peer
from peers.daemon.restarts import MAX_DEATHS, Restarts
from peers.daemon.rollout_peer import RolloutPeer
from peers.errors import NotWanted, PeersError, PeerUnreachable, ProtocolError, UserError
from peers.net.gate import Gate
from peers.protocol.records import OtherVersion
from peers.protocol.refusal import Refused, Why
from peers.protocol.rollouts import MAX_BLOBS, STALE, BlobName, Policy, learner_for
from peers.timing import LOOK_S
from tests.support.in_process import until

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
    admission: Any = SimpleNamespace(gate=Gate(RUN), token=b"")
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
    await peer._work()
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
    # Rollouts are taken all the time.
    peer._seen_at = math.inf
    await peer._until_reassigned(OTHER)
    assert learners.opened == [THEIRS, THEIRS]
    assert peer._failed_at.keys() == {THEIRS}


async def test_a_peer_looks_for_its_learner_often_among_any_number(peer, learners, monkeypatch):
    """And not at the same times as others."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 21:
            learners.there = {THEIRS: learners.there[THEIRS]}

    monkeypatch.setattr(rollout_peer, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(rollout_peer, "LOOK_S", LOOK_S)
    many = {str(n): SimpleNamespace(peer_id=str(n), world_rank=n, state="training") for n in range(1000)}
    learners.there |= many
    peer._seen_at = math.inf
    await peer._until_reassigned(learner_for(RUN, ME, learners.there))
    assert 0.5 * LOOK_S <= slept[0] <= 1.5 * LOOK_S
    assert len(set(slept)) == 21
    assert all(15.0 <= seconds <= 45.0 for seconds in slept[1:])


async def test_a_peer_that_no_learner_takes_in_time_says_what_to_look_at(peer, learners):
    learners.there.clear()
    with pytest.raises(PeersError, match="took rollouts within 0 s") as raised:
        await peer._work()
    assert not isinstance(raised.value, UserError), "a learner may come later"


async def test_a_peer_whose_learners_have_another_version_says_so_at_once(peer, learners):
    peer._config.timeout_waiting_for_peers = 1.0
    peer._admission.gate.other_version = OtherVersion(7)
    learners.there.clear()
    with pytest.raises(UserError, match="another version of diloco"):
        await peer._work()


@pytest.mark.parametrize(("manifest", "is_chosen"), [({}, True), ({"mode": "grpo"}, False)])
def test_a_peer_that_has_had_no_work_yet_soon_asks_again(peer, learners, monkeypatch, manifest, is_chosen):
    monkeypatch.setattr(rollout_peer, "AGAIN_S", 60.0)
    peer._manifest = manifest
    peer._failed_at = dict.fromkeys(learners.there, rollout_peer.time.monotonic() - 30.0)
    assert (peer._chosen(learners.there) is not None) == is_chosen


async def test_a_peer_that_has_had_no_work_yet_asks_all_learners_in_turn_and_gives_up_in_time(
    peer, learners, monkeypatch
):
    """Each try takes longer than `OFTEN_S`."""
    now, asked = 0.0, list[str]()
    monkeypatch.setattr(rollout_peer, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(rollout_peer, "AGAIN_S", 10.0)
    monkeypatch.setattr(rollout_peer, "OFTEN_S", 1.0)
    learners.there = {
        name: SimpleNamespace(peer_id=name, world_rank=0, state="training") for name in "abcdefgh"
    }

    async def work_for(learner: Any) -> None:
        nonlocal now
        now += 1.5
        asked.append(learner.peer_id)
        raise NotWanted("it has no policy yet")

    monkeypatch.setattr(peer, "_work_for", work_for)
    monkeypatch.setattr(
        peer, "_note_failure", lambda learner, _: peer._failed_at.update({learner.peer_id: now})
    )
    peer._seen_at, peer._config.timeout_waiting_for_peers = now, 30.0
    with pytest.raises(PeersError, match="took rollouts within 30 s"):
        await peer._work()
    assert set(asked[:8]) == set(asked[8:16]) == set(learners.there)
    assert now < 33


@pytest.fixture
def clock(monkeypatch):
    """Each look at the clock takes a second, and there are only so many."""
    clock = iter(range(3000))
    monkeypatch.setattr(rollout_peer, "time", SimpleNamespace(monotonic=clock.__next__))
    monkeypatch.setattr(rollout_peer, "AGAIN_S", 10.0)
    return clock


def works(peer: RolloutPeer, generate: Any) -> None:
    """Replace the parts of the peer that follow a learner's policies and generate by them."""
    peer._manifest, peer._seen_at, peer._config.timeout_waiting_for_peers = {"mode": "grpo"}, 0, 100.0
    peer._identity.sign = lambda _payload: b""
    for name, part in (("_follow", lambda _: asyncio.Event().wait()), ("_generate", generate)):
        setattr(peer, name, part)


async def test_a_peer_that_can_use_no_policy_gives_up_in_time_and_says_why(peer, learners, clock):
    """The time in which the first generation fails, which may be long, does not count."""
    tried = []

    async def generate(learner: str, _stream: object) -> None:
        while not tried and next(clock) < 200:
            pass
        tried.append(learner)
        raise ProtocolError("out of memory")

    works(peer, generate)
    with pytest.raises(PeersError, match=r"taken within 100 s; .* learner \d: out of memory"):
        await peer._work()
    assert tried[:4] == [THEIRS, OTHER, THEIRS, OTHER]


async def test_a_learner_whose_policies_never_work_does_not_keep_a_peer_from_another(peer, learners, clock):
    """Here a batch takes longer than the time after which the learner with bad policies is asked again."""

    async def generate(learner: str, _stream: object) -> None:
        if learner == THEIRS:
            raise ProtocolError("its weights are not finite")
        for _ in range(20):
            await asyncio.sleep(0)
        await peer._hand_over(SimpleNamespace(hand_over=taken), learner, "policy", 0, [()])

    async def taken(_signed: object) -> str:
        if peer._num_generated == 20:
            learners.there.clear()
            raise PeerUnreachable("it has ended")
        return ""

    works(peer, generate)
    await peer._work()
    assert peer._num_generated == 20 and learners.opened.count(THEIRS) > 2


class Supervised:
    """Replaces the Supervisor of a generator: each life hands over two rollouts and ends with the same error."""

    def __init__(self, peer: RolloutPeer, answers: str) -> None:
        self._peer, self._answers, self.num_lives = peer, answers, 0

    def __call__(self, _command: object) -> Supervised:
        self.restarts = Restarts()
        return self

    async def run_to_its_end(self) -> None:
        restarts = True
        while restarts and self.num_lives < 3 * MAX_DEATHS:
            await self._peer._hand_over(self, "a", "policy", 0, [(), ()])
            self.num_lives += 1
            restarts = self.restarts.ended(1, "out of memory").restarts

    async def hand_over(self, _signed: object) -> str:
        return self._answers


@pytest.mark.parametrize(("answer", "num_lives"), [("", 3 * MAX_DEATHS), (STALE, 3)])
async def test_a_generator_is_not_given_up_on_as_long_as_learners_take_its_rollouts(
    peer, learners, monkeypatch, answer, num_lives
):
    supervised = Supervised(peer, answer)
    monkeypatch.setattr(rollout_peer, "Supervisor", supervised)
    peer._identity.sign = lambda _payload: b""
    peer._agreed.set()
    for owner, part in (
        (peer, "_work"),
        (peer._admission, "run"),
        (peer._dht, "fail_with_p2pd"),
        (peer._generator, "serve"),
    ):
        setattr(owner, part, lambda *_: asyncio.Event().wait())
    peer._generator.close = lambda: None
    assert await peer.live(lambda: None, Path(), lambda *_: None) == 0
    assert supervised.num_lives == num_lives


class Announcing:
    """A learner's stream that names another policy at every question."""

    def __init__(self, num_files: int, num_bytes: int, *, keeps: int = 1 << 30, base: str = "0" * 64) -> None:
        self._num_files, self._num_bytes, self._keeps, self._base = num_files, num_bytes, keeps, base
        self.num_asked = 0

    async def newest(self, _held: str) -> Policy:
        self.num_asked += 1
        digests = [f"{self.num_asked:032x}{index:032x}" for index in range(self._num_files)]
        blobs = tuple(BlobName(digest=digest, num_bytes=self._num_bytes) for digest in digests)
        step = self.num_asked
        return Policy(digest=f"{step:064x}", step=step, base=self._base, blobs=blobs)

    async def download(self, name: BlobName, directory: Path) -> Path | None:
        if int(name.digest[32:], 16) >= self._keeps:
            return None
        path = directory / name.digest
        path.write_bytes(bytes(name.num_bytes))
        return path


async def test_a_peer_whose_generator_takes_long_to_start_lets_its_learner_hear_that_it_is_there(
    peer, learners
):
    starting, stream = asyncio.Event(), Announcing(0, 0)
    peer._generator.limits, peer._generator.held = starting.wait, ""
    following = asyncio.create_task(peer._follow(stream))
    await until(lambda: stream.num_asked > 3)
    following.cancel()
    await asyncio.wait({following})


@pytest.mark.parametrize(
    ("stream", "num_left"),
    [
        (Announcing(1, 10), 3),
        (Announcing(3, 0), MAX_BLOBS // 3 * 3),
        (Announcing(2, 10, keeps=1), 0),
        (Announcing(2, 10, base=""), 2),
    ],
    ids=["bytes", "files", "files of policies that were left", "files that later ones replace"],
)
async def test_a_learner_whose_policies_nobody_loads_does_not_fill_the_disk(
    peer, learners, tmp_path, stream, num_left
):
    async def limits() -> tuple[int, int, int]:
        return 1, 1, 35

    peer._generator.limits, peer._generator.held = limits, ""
    peer._directory = tmp_path
    following = asyncio.create_task(peer._follow(stream))
    await until(lambda: stream.num_asked > MAX_BLOBS)
    following.cancel()
    await asyncio.wait({following})
    assert len(list(tmp_path.iterdir())) == num_left == len(peer._fetched)
    # A policy of all weights always has room.
    assert stream._base or peer._step >= MAX_BLOBS
    loaded = []

    async def load(paths, digest):
        loaded.append((paths, digest))

    peer._generator.load = load
    if num_left:
        await peer._load()
        assert loaded[0][1] == peer._fetched_digest and peer._fetched_bytes == 0
