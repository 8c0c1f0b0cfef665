from __future__ import annotations

import threading

import pytest

from diloco.checkpoint.saver import Saver


def test_it_can_be_waited_for_before_its_thread_has_started(monkeypatch):
    saver, heard = Saver(), []

    class SlowToStart(threading.Thread):
        def start(self) -> None:
            # As the signal thread might, at this moment.
            heard.append(saver.wait(0.01))
            super().start()

    monkeypatch.setattr("diloco.checkpoint.saver.threading.Thread", SlowToStart)
    saver.begin(3, lambda: 7, blocked_s=0.0)
    assert saver.wait(20)
    assert heard == [False]
    assert [(saved.step, saved.num_bytes, saved.reason) for saved in saver.ended()] == [(3, 7, "")]


def test_what_a_save_raises_is_told_and_nobody_waits_for_it_any_longer():
    saver = Saver()
    saver.begin(3, lambda: 1 // 0, blocked_s=0.0)
    assert saver.wait(20)
    assert not saver.is_busy
    assert [saved.event()["event"] for saved in saver.ended()] == ["checkpoint_failed"]


def test_nobody_waits_for_a_thread_that_could_not_be_started(monkeypatch):
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    saver = Saver()
    monkeypatch.setattr("diloco.checkpoint.saver.threading.Thread", Refused)
    with pytest.raises(RuntimeError):
        saver.begin(3, lambda: 7, blocked_s=0.0)
    assert saver.wait(0)
