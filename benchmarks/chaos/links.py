"""What lies between light peers: doors on loopback that all their connections go through, and that can go wrong.

Every peer announces its doors instead of its ports. Who knocks is told by the process that the connection belongs to,
so that each pair of peers has a link of its own: cut, silent, slow, or with a byte changed. A user-space proxy, hence
on any machine and without privileges; packets cannot be lost or reordered here, which TCP would not show anyway.
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
    """Between two peers, both ways. Belongs to the doors' event loop."""

    is_cut: bool = False
    is_slow: bool = False
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear: what is sent stays under way."""
    to_corrupt: int = 0
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.flows.set()

    def break_all(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Doors:
    """In a thread of its own; a context manager. `pids_of` gives the processes of every peer by rank."""

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
        """A door in front of this peer's port, which need not be there yet. Returns the door's port."""
        return self._call(self._open(rank, port))

    def cut(self, pairs: Iterable[Pair], is_cut: bool) -> None:
        """Connections are reset, and new ones too."""

        def change(link: Link) -> None:
            link.is_cut = is_cut
            if is_cut:
                link.break_all()

        self._change(pairs, change)

    def silence(self, pairs: Iterable[Pair], is_silent: bool) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._change(pairs, lambda link: link.flows.clear() if is_silent else link.flows.set())

    def slow_down(self, pairs: Iterable[Pair], is_slow: bool) -> None:
        self._change(pairs, lambda link: setattr(link, "is_slow", is_slow))

    def corrupt(self, pairs: Iterable[Pair]) -> None:
        """One byte of the next that goes by is another one."""
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
                # Cancelled, it is over; asyncio would report that as a fault.
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
        # Whoever else calls, as the coordinator does, has a link that nothing happens to.
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
        """Of all connections there are by now: one look, which takes a while, serves all who knock meanwhile."""

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
    """Until one way has ended: nothing here uses connections that are open one way only."""
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
    """One below those that connections are given, so that it stays free while its owner is away."""
    # By process id: two who measure on one machine should not begin at the same port.
    for n in range(12_000):
        port = 20_000 + (101 * os.getpid() + n) % 12_000
        if port not in _given:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                _given.add(port)
                return port
    raise OSError("no port below 32000 is free")


_given: set[int] = set()
