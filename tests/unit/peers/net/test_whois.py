"""The peer id of an address that names nobody."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import threading
from contextlib import contextmanager

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from peers.errors import UserError
from peers.net.identity import load_or_create
from peers.net.libp2p.p2pd import P2pd
from peers.net.libp2p.whois import _EXTENSION, _SIGNED, _framed, with_peer_id
from peers.protocol import libp2p_keys
from peers.protocol.maddrs import maddr_of_host, parse_maddr

HELLO = _framed("/multistream/1.0.0") + _framed("/tls/1.0.0")


@pytest.mark.parametrize(
    ("text", "maddr"),
    [
        ("127.0.0.1:30001", "/ip4/127.0.0.1/tcp/30001"),
        ("[::1]:80", "/ip6/::1/tcp/80"),
        ("pod-1.example.org:80", "/dns/pod-1.example.org/tcp/80"),
        ("localhost", None),
        ("/ip4/127.0.0.1/tcp/1", None),
        ("a b:1", None),
    ],
)
def test_a_host_and_a_port_are_an_address(text, maddr):
    assert maddr_of_host(text) == (maddr and parse_maddr(maddr))


def test_a_port_that_is_none_is_refused():
    with pytest.raises(UserError, match="is not a port"):
        maddr_of_host("127.0.0.1:99999")


def test_a_real_peer_says_who_it_is(tmp_path):
    identity = load_or_create(tmp_path / "a.key")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}"

    async def ask():
        p2pd = await P2pd.start(identity_path=identity.path, host_maddrs=[address])
        try:
            return await asyncio.to_thread(with_peer_id, parse_maddr(address))
        finally:
            await p2pd.stop()

    assert str(asyncio.run(ask())) == f"{address}/p2p/{identity.peer_id}"
    identity.release()


@contextmanager
def answering(reply):
    """A server that does this with its one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                reply(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield parse_maddr(f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}")
        thread.join()


def speaks_http(connection):
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)


def hangs_up(connection):
    connection.recv(100)


def is_no_tls(connection):
    connection.recv(100)
    connection.sendall(HELLO + b"x" * 100)


@pytest.mark.parametrize("reply", [speaks_http, hangs_up, is_no_tls])
def test_what_is_no_peer_is_told_from_one(reply):
    with (
        answering(reply) as address,
        pytest.raises(
            UserError, match=r"another program listens there\. Is `diloco dht start` running there"
        ),
    ):
        with_peer_id(address)


def test_who_says_nothing_is_waited_for_by_a_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = parse_maddr(f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}")
        with pytest.raises(UserError, match=r"cannot get the peer id from .*: no answer within 0\.2 s"):
            with_peer_id(address, timeout_s=0.2)


def certificate(tmp_path, signed_by, claimed):
    """A libp2p certificate in a PEM file, whose extension claims one key and is signed by another."""
    key = Ed25519PrivateKey.generate()
    own = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    message = libp2p_keys.public_key(claimed)
    parts = b"".join(
        bytes([4, len(part)]) + part for part in (message, libp2p_keys.sign(signed_by, _SIGNED + own))
    )
    now, name = datetime.datetime.now(datetime.UTC), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.UnrecognizedExtension(_EXTENSION, bytes([0x30, len(parts)]) + parts), critical=True
        )
        .sign(key, None)
    )
    path = tmp_path / "certificate.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(private + made.public_bytes(Encoding.PEM))
    return path


@pytest.mark.parametrize("is_honest", [True, False])
def test_a_key_counts_only_where_it_has_signed_the_certificate(is_honest, tmp_path):
    claimed = Ed25519PrivateKey.generate()
    path = certificate(tmp_path, claimed if is_honest else Ed25519PrivateKey.generate(), claimed)

    def shake_hands(connection):
        connection.recv(len(HELLO))
        connection.sendall(HELLO)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        with context.wrap_socket(connection, server_side=True) as tls:
            tls.recv(1)

    with answering(shake_hands) as address:
        if is_honest:
            wanted = libp2p_keys.peer_id_of(libp2p_keys.public_key(claimed))
            assert with_peer_id(address).peer_id == wanted
        else:
            with pytest.raises(UserError, match="another program listens there"):
                with_peer_id(address)
