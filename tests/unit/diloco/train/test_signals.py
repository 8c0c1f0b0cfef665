from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The main thread blocks in C code, as in a collective, where Python runs no handlers; before, it prints "ready".
_PROGRAM = """
import ctypes, sys
import diloco.train.signals
signals = diloco.train.signals.LeaveOnSignal()
{first}
signals.clean_ups.append(lambda: print("cleaned", flush=True))
print("ready", flush=True)
while True:
    ctypes.CDLL(None).pause()
"""


def outcome(number, *, first=""):
    """The exit code and the output after the signal; `first` is a line of the program to run before."""
    program = _PROGRAM.replace("{first}", first)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        rest, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, rest


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_process_whose_main_thread_is_busy(number, code):
    assert outcome(number) == (code, "cleaned\n")


def test_it_ends_and_cleans_up_where_a_part_of_it_fails():
    assert outcome(signal.SIGINT, first="signals.clean_ups.append(lambda: 1 / 0)") == (130, "cleaned\n")


def test_it_ends_where_cleaning_up_does_not():
    hangs = "diloco.train.signals.CLEAN_UP_TIMEOUT_S = 0.2; signals.clean_ups.append(ctypes.CDLL(None).pause)"
    assert outcome(signal.SIGTERM, first=hangs) == (143, "")
