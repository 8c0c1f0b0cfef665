"""Ask an HTTP server for JSON, by a deadline."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

_SHOWN = 500


class ServerLost(Exception):
    """A server did not answer, or answered with an error: nothing that it was asked for is to be used."""


def ask(url: str, body: Any = None, *, timeout_s: float, post: bool = False) -> Any:
    """The answer to a GET, or with a body (or `post`) to a POST; None where it is empty. Raises ServerLost."""
    data = json.dumps(body).encode() if body is not None else (b"" if post else None)
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            content = answer.read()
        return json.loads(content) if content.strip() else None
    except urllib.error.HTTPError as error:
        said = error.read(_SHOWN).decode(errors="replace")
        raise ServerLost(f"{url} answered {error.code}: {said}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerLost(f"{url}: {error or type(error).__name__}") from error
