import asyncio
import contextlib
import os
import socket
import threading
import time

import pytest

from peers.errors import RoundFailed
from peers.net import streams as streams_module
from peers.net.streams import MAX_IDLE_PER_PEER, StreamPool
from peers.reduce.frames import HEADER, NOBODY, Kind
from tests.support.in_process import Network, until


@contextlib.asynccontextmanager
async def pools(*peer_ids):
    network = Network()
    made = [StreamPool(network.transport(peer_id), "data") for peer_id in peer_ids]
    for pool in made:
        await pool.start()
    try:
        yield network, made
    finally:
        for pool in made:
            await pool.close()
        await network.close()


async def connect_both(a, b, attempt):
    return await asyncio.gather(
        a.connect(attempt, {1: "b"}, timeout_s=5), b.connect(attempt, {0: "a"}, timeout_s=5)
    )


async def keep_streams(a, b):
    """Connect both and give the streams back, as after a successful round."""
    streams = await connect_both(a, b, os.urandom(16))
    a.give_back(streams[0])
    b.give_back(streams[1])
    return streams


def assert_joined(streams_a, streams_b):
    for sender, receiver in (
        (streams_a.send[1], streams_b.receive[0]),
        (streams_b.send[0], streams_a.receive[1]),
    ):
        message = os.urandom(8)
        sender.sendall(message)
        receiver.settimeout(5)
        assert receiver.recv(64) == message


async def test_streams_are_joined_blocking_and_kept_across_rounds():
    async with pools("a", "b") as (network, (a, b)):
        for _ in range(4):
            streams = await connect_both(a, b, os.urandom(16))
            assert all(s.send[r].getblocking() for s, r in zip(streams, (1, 0), strict=True))
            assert_joined(*streams)
            a.give_back(streams[0])
            b.give_back(streams[1])
        assert len(network.opened) == 2


async def test_streams_that_were_opened_ahead_are_those_of_the_next_round():
    async with pools("a", "b") as (network, (a, b)):
        for _ in range(3):
            a.open_ahead("b")
            b.open_ahead("a")
            a.open_ahead("nobody")
        await until(lambda: len(network.opened) == 2 and not (a._opening or b._opening))
        for _ in range(2):
            streams = await connect_both(a, b, os.urandom(16))
            assert_joined(*streams)
            a.give_back(streams[0])
            b.give_back(streams[1])
            a.open_ahead("b")
        assert len(network.opened) == 2


async def test_streams_that_break_between_rounds_are_opened_again_before_the_next():
    async with pools("a", "b") as (network, (a, b)):
        kept = await keep_streams(a, b)
        for sock in (*kept[0].send.values(), *kept[1].send.values()):
            sock.shutdown(socket.SHUT_RDWR)
        await until(lambda: len(network.opened) == 4 and not (a._opening or b._opening))
        assert_joined(*await connect_both(a, b, os.urandom(16)))
        assert len(network.opened) == 4


async def test_a_discarded_round_is_followed_by_one_on_new_streams():
    async with pools("a", "b") as (network, (a, b)):
        first = await connect_both(a, b, os.urandom(16))
        first[0].send[1].sendall(b"half a frame of the failed round")
        a.discard(first[0])
        b.discard(first[1])
        second = await connect_both(a, b, os.urandom(16))
        assert_joined(*second)
        assert len(network.opened) == 4
        a.discard(second[0])
        b.discard(second[1])


async def test_one_side_gives_back_what_the_other_discards():
    async with pools("a", "b") as (_, (a, b)):
        first = await connect_both(a, b, os.urandom(16))
        a.give_back(first[0])
        b.discard(first[1])
        second = await connect_both(a, b, os.urandom(16))
        assert_joined(*second)
        a.discard(second[0])
        b.discard(second[1])


async def test_a_stream_may_name_its_attempt_before_anybody_here_awaits_it():
    async with pools("a", "b") as (_, (a, b)):
        attempt = os.urandom(16)
        early = asyncio.create_task(a.connect(attempt, {1: "b"}, timeout_s=5))
        await until(lambda: b._named)
        streams = (b_streams := await b.connect(attempt, {0: "a"}, timeout_s=5), await early)
        assert_joined(streams[1], b_streams)


