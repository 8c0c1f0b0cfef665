"""Asking for a token: whom, and how long the answer of the wrong one is waited for."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from peers.admission import own_token
from peers.admission.issuer import Issuer
from peers.admission.own_token import Applicant, request_token
from peers.admission.secrets import AdmissionKey, AdmissionSettings
from peers.errors import PeerUnreachable
from peers.net.identity import load_or_create
from peers.net.private_files import write_private
from peers.protocol.records import COORDINATOR_KEY, CoordinatorRecord
from peers.protocol.refusal import Refused
from peers.protocol.tokens import BanList, Token

RUN_ID = "run"
SILENT, BROKEN = "silent", "broken"


class Issuers:
    """The DHT as an applicant sees it: issuers by name, of whom some only say that they are."""

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

    def ask(self):
        applicant = Applicant(RUN_ID, self.peer_id, self.key.secret)
        return asyncio.run(request_token(self, applicant, timeout_s=60.0))


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
