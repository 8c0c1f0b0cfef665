"""The thread that writes a checkpoint while training goes on: one at a time, and never the end of the training."""

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
    """How a save ended; on every rank."""

    step: int
    num_bytes: int = 0
    seconds: float = 0.0
    """What writing took."""
    blocked_s: float = 0.0
    """How long training stood still for the copies, and for the save before where that was not done."""
    reason: str = ""
    """Why there is no checkpoint of this step, if there is none."""

    def event(self) -> dict[str, Any]:
        """For metrics.jsonl."""
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
    """Raise DilocoError where no checkpoint came of a save and the user wants none to be missed.

    The message begins so that the peer does not start this worker again: the disk would still be full.
    """
    if is_required and event["event"] == "checkpoint_failed":
        raise DilocoError(
            f"{GAVE_UP}: the checkpoint of step {event['step']} was not saved ({event['reason']}), and --ckpt.required "
            "ends the training then; make room, or name another place with --ckpt.path"
        )


class Saver:
    """Used from one thread, but for `wait`, which a signal's thread calls at any moment."""

    def __init__(self, *, tells: bool = True) -> None:
        """Of all ranks one logs what failed."""
        self._tells = tells
        # Not the thread: it cannot be waited for before it has started, nor safely by two at once.
        self._idle = threading.Event()
        self._idle.set()
        self._ended: deque[Saved] = deque()

    def begin(self, step: int, write: Callable[[], int], *, blocked_s: float) -> None:
        """Run `write`, which returns the bytes that it wrote, in a thread; none must be under way.

        Whatever it raises becomes an event: a disk that is full must not end a training.
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
        """There will be no checkpoint of this step."""
        if self._tells:
            log.error("the checkpoint of step %d was not saved: %s", step, reason)
        self._ended.append(Saved(step=step, reason=reason))

    @property
    def is_busy(self) -> bool:
        return not self._idle.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until nothing is being written. Returns whether that came in time."""
        return self._idle.wait(timeout_s)

    def ended(self) -> list[Saved]:
        """The saves that have ended since the last call."""
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        return found
