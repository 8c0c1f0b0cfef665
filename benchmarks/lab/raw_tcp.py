"""Raw TCP from all peers to all, as a lower bound for a reduction of the same size.

A round has the volume of a reduce-scatter and an all-gather: each peer sends 2/N of the tensors' bytes to every other
peer, concurrently, over connections that stay open. A player of benchmarks/lab/players.py, with a thread for each
direction of each connection. The data is neither generated nor read.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.lab.lab import LabError
from benchmarks.lab.players import play

_PORT = 7000
_PIECE_BYTES = 1 << 20
_CONNECT_TIMEOUT_S = 20.0
_ROUND_TIMEOUT_S = 600.0


def connected(rank: int, addresses: list[str]) -> list[socket.socket]:
    """Connections to all other peers; the higher rank dials."""
    with socket.create_server((addresses[rank], _PORT), backlog=len(addresses)) as server:
        server.settimeout(_CONNECT_TIMEOUT_S)
        socks = [_dialled(address) for address in addresses[:rank]]
        for _ in addresses[rank + 1 :]:
            socks.append(server.accept()[0])
    for sock in socks:
        sock.settimeout(_ROUND_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return socks


def _dialled(address: str) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((address, _PORT), timeout=_CONNECT_TIMEOUT_S)
        if time.monotonic() > deadline:
            raise LabError(f"{address} does not listen")
        time.sleep(0.02)


def send(sock: socket.socket, num_bytes: int, buffer: memoryview) -> None:
    for start in range(0, num_bytes, len(buffer)):
        sock.sendall(buffer[: min(len(buffer), num_bytes - start)])


def receive(sock: socket.socket, num_bytes: int, buffer: memoryview) -> None:
    left = num_bytes
    while left:
        got = sock.recv_into(buffer, min(left, len(buffer)))
        if not got:
            raise ConnectionError("the other end is gone")
        left -= got


def main(rank: int, addresses: list[str]) -> None:
    socks = connected(rank, addresses)
    buffers = [memoryview(bytearray(_PIECE_BYTES)) for _ in range(2 * len(socks))]
    pool = ThreadPoolExecutor(2 * len(socks))

    def take_part(tensor_bytes: int) -> tuple[float, float]:
        num_bytes, started_at = 2 * tensor_bytes // len(addresses), time.monotonic()
        jobs = [pool.submit(send, sock, num_bytes, buffers[i]) for i, sock in enumerate(socks)]
        jobs += [pool.submit(receive, sock, num_bytes, buffers[-1 - i]) for i, sock in enumerate(socks)]
        for job in jobs:
            job.result()
        return started_at, time.monotonic()

    play(take_part)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","))
