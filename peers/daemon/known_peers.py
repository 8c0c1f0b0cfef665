"""The addresses of a run's peers, in a file: through them a coordinator that has moved finds the swarm again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from peers.net.dht.contacts import MAX_CONTACTS
from peers.net.dht.node import Dht
from peers.net.private_files import write_private
from peers.protocol.maddrs import is_maddr, parse_maddr
from peers.protocol.records import Announcement
from peers.timing import PROBE_S

log = logging.getLogger(__name__)


class KnownPeers:
    """At most MAX_CONTACTS peers, one address per line. Without a file that can be read or written, none are known
    after a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.maddrs_of = _read(path)
        """By peer id; each address ends with /p2p/<peer id>."""

    def update(self, here: Mapping[str, Announcement]) -> None:
        """Store the addresses of the peers that are here, and as long as there is room, those of earlier ones.

        Peers known for longer come first: whoever makes up many peers does not replace them.
        """
        known = self.maddrs_of
        found = {
            peer_id: tuple(f"{maddr.partition('/p2p/')[0]}/p2p/{peer_id}" for maddr in record.maddrs)
            for peer_id, record in sorted(here.items(), key=lambda item: (item[0] not in known, item[0]))
            if record.maddrs and record.state != "leaving"
        }
        kept = dict(list((found | known | found).items())[:MAX_CONTACTS])
        if kept == known:
            return
        lines = "".join(f"{maddr}\n" for maddrs in kept.values() for maddr in maddrs)
        try:
            write_private(self._path, lines.encode())
        except OSError as error:
            log.debug("cannot store the addresses of peers: %s", error)
            return
        self.maddrs_of = kept

    async def enter(self, dht: Dht) -> None:
        """Enter the DHT of these peers. The silent ones are dialled again later."""
        for peer_id, maddrs in self.maddrs_of.items():
            dht.remember(peer_id, maddrs)
        await asyncio.gather(
            *(
                dht.ping(peer_id, timeout_s=PROBE_S, maddrs=maddrs)
                for peer_id, maddrs in self.maddrs_of.items()
                if peer_id != dht.peer_id
            )
        )


def _read(path: Path) -> dict[str, tuple[str, ...]]:
    try:
        lines = path.read_text(errors="replace").split()
    except OSError:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for maddr in filter(is_maddr, lines):
        if peer_id := parse_maddr(maddr).peer_id:
            found[peer_id] = (*found.get(peer_id, ()), maddr)
    return dict(list(found.items())[:MAX_CONTACTS])
