"""How a connection over TCP or through a relay begins: who calls whom, and for which protocol.

    caller                      called
    hello             ->                              magic | flags | nonce | length, certificate
                      <-        hello                 the same
    TLS 1.3, unless both flags say that plain TCP will do
    request           ->                              length, protocol | length, signature
                      <-        verdict               served? | length, signature

Under TLS the signatures are empty. Without, each side signs both hellos (so both keys and both nonces), its role and
the protocol. That proves who is at the other end when the stream begins, but protects no byte that follows.

Sockets are non-blocking, and the caller of these functions sets the deadline.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from peers.errors import PeerUnreachable, ProtocolError
from peers.net.paths.tls import MAX_CERTIFICATE_BYTES, Credentials, handshake, peer_id_of, public_key_of
from peers.net.socket_io import receive_exactly, send_all
from peers.protocol.libp2p_keys import verify

_MAGIC = b"diloco-1"
_HEAD = struct.Struct("<8sB32sH")
_LENGTH = struct.Struct("<H")
_PLAIN = 1
_NONCE_BYTES = 32
_MAX_PROTOCOL_BYTES = 256
_MAX_SIGNATURE_BYTES = 512
_SERVED, _NOT_SERVED = b"\1", b"\0"
# No record that peers sign begins like this, so a signature of one cannot be passed off as one of the other.
_SIGNED = b"diloco plain tcp\0"


@dataclass(frozen=True)
class Hello:
    """What one side shows before anything is proved."""

    plain: bool
    """Whether this side accepts plain TCP."""
    nonce: bytes
    certificate: bytes

    @classmethod
    def of(cls, credentials: Credentials, *, plain: bool) -> Hello:
        return cls(plain, secrets.token_bytes(_NONCE_BYTES), credentials.certificate)

    @cached_property
    def peer_id(self) -> str:
        """Whom the sender claims to be. Raises ProtocolError."""
        return peer_id_of(self.certificate)

    def encode(self) -> bytes:
        flags = _PLAIN if self.plain else 0
        return _HEAD.pack(_MAGIC, flags, self.nonce, len(self.certificate)) + self.certificate


async def read_hello(sock: socket.socket) -> Hello:
    """Raises ProtocolError, OSError."""
    magic, flags, nonce, size = _HEAD.unpack(await receive_exactly(sock, _HEAD.size))
    if magic != _MAGIC or flags & ~_PLAIN or not 0 < size <= MAX_CERTIFICATE_BYTES:
        raise ProtocolError("not a greeting of diloco, or one of another version")
    return Hello(bool(flags & _PLAIN), nonce, await receive_exactly(sock, size))


async def call(
    sock: socket.socket, credentials: Credentials, peer_id: str, protocol: str, *, plain: bool
) -> socket.socket:
    """The caller's side: the stream with `peer_id`. Takes the socket over: an error, or a cancellation, closes it.

    Raises PeerUnreachable, or ProtocolError where somebody else answers.
    """
    stream = sock
    try:
        ours = Hello.of(credentials, plain=plain)
        await send_all(sock, ours.encode())
        theirs = await read_hello(sock)
        if theirs.peer_id != peer_id:
            raise ProtocolError(f"{theirs.peer_id} answers in place of {peer_id}")
        unprotected = ours.plain and theirs.plain
        if not unprotected:
            stream = await handshake(sock, credentials, theirs.certificate, server=False)
        proof = _Proof(credentials, ours, theirs, protocol) if unprotected else None
        await send_all(stream, _sized(protocol.encode()) + _sized(proof.sign(b"caller") if proof else b""))
        verdict = await receive_exactly(stream, 1)
        signature = await _receive_sized(stream, _MAX_SIGNATURE_BYTES)
        if proof and not proof.is_signed(theirs, b"called", signature):
            raise ProtocolError(f"the peer that answers does not prove to be {peer_id}")
        if verdict != _SERVED:
            raise PeerUnreachable(f"{peer_id} does not serve {protocol} here")
        return stream
    except BaseException as error:
        stream.close()
        if isinstance(error, OSError):
            raise PeerUnreachable(f"no greeting from {peer_id}: {error}") from error
        raise


async def answer(
    sock: socket.socket,
    credentials: Credentials,
    theirs: Hello,
    *,
    plain: bool,
    serves: Callable[[str], bool],
) -> tuple[socket.socket, str]:
    """The called side, after its `read_hello`: the stream, and the protocol it is for.

    Takes the socket over: an error, or a cancellation, closes it. Raises PeerUnreachable, ProtocolError.
    """
    stream = sock
    try:
        ours = Hello.of(credentials, plain=plain)
        await send_all(sock, ours.encode())
        unprotected = ours.plain and theirs.plain
        if not unprotected:
            stream = await handshake(sock, credentials, theirs.certificate, server=True)
        protocol = (await _receive_sized(stream, _MAX_PROTOCOL_BYTES)).decode("utf-8", "replace")
        signature = await _receive_sized(stream, _MAX_SIGNATURE_BYTES)
        proof = _Proof(credentials, theirs, ours, protocol) if unprotected else None
        if proof and not proof.is_signed(theirs, b"caller", signature):
            raise ProtocolError(f"the caller does not prove to be {theirs.peer_id}")
        verdict = _SERVED if serves(protocol) else _NOT_SERVED
        await send_all(stream, verdict + _sized(proof.sign(b"called") if proof else b""))
        if verdict != _SERVED:
            raise ProtocolError(f"asks for {protocol!r:.80}, which nobody serves here")
        return stream, protocol
    except BaseException as error:
        stream.close()
        if isinstance(error, OSError):
            raise PeerUnreachable(f"the greeting broke off: {error}") from error
        raise


@dataclass(frozen=True)
class _Proof:
    """What both sides sign where TLS does not prove who they are."""

    credentials: Credentials
    caller: Hello
    called: Hello
    protocol: str

    def sign(self, role: bytes) -> bytes:
        return self.credentials.identity.sign(self._signed(role)).signature

    def is_signed(self, by: Hello, role: bytes, signature: bytes) -> bool:
        return verify(by.peer_id, public_key_of(by.certificate), self._signed(role), signature)

    def _signed(self, role: bytes) -> bytes:
        parts = (role, self.caller.encode(), self.called.encode(), self.protocol.encode())
        return _SIGNED + b"".join(_sized(part) for part in parts)


def _sized(part: bytes) -> bytes:
    return _LENGTH.pack(len(part)) + part


async def _receive_sized(sock: socket.socket, max_bytes: int) -> bytes:
    (size,) = _LENGTH.unpack(await receive_exactly(sock, _LENGTH.size))
    if size > max_bytes:
        raise ProtocolError(f"a greeting with {size} bytes where at most {max_bytes} belong")
    return await receive_exactly(sock, size)
