"""Stores every record at the initial peers too, and asks them directly, beside the nodes that the DHT chooses.

Whoever runs the nodes nearest to a key can hide what is stored under it. A node also keeps the records of its run that
it finds, since it may itself be somebody's initial peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID

from peers.errors import PeerUnreachable

if TYPE_CHECKING:
    from hivemind.dht.protocol import DHTProtocol

    from peers.net.dht.records import KeptRecords
    from peers.net.libp2p.transport import Transport

MAX_ASKED = 16

Found = Mapping[str, tuple[bytes, float]]
"""Packed values and when they expire, by subkey."""


class InitialRecords:
    """`silent`: initial peers that are connected and did not answer the last look-up."""

    def __init__(
        self, transport: Transport, protocol: DHTProtocol, kept: KeptRecords, peer_ids: Collection[str]
    ) -> None:
        self._transport, self._protocol, self._kept = transport, protocol, kept
        self._peer_ids = frozenset(list(peer_ids)[:MAX_ASKED])
        self.silent: frozenset[str] = frozenset()
        self.is_answered = not self._peer_ids
        """Whether any of them has ever answered."""

    async def find(self, key: str) -> Found:
        """What they have under this key, the newest of each subkey. Valid records are stored here too."""
        key_id = DHTID.generate(source=key)
        asked = await self._connected()
        answers = await asyncio.gather(
            *(self._protocol.call_find(PeerID.from_base58(peer_id), [key_id]) for peer_id in asked)
        )
        answered = {peer_id for peer_id, answer in zip(asked, answers, strict=True) if answer}
        self.silent = frozenset(asked) - answered
        self.is_answered = self.is_answered or bool(answered)
        newest: dict[str, tuple[bytes, float]] = {}
        for answer in filter(None, answers):
            found, _ = answer.get(key_id, (None, {}))
            if found is None or not isinstance(found.value, DictionaryDHTValue):
                continue
            for subkey, (value, expiry) in found.value.items():
                if isinstance(subkey, str) and expiry > newest.get(subkey, (b"", 0.0))[1]:
                    newest[subkey] = value, expiry
        for subkey, (value, expiry) in newest.items():
            self._keep(key_id, subkey, value, expiry)
        return newest

    async def store(self, key: str, subkey: str, value: bytes, expiry: float) -> bool:
        """Here and with them. True: one of them has taken it. `value` is packed."""
        key_id = DHTID.generate(source=key)
        self._keep(key_id, subkey, value, expiry)
        answers = await asyncio.gather(
            *(
                self._protocol.call_store(
                    PeerID.from_base58(peer_id), [key_id], [value], [expiry], subkeys=[subkey]
                )
                for peer_id in await self._connected()
            )
        )
        return any(answer and answer[0] for answer in answers)

    def _keep(self, key_id: DHTID, subkey: str, value: bytes, expiry: float) -> None:
        record = DHTRecord(key_id.to_bytes(), self._protocol.serializer.dumps(subkey), value, expiry)
        if self._kept.guards(record.key) and self._kept.validate(record):
            self._protocol.storage.store_subkey(key_id, subkey, value, expiry)

    async def _connected(self) -> list[str]:
        """Only those with a connection: dialling one that is gone would delay every look-up."""
        if not self._peer_ids:
            return []
        try:
            return sorted(self._peer_ids & await self._transport.connected_peers())
        except PeerUnreachable:
            return []
