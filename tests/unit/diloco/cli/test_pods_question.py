"""The question before pods are rented, asked in a real terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys

import pytest

TIMEOUT_S = 20.0
SCRIPT = """
from diloco.errors import UserError
from diloco.cli.interrupts import run_interruptible
from diloco.cli.provision import agreed_to
from provisioning.renting.plan import Creation, Plan
from provisioning.pods.pod import Offer, PodSpec

offer = Offer(id="o", provider="lium", gpu_type="A100", gpu_count=8, price_per_hour=9.0)
agreed = Plan(create=(Creation(PodSpec(provider="lium", name="pod-0"), offer),), keep=(), destroy=())

async def main():
    try:
        await agreed_to(agreed, yes=False)
    except UserError as error:
        print(error)
        return 2
    print("agreed")
    return 0

raise SystemExit(run_interruptible(main()))
"""


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [(b"y\n", 0, "agreed"), (b"\n", 2, "Nothing was changed"), (b"\x04", 2, "Nothing"), (b"\x03", 130, "")],
    ids=["yes", "return", "end of input", "Ctrl-C"],
)
def test_what_is_typed_is_taken_and_ctrl_c_is_heard(typed, code, said):
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", SCRIPT])
    ended = False
    try:
        seen, _ = read(terminal, b"[y/N]")
        os.write(terminal, typed)
        more, ended = read(terminal, None)
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == code, seen + more
    assert "rent 1 pods for 9.00 $/h" in seen.decode() and said in more.decode()


def read(terminal: int, until: bytes | None) -> tuple[bytes, bool]:
    """The output up to these bytes, the end of the output, or the timeout; and whether the output has ended."""
    seen = b""
    while until is None or until not in seen:
        if not select.select([terminal], [], [], TIMEOUT_S)[0]:
            return seen, False
        try:
            seen += os.read(terminal, 1000)
        except OSError:
            # The other end of the terminal is closed.
            return seen, True
    return seen, False
