"""Runs one save at a time in a thread, while training continues; errors become events."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.errors import DilocoError
from peers.daemon.restarts import GAVE_UP
from peers.threads import stand_back

log = logging.getLogger(__name__)

_NICENESS = 10


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The outcome of a save; every rank has one."""

    step: int
    num_bytes: int = 0
    seconds: float = 0.0
    """Duration of the write."""
    blocked_s: float = 0.0
    """How long training was blocked, by the copies and by waiting for the previous save."""
    reason: str = ""
    """Why the save failed; empty if it succeeded."""

    def event(self) -> dict[str, Any]:
        """The record for metrics.jsonl."""
        if self.reason:
            return {"event": "checkpoint_failed", "step": self.step, "reason": self.reason}
        return {
            "event": "checkpoint",
            "step": self.step,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "blocked_s": round(self.blocked_s, 3),
        }


def check_saved(event: Mapping[str, Any], *, is_required: bool) -> None:
    """Raise DilocoError if a save failed and --ckpt.required is set.

    The message begins with GAVE_UP, so that the peer does not restart this worker: the disk would still be full.
    """
    if is_required and event["event"] == "checkpoint_failed":
        raise DilocoError(
            f"{GAVE_UP}: the checkpoint of step {event['step']} was not saved ({event['reason']}), and with "
            "--ckpt.required that ends the training; free some space, or name another place with --ckpt.path"
        )


class Saver:
    """Used from one thread, except `wait`, which the signal thread may call at any time."""

    def __init__(self, *, tells: bool = True) -> None:
        """`tells`: whether this rank logs failures; true on one rank only."""
        self._tells = tells
        # An event rather than Thread.join, which raises if the thread has not started yet.
        self._idle = threading.Event()
        self._idle.set()
        self._ended: deque[Saved] = deque()

    def begin(self, step: int, write: Callable[[], int], *, blocked_s: float) -> None:
        """Run `write`, which returns the number of bytes written, in a thread.

        Must not be called while a save is in progress. Whatever `write` raises becomes an event, since a full disk must
        not end the training.
        """

        def run() -> None:
            stand_back(_NICENESS)
            began_at = time.monotonic()
            try:
                num_bytes = write()
            except Exception as error:  # noqa: BLE001
                self.failed(step, str(error) or repr(error))
            else:
                seconds = time.monotonic() - began_at
                self._ended.append(
                    Saved(step=step, num_bytes=num_bytes, seconds=seconds, blocked_s=blocked_s)
                )
            finally:
                self._idle.set()

        self._idle.clear()
        try:
            threading.Thread(target=run, name="checkpoint", daemon=True).start()
        except BaseException:
            self._idle.set()
            raise

    def failed(self, step: int, reason: str) -> None:
        """Record that the checkpoint of this step could not be saved."""
        if self._tells:
            log.error("the checkpoint of step %d was not saved: %s", step, reason)
        self._ended.append(Saved(step=step, reason=reason))

    @property
    def is_busy(self) -> bool:
        return not self._idle.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in progress. Returns False on timeout."""
        return self._idle.wait(timeout_s)

    def ended(self) -> list[Saved]:
        """The saves that have ended since the last call."""
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        return found
