"""Which issuers a peer asks for a token, and how long it waits for the answer of a false one."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace

import pytest

from peers.admission import own_token
from peers.admission.issuer import Issuer
from peers.admission.own_token import NoIssuer, OwnToken, request_token
from peers.admission.secrets import AdmissionKey, AdmissionSettings, SwarmSecret
from peers.errors import PeerUnreachable, UserError
from peers.net.identity import load_or_create
from peers.net.private_files import write_private
from peers.protocol.records import COORDINATOR_KEY, CoordinatorRecord
from peers.protocol.refusal import Refused
from peers.protocol.tokens import BanList, Token

RUN_ID = "run"
SILENT, BROKEN = "silent", "broken"


class Issuers:
    """The DHT as a peer without a token sees it: issuers by name, some of which only claim to be issuers."""

    def __init__(self, directory, announced):
        self.key = AdmissionKey.new()
        write_private(directory / "admission", self.key.to_text().encode() + b"\n")
        self.identities = {name: load_or_create(directory / f"{name}.key") for name in ("me", *announced)}
        self.peer_id = self.identities["me"].peer_id
        self.transport = self
        real = self.identities["real"].peer_id
        settings = AdmissionSettings(admission_key_file=str(directory / "admission"))
        self.real = Issuer(RUN_ID, real, settings, lambda: self.ban_list, lambda *_: None)
        self.ban_list = BanList(run_id=RUN_ID)
        self.records = {}
        self.secret = self.key.secret
        for age_s, name in enumerate(announced):
            identity, now = self.identities[name], time.time()
            record = CoordinatorRecord(
                peer_id=identity.peer_id,
                run_id=RUN_ID,
                maddrs=(),
                time=now - age_s,
                token=self.real.issue(identity.peer_id, now),
            )
            self.records[identity.peer_id] = record.encode(identity)
        self.kept = []

    async def get(self, key):
        return {} if key == COORDINATOR_KEY(RUN_ID) else self.records

    async def open(self, peer_id, protocol, **_):
        name = next(name for name, identity in self.identities.items() if identity.peer_id == peer_id)
        if name == BROKEN:
            raise PeerUnreachable("it is gone")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self.kept.append(
            theirs if name == SILENT else asyncio.create_task(self.real.handle(self.peer_id, theirs))
        )
        return ours

    def ask(self, timeout_s=60.0):
        return asyncio.run(request_token(self, RUN_ID, self.secret, timeout_s=timeout_s))


@pytest.mark.parametrize("announced", [[SILENT, BROKEN, "real"], ["real", SILENT], ["real"]])
def test_nobody_who_says_that_it_issues_tokens_holds_up_who_asks(tmp_path, announced, monkeypatch):
    monkeypatch.setattr(own_token, "ANSWER_S", 20.0)
    issuers = Issuers(tmp_path, announced)
    began = time.monotonic()
    token = Token.decode(issuers.ask(), issuers.key.secret.public_key)
    assert token.peer_id == issuers.peer_id
    assert time.monotonic() - began < 15


def test_a_refusal_is_the_answer_where_nobody_does_better(tmp_path):
    issuers = Issuers(tmp_path, [BROKEN, "real"])
    issuers.ban_list = BanList(run_id=RUN_ID, version=1, peer_ids=frozenset({issuers.peer_id}))
    with pytest.raises(Refused, match="banned"):
        issuers.ask()


def test_who_has_the_public_half_of_the_key_alone_proves_nothing(tmp_path):
    issuers = Issuers(tmp_path, ["real"])
    issuers.secret = SwarmSecret(issuers.key.secret.public_key, b"g" * 32)
    with pytest.raises(Refused, match="secret"):
        issuers.ask()


def test_a_token_for_another_peer_is_not_taken(tmp_path, monkeypatch):
    issuers = Issuers(tmp_path, ["real"])
    issue, other = issuers.real.issue, issuers.identities["real"].peer_id
    monkeypatch.setattr(issuers.real, "issue", lambda _, now: issue(other, now))
    monkeypatch.setattr(own_token, "RETRY_S", 0.01)
    with pytest.raises(NoIssuer):
        issuers.ask(timeout_s=0.5)


def test_a_token_is_renewed_once_half_its_time_is_over_and_not_before(tmp_path, monkeypatch):
    issuers, now = Issuers(tmp_path, ["real"]), time.time()
    own = OwnToken(issuers, RUN_ID, issuers.secret, tmp_path / "own.token", issuers.real)
    asyncio.run(own.obtain())
    given = own.blob
    for share, is_kept in ((0.4, True), (0.6, False)):
        clock = SimpleNamespace(time=lambda at=now + share * own.lifetime_s: at, monotonic=time.monotonic)
        monkeypatch.setattr(own_token, "time", clock)
        asyncio.run(own.renew())
        assert (own.blob == given) is is_kept


@pytest.mark.parametrize(
    ("is_of_another", "error", "says"),
    [(False, PeerUnreachable, "no issuer of tokens"), (True, UserError, "is not the run's")],
)
def test_an_issuer_that_is_away_is_no_mistake_of_the_user_as_a_wrong_secret_is(
    tmp_path, monkeypatch, is_of_another, error, says
):
    """Its record outlives it for a while."""
    issuers = Issuers(tmp_path, ["real"])
    secret = AdmissionKey.new().secret if is_of_another else issuers.secret

    async def gone(*_args, **_kwargs):
        raise PeerUnreachable("connection refused")

    monkeypatch.setattr(issuers, "open", gone)
    monkeypatch.setattr(own_token, "RETRY_S", 0.01)
    monkeypatch.setattr(own_token, "CONNECT_S", 0.2)
    own = OwnToken(issuers, RUN_ID, secret, tmp_path / "own.token", None)
    with pytest.raises(error, match=says):
        asyncio.run(own.obtain())
