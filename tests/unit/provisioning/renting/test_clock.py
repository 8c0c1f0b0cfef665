from __future__ import annotations

import time
from types import SimpleNamespace

from provisioning.renting import clock as module
from provisioning.renting.clock import Clock


def test_a_clock_that_is_set_back_puts_no_end_off_and_one_that_is_set_forward_is_followed(monkeypatch):
    def set_by(seconds: float) -> None:
        clocks = {name: getattr(time, name) for name in dir(time) if name.startswith(("clock_", "CLOCK_"))}
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: time.time() + seconds, **clocks))

    clock = Clock()
    before = clock()
    set_by(-86400)
    assert before <= clock() < before + 60
    set_by(86400)
    assert clock() >= before + 86400