async def test_a_peer_that_does_not_come_is_named_in_time():
    async with pools("a", "b") as (_, (a, _b)):
        with pytest.raises(RoundFailed, match=r"peer 1 in 0\.2 s") as failure:
            await a.connect(os.urandom(16), {1: "b"}, timeout_s=0.2)
        assert failure.value.suspects == {1}


@pytest.mark.parametrize(("num_missing", "silent"), [(1, {1}), (2, set())])
async def test_who_does_not_come_counts_as_silent_unless_many_do_not(num_missing, silent):
    async with pools("a", "b", "c", "d") as (_, (a, *others)):
        attempt = os.urandom(16)
        who = {rank + 1: name for rank, name in enumerate("bcd")}
        coming = [
            asyncio.create_task(pool.connect(attempt, {0: "a"}, timeout_s=5)) for pool in others[num_missing:]
        ]
        with pytest.raises(RoundFailed) as failure:
            await a.connect(attempt, who, timeout_s=1.6)
        assert failure.value.suspects == set(range(1, num_missing + 1))
        assert failure.value.silent == silent
        for streams in await asyncio.gather(*coming):
            streams.send[0].close()
            streams.receive[0].close()


async def test_who_has_a_stream_and_does_not_begin_is_named_soon_and_who_has_none_has_time():
    async with pools("a", "b", "c") as (_, (a, b, c)):
        await keep_streams(a, b)
        with pytest.raises(RoundFailed, match="peer 1 has not begun the exchange") as failure:
            await a.connect(os.urandom(16), {1: "b", 2: "c"}, timeout_s=10, prompt_s=0.2)
        assert failure.value.suspects == failure.value.silent == {1}
        # A stream that has yet to be opened may take any time, so `prompt_s` does not apply.
        attempt = os.urandom(16)
        connecting = asyncio.create_task(a.connect(attempt, {2: "c"}, timeout_s=10, prompt_s=0.05))
        await asyncio.sleep(0.3)
        await c.connect(attempt, {0: "a"}, timeout_s=10)
        assert (await connecting).send.keys() == {2}


async def test_who_has_closed_its_stream_for_another_one_has_time_for_that():
    async with pools("a", "b") as (_, (a, b)):
        await keep_streams(a, b)
        opened = b._transport.open

        async def open_slowly(*args, **settings):
            await asyncio.sleep(0.5)
            return await opened(*args, **settings)

        b._transport.open = open_slowly
        b._outgoing.pop("a").close()
        attempt = os.urandom(16)
        ours, theirs = await asyncio.gather(
            a.connect(attempt, {1: "b"}, timeout_s=5, prompt_s=0.2),
            b.connect(attempt, {0: "a"}, timeout_s=5),
        )
        assert_joined(ours, theirs)


@pytest.mark.parametrize("limits", [{"timeout_s": 5, "prompt_s": 0.6}, {"timeout_s": 0.6}])
async def test_who_stood_still_itself_blames_nobody_for_what_it_has_not_read(limits):
    async with pools("a", "b") as (_, (a, b)):
        await keep_streams(a, b)
        attempt, begins = os.urandom(16), b._outgoing["a"]

        async def stand_still():
            await asyncio.sleep(0.06)
            begins.send(attempt)
            time.sleep(1.0)

        still = asyncio.create_task(stand_still())
        ours = await a.connect(attempt, {1: "b"}, **limits)
        assert ours.receive.keys() == {1}
        await still


