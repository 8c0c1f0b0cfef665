from __future__ import annotations

from types import SimpleNamespace

from diloco.launch import daemon_process
from peers.errors import LinkLost


def test_a_daemon_that_imports_for_minutes_is_awaited(monkeypatch, tmp_path):
    clock = [0.0]
    link = object()

    def connect(_path, *, timeout_s):
        if clock[0] < 540.0:
            clock[0] += 10.0
            raise LinkLost("no daemon listens")
        return link

    monkeypatch.setattr(daemon_process, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(daemon_process, "WorkerLink", SimpleNamespace(connect=connect))
    daemon = daemon_process.DaemonProcess.__new__(daemon_process.DaemonProcess)
    daemon.link_path = tmp_path / "link.sock"
    daemon._process = SimpleNamespace(poll=lambda: None)
    daemon._log_path = tmp_path / "daemon.log"
    assert daemon._connect() is link
