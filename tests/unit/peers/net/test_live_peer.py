import asyncio
import socket

from peers.net import live_peer
from peers.net.channel import Channel
from peers.net.live_peer import HEARTBEAT_S, LONGEST_SILENCE_S, SILENCE_S, LivePeer, heartbeat_s, silence_s
from peers.protocol.mesh import WantManifest
from tests.support.announcements import announced


def test_heartbeats_get_rarer_with_many_peers_and_stay_far_below_the_silence_of_a_lost_one():
    assert heartbeat_s(1) == heartbeat_s(8) == HEARTBEAT_S
    assert heartbeat_s(16) == 2 * HEARTBEAT_S
    assert all(heartbeat_s(n) <= silence_s(n) / 3 for n in (1, 16, 20, 50, 1000))
    assert silence_s(16) == SILENCE_S < silence_s(50) < silence_s(1000) == LONGEST_SILENCE_S


def test_a_peer_that_answers_no_heartbeat_is_quiet_until_it_says_something(monkeypatch):
    monkeypatch.setattr(live_peer, "QUIET_S", 0.05)

    async def scenario():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            doubts = []
            peer = LivePeer(Channel(ours), announced("b", state="joining"))
            sending = asyncio.create_task(
                peer.send_forever(lambda: b"", lambda: 0.001, on_doubt=lambda: doubts.append(peer.is_quiet))
            )
            while not peer.is_quiet:
                await asyncio.sleep(0.001)
            assert doubts == [False] and peer.is_doubted
            peer.heard()
            assert not peer.is_quiet
            sending.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_what_is_said_to_a_silent_peer_holds_up_no_heartbeat(monkeypatch):
    monkeypatch.setattr(live_peer, "QUIET_S", 0.05)

    async def scenario():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            peer = LivePeer(Channel(ours), announced("b", state="joining"))
            sending = asyncio.create_task(peer.send_forever(lambda: b"", lambda: 0.01, on_doubt=lambda: None))
            while not peer.is_quiet:
                # Far oftener than the heart beats.
                peer.enqueue(WantManifest())
                await asyncio.sleep(0.001)
            sending.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20))
