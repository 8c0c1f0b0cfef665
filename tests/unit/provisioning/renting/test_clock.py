from __future__ import annotations

import time

from provisioning.renting.clock import Clock


def test_a_clock_that_is_set_back_puts_no_end_off_and_one_that_is_set_forward_is_followed(monkeypatch):
    real, clock = time.time, Clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: real() - 86400)
    assert before <= clock() < before + 60
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    assert clock() >= before + 86400
