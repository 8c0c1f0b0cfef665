"""A daemon's own figures for a Prometheus on the same machine: GET /metrics on loopback, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from peers.errors import UserError
from peers.monitor.metrics_text import CONTENT_TYPE

HOST = "127.0.0.1"
MAX_CONNECTIONS = 8
MAX_HEAD_BYTES = 8192
TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def metrics_served(port: int, text: Callable[[], bytes]) -> AsyncIterator[int]:
    """Serve `text()` while the context lasts; gives the port, which 0 leaves to the system.

    Raises UserError where the port is taken.
    """
    num_open = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open
        num_open += 1
        try:
            if num_open <= MAX_CONNECTIONS:
                async with asyncio.timeout(TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_answer(head, text))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("no answer about metrics: %r", error)
        finally:
            num_open -= 1
            writer.close()

    try:
        server = await asyncio.start_server(answer, HOST, port, limit=MAX_HEAD_BYTES)
    except OSError as error:
        raise UserError(
            f"--hv.metrics-port {port}: {error.strerror}; choose another one, or 0 for any"
        ) from error
    async with server:
        listens_on: int = server.sockets[0].getsockname()[1]
        log.info("metrics at http://%s:%d/metrics", HOST, listens_on)
        yield listens_on


def _answer(head: bytes, text: Callable[[], bytes]) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", b"this only shows\n", "text/plain")
    if path != b"/metrics":
        return _response("404 Not Found", b"there is only /metrics\n", "text/plain")
    body = text()
    return _response("200 OK", body, CONTENT_TYPE, with_body=method == b"GET")


def _response(status: str, body: bytes, kind: str, *, with_body: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (body if with_body else b"")
