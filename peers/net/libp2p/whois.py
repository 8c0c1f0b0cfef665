"""Who listens at an address that names nobody: libp2p's TLS handshake shows the peer's identity key.

Only the address vouches for the answer: whoever could stand in for it on the way there is taken for the peer.
(https://github.com/libp2p/specs/blob/master/tls/tls.md)
"""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import replace

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from peers.errors import UserError
from peers.protocol import libp2p_keys
from peers.protocol.maddrs import Maddr
from peers.timing import PROBE_S

_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED = b"libp2p-tls-handshake:"
_TLS = "/tls/1.0.0"
_HELLO = "/multistream/1.0.0"
_MAX_CERTIFICATE_BYTES = 8192


def with_peer_id(address: Maddr, *, timeout_s: float = PROBE_S) -> Maddr:
    """The address with the id of the peer that answers there. Raises UserError where none does."""
    where = f"{address.host}:{address.port}"
    paste = (
        "Is `diloco dht start` running there? If so, paste the whole address that it printed: "
        f"--initial-peers {address}/p2p/12D3KooW…"
    )
    try:
        certificate = _certificate_at(address, timeout_s)
        return replace(address, peer_id=_peer_id_in(certificate))
    except TimeoutError:
        raise UserError(
            f"cannot get the peer id from {where}: no answer within {timeout_s:g} s. {paste}"
        ) from None
    except (ssl.SSLError, EOFError, ValueError, UnsupportedAlgorithm):
        raise UserError(
            f"cannot get the peer id from {where}: another program listens there. {paste}"
        ) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot get the peer id from {where}: {reason}. {paste}") from error


def _certificate_at(address: Maddr, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((address.host, address.port), timeout_s) as sock:
        sock.sendall(_framed(_HELLO) + _framed(_TLS))
        for wanted in (_HELLO, _TLS):
            if _received(sock, len(_framed(wanted)), deadline) != _framed(wanted):
                raise ValueError("another protocol")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Certificates are signed by their own key; who it belongs to is what is asked.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["libp2p"])
        sock.settimeout(_left_s(deadline))
        with context.wrap_socket(sock) as tls:
            return tls.getpeercert(binary_form=True) or b""


def _peer_id_in(certificate: bytes) -> str:
    """Raises ValueError unless the key that the extension names has signed the certificate's own."""
    if len(certificate) > _MAX_CERTIFICATE_BYTES:
        raise ValueError("a certificate that is too long")
    parsed = x509.load_der_x509_certificate(certificate)
    try:
        extension = parsed.extensions.get_extension_for_oid(_EXTENSION).value
    except x509.ExtensionNotFound as error:
        raise ValueError("a certificate of nobody's in libp2p") from error
    assert isinstance(extension, x509.UnrecognizedExtension)
    public_key, signature = _two_strings(extension.value)
    peer_id = libp2p_keys.peer_id_of(public_key)
    own = parsed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if not libp2p_keys.verify(peer_id, public_key, _SIGNED + own, signature):
        raise ValueError("a certificate that its peer has not signed")
    return peer_id


def _two_strings(der: bytes) -> tuple[bytes, bytes]:
    """SEQUENCE { OCTET STRING, OCTET STRING }. Raises ValueError for anything else."""
    sequence, rest = _der_value(der, 0x30)
    first, tail = _der_value(sequence, 0x04)
    second, end = _der_value(tail, 0x04)
    if rest or end:
        raise ValueError("more than two strings")
    return first, second


def _der_value(data: bytes, tag: int) -> tuple[bytes, bytes]:
    """What stands behind the tag, and what follows it."""
    if len(data) < 2 or data[0] != tag:
        raise ValueError("another kind of value")
    length, start = data[1], 2
    if length >= 0x80:
        start += length - 0x80
        length = int.from_bytes(data[2:start], "big")
    if start > 6 or start + length > len(data):
        raise ValueError("a value that is cut off")
    return data[start : start + length], data[start + length :]


def _framed(protocol: str) -> bytes:
    """As multistream-select sends it: the length, the name, a line's end."""
    line = f"{protocol}\n".encode()
    return bytes([len(line)]) + line


def _received(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        sock.settimeout(_left_s(deadline))
        piece = sock.recv(num_bytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
