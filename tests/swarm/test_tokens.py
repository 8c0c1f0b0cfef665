"""How tokens are issued, kept, renewed and lost, among members of one DHT, some of which have the admission key."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.admission import bans, own_token
from peers.admission.secrets import AdmissionSettings, load_or_create_key, replace_secret
from peers.admission.service import AdmissionService
from peers.daemon.coordinator import CoordinatorConfig, serve
from peers.errors import PeersError, PeerUnreachable, UserError
from peers.net.identity import Identity, load, load_or_create
from peers.protocol.tokens import BanList
from tests.support.members import LOOPBACK, eventually, joined

DAY_S = 86_400.0


class Member:
    """A member that can join the run several times under one identity, as its process would after restarts."""

    def __init__(self, directory: Path, name: str, bootstrap: str) -> None:
        self.directory, self.name, self.bootstrap = directory, name, bootstrap
        # Each test has its own run, because the DHT is shared.
        self.run_id = directory.name[:60]

    @property
    def identity(self) -> Identity:
        path = self.directory / f"{self.name}.key"
        if not path.exists():
            load_or_create(path).release()
        return load(path)

    @asynccontextmanager
    async def admitted(self, **settings: Any) -> AsyncIterator[AdmissionService]:
        async with joined(self.directory, self.name, self.bootstrap) as dht:
            service = AdmissionService(self.run_id, self.identity, dht, AdmissionSettings(**settings))
            await service.enter()
            yield service


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    load_or_create_key(tmp_path / "key", tmp_path / "secret")
    return tmp_path / "key"


@pytest.fixture
def member(tmp_path: Path, quiet_bootstrap: str) -> Any:
    return lambda name: Member(tmp_path, name, quiet_bootstrap)


async def test_a_member_with_the_admission_key_admits_others_where_there_is_no_coordinator(
    tmp_path, key_file, member
):
    async with (
        member("stand-in").admitted(admission_key_file=str(key_file)) as stand_in,
        member("newcomer").admitted(swarm_secret_file=str(tmp_path / "secret")) as newcomer,
    ):
        for one, other in ((stand_in, newcomer), (newcomer, stand_in)):
            one.gate.check(other._identity.peer_id, other.token, "door")
    kept = tmp_path / "newcomer.token"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    async with member("newcomer").admitted(swarm_secret_file=str(tmp_path / "secret")) as again:
        assert again.token == kept.read_bytes()


async def test_only_who_is_on_the_allowlist_is_admitted_and_the_list_is_read_again(
    tmp_path, key_file, member
):
    allowlist, newcomer = tmp_path / "allowed", member("newcomer")
    allowlist.write_text("# nobody yet\n")
    given = {"admission_key_file": str(key_file), "allowlist_file": str(allowlist)}
    async with member("issuer").admitted(**given):
        with pytest.raises(UserError, match=f"Have {newcomer.identity.peer_id} added"):
            async with newcomer.admitted(swarm_secret_file=str(tmp_path / "secret")):
                pass
        allowlist.write_text(f"{newcomer.identity.peer_id}  # the new pod\n")
        async with newcomer.admitted(swarm_secret_file=str(tmp_path / "secret")) as service:
            assert service.token


async def test_a_new_secret_shuts_out_the_old_one_and_nobody_who_has_a_token(tmp_path, key_file, member):
    old = tmp_path / "old"
    old.write_bytes((tmp_path / "secret").read_bytes())
    async with member("issuer").admitted(admission_key_file=str(key_file)):
        async with member("early").admitted(swarm_secret_file=str(old)) as early:
            token = early.token
        replace_secret(key_file, tmp_path / "secret")
        with pytest.raises(UserError, match="is not the run's, or not any more"):
            async with member("late").admitted(swarm_secret_file=str(old)):
                pass
        async with member("early").admitted(swarm_secret_file=str(old)) as early:
            assert early.token == token
        async with member("late").admitted(swarm_secret_file=str(tmp_path / "secret")) as late:
            assert late.token


async def test_a_token_is_renewed_in_time_and_without_an_issuer_ends_with_an_error(
    tmp_path, key_file, member, monkeypatch
):
    """The holder's clock is moved instead of the token being short: a busy machine could miss a token of seconds."""

    def later(days: float) -> SimpleNamespace:
        return SimpleNamespace(time=lambda: time.time() + days * DAY_S, monotonic=time.monotonic)

    async def _is_new(peer, first):
        return peer.token != first

    secret = {"swarm_secret_file": str(tmp_path / "secret")}
    lasting = {"admission_key_file": str(key_file), "token_days": 1.0}
    # A peer whose token was not renewed tries again at once.
    monkeypatch.setattr("peers.admission.service.LOOK_S", 0.1)
    monkeypatch.setattr(own_token, "_RENEWALS", DAY_S / 0.1)
    async with member("issuer").admitted(**lasting), member("peer").admitted(**secret) as peer:
        with monkeypatch.context() as over_half:
            over_half.setattr(own_token, "time", later(days=0.6))
            first, running = peer.token, asyncio.create_task(peer.run())
            try:
                await eventually(lambda: _is_new(peer, first), 30)
                assert peer.token == (tmp_path / "peer.token").read_bytes()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    async with member("peer").admitted(**secret) as peer:
        monkeypatch.setattr(own_token, "time", later(days=0.6))
        running = asyncio.create_task(peer.run())
        assert not (await asyncio.wait({running}, timeout=1.0))[0], "its token is good for some hours more"
        monkeypatch.setattr(own_token, "time", later(days=1.0))
        with pytest.raises(PeersError, match="has expired, and nobody renewed it"):
            await running


