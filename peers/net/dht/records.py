"""Which values a DHT node stores for others and accepts from them: under known keys those that pass the key's check.

Hivemind's nodes let anybody replace any value by one that expires later, so a stranger could make every peer of a run
invisible. Our nodes neither store such values nor accept them from other nodes.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from msgspec.msgpack import Decoder

from peers.errors import PeerUnreachable, ProtocolError
from peers.net.rate_limit import RateLimit
from peers.protocol.records import MAX_RECORD_BYTES
from peers.protocol.wire import decode
from peers.timing import ANSWER_S, RECORD_TTL_S

if TYPE_CHECKING:
    from hivemind.dht.protocol import DHTProtocol

    from peers.net.libp2p.transport import Transport

Found = Mapping[str, tuple[bytes, float]]
"""Packed values and when they expire, by subkey."""


class Check(Protocol):
    """Whether to accept a value: to store it here, or (`is_found`) to return it to a reader, who checks it further.

    `expiry` is what the other node has sent, perhaps NaN: write the check so that it is true for what is allowed."""

    def __call__(self, subkey: str, value: bytes, *, expiry: float, is_found: bool) -> bool: ...


MAX_OTHER_PER_S = 400.0
MAX_OTHER_AT_ONCE = 1000
MAX_OTHER_TTL_S = 2 * RECORD_TTL_S + ANSWER_S
MAX_OTHER_BYTES = 4200
"""Limits for values under keys without a check here: they take some 80 MB of memory at most."""
_MAX_SUBKEY_BYTES = 256
_SUBKEY, _VALUE = Decoder(str), Decoder(bytes)
_HEAD_BYTES = 8
"""What msgpack adds to a value of ours in Hivemind's storage."""
MAX_ASKED = 16
"""Initial peers that are asked directly."""

_is_finding: ContextVar[bool] = ContextVar("is_finding", default=False)

log = logging.getLogger(__name__)


