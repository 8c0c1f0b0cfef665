"""Ask an HTTP server for JSON, by a deadline and without a proxy: servers are here, or on a network of ours."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

SHOWN = 500
"""Of an answer that is of no use, so much is told."""
_REFUSALS = (400, 422)
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerLost(Exception):
    """A server did not answer, or answered with an error: nothing that it was asked for is to be used."""


class RequestRefused(ServerLost):
    """The server is well and will not do what it was asked for, however often it is asked."""


def ask(url: str, body: Any = None, *, timeout_s: float, post: bool = False) -> Any:
    """The answer to a GET, or with a body (or `post`) to a POST; None where it is empty. Raises ServerLost."""
    data = json.dumps(body).encode() if body is not None else (b"" if post else None)
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        status, content = _answered(request, timeout_s)
        if status >= 300:
            kind = RequestRefused if status in _REFUSALS else ServerLost
            raise kind(f"{url} answered {status}: {content[:SHOWN].decode(errors='replace')}")
        return json.loads(content) if content.strip() else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerLost(f"{url}: {error or type(error).__name__}") from error


@contextlib.contextmanager
def understood(url: str, answer: Any) -> Iterator[None]:
    """What an answer lacks is the server's fault. Raises ServerLost."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerLost(f"{url} answered what nobody understands: {str(answer)[:SHOWN]}") from error


def _answered(request: urllib.request.Request, timeout_s: float) -> tuple[int, bytes]:
    """Status and content. Raises OSError, HTTPException."""
    try:
        with _DIRECTLY.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(SHOWN)
