"""Which world ranks the coordinator gives, over a fake DHT."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from peers.admission import ranks
from peers.admission.ledger import RankLedger
from peers.admission.ranks import Registrar
from peers.net.gate import Gate
from peers.net.identity import load_or_create
from peers.protocol.admission import Grant, Taken
from tests.support.announcements import announced

RUN = "run"


class FakeDht:
    """A DHT in which one live peer, which answers, claims world rank 0."""

    def __init__(self, identity):
        self.identity = identity

    async def get(self, key):
        record = announced(self.identity.peer_id, run_id=RUN, world_rank=0)
        return {self.identity.peer_id: replace(record, time=time.time()).encode(self.identity)}

    async def ping(self, peer_id, **_):
        return peer_id == self.identity.peer_id


@pytest.fixture
def claimant(tmp_path):
    identity = load_or_create(tmp_path / "key")
    yield identity
    identity.release()


async def test_a_claim_does_not_refuse_the_holder_its_own_rank_but_anybody_else(claimant, tmp_path):
    ledger = RankLedger(tmp_path / "ledger")
    registrar = Registrar(RUN, ledger, FakeDht(claimant), Gate(RUN))
    assert await registrar.assign("holder", 0) == Taken(holder=claimant.peer_id)
    ledger.assign("holder", 0)
    assert await registrar.assign("holder", 0) == Grant(world_rank=0, galaxy_size=2)
    assert await registrar.assign("another", 0) == Taken(holder=claimant.peer_id)
    ledger.close()


async def test_who_was_given_a_rank_and_never_came_is_forgotten(claimant, tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now))
    ledger = RankLedger(tmp_path / "ledger")
    registrar = Registrar(RUN, ledger, FakeDht(claimant), Gate(RUN))
    for number in range(10):
        now += ranks.ARRIVAL_S / 2
        grant = await registrar.assign(f"stranger {number}", None)
        assert isinstance(grant, Grant) and grant.galaxy_size == min(number + 2, 3)
    assert registrar._granted_at.keys() == {"stranger 8", "stranger 9"}
    ledger.close()


async def test_a_holder_that_still_answers_keeps_its_rank_though_the_dht_does_not_list_it(tmp_path, claimant):
    class Unlisted(FakeDht):
        async def get(self, key):
            return {}

    ledger = RankLedger(tmp_path / "ledger")
    registrar = Registrar(RUN, ledger, Unlisted(claimant), Gate(RUN))
    ledger.assign(claimant.peer_id)
    for number in (1, 2, 3):
        assert ledger.assign(f"gone {number}", present=["another"]) == number
    assert await registrar.assign("newcomer", None) == Grant(world_rank=1, galaxy_size=2)
    assert ledger.holder(0) == claimant.peer_id
    assert ledger.holder(1) == "newcomer"
    ledger.close()
