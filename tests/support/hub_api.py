"""The part of Hugging Face's HTTP interface that uploading a model's directory takes, on loopback."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class HubApi:
    """Serves while the block runs. Takes every file in the commit itself, as the Hub does with small ones."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hub.tokens.add(self.headers.get("Authorization"))
                body = self._body()
                answer = hub._answer(self.path, body)
                self._send(404 if answer is None else 200, answer or {"error": f"no {self.path}"})

            def do_GET(self) -> None:
                self._send(200, {"id": "me/model", "sha": "0" * 40, "siblings": []})

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") == "chunked":
                    parts = []
                    while size := int(self.rfile.readline(), 16):
                        parts.append(self.rfile.read(size))
                        self.rfile.readline()
                    self.rfile.readline()
                    return b"".join(parts)
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _send(self, code: int, content: dict[str, Any]) -> None:
                raw = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_arguments: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _answer(self, path: str, body: bytes) -> dict[str, Any] | None:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/me/model", "name": "me/model", "id": "1"}
        if path == "/api/models/me/model/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            return {
                "files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            }
        if path.startswith("/api/models/me/model/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return {
                "commitUrl": f"{self.url}/me/model/commit/{'0' * 40}",
                "commitOid": "0" * 40,
                "success": True,
            }
        return None