class _Storage(DHTLocalStorage):
    """Hands out copies: Hivemind adds to a stored dictionary whatever a look-up finds, and asks no validator.

    As in Hivemind, a value is replaced only by one that expires later."""

    def get(self, key: DHTID) -> Any:
        item = super().get(key)
        if item is None or not isinstance(item.value, DictionaryDHTValue):
            return item
        # Microseconds for a thousand records, since every answer to a look-up takes a copy.
        copied = copy.copy(item.value)
        copied.data, copied.key_to_heap = dict(copied.data), dict(copied.key_to_heap)
        copied.expiration_heap = list(copied.expiration_heap)
        return type(item)(copied, item.expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        item = super().get(key)
        if item is None or not isinstance(item.value, DictionaryDHTValue):
            return super().store_subkey(key, subkey, value, expiration_time)
        kept = item.value.data.get(subkey)
        if kept is not None and kept.expiration_time > time.time() + MAX_OTHER_TTL_S:
            # From before this machine's clock was set back: readers refuse it.
            del item.value[subkey]
        if expiration_time > item.value.latest_expiration_time:
            self.store(key, item.value, expiration_time)
        return item.value.store(subkey, value, expiration_time)


class KeptRecords(RecordValidatorBase):
    """Hivemind calls `validate` for every value before it stores it."""

    def __init__(self) -> None:
        self._checks: dict[bytes, Check] = {}
        self._others = RateLimit(MAX_OTHER_PER_S, MAX_OTHER_AT_ONCE)

    def keep(self, key: str, check: Check) -> None:
        """From now on, keep under `key` only what this check lets through."""
        self._checks[DHTID.generate(source=key).to_bytes()] = check

    def guards(self, key: bytes) -> bool:
        """Whether there is a check for this key (its DHT id)."""
        return key in self._checks

    def guard(self, protocol: DHTProtocol) -> None:
        """From now on, drop each value returned by another node that fails the check of its key, and answers that
        cannot be checked, and do not store what was only found. What is stored so far is forgotten.

        Hivemind itself drops everything that a node returns if one value is invalid.
        """
        find = protocol.call_find

        async def call_find(peer: Any, keys: Collection[DHTID]) -> Any:
            token = _is_finding.set(True)
            try:
                found = await find(peer, keys)
            finally:
                _is_finding.reset(token)
            try:
                return {key: self._sifted(key, item) for key, item in found.items()} if found else found
            # A node can send anything, and an error here would break off Hivemind's look-up at all nodes.
            except Exception as error:  # noqa: BLE001
                log.debug("passed over the answer of %s: %r", peer, error)
                return None

        protocol.call_find, protocol.storage = call_find, _Storage()

    def validate(self, record: DHTRecord) -> bool:
        if _is_finding.get():
            return True
        if (check := self._checks.get(record.key)) is None:
            return self._has_room(record)
        try:
            subkey = decode(_SUBKEY, record.subkey, _MAX_SUBKEY_BYTES)
        except ProtocolError:
            return False
        return _passes(check, subkey, record.value, record.expiration_time, is_found=False)

    def _has_room(self, record: DHTRecord) -> bool:
        """Whether to store a value under a key without a check, within limits that bound the number of such values."""
        is_small = len(record.value) <= MAX_OTHER_BYTES and len(record.subkey) <= _MAX_SUBKEY_BYTES
        is_brief = record.expiration_time <= time.time() + MAX_OTHER_TTL_S
        return is_small and is_brief and self._others.take(time.monotonic())

    def _sifted(self, key: DHTID, item: tuple[Any, Any]) -> tuple[Any, Any]:
        """What was found for a key, and the nearest nodes; values that fail the key's check are left out."""
        found, nearest = item
        if found is None or not isinstance(found.value, DictionaryDHTValue):
            # A value without subkeys would replace all values with subkeys.
            return None, nearest
        check = self._checks.get(key.to_bytes(), _is_brief)
        sifted = DictionaryDHTValue()
        # Not `items()`, which applies a limit of the sender's choice.
        for subkey, (value, expiry) in found.value.data.items():
            if _passes(check, subkey, value, expiry, is_found=True):
                sifted.store(subkey, value, expiry)
        return (type(found)(sifted, sifted.latest_expiration_time) if sifted else None), nearest


def _is_brief(subkey: str, value: bytes, *, expiry: float, is_found: bool) -> bool:
    """The check of found values under keys without a check here."""
    return expiry <= time.time() + MAX_OTHER_TTL_S


def _passes(check: Check, subkey: Any, packed: Any, expiry: float, *, is_found: bool) -> bool:
    value = value_in(packed)
    if value is None or not isinstance(subkey, str):
        return False
    is_kept = check(subkey, value, expiry=expiry, is_found=is_found)
    if not is_kept:
        log.debug("passed over the value of %.80r", subkey)
    return is_kept


def value_in(packed: Any) -> bytes | None:
    """The value in one of our records as stored; None if it is not one."""
    try:
        return decode(_VALUE, packed, MAX_RECORD_BYTES + _HEAD_BYTES)
    except (ProtocolError, TypeError):
        return None


class InitialRecords:
    """Stores every record at the initial peers too, and asks them directly, in addition to the nodes that the DHT
    chooses: whoever runs the nodes nearest to a key can hide what is stored under it. Records of the run that are found
    are stored here as well, since this node may itself be somebody's initial peer.

    `silent`: initial peers that are connected and did not answer the last look-up."""

    def __init__(
        self, transport: Transport, protocol: DHTProtocol, kept: KeptRecords, peer_ids: Collection[str]
    ) -> None:
        self._transport, self._protocol, self._kept = transport, protocol, kept
        self._peer_ids = frozenset(list(peer_ids)[:MAX_ASKED])
        self.silent: frozenset[str] = frozenset()
        self.is_answered = not self._peer_ids
        """Whether any initial peer has ever answered; True if there are none."""

    async def find(self, key: str) -> Found:
        """What the initial peers have under this key, the newest of each subkey. Valid records are stored here too."""
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
        """Store here and at the initial peers. Returns whether one of them took it. `value` is packed."""
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
        """The initial peers with an open connection: dialling one that is gone would delay every look-up."""
        if not self._peer_ids:
            return []
        try:
            return sorted(self._peer_ids & await self._transport.connected_peers())
        except PeerUnreachable:
            return []
