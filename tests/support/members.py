"""Members of a DHT in the test's own event loop, each with a p2pd of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from peers.net.dht.node import Dht
from peers.net.identity import load_or_create

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@asynccontextmanager
async def joined(directory: Path, name: str, *initial_peers: str, **options: Any) -> AsyncIterator[Dht]:
    identity = load_or_create(directory / f"{name}.key")
    dht = await Dht.join(
        identity=identity, initial_peers=initial_peers, **({"host_maddrs": LOOPBACK} | options)
    )
    try:
        yield dht
    finally:
        await dht.close()
        identity.release()


async def eventually(condition: Callable[[], Awaitable[object]], timeout_s: float = 20.0) -> object:
    deadline = time.monotonic() + timeout_s
    while not (value := await condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.05)
    return value
