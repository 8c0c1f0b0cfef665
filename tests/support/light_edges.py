"""What a light peer's process is told about its network before it becomes a peer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.errors import PeerUnreachable
from peers.transport import Transport

_CLONE_NEWNET = 0x40000000


def enter_namespace(name: str) -> None:
    """From now on this thread, and all that it starts, live in the network namespace of this name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{name}").open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def cut_off(peer_ids: Sequence[str]) -> None:
    """From now on libp2p reaches none of these, as if no packet went between them and us."""
    really_open, really_list = Transport.open, Transport.connected_peers

    async def open_stream(self: Transport, peer_id: str, protocol: str, **options: Any) -> Any:
        if peer_id in peer_ids:
            raise PeerUnreachable(f"no path to {peer_id}")
        return await really_open(self, peer_id, protocol, **options)

    async def connected_peers(self: Transport) -> set[str]:
        return await really_list(self) - set(peer_ids)

    Transport.open, Transport.connected_peers = open_stream, connected_peers  # type: ignore[method-assign]


def edges(*, namespace: str = "", cut_off_from: Sequence[str] = ()) -> None:
    if namespace:
        enter_namespace(namespace)
    if cut_off_from:
        cut_off(cut_off_from)
