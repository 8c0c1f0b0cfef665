"""Serves the newest weights to the inference servers that are told to fetch them."""

from __future__ import annotations

import hashlib
import http.server
import logging
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger(__name__)


class BlobServer:
    """An HTTP server in a thread; only who knows a blob's address, which nobody can guess, gets it."""

    def __init__(self, host: str) -> None:
        """Listens on any free port of `host`, an address of this machine that the servers can reach."""
        self._blobs: dict[str, bytes] = {}
        blobs = self._blobs

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 60

            def do_GET(self) -> None:
                blob = blobs.get(self.path)
                if blob is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(blob)))
                self.end_headers()
                self.wfile.write(blob)

            def log_message(self, *_: object) -> None: ...

        self._server = (_Ipv6Server if ":" in host else _Server)((host, 0), Handler)
        shown = f"[{host}]" if ":" in host else host
        self._url = f"http://{shown}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="weights", daemon=True)
        self._thread.start()

    def publish(self, blobs: Sequence[bytes]) -> list[tuple[str, str]]:
        """Address and sha256 of each. Those published before are gone."""
        self._blobs.clear()
        addresses = []
        for blob in blobs:
            path = f"/{secrets.token_urlsafe(16)}"
            self._blobs[path] = blob
            addresses.append((self._url + path, hashlib.sha256(blob).hexdigest()))
        return addresses

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Its own way is a traceback on stderr; who broke off a download says so itself.
        log.debug("%s broke off: %r", client_address, sys.exception())


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


def address_towards(url: str) -> str:
    """This machine's own address on the way to a server. Raises OSError where there is none."""
    parts = urlsplit(url)
    failed = OSError(f"{url} has no address")
    places = socket.getaddrinfo(parts.hostname or "127.0.0.1", parts.port or 80, type=socket.SOCK_DGRAM)
    for family, kind, _, _, place in places:
        try:
            with socket.socket(family, kind) as probe:
                # Connecting a datagram socket sends nothing; it only chooses the interface.
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError as error:
            failed = error
    raise failed