# A peer that was quiet from the start may still come by another path, so it has until the timeout.
@pytest.mark.parametrize(
    ("quiet_before", "said"), [(False, "peer 1 has fallen silent"), (True, r"with peer 1 in 1 s")]
)
async def test_who_falls_quiet_before_its_stream_has_come_is_not_waited_for(quiet_before, said):
    looks = [] if quiet_before else [set()]
    async with pools("a", "b") as (_, (a, _)):
        with pytest.raises(RoundFailed, match=said) as raised:
            await a.connect(bytes(16), {1: "b"}, timeout_s=1, quiet=lambda: looks.pop() if looks else {1})
    assert raised.value.suspects == raised.value.silent == {1}


async def test_a_stream_that_is_on_its_way_when_its_peer_is_found_to_be_silent_still_comes():
    looks = 0

    def quiet():
        nonlocal looks
        looks += 1
        return {1} if looks > 1 else set()

    async with pools("a", "b") as (_, (a, b)):
        connecting = asyncio.create_task(a.connect(bytes(16), {1: "b"}, timeout_s=10, quiet=quiet))
        # `b` has been found silent, and `a` still waits for it.
        await until(lambda: looks > 2)
        await b.connect(bytes(16), {0: "a"}, timeout_s=10)
        assert (await connecting).send.keys() == {1}


async def test_a_peer_that_cannot_be_reached_is_named_at_once_and_the_others_hear_a_farewell():
    async with pools("a", "b") as (_, (a, b)):
        attempt = os.urandom(16)
        waiting = asyncio.create_task(b.connect(attempt, {0: "a"}, timeout_s=60))
        await until(lambda: a._named)
        started = time.monotonic()
        with pytest.raises(RoundFailed) as failure:
            await a.connect(attempt, {1: "b", 7: "nobody"}, timeout_s=60)
        assert failure.value.suspects == {7}
        assert time.monotonic() - started < 30
        received = (await waiting).receive[0]
        received.settimeout(30)
        assert received.recv(64) == HEADER.pack(Kind.ABORT, NOBODY, 0)


async def test_connecting_ends_when_the_round_is_cancelled():
    async with pools("a", "b") as (_, (a, _b)):
        cancelled = threading.Event()
        connecting = asyncio.create_task(
            a.connect(os.urandom(16), {1: "b"}, timeout_s=60, cancelled=cancelled)
        )
        await asyncio.sleep(0)
        cancelled.set()
        with pytest.raises(RoundFailed, match="cancelled") as failure:
            await connecting
        assert failure.value.suspects == frozenset()


async def test_no_peer_holds_more_than_a_few_streams():
    async with pools("a", "b") as (network, (_a, b)):
        transport = network.transport("a")
        opened = [await transport.open("b", "data", timeout_s=1) for _ in range(5)]
        await until(lambda: len(b._idle["a"]) == MAX_IDLE_PER_PEER)
        for _ in range(5):
            attempt = os.urandom(16)
            opened.append(await transport.open("b", "data", timeout_s=1))
            opened[-1].send(attempt)
            await until(lambda attempt=attempt: (attempt, "a") in b._named)
        assert len(b._named) == MAX_IDLE_PER_PEER
        for sock in opened:
            sock.close()
        # Of a peer that is gone, no stream is kept.
        await until(lambda: not b._idle)


async def test_strangers_that_open_streams_and_say_nothing_give_way_to_those_who_take_part(monkeypatch):
    monkeypatch.setattr(streams_module, "MAX_IDLE_PEERS", 4)
    async with pools("a", "b") as (network, (a, b)):
        silent = []
        for number in range(6):
            silent.append(await network.transport(f"stranger {number}").open("b", "data", timeout_s=1))
            streams = await connect_both(a, b, os.urandom(16))
            a.give_back(streams[0])
            b.give_back(streams[1])
        assert len(b._idle) == 4 and "a" in b._idle
        for sock in silent[:3]:
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), 5) == b""
        assert len(network.opened) == 2 + len(silent)
        for sock in silent:
            sock.close()


async def test_closing_leaves_no_open_socket():
    async with pools("a", "b") as (_, (a, b)):
        streams = await keep_streams(a, b)
        await a.close()
        await b.close()
        for side in streams:
            assert all(sock.fileno() == -1 for sock in (*side.send.values(), *side.receive.values()))
