"""An HTTP API on loopback that fails when a test says so: the base of the emulators of clouds."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    headers: Mapping[str, str]


@dataclass
class Fault:
    """How the next requests fail whose method and path begin with `start`."""

    start: str
    """Such as "POST /executors/"; the path is without the API's prefix."""
    code: int
    """The HTTP status of the answer."""
    carried_out: bool = False
    """Whether the request is carried out nevertheless, so that only its answer is lost."""
    times: int = 1
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    contains: str = ""


class Refusal(Exception):
    """An error answer of the API."""

    def __init__(self, code: int, error: str, message: str) -> None:
        super().__init__(message)
        self.code, self.error, self.message = code, error, message


class HttpApi(ABC):
    """Subclasses implement `answer`. Every path begins with `prefix`."""

    prefix = ""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()

    @abstractmethod
    def answer(self, request: Request) -> Any:
        """The JSON to answer with. Raises Refusal. Called for one request at a time."""

    def error_body(self, code: str, message: str) -> Any:
        return {"error": {"code": code, "message": message}}

    def count(self, start: str) -> int:
        """The number of requests whose method and path began with `start`."""
        return sum(f"{one.method} {one.path}".startswith(start) for one in self.requests)

    def __enter__(self) -> HttpApi:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def handle_any(self) -> None:
                url = urlparse(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                path = url.path.removeprefix(api.prefix)
                code, answer, headers = api._answered(
                    Request(self.command, path, query, body, dict(self.headers))
                )
                content = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = handle_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}{self.prefix}"

    def _answered(self, request: Request) -> tuple[int, Any, Mapping[str, str]]:
        with self._lock:
            self.requests.append(request)
            fault = self._fault_for(request)
            try:
                answer = None if fault and not fault.carried_out else self.answer(request)
            except Refusal as refusal:
                return refusal.code, self.error_body(refusal.error, refusal.message), {}
            if fault:
                error = fault.error or self.error_body(f"status_{fault.code}", "as the test wants it")
                return fault.code, error, fault.headers
            return 200, answer, {}

    def _fault_for(self, request: Request) -> Fault | None:
        line = f"{request.method} {request.path}"
        for fault in self.faults:
            if line.startswith(fault.start) and fault.contains in line:
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
                return fault
        return None
