import asyncio
import dataclasses
import os
import random
import socket
import ssl
import threading
import time
import warnings

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from peers.errors import PeersError, ProtocolError
from peers.net import socket_io
from peers.net.paths.tls import TlsSocket, handshake, peer_id_of
from peers.protocol import libp2p_keys
from peers.reduce import frames
from tests.support.keys import credentials, rsa_credentials


def socket_pair():
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


def shake(caller, called, *, shown_by_called=None, shown_by_caller=None):
    """The outcome of each end: a blocking TlsSocket or the error."""
    a, b = socket_pair()

    async def both():
        async with asyncio.timeout(5):
            return await asyncio.gather(
                handshake(a, caller, shown_by_called or called.certificate, server=False),
                handshake(b, called, shown_by_caller or caller.certificate, server=True),
                return_exceptions=True,
            )

    outcomes = asyncio.run(both())
    for outcome in outcomes:
        if isinstance(outcome, socket.socket):
            outcome.setblocking(True)
    return outcomes


def answer_tls(sock, mine, theirs, *, timeout_s=5.0):
    async def within():
        async with asyncio.timeout(timeout_s):
            return await handshake(sock, mine, theirs.certificate, server=True)

    return asyncio.run(within())


def close(*ends):
    for end in ends:
        if isinstance(end, socket.socket):
            end.close()


@pytest.fixture
def both(tmp_path):
    """The two blocking ends of a stream between two peers."""
    a, b = shake(credentials(tmp_path, "a"), credentials(tmp_path, "b"))
    with a, b:
        yield a, b


@pytest.mark.parametrize("make", [credentials, rsa_credentials])
def test_two_peers_talk_by_tls_1_3(tmp_path, make):
    mine, theirs = make(tmp_path, "a"), credentials(tmp_path, "b")
    a, b = shake(mine, theirs)
    assert isinstance(a, TlsSocket) and isinstance(b, TlsSocket) and a.version() == "TLSv1.3"
    a.sendall(b"question")
    assert b.recv(100) == b"question"
    close(a, b)


@pytest.mark.parametrize("make", [credentials, rsa_credentials])
def test_a_certificate_names_exactly_the_peer_whose_key_made_it(tmp_path, make):
    mine = make(tmp_path, "a")
    assert peer_id_of(mine.certificate) == mine.peer_id
    assert len(mine.certificate) < 1500


def test_a_certificate_that_its_own_key_did_not_sign_names_nobody(tmp_path):
    certificate = bytearray(credentials(tmp_path, "a").certificate)
    certificate[-1] ^= 1
    for wrong in (bytes(certificate), b"", os.urandom(300), bytes(3000)):
        with pytest.raises(ProtocolError):
            peer_id_of(wrong)


