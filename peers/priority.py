"""Which of this machine's threads go first."""

from __future__ import annotations

import contextlib
import os
import threading


def stand_back(niceness: int) -> None:
    """Have the calling thread be so much nicer to all others than it was; only for one that was begun for its task.

    It cannot be taken back without privileges. Where nothing else wants the processor it changes nothing.
    """
    thread = threading.get_native_id()
    # Where that is not allowed it is merely in the others' way.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
