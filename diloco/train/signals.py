"""Ends a training process at once on Ctrl-C, SIGTERM and SIGHUP, after removing half-written files."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from peers.signals import ending_signals

log = logging.getLogger(__name__)

CleanUps = list[Callable[[], None]]
CLEAN_UP_TIMEOUT_S = 25.0
"""Time for all clean-ups; less than the time after which torchrun kills its ranks."""


class LeaveOnSignal:
    """Exits with 128 + n on a signal that ends a process, after running `clean_ups` for at most CLEAN_UP_TIMEOUT_S.

    A thread does this: the main thread may block for minutes in a collective or on the GPU, where Python runs no
    signal handlers. Construct it once, in the main thread.
    """

    def __init__(self) -> None:
        self.clean_ups: CleanUps = []
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        # A reference keeps the socket open: the interpreter writes signal numbers to it.
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._numbers = ending_signals()
        for number in self._numbers:
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _watch(self) -> None:
        while True:
            number = self._reader.recv(1)[0]
            if number in self._numbers:
                break
        last_resort = threading.Timer(CLEAN_UP_TIMEOUT_S, os._exit, (128 + number,))
        last_resort.daemon = True
        try:
            # If no more threads can be started, the clean-up has no time limit.
            with contextlib.suppress(RuntimeError):
                last_resort.start()
            _clean_up(self.clean_ups)
        finally:
            os._exit(128 + number)


@contextlib.contextmanager
def cleaned_up_on_failure(clean_ups: CleanUps) -> Iterator[None]:
    """Run the clean-ups if the block raises."""
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
            # The files to remove are already gone, or their disk is.
            continue
        except Exception:
            log.exception("a clean-up failed")
