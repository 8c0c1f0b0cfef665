"""The network laboratory: rates, delays, rules and cleanup. Needs root; skipped elsewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from benchmarks.lab import Lab, LabError, Link, unavailable
from benchmarks.lab.players import Players
from tests.support.commands import ROOT, is_running, wait_until

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

FAST = Link(up_mbps=200, down_mbps=200, delay_ms=1)
SLOW = Link(up_mbps=20, down_mbps=20, delay_ms=1)
DEADLINE_S = 20.0


def test_bytes_take_the_time_that_the_slowest_link_needs() -> None:
    with Lab([FAST, SLOW]) as lab, Players(lab, "benchmarks.lab.raw_tcp", 2) as raw:
        before = lab.counters(0)
        seconds = raw.round_s(1 << 20)
        sent = (lab.counters(0) - before).sent_bytes
        # 1 MiB each way at 20 Mbit/s takes 0.43 s with its headers.
        assert seconds > 0.43
        # On a busy machine TCP takes some packets for lost and sends them again.
        assert 1 << 20 < sent < 3 << 20


def test_a_link_can_be_changed_while_it_is_used() -> None:
    with Lab([SLOW, SLOW]) as lab, Players(lab, "benchmarks.lab.raw_tcp", 2) as raw:
        slow = raw.round_s(1 << 20)
        lab.set_link(0, FAST)
        lab.set_link(1, FAST)
        assert min(raw.round_s(1 << 20) for _ in range(3)) < slow / 2


def test_a_round_trip_takes_twice_the_delay_of_both_links() -> None:
    with Lab([Link(up_mbps=100, down_mbps=100, delay_ms=delay) for delay in (5, 10)]) as lab:
        # In each direction a packet may come out half a tick of the switch early.
        assert 29 <= round_trip_ms(lab, 0, 1) < 58


def test_an_isolated_peer_hears_nothing_until_it_rejoins() -> None:
    with Lab([FAST, FAST]) as lab:
        server = listen(lab, 0)
        lab.isolate(1)
        assert not connects(lab, 1, 0, timeout_s=0.3)
        lab.rejoin(1)
        assert connects(lab, 1, 0, timeout_s=DEADLINE_S)
        server.kill()


def test_nobody_can_call_a_peer_behind_nat_which_can_call_others() -> None:
    with Lab([FAST, FAST]) as lab:
        servers = [listen(lab, peer) for peer in range(2)]
        lab.put_behind_nat(1)
        assert not connects(lab, 0, 1, timeout_s=0.3)
        assert connects(lab, 1, 0, timeout_s=DEADLINE_S)
        for server in servers:
            server.kill()


def test_losses_have_to_be_asked_for_from_the_beginning() -> None:
    with Lab([FAST, FAST]) as lab, pytest.raises(LabError, match="from the beginning"):
        lab.set_link(0, Link(up_mbps=1, down_mbps=1, delay_ms=1, loss=0.1))


def test_what_runs_in_it_ends_with_it_even_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    inside, switch = (int(word) for word in owner.stdout.readline().split())
    assert is_running(inside) and is_running(switch)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not is_running(inside) and not is_running(switch), "their end", DEADLINE_S)


_OWNER = """
import subprocess, time
from benchmarks.lab import Lab, Link
with Lab([Link(up_mbps=1, down_mbps=1, delay_ms=1)]) as lab:
    print(lab.popen(0, ["sleep", "600"]).pid, lab.pid, flush=True)
    time.sleep(600)
"""


def round_trip_ms(lab: Lab, sender: int, receiver: int) -> float:
    """The fastest of several TCP handshakes."""
    server = listen(lab, receiver)
    program = (
        "import socket, sys, time\n"
        "def once():\n"
        "    began = time.monotonic(); socket.create_connection((sys.argv[1], 9000), 5).close()\n"
        "    return time.monotonic() - began\n"
        "print(min(once() for _ in range(20)) * 1e3)"
    )
    client = lab.popen(sender, [sys.executable, "-c", program, lab.address(receiver)], stdout=subprocess.PIPE)
    said, _ = client.communicate(timeout=DEADLINE_S)
    server.kill()
    return float(said)


def listen(lab: Lab, peer: int) -> subprocess.Popen[bytes]:
    """A server on port 9000 that takes every connection."""
    program = (
        "import socket, sys\n"
        "server = socket.create_server((sys.argv[1], 9000))\n"
        "print('listening', flush=True)\n"
        "while True: server.accept()[0].close()"
    )
    server = lab.popen(peer, [sys.executable, "-c", program, lab.address(peer)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout as stdout:
        assert re.match(b"listening", stdout.readline())
    return server


def connects(lab: Lab, sender: int, receiver: int, *, timeout_s: float) -> bool:
    program = "import socket, sys; socket.create_connection((sys.argv[1], 9000), float(sys.argv[2])).close()"
    argv = [sys.executable, "-c", program, lab.address(receiver), str(timeout_s)]
    return lab.popen(sender, argv, stderr=subprocess.DEVNULL).wait(DEADLINE_S) == 0
