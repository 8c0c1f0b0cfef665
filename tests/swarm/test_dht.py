from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import peers
from benchmarks.chaos.links import free_port
from peers.errors import PeersError, PeerUnreachable, UserError
from peers.net.dht import node
from peers.net.dht.node import Dht
from peers.net.identity import load_or_create
from peers.protocol.records import MAX_RECORD_BYTES
from tests.support.members import LOOPBACK, eventually, joined
from tests.support.swarm import wait_until

DEAD_PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"


async def test_what_one_peer_stores_another_reads_until_it_expires(tmp_path, quiet_bootstrap):
    async def _is_empty(dht, key):
        return await dht.get(key) == {}

    async with joined(tmp_path, "a", quiet_bootstrap) as a, joined(tmp_path, "b", quiet_bootstrap) as b:
        assert await a.store("store", "first", b"one", 30)
        assert await b.store("store", "second", b"two", 30)
        assert await a.get("store") == {"first": b"one", "second": b"two"}
        assert await b.store("store", "second", b"three", 30)
        assert (await a.get("store"))["second"] == b"three"
        # A record that expired on its way is not accepted.
        await eventually(lambda: b.store("passing", "x", b"soon gone", 3))
        await eventually(lambda: _is_empty(a, "passing"))
        with pytest.raises(ValueError, match="at most"):
            await a.store("store", "long", b"x" * (MAX_RECORD_BYTES + 1), 30)


async def test_a_peer_joins_through_the_one_live_address_of_several(tmp_path, bootstrap):
    async with joined(tmp_path, "a", DEAD_PEER, bootstrap) as dht:
        assert await dht.transport.connected_peers()


async def test_a_client_reads_and_stores_without_listening(tmp_path, bootstrap):
    async with (
        joined(tmp_path, "a", bootstrap) as a,
        joined(tmp_path, "c", bootstrap, client_mode=True) as client,
    ):
        assert await a.store("client", "x", b"1", 30)
        assert await client.get("client") == {"x": b"1"}
        assert await client.maddrs() == []


async def test_a_node_asks_its_initial_peers_for_the_time(tmp_path, bootstrap, monkeypatch):
    async with joined(tmp_path, "lone") as lone, joined(tmp_path, "a", bootstrap) as a:
        assert await lone.clock_ahead_s() is None
        assert await a.clock_ahead_s() == pytest.approx(0.0, abs=3.0)
        now = time.time
        monkeypatch.setattr(
            node, "time", SimpleNamespace(time=lambda: now() - 3600, monotonic=time.monotonic)
        )
        assert await a.clock_ahead_s() == pytest.approx(-3600.0, abs=3.0)


async def test_a_lone_node_remembers_what_it_stored_itself(tmp_path):
    async with joined(tmp_path, "a") as dht:
        assert await dht.store("key", "x", b"1", 30)
        assert await dht.get("key") == {"x": b"1"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"initial_peers": ["127.0.0.1:4001"]}, "is not an address; copy the whole address"),
        ({"initial_peers": ["/ip4/127.0.0.1/tcp/4001"]}, "lacks the peer's id"),
        ({"host_maddrs": ["/ip4/203.0.113.9/tcp/0"]}, "not an address of this machine"),
        ({"announce_maddrs": [DEAD_PEER]}, "names a peer"),
    ],
)
async def test_an_address_that_is_wrong_is_the_users_to_mend(tmp_path, options, said):
    identity = load_or_create(tmp_path / "a.key")
    with pytest.raises(UserError, match=said):
        await Dht.join(identity=identity, **({"host_maddrs": LOOPBACK} | options))


async def test_an_address_where_nobody_answers_may_do_so_later(tmp_path):
    identity = load_or_create(tmp_path / "a.key")
    said = rf"none of the initial peers answers \({DEAD_PEER}: connection refused\)"
    with pytest.raises(PeerUnreachable, match=said):
        await Dht.join(identity=identity, initial_peers=[DEAD_PEER], host_maddrs=LOOPBACK)


async def test_an_address_with_another_peers_id_is_told_apart_from_a_silent_one(tmp_path, bootstrap):
    wrong = bootstrap.partition("/p2p/")[0] + "/p2p/" + DEAD_PEER.rpartition("/")[2]
    identity = load_or_create(tmp_path / "a.key")
    with pytest.raises(UserError, match="another peer answers there"):
        await Dht.join(identity=identity, initial_peers=[wrong], host_maddrs=LOOPBACK)


