"""DHT nodes nearer to a key than all others, which accept whatever is stored there and return nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from peers.net.dht import node as dht
from peers.net.identity import load_or_create
from peers.net.libp2p.p2pd import P2pd


class Forgetful:
    """Replaces the storage of a node: it accepts every value and forgets it."""

    def __init__(self) -> None:
        self.num_forgotten = 0

    def _forget(self, *_: Any, **__: Any) -> bool:
        self.num_forgotten += 1
        return True

    store = store_subkey = _forget

    def get(self, _key: Any) -> None:
        return None

    def items(self) -> list[Any]:
        return []


@contextlib.contextmanager
def eclipse(
    directory: Path, initial_peers: list[str], *keys: str, num_nodes: int = 7
) -> Iterator[list[Forgetful]]:
    """Run so many nodes beside each key, in a thread. Yields what replaces their storage."""
    stores: list[Forgetful] = []
    is_ready, end = threading.Event(), list[Any]()

    async def live() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        end.append(lambda: loop.call_soon_threadsafe(stop.set))
        async with contextlib.AsyncExitStack() as stack:
            nodes = [
                _node_beside(directory, initial_peers, key, number)
                for key in keys
                for number in range(num_nodes)
            ]
            stores.extend(await asyncio.gather(*map(stack.enter_async_context, nodes)))
            is_ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        assert is_ready.wait(60), "the nodes did not come up"
        yield stores
    finally:
        end[0]()
        thread.join(30)


@contextlib.asynccontextmanager
async def _node_beside(
    directory: Path, initial_peers: list[str], key: str, number: int
) -> AsyncIterator[Forgetful]:
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID

    name = f"{key.replace('/', '-')}-{number}"
    identity = load_or_create(directory / f"{name}.key")
    p2pd = await P2pd.start(identity_path=identity.path, host_maddrs=("/ip4/127.0.0.1/tcp/0",))
    p2p = await dht._attach(p2pd)
    node = None
    try:
        for maddr in initial_peers:
            await _connect(p2pd, maddr)
        # Differs from the key in the last bits only.
        node_id = DHTID(int(DHTID.generate(source=key)) ^ (number + 1))
        node = await DHTNode.create(p2p=p2p, node_id=node_id, initial_peers=initial_peers)
        node.protocol.storage = node.protocol.cache = forgetful = Forgetful()
        yield forgetful
    finally:
        if node is not None:
            await node.shutdown()
        await p2p.shutdown()
        await p2pd.stop()
        identity.release()


async def _connect(p2pd: P2pd, maddr: str) -> None:
    from peers.net.libp2p.transport import Transport
    from peers.protocol.maddrs import parse_maddr

    transport = Transport(p2pd.control, p2pd.control.parent)
    await transport.connect(str(parse_maddr(maddr).peer_id), [maddr], timeout_s=10.0)
