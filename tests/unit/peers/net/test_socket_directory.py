from __future__ import annotations

import os
import stat

import pytest

from peers.net.socket_directory import SocketDirectory


@pytest.fixture
def parent(tmp_path_factory, monkeypatch):
    directory = tmp_path_factory.mktemp("d")
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory


def age(path):
    os.utime(path, (0, 0))


def test_a_directory_is_private_and_goes_when_it_is_removed(parent):
    directory = SocketDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.remove()
    directory.remove()
    assert list(parent.iterdir()) == []


def test_what_a_dead_process_left_is_swept_and_the_livings_is_not(parent):
    living, dead = SocketDirectory(), SocketDirectory()
    dead._lock.close()
    age(living.path)
    age(dead.path)
    third = SocketDirectory()
    assert sorted(parent.iterdir()) == sorted([living.path, third.path])
    living.remove()
    third.remove()


def test_a_path_too_long_for_sockets_is_avoided(parent, monkeypatch):
    long = parent / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    directory = SocketDirectory()
    assert len(str(directory.path / "control.sock")) < 108
    directory.remove()
