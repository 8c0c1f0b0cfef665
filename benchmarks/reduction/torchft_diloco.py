"""torchft's DiLoCo over its gloo process group, set up as in its own tests."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

from benchmarks.reduction import vectors
from benchmarks.reduction.seats import Seat

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class TorchftDiloco:
    """One outer step with learning rate 1: quorum, average, vote, and outer update."""

    name: str = "torchft DiLoCo"

    def missing(self) -> str:
        return "" if importlib.util.find_spec("torchft") else "torchft is not installed"

    def take_part(self, seat: Seat) -> None:
        from torchft.local_sgd import DiLoCo

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        lighthouse = _lighthouse(seat) if seat.index == 0 else None
        address = seat.meet(lighthouse.address() if lighthouse else None)[0]
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(seat.numel))
        manager = _manager(seat, address, store, model)
        delta, base = vectors.delta(seat.index, seat.numel), torch.empty(seat.numel)
        result = torch.empty(seat.numel)
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)

        def train() -> None:
            base.copy_(model.weight.data)
            model.weight.data.sub_(delta)

        def look() -> None:
            torch.sub(base, model.weight.data, out=result)

        tensor_bytes = 4 * 4 * seat.numel
        with DiLoCo(manager, [model], inner, outer, sync_every=1, pin_memory=False):
            for _ in seat.rounds(result, tensor_bytes, prepare=train, conclude=look):
                inner.step()
        seat.meet()
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


def _lighthouse(seat: Seat) -> Any:
    from torchft.coordination import LighthouseServer

    return LighthouseServer(bind="127.0.0.1:0", min_replicas=seat.num_peers, join_timeout_ms=100)


def _manager(seat: Seat, lighthouse: str, store: distributed.TCPStore, model: nn.Module) -> Any:
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    return Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        min_replica_size=seat.num_peers,
        use_async_quorum=False,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        replica_id=str(seat.index),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        init_sync=False,
        connect_timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        timeout=_TIMEOUT,
    )
