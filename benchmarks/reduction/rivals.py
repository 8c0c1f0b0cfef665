"""The other contenders, each set up as its documentation says, and plain TCP without arithmetic as a lower bound."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, distributed

from benchmarks.reduction import vectors
from benchmarks.reduction.seats import Seat

_BUFFER_BYTES = 1 << 20
_HIVEMIND_TIMEOUT_S = 300.0
_POLL_S = 0.01


@dataclass(frozen=True)
class RawTcp:
    """Sends and receives the fp32 volume of a reduce-scatter and an all-gather, without using the data."""

    name: str = "raw TCP"

    def missing(self) -> str:
        return ""

    def take_part(self, seat: Seat) -> None:
        result = torch.empty(seat.numel)
        with socket.create_server(("127.0.0.1", 0), backlog=seat.num_peers) as listener:
            addresses = seat.meet(listener.getsockname())
            send = {other: socket.create_connection(addresses[other]) for other in seat.others}
            for sock in send.values():
                sock.sendall(bytes([seat.index]))
            accepted = [listener.accept()[0] for _ in seat.others]
        receive = {sock.recv(1)[0]: sock for sock in accepted}
        num_bytes = 2 * 4 * seat.numel // seat.num_peers
        for _ in seat.rounds(result, 4 * seat.numel):
            _in_threads(
                [lambda sock=sock: _send(sock, result, num_bytes) for sock in send.values()]
                + [lambda sock=sock: _receive(sock, num_bytes) for sock in receive.values()]
            )
        for sock in (*send.values(), *receive.values()):
            sock.close()


def _send(sock: socket.socket, vector: Tensor, num_bytes: int) -> None:
    source = memoryview(vector.numpy()).cast("B")
    for start in range(0, num_bytes, _BUFFER_BYTES):
        at = start % (len(source) - _BUFFER_BYTES + 1)
        sock.sendall(source[at : at + min(_BUFFER_BYTES, num_bytes - start)])


def _receive(sock: socket.socket, num_bytes: int) -> None:
    buffer = bytearray(_BUFFER_BYTES)
    while num_bytes:
        num_bytes -= sock.recv_into(buffer, min(_BUFFER_BYTES, num_bytes))


def _in_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True)
class Gloo:
    """torch.distributed's all_reduce on CPU tensors."""

    name: str = "gloo"

    def missing(self) -> str:
        return "" if distributed.is_gloo_available() else "this torch has no gloo"

    def take_part(self, seat: Seat) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = distributed.FileStore(str(seat.directory / "gloo"), seat.num_peers)
        distributed.init_process_group("gloo", store=store, rank=seat.index, world_size=seat.num_peers)
        delta = vectors.delta(seat.index, seat.numel)
        result = torch.empty_like(delta)
        for _ in seat.rounds(result, 8 * seat.numel, lambda: result.copy_(delta)):
            distributed.all_reduce(result)
            result.div_(seat.num_peers)
        distributed.destroy_process_group()


@dataclass(frozen=True)
class Hivemind:
    """Hivemind's averager, timed from when its group is complete: its matchmaking is not counted."""

    compression: str

    @property
    def name(self) -> str:
        return f"hivemind {self.compression}"

    def missing(self) -> str:
        if self.compression == "8-bit" and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
            return f"its 8-bit codecs need numpy<2.4, this is {numpy.__version__}"
        return ""

    def take_part(self, seat: Seat) -> None:
        import hivemind

        # Hivemind's objects cannot be pickled, so it must start its processes by fork.
        multiprocessing.set_start_method("fork", force=True)
        dht, result = self._dht(seat), torch.empty(seat.numel)
        delta = vectors.delta(seat.index, seat.numel)
        averager = hivemind.averaging.DecentralizedAverager(
            [result],
            dht,
            start=True,
            prefix="benchmark",
            target_group_size=seat.num_peers,
            min_group_size=seat.num_peers,
            min_matchmaking_time=2.0,
            request_timeout=1.0,
            allow_state_sharing=False,
            compression=self._codec(),
        )
        control = None

        def prepare() -> None:
            nonlocal control
            # The averager has moved `result` to memory that it shares with its own process.
            result.copy_(delta)
            seat.meet()
            control = averager.step(
                wait=False, require_trigger=True, allow_retries=False, timeout=_HIVEMIND_TIMEOUT_S
            )
            self._await_group(control)

        for _ in seat.rounds(result, 8 * seat.numel, prepare):
            assert control is not None
            control.allow_allreduce()
            if len(control.result(_HIVEMIND_TIMEOUT_S)) != seat.num_peers:
                raise RuntimeError("it averaged in a smaller group")
        averager.shutdown()
        dht.shutdown()

    @staticmethod
    def _dht(seat: Seat) -> Any:
        import hivemind

        quiet = {"nat_port_map": False, "auto_nat": False, "use_relay": False}
        options = {"start": True, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"], **quiet}
        first = hivemind.DHT(**options) if seat.index == 0 else None
        initial_peers = seat.meet([str(maddr) for maddr in first.get_visible_maddrs()] if first else None)[0]
        return first or hivemind.DHT(initial_peers=initial_peers, **options)

    @staticmethod
    def _await_group(control: Any) -> None:
        from hivemind.averaging.control import AveragingStage

        deadline = time.monotonic() + _HIVEMIND_TIMEOUT_S
        while control.stage is not AveragingStage.AWAITING_TRIGGER:
            if control.done():
                control.result()
            if time.monotonic() > deadline:
                raise TimeoutError("it formed no group")
            time.sleep(_POLL_S)

    def _codec(self) -> Any:
        from hivemind import compression

        codecs = {
            "none": compression.NoCompression,
            "fp16": compression.Float16Compression,
            "8-bit": compression.Uniform8BitQuantization,
        }
        return codecs[self.compression]()
