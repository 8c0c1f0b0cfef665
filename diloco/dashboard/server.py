"""The HTTP server of the dashboard: static files, a stream of events, the swarm as JSON, and metrics. Read-only.

Every request needs the token: once in the URL, afterwards in a cookie, or as a bearer token. The page loads nothing
from other hosts and runs only its own scripts (Content-Security-Policy).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diloco.dashboard.feed import MAX_READERS, Feed
from peers.monitor.prometheus import swarm_metrics

STATIC = Path(__file__).parent / "static"
FILES = ("style.css", "app.js", "charts.js", "format.js", "links.js", "peers.js", "rounds.js")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_SHUTDOWN_S = 2


def application(feed: Feed, *, token: str, cookie: str) -> ASGIApp:
    """The ASGI application. `cookie` is the name of the cookie for the token."""

    async def page(_request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        return FileResponse(STATIC / name) if name in FILES else PlainTextResponse("no such file\n", 404)

    async def events(_request: Request) -> Response:
        if feed.num_readers >= MAX_READERS:
            return PlainTextResponse("too many pages are open; close one, and reload this page\n", 503)
        return StreamingResponse(feed.messages(), media_type="text/event-stream")

    async def swarm(_request: Request) -> Response:
        return JSONResponse(feed.swarm)

    async def metrics(_request: Request) -> Response:
        return Response(swarm_metrics(feed.swarm), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name}", file),
            Route("/events", events),
            Route("/api/swarm", swarm),
            Route("/metrics", metrics),
        ]
    )
    return Guard(app, token, cookie)


class Guard:
    """Middleware that rejects requests without the token, and adds the security headers."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._answer(Request(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """A redirect or an error; None if the request is allowed."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard is read-only\n", 405)
        if request.url.path == "/" and self._is_token(request.query_params.get("token")):
            # Redirect to a URL without the token, since URLs end up in histories and screenshots.
            redirect = RedirectResponse("/", 303)
            redirect.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return redirect
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(self._cookie)) or self._is_token(bearer):
            return None
        return PlainTextResponse("open the address that `diloco dashboard` has printed\n", 401)

    def _is_token(self, text: str | None) -> bool:
        return text is not None and hmac.compare_digest(text.encode(), self._token.encode())


async def serve(app: ASGIApp, listener: socket.socket, feed: Feed) -> None:
    """Serve until cancelled. Raises the error of the feed if it fails."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server = _Server(config)
    feeding = asyncio.create_task(feed.run())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait({feeding, serving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (feeding, serving):
            if task.done():
                task.result()
    finally:
        # Cancel the feed first: that ends the open event streams, for which the server waits.
        feeding.cancel()
        server.should_exit = True
        await asyncio.gather(feeding, serving, return_exceptions=True)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[Any]:
        """Leave signals to diloco/cli/interrupts.py."""
        yield
