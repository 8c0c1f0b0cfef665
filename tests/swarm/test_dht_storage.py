"""Nodes of a run keep only valid records under its keys, whatever others have stored on other nodes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from msgspec.structs import replace

import peers
from peers.admission.service import guard_storage
from peers.net.dht.node import announced as announced_in
from peers.net.gate import Gate
from peers.net.identity import load
from peers.protocol import records
from peers.protocol.records import PEERS_KEY, Announcement
from tests.support.announcements import announced
from tests.support.members import eventually, joined

RUN_ID = "kept"


def announcement(peer_id: str) -> Announcement:
    return announced(peer_id, run_id=RUN_ID, tokens_per_s=10.0)


async def test_nobody_replaces_or_hides_the_record_of_another(tmp_path):
    async with joined(tmp_path, "a") as a:
        guard_storage(a, RUN_ID, Gate(RUN_ID))
        (address,) = await a.maddrs()
        async with joined(tmp_path, "b", address) as b, joined(tmp_path, "stranger", address) as stranger:
            guard_storage(b, RUN_ID, Gate(RUN_ID))
            key, record = PEERS_KEY(RUN_ID), announcement(b.peer_id)
            mine = record.encode(load(tmp_path / "b.key"))
            assert await b.store(key, b.peer_id, mine, 20)
            await eventually(lambda: a.get(key))
            own = replace(record, peer_id=stranger.peer_id)
            forged = own.encode(load(tmp_path / "stranger.key"))
            for subkey, value, ttl_s in (
                (b.peer_id, mine, 500.0),
                (b.peer_id, b"junk", 600.0),
                (b.peer_id, forged, 700.0),
                ("x" * 50, b"junk", 60.0),
            ):
                await stranger.store(key, subkey, value, ttl_s)
            # A value without subkeys would replace all values with subkeys.
            await stranger._node.store(key, b"junk", time.time() + 60)
            assert (await a.get(key)) == {b.peer_id: mine}
            again = replace(record, epoch=1).encode(load(tmp_path / "b.key"))
            # Ignore the result: it is the last node's answer, perhaps that of the stranger, which keeps its own record.
            await b.store(key, b.peer_id, again, 20)
            assert (await a.get(key))[b.peer_id] == again
            assert await stranger.store(key, stranger.peer_id, forged, 20)
            assert set(await b.get(key)) == {b.peer_id, stranger.peer_id}, "its own is in order"
            assert await stranger.store("anything else", "x", b"junk", 30)


async def test_a_node_finds_out_that_the_peers_of_its_run_have_another_version(tmp_path, monkeypatch):
    async with joined(tmp_path, "theirs") as theirs:
        (address,) = await theirs.maddrs()
        monkeypatch.setattr(records, "PROTOCOL", 7)
        record = announcement(theirs.peer_id).encode(load(tmp_path / "theirs.key"))
        monkeypatch.undo()
        assert await theirs.store(PEERS_KEY(RUN_ID), theirs.peer_id, record, 20)
        async with joined(tmp_path, "mine", address) as mine:
            gate = Gate(RUN_ID)
            guard_storage(mine, RUN_ID, gate)
            assert await announced_in(mine, PEERS_KEY(RUN_ID), Announcement, RUN_ID, gate.check_record) == {}
            assert "protocol 7" in str(gate.other_version)


CHILD = """
import asyncio, sys, time
from pathlib import Path
now, skew = time.time, float(sys.argv[3])
time.time = lambda: now() + skew
from peers.net.dht.node import Dht
from peers.errors import UserError
from peers.net.identity import load_or_create

async def main():
    identity = load_or_create(Path(sys.argv[1]))
    try:
        dht = await Dht.join(
            identity=identity, initial_peers=[sys.argv[2]], host_maddrs=["/ip4/127.0.0.1/tcp/0"]
        )
    except UserError as error:
        print(error)
    else:
        await dht.close()
        print("joined")

asyncio.run(main())
"""


def test_a_clock_more_than_three_seconds_off_is_refused_with_the_reason(tmp_path, bootstrap):
    root = Path(peers.__file__).parent.parent
    command = [sys.executable, "-c", CHILD, str(tmp_path / "a.key"), bootstrap, "-4.5"]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    behind = r"clock is ([\d.]+) s behind the swarm's, and at most 3 s are allowed"
    assert (found := re.search(behind, answer.stdout)), answer.stdout + answer.stderr
    assert 4.4 <= float(found[1]) <= 10