@pytest.mark.parametrize("lets_it_back_in", [False, True])
async def test_a_peer_that_its_own_file_bans_goes_on_until_another_shows_it_the_newest_list(
    tmp_path, key_file, member, lets_it_back_in
):
    peer_id, run_id = member("peer").identity.peer_id, member("peer").run_id
    key = load_or_create_key(key_file, tmp_path / "secret").private_key
    old = BanList(run_id=run_id, version=1, peer_ids=frozenset({peer_id}))
    newest = BanList(run_id=run_id, version=2) if lets_it_back_in else old
    async with member("issuer").admitted(admission_key_file=str(key_file)) as issuer:
        (tmp_path / "peer.bans").write_bytes(old.encode(key))
        async with member("peer").admitted(swarm_secret_file=str(tmp_path / "secret")) as peer:
            running = asyncio.create_task(peer.run())
            await asyncio.sleep(0.2)
            assert peer.token and not running.done()
            issuer.gate.learn(newest.encode(key))
            others = {peer_id: await peer._dht.maddrs()}
            told = await eventually(lambda: bans.exchange(issuer._dht, run_id, issuer.gate, others))
            assert told == 1
            assert peer.gate.bans == newest
            if not lets_it_back_in:
                with pytest.raises(PeersError, match="is banned from the run"):
                    await running
            await asyncio.sleep(0.2)
            assert running.done() is not lets_it_back_in
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.mark.exhaustive
async def test_with_a_secret_a_peer_joins_no_run_that_has_another_or_none(
    tmp_path, key_file, member, monkeypatch
):
    async def _has_said(said, text):
        return any(text in line for line in said)

    secret = {"swarm_secret_file": str(tmp_path / "secret")}
    with (
        monkeypatch.context() as impatient,
        pytest.raises(PeerUnreachable, match="no issuer of tokens for this swarm secret answers"),
    ):
        impatient.setattr(own_token, "CONNECT_S", 2.0)
        async with member("peer").admitted(**secret):
            pass
    config = CoordinatorConfig(
        run_id=member("peer").run_id,
        state_dir=tmp_path,
        host_maddrs=LOOPBACK,
        initial_peers=(member("peer").bootstrap,),
    )
    said: list[str] = []
    coordinator = asyncio.create_task(serve(config, said.append))
    try:
        await eventually(lambda: _has_said(said, "the swarm is open"))
        with pytest.raises(UserError, match="admits everybody"):
            async with member("peer").admitted(**secret):
                pass
    finally:
        coordinator.cancel()
        await asyncio.gather(coordinator, return_exceptions=True)
    load_or_create_key(tmp_path / "other-key", tmp_path / "other-secret")
    async with member("issuer").admitted(admission_key_file=str(tmp_path / "other-key")):
        with pytest.raises(UserError, match="is not the run's"):
            async with member("peer").admitted(**secret):
                pass
