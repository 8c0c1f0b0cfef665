"""Strangers run all the DHT nodes that are nearest to the run's keys, and forget everything that is stored there."""

from __future__ import annotations

import contextlib

import pytest

from peers.net.dht.node import Dht
from peers.net.identity import load_or_create
from peers.protocol.records import COORDINATOR_KEY, PEERS_KEY
from peers.timing import RECORD_TTL_S
from tests.support.eclipse import eclipse
from tests.support.swarm import LightSwarm, wait_until

RUN_ID = "eclipsed"


@pytest.fixture(scope="module")
def hidden(quiet_bootstrap, tmp_path_factory):
    with eclipse(
        tmp_path_factory.mktemp("strangers"), [quiet_bootstrap], PEERS_KEY(RUN_ID), COORDINATOR_KEY(RUN_ID)
    ) as stores:
        yield stores


@pytest.fixture
def light(quiet_bootstrap, tmp_path):
    with LightSwarm(tmp_path, [quiet_bootstrap], RUN_ID, step_s=0.02, max_steps=10**9) as light:
        yield light


async def test_what_the_strangers_forget_is_found_at_the_initial_peers(
    hidden, quiet_bootstrap, tmp_path, monkeypatch
):
    from peers.net.dht.records import InitialRecords

    async def nothing(*_, **__):
        return {}

    key, here = PEERS_KEY(RUN_ID), {"host_maddrs": ("/ip4/127.0.0.1/tcp/0",)}
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for name in ("one", "other"):
            identity = load_or_create(tmp_path / f"{name}.key")
            nodes.append(await Dht.join(identity=identity, initial_peers=[quiet_bootstrap], **here))
            stack.push_async_callback(nodes[-1].close)
        one, other = nodes
        with monkeypatch.context() as without:
            without.setattr(InitialRecords, "store", nothing)
            without.setattr(InitialRecords, "find", nothing)
            num_forgotten = sum(store.num_forgotten for store in hidden)
            await one.store(key, "forgotten", b"value", ttl_s=RECORD_TTL_S)
            assert sum(store.num_forgotten for store in hidden) > num_forgotten
            assert "forgotten" not in await other.get(key)
        await one.store(key, "kept", b"value", ttl_s=RECORD_TTL_S)
        assert (await other.get(key))["kept"] == b"value"


@pytest.mark.exhaustive
def test_founders_and_newcomers_find_each_other_through_any_initial_peer(hidden, light):
    founders = light.start_all(2)
    wait_until(lambda: all(peer.epoch >= 2 for peer in founders), "epochs of both founders")
    assert founders[0].epochs[-1]["contributors"] == [0, 1]
    assert sum(store.num_forgotten for store in hidden) > 10
    # The newcomer does not know the bootstrap node, only a peer.
    light.initial_peers = [founders[1].address]
    newcomer = light.start(2)
    wait_until(
        lambda: newcomer.epochs and newcomer.epochs[-1]["contributors"] == [0, 1, 2], "an epoch of all three"
    )
    light.check_digests()
