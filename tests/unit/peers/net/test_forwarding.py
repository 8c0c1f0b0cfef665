import contextlib
import os
import queue
import socket
import threading

from peers.net.paths.forwarding import Forwarder


def forwarded(forwarder):
    """Both far ends of a forwarded stream, and the queue that is told when it has ended."""
    (one, near), (other, far) = socket.socketpair(), socket.socketpair()
    ended = queue.Queue()
    forwarder.forward(near, far, lambda: ended.put(True))
    for sock in (one, other):
        sock.settimeout(10)
    return one, other, ended


def test_bytes_go_both_ways_and_the_end_of_one_side_ends_the_other():
    forwarder = Forwarder()
    one, other, ended = forwarded(forwarder)
    payload, received = os.urandom(3 << 20), bytearray()
    sender = threading.Thread(target=lambda: (one.sendall(payload), one.close()))
    other.sendall(b"back")
    assert one.recv(10) == b"back"
    sender.start()
    while piece := other.recv(1 << 16):
        received += piece
    sender.join()
    assert received == payload
    assert ended.get(timeout=10)
    assert forwarder.num_bytes == len(payload) + len(b"back")
    other.close()
    forwarder.close()


def test_a_side_that_does_not_read_holds_up_no_other_stream():
    forwarder = Forwarder()
    stuck, silent, _ = forwarded(forwarder)
    stuck.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while True:
            stuck.sendall(bytes(1 << 20))
    one, other, _ = forwarded(forwarder)
    one.sendall(b"past it")
    assert other.recv(10) == b"past it"
    forwarder.close()
    forwarder.close()
    assert other.recv(10) == b""
    for sock in (stuck, silent, one, other):
        sock.close()