async def test_another_program_at_an_address_is_told_apart_from_a_silent_peer(tmp_path):
    """As if the port were mistyped: a web server's."""

    async def refuse(_reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\nServer: little\r\n\r\n")
        await writer.drain()
        writer.close()

    identity = load_or_create(tmp_path / "a.key")
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        wrong = f"/ip4/127.0.0.1/tcp/{port}/p2p/{DEAD_PEER.rpartition('/')[2]}"
        with pytest.raises(
            PeerUnreachable, match=f"{wrong}: something else than diloco seems to listen there"
        ):
            await Dht.join(identity=identity, initial_peers=[wrong], host_maddrs=LOOPBACK)


@pytest.mark.exhaustive
def test_a_member_that_is_busy_for_some_seconds_is_waited_for(swarm, tmp_path):
    light = swarm(step_s=0.05, max_steps=100000)
    member = light.start_all(1)[0]
    address = wait_until(lambda: member.address, "its address")
    # Its p2pd keeps running, so the connection is answered, but the DHT's request is not.
    os.kill(member.process.pid, signal.SIGSTOP)
    thaw = threading.Timer(4.5, os.kill, (member.process.pid, signal.SIGCONT))
    thaw.start()

    async def scenario():
        async with joined(tmp_path, "late", address) as late:
            assert await late.transport.connected_peers()

    asyncio.run(scenario())
    thaw.join()


async def test_a_port_in_use_is_refused_though_p2pd_would_share_it(tmp_path, bootstrap):
    port = bootstrap.split("/")[4]
    identity = load_or_create(tmp_path / "a.key")
    with pytest.raises(UserError, match=f"port {port} is in use"):
        await Dht.join(identity=identity, host_maddrs=[f"/ip4/127.0.0.1/tcp/{port}"])


async def test_closing_leaves_no_process_and_no_socket(tmp_path_factory, bootstrap, monkeypatch):
    # Unix sockets need a short path.
    directory = tmp_path_factory.mktemp("d")
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    async with joined(directory, "a", bootstrap) as dht:
        assert list(directory.glob("diloco-*"))
        process = psutil.Process(dht.p2pd_pid)
        await dht.close()
        await dht.close()
        assert not process.is_running()
    assert not list(directory.glob("diloco-*"))


async def test_a_killed_p2pd_is_noticed(tmp_path, bootstrap):
    async with joined(tmp_path, "a", bootstrap) as dht:
        os.kill(dht.p2pd_pid, signal.SIGKILL)
        with pytest.raises(PeersError, match="p2pd"):
            await asyncio.wait_for(dht.fail_with_p2pd(), 30)


async def test_a_swarm_comes_back_to_its_bootstrap_node_after_a_restart(tmp_path):
    port = free_port()
    listen = {"host_maddrs": [f"/ip4/127.0.0.1/tcp/{port}"]}
    async with joined(tmp_path, "node", **listen) as node:
        (address,) = await node.maddrs()
        a = await Dht.join(
            identity=load_or_create(tmp_path / "a.key"), initial_peers=[address], host_maddrs=LOOPBACK
        )
    try:
        async with joined(tmp_path, "node", **listen) as node:
            await eventually(lambda: a.store("back", "x", b"1", 30))
            assert await eventually(lambda: node.get("back")) == {"x": b"1"}
    finally:
        await a.close()


def forget_each_other(*members):
    """Empty the routing tables, as Hivemind does after a call without an answer; the connections stay."""
    for member in members:
        table = member._node.protocol.routing_table
        for node_id in list(table.uid_to_peer_id):
            del table[node_id]


async def test_a_node_that_got_no_answer_from_anybody_is_not_alone_for_good(tmp_path):
    async with joined(tmp_path, "node") as node:
        (address,) = await node.maddrs()
        async with joined(tmp_path, "a", address) as a:
            forget_each_other(node, a)
            assert await node.store("stall", "x", b"1", 30)
            assert await eventually(lambda: a.get("stall")) == {"x": b"1"}


async def test_peers_find_each_other_again_after_their_bootstrap_node_has_died(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        async with joined(tmp_path, "node") as node:
            (address,) = await node.maddrs()
            a, b = [await stack.enter_async_context(joined(tmp_path, name, address)) for name in "ab"]
        a.remember(b.peer_id, await b.maddrs())
        forget_each_other(a, b)
        assert await b.store("stall", "x", b"1", 30)
        assert await eventually(lambda: a.get("stall")) == {"x": b"1"}


CHILD = """
import asyncio, sys
from pathlib import Path
from peers.net.dht.node import Dht
from peers.protocol.records import MAX_RECORD_BYTES
from peers.net.identity import load_or_create

async def main():
    identity = load_or_create(Path(sys.argv[1]))
    dht = await Dht.join(identity=identity, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    print(dht.p2pd_pid, flush=True)
    await asyncio.Future()

asyncio.run(main())
"""


def test_p2pd_dies_with_a_killed_process(tmp_path):
    root = Path(peers.__file__).parent.parent
    command = [sys.executable, "-c", CHILD, str(tmp_path / "a.key")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            p2pd = psutil.Process(int(process.stdout.readline()))
        finally:
            process.kill()
        gone, _alive = psutil.wait_procs([p2pd], timeout=30)
        assert gone


def test_a_swarm_works_on_a_plain_hivemind_node(tmp_path):
    port = free_port()
    command = [
        *(
            sys.executable,
            "-m",
            "hivemind.hivemind_cli.run_dht",
            "--identity_path",
            str(tmp_path / "node.pem"),
        ),
        *("--host_maddrs", f"/ip4/127.0.0.1/tcp/{port}"),
    ]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HIVEMIND_COLORS": "0"},
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr is not None
            address = next(
                found[0]
                for line in process.stderr
                if (found := re.search(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+", line))
            )

            async def scenario():
                async with joined(tmp_path, "a", address) as a, joined(tmp_path, "b", address) as b:
                    assert await a.store("plain", "x", b"1", 30)
                    assert await b.get("plain") == {"x": b"1"}
                    assert await a.ping(b.peer_id, timeout_s=20)

            asyncio.run(scenario())
        finally:
            os.killpg(process.pid, signal.SIGKILL)
