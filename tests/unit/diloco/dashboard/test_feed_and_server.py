from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diloco.cli.dashboard import checked_token, open_listener, page_url
from diloco.dashboard import feed as feeds
from diloco.dashboard.feed import Feed, SentState
from diloco.errors import UserError
from peers.monitor.observations import Observations
from peers.monitor.summary import summary_of
from peers.protocol.reports import Point
from tests.support.sighted import entry, reported

pytest.importorskip("starlette", reason="needs the extra `dashboard`: pip install -e '.[dev]'")
pytest.importorskip("uvicorn", reason="needs the extra `dashboard`: pip install -e '.[dev]'")

from diloco.dashboard.server import FILES, STATIC, application, serve

TOKEN = "0123456789abcdef"


class Canned:
    """A swarm of one peer, in which something happens whenever the test says so."""

    def __init__(self) -> None:
        self.observations, self.news = Observations(), asyncio.Event()
        reported(self.observations, "A", 0.0, world_rank=0, rounds=(entry(1, 5.0),))

    async def changed(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        self.news.clear()

    def swarm(self) -> dict[str, Any]:
        return summary_of("run", self.observations, now=1.0, unix_now=time.time())

    def curves(self) -> feeds.Curves:
        points = self.observations.peers["A"].curve.points
        return {0: [(point.time, point.step, point.loss, point.tokens_per_s) for point in points]}


@contextlib.asynccontextmanager
async def running(source: Canned) -> AsyncIterator[int]:
    """The real server on a free port."""
    listener = open_listener("127.0.0.1", 0)
    feed = Feed(source)
    task = asyncio.create_task(serve(application(feed, token=TOKEN, cookie="diloco-1"), listener, feed))
    try:
        yield listener.getsockname()[1]
    finally:
        task.cancel()
        began = time.monotonic()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()
        assert time.monotonic() - began < 30, "it did not end in time"


async def ask(
    port: int, path: str, *, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """One request as typed: status, headers, body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    first, *rest = head.decode().split("\r\n")
    return int(first.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in rest)}, body


COOKIE = {"cookie": f"diloco-1={TOKEN}"}


async def test_nobody_sees_anything_without_the_token():
    async with running(Canned()) as port:
        for path in ("/", "/events", "/api/swarm", "/metrics", "/static/app.js", "/nothing"):
            for headers in ({}, {"cookie": "diloco-1=0123456789abcdee"}, {"authorization": "Bearer x"}):
                status, _, body = await ask(port, path, **headers)
                assert status == 401 and b"run" not in body.replace(b"`diloco dashboard`", b"")
        assert (await ask(port, "/?token=wrong"))[0] == 401
        assert (await ask(port, "/api/swarm?token=" + TOKEN))[0] == 401


async def test_the_address_that_is_printed_becomes_a_cookie_that_scripts_cannot_read():
    async with running(Canned()) as port:
        status, headers, _ = await ask(port, f"/?token={TOKEN}")
        assert (status, headers["location"]) == (303, "/")
        assert headers["set-cookie"].startswith(f"diloco-1={TOKEN};")
        assert "HttpOnly" in headers["set-cookie"] and "SameSite=strict" in headers["set-cookie"]
        status, headers, body = await ask(port, "/", **COOKIE)
        assert status == 200 and b"<title>diloco</title>" in body and TOKEN.encode() not in body
        assert (await ask(port, "/metrics", authorization=f"Bearer {TOKEN}"))[0] == 200


async def test_nothing_but_the_pages_own_files_can_be_had_run_or_loaded():
    async with running(Canned()) as port:
        for path in ("/", "/static/app.js", "/nothing", "/api/swarm"):
            _, headers, _ = await ask(port, path, **COOKIE)
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy
            assert "unsafe" not in policy and "http" not in policy
            assert headers["x-content-type-options"] == "nosniff"
        for path in (
            "/static/..%2fserver.py",
            "/static/%2e%2e/verb.py",
            "/static/index.html",
            "/static//x",
        ):
            assert (await ask(port, path, **COOKIE))[0] == 404
        for name in FILES:
            assert (await ask(port, f"/static/{name}", **COOKIE))[0] == 200


def test_the_page_has_no_inline_script_and_no_address_outside():
    assert {path.name for path in STATIC.iterdir()} == {"index.html", *FILES}
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=", page)


async def test_it_only_shows():
    async with running(Canned()) as port:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert (await ask(port, "/api/swarm", method=method, **COOKIE))[0] == 405
        status, _, body = await ask(port, "/api/swarm", **COOKIE)
        assert status == 200 and json.loads(body)["peers"][0]["world_rank"] == 0
        status, headers, body = await ask(port, "/metrics", **COOKIE)
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b'diloco_epoch{run_id="run",world_rank="0"} 0.0\n' in body


async def test_a_page_is_told_everything_once_and_then_what_is_new():
    source = Canned()
    async with running(source) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /events HTTP/1.1\r\nHost: x\r\nCookie: diloco-1={TOKEN}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert b"text/event-stream" in head

        async def until(name: str) -> Any:
            while True:
                line = (await asyncio.wait_for(reader.readline(), 5)).decode().strip()
                if line == f"event: {name}":
                    return json.loads((await reader.readline()).decode().removeprefix("data: "))

        assert (await until("swarm"))["peers"][0]["state"] == "training"
        assert [round_["epoch"] for round_ in await until("rounds")] == [1]
        point = Point(time=9.0, step=3, loss=1.5, tokens_per_s=2.0)
        reported(source.observations, "A", 0.5, points=(point,), rounds=(entry(2, 8.0),), world_rank=0)
        source.news.set()
        assert [round_["epoch"] for round_ in await until("rounds")] == [1, 2]
        assert await until("curves") == {"0": [[9.0, 3, 1.5, 2.0]]}
        # The server ends with this page still open.

    writer.close()


def test_points_and_rounds_that_a_page_has_are_not_sent_again():
    sent, swarm = SentState(), {"run_id": "run", "rounds": [{"epoch": 1}]}
    curves: feeds.Curves = {0: [(1.0, 1, None, 5.0)]}
    assert [name for name, _ in sent.due(swarm, curves)] == ["swarm", "rounds", "curves"]
    assert [name for name, _ in sent.due(swarm, curves)] == ["swarm"]
    curves[0].append((2.0, 2, None, 6.0))
    assert sent.due(swarm, curves)[-1] == ("curves", {"0": [(2.0, 2, None, 6.0)]})


def test_a_token_that_could_be_guessed_is_refused():
    assert len(checked_token(None)) >= 32 and checked_token(None) != checked_token(None)
    assert checked_token(TOKEN) == TOKEN
    for text in ("", "short", "x" * 15, "a token with spaces in it", "ünïcödé-ünïcödé-ünïcödé"):
        with pytest.raises(UserError, match="DILOCO_DASHBOARD_TOKEN"):
            checked_token(text)


def test_a_port_that_is_taken_and_a_host_that_is_not_here_are_told():
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert page_url(listener, "a/b") == f"http://127.0.0.1:{port}/?token=a%2Fb"
        with pytest.raises(UserError, match=f"--port {port}.*--port 0"):
            open_listener("127.0.0.1", port)
    with pytest.raises(UserError, match=r"--host 203\.0\.113\.7"):
        open_listener("203.0.113.7", 0)
    with pytest.raises(UserError, match=r"--host x+ --port 0: .*--port 0"):
        open_listener("x" * 64, 0)
    if socket.has_ipv6:
        with contextlib.suppress(UserError), open_listener("::1", 0) as six:
            assert page_url(six, "t").startswith("http://[::1]:")
