"""How a connection of our own begins, over TCP or through a relay: who calls whom, and for which protocol.

    caller                      called
    hello             ->                              magic | flags | nonce | length, certificate
                      <-        hello                 the same
    TLS 1.3, unless both flags say that plain TCP will do
    request           ->                              length, protocol | length, signature
                      <-        verdict               served? | length, signature

Under TLS the signatures are empty. Without, each side signs both hellos (so both keys and both nonces), its role and
the protocol: that tells who is at the other end when the stream begins, and protects no byte that follows.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from peers.errors import PeerUnreachable, ProtocolError
from peers.net.paths.tls import MAX_CERTIFICATE_BYTES, Credentials, handshake, peer_id_of, public_key_of
from peers.protocol.libp2p_keys import verify

_MAGIC = b"diloco-1"
_HEAD = struct.Struct("<8sB32sH")
_LENGTH = struct.Struct("<H")
_PLAIN = 1
_NONCE_BYTES = 32
_MAX_PROTOCOL_BYTES = 256
_MAX_SIGNATURE_BYTES = 512
_SERVED, _NOT_SERVED = b"\1", b"\0"
# No record of ours begins like this, so neither signature can be taken for the other.
_SIGNED = b"diloco plain tcp\0"


@dataclass(frozen=True)
class Hello:
    """What one side shows of itself before anything is proved."""

    plain: bool
    """Whether plain TCP will do."""
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
    """From a non-blocking socket, so that who says nothing costs no thread. Raises ProtocolError, OSError."""
    loop = asyncio.get_running_loop()

    async def exactly(num_bytes: int) -> bytes:
        received = b""
        while len(received) < num_bytes:
            piece = await loop.sock_recv(sock, num_bytes - len(received))
            if not piece:
                raise PeerUnreachable("closed before it said who it is")
            received += piece
        return received

    plain, nonce, size = _parse_head(await exactly(_HEAD.size))
    return Hello(plain, nonce, await exactly(size))


def call(
    sock: socket.socket,
    credentials: Credentials,
    peer_id: str,
    protocol: str,
    *,
    plain: bool,
    deadline: float,
) -> socket.socket:
    """The caller's side, blocking: the stream with `peer_id`. Takes the socket over: an error closes it.

    Raises PeerUnreachable, or ProtocolError where somebody else answers. `deadline` as of time.monotonic().
    """
    stream = sock
    try:
        ours = Hello.of(credentials, plain=plain)
        _send(sock, ours.encode(), deadline)
        is_plain, nonce, size = _parse_head(_receive(sock, _HEAD.size, deadline))
        theirs = Hello(is_plain, nonce, _receive(sock, size, deadline))
        if theirs.peer_id != peer_id:
            raise ProtocolError(f"{theirs.peer_id} answers in the place of {peer_id}")
        unprotected = ours.plain and theirs.plain
        if not unprotected:
            stream = handshake(sock, credentials, theirs.certificate, server=False, deadline=deadline)
        proof = _Proof(credentials, ours, theirs, protocol) if unprotected else None
        request = protocol.encode()
        _send(stream, _sized(request) + _sized(proof.sign(b"caller") if proof else b""), deadline)
        verdict = _receive(stream, 1, deadline)
        signature = _receive_sized(stream, _MAX_SIGNATURE_BYTES, deadline)
        if proof and not proof.is_signed(theirs, b"called", signature):
            raise ProtocolError(f"somebody answers in the place of {peer_id}")
        if verdict != _SERVED:
            raise PeerUnreachable(f"{peer_id} does not serve {protocol} here")
        return stream
    except BaseException as error:
        stream.close()
        if isinstance(error, OSError):
            raise PeerUnreachable(f"no greeting from {peer_id}: {error}") from error
        raise


def answer(
    sock: socket.socket,
    credentials: Credentials,
    theirs: Hello,
    *,
    plain: bool,
    serves: Callable[[str], bool],
    deadline: float,
) -> tuple[socket.socket, str]:
    """The called side, blocking, after its `read_hello`: the stream, and the protocol it is for.

    Takes the socket over: an error closes it. Raises PeerUnreachable, ProtocolError.
    """
    stream = sock
    try:
        ours = Hello.of(credentials, plain=plain)
        _send(sock, ours.encode(), deadline)
        unprotected = ours.plain and theirs.plain
        if not unprotected:
            stream = handshake(sock, credentials, theirs.certificate, server=True, deadline=deadline)
        protocol = _receive_sized(stream, _MAX_PROTOCOL_BYTES, deadline).decode("utf-8", "replace")
        signature = _receive_sized(stream, _MAX_SIGNATURE_BYTES, deadline)
        proof = _Proof(credentials, theirs, ours, protocol) if unprotected else None
        if proof and not proof.is_signed(theirs, b"caller", signature):
            raise ProtocolError(f"somebody calls in the name of {theirs.peer_id}")
        verdict = _SERVED if serves(protocol) else _NOT_SERVED
        _send(stream, verdict + _sized(proof.sign(b"called") if proof else b""), deadline)
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


def _parse_head(head: bytes) -> tuple[bool, bytes, int]:
    magic, flags, nonce, size = _HEAD.unpack(head)
    if magic != _MAGIC or flags & ~_PLAIN or not 0 < size <= MAX_CERTIFICATE_BYTES:
        raise ProtocolError("not a greeting of this program, or of another version of it")
    return bool(flags & _PLAIN), nonce, size


def _sized(part: bytes) -> bytes:
    return _LENGTH.pack(len(part)) + part


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_left_s(deadline))
    sock.sendall(data)


def _receive(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        sock.settimeout(_left_s(deadline))
        piece = sock.recv(num_bytes - len(received))
        if not piece:
            raise PeerUnreachable("closed in the greeting")
        received += piece
    return received


def _receive_sized(sock: socket.socket, max_bytes: int, deadline: float) -> bytes:
    (size,) = _LENGTH.unpack(_receive(sock, _LENGTH.size, deadline))
    if size > max_bytes:
        raise ProtocolError(f"a greeting with {size} bytes where at most {max_bytes} belong")
    return _receive(sock, size, deadline)


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("took too long")
    return left_s
