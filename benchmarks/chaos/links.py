"""Proxies on loopback (*doors*) between light peers, which can inject faults into connections.

Every peer announces its doors instead of its ports. The caller is identified by the process that owns the connection,
so each pair of peers has a link of its own, which can be cut, silent or slow, or corrupt a byte. A user-space proxy
works on any machine without privileges. It cannot lose or reorder packets, but TCP would hide that from peers anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.processes import Ports, owners_of_connections

_CHUNK_BYTES = 1 << 16
SLOW_BYTES_PER_S = 50_000.0
SLOW_DELAY_S = 0.1
Pair = frozenset[int]


@dataclass
class Link:
    """The link between two peers, in both directions. Used on the doors' event loop only."""

    is_cut: bool = False
    is_slow: bool = False
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    """While cleared, data is held back."""
    to_corrupt: int = 0
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.flows.set()

    def break_all(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Doors:
    """All doors; a context manager that runs them in a thread. `pids_of` returns the processes of each peer by rank."""

    def __init__(self, pids_of: Callable[[], Mapping[int, Collection[int]]]) -> None:
        self._pids_of = pids_of
        self._looking = asyncio.Lock()
        self._next_look: asyncio.Task[dict[Ports, int]] | None = None
        self._links: dict[Pair, Link] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="doors")
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Doors:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self, rank: int, port: int) -> int:
        """Open a door to this port of a peer, which need not listen yet. Returns the door's port."""
        return self._call(self._open(rank, port))

    def cut(self, pairs: Iterable[Pair], is_cut: bool) -> None:
        """Reset the connections of these pairs, also new ones; or, if not `is_cut`, let them connect again."""

        def change(link: Link) -> None:
            link.is_cut = is_cut
            if is_cut:
                link.break_all()

        self._change(pairs, change)

    def silence(self, pairs: Iterable[Pair], is_silent: bool) -> None:
        """Hold back all data of these pairs, without closing connections."""
        self._change(pairs, lambda link: link.flows.clear() if is_silent else link.flows.set())

    def slow_down(self, pairs: Iterable[Pair], is_slow: bool) -> None:
        self._change(pairs, lambda link: setattr(link, "is_slow", is_slow))

    def corrupt(self, pairs: Iterable[Pair]) -> None:
        """Change one byte of the next data of these pairs."""
        self._change(pairs, lambda link: setattr(link, "to_corrupt", link.to_corrupt + 1))

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10.0)

    def _change(self, pairs: Iterable[Pair], change: Callable[[Link], object]) -> None:
        async def change_all() -> None:
            for pair in pairs:
                change(self._link(pair))

        self._call(change_all())

    def _link(self, pair: Pair) -> Link:
        return self._links.setdefault(pair, Link())

    async def _open(self, rank: int, port: int) -> int:
        async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                # `_close` cancels this task, which asyncio would report as an error.
                with contextlib.suppress(asyncio.CancelledError):
                    await self._pass(rank, port, reader, writer)
            finally:
                self._tasks.discard(task)
                writer.transport.abort()

        server = await asyncio.start_server(enter, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _pass(
        self, rank: int, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ports = writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1]
        caller = (await self._owners()).get(ports)
        # Other callers, such as the coordinator, get a link without faults.
        link = Link() if caller is None else self._link(frozenset((caller, rank)))
        if link.is_cut:
            return
        with contextlib.suppress(OSError):
            there = await asyncio.open_connection("127.0.0.1", port)
            link.writers |= {writer, there[1]}
            try:
                await _first_of(_pump(reader, there[1], link), _pump(there[0], writer, link))
            finally:
                link.writers -= {writer, there[1]}
                there[1].transport.abort()

    async def _owners(self) -> dict[Ports, int]:
        """The owners of all current connections. Reading them is slow, so concurrent callers share one result."""

        async def look() -> dict[Ports, int]:
            async with self._looking:
                self._next_look = None
                return await asyncio.to_thread(lambda: owners_of_connections(self._pids_of()))

        if self._next_look is None:
            self._next_look = asyncio.create_task(look())
            self._tasks.add(self._next_look)
            self._next_look.add_done_callback(self._tasks.discard)
        return await asyncio.shield(self._next_look)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_of(*pumps: Coroutine[Any, Any, None]) -> None:
    """Run until one direction has ended: half-closed connections are not used here."""
    tasks = [asyncio.ensure_future(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        await link.flows.wait()
        if link.is_slow:
            await asyncio.sleep(SLOW_DELAY_S + len(data) / SLOW_BYTES_PER_S)
        if link.to_corrupt:
            link.to_corrupt -= 1
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        writer.write(data)
        await writer.drain()


def free_port() -> int:
    """A free port below the ephemeral range, so that no connection takes it while its owner is restarting."""
    # Start at a port that depends on the process id, so that two runs on one machine rarely collide. Consecutive ids
    # start 7417 ports apart, the golden ratio of the range.
    for n in range(12_000):
        port = 20_000 + (7_417 * os.getpid() + n) % 12_000
        if port not in _given:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                _given.add(port)
                return port
    raise OSError("no port below 32000 is free")


_given: set[int] = set()