def test_whatever_else_is_in_place_of_a_certificate_is_refused_as_such(tmp_path):
    certificate = credentials(tmp_path, "a").certificate
    # The byte with the number of unused bits in the signature: if those bits are zero, other numbers are valid too.
    unused_bits = len(certificate) - 65
    generator = random.Random(0)
    # Always include the version byte, for which the parser raises a different error.
    version = certificate.index(b"\xa0\x03\x02\x01\x02") + 4
    for position in [version, *(generator.randrange(len(certificate)) for _ in range(2000))]:
        mutated = bytearray(certificate)
        mutated[position] ^= generator.randrange(1, 256)
        if position == unused_bits:
            continue
        with pytest.raises(ProtocolError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer_id_of(bytes(mutated))


def test_an_rsa_key_with_an_exponent_of_its_own_names_nobody():
    key = rsa.generate_private_key(public_exponent=3, key_size=2048)
    with pytest.raises(ValueError, match="65537"):
        libp2p_keys.public_key_message(key.public_key())
    der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    message = libp2p_keys._pack_key(0, der)
    signature = libp2p_keys.sign(key, b"payload")
    assert not libp2p_keys.verify(libp2p_keys.peer_id_of(message), message, b"payload", signature)


def test_nobody_passes_with_the_certificate_of_another(tmp_path):
    mine, theirs, thief = (credentials(tmp_path, name) for name in "abc")
    stolen = dataclasses.replace(thief, certificate=theirs.certificate)
    a, b = shake(mine, stolen, shown_by_called=theirs.certificate)
    assert isinstance(a, ProtocolError)
    close(a, b)
    a, b = shake(stolen, mine, shown_by_caller=theirs.certificate)
    assert isinstance(b, ProtocolError)
    close(a, b)


def test_a_silent_other_end_costs_no_more_than_the_deadline(tmp_path):
    mine, theirs = credentials(tmp_path, "a"), credentials(tmp_path, "b")
    ours, other = socket_pair()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        answer_tls(ours, mine, theirs, timeout_s=0.1)
    assert time.monotonic() - started < 30
    assert ours.fileno() == -1
    other.close()


def test_garbage_in_place_of_tls_is_refused_and_the_socket_closed(tmp_path):
    mine, theirs = credentials(tmp_path, "a"), credentials(tmp_path, "b")
    ours, other = socket_pair()
    other.sendall(os.urandom(500))
    with pytest.raises(PeersError):
        answer_tls(ours, mine, theirs)
    assert ours.fileno() == -1
    other.close()


def test_older_tls_is_refused(tmp_path):
    mine, theirs = credentials(tmp_path, "a"), credentials(tmp_path, "b")
    ours, other = socket.socketpair()
    ours.setblocking(False)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2

    def call():
        with pytest.raises(OSError):
            old.wrap_socket(other)

    thread = threading.Thread(target=call)
    thread.start()
    with pytest.raises(ProtocolError):
        answer_tls(ours, mine, theirs)
    thread.join()


def test_a_shut_down_socket_sends_nothing_in_the_clear(both):
    a, b = both
    a.shutdown(socket.SHUT_RD)
    a.sendall(b"still encrypted")
    assert b.recv(100) == b"still encrypted"
    a.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError):
        a.send(b"x")
    assert b.recv(100) == b""


def test_a_large_write_reports_progress_while_the_other_end_reads_slowly(both):
    a, b = both
    payload, received, sent = os.urandom(8 << 20), bytearray(), 0
    a.settimeout(0.02)
    b.settimeout(5)
    reader = threading.Thread(
        target=lambda: [
            received.extend(b.recv(1 << 16)) for _ in iter(lambda: len(received) < 8 << 20, False)
        ]
    )
    view = memoryview(payload)
    with pytest.raises(TimeoutError):
        while True:
            sent += a.send(view[sent:])
    assert sent < len(payload)
    reader.start()
    while sent < len(payload):
        try:
            sent += (step := a.send(view[sent:]))
            assert step <= 1 << 18
        except TimeoutError:
            continue
    reader.join()
    assert received == payload


async def test_a_sender_of_the_smallest_records_keeps_nobody_else_from_running(both, monkeypatch):
    a, _ = both
    a.setblocking(False)
    num_read = 0

    def one_byte(size, buffer=None):
        nonlocal num_read
        num_read += 1
        return 1 if buffer is not None else b"x"

    monkeypatch.setattr(a, "read", one_byte)

    async def take(receive, num_bytes):
        done = 0
        while done < num_bytes:
            piece = await receive()
            done += piece if isinstance(piece, int) else len(piece)

    buffer = memoryview(bytearray(1 << 20))
    for receive in (
        lambda: socket_io.receive_into(a, buffer),
        lambda: socket_io.receive(a, 100),
    ):
        taking = asyncio.create_task(take(receive, 1000))
        while not taking.done():
            before = num_read
            await asyncio.sleep(0)
            assert num_read <= before + 64


def test_the_reduction_notices_a_stall_and_a_stop_on_a_stream_of_tls(both):
    a, b = both
    for end in (a, b):
        frames.prepare(end)
    with pytest.raises(frames.Stalled):
        frames.receive_into(a, memoryview(bytearray(10)), 0.1, lambda: False)
    begun = time.monotonic()
    with pytest.raises(frames.Stopped):
        frames.receive_into(a, memoryview(bytearray(10)), 60, lambda: time.monotonic() > begun + 0.1)
    # Nobody reads at the other end, so the buffers fill up.
    payload = memoryview(bytearray(16 << 20))
    header = frames.Header(frames.Kind.RESULT, 0, len(payload))
    with pytest.raises(frames.Stalled):
        frames.send_frame(b, header, (payload,), 0.1, lambda: False)
