"""Waiting for services outside the swarm that are away for a while: a data hub, a store of checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from diloco.errors import DilocoError, UserError

log = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""How long a service may be away. An attempt may itself take minutes."""
_RETRY_S = 30.0

T = TypeVar("T")


def waited_out(action: Callable[[], T]) -> T:
    """The result of `action`, which raises UserError if it is refused, and another DilocoError if it may succeed later.

    Waits in that case: a worker that fails for the same reason again and again is given up.
    """
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            return action()
        except DilocoError as error:
            if isinstance(error, UserError) or time.monotonic() >= give_up_at:
                raise
            log.warning("%s; next attempt in %g s", error, _RETRY_S)
        time.sleep(_RETRY_S)
