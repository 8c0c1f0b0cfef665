from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The main thread sits where Python runs no handlers, as in a collective; it says so once it is about to.
_PROGRAM = """
import ctypes, sys
from diloco.signals import LeaveOnSignal
signals = LeaveOnSignal()
signals.clean_ups.append(lambda: print("cleaned", flush=True))
print("ready", flush=True)
while True:
    ctypes.CDLL(None).pause()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_process_whose_main_thread_is_busy(number, code):
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        rest, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, rest) == (code, "cleaned\n")
