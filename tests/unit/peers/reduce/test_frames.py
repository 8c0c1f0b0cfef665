from __future__ import annotations

import socket

import pytest

from peers.reduce import frames
from peers.reduce.bandwidth import bytes_acked, bytes_received, min_round_trip_s
from peers.reduce.frames import prepare

NEAR_WINDOW = 1 << 20


@pytest.fixture
def connected():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            yield near, far


def window_of(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP)


def test_the_kernel_counts_what_has_gone_through(connected):
    sender, receiver = connected
    sender.sendall(bytes(1000))
    receiver.recv(1000, socket.MSG_WAITALL)
    assert (bytes_received(receiver), bytes_received(sender)) == (1000, 0)
    # This byte carries the acknowledgement.
    receiver.send(b"x")
    sender.recv(1)
    assert bytes_acked(sender) >= 1000
    assert 0 < min_round_trip_s(sender) < 0.1


def test_a_reduction_with_a_peer_on_this_machine_begins_with_a_small_window(connected, monkeypatch):
    monkeypatch.setattr(frames, "min_round_trip_s", lambda sock: 50e-6)
    for sock in connected:
        prepare(sock)
        assert window_of(sock) == NEAR_WINDOW


@pytest.mark.parametrize("round_trip_s", [5e-3, 0.0], ids=["far", "unknown"])
def test_with_others_the_kernel_decides(connected, monkeypatch, round_trip_s):
    before = window_of(connected[0])
    monkeypatch.setattr(frames, "min_round_trip_s", lambda sock: round_trip_s)
    prepare(connected[0])
    assert window_of(connected[0]) == before


def test_other_sockets_are_as_good():
    near, far = socket.socketpair()
    with near, far:
        prepare(near)
        near.send(b"x")
        assert far.recv(1) == b"x"
