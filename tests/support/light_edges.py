"""What a light peer's process is told about its network before it becomes a peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.errors import PeerUnreachable
from peers.net.libp2p.transport import Transport
from tests.support import namespaces


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
        namespaces.enter(namespaces.path_of(namespace))
    if cut_off_from:
        cut_off(cut_off_from)
