"""Headless Chromium, driven by the WebDriver protocol (https://www.w3.org/TR/webdriver2/), which is JSON over HTTP."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.chaos.links import free_port

START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 60.0
_FLAGS = (
    "--headless=new",
    # Chromium's sandbox does not work as root in a container.
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
)


def missing() -> str:
    """The programs that are not installed; empty if both are."""
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    return ", ".join(name for name, path in found.items() if path is None)


class Browser:
    """One window."""

    def __init__(self, session_url: str) -> None:
        self._url = session_url

    def open(self, url: str) -> None:
        self._call("POST", "/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a JavaScript function body and return its result."""
        return self._call("POST", "/execute/sync", script=script, args=list(arguments))

    def until(self, script: str, what: str, timeout_s: float = 30.0) -> float:
        """Poll until a function body returns something true. Returns the Unix time at which it did."""
        deadline = time.monotonic() + timeout_s
        while not self.run(script):
            assert time.monotonic() < deadline, f"{what} was not to be seen in {timeout_s:g} s: {self.text()}"
            time.sleep(0.02)
        return time.time()

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def screenshot(self, path: Path) -> bytes:
        """Write a PNG of the whole page as it is shown now. Returns its bytes."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return window.innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self._devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(picture := base64.b64decode(shot["data"]))
        return picture

    def shows(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """From now on, emulate a screen of this size and a preference for dark or light colors."""
        mobile = width < 600
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", features=[scheme])

    def complaints(self) -> list[str]:
        """What the browser has written to its console since the last call: errors and violations of policies."""
        return [entry["message"] for entry in self._call("POST", "/se/log", type="browser")]

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def _call(self, method: str, path: str, **body: Any) -> Any:
        return _call(method, self._url + path, body)


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A new browser with its own profile. All its processes end with the context."""
    port = free_port()
    # A short name: the browser has a socket there, whose path may have at most 107 bytes.
    temporary = tempfile.mkdtemp(prefix="browser-", dir="/tmp")
    with (directory / "chromedriver.log").open("wb") as log:
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "TMPDIR": temporary, "HOME": temporary},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(lambda: _call("GET", f"{url}/status", None)["ready"])
        options = {"args": [*_FLAGS, f"--user-data-dir={directory / 'profile'}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _call("POST", f"{url}/session", {"capabilities": {"alwaysMatch": wanted}})
        session_url = f"{url}/session/{session['sessionId']}"
        yield Browser(session_url)
        _call("DELETE", session_url, None)
    finally:
        # The driver leads a session of its own, in which the browser's processes are.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        shutil.rmtree(temporary, ignore_errors=True)


def _wait_for(is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            if is_ready():
                return
        assert time.monotonic() < deadline, "chromedriver did not start"
        time.sleep(0.05)


def _call(method: str, url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {url}: {error.read().decode()[:500]}") from error
