import asyncio
import os
import socket

import pytest

from peers.net import socket_io


@pytest.fixture
def pair():
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


async def test_a_receive_that_is_cancelled_as_bytes_arrive_loses_none(pair):
    ours, theirs = pair
    for _ in range(20):
        receiving = asyncio.create_task(socket_io.receive(ours, 100))
        await asyncio.sleep(0)
        theirs.send(b"x")
        # The loop sees the bytes in the same turn in which it cancels, before the receiver runs again.
        asyncio.get_running_loop().call_later(0, receiving.cancel)
        await asyncio.wait({receiving})
        if receiving.cancelled():
            assert await asyncio.wait_for(socket_io.receive(ours, 100), 5) == b"x"


async def test_more_than_the_buffers_hold_arrives_whole_and_in_order(pair):
    ours, theirs = pair
    payload = os.urandom(3 << 20)
    sending = asyncio.create_task(socket_io.send_all(theirs, payload))
    received = bytearray(len(payload))
    done = 0
    while done < len(payload):
        done += await socket_io.receive_into(ours, memoryview(received)[done:])
    await sending
    assert received == payload
    theirs.close()
    assert await socket_io.receive(ours, 1) == b""
