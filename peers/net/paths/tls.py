"""Mutual TLS 1.3 between two peers, each pinned to the other's identity key.

A peer's certificate is self-signed with its identity key. Only that key counts: no authority signs certificates, and no
name in them is read. Each side shows its certificate before the handshake; the other derives the peer id from the key
in it, decides whether that is whom it wants, and then trusts exactly this certificate for exactly this connection. The
handshake proves that the other end has the key.
"""

from __future__ import annotations

import datetime
import select
import socket
import ssl
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from peers.errors import PeerUnreachable, ProtocolError
from peers.net.identity import Identity
from peers.net.socket_io import once_ready
from peers.protocol import libp2p_keys
from peers.system import private_file

MAX_CERTIFICATE_BYTES = 2048
"""An RSA key of 4096 bits makes one of 1.3 kB."""
_WRITE_BYTES = 1 << 18
_READ_RECORDS = 64
"""Per call: a megabyte, if records are full. A sender of one-byte records must not keep the caller in this loop."""
# Peers' clocks differ, and keys do not expire. RFC 5280 prescribes the latter date for that.
_NOT_BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Credentials:
    """What one peer shows of itself, and the key to prove it."""

    identity: Identity
    certificate: bytes
    """DER."""
    _pem: bytes = field(repr=False)

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @classmethod
    def of(cls, identity: Identity) -> Credentials:
        key = identity.private_key
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.peer_id)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(_NOT_BEFORE)
            .not_valid_after(_NOT_AFTER)
            .sign(key, None if isinstance(key, Ed25519PrivateKey) else hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return cls(
            identity,
            certificate.public_bytes(Encoding.DER),
            private + certificate.public_bytes(Encoding.PEM),
        )


class TlsSocket(ssl.SSLSocket):
    """An SSLSocket that can replace a plain socket in the reduction. One thread may use it at a time."""

    def send(self, data: Any, flags: int = 0) -> int:
        # OpenSSL returns only when a write is out completely, so a large one on a slow link would look like a stall.
        return super().send(memoryview(data)[:_WRITE_BYTES], flags)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Reads as much as is there, while SSLSocket reads one record per call: calls cost more than copies."""
        view = memoryview(buffer)[: nbytes or None]
        done = 0
        try:
            for _ in range(_READ_RECORDS):
                piece: Any = self.read(len(view) - done, view[done:])
                done += piece
                if not piece or done == len(view):
                    break
        except (TimeoutError, ssl.SSLError):
            # The error is raised again at the next call.
            if not done:
                raise
        return done

    def shutdown(self, how: int) -> None:
        # SSLSocket.shutdown drops the encryption first: another thread's next send would go out in the clear.
        socket.socket.shutdown(self, how)


def public_key_of(certificate: bytes) -> bytes:
    """The libp2p message of the key that this DER certificate contains and is signed with. Raises ProtocolError."""
    if len(certificate) > MAX_CERTIFICATE_BYTES:
        raise ProtocolError(f"a certificate of {len(certificate)} bytes")
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        message = libp2p_keys.public_key_message(parsed.public_key())
        # The handshake proves possession of the key; this check rejects earlier those who only know the public key.
        parsed.verify_directly_issued_by(parsed)
        return message
    except (ValueError, TypeError, x509.InvalidVersion, InvalidSignature, UnsupportedAlgorithm) as error:
        raise ProtocolError(f"not a peer's certificate: {error}") from error


def peer_id_of(certificate: bytes) -> str:
    """The id of the only peer that can use this DER certificate. Raises ProtocolError."""
    return libp2p_keys.peer_id_of(public_key_of(certificate))


async def handshake(
    sock: socket.socket, credentials: Credentials, certificate: bytes, *, server: bool
) -> TlsSocket:
    """TLS with the holder of `certificate` over a connected non-blocking socket, which it takes over: an error, or a
    cancellation, closes it.

    Raises ProtocolError where the other end cannot prove that it holds the certificate's key, PeerUnreachable when the
    connection breaks.
    """
    tls: socket.socket = sock
    try:
        context = _context(credentials, certificate, server)
        tls = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
        assert isinstance(tls, TlsSocket)
        await once_ready(tls, tls.do_handshake, select.POLLIN)
        if tls.getpeercert(binary_form=True) != certificate:
            raise ProtocolError("TLS with another certificate than the one shown before")
        return tls
    except BaseException as error:
        tls.close()
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            raise ProtocolError(f"TLS failed: {error.reason or error}") from error
        if isinstance(error, OSError):
            raise PeerUnreachable(f"the connection broke during the TLS handshake: {error}") from error
        raise


def _context(credentials: Credentials, certificate: bytes, server: bool) -> ssl.SSLContext:
    """One per connection: it trusts this one certificate, and no later change can make it trust another."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        # A session ticket would arrive on an outgoing stream, where any arrival counts as the stream's end.
        context.num_tickets = 0
    _load_key(context, credentials._pem)
    try:
        context.load_verify_locations(cadata=certificate)
    except ssl.SSLError as error:
        raise ProtocolError(f"not a certificate that TLS can use: {error.reason}") from error
    return context


def _load_key(context: ssl.SSLContext, pem: bytes) -> None:
    # Python loads a key from files only.
    with private_file(pem) as path:
        context.load_cert_chain(path)
