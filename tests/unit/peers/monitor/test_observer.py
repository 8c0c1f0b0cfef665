"""An observer that peers tell nothing says why, rather than that they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from peers.admission.secrets import AdmissionKey, SwarmSecret
from peers.monitor.observations import Observation
from peers.monitor.observer import Observer
from peers.monitor.report_service import ReportService
from peers.net.gate import Gate
from peers.net.identity import load_or_create
from peers.protocol.tokens import Token
from tests.support.announcements import announced
from tests.support.in_process import Network
from tests.support.sighted import full_report

RUN_ID = "run"
KEY = AdmissionKey.new()
RENEWED = AdmissionKey(KEY.private_key, secrets.token_bytes(32))
"""As after `diloco peers new-secret`."""


@contextlib.asynccontextmanager
async def observing_one_peer(
    directory: Path, of_peer: AdmissionKey | None, given: SwarmSecret | None
) -> AsyncIterator[Observer]:
    """An observer with the secret `given`, of a peer that trains in a swarm with this key, or in an open one."""
    identity, now = load_or_create(directory / "key"), time.time()
    token = Token(run_id=RUN_ID, peer_id=identity.peer_id, not_before=now - 60, expires=now + 60)
    record = announced(
        identity.peer_id, world_rank=0, token=token.encode(of_peer.private_key) if of_peer else b""
    ).encode(identity)

    async def get(_key: str) -> dict[str, bytes]:
        return {identity.peer_id: record}

    async with Network() as network:
        peer = network.transport(identity.peer_id)
        report = full_report(status=record, troubles=(), rounds=())
        await ReportService(
            RUN_ID, identity.peer_id, peer, lambda _: report, secret=of_peer.secret if of_peer else None
        ).start()
        dht = SimpleNamespace(
            peer_id="observer",
            transport=network.transport("observer"),
            get=get,
            remember=lambda *_: None,
            fail_with_p2pd=asyncio.Event().wait,
        )
        observer = Observer(RUN_ID, dht, Gate(RUN_ID, given.public_key if given else None), given)
        try:
            await observer.start()
            await observer.settled(10)
            yield observer
        finally:
            await observer.close()
            identity.release()


@pytest.mark.parametrize(
    ("of_peer", "given", "num_shown", "verdict"),
    [
        (None, None, 1, "healthy: 1 peer"),
        (KEY, KEY.secret, 1, "healthy: 1 peer"),
        (KEY, None, 1, "this swarm is closed: give --swarm-secret-file FILE"),
        (
            KEY,
            RENEWED.secret,
            1,
            "this swarm is closed, and the given secret is older or newer than its peers'",
        ),
        (KEY, AdmissionKey.new().secret, 0, "the given swarm secret is not this swarm's"),
        (None, KEY.secret, 0, "this swarm is open: give no --swarm-secret-file"),
    ],
    ids=["open", "the secret", "no secret", "a newer secret", "another secret", "a secret for an open swarm"],
)
async def test_a_secret_that_is_missing_or_wrong_is_no_fault_of_the_peer(
    of_peer, given, num_shown, verdict, tmp_path
):
    async with observing_one_peer(tmp_path, of_peer, given) as observer:
        seen = observer.swarm()
    assert seen["verdict"]["text"].startswith(verdict)
    assert seen["verdict"]["level"] == ("good" if "healthy" in verdict else "warning")
    assert [peer["state"] for peer in seen["peers"]] == ["training"] * num_shown


async def test_a_peer_with_too_many_observers_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("peers.monitor.report_service.MAX_OBSERVERS", 0)
    async with observing_one_peer(tmp_path, None, None) as observer:
        seen = observer.swarm()
    assert "as many observers as they can" in seen["verdict"]["text"]
    assert [peer["state"] for peer in seen["peers"]] == ["training"]


async def test_peers_out_of_reach_make_nobody_look_again_before_records_change():
    looks = []

    async def get(key: str) -> dict[str, bytes]:
        looks.append(key)
        return {}

    observer = Observer(RUN_ID, SimpleNamespace(get=get), Gate(RUN_ID), None)
    await observer._look()
    for num_peers, num_looks in ((2, 3), (200, 0)):
        observer._observations.peers = {f"p{i}": Observation(announced(f"p{i}")) for i in range(num_peers)}
        looks.clear()
        for _ in range(3):
            await observer._look_since(time.monotonic())
        assert len(looks) == num_looks
