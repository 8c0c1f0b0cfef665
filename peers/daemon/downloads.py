"""Downloads a newer state of the run, from peers that have it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from peers.core.weights import Aggregation
from peers.daemon.config import codec_of, optimizer_of
from peers.errors import StateUnavailable
from peers.net.states.replay import can_be_repeated, replay_commits
from peers.net.states.transfer import download_state
from peers.net.transport import StreamTransport
from peers.protocol.certificates import Certificate
from peers.protocol.codecs import FLOAT_BYTES
from peers.protocol.mesh import Scalar
from peers.state.outer_state import OuterState

log = logging.getLogger(__name__)

Fetch = Callable[[Sequence[Certificate], Sequence[str], OuterState, float], Awaitable[OuterState]]
"""`fetch_state` with its keyword arguments bound."""


async def fetch_state(
    path: Sequence[Certificate],
    donors: Sequence[str],
    have: OuterState,
    timeout_s: float,
    *,
    run_id: str,
    transport: StreamTransport,
    manifest: Mapping[str, Scalar],
    on_received: Callable[[tuple[int, int] | None], None],
) -> OuterState:
    """The state at the end of this path. `have` is this peer's own state, or the one that it offers; its fragments have
    the same sizes.

    Repeats the missing commits if donors still have their averages; else transfers the state itself.
    `on_received` is called with the bytes received and those of the whole state; at the end, with None.
    Raises StateUnavailable, PeerUnreachable or ProtocolError.
    """
    until = time.monotonic() + timeout_s
    asked = f"{len(donors)} peer{'' if len(donors) == 1 else 's'}"
    log.info("asking %s for the state of epoch %d", asked, path[-1].plan.epoch)
    with contextlib.ExitStack() as stack:
        stack.callback(on_received, None)
        on_received((0, 2 * FLOAT_BYTES * sum(have.sizes)))
        if (own := have.snapshot()) is not None:
            stack.enter_context(own)
        if own is not None and can_be_repeated(own, path):
            # Donors that hand commits over slowly leave time to download the state instead.
            with contextlib.suppress(StateUnavailable, TimeoutError):
                return await replay_commits(
                    donors,
                    transport,
                    run_id,
                    own,
                    path,
                    codec_of(manifest),
                    Aggregation.of(manifest).rule,
                    partial(optimizer_of, manifest),
                    timeout_s=timeout_s / 2,
                )
        return await download_state(
            donors,
            transport,
            run_id,
            path[-1],
            have.sizes,
            timeout_s=max(0.0, until - time.monotonic()),
            have=own,
            progress=lambda received, total: on_received((received, total)),
        )
