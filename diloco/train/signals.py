"""Ctrl-C and SIGTERM for a training process: gone at once, with nothing half-written."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

CleanUps = list[Callable[[], None]]
CLEAN_UP_TIMEOUT_S = 25.0
"""Then it is given up; less than torchrun gives its ranks."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LeaveOnSignal:
    """Exits with 128 + n on SIGINT and SIGTERM, after the callbacks in `clean_ups`, whatever becomes of them.

    They have CLEAN_UP_TIMEOUT_S. A thread does it: the main thread may sit for minutes in a collective or on the GPU,
    where Python runs no signal handlers. Construct it in the main thread, once.
    """

    def __init__(self) -> None:
        self.clean_ups: CleanUps = []
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        # Kept, so that it is not closed while the interpreter writes to it.
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _watch(self) -> None:
        while True:
            number = self._reader.recv(1)[0]
            if number in _SIGNALS:
                break
        last_resort = threading.Timer(CLEAN_UP_TIMEOUT_S, os._exit, (128 + number,))
        last_resort.daemon = True
        try:
            # Where there can be no more threads, cleaning up has to end by itself.
            with contextlib.suppress(RuntimeError):
                last_resort.start()
            _clean_up(self.clean_ups)
        finally:
            os._exit(128 + number)


@contextlib.contextmanager
def cleaned_up_on_failure(clean_ups: CleanUps) -> Iterator[None]:
    """Does the same when the block ends with an error."""
    try:
        yield
    except BaseException:
        _clean_up(clean_ups)
        raise


def _clean_up(clean_ups: CleanUps) -> None:
    for clean_up in clean_ups:
        try:
            clean_up()
        except OSError:
            # What there was to remove is gone, or its disk is.
            continue
        except Exception:
            log.exception("not everything was cleaned up")
