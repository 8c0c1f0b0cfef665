"""Raw TCP from everybody to everybody: what the same bytes cost with nothing but a socket around them.

A round is the volume of a reduce-scatter and an all-gather: each peer sends every other 2/N of the tensors' bytes, all
at once, over connections that stay open. One process a peer, a thread for each direction of each connection, buffers
that are neither filled nor looked at.

    python -m benchmarks.lab.raw_tcp RANK ADDRESS,ADDRESS,...      rounds are asked for on stdin: the bytes to each
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.lab.lab import Lab, LabError

_PORT = 7000
_PIECE_BYTES = 1 << 20
_CONNECT_TIMEOUT_S = 20.0
_ROUND_TIMEOUT_S = 600.0
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class RawRound:
    """One exchange."""

    seconds: float
    """From the first peer's first byte to the last peer's last."""
    sent_bytes: int
    """By each peer."""


class RawTcp:
    """One process behind each of the first `num_peers` links, connected to all others."""

    def __init__(self, lab: Lab, num_peers: int) -> None:
        addresses = ",".join(lab.address(peer) for peer in range(num_peers))
        self._processes = [
            lab.popen(
                rank,
                [sys.executable, "-m", "benchmarks.lab.raw_tcp", str(rank), addresses],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(num_peers)
        ]
        for process in self._processes:
            if _line(process, _CONNECT_TIMEOUT_S) != "ready":
                raise LabError("raw TCP could not connect")

    def __enter__(self) -> RawTcp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def round(self, tensor_bytes: int) -> RawRound:
        """Exchange what averaging tensors of so many bytes takes."""
        num_peers = len(self._processes)
        bytes_to_each = 2 * tensor_bytes // num_peers
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{bytes_to_each}\n".encode())
            process.stdin.flush()
        spans = [json.loads(_line(process, _ROUND_TIMEOUT_S)) for process in self._processes]
        return RawRound(
            seconds=max(end for _, end in spans) - min(start for start, _ in spans),
            sent_bytes=bytes_to_each * (num_peers - 1),
        )

    def close(self) -> None:
        """Repeating it is safe."""
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait(_CONNECT_TIMEOUT_S)
            process.stdout.close()


def _line(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        raise LabError(f"raw TCP was silent for {timeout_s:g} s")
    return process.stdout.readline().decode().strip()


def connected(rank: int, addresses: list[str]) -> list[socket.socket]:
    """A connection to every other peer; the higher rank dials."""
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
    print("ready", flush=True)
    for line in sys.stdin:
        num_bytes, started_at = int(line), time.monotonic()
        jobs = [pool.submit(send, sock, num_bytes, buffers[i]) for i, sock in enumerate(socks)]
        jobs += [pool.submit(receive, sock, num_bytes, buffers[-1 - i]) for i, sock in enumerate(socks)]
        for job in jobs:
            job.result()
        print(json.dumps([started_at, time.monotonic()]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","))
