"""The kernel's counters of a TCP connection: struct tcp_info of linux/tcp.h, as it is since Linux 4.6.

Raises OSError or struct.error for sockets of another kind.
"""

from __future__ import annotations

import socket
import struct

from peers.system import tcp_info

_BYTES_ACKED = struct.Struct("120xQ")
_BYTES_RECEIVED = struct.Struct("128xQ")
_MIN_RTT_US = struct.Struct("148xI")


def bytes_acked(sock: socket.socket) -> int:
    """Bytes sent that the other end has acknowledged."""
    return _field(sock, _BYTES_ACKED)


def bytes_received(sock: socket.socket) -> int:
    return _field(sock, _BYTES_RECEIVED)


def min_round_trip_s(sock: socket.socket) -> float:
    """The shortest round trip of the last minutes, without queueing; above an hour: none has been measured."""
    return 1e-6 * _field(sock, _MIN_RTT_US)


def _field(sock: socket.socket, field: struct.Struct) -> int:
    value: int = field.unpack(tcp_info(sock, field.size))[0]
    return value
