"""p2pd's control protocol, as far as streams need it: protobuf behind a varint length on a Unix socket.

After the answer to a request for a stream, the socket *is* the stream: p2pd copies between it and the peer.
(https://github.com/learning-at-home/go-libp2p-daemon/blob/master/specs/CONTROL.md)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.message import DecodeError
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from peers.errors import PeerUnreachable, ProtocolError
from peers.net.socket_io import receive_exactly
from peers.protocol.libp2p_keys import base58_decode, base58_encode, varint
from peers.timing import CONNECT_S

_MAX_MESSAGE_BYTES = 1 << 20
_MAX_STREAM_INFO_BYTES = 4096


async def open_stream(control: Path, peer_id: str, protocol: str, *, timeout_s: float) -> socket.socket:
    """A non-blocking socket at the start of a new stream. Raises PeerUnreachable with libp2p's reason."""
    request = p2pd_pb2.Request(
        type=p2pd_pb2.Request.STREAM_OPEN,
        streamOpen=p2pd_pb2.StreamOpenRequest(
            peer=base58_decode(peer_id), proto=[protocol], timeout=_whole_seconds(timeout_s)
        ),
    )
    sock, _response = await _call(control, request, timeout_s)
    return sock


async def connect(control: Path, peer_id: str, maddrs: Sequence[str], *, timeout_s: float) -> None:
    """Connect to a peer by its addresses (without /p2p/…). Raises PeerUnreachable with libp2p's reason."""
    try:
        addrs = [Multiaddr(maddr).to_bytes() for maddr in maddrs]
    except ValueError as error:
        raise PeerUnreachable(f"no address of {peer_id} that libp2p takes: {error}") from error
    request = p2pd_pb2.Request(
        type=p2pd_pb2.Request.CONNECT,
        connect=p2pd_pb2.ConnectRequest(
            peer=base58_decode(peer_id),
            addrs=addrs,
            timeout=_whole_seconds(timeout_s),
        ),
    )
    sock, _response = await _call(control, request, timeout_s)
    sock.close()


async def list_peers(control: Path) -> dict[str, list[str]]:
    """The peers that libp2p is connected with: by id, the addresses of the other ends of its connections."""
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
    sock, response = await _call(control, request, CONNECT_S)
    sock.close()
    addresses: dict[str, list[str]] = {}
    for peer in response.peers:
        addresses.setdefault(base58_encode(peer.id), []).extend(str(Multiaddr(raw)) for raw in peer.addrs)
    return addresses


async def accept_streams(control: Path, protocol: str, listener: Path) -> None:
    """Have p2pd connect to the Unix socket `listener` for every stream that peers open on `protocol`."""
    request = p2pd_pb2.Request(
        type=p2pd_pb2.Request.STREAM_HANDLER,
        streamHandler=p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{listener}").to_bytes(), proto=[protocol], balanced=False
        ),
    )
    sock, _response = await _call(control, request, CONNECT_S)
    sock.close()


async def read_stream_info(sock: socket.socket) -> str:
    """The authenticated id of the peer at the other end of a stream just accepted. Raises ProtocolError."""
    info = p2pd_pb2.StreamInfo()
    try:
        async with asyncio.timeout(CONNECT_S):
            info.ParseFromString(await _read_message(sock, _MAX_STREAM_INFO_BYTES))
    except (OSError, DecodeError, TimeoutError) as error:
        raise ProtocolError(f"p2pd did not say which peer opened a stream: {error!r}") from error
    return base58_encode(info.peer)


async def _call(
    control: Path, request: p2pd_pb2.Request, timeout_s: float
) -> tuple[socket.socket, p2pd_pb2.Response]:
    loop = asyncio.get_running_loop()
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise PeerUnreachable(f"no descriptor left for p2pd: {error.strerror}") from error
    sock.setblocking(False)
    try:
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sock, str(control))
            body = request.SerializeToString()
            await loop.sock_sendall(sock, varint(len(body)) + body)
            response = p2pd_pb2.Response()
            response.ParseFromString(await _read_message(sock, _MAX_MESSAGE_BYTES))
        if response.type == p2pd_pb2.Response.ERROR:
            raise PeerUnreachable(response.error.msg)
        return sock, response
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise PeerUnreachable(f"no answer within {timeout_s:g} s") from error
        if isinstance(error, OSError):
            raise PeerUnreachable(f"p2pd is gone: {error}") from error
        raise


async def _read_message(sock: socket.socket, max_bytes: int) -> bytes:
    length = shift = 0
    while True:
        # Byte by byte: what comes after the message belongs to the stream.
        (byte,) = await receive_exactly(sock, 1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise ProtocolError("a message length of more than 4 bytes from p2pd")
    if length > max_bytes:
        raise ProtocolError(f"a message of {length} bytes from p2pd")
    return await receive_exactly(sock, length)


def _whole_seconds(timeout_s: float) -> int:
    return max(1, round(timeout_s))
