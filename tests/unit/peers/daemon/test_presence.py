import asyncio
import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from peers.daemon import presence
from peers.daemon.presence import Presence
from peers.errors import PeerUnreachable, UserError
from peers.net.gate import Gate
from peers.net.identity import load_or_create
from peers.net.mesh import Mesh
from peers.protocol.records import Announcement, OtherVersion
from peers.timing import RECORD_TTL_S
from tests.support.announcements import announced, spoken
from tests.support.virtual_time import run_virtually

RUN_ID = "meeting"


class SilentDht:
    """A DHT with one connected initial peer, which answers with `records`, or not at all if they are None."""

    def __init__(self, records=None):
        self.records = records

    @property
    def silent_initial_peers(self):
        return frozenset({"initial"}) if self.records is None else frozenset()

    @property
    def is_answered(self):
        return self.records is not None

    async def get(self, key):
        """The records, with the time of this call."""
        now = time.time()
        return {
            other.peer_id: replace(record, time=now).encode(other) for other, record in self.records or ()
        }


def a_presence(identity, dht=None):
    return Presence(
        run_id=RUN_ID,
        identity=identity,
        dht=dht,
        mesh=Mesh(
            run_id=RUN_ID,
            peer_id=identity.peer_id,
            transport=None,
            own_record=lambda number, lost: b"",
            on_change=lambda: None,
            post=lambda event: None,
            on_manifest=lambda sender, message: None,
            gate=Gate(RUN_ID),
        ),
        galaxy_size=1,
        describe=lambda: None,
        on_change=lambda: None,
        gate=Gate(RUN_ID),
    )


def met(tmp_path, monkeypatch, dht, how, other_version=None):
    """Have a peer look for the others for a second, while each of its calls returns `how`."""
    monkeypatch.setattr(presence, "RECORD_TTL_S", 1.0)
    monkeypatch.setattr(presence, "EARLY_INTERVAL_S", 0.02)
    identity = load_or_create(tmp_path / "key")

    async def reach(record):
        return how

    async def scenario():
        mine = a_presence(identity, dht)
        mine._gate.other_version = other_version
        monkeypatch.setattr(mine.mesh, "reach", reach)
        await mine._meet(await mine._records())

    try:
        asyncio.run(scenario())
    finally:
        identity.release()


def test_who_is_announced_and_answers_nobody_is_named(tmp_path, monkeypatch):
    other = load_or_create(tmp_path / "other")
    record = announced(other.peer_id, run_id=RUN_ID, world_rank=0, maddrs=("/ip4/192.0.2.1/tcp/4000",))
    other.release()
    dht = SilentDht([(other, record)])
    with pytest.raises(
        PeerUnreachable,
        match=f"none of the run's announced peers answers this machine: {other.peer_id} at /ip4/192.0.2.1",
    ):
        met(tmp_path, monkeypatch, dht, "silent")
    met(tmp_path, monkeypatch, dht, "gone")


def test_initial_peers_that_do_not_say_whom_they_know_are_named(tmp_path, monkeypatch):
    with pytest.raises(PeerUnreachable, match="the initial peers initial are connected"):
        met(tmp_path, monkeypatch, SilentDht(), "gone")


def test_the_first_peer_of_a_run_waits_for_nobody(tmp_path, monkeypatch):
    met(tmp_path, monkeypatch, SilentDht([]), "silent")


def test_a_peer_that_finds_only_records_of_another_version_begins_no_run_beside_them(tmp_path, monkeypatch):
    other = load_or_create(tmp_path / "other")
    record = announced(other.peer_id, run_id=RUN_ID, world_rank=0)
    other.release()
    with pytest.raises(UserError, match=r"use another version of diloco \(protocol 7, this one has"):
        met(tmp_path, monkeypatch, SilentDht([]), "silent", OtherVersion(7))
    # Some coordinator is of another version, but the peers are not.
    met(tmp_path, monkeypatch, SilentDht([(other, record)]), "gone", OtherVersion(7))


def test_the_coordinator_that_is_missing_is_the_runs_own(tmp_path, monkeypatch):
    """A coordinator of another run may answer at the same address, or one of another version."""

    async def no_grant(*_args, **_options):
        return None

    async def scenario(mine):
        with pytest.raises(PeerUnreachable, match=f"`diloco dht start --run-id {RUN_ID}`"):
            await mine._obtain_rank(None)
        mine._gate.other_version = OtherVersion(0)
        with pytest.raises(UserError, match="another version"):
            await mine._obtain_rank(None)

    monkeypatch.setattr(presence, "request_rank", no_grant)
    identity = load_or_create(tmp_path / "key")
    try:
        mine = a_presence(identity, SilentDht([]))
        mine._describe = lambda: announced(identity.peer_id)
        asyncio.run(scenario(mine))
    finally:
        identity.release()


