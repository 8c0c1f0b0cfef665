import asyncio
import socket
from types import SimpleNamespace

from msgspec.msgpack import Decoder

from peers.net import live_peer
from peers.net.channel import MAX_MESSAGE_BYTES, Channel
from peers.net.live_peer import LivePeer, silence_s
from peers.protocol.mesh import Announced, Ping, Said, WantManifest
from peers.timing import BEAT_S, LEAST_SILENCE_S, heartbeat_s


def test_heartbeats_get_rarer_with_many_peers_and_stay_far_below_the_silence_of_a_lost_one():
    assert heartbeat_s(1) == heartbeat_s(8) == BEAT_S
    assert heartbeat_s(16) == 2 * BEAT_S
    assert all(heartbeat_s(n) <= silence_s(n) / 10 for n in (1, 16, 20, 50, 1000))
    assert silence_s(8) == LEAST_SILENCE_S < silence_s(50) == silence_s(1000) <= 20


async def test_a_status_is_told_in_the_interval_unless_another_one_was_told_meanwhile():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer, interval_s = LivePeer(Channel(ours), "b"), 60.0
        sending = asyncio.create_task(
            peer.send_forever(lambda: b"of the channel", lambda: interval_s, on_silence=lambda: None)
        )
        said = Channel(theirs)

        async def told():
            while (message := await said.read(Decoder(Said), 5.0)) == Ping():
                pass
            return message

        for _ in range(10):
            # The core's own statuses come often enough, so the channel adds none.
            peer.enqueue(Announced(record=b"of the core"))
            assert await told() == Announced(record=b"of the core")
            await asyncio.sleep(0.02)
        interval_s = 0.1
        peer.enqueue(Announced(record=b"of the core"))
        assert await told() == Announced(record=b"of the core")
        assert await told() == Announced(record=b"of the channel")
        sending.cancel()


async def test_a_peer_that_answers_no_heartbeat_is_silent_until_it_says_something_whatever_it_is_told():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = []
        peer = LivePeer(Channel(ours), "b")
        sending = asyncio.create_task(
            peer.send_forever(lambda: b"", lambda: 0.01, on_silence=lambda: found.append(peer.is_silent))
        )
        while not peer.is_silent:
            # Far more often than the heartbeat.
            peer.enqueue(WantManifest())
            await asyncio.sleep(0.001)
        assert found == [True]
        peer.heard()
        assert not peer.is_silent
        sending.cancel()


async def test_of_the_last_round_trips_the_least_counts_and_one_is_measured_at_a_time(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer, other, now = LivePeer(Channel(ours), "b"), Channel(theirs), 100.0
        monkeypatch.setattr(live_peer, "time", SimpleNamespace(monotonic=lambda: now))
        sending = asyncio.create_task(peer.send_forever(lambda: b"", lambda: 0.001, on_silence=lambda: None))
        least = []
        for round_trip_s in (0.5, 0.03, 2.0, 2.0, 2.0, 2.0):
            num_pings = 0
            while num_pings == 0:
                num_pings += await other.read(Decoder(Said), 5.0) == Ping()
            now += round_trip_s
            least.append(round(peer.ponged(), 3))
            assert peer.ponged() is None
        assert least == [0.5, 0.03, 0.03, 0.03, 0.03, 2.0]
        # While a Ping is not answered, no other one is sent.
        said = [await other.read(Decoder(Said), 5.0) for _ in range(50)]
        assert said.count(Ping()) == 1
        sending.cancel()


async def test_a_message_that_is_too_long_to_be_sent_ends_the_channel():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = LivePeer(Channel(ours), "b")
        peer.enqueue(Announced(record=bytes(MAX_MESSAGE_BYTES)))
        await peer.send_forever(lambda: b"", lambda: 1.0, on_silence=lambda: None)
        assert theirs.recv(1) == b""
