"""`diloco dashboard`: serves a read-only web page with the live state of a swarm."""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from diloco.cli.interrupts import run_with_hivemind
from diloco.cli.watched import Watched
from diloco.errors import UserError, print_note
from diloco.options.extras import require
from diloco.options.flags import Port

if TYPE_CHECKING:
    from peers.admission.secrets import SwarmSecret

TOKEN_ENV = "DILOCO_DASHBOARD_TOKEN"
MIN_TOKEN_CHARACTERS = 16
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

app = App(name="dashboard")


@app.default
def dashboard(
    *,
    swarm: Annotated[Watched, Parameter(name="*")] = Watched(),  # noqa: B008
    host: str = "127.0.0.1",
    port: Port = 8420,
) -> int:
    """Show a swarm on a web page until Ctrl-C: peers, losses, speed, the phases of each round, and failures.

    Prints the URL of the page, which contains a secret token. The page is read-only. DILOCO_DASHBOARD_TOKEN sets the
    token, which Prometheus needs for /metrics.

    Parameters
    ----------
    host: str
        Address to listen on. The page is served without encryption; for access from other machines, use an SSH tunnel.
    port: int
        Port to listen on; 0: any free one.
    """
    secret = swarm.secret()
    require("dashboard", "diloco dashboard")
    token = checked_token(os.environ.get(TOKEN_ENV))
    listener = open_listener(host, port)
    return run_with_hivemind(_serve(swarm, secret, listener, token))


def checked_token(text: str | None) -> str:
    """The user's token, or a random one. Raises UserError for a token that is easy to guess, or not a header value."""
    if text is None:
        return secrets.token_urlsafe(24)
    if len(text) < MIN_TOKEN_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
        raise UserError(
            f"{TOKEN_ENV} must be {MIN_TOKEN_CHARACTERS} or more printable ASCII characters without spaces; "
            "`openssl rand -hex 16` makes such a token."
        )
    return text


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError if the address is not available."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family)
    except (OSError, UnicodeError) as error:
        # An invalid host name raises UnicodeError when it is encoded.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"--host {host} --port {port}: {reason}; --port 0 takes any free port.") from error


def page_url(listener: socket.socket, token: str) -> str:
    """The URL to open in a browser."""
    from urllib.parse import quote

    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/?token={quote(token, safe='')}"


async def _serve(swarm: Watched, secret: SwarmSecret | None, listener: socket.socket, token: str) -> int:
    from diloco.dashboard.feed import Feed
    from diloco.dashboard.server import application, serve

    with listener:
        async with swarm.observed(secret) as observer:
            host, port = listener.getsockname()[:2]
            if host not in _LOOPBACK:
                print_note("the page and its token are sent unencrypted; an SSH tunnel would encrypt them")
            feed = Feed(observer)
            print(f"dashboard: {page_url(listener, token)}", flush=True)
            await serve(application(feed, token=token, cookie=f"diloco-{port}"), listener, feed)
    return 0