def test_a_rank_that_another_peer_claims_is_left_to_the_roster_to_decide(tmp_path, caplog):
    identity = load_or_create(tmp_path / "key")

    async def scenario():
        mine = a_presence(identity)
        mine.mesh._gossip.here["b"] = spoken("b", world_rank=7)
        for rank in (presence.NO_RANK, 3):
            mine.world_rank = rank
            mine._settle_rank()
            assert mine.world_rank == rank
        assert not caplog.messages
        mine.world_rank = 7
        mine._settle_rank()
        assert mine.world_rank == presence.NO_RANK
        assert "the peer b also claims world rank 7" in caplog.text

    try:
        asyncio.run(scenario())
    finally:
        identity.release()


def test_a_changed_address_is_announced_and_a_missing_answer_changes_nothing(tmp_path):
    identity, stored = load_or_create(tmp_path / "key"), []

    class MovingDht:
        async def maddrs(self):
            return next(answers)

        async def store(self, key, subkey, value, ttl_s):
            stored.append(Announcement.decode(subkey, value, time.time(), run_id=RUN_ID).maddrs)
            return True

    async def scenario():
        mine = a_presence(identity, MovingDht())
        mine._describe = lambda: announced(identity.peer_id, run_id=RUN_ID, maddrs=mine.maddrs)
        for _ in range(3):
            assert await mine._announce()

    old, new = "/ip4/192.0.2.1/tcp/4000", "/ip4/198.51.100.7/tcp/4000"
    answers = iter([[old], [new, old], []])
    try:
        asyncio.run(scenario())
    finally:
        identity.release()
    assert stored == [(old,), (new, old), (new, old)]


@pytest.mark.parametrize("has_news", [True, False])
def test_among_many_a_record_is_renewed_four_times_in_its_life_and_the_others_are_looked_up_rarely(
    tmp_path, monkeypatch, has_news
):
    identity, stored_at, looked_at = load_or_create(tmp_path / "key"), [], []
    # Of each 375 pauses of five seconds, one is followed by a look.
    draws = iter((0.9, 1 / 374, 1 / 376, 0.0))
    monkeypatch.setattr(presence, "random", SimpleNamespace(random=draws.__next__))

    class TimedDht:
        async def maddrs(self):
            return []

        async def store(self, key, subkey, value, ttl_s):
            stored_at.append(asyncio.get_running_loop().time())
            if has_news:
                mine._announce_now.set()
            return True

        async def get(self, key):
            looked_at.append(asyncio.get_running_loop().time())
            return {}

        async def clock_ahead_s(self):
            return clocks.pop(0)

        def remember(self, peer_id, maddrs):
            pass

    async def scenario():
        async with asyncio.timeout(RECORD_TTL_S + 1):
            await mine.announce_forever()

    clocks, told = [-3600.0, None], []
    mine = a_presence(identity, TimedDht())
    mine.on_clock = told.append
    mine._describe = lambda: announced(identity.peer_id, run_id=RUN_ID)
    mine.mesh._gossip.here |= {f"p{rank}": spoken(f"p{rank}", world_rank=rank) for rank in range(199)}
    try:
        run_virtually(scenario(), now=0.0)
    finally:
        identity.release()
    assert stored_at == pytest.approx([5.0, 10.0, 15.0, 20.0])
    assert looked_at == pytest.approx([15.0, 20.0])
    assert "3600 s behind" in told[0] and not told[1:] and not clocks


def test_a_clock_that_goes_wrong_is_told_once_and_so_is_that_it_is_right_again(tmp_path):
    identity, told = load_or_create(tmp_path / "key"), []

    async def scenario():
        mine = a_presence(identity)
        mine.on_clock = told.append
        for ahead_s in (0.1, None, -9.0, 11.0, 12.0, None, 4.0, -0.2):
            mine._judge_clock(ahead_s)
        mine.mesh._gossip.here["p1"] = spoken("p1", world_rank=1)
        mine._judge_clock(-900.0)

    try:
        asyncio.run(scenario())
    finally:
        identity.release()
    late, right, early = told
    assert "11 s ahead of" in late and right == "" and "900 s behind" in early
    # The clock of the initial peers may be the wrong one; and peers that are connected refuse nothing.
    assert all("set right the one that is wrong" in text for text in (late, early))
    assert "refuse" in late and "refuse" not in early
