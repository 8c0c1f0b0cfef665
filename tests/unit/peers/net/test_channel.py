from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator

import msgpack
import pytest
from msgspec.msgpack import Decoder

from peers.errors import PeerUnreachable, ProtocolError
from peers.net.channel import MAX_MESSAGE_BYTES, Channel
from peers.protocol.wire import Struct, encode


class A(Struct, frozen=True, tag="a"):
    pass


class B(Struct, frozen=True, tag="b"):
    n: int


EITHER: Decoder[A | B] = Decoder(A | B)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


async def test_messages_arrive_in_order_however_they_are_cut(pair):
    receiver, sender = pair
    frames = b"".join(struct.pack("<I", len(body)) + body for body in map(encode, [A(), B(n=1)]))
    task = asyncio.create_task(receiver.read(EITHER, 5))
    for byte in frames:
        sender.send(bytes([byte]))
        await asyncio.sleep(0)
    assert await task == A()
    assert await receiver.read(EITHER, 5) == B(n=1)


async def test_a_receive_that_times_out_loses_nothing(pair):
    (receiver, theirs), body = pair, encode(A())
    theirs.sendall(struct.pack("<I", len(body)) + body[:2])
    with pytest.raises(PeerUnreachable, match="no message within"):
        await receiver.read(EITHER, 0.01)
    theirs.sendall(body[2:])
    assert await receiver.read(EITHER, 5) == A()


@pytest.mark.parametrize(("pause_s", "arrives"), [(10.0, True), (20.0, False)])
async def test_who_takes_bytes_slowly_is_waited_for_but_not_who_takes_none(
    pair, monkeypatch, pause_s, arrives
):
    (sender, _), loop = pair, asyncio.get_running_loop()
    sent, passed_s, real = 0, 0.0, loop.time

    async def slowly(_sock, view):
        nonlocal sent, passed_s
        for _ in range(0, len(view), 64 << 10):
            passed_s += pause_s
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        sent += len(view)

    monkeypatch.setattr(loop, "time", lambda: real() + passed_s)
    monkeypatch.setattr("peers.net.socket_io.send_all", slowly)
    if arrives:
        await sender.send_bytes(memoryview(bytes(1 << 20)), 15.0)
    else:
        with pytest.raises(PeerUnreachable, match="took nothing within 15 s"):
            await sender.send_bytes(memoryview(bytes(1 << 20)), 15.0)
    assert sent == (1 << 20 if arrives else 0)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<I", MAX_MESSAGE_BYTES + 1),
        struct.pack("<I", 1) + b"\xc1",
        struct.pack("<I", 2) + b"\x81\xa1",
        struct.pack("<I", 3) + msgpack.packb({1: 2}),
        struct.pack("<I", 1) + msgpack.packb([]),
        struct.pack("<I", 8) + msgpack.packb({"type": "c"}),
        struct.pack("<I", 11) + msgpack.packb({"type": "a", "n": 1}),
        struct.pack("<I", 8) + msgpack.packb({"type": "b"}),
    ],
    ids=["too long", "not msgpack", "cut", "number as key", "list", "not wanted", "more", "less"],
)
async def test_what_is_no_message_is_a_protocol_error(pair, frame):
    receiver, sender = pair
    sender.sendall(frame)
    with pytest.raises(ProtocolError):
        await receiver.read(EITHER, 5)


async def test_the_end_of_the_stream_is_an_unreachable_peer(pair):
    receiver, sender = pair
    sender.sendall(b"\x05\0")
    sender.close()
    with pytest.raises(PeerUnreachable, match="closed"):
        await receiver.read(EITHER, 5)
    with pytest.raises(PeerUnreachable):
        for _ in range(100):
            await receiver.send({"x": b"y" * 10_000}, 5)


async def test_a_message_nobody_reads_times_out(pair):
    sender, _ = pair
    with pytest.raises(PeerUnreachable, match="could not send"):
        await sender.send({"x": b"y" * 1_000_000}, 0.05)


@pytest.mark.parametrize("does", ["closes", "says something", "says nothing"])
async def test_the_last_word_is_out_before_this_end_closes_and_nobody_holds_that_up(pair, does):
    channel, other = pair[0], Channel(pair[1])
    waiting = asyncio.create_task(channel.send_last(A(), 20.0))
    assert await other.read(EITHER) == A()
    if does == "closes":
        other.close()
    elif does == "says something":
        await other.send(B(n=1))
    async with asyncio.timeout(5):
        await waiting
