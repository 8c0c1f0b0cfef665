from __future__ import annotations

import pytest

from peers.errors import ProtocolError
from peers.net.allowance import Allowance


def test_an_honest_peer_never_meets_the_limit():
    allowance = Allowance(0.0)
    for message in range(20_000):
        allowance.spend(300, message * 0.01)


def test_a_burst_passes_and_a_flood_does_not():
    allowance = Allowance(100.0)
    for _ in range(500):
        allowance.spend(300, 100.0)
    with pytest.raises(ProtocolError):
        for _ in range(1000):
            allowance.spend(300, 100.1)


def test_large_messages_weigh_more():
    allowance = Allowance(0.0)
    with pytest.raises(ProtocolError):
        for _ in range(30):
            allowance.spend(1 << 20, 0.0)


def test_time_heals():
    allowance = Allowance(0.0)
    with pytest.raises(ProtocolError):
        for _ in range(2000):
            allowance.spend(300, 0.0)
    allowance.spend(300, 20.0)
