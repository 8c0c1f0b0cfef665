"""Lets the first rank of each node read a streamed dataset for all ranks of the node.

All ranks of a peer train on windows of the same text: if each read it, a node would download and tokenise everything as
often as it has ranks. Each rank asks for its own windows, so it waits only until the text up to them has been read.
"""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import Client, Connection, Listener

import numpy as np

from diloco.data.streaming import Reading, StreamingSource
from diloco.errors import DilocoError
from diloco.outer.world import GROUP_TIMEOUT, World, on_every_rank
from peers.net.socket_directory import SocketDirectory


def read_for_node(source: StreamingSource, world: World) -> contextlib.AbstractContextManager[object]:
    """Read for the other ranks of the node if this is its first rank, else through that rank. A collective.

    Leave the context once no more samples are read.
    """
    if world.num_local_ranks == 1:
        return contextlib.nullcontext()
    own, served = _connections(world)
    for connection in served:
        threading.Thread(target=_serve, args=(connection, source), name="stream", daemon=True).start()
    if own is None:
        return contextlib.nullcontext()
    source.windows = _Remote(own)
    return contextlib.closing(own)


def _connections(world: World) -> tuple[Connection | None, list[Connection]]:
    """The connection of this rank to the first one of its node; on that one, those to the others."""
    with contextlib.ExitStack() as stack:
        listeners: list[Listener] = []

        def listen() -> str:
            if not world.is_first_of_node:
                return ""
            path = str(stack.enter_context(SocketDirectory()).path / "stream")
            listeners.append(stack.enter_context(Listener(path, "AF_UNIX", backlog=world.num_local_ranks)))
            return path

        path = on_every_rank(listen)[world.node * world.num_local_ranks]
        own: list[Connection] = []
        on_every_rank(lambda: None if world.is_first_of_node else own.append(Client(path, "AF_UNIX")))
        # All have connected, so accepting them takes no time.
        served = [listener.accept() for listener in listeners for _ in range(world.num_local_ranks - 1)]
    return (own[0] if own else None), served


def _serve(connection: Connection, source: StreamingSource) -> None:
    """Answer the requests of one rank until it hangs up."""
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            reading, numbers = connection.recv()
            try:
                answer: np.ndarray | Exception = source.reader.windows(reading, numbers)
            except DilocoError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - the other rank waits for an answer
                # Not the exception itself, which may not be one that can be sent.
                answer = DilocoError(f"the first rank of this node cannot read the data: {error!r}")
            connection.send(answer)


class _Remote:
    """`WindowReader.windows` on the first rank of the node."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, reading: Reading, numbers: list[int]) -> np.ndarray:
        try:
            self._connection.send((reading, numbers))
            if not self._connection.poll(GROUP_TIMEOUT.total_seconds()):
                raise DilocoError(f"the first rank of this node has read nothing for {GROUP_TIMEOUT}")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise DilocoError("the first rank of this node, which reads the data, has ended") from error
        if isinstance(answer, Exception):
            raise answer
        return answer
