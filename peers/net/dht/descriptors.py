"""How many files and sockets this process, and the p2pd that it starts, may have open."""

from __future__ import annotations

import contextlib
import resource

from peers.errors import UserError

WANTED = 65_536
"""Each peer of the swarm takes a few here and in p2pd; relays, downloads and strangers take more."""
LEAST = 512


def raise_limit() -> int:
    """Raise the soft limit as far as that is allowed. Returns the limit; raises UserError where it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        # Some systems have a lower limit of their own.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft != resource.RLIM_INFINITY and soft < LEAST:
        raise UserError(
            f"this process may open {soft} files and sockets, and a peer needs {LEAST} at least; raise the limit "
            f"(`ulimit -Hn {8 * LEAST}` as root, or LimitNOFILE of its service) and start again"
        )
    return WANTED if soft == resource.RLIM_INFINITY else soft
