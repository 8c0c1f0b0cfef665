"""A trainer's newest weights: numbered versions, offered to inference servers by HTTP, or as files to rollout peers.

Weights are served at a URL that contains their sha256, so only servers that were given the digest can fetch them: all
weights, or a patch for a server that has the previous version.
"""

from __future__ import annotations

import hashlib
import http.server
import logging
import shutil
import socket
import sys
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from diloco.rl.weights import Label, State, digest_of, own_copies, packed, packed_smaller

log = logging.getLogger(__name__)


class Publisher:
    """Numbers the versions of one trainer's weights, and keeps the last two in the dtype of the servers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = uuid.uuid4().hex
        """Identifies this process of this trainer; version numbers are unique only together with it."""
        self.version = 0
        self.state: State = {}
        self.digest = ""
        self._dtype = dtype
        self._before: State = {}

    @property
    def whole_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def take(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights to the CPU in the servers' dtype, as a new version unless they are the last one's."""
        state = own_copies(parameters, self._dtype)
        digest = digest_of(state)
        if digest != self.digest:
            self._before, self.state, self.digest = self.state, state, digest
            self.version += 1

    def blob_for(self, publisher: str, version: int) -> tuple[Label, bytes]:
        """The blob for a server that has this version of this publisher: a patch if possible, else all weights."""
        has_last = publisher == self.name and version == self.version - 1 and bool(self._before)
        label = Label(
            version=self.version,
            publisher=self.name,
            base=version if has_last else None,
            digest=self.digest,
        )
        return (
            packed_smaller(self._before, self.state, label)
            if has_last
            else (label, packed(self.state, label))
        )


class Offers:
    """An HTTP server in a thread, on an address of this machine that the inference servers can reach."""

    def __init__(self, host: str) -> None:
        self._offered: dict[str, bytes] = {}
        offered = self._offered

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 60

            def do_GET(self) -> None:
                content = offered.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                # Written directly, since there may be no memory for a copy of the weights.
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self._server = (_Ipv6Server if ":" in host else _Server)((host, 0), Handler)
        shown = f"[{host}]" if ":" in host else host
        self._url = f"http://{shown}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="weights", daemon=True)
        self._thread.start()

    def blob(self, content: bytes) -> str:
        """Serve this content; returns its URL, which ends with its sha256."""
        path = f"/{hashlib.sha256(content).hexdigest()}"
        self._offered[path] = content
        return self._url + path

    def withdraw(self, url: str) -> None:
        self._offered.pop(url.removeprefix(self._url), None)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The base class prints a traceback. A server whose download breaks off reports that itself.
        log.debug("a request of %s failed: %r", client_address, sys.exception())


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


def address_towards(url: str) -> str:
    """This machine's own address on the route to a server. Raises OSError if there is none."""
    parts = urlsplit(url)
    failed = OSError(f"{url} has no address")
    places = socket.getaddrinfo(parts.hostname or "127.0.0.1", parts.port or 80, type=socket.SOCK_DGRAM)
    for family, kind, _, _, place in places:
        try:
            with socket.socket(family, kind) as probe:
                # Connecting a datagram socket sends nothing; it only selects the interface.
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError as error:
            failed = error
    raise failed


MAX_PATCHES = 16
"""Between two files of all weights; fewer where they are as long together."""


class PolicyFiles:
    """A learner's newest policies as files, which its daemon hands to rollout peers. Owns its directory.

    A newcomer takes all weights, which are written now and then, and the patches since; who has the weights before
    takes one patch. Older files go.
    """

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._directory = directory
        self._files: list[dict[str, Any]] = []
        """As the daemon is told of them (peers.daemon.rollout_service.WeightsFile)."""
        self._digest = ""

    def write(self, publisher: Publisher) -> list[dict[str, Any]]:
        """Write the publisher's newest version, unless it is there. Returns all files, the oldest first."""
        if publisher.digest == self._digest:
            return list(self._files)
        label, blob = publisher.blob_for(publisher.name, publisher.version - 1)
        base = "" if label.base is None else self._digest
        self._files.append(self._written(blob, label.digest, base))
        if base and self._needs_whole(publisher.whole_bytes):
            label, blob = publisher.blob_for("", 0)
            self._files.append(self._written(blob, label.digest, ""))
        self._digest = label.digest
        self._forget()
        return list(self._files)

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _written(self, blob: bytes, leads_to: str, base: str) -> dict[str, Any]:
        sha256 = hashlib.sha256(blob).hexdigest()
        path = self._directory / f"{sha256}.safetensors"
        partial = path.with_suffix(".partial")
        partial.write_bytes(blob)
        partial.replace(path)
        return {
            "path": str(path),
            "sha256": sha256,
            "num_bytes": len(blob),
            "leads_to": leads_to,
            "base": base,
        }

    def _needs_whole(self, whole_bytes: int) -> bool:
        last = max(index for index, file in enumerate(self._files) if not file["base"])
        patches = self._files[last + 1 :]
        return len(patches) > MAX_PATCHES or sum(file["num_bytes"] for file in patches) > whole_bytes

    def _forget(self) -> None:
        """Keep what has come since the last file but one of all weights."""
        wholes = [index for index, file in enumerate(self._files) if not file["base"]]
        first = wholes[-2] if len(wholes) > 1 else 0
        kept = self._files[first:]
        still = {file["path"] for file in kept}
        for file in self._files[:first]:
            if file["path"] not in still:
                Path(file["path"]).unlink(missing_ok=True)
        self._files = kept
