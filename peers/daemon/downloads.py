"""Downloads a newer state of the run, from peers that have it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from peers.errors import StateUnavailable
from peers.net.states.replay import can_be_repeated, replay_commits
from peers.net.states.transfer import download_state
from peers.net.transport import StreamTransport
from peers.protocol.certificates import Certificate
from peers.state.outer_optimizer import OuterOptimizer
from peers.state.outer_state import OuterState

log = logging.getLogger(__name__)

_FLOAT_BYTES = 4


class Downloads:
    """Repeats the commits that are missing, where donors still have their averages; else transfers the state itself."""

    def __init__(
        self,
        run_id: str,
        transport: StreamTransport,
        *,
        codec: str,
        optimizer_for: Callable[[int], OuterOptimizer],
        on_received: Callable[[tuple[int, int] | None], None],
    ) -> None:
        """`on_received` is called with the bytes that are here and those of the whole state; at the end, with None."""
        self._run_id, self._transport, self._codec = run_id, transport, codec
        self._optimizer_for, self._on_received = optimizer_for, on_received

    async def fetch(
        self,
        path: Sequence[Certificate],
        donors: Sequence[str],
        *,
        sizes: Sequence[int],
        have: OuterState | None,
        timeout_s: float,
    ) -> OuterState:
        """The state at the end of this path; `sizes` are those of its fragments, `have` is this peer's own state.

        Raises StateUnavailable, PeerUnreachable or ProtocolError.
        """
        until = time.monotonic() + timeout_s
        asked = f"{len(donors)} peer{'' if len(donors) == 1 else 's'}"
        log.info("asking %s for the state of epoch %d", asked, path[-1].plan.epoch)
        with contextlib.ExitStack() as stack:
            stack.callback(self._on_received, None)
            self._on_received((0, 2 * _FLOAT_BYTES * sum(sizes)))
            own = have.snapshot() if have is not None else None
            if own is not None:
                stack.enter_context(own)
            if own is not None and can_be_repeated(own, path):
                with contextlib.suppress(StateUnavailable, TimeoutError):
                    return await replay_commits(
                        donors,
                        self._transport,
                        self._run_id,
                        own,
                        path,
                        self._codec,
                        self._optimizer_for,
                        # Donors that hand commits over slowly leave time to download the state instead.
                        timeout_s=timeout_s / 2,
                    )
            return await download_state(
                donors,
                self._transport,
                self._run_id,
                path[-1],
                sizes,
                timeout_s=max(0.0, until - time.monotonic()),
                have=own,
                progress=lambda received, total: self._on_received((received, total)),
            )
